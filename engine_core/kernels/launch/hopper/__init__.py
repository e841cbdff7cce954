"""Launch helpers of the Gluon kernels for Hopper GPUs."""
