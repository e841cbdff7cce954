"""Linears of a few rows that become integers, by integers of few bits."""
