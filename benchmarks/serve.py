"""Measure what the clients of a server see: an open loop of arrivals, streamed, at several rates.

    python benchmarks/serve.py --scenario 8b            # one of those of --list
    python benchmarks/serve.py --scenario all --output serving.jsonl
    python benchmarks/serve.py --model llama3_8b --rates 4,16,32,48 --seconds 60 [-- SERVE OPTIONS]
    python benchmarks/serve.py --url http://127.0.0.1:8000 --rates 16 --count usage

It starts ``engine-core serve`` with a model, or with the random weights of one of the shapes of
``benchmarks/workloads.py``; or it loads a running server with ``/v1/completions``, which takes
prompts of token ids and ``ignore_eos``, so that others are measured by the same client.

Requests arrive as a Poisson process, whether earlier ones have ended or not. Prompts are random
token ids with log-normal lengths, and so are the outputs. The time to a first token begins when
the request is sent; ``late`` is by how much that was after its due time, and a run in which the
99th percentile of it is above 5 ms is marked, because the client was too slow for its figures.
A gap is the time between two events of a stream; one before an event with n tokens counts as n
gaps of an n-th of it in the columns of tokens. The largest gap has its cause, by the trace of the
server's steps.

Ctrl-C, SIGINT and SIGTERM end the run under way: what was seen until then is reported and stored as
always, with the seconds in its label, and the exit code is 130. So a time limit is ``timeout -s INT
540 python benchmarks/serve.py ...``. Requests that were not sent do not count, streams that had
begun count as cut, and those without a first token as failed.

``--plot`` needs matplotlib: ``pip install 'engine-core-llm[bench]'``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self
from urllib.request import Request as Fetch
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.serve_client import Client, Observation, Request, Run, Stop
from benchmarks.workloads import SHAPES, write_config

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"
TOKENIZERS = {
    "llama3_8b": CACHE / "tokenizers" / "llama3_1",
    "qwen2_0_5b": CACHE / "tokenizers" / "qwen2_5",
}
SMOLLM2 = CACHE / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
RATES = "--rates 4,16,32,48"
SMALL_RATES = "--rates 16,64,96,128"
ON_A_CPU = f"--model {SMOLLM2} --token-range 1000 46000 --burst 100 --patience 300"
SCENARIOS = {
    "8b": f"--model llama3_8b {RATES} --cold --passes 2",
    "8b-sampled": f"--model llama3_8b {RATES} --temperature 0.8",
    "0.5b": f"--model qwen2_0_5b {SMALL_RATES} --cold --passes 2",
    "0.5b-sampled": f"--model qwen2_0_5b {SMALL_RATES} --temperature 0.8",
    "prefix": f"--model llama3_8b {RATES} --shared-prefix 2000",
    "schemas": f"--model llama3_8b {RATES} --schemas 0.5",
    "long": "--model llama3_8b --long 100000 --rows 16 -- --max-model-len 131072 "
    """--hf-overrides '{"max_position_embeddings": 131072}'""",
    "cpu": f"{ON_A_CPU} --rates 1,3",
    "cpu-unbounded": f"{ON_A_CPU} -- --max-step-time 1000",
}
LATE_MS = 5.0
CACHES = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
CACHES += ("NUMBA_CACHE_DIR",)

Length = Callable[[random.Random], int]


def length(text: str) -> Length:
    """Parse ``N``, ``uniform:LOW:HIGH`` or ``lognormal:MEDIAN:SIGMA[:LOW:HIGH]``."""
    kind, *numbers = text.split(":")
    try:
        if kind == "uniform":
            low, high = map(int, numbers)
            return lambda draw: draw.randint(low, high)
        if kind == "lognormal":
            median, sigma, *bounds = map(float, numbers)
            low, high = map(int, bounds or (1, 2**31))
            mean = math.log(median)
            return lambda draw: int(min(high, max(low, math.exp(draw.gauss(mean, sigma)))))
        fixed = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA, "
            "lognormal:MEDIAN:SIGMA:LOW:HIGH"
        ) from None
    return lambda draw: fixed


def numbers(text: str) -> list[float]:
    """Parse numbers with commas between them."""
    return [float(part) for part in text.split(",") if part]


@dataclass(frozen=True, slots=True)
class Load:
    """One row of the table.

    Attributes:
        label: of the row.
        rate: arrivals a second; 0 for all at once.
        count: requests.
    """

    label: str
    rate: float
    count: int


def random_ids(draw: random.Random, count: int, bounds: Sequence[int]) -> list[int]:
    """Token ids from the first of ``bounds`` up to the second."""
    return [draw.randrange(*bounds) for _ in range(count)]


def plan(load: Load, options: argparse.Namespace, model: str) -> list[Request]:
    """The requests of a row. Equal options make equal requests."""
    draw, more = random.Random(options.seed), random.Random(options.seed + 1)
    prefix = random_ids(more, options.shared_prefix, options.token_range)
    requests = []
    due = 0.0
    for index in range(load.count):
        due += draw.expovariate(load.rate) if load.rate else 0.0
        wanted, size = options.output_tokens(draw), options.prompt_tokens(draw)
        prompt = prefix + random_ids(draw, size, options.token_range)
        guided = more.random() < options.schemas
        form = {"name": "answer", "schema": schema(index % 8)}
        requests.append(
            Request(
                due,
                body(options, model, prompt, wanted)
                | (
                    {"response_format": {"type": "json_schema", "json_schema": form}}
                    if guided
                    else {"ignore_eos": True}
                ),
                len(prompt),
                "schema" if guided else "text",
            )
        )
    return requests


def plan_long(options: argparse.Namespace, model: str) -> list[Request]:
    """Rows that decode, and a long prompt that comes when they do; it is the last request."""
    draw = random.Random(options.seed)
    rows = [(0.0, "row", options.row_prompt, options.row_tokens)] * options.rows
    requests = []
    for due, kind, size, wanted in (*rows, (options.long_after, "long", options.long, 16)):
        prompt = random_ids(draw, size, options.token_range)
        made = body(options, model, prompt, wanted) | {"ignore_eos": True}
        requests.append(Request(due, made, size, kind))
    return requests


def body(options: argparse.Namespace, model: str, prompt: list[int], wanted: int) -> dict[str, Any]:
    """A request's body, without the form of its text."""
    stream_options = {"include_usage": True}
    made = {
        "model": model,
        "prompt": prompt,
        "max_tokens": wanted,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": stream_options,
    }
    if options.count == "token_ids":
        made["return_token_ids"] = True
    elif options.count == "usage":
        stream_options["continuous_usage_stats"] = True
    return made


