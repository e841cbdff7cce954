"""Linears of many rows over parts of K, whose sums are left to the norm that follows."""
