"""Linears of few rows by 4-bit integers with scales of groups, on Hopper."""