def schema(index: int) -> dict[str, Any]:
    """One of several JSON schemas, such as answers are asked for in."""
    properties = {
        f"name_{index}": {"type": "string"},
        "count": {"type": "integer"},
        "state": {"enum": ["open", "closed", f"state {index}"]},
        "scores": {"type": "array", "items": {"type": "number"}, "minItems": index + 1},
        "owner": {
            "type": "object",
            "properties": {"id": {"type": "integer"}, "active": {"type": "boolean"}},
            "required": ["id", "active"],
            "additionalProperties": False,
        },
    }
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the server, from its trace; times are seconds of the monotonic clock.

    Attributes:
        begin: when the device could begin: it was planned, and the step before was done.
        end: when its results were there.
        kind: "decode", "prefill" or "mixed".
        way: how it ran: "graph", "recorded" or "eager".
        decode_rows: rows that computed one token after their prompt.
        prompt_tokens: tokens of prompts computed in it.
    """

    begin: float
    end: float
    kind: str
    way: str
    decode_rows: int
    prompt_tokens: int

    def __str__(self) -> str:
        prompts = f"{self.prompt_tokens:,} tokens of prompts" if self.prompt_tokens else ""
        rows = f"{self.decode_rows} row{'s' * (self.decode_rows > 1)}" if self.decode_rows else ""
        what = " and ".join(filter(None, (rows, prompts)))
        return f"{self.kind} step ({self.way}) of {what}: {(self.end - self.begin) * 1e3:.1f} ms"


def read_trace(path: Path) -> list[Step] | None:
    """The steps in a trace of ``engine-core serve``, in their order; None if none was written."""
    if not path.is_file() or not path.stat().st_size:
        return None
    trace = json.loads(path.read_text(encoding="utf-8"))
    origin = trace["otherData"]["begin"]
    steps = []
    for event in trace["traceEvents"]:
        if event["ph"] != "X" or event["name"] not in ("decode", "prefill", "mixed"):
            continue
        begin, args = origin + event["ts"] / 1e6, event["args"]
        counts = (args["decode_rows"], args["prompt_tokens"])
        steps.append(Step(begin, begin + event["dur"] / 1e6, event["name"], args["way"], *counts))
    return sorted(steps, key=lambda step: step.begin)


def cause(
    gap: tuple[float, float],
    steps: Sequence[Step] | None,
    stalls: Iterable[tuple[float, float]] = (),
) -> str:
    """Why nothing came in a gap: the client, no step, or the longest step in it.

    Args:
        gap: begin and end, on the clock of the steps.
        steps: the server's, in their order; None if there is no trace.
        stalls: begin and end of the times in which the client did not run.
    """
    begin, end = gap

    def within(one: float, other: float) -> float:
        return max(0.0, min(end, other) - max(begin, one))

    late = sum(within(*stall) for stall in stalls)
    if late > (end - begin) / 2:
        return f"client read late: {late * 1e3:.1f} ms"
    if steps is None:
        return "unknown (no trace)"
    if not steps or steps[0].end > begin:
        return "unknown (the trace begins later)"
    during = [step for step in steps if within(step.begin, step.end)]
    ran = sum(within(step.begin, step.end) for step in during)
    if ran < (end - begin) / 2:
        return f"no step ran for {(end - begin - ran) * 1e3:.1f} ms: idle or host"
    longest = max(during, key=lambda step: within(step.begin, step.end))
    return f"{longest}" if len(during) == 1 else f"{longest}, the longest of {len(during)}"


def percentile(values: Sequence[float], percent: float) -> float | None:
    """By linear interpolation; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def milliseconds(values: Sequence[float], *percents: int) -> dict[str, float | None]:
    """Percentiles of seconds, in milliseconds."""
    found = {f"p{percent}": percentile(values, percent) for percent in percents}
    return {name: None if value is None else value * 1e3 for name, value in found.items()}


