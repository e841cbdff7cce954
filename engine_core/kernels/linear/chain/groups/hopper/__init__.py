"""A chain of linears by 4-bit codes on Hopper."""
