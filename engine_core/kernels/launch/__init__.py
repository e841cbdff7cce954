"""What the GPU kernels share about their launch."""