def summarise(
    run: Run,
    targets: tuple[float | None, float | None] = (None, None),
) -> dict[str, Any]:
    """Figures of a run.

    With a long prompt among the requests, the gaps are those of the other rows while it was
    computed, and the first token is its own.

    Args:
        run: what the client saw.
        targets: milliseconds to the first token and per token after it, for the goodput.
    """
    done = [seen for seen in run.observations if seen.error is None]
    first = [seen.first_token for seen in done]
    streams, window = done, (-math.inf, math.inf)
    if long := [seen for seen in done if seen.kind == "long"]:
        first = [seen.first_token for seen in long]
        streams = [seen for seen in done if seen.kind == "row"]
        assert long[0].sent is not None, "it has a first token"
        window = (long[0].sent, long[0].events[0])
    gaps = [
        (begin, end, count)
        for seen in streams
        for begin, end, count in seen.gaps
        if end > window[0] and begin < window[1]
    ]
    by_event = [end - begin for begin, end, _ in gaps]
    by_token = [(end - begin) / count for begin, end, count in gaps for _ in range(count)]
    counted = all(seen.counted for seen in done)
    late = [seen.sent - seen.due for seen in run.observations if seen.sent is not None]
    seconds = max((seen.events[-1] for seen in done), default=0.0)
    tokens = sum(seen.usage or sum(seen.tokens) for seen in done)
    per_token = {
        seen.index: (seen.events[-1] - seen.events[0]) / max(1, sum(seen.tokens[1:]))
        for seen in done
    }
    good = [
        seen
        for seen in done
        if seen.first_token * 1e3 <= (targets[0] or math.inf)
        and per_token[seen.index] * 1e3 <= (targets[1] or math.inf)
    ]
    late_p99 = milliseconds(late, 99)["p99"]
    cut = sum(seen.cut for seen in done)
    figures: dict[str, Any] = {
        "requests": len(run.observations),
        "finished": len(done) - cut,
        "cut": cut,
        "failed": len(run.observations) - len(done),
        "errors": dict(Counter(seen.error for seen in run.observations if seen.error)),
        "seconds": seconds,
        "first_token_ms": milliseconds(first, 50, 90, 99),
        "event_gap_ms": milliseconds(by_event, 50, 90, 99, 100),
        "token_gap_ms": milliseconds(by_token if counted else (), 50, 90, 99),
        "requests_s": (len(done) - cut) / seconds if seconds else 0.0,
        "good_requests_s": len(good) / seconds if seconds else 0.0,
        "output_tokens": tokens,
        "output_tokens_s": tokens / seconds if seconds else 0.0,
        "prompt_tokens": sum(seen.prompt_tokens for seen in done),
        "miscounted": sum(
            seen.counted and not seen.cut and seen.usage != sum(seen.tokens) for seen in done
        ),
        "client_late_ms_p99": late_p99,
        "client_too_late": late_p99 is not None and late_p99 > LATE_MS,
        "client_stall_ms": max((end - begin for begin, end in run.stalls), default=0.0) * 1e3,
        "largest_gap": None,
    }
    if gaps:
        begin, end, count = max(gaps, key=lambda gap: gap[1] - gap[0])
        figures["largest_gap"] = {"ms": (end - begin) * 1e3, "begin_s": begin, "tokens": count}
    if long and streams and max(seen.ended for seen in streams) < window[1]:
        figures["errors"]["the rows ended before the long prompt's first token"] = 1
    return figures


