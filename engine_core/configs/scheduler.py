"""Limits that the scheduler keeps."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from engine_core.configs.base import FrozenConfig


class SchedulerConfig(FrozenConfig):
    """Limits that the scheduler keeps.

    Attributes:
        max_num_seqs: rows of the persistent batch: sequences that run at once.
        max_num_batched_tokens: tokens computed in one step.
        max_model_len: tokens of one sequence, prompt and output together.
        max_repeat: how often one plan may be replayed when every row decodes.
    """

    max_num_seqs: int = Field(gt=0)
    max_num_batched_tokens: int = Field(gt=0)
    max_model_len: int = Field(gt=0)
    max_repeat: int = Field(default=1, gt=0)

    @model_validator(mode="after")
    def _rows_fit_a_step(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs}); a decode step of all sequences would not fit"
            )
        return self
