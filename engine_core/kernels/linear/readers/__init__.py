"""Ways from a weight in memory to the tiles that a linear multiplies by."""
