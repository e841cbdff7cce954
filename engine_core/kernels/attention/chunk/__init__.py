"""Attention of a prompt's tokens, compiled for a CPU."""
