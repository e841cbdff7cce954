"""A scheduler without a model, and how tests drive it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_core.configs import CacheConfig, CacheGroup, KVCacheSpec, SchedulerConfig
from engine_core.scheduler import Scheduler
from engine_core.steps import RowResult, StepPlan, StepResult, TokenUpdate


def cache(
    *,
    block_size: int | Sequence[int] = 4,
    num_blocks: int = 64,
    windows: Sequence[int | None] = (None,),
    enable_prefix_caching: bool = True,
) -> CacheConfig:
    """One cache group for each window, of one head of 8, over one pool of blocks."""
    sizes = [block_size] * len(windows) if isinstance(block_size, int) else block_size
    groups = tuple(
        CacheGroup(
            spec=KVCacheSpec(
                num_kv_heads=1, head_dim=8, v_head_dim=8, dtype="float16", window=window
            ),
            block_size=size,
        )
        for window, size in zip(windows, sizes, strict=True)
    )
    return CacheConfig(
        groups=groups, num_blocks=num_blocks, enable_prefix_caching=enable_prefix_caching
    )


def scheduler(
    *,
    block_size: int | Sequence[int] = 4,
    num_blocks: int = 64,
    windows: Sequence[int | None] = (None,),
    enable_prefix_caching: bool = True,
    **limits: int,
) -> Scheduler:
    """A scheduler over :func:`cache`; ``limits`` are of SchedulerConfig."""
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    return Scheduler(
        SchedulerConfig(**{**defaults, **limits}),
        cache(
            block_size=block_size,
            num_blocks=num_blocks,
            windows=windows,
            enable_prefix_caching=enable_prefix_caching,
        ),
    )


def planned(sched: Scheduler) -> StepPlan:
    """The next step; there must be one."""
    plan = sched.schedule()
    assert plan is not None
    sched.check()
    return plan


def answer(
    sched: Scheduler, plan: StepPlan, *tokens: Sequence[int], **more: Any
) -> list[TokenUpdate]:
    """Give each row of the plan its sampled tokens; 7s where none are named.

    ``more`` are further fields of the result.
    """
    rows = []
    for index, row in enumerate(plan.rows):
        default = (7,) * plan.repeat if row.sample else ()
        rows.append(
            RowResult(row.sequence_id, tuple(tokens[index]) if index < len(tokens) else default)
        )
    updates = list(sched.update(StepResult(plan.step_id, tuple(rows), **more)))
    sched.check()
    return updates
