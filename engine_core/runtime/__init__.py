"""Runs steps: the model, its cache tensors, its sampler, and how they are loaded."""
