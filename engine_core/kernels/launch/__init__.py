"""Launch helpers that the GPU kernels share."""
