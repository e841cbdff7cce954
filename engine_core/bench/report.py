"""Reports of measurements: frozen models whose JSON Schema is part of the interface."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", from_attributes=True)


class Spread(_Model):
    """A figure over the repeats."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of one value per repeat."""
        return cls(median=statistics.median(values), min=min(values), max=max(values))


class Percentiles(_Model):
    """Percentiles in one repeat, linearly interpolated, each with its spread over the repeats."""

    p50: Spread
    p90: Spread
    p99: Spread


class Steps(_Model):
    """The steps of one kind, over all repeats."""

    steps: int = Field(description="How many.")
    tokens: int = Field(description="Tokens computed in them.")
    seconds: float = Field(description="Submitting them and waiting for them.")


class TimeSpent(_Model):
    """Where the time of all repeats went. The first five parts add up to ``total_seconds``."""

    schedule_seconds: float = Field(description="Choosing what each step runs.")
    submit_seconds: float = Field(
        description="Giving steps to the device; a CPU in this process computes them right here."
    )
    wait_seconds: float = Field(description="Waiting for the device, or for other processes.")
    apply_seconds: float = Field(description="Taking results in and making outputs.")
    outside_seconds: float = Field(description="Between steps: adding requests, and the clocks.")
    total_seconds: float
    prefill: Steps = Field(description="Steps in which no request decodes.")
    mixed: Steps = Field(description="Steps in which some requests decode and others prefill.")
    decode: Steps = Field(
        description="Steps in which every request computes one token; so does the last token of "
        "a prompt if it has a step of its own."
    )


class Measurement(_Model):
    """One workload, all of whose requests are there from the beginning."""

    num_requests: int
    prompt_tokens: int = Field(description="Tokens of all prompts of one repeat.")
    output_tokens: int = Field(description="Tokens generated in one repeat.")
    seconds: Spread = Field(description="From the first request to the last token.")
    requests_per_second: Spread
    output_tokens_per_second: Spread
    total_tokens_per_second: Spread = Field(description="Prompt and output tokens together.")
    ttft_ms: Percentiles = Field(
        description="Milliseconds from a request's arrival to its first token, over the requests."
    )
    inter_token_ms: Percentiles | None = Field(
        description="Milliseconds between a request's tokens, over all tokens but the first; "
        "tokens that come together share the time evenly. Null for throughput, where outputs are "
        "not streamed, and where one token is generated."
    )
    time_spent: TimeSpent


class SharedMeasurement(_Model):
    """The workloads that all engines are compared by."""

    figures: dict[str, float] = Field(
        description="By name, as engine_core.bench.workloads.measure describes them."
    )
    time_spent: TimeSpent = Field(description="Of all of them together, warm-up included.")


class BenchReport(_Model):
    """The report of ``engine-core bench``."""

    schema_version: Literal[1] = 1
    engine_version: str
    torch_version: str
    model: str = Field(description="The model as it was named.")
    architecture: str
    device: str = Field(description="The GPU's name, or cpu with its instruction set and threads.")
    dtype: str = Field(description="The element type that it ran with.")
    settings: dict[str, Any] = Field(description="The EngineConfig.")
    startup: dict[str, float] = Field(description="Seconds of each phase of start-up.")
    workload: Literal["latency", "throughput", "shared"]
    repeats: int = Field(
        description="Runs that were counted, after one that was not; 1 for the shared workloads, "
        "which repeat by themselves."
    )
    measurements: tuple[Measurement, ...] = Field(
        description="One a batch size for latency, one for throughput, none for shared."
    )
    shared: SharedMeasurement | None = Field(description="Null for the other workloads.")
    seconds: float = Field(description="How long it took, start-up and warm-up included.")

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON Schema (draft 2020-12) of :meth:`to_json`."""
        return cls.model_json_schema(mode="serialization")

    def to_json(self) -> str:
        """The report as JSON."""
        return self.model_dump_json(indent=2)
