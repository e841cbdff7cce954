"""Mamba-2 for engine-core: a model whose layers keep a state in the cache, not keys and values."""
