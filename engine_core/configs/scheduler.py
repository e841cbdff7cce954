"""Limits that the scheduler keeps."""

from __future__ import annotations

from pydantic import Field

from engine_core.configs.base import FrozenConfig


class SchedulerConfig(FrozenConfig):
    """Limits that the scheduler keeps.

    Attributes:
        max_num_seqs: rows of the persistent batch: sequences that run at once.
        max_num_batched_tokens: tokens of prompts computed in one step. Each running sequence may
            add the one token that it decodes, so that a step has at most
            ``max_num_batched_tokens + max_num_seqs``.
        max_model_len: tokens of one sequence, prompt and output together.
        max_repeat: how often one plan may be replayed when every row decodes.
        num_swap_blocks: blocks of host memory a cache group, for what preempted sequences held.
    """

    max_num_seqs: int = Field(gt=0)
    max_num_batched_tokens: int = Field(gt=0)
    max_model_len: int = Field(gt=0)
    max_repeat: int = Field(default=1, gt=0)
    num_swap_blocks: int = Field(default=0, ge=0)
