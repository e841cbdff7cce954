"""Parts that the GPU kernels for attention share."""
