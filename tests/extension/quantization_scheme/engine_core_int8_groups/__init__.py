"""A quantisation scheme in a package of its own: 8 bits, a scale for each group of inputs."""
