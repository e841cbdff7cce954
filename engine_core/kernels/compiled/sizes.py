"""Sizes of what :mod:`engine_core.kernels.compiled.vectors` computes at once."""

from __future__ import annotations

#: Numbers of a vector.
LANES = 8
#: Tokens whose products with queries are computed at once.
DOTS = 4
