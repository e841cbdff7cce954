"""Mixtures of experts: each token's choice of experts, and the gated MLPs of those chosen.

No shape depends on the choice, and nothing of it is read on the host of a GPU, so that steps may
be captured. On a CPU the time follows the experts that tokens chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from engine_core.kernels.experts import cpu, reference, sizes
from engine_core.kernels.gpu import GPU, gpu_of
from engine_core.kernels.linear import Activation, DeferredRMSNorm, linear
from engine_core.kernels.linear.coded import CodedWeight
from engine_core.kernels.linear.reference import add_deferred
from engine_core.kernels.norm import layer_norm, rms_norm

__all__ = [
    "Matrix",
    "Routing",
    "are_few_tokens",
    "choose_experts",
    "fits_route",
    "route",
    "run_experts",
    "run_experts_add",
    "run_experts_add_norm",
]

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
    fits = routing.top_k <= sizes.MOST_CHOSEN and logits.shape[1] <= sizes.MOST_EXPERTS
    if fits and gpu_of(logits.device) is not None:
        from engine_core.kernels.experts import triton

        return triton.choose_experts(logits, routing, bias, slots)
    return reference.choose_experts(logits, routing, bias, slots)


def fits_route(tokens: int, matrix: Tensor, routing: Routing, gpu: GPU | None) -> bool:
    """Whether :func:`route` is one kernel, which may divide too.

    ``matrix`` is ``[E, H]``, perhaps on meta.
    """
    shape = (tokens, *matrix.shape, matrix.itemsize)
    return gpu is not None and routing.top_k <= sizes.MOST_CHOSEN and sizes.fits_route(*shape)


def are_few_tokens(tokens: int, top_k: int, num_experts: int, gpu: GPU | None) -> bool:
    """Whether :func:`run_experts` of numbers has kernels of few tokens, which may divide too."""
    return gpu is not None and sizes.are_few(tokens, top_k, num_experts)


def route(
    x: Tensor | DeferredRMSNorm,
    matrix: Tensor,
    matrix_bias: Tensor | None,
    routing: Routing,
    bias: Tensor | None = None,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each token's experts by a router's linear: :func:`choose_experts` of its product.

    The product is rounded to the matrix's dtype. For a few tokens on a GPU this is one kernel.

    Args:
        x: ``[T, H]``, or what an RMSNorm gave without its division.
        matrix: ``[E, H]``, contiguous; perhaps float32 where x has 16 bits.
        matrix_bias: ``[E]`` of the linear, or None.
        routing: the rule.
        bias: as :func:`choose_experts` takes it, and so ``slots``.
        slots: see ``bias``.

    Returns:
        ids ``[T, top_k]`` int32, and weights ``[T, top_k]`` float32.
    """
    values = x if isinstance(x, Tensor) else x.values
    if fits_route(len(values), matrix, routing, gpu_of(values.device)):
        from engine_core.kernels.experts import triton

        return triton.route(x, matrix, matrix_bias, routing, bias, slots)
    plain = x if isinstance(x, Tensor) else x.divided()
    logits = linear(plain.to(matrix.dtype), matrix, matrix_bias)
    return choose_experts(logits, routing, bias, slots)


