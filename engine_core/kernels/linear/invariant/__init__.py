"""Linears on a GPU whose rows do not depend on how many there are."""
