"""``engine-core bench``: how fast a model runs here, and where the time goes."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_core.bench.workloads import BATCHES, MIX
from engine_core.cli.command import Model, OptionGroup, command, flag, startup_line
from engine_core.configs import EngineConfig

if TYPE_CHECKING:
    from rich.console import Console

    from engine_core import LLM
    from engine_core.bench import BenchReport, Measurement
    from engine_core.bench.report import Percentiles, Spread, Steps, TimeSpent

ENGINE_OPTIONS = OptionGroup(
    EngineConfig,
    # As peers are measured: token ids in and out, and no prefix caching.
    defaults={"skip_tokenizer_init": True, "enable_prefix_caching": False},
)


class _Workload(StrEnum):
    LATENCY = "latency"
    THROUGHPUT = "throughput"
    SHARED = "shared"


# Defaults of each workload's options; any other option is refused.
_DEFAULTS: Mapping[_Workload, Mapping[str, Any]] = {
    _Workload.LATENCY: {"prompt_len": "512", "output_len": "128", "batch_size": [1], "repeats": 5},
    _Workload.THROUGHPUT: {
        "prompt_len": "100-1024",
        "output_len": "100-1024",
        "num_requests": 64,
        "repeats": 3,
    },
    _Workload.SHARED: {"batch_size": list(BATCHES), "num_requests": MIX},
}


def _resolve(workload: _Workload, given: Mapping[str, Any]) -> dict[str, Any]:
    """The workload's options, and its defaults where one was not given."""
    values = dict(_DEFAULTS[workload])
    for name, value in given.items():
        if value is None or value == []:
            continue
        if name not in values:
            users = ", ".join(other for other, taken in _DEFAULTS.items() if name in taken)
            raise typer.BadParameter(
                f"{flag(name)} is not for the {workload} workload; it is for {users}"
            )
        values[name] = value
    for name in ("prompt_len", "output_len"):
        if name in values:
            values[name] = _range(name, values[name])
            if workload is _Workload.LATENCY and values[name][0] != values[name][1]:
                raise typer.BadParameter(f"{flag(name)}: a range is for the throughput workload")
    return values


def _range(name: str, text: str) -> tuple[int, int]:
    """``"512"`` or ``"100-1024"`` as least and most."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    low, high = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
    if not 1 <= low <= high:
        raise typer.BadParameter(
            f"{flag(name)}: wants a number of tokens like 512, or a range like 100-1024, got "
            f"{text!r}"
        )
    return low, high


def _number(value: float) -> str:
    """Three significant digits, but every digit before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _spread(title: str, spread: Spread) -> tuple[str, ...]:
    return (title, _number(spread.median), _number(spread.min), _number(spread.max))


def _percentiles(title: str, percentiles: Percentiles) -> list[tuple[str, ...]]:
    return [
        _spread(f"{title}, {name}", getattr(percentiles, name)) for name in ("p50", "p90", "p99")
    ]