def run_experts(
    x: Tensor | DeferredRMSNorm,
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
        x: ``[T, H]``, or what an RMSNorm gave without its division.
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
    values = x if isinstance(x, Tensor) else x.values
    gpu = gpu_of(values.device)
    if deterministic and gpu is None and not values.is_meta:
        raise ValueError(
            f"run_experts: nothing is batch-invariant on {values.device}; leave deterministic out, "
            "or run on a GPU with kernels"
        )
    if deterministic or not _divides(x, ids, gate_up, down):
        x = x if isinstance(x, Tensor) else x.divided()
    first: Any = gate_up
    second: Any = down
    if gpu is not None:
        from engine_core.kernels.experts import triton

        return triton.run_experts(x, ids, weights, first, second, activation, deterministic)
    assert isinstance(x, Tensor), "only kernels make up for a division"
    if not x.is_cuda:
        return cpu.run_experts(x, ids, weights, gate_up, down, activation)
    return reference.run_experts(x, ids, weights, first, second, activation)


def run_experts_add(
    x: Tensor | DeferredRMSNorm,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor | CodedWeight | Sequence[Matrix],
    down: Tensor | CodedWeight | Sequence[Matrix],
    activation: Activation,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    norm_offset: float = 0.0,
) -> tuple[DeferredRMSNorm, Tensor]:
    """Experts, the addition of the residual and the RMSNorm that follow them.

    For few tokens on a GPU the second product ends with both. The sum of the experts and the sum
    with the residual are each rounded; the norm's result is rounded once, and again when a linear
    has made up for the division.

    Args:
        x: as of :func:`run_experts`, and so the next five.
        ids: see ``x``.
        weights: see ``x``.
        gate_up: see ``x``.
        down: see ``x``.
        activation: see ``x``.
        residual: ``[T, H]``, x's dtype.
        norm_weight: ``[H]``, of the RMSNorm.
        eps: of the RMSNorm.
        norm_offset: added to its weight.

    Returns:
        The norm of the sum with the residual without its division, and that sum ``[T, H]``.
    """
    if _divides(x, ids, gate_up, down):
        from engine_core.kernels.experts import triton

        first: Any = gate_up
        second: Any = down
        given = (x, ids, weights, first, second, activation, residual, norm_weight, eps)
        return triton.run_experts_add(*given, norm_offset)
    out = run_experts(x, ids, weights, gate_up, down, activation)
    return add_deferred(out, residual, norm_weight, eps, norm_offset)


def run_experts_add_norm(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor | CodedWeight | Sequence[Matrix],
    down: Tensor | CodedWeight | Sequence[Matrix],
    activation: Activation,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    norm_bias: Tensor | None = None,
    norm_offset: float = 0.0,
    centred: bool = False,
) -> tuple[Tensor, Tensor]:
    """Experts, the addition of the residual and the norm that follow them, divided.

    For more than few tokens on a GPU one kernel adds up a token's experts and the residual, rounds
    once, and normalises. Elsewhere the sum of the experts is rounded before, too.

    Args:
        x: as of :func:`run_experts`, and so the next five.
        ids: see ``x``.
        weights: see ``x``.
        gate_up: see ``x``.
        down: see ``x``.
        activation: see ``x``.
        residual: ``[T, H]``, x's dtype, the last dimension contiguous.
        norm_weight: ``[H]``, of the norm, contiguous.
        eps: of the norm.
        norm_bias: ``[H]``, of a LayerNorm, contiguous, or None.
        norm_offset: added to an RMSNorm's weight.
        centred: whether it is a LayerNorm, not an RMSNorm.

    Returns:
        The norm of the sum with the residual, and that sum, both ``[T, H]``.
    """
    if gpu_of(x.device) is not None and x.numel() and not _divides(x, ids, gate_up, down):
        from engine_core.kernels.experts import triton

        first: Any = gate_up
        second: Any = down
        return triton.run_experts_add_norm(
            *(x, ids, weights, first, second, activation, residual, norm_weight, eps),
            norm_bias=norm_bias,
            norm_offset=norm_offset,
            centred=centred,
        )
    out = run_experts(x, ids, weights, gate_up, down, activation)
    if centred:
        return layer_norm(out, norm_weight, norm_bias, eps, residual=residual)
    return rms_norm(out, norm_weight, eps, residual=residual, offset=norm_offset)


def _divides(x: Tensor | DeferredRMSNorm, ids: Tensor, gate_up: Any, down: Any) -> bool:
    """Whether the kernels of few tokens take them, which may lack a norm's division."""
    values = x if isinstance(x, Tensor) else x.values
    numbers = isinstance(gate_up, Tensor) and isinstance(down, Tensor)
    tokens, top_k = ids.shape
    return numbers and are_few_tokens(tokens, top_k, len(down), gpu_of(values.device))
