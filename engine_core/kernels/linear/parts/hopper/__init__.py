"""Linears over parts of K for Hopper GPUs."""
