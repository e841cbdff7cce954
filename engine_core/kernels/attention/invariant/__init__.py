"""Attention on a GPU in which a token does not depend on what else is computed."""
