"""What the GPU kernels for attention share."""
