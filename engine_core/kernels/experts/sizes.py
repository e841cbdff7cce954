"""Sizes for which experts have kernels of few tokens; asked before there is a GPU, or Triton."""

from __future__ import annotations

# Experts of a token, and of a layer, that the kernel of the choice keeps in registers.
MOST_CHOSEN, MOST_EXPERTS = 32, 1024
# Experts whose scores one warp looks through.
WARP_EXPERTS = 256
# Experts of a token whose tiles one program has in registers.
_MOST_PLACES = 16
# Tokens whose router is a kernel of ours, and bytes of its matrix that a program has in registers.
_MOST_ROUTED, ROUTER_BYTES = 16, 8192


def are_few(tokens: int, top_k: int, num_experts: int) -> bool:
    """Whether so few tokens hardly ever share an expert; its weight is read for each."""
    return top_k <= _MOST_PLACES and 0 < tokens * top_k <= max(top_k, num_experts // 4)


def fits_route(tokens: int, num_experts: int, hidden: int, itemsize: int) -> bool:
    """Whether a router's product and the choice are one kernel.

    The matrix, of numbers of ``itemsize`` bytes, is read again for each token.
    """
    row_bytes = (1 << (hidden - 1).bit_length()) * itemsize
    fits = num_experts <= WARP_EXPERTS and row_bytes <= ROUTER_BYTES
    return fits and 0 < tokens <= _MOST_ROUTED
