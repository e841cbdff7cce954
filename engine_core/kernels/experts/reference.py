"""Mixtures of experts in plain PyTorch, every expert on every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_core.kernels.activation import reference as activations
from engine_core.kernels.linear import Activation
from engine_core.kernels.linear.coded import CodedWeight, numbers_of

if TYPE_CHECKING:
    from engine_core.kernels.experts import Routing


def choose_experts(
    logits: Tensor, routing: Routing, bias: Tensor | None, slots: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See :func:`engine_core.kernels.choose_experts`."""
    logits = logits.float()
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias.float()
    if routing.top_groups < routing.groups:
        grouped = choice.unflatten(1, (routing.groups, -1))
        totals = grouped.topk(routing.group_scores, dim=-1).values.sum(-1)
        # A stable sort: top-k of torch takes any of equal numbers.
        best = totals.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
        chosen = torch.zeros_like(totals, dtype=torch.bool).scatter_(1, best, True)
        choice = grouped.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, ids)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if routing.scale != 1.0:
        weights = weights * routing.scale
    if slots is not None:
        ids = ids.masked_fill((slots < 0).unsqueeze(1), -1)
    return ids.to(torch.int32), weights


def activated(products: Tensor, activation: Activation) -> Tensor:
    """``act(gate) * up`` of ``[..., 2 I]``."""
    if activation == "silu":
        return activations.silu_and_mul(products)
    return activations.gelu_and_mul(products, "tanh" if activation == "gelu_tanh" else "none")


def run_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor | CodedWeight,
    down: Tensor | CodedWeight,
    activation: Activation,
) -> Tensor:
    """See :func:`engine_core.kernels.run_experts`."""
    hidden = x.shape[1]
    gates, downs = (numbers_of(w, x.dtype) for w in (gate_up, down))
    num_experts = downs.numel() // (hidden * downs.shape[-1])
    gates = gates.reshape(num_experts, -1, hidden)
    downs = downs.view(num_experts, hidden, -1)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(num_experts):
        weight = weights.masked_fill(ids != expert, 0.0).sum(1, keepdim=True)
        result = F.linear(activated(F.linear(x, gates[expert]), activation), downs[expert])
        # Whatever an expert makes of a token that did not choose it, infinities too, adds nothing.
        out += torch.where(weight != 0, result.float() * weight, 0.0)
    return out.to(x.dtype)
