"""How one request chooses its tokens."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from engine_core.configs.base import FrozenConfig

MAX_LOGPROBS = 1000


class SamplingParams(FrozenConfig):
    """How one request chooses its tokens; the command line's options are made from it.

    Names and meanings are those of vLLM. Filters act in the order of transformers: temperature,
    top_k, top_p, min_p.
    """

    n: int = Field(
        default=1, ge=1, le=1024, description="Completions for the prompt; each has its own seed."
    )
    temperature: float = Field(
        default=1.0,
        ge=0.0,
        le=100.0,
        description="0 is greedy; otherwise logits are divided by it.",
    )
    top_k: int = Field(
        default=0, ge=-1, description="Only the k most probable tokens; 0 or -1 for all."
    )
    top_p: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="Only the smallest set of most probable tokens whose probability reaches it.",
    )
    min_p: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Only tokens at least this many times as probable as the most probable one.",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="Makes random sampling repeatable; one is drawn if not set.",
    )
    max_tokens: int | None = Field(
        default=16,
        ge=1,
        description="Tokens to generate at most; none for as many as the model's length allows.",
    )
    min_tokens: int = Field(
        default=0, ge=0, description="No end of sequence or stop token before so many tokens."
    )
    stop: tuple[str, ...] = Field(
        default=(), description="Strings that end the text; not part of it."
    )
    stop_token_ids: tuple[int, ...] = Field(default=(), description="Tokens that end the sequence.")
    ignore_eos: bool = Field(default=False, description="Go on past the end-of-sequence token.")
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_LOGPROBS,
        description="How many of the most probable tokens to report at each step, besides the "
        "chosen one; no report if not set.",
    )
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_LOGPROBS,
        description="The same for the prompt's tokens; no report if not set.",
    )
    skip_special_tokens: bool = Field(
        default=True, description="Leave special tokens out of the text."
    )

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_string(cls, value: Any) -> Any:
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop_string(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not item for item in value):
            raise ValueError("an empty stop string would end every text at once")
        return value

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _no_stop_tokens(cls, value: Any) -> Any:
        return () if value is None else value

    @model_validator(mode="after")
    def _min_below_max(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})"
            )
        return self

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0
