"""Causal models of transformers over engine-core's cache, scheduler and sampler."""
