"""The chain of linears on Hopper."""