def shown(values: dict[str, float | None], *names: str) -> str:
    """Some of the values, for a table."""

    def one(value: float | None) -> str:
        return "-" if value is None else f"{value:.{1 if value < 100 else 0}f}"

    return ", ".join(one(values[name]) for name in names)


HEADER = """\
| | first token p50, p99, ms | between events p50, p99, most, ms | per token p50, p99, ms \
| output tokens/s | finished, failed | late p99, ms | cause of the largest gap |
|---|---|---|---|---|---|---|---|"""


def table_row(label: str, figures: dict[str, Any]) -> str:
    """A row of the Markdown table."""
    late = shown(figures, "client_late_ms_p99")
    gap, cut = figures["largest_gap"], figures["cut"]
    cells = (
        label,
        shown(figures["first_token_ms"], "p50", "p99"),
        shown(figures["event_gap_ms"], "p50", "p99", "p100"),
        shown(figures["token_gap_ms"], "p50", "p99"),
        f"{figures['output_tokens_s']:,.0f}",
        f"{figures['finished']}, {figures['failed']}" + f", {cut} cut" * bool(cut),
        f"{late} **too late: not valid**" if figures["client_too_late"] else late,
        gap.get("cause", "") if gap else "-",
    )
    return "| " + " | ".join(cells) + " |"


class Server:
    """``engine-core serve`` on a free port, ready for requests.

    Attributes:
        url: where it listens.
        start_s: seconds from its start until it was ready.
    """

    COMMAND: Sequence[str] = (sys.executable, "-m", "engine_core.cli")

    def __init__(self, model: str, options: Sequence[str], **environment: str) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [*self.COMMAND, "serve", model, "--port", "0"]
        begin = time.monotonic()
        self._process = subprocess.Popen(
            [*command, *options],
            stderr=self._log,
            env={**os.environ, **environment},
            cwd=ROOT,
            process_group=0,  # a signal for all at the terminal is not for it
        )
        try:
            while " ready " not in (log := self.log):
                if self._process.poll() is not None:
                    raise SystemExit(f"the server ended with {self._process.returncode}:\n{log}")
                time.sleep(0.02)
        except KeyboardInterrupt:
            self.close()
            raise
        self.start_s = time.monotonic() - begin
        found = re.search(r"listening on (http://[^\s\"]+)", log)
        assert found, "it is ready, and so it listens"
        self.url = found[1]

    @property
    def log(self) -> str:
        """The end of what it has written."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 20_000))
        return self._log.read()

    def close(self) -> None:
        """End it and wait until it has ended."""
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def sm_clock() -> Iterator[Callable[[], dict[str, float] | None]]:
    """Watch the GPU's SM clock; least and median in MHz since the last call, None without one."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "-i", "0"]
    with tempfile.TemporaryFile("w+") as seen:
        try:
            process = subprocess.Popen(
                [*command, "-lms", "500"], stdout=seen, stderr=subprocess.DEVNULL
            )
        except OSError:
            yield lambda: None
            return
        begin = 0

        def figures() -> dict[str, float] | None:
            nonlocal begin
            seen.seek(begin)
            values = [float(line) for line in seen.read().split("\n") if line.strip().isdigit()]
            begin = seen.seek(0, os.SEEK_END)
            return {"min": min(values), "median": percentile(values, 50)} if values else None

        try:
            yield figures
        finally:
            process.terminate()
            process.wait()


