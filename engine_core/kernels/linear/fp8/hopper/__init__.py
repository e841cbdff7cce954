"""Products of rows in 8-bit floats by 8-bit floats, on Hopper."""
