"""The names of lmdeploy.pytorch.nn.moe and nn.eplb: routing and experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine_core import nn as core
from engine_core.kernels import Routing, choose_experts
from engine_core.nn.distributed import all_reduce
from engine_core.step_context import building, current_build_context
from engine_core_lmdeploy.refusals import check_quant, refuse

# The part of an expert's parameter that lmdeploy's shard id names.
EXPERT_PARTS = {"gate": 0, "up": 1, "down": 0}


class SoftmaxTopK(nn.Module):
    """Each row's greatest scores by softmax, and whose they are."""

    def __init__(self, top_k: int, dim: int = -1, n_groups: int = -1) -> None:
        """Raise ValueError for another ``dim`` than the last, or for groups of experts."""
        super().__init__()
        if dim != -1:
            refuse("SoftmaxTopK", "dim", dim, "scores are in the last dimension")
        if n_groups > 0:
            why = "so many of each group are not chosen; engine_core.nn.SparseMoE has groups"
            refuse("SoftmaxTopK", "n_groups", n_groups, why)
        self.routing = Routing(top_k)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[T, E]`` to weights ``[T, top_k]`` float32 and experts ``[T, top_k]`` int32."""
        ids, weights = choose_experts(x, self.routing)
        return weights, ids


class FusedMoE(core.Experts):
    """Gated experts, of which each token takes a few; parameters ``gate_up`` and ``down``."""

    def __init__(
        self,
        hidden_dim: int,
        ffn_dim: int,
        num_experts: int,
        top_k: int,
        bias: bool = False,
        renormalize: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        all_reduce: bool = True,
        layer_idx: int = 0,
        act_func: Callable[..., Any] | None = None,
    ) -> None:
        """Sizes are the whole model's. ``all_reduce=False`` leaves the sum over ranks to others.

        Raises:
            ValueError: ``bias`` or ``act_func``.
        """
        if bias:
            refuse("FusedMoE", "bias", bias, "experts have none")
        if act_func is not None:
            refuse("FusedMoE", "act_func", act_func, "experts have SiLU; core.Experts takes others")
        context = current_build_context()
        placed = replace(context, dtype=dtype or context.dtype, device=device or context.device)
        with building(placed):
            super().__init__(num_experts, hidden_dim, ffn_dim)
        for name in ("gate_up", "down"):
            self.add_module(name, self._modules.pop(f"{name}_proj"))
        self.context, self.renormalize, self.all_reduce = context, renormalize, all_reduce

    def __getattr__(self, name: str) -> Any:
        # The layers under core.Experts' own names.
        names = {"gate_up_proj": "gate_up", "down_proj": "down"}
        return super().__getattr__(names.get(name, name))

    def forward(self, hidden_states: Tensor, topk_weights: Tensor, topk_idx: Tensor) -> Tensor:
        """``[T, H]`` and :class:`SoftmaxTopK`'s two results to ``[T, H]``."""
        if self.renormalize:
            topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
        out = super().forward(hidden_states, topk_idx, topk_weights)
        return all_reduce(out, self.context) if self.all_reduce else out


def build_fused_moe(
    hidden_dim: int,
    ffn_dim: int,
    num_experts: int,
    top_k: int,
    bias: bool = False,
    renormalize: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    all_reduce: bool = True,
    enable_ep: bool = False,
    quant_config: Any = None,
    layer_idx: int = 0,
    act_func: Callable[..., Any] | None = None,
    prefix: str = "",
) -> FusedMoE:
    """:class:`FusedMoE`; ``enable_ep`` has no effect, as in lmdeploy: an option has ranks so.

    Raises:
        ValueError: as :class:`FusedMoE`, or for a ``quant_config``.
    """
    check_quant("build_fused_moe", quant_config)
    return FusedMoE(
        hidden_dim,
        ffn_dim,
        num_experts,
        top_k,
        bias=bias,
        renormalize=renormalize,
        dtype=dtype,
        device=device,
        all_reduce=all_reduce,
        layer_idx=layer_idx,
        act_func=act_func,
    )


class EPLBManager:
    """Expert-parallel load balancing, which no setting turns on (``DistConfig.enable_eplb``)."""

    @staticmethod
    def _refused(*args: Any, **kwargs: Any) -> Any:
        """Raise a ValueError."""
        raise ValueError(
            "EPLBManager: expert-parallel load balancing is not supported: each expert is on one "
            "rank, or all ranks share it; leave the calls out"
        )

    init_global_eplb_metadata = get_dispatch_info = _refused
    num_physical_experts = topk_ids_logical_to_physical = _refused


@dataclass(frozen=True)
class BuildModelContext:
    """Settings of lmdeploy's engine that are always off here."""

    enable_return_routed_experts: bool = False


def get_build_model_context() -> BuildModelContext:
    """The settings."""
    return BuildModelContext()