def fetch(url: str, path: str, api_key: str | None) -> Any:
    """An object that the server gives."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with urlopen(Fetch(url + path, headers=headers), timeout=60) as answer:
        return json.load(answer)


def serve_options(options: argparse.Namespace) -> list[str]:
    """Options for ``engine-core serve``."""
    made = [] if options.shared_prefix else ["--no-enable-prefix-caching"]
    if options.model in SHAPES:
        made += ["--load-format", "dummy", "--max-model-len", "8192"]
        tokenizer = options.tokenizer or TOKENIZERS[options.model]
        if tokenizer.is_dir():
            made += ["--tokenizer", str(tokenizer)]
        elif options.schemas:
            raise SystemExit(f"schemas need a tokenizer: {tokenizer} is not there; see --tokenizer")
        else:
            print(f"no tokenizer ({tokenizer} is not there): answers have no text", file=sys.stderr)
            made.append("--skip-tokenizer-init")
    elif options.tokenizer:
        made += ["--tokenizer", str(options.tokenizer)]
    if not options.cold and can("warm_up"):
        made += ["--warm-up", "before"]  # what is warm from the first request on
    return made + options.serve


def loads(options: argparse.Namespace) -> list[Load]:
    """The rows of the table."""
    burst = [Load(f"{options.burst} at once", 0.0, options.burst)] if options.burst else []
    count = options.requests
    return burst + [
        Load(f"{rate:g} requests/s", rate, count or max(1, int(rate * options.seconds)))
        for rate in options.rates
    ]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: what was run, what was seen, and its figures."""

    label: str
    run: Run
    figures: dict[str, Any]


def measure(
    options: argparse.Namespace, url: str, start_s: float | None, stop: Stop
) -> Iterator[Row]:
    """Run every load against a server, or those until a stop."""
    model = options.served_name or fetch(url, "/v1/models", options.api_key)["data"][0]["id"]
    client = Client(
        url,
        processes=options.processes,
        concurrency=options.concurrency,
        patience=options.patience,
        api_key=options.api_key,
        stop=stop,
    )
    with sm_clock() as clock:
        for turn in range(options.passes):
            heat = ("warm" if turn else "cold") if options.cold else ""
            for load in [None] if options.long else loads(options):
                if load is None:
                    label = f"a prompt of {options.long:,} beside {options.rows} rows"
                    requests = plan_long(options, model)
                    sender = replace(client, processes=1, until=options.rows)
                else:
                    label, requests, sender = load.label, plan(load, options, model), client
                label = ", ".join(filter(None, (label, heat)))
                clock()
                run = sender.run(requests)
                if run.stopped is not None:
                    label += f", stopped after {run.stopped:.0f} s"
                figures = {
                    "scenario": options.scenario,
                    "model": Path(options.model).name if options.model else model,
                    "load": label,
                    "rate": load.rate if load else None,
                    "pass": turn + 1,
                    "cold": heat == "cold",
                    "stopped_s": run.stopped,
                    "temperature": options.temperature,
                    "server_start_s": start_s,
                    "sm_clock_mhz": clock(),
                    **summarise(run, (options.ttft_target, options.tpot_target)),
                }
                # The table needs the trace, which comes when the server has ended.
                print(table_row(label, figures), file=sys.stderr, flush=True)
                for error, count in figures["errors"].items():
                    print(f"{count} x {error}", file=sys.stderr, flush=True)
                yield Row(label, run, figures)
                if run.stopped is not None:
                    return


def report(options: argparse.Namespace, rows: Sequence[Row], steps: list[Step] | None) -> bool:
    """Find the causes, print the table and write the files; whether all requests finished."""
    first = rows[0].figures
    start, clocks = first["server_start_s"], [row.figures["sm_clock_mhz"] for row in rows]
    facts = [options.scenario or first["model"]]
    if start is not None:
        facts.append(f"server ready after {start:.1f} s")
    if all(clocks):
        facts.append(f"SM clock at least {min(clock['min'] for clock in clocks):.0f} MHz")
    print(f"\n{', '.join(facts)}\n\n{HEADER}")
    for row in rows:
        if gap := row.figures["largest_gap"]:
            origin = row.run.origin
            begin = origin + gap["begin_s"]
            stalls = [(origin + one, origin + other) for one, other in row.run.stalls]
            gap["cause"] = cause((begin, begin + gap["ms"] / 1e3), steps, stalls)
        print(table_row(row.label, row.figures), flush=True)
        seen = row.run.observations
        if options.output:
            every = {"observations": list(map(asdict, seen))} if options.observations else {}
            with options.output.open("a") as file:
                file.write(json.dumps(row.figures | every) + "\n")
        if options.plot:
            plot(seen, options.plot / re.sub(r"\W+", "_", f"{first['model']}_{row.label}"))
    return not any(row.figures["errors"] for row in rows)


