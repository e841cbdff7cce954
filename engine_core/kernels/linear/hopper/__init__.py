"""The gated linear for Hopper GPUs."""
