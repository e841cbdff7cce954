"""What kernels in Gluon for Hopper GPUs share about their launch."""
