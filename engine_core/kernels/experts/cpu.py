"""The experts that tokens chose, and no others, one after another on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_core.kernels.activation.cpu import act_and_mul
from engine_core.kernels.compiled import run_whole
from engine_core.kernels.linear import Activation
from engine_core.kernels.linear.coded import CodedWeight

if TYPE_CHECKING:
    from engine_core.kernels.experts import Matrix


def run_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor | CodedWeight | Sequence[Matrix],
    down: Tensor | CodedWeight | Sequence[Matrix],
    activation: Activation,
) -> Tensor:
    """See :func:`engine_core.kernels.run_experts`."""
    out = torch.empty_like(x)
    if x.is_meta:
        return out
    run_whole(lambda: _run(x, ids, weights, gate_up, down, activation, out))
    return out


def _run(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Any,
    down: Any,
    activation: Activation,
    out: Tensor,
) -> None:
    # A token's experts are added up in the order of their numbers, whatever else is in the batch.
    total = torch.zeros(x.shape, dtype=torch.float32)
    flat = ids.reshape(-1)
    experts, order = flat.sort(stable=True)
    tokens = order // ids.shape[1]
    pair_weights = weights.reshape(-1, 1)[order]
    touched, counts = experts.unique_consecutive(return_counts=True)
    end = 0
    for expert, count in zip(touched.tolist(), counts.tolist(), strict=True):
        start, end = end, end + count
        if not 0 <= expert < len(gate_up):
            continue
        rows = tokens[start:end]
        hidden = act_and_mul(_product(x[rows], gate_up[expert]), activation)
        result = _product(hidden, down[expert])
        total.index_add_(0, rows, result.float().mul_(pair_weights[start:end]))
    out.copy_(total)


def _product(x: Tensor, matrix: Any) -> Tensor:
    out: Tensor = F.linear(x, matrix) if isinstance(matrix, Tensor) else matrix.multiply(x, None)
    return out
