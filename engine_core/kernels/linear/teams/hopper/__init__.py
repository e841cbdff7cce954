"""The kernel for Hopper GPUs."""
