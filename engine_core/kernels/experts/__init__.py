"""Mixtures of experts: each token's choice of experts, and the gated MLPs of those chosen.

No shape depends on the choice, and nothing of it is read on the host of a GPU, so that steps may
be captured. On a CPU the time follows the experts that tokens chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from engine_core.kernels.experts import cpu, reference
from engine_core.kernels.gpu import gpu_of
from engine_core.kernels.linear import Activation, linear
from engine_core.kernels.linear.coded import CodedWeight

__all__ = ["Matrix", "Routing", "choose_experts", "route", "run_experts"]

# The most experts of a token, and of a layer, that the kernel of the choice keeps in registers.
_MOST_CHOSEN, _MOST_EXPERTS = 32, 1024
Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule by which tokens choose experts.

    Attributes:
        top_k: experts of a token.
        scoring: what makes scores of logits: "softmax" over all experts, or "sigmoid" of each.
        renormalize: whether a token's weights are divided by their sum. With softmax this is a
            softmax over the chosen experts' logits alone.
        groups: groups of neighbouring experts, of which only ``top_groups`` are chosen from.
        top_groups: see ``groups``.
        group_scores: how many of a group's best scores make up the group's: 1 (DeepSeek-V2), or 2,
            added up (DeepSeek-V3).
        scale: multiplies the weights.
    """

    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = False
    groups: int = 1
    top_groups: int = 1
    group_scores: int = 1
    scale: float = 1.0


class Matrix(Protocol):
    """A packed matrix of one expert, such as of int8 codes."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x [..., in]`` to ``[..., out]``."""


def choose_experts(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each token's experts, best first, and their weights.

    Of equal scores the expert with the lower number comes first.

    Args:
        logits: ``[T, E]``.
        routing: the rule.
        bias: ``[E]``, added to the scores by which experts are chosen, not to the weights.
        slots: ``[T]``; a token whose number is negative is padding and chooses none: -1.

    Returns:
        ids ``[T, top_k]`` int32, and weights ``[T, top_k]`` float32.
    """
    fits = routing.top_k <= _MOST_CHOSEN and logits.shape[1] <= _MOST_EXPERTS
    if fits and gpu_of(logits.device) is not None:
        from engine_core.kernels.experts import triton

        return triton.choose_experts(logits, routing, bias, slots)
    return reference.choose_experts(logits, routing, bias, slots)


def route(
    x: Tensor,
    matrix: Tensor,
    matrix_bias: Tensor | None,
    routing: Routing,
    bias: Tensor | None = None,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each token's experts by a router's linear: :func:`choose_experts` of its product.

    The product is rounded to the matrix's dtype. For a few tokens on a GPU this is one kernel.

    Args:
        x: ``[T, H]``.
        matrix: ``[E, H]``, contiguous; perhaps float32 where x has 16 bits.
        matrix_bias: ``[E]`` of the linear, or None.
        routing: the rule.
        bias: as :func:`choose_experts` takes it, and so ``slots``.
        slots: see ``bias``.

    Returns:
        ids ``[T, top_k]`` int32, and weights ``[T, top_k]`` float32.
    """
    if routing.top_k <= _MOST_CHOSEN and gpu_of(x.device) is not None:
        from engine_core.kernels.experts import triton

        if triton.fits_route(len(x), matrix):
            return triton.route(x, matrix, matrix_bias, routing, bias, slots)
    return choose_experts(linear(x.to(matrix.dtype), matrix, matrix_bias), routing, bias, slots)


def run_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor | CodedWeight | Sequence[Matrix],
    down: Tensor | CodedWeight | Sequence[Matrix],
    activation: Activation,
    *,
    deterministic: bool = False,
) -> Tensor:
    """The weighted sum of each token's experts: ``down(act(gate(x)) * up(x))``.

    Args:
        x: ``[T, H]``.
        ids: ``[T, k]`` int32; an id that is none of 0 to E - 1 adds nothing, as of padding, or of
            an expert that another rank has.
        weights: ``[T, k]`` float32.
        gate_up: the experts' gates and ups, ``[E, 2 I, H]``; of codes ``[E * 2 I, H]``; on a CPU
            perhaps a packed matrix for each.
        down: ``[E, H, I]``, in the same forms.
        activation: of the gate.
        deterministic: whether a token's result must be the same, bit for bit, whatever else is in
            x. Only on a GPU with kernels.

    Returns:
        ``[T, H]``, x's dtype; added up in float32.

    Raises:
        ValueError: ``deterministic`` where there is no such kernel.
    """
    if deterministic and gpu_of(x.device) is None and not x.is_meta:
        raise ValueError(
            f"run_experts: nothing is batch-invariant on {x.device}; leave deterministic out, or "
            "run on a GPU with kernels"
        )
    if not x.is_cuda:
        return cpu.run_experts(x, ids, weights, gate_up, down, activation)
    matrices: Any = (gate_up, down)
    if gpu_of(x.device) is not None:
        from engine_core.kernels.experts import triton

        return triton.run_experts(
            x, ids, weights, matrices[0], matrices[1], activation, deterministic
        )
    return reference.run_experts(x, ids, weights, matrices[0], matrices[1], activation)