def plot(observations: Sequence[Observation], folder: Path) -> None:
    """Write ``first.png``, ``gaps.png`` (distributions) and ``timeline.png`` (running requests)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    done = [seen for seen in observations if seen.error is None]
    for name, caption, values in (
        ("first", "time to first token, ms", [seen.first_token * 1e3 for seen in done]),
        ("gaps", "gap, ms", [(end - at) * 1e3 for seen in done for at, end, _ in seen.gaps]),
    ):
        figure, axes = plt.subplots(figsize=(6, 4))
        axes.ecdf(values)
        axes.set(xlabel=caption, ylabel="share", xlim=(0, None))
        axes.grid(alpha=0.3)
        figure.savefig(folder / f"{name}.png", dpi=120, bbox_inches="tight")
        plt.close(figure)
    changes = sorted([(seen.sent or 0.0, 1) for seen in done] + [(seen.ended, -1) for seen in done])
    times, running = [0.0], [0]
    for when, change in changes:
        times.append(when)
        running.append(running[-1] + change)
    figure, axes = plt.subplots(figsize=(8, 4))
    axes.step(times, running, where="post")
    axes.set(xlabel="seconds", ylabel="requests in the server")
    axes.grid(alpha=0.3)
    figure.savefig(folder / "timeline.png", dpi=120, bbox_inches="tight")
    plt.close(figure)


def measured(options: argparse.Namespace, url: str, start_s: float | None, stop: Stop) -> list[Row]:
    """The rows of :func:`measure`, also if a signal came between two of them."""
    rows = []
    try:
        for row in measure(options, url, start_s, stop):
            rows.append(row)  # noqa: PERF402 (those before a signal are kept)
    except KeyboardInterrupt:
        if not rows:
            raise
    return rows


def run_one(options: argparse.Namespace, stop: Stop) -> bool:
    """Start the server, if it is to be started, and measure it; whether all requests finished."""
    if options.url:
        size = SHAPES[options.model]["vocab_size"] if options.model in SHAPES else 32000
        options.token_range = options.token_range or (1000, size - 3000)
        rows = measured(options, options.url.rstrip("/"), None, stop)
        return report(options, rows, None)
    with tempfile.TemporaryDirectory() as folder:
        model, place = options.model, Path(folder)
        if model in SHAPES:
            model = str(write_config(model, place / model))
        if options.token_range is None:
            config = Path(model) / "config.json"
            if not config.is_file():
                raise SystemExit(f"{config} is not there to say the vocabulary: give --token-range")
            size = json.loads(config.read_text())["vocab_size"]
            options.token_range = (1000, size - 3000) if size > 5000 else (3, size)
        trace = place / "trace.json"
        given = serve_options(options)
        if options.trace and can("trace"):
            given += ["--trace", str(trace), "--trace-seconds", "100000"]
        caches = {name: str(place / name) for name in CACHES} if options.cold else {}
        with Server(model, given, **caches) as server:
            rows = measured(options, server.url, server.start_s, stop)
        return report(options, rows, read_trace(trace))


def can(setting: str) -> bool:
    """Whether this version of ``engine-core serve`` has a setting."""
    from engine_core.server.settings import ServerSettings

    return setting in ServerSettings.model_fields


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = made.add_argument_group("what is measured")
    what.add_argument("--scenario", choices=[*SCENARIOS, "all"], help="other options come on top")
    what.add_argument("--list", action="store_true", help="show the scenarios")
    what.add_argument("--model", help=f"{', '.join(SHAPES)}, or a model's path")
    what.add_argument("--tokenizer", type=Path, help="folder; a shape has one from .cache")
    what.add_argument("--cold", action="store_true", help="start with empty kernel caches")
    what.add_argument("--passes", type=int, default=1, help="times that all rows are run")
    what.add_argument("--url", help="of a server that runs; none is started")
    what.add_argument("--served-name", help="the server's first if not given")
    what.add_argument("--api-key")
    load = made.add_argument_group("load")
    load.add_argument("--rates", type=numbers, default=[], help="arrivals a second: 4,16")
    load.add_argument("--seconds", type=float, default=60.0, help="of arrivals at each rate")
    load.add_argument("--burst", type=int, default=0, help="requests that come all at once")
    load.add_argument("--requests", type=int, help="at each rate, in place of --seconds")
    load.add_argument("--concurrency", type=int, help="requests in flight at most: a closed loop")
    load.add_argument("--prompt-tokens", type=length, default="lognormal:365.04:1.0:20:3000")
    load.add_argument("--output-tokens", type=length, default="lognormal:148.41:0.8:10:800")
    load.add_argument("--token-range", type=int, nargs=2, metavar=("LOW", "END"))
    load.add_argument("--temperature", type=float, default=0.0)
    load.add_argument("--shared-prefix", type=int, default=0, help="tokens; turns the cache on")
    load.add_argument("--schemas", type=float, default=0.0, help="share with a JSON schema")
    load.add_argument("--long", type=int, help="tokens of one prompt beside rows that decode")
    load.add_argument("--rows", type=int, default=16)
    load.add_argument("--long-after", type=float, default=5.0, help="seconds after the rows")
    load.add_argument("--row-prompt", type=int, default=512, help="tokens of a row's prompt")
    load.add_argument("--row-tokens", type=int, default=16000, help="that a row generates at most")
    load.add_argument("--seed", type=int, default=5)
    how = made.add_argument_group("client")
    how.add_argument("--processes", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 4)))
    how.add_argument("--patience", type=float, default=120.0, help="seconds after the last arrival")
    how.add_argument(
        "--count",
        choices=("token_ids", "usage", "events"),
        default="token_ids",
        help="how the server tells an event's tokens: return_token_ids, continuous_usage_stats, "
        "or not at all",
    )
    report = made.add_argument_group("report")
    report.add_argument("--no-trace", dest="trace", action="store_false", help="seek no causes")
    report.add_argument("--output", type=Path, help="file that a JSON line a row is added to")
    report.add_argument("--observations", action="store_true", help="add each request to it")
    report.add_argument("--plot", type=Path, help="folder for PNG files")
    report.add_argument("--ttft-target", type=float, help="milliseconds, for good_requests_s")
    report.add_argument("--tpot-target", type=float, help="milliseconds, for good_requests_s")
    return made


def parse(arguments: Sequence[str], onto: argparse.Namespace | None = None) -> argparse.Namespace:
    """Options of the command, on top of others, and after ``--`` those of ``engine-core serve``."""
    given = list(arguments)
    place = given.index("--") if "--" in given else len(given)
    options = parser().parse_args(given[:place], copy(onto))
    options.serve = given[place + 1 :]
    return options


def expand(options: argparse.Namespace, arguments: Sequence[str]) -> list[argparse.Namespace]:
    """The scenarios that are meant, each with the options that were given on top."""
    if options.scenario is None:
        return [options]
    names = SCENARIOS if options.scenario == "all" else (options.scenario,)
    made = []
    for name in names:
        own = parse(shlex.split(SCENARIOS[name]))
        given = parse(arguments, own)
        given.serve = own.serve + options.serve
        given.scenario = name
        made.append(given)
    return made


def main() -> None:
    """Run what was asked for."""
    arguments = sys.argv[1:]
    options = parse(arguments)
    if options.list:
        for name, line in SCENARIOS.items():
            print(f"{name:14}{line}")
        return
    runs = expand(options, arguments)
    for run in runs:
        if run.model is None and run.url is None:
            raise SystemExit("give --model or --scenario, or the --url of a server that runs")
        if not (run.rates or run.burst or run.long):
            raise SystemExit("give --rates, --burst or --long")
        if any(rate <= 0 for rate in run.rates):
            raise SystemExit(f"--rates {run.rates}: a rate is above 0; --burst is for all at once")
        if run.plot and find_spec("matplotlib") is None:
            raise SystemExit("--plot needs matplotlib: pip install 'engine-core-llm[bench]'")
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    results = []
    for run in runs:  # all of them, whatever fails
        results.append(run_one(run, stop))
        if stop.when is not None:
            sys.exit(130)
    if not all(results):
        sys.exit(1)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
        sys.exit(0)
    sys.exit(130)
