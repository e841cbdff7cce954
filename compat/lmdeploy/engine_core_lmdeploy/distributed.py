"""The names of lmdeploy.pytorch.distributed that model files with experts ask for.

Ranks share each layer out (tensor parallelism) or, of a mixture of experts, have whole experts
each. There is no data parallelism among them, and no expert is kept twice to balance the load.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed
from torch import Tensor

from engine_core.nn import distributed
from engine_core.step_context import BuildContext, current_build_context
from engine_core_lmdeploy.refusals import refuse


class _Built:
    """The context that layers were last built in, in which :func:`all_reduce` sums."""

    context = BuildContext()


def get_tp_world_rank(layer_type: str | None = None) -> tuple[int, int]:
    """The number of ranks and this one; during a model's construction."""
    _Built.context = current_build_context()
    return _Built.context.tp_size, _Built.context.tp_rank


def get_ep_world_rank() -> tuple[int, int]:
    """The number of ranks that have whole experts each, and this one; during construction."""
    context = current_build_context()
    return (context.tp_size, context.tp_rank) if context.expert_parallel else (1, 0)


def all_reduce(
    tensor: Tensor,
    op: torch.distributed.ReduceOp.RedOpType = torch.distributed.ReduceOp.SUM,
    group: str = "tp",
    async_op: bool = False,
) -> None:
    """Sum a tensor over the ranks, in place.

    Raises:
        ValueError: it is not a sum, of another group, or not waited for.
    """
    for name, given, right in (
        ("op", op, torch.distributed.ReduceOp.SUM),
        ("group", group, "tp"),
        ("async_op", async_op, False),
    ):
        if given != right:
            refuse("all_reduce", name, given, f"only {right} is")
    # The engine's sum may be another tensor; lmdeploy's is in place.
    tensor.copy_(distributed.all_reduce(tensor, _Built.context))


@dataclass(frozen=True)
class DistConfig:
    """Settings of lmdeploy's parallelism that are always off here."""

    enable_eplb: bool = False


@dataclass(frozen=True)
class DistContext:
    """A holder of :class:`DistConfig`."""

    dist_config: DistConfig = field(default_factory=DistConfig)


class DistManager:
    """A holder of the only :class:`DistContext`."""

    def current_context(self) -> DistContext:
        """The context."""
        return DistContext()

    def current_config(self) -> DistConfig:
        """The context's settings."""
        return DistConfig()


_MANAGER = DistManager()


def get_dist_manager() -> DistManager:
    """The manager."""
    return _MANAGER
