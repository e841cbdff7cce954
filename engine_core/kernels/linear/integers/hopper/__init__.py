"""Linears of few rows by the blocks of a GGUF file whose scales are in two layers, on Hopper."""