def _print_rows(console: Console, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table()
    for index, title in enumerate(titles):
        table.add_column(title, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _print_measurement(
    console: Console, measured: Measurement, repeats: int, computes: bool
) -> None:
    rows = [_spread("seconds", measured.seconds)]
    if measured.num_requests > 1:
        rows.append(_spread("requests/s", measured.requests_per_second))
    rows += [
        _spread("output tokens/s", measured.output_tokens_per_second),
        _spread("all tokens/s", measured.total_tokens_per_second),
        *_percentiles("first token, ms", measured.ttft_ms),
    ]
    if measured.inter_token_ms is not None:
        rows += _percentiles("between tokens, ms", measured.inter_token_ms)
    _print_rows(console, (f"of {_count(repeats, 'repeat')}", "median", "least", "most"), rows)
    _print_time_spent(console, measured.time_spent, computes)


def _print_time_spent(console: Console, spent: TimeSpent, computes: bool) -> None:
    kinds = (("prefill", spent.prefill), ("mixed", spent.mixed), ("decode", spent.decode))
    steps = sum(kind.steps for _, kind in kinds)
    parts = (
        ("scheduling", spent.schedule_seconds),
        ("computing" if computes else "submitting", spent.submit_seconds),
        ("waiting for the device", spent.wait_seconds),
        ("applying results", spent.apply_seconds),
        ("outside of steps", spent.outside_seconds),
    )
    _print_rows(
        console,
        ("where the time went", "seconds", "share", "ms a step"),
        [
            (
                name,
                f"{value:.3f}",
                f"{value / spent.total_seconds:.1%}",
                f"{value / steps * 1e3:.3f}",
            )
            for name, value in parts
        ],
    )
    seconds = sum(kind.seconds for _, kind in kinds)
    _print_rows(
        console,
        ("steps", "number", "tokens a step", "ms a step", "share of time"),
        [_kind_row(name, kind, seconds) for name, kind in kinds if kind.steps],
    )


def _kind_row(name: str, kind: Steps, seconds: float) -> tuple[str, ...]:
    return (
        name,
        str(kind.steps),
        f"{kind.tokens / kind.steps:.1f}",
        f"{kind.seconds / kind.steps * 1e3:.3f}",
        f"{kind.seconds / seconds:.1%}",
    )


def _print_report(report: BenchReport) -> None:
    from rich.console import Console

    ranks = (report.settings[f"{kind}_parallel_size"] for kind in ("tensor", "pipeline"))
    one_rank = all(number == 1 for number in ranks)
    # On a CPU in this process, submitting a step computes it.
    computes = report.device.startswith("cpu") and one_rank
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{report.model}: {report.architecture}, {report.dtype} on {report.device}")
    console.print(startup_line(report.startup))
    for measured in report.measurements:
        console.print(
            f"\n{report.workload}: {_count(measured.num_requests, 'request')}, "
            f"{_count(measured.prompt_tokens, 'prompt token')}, {measured.output_tokens} generated"
        )
        _print_measurement(console, measured, report.repeats, computes)
    if report.shared is not None:
        rows = [(name, _number(value)) for name, value in report.shared.figures.items()]
        _print_rows(console, ("shared workloads", ""), rows)
        _print_time_spent(console, report.shared.time_spent, computes)


def _run(llm: LLM, workload: _Workload, values: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Run a workload and return its part of the report."""
    from engine_core.bench import measure_latency, measure_shared, measure_throughput

    if workload is _Workload.SHARED:
        shared = measure_shared(llm, batches=values["batch_size"], mix=values["num_requests"])
        return {"shared": shared, "repeats": 1}
    repeats = values["repeats"]
    if workload is _Workload.THROUGHPUT:
        measured = measure_throughput(
            llm,
            num_requests=values["num_requests"],
            prompt_lens=values["prompt_len"],
            output_lens=values["output_len"],
            repeats=repeats,
            seed=seed,
        )
        return {"measurements": [measured], "repeats": repeats}
    each = [
        measure_latency(
            llm,
            prompt_len=values["prompt_len"][0],
            output_len=values["output_len"][0],
            batch_size=batch_size,
            repeats=repeats,
            seed=seed,
        )
        for batch_size in values["batch_size"]
    ]
    return {"measurements": each, "repeats": repeats}


@command(ENGINE_OPTIONS)
def bench(
    model: Model,
    workload: Annotated[
        _Workload,
        typer.Option(
            help="latency: requests of one shape that begin together; throughput: many of mixed "
            "lengths; shared: the workloads that all engines are compared by."
        ),
    ] = _Workload.LATENCY,
    prompt_len: Annotated[
        str | None,
        typer.Option(
            metavar="N|LOW-HIGH", help="Tokens of a prompt (default: 512; throughput: 100-1024)."
        ),
    ] = None,
    output_len: Annotated[
        str | None,
        typer.Option(
            metavar="N|LOW-HIGH",
            help="Tokens generated for each prompt (default: 128; throughput: 100-1024).",
        ),
    ] = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Requests that begin together, for latency and shared (default: 1; shared: "
            f"{', '.join(map(str, BATCHES))}). May be given again.",
        ),
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Requests of the throughput workload, or of shared's mix (default: 64; shared: "
            f"{MIX}); 0 leaves the mix out.",
        ),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Measured runs (default: 5; throughput: 3).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write what each step of the counted runs held and when, for ui.perfetto.dev.",
        ),
    ] = None,
    **options: Any,
) -> None:
    """Measure how fast a model runs, and say where the time went.

    Prompts are random token ids, decoding is greedy and does not end early. A run that is not
    counted comes first. --load-format dummy measures a folder that has only a config.json.
    """
    values = _resolve(
        workload,
        {
            "prompt_len": prompt_len,
            "output_len": output_len,
            "batch_size": batch_size,
            "num_requests": num_requests,
            "repeats": repeats,
        },
    )
    if workload is _Workload.THROUGHPUT and values["num_requests"] == 0:
        raise typer.BadParameter("--num-requests: throughput needs at least one")
    config = ENGINE_OPTIONS.build(options)
    start = time.perf_counter()

    from engine_core import LLM
    from engine_core.bench import make_report
    from engine_core.engine.trace import EngineTrace, check_trace_file, write_trace

    if trace is not None:
        check_trace_file(trace)
    with LLM(model, config) as llm:
        llm.engine.frontend.check_task("generate")
        if trace is not None:
            llm.engine.core.trace = EngineTrace()
        found = _run(llm, workload, values, config.seed)
        seconds = time.perf_counter() - start
        report = make_report(llm, model, workload.value, seconds=seconds, **found)
        if trace is not None:
            write_trace(trace, llm.engine.core.trace)
    if as_json:
        print(report.to_json())
    else:
        _print_report(report)
