"""Linears of few rows by 4-bit codes, by warp groups that share their rows."""
