"""Llama and models of its shape for engine-core."""
