"""Runs workloads on an engine and takes the time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from engine_core import __version__
from engine_core.bench import workloads
from engine_core.bench.report import (
    BenchReport,
    Measurement,
    Percentiles,
    SharedMeasurement,
    Spread,
    Steps,
    TimeSpent,
)
from engine_core.configs import SamplingParams
from engine_core.engine import LLM, Engine
from engine_core.engine.step_stats import StepStats
from engine_core.errors import ConfigError, RequestError
from engine_core.runtime.platform import resolve_device, resolve_dtype


@dataclass(slots=True)
class _Repeat:
    """One run of a workload. Times are in seconds.

    ``seconds`` ends with the last token, ``total`` when no step is in flight any more.
    """

    seconds: float = 0.0
    total: float = 0.0
    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


def measure_latency(
    llm: LLM, *, prompt_len: int, output_len: int, batch_size: int, repeats: int, seed: int = 0
) -> Measurement:
    """Measure requests of one shape that begin together and are streamed.

    One run of all of them comes first and is not counted. Prompts are random and never repeat.

    Args:
        llm: the engine; it must have no requests.
        prompt_len: tokens of each prompt.
        output_len: tokens generated for each.
        batch_size: requests.
        repeats: how often it is run.
        seed: of the prompts.

    Raises:
        ConfigError: the sequences are longer than the engine's longest.
        RequestError: a request failed.
    """
    prompts, outputs = [prompt_len] * batch_size, [output_len] * batch_size
    return _measure(llm.engine, prompts, outputs, repeats, random.Random(seed), streaming=True)


def measure_throughput(
    llm: LLM,
    *,
    num_requests: int,
    prompt_lens: tuple[int, int],
    output_lens: tuple[int, int],
    repeats: int,
    seed: int = 0,
) -> Measurement:
    """Measure requests of mixed lengths that are all there from the beginning.

    One run of all of them comes first and is not counted. Outputs are not streamed.

    Args:
        llm: the engine; it must have no requests.
        num_requests: how many.
        prompt_lens: least and most tokens of a prompt; lengths are uniform between.
        output_lens: least and most tokens generated for one.
        repeats: how often it is run; lengths are the same each time, prompts are not.
        seed: of lengths and prompts.

    Raises:
        ConfigError: the sequences can be longer than the engine's longest.
        RequestError: a request failed.
    """
    generator = random.Random(seed)
    prompts = [generator.randint(*prompt_lens) for _ in range(num_requests)]
    outputs = [generator.randint(*output_lens) for _ in range(num_requests)]
    return _measure(llm.engine, prompts, outputs, repeats, generator, streaming=False)


def measure_shared(llm: LLM, *, batches: Sequence[int], mix: int) -> SharedMeasurement:
    """Run the workloads that all engines are compared by; see :func:`workloads.measure`.

    Raises:
        ConfigError: the engine's longest sequence is shorter than theirs.
        RequestError: a request failed.
    """
    engine = llm.engine
    _check_length(engine, workloads.LONGEST - 1, 1)
    # The mix is run once, and shrinks through every size of batch.
    engine.warmup()

    stats = engine.step_stats = StepStats()
    total = 0.0

    def run(prompts: list[list[int]], lengths: list[int]) -> float:
        nonlocal total
        repeat = _run(engine, prompts, lengths, streaming=False)
        total += repeat.total
        return repeat.seconds

    figures = workloads.measure(run, engine.model_config.vocab_size, batches=batches, mix=mix)
    return SharedMeasurement(figures=figures, time_spent=_time_spent(stats, total))


def make_report(
    llm: LLM,
    model: str,
    workload: Literal["latency", "throughput", "shared"],
    *,
    repeats: int,
    measurements: Sequence[Measurement] = (),
    shared: SharedMeasurement | None = None,
    seconds: float,
) -> BenchReport:
    """Join measurements with the machine and settings they were taken on.

    Args:
        llm: the engine that was measured.
        model: its name as the user gave it.
        workload: what was run.
        repeats: how often it was run.
        measurements: of latency or throughput.
        shared: of the shared workloads.
        seconds: how long everything took.
    """
    engine = llm.engine
    device = resolve_device(engine.config)
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        device_name = f"cpu ({capability}, threads: {torch.get_num_threads()})"
    return BenchReport(
        engine_version=__version__,
        torch_version=torch.__version__,
        model=model,
        architecture=engine.model_config.architecture,
        device=device_name,
        dtype=resolve_dtype(engine.config, device, engine.model_config.dtype),
        settings=engine.config.model_dump(mode="json"),
        startup=dict(engine.startup),
        workload=workload,
        repeats=repeats,
        measurements=tuple(measurements),
        shared=shared,
        seconds=seconds,
    )


def _check_length(engine: Engine, prompt_len: int, output_len: int) -> None:
    if prompt_len + output_len > engine.max_model_len:
        raise ConfigError(
            f"a prompt of {prompt_len} tokens and {output_len} generated ones do not fit in this "
            f"engine's max_model_len of {engine.max_model_len}; ask for less, or for a longer one"
        )


def _measure(
    engine: Engine,
    prompt_lens: Sequence[int],
    output_lens: Sequence[int],
    repeats: int,
    generator: random.Random,
    *,
    streaming: bool,
) -> Measurement:
    longest = max(range(len(prompt_lens)), key=lambda i: prompt_lens[i] + output_lens[i])
    _check_length(engine, prompt_lens[longest], output_lens[longest])
    vocab = engine.model_config.vocab_size

    def run() -> _Repeat:
        prompts = [workloads.random_ids(size, vocab, generator) for size in prompt_lens]
        return _run(engine, prompts, output_lens, streaming=streaming)

    # All of it, not a few requests: on a GPU the first step of a size compiles and captures, which
    # took 1 s of a throughput run that takes 0.02 s after. Another run may have other sizes of
    # batch, because the host finds out later or earlier that a request has ended.
    engine.warmup()
    # Only what is counted is traced.
    trace, engine.core.trace = engine.core.trace, None
    run()
    engine.core.trace = trace
    stats = engine.step_stats = StepStats()
    runs = [run() for _ in range(repeats)]
    prompt_tokens, output_tokens = sum(prompt_lens), sum(output_lens)

    def rate(count: int) -> Spread:
        return Spread.of([count / item.seconds for item in runs])

    return Measurement(
        num_requests=len(prompt_lens),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seconds=Spread.of([item.seconds for item in runs]),
        requests_per_second=rate(len(prompt_lens)),
        output_tokens_per_second=rate(output_tokens),
        total_tokens_per_second=rate(prompt_tokens + output_tokens),
        ttft_ms=_percentiles(runs, lambda item: item.first_tokens),
        inter_token_ms=_percentiles(runs, lambda item: item.gaps) if runs[0].gaps else None,
        time_spent=_time_spent(stats, sum(item.total for item in runs)),
    )


def _run(
    engine: Engine, prompts: Sequence[list[int]], lengths: Sequence[int], *, streaming: bool
) -> _Repeat:
    """Run requests to their end, and every step in flight after them."""
    repeat = _Repeat()
    # When each request's last token came, and how many it had then.
    seen: dict[str, tuple[float, int]] = {}
    start = time.perf_counter()
    # As ``LLM.generate`` has it.
    patient = not streaming and len(prompts) <= engine.core.scheduler.config.max_num_seqs
    try:
        for prompt, length in zip(prompts, lengths, strict=True):
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            request_id = engine.add_request(prompt, params, streaming=streaming, patient=patient)
            seen[request_id] = (start, 0)
        while engine.has_unfinished:
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                completion, metrics = output.outputs[0], output.metrics
                before, known = seen[output.request_id]
                count = len(completion.token_ids)
                if known and count > known:
                    repeat.gaps += [(now - before) / (count - known)] * (count - known)
                seen[output.request_id] = (now, count)
                if not output.finished:
                    continue
                if completion.finish_reason != "length":
                    raise RequestError(
                        f"{output.request_id} ended with {completion.finish_reason!r} after "
                        f"{count} tokens: {completion.error}"
                    )
                assert metrics.first_token_time is not None, "a finished request has tokens"
                repeat.first_tokens.append(metrics.first_token_time - metrics.arrival_time)
                repeat.seconds = now - start
    finally:
        for request_id in seen:
            engine.abort(request_id)
    repeat.total = time.perf_counter() - start
    return repeat


def _percentiles(
    runs: Sequence[_Repeat], seconds: Callable[[_Repeat], Sequence[float]]
) -> Percentiles:
    each = [np.percentile(seconds(item), (50, 90, 99)) * 1e3 for item in runs]
    p50, p90, p99 = (
        Spread.of([float(value) for value in column]) for column in zip(*each, strict=True)
    )
    return Percentiles(p50=p50, p90=p90, p99=p99)


def _time_spent(stats: StepStats, total: float) -> TimeSpent:
    parts = {
        name: getattr(stats, f"{name}_seconds") for name in ("schedule", "submit", "wait", "apply")
    }
    return TimeSpent(
        **{f"{name}_seconds": value for name, value in parts.items()},
        outside_seconds=total - sum(parts.values()),
        total_seconds=total,
        prefill=Steps.model_validate(stats.prefill),
        mixed=Steps.model_validate(stats.mixed),
        decode=Steps.model_validate(stats.decode),
    )
