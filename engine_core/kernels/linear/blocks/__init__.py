"""Linears of few rows by the blocks of a GGUF file."""
