"""Sizes of what :mod:`engine_core.kernels.compiled.vectors` computes at once."""

from __future__ import annotations

#: Numbers of a vector.
LANES = 8
#: Tokens whose products with queries are computed at once.
DOTS = 4
#: Columns of a panel, and rows, that are multiplied at once. Their sums fill 12 of the 16 registers
#: of AVX2.
PANEL = 2 * LANES
ROWS = 6
