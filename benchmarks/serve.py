"""Load a running OpenAI-compatible server and report what its clients see.

    engine-core serve MODEL --port 8000
    python benchmarks/serve.py --url http://127.0.0.1:8000 --requests 200 --rate 4 \
        --prompt-tokens uniform:100:1000 --output-tokens lognormal:100:0.6 \
        --ttft-target 500 --tpot-target 50 --json result.json --plot plots

Requests arrive as a Poisson process of ``--rate`` a second, or all at once; each streams a
completion of a random prompt of token ids, greedy, its end of sequence ignored. A request counts
towards the goodput if its time to first token and its mean time per token after it are within the
targets. Works against any server with ``/v1/completions`` that takes token ids and ``ignore_eos``.

Needs aiohttp, and matplotlib for ``--plot``: ``pip install 'engine-core-llm[bench]'``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Observation:
    """The client's view of one request. Times are seconds from the start of the run.

    Attributes:
        arrival: when the request was sent.
        prompt_tokens: length of its prompt.
        wanted: tokens asked for.
        chunks: when each chunk with text or tokens came.
        finished: when the stream ended, or None.
        output_tokens: as the server's usage says.
        error: what went wrong, or None.
    """

    arrival: float
    prompt_tokens: int
    wanted: int
    chunks: list[float] = field(default_factory=list)
    finished: float | None = None
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.chunks[0] - self.arrival

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first."""
        return (self.chunks[-1] - self.chunks[0]) / max(1, self.output_tokens - 1)


def distribution(text: str) -> Callable[[random.Random], int]:
    """Parse ``N``, ``uniform:LOW:HIGH`` or ``lognormal:MEDIAN:SIGMA``."""
    kind, *numbers = text.split(":")
    try:
        if kind == "uniform":
            low, high = map(int, numbers)
            return lambda draw: draw.randint(low, high)
        if kind == "lognormal":
            median, sigma = map(float, numbers)
            return lambda draw: max(1, round(draw.lognormvariate(math.log(median), sigma)))
        fixed = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA"
        ) from None
    return lambda draw: fixed


async def complete(
    session: aiohttp.ClientSession, body: dict[str, Any], seen: Observation, start: float
) -> None:
    """Stream one completion and note when its chunks come."""
    try:
        async with session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                seen.error = f"status {response.status}: {(await response.text())[:200]}"
                return
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter() - start
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    seen.error = str(chunk["error"])[:200]
                    return
                if chunk.get("choices"):
                    seen.chunks.append(now)
                if chunk.get("usage"):
                    seen.output_tokens = chunk["usage"]["completion_tokens"]
    except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
        seen.error = f"{type(error).__name__}: {error}"
        return
    if not seen.chunks or not seen.output_tokens:
        seen.error = "the stream ended without a token or without its usage"
        return
    seen.finished = time.perf_counter() - start


async def load(options: argparse.Namespace) -> list[Observation]:
    """Send every request at its time; the observations in the order of arrival."""
    draw = random.Random(options.seed)
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    limit = asyncio.Semaphore(options.concurrency) if options.concurrency else None
    timeout = aiohttp.ClientTimeout(total=None, sock_read=options.timeout)
    async with aiohttp.ClientSession(
        options.url, headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        model = options.model
        if model is None:
            async with session.get("/v1/models") as response:
                response.raise_for_status()
                model = (await response.json())["data"][0]["id"]
        start = time.perf_counter()
        observations: list[Observation] = []

        async def one(body: dict[str, Any], seen: Observation) -> None:
            if limit is None:
                await complete(session, body, seen, start)
                return
            async with limit:
                seen.arrival = time.perf_counter() - start
                await complete(session, body, seen, start)

        async with asyncio.TaskGroup() as group:
            due = 0.0
            for _ in range(options.requests):
                due += draw.expovariate(options.rate) if options.rate else 0.0
                prompt = [
                    draw.randrange(*options.token_range) for _ in range(options.prompt_tokens(draw))
                ]
                wanted = options.output_tokens(draw)
                body = {
                    "model": model,
                    "prompt": prompt,
                    "max_tokens": wanted,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
                await asyncio.sleep(max(0.0, due - (time.perf_counter() - start)))
                seen = Observation(time.perf_counter() - start, len(prompt), wanted)
                observations.append(seen)
                group.create_task(one(body, seen))
    return observations


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(
    observations: Sequence[Observation], ttft_target: float | None, tpot_target: float | None
) -> dict[str, Any]:
    """Figures of a run; times in milliseconds, targets in milliseconds or None."""
    done = [seen for seen in observations if seen.finished is not None]
    seconds = max((seen.finished or 0.0 for seen in done), default=math.nan)
    gaps = [b - a for seen in done for a, b in zip(seen.chunks, seen.chunks[1:], strict=False)]
    series = {
        "ttft_ms": [seen.ttft * 1e3 for seen in done],
        "tpot_ms": [seen.tpot * 1e3 for seen in done if seen.output_tokens > 1],
        "inter_chunk_ms": [gap * 1e3 for gap in gaps],
        "e2e_ms": [((seen.finished or 0.0) - seen.arrival) * 1e3 for seen in done],
    }
    good = [
        seen
        for seen in done
        if (ttft_target is None or seen.ttft * 1e3 <= ttft_target)
        and (tpot_target is None or seen.tpot * 1e3 <= tpot_target)
    ]
    errors: dict[str, int] = {}
    for seen in observations:
        if seen.error is not None:
            errors[seen.error] = errors.get(seen.error, 0) + 1
    return {
        "requests": len(observations),
        "completed": len(done),
        "errors": errors,
        "seconds": seconds,
        "requests_per_s": len(done) / seconds,
        "output_tokens_per_s": sum(seen.output_tokens for seen in done) / seconds,
        "prompt_tokens_per_s": sum(seen.prompt_tokens for seen in done) / seconds,
        "goodput_requests_per_s": len(good) / seconds,
        **{
            name: {f"p{p}": percentile(values, p) for p in PERCENTILES}
            for name, values in series.items()
        },
    }


def show(figures: dict[str, Any]) -> None:
    """Print the summary as a table."""
    print(
        f"{figures['completed']} of {figures['requests']} requests in {figures['seconds']:.1f} s: "
        f"{figures['requests_per_s']:.2f} requests/s (good {figures['goodput_requests_per_s']:.2f})"
        f", {figures['output_tokens_per_s']:.0f} output tokens/s, "
        f"{figures['prompt_tokens_per_s']:.0f} prompt tokens/s"
    )
    print(f"{'':16}" + "".join(f"{f'p{p}':>10}" for p in PERCENTILES))
    for name, values in figures.items():
        if isinstance(values, dict) and name != "errors":
            print(f"{name:16}" + "".join(f"{values[f'p{p}']:10.1f}" for p in PERCENTILES))
    for error, count in figures["errors"].items():
        print(f"{count} x {error}", file=sys.stderr)


def plot(observations: Sequence[Observation], folder: Path) -> None:
    """Write ``ttft.png``, ``tpot.png`` (distributions) and ``timeline.png`` (running requests)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    done = [seen for seen in observations if seen.finished is not None]
    for name, label, values in (
        ("ttft", "time to first token, ms", [seen.ttft * 1e3 for seen in done]),
        ("tpot", "time per token after it, ms", [seen.tpot * 1e3 for seen in done]),
    ):
        figure, axes = plt.subplots(figsize=(6, 4))
        axes.ecdf(values)
        axes.set(xlabel=label, ylabel="share of requests", xlim=(0, None))
        axes.grid(alpha=0.3)
        figure.savefig(folder / f"{name}.png", dpi=120, bbox_inches="tight")
        plt.close(figure)
    changes = sorted(
        [(seen.arrival, 1) for seen in done] + [(seen.finished or 0.0, -1) for seen in done]
    )
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="served name; the server's first if not given")
    parser.add_argument("--api-key")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rate", type=float, help="arrivals a second; all at once if not given")
    parser.add_argument("--concurrency", type=int, help="requests at once at most")
    parser.add_argument("--prompt-tokens", type=distribution, default=distribution("256"))
    parser.add_argument("--output-tokens", type=distribution, default=distribution("64"))
    parser.add_argument("--token-range", type=int, nargs=2, default=(100, 1000))
    parser.add_argument("--ttft-target", type=float, help="milliseconds")
    parser.add_argument("--tpot-target", type=float, help="milliseconds")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds without a byte")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures and every observation")
    parser.add_argument("--plot", type=Path, help="folder for PNG files")
    options = parser.parse_args()
    observations = asyncio.run(load(options))
    figures = summarise(observations, options.ttft_target, options.tpot_target)
    show(figures)
    if options.json is not None:
        every = [asdict(seen) for seen in observations]
        options.json.write_text(json.dumps({"figures": figures, "observations": every}))
    if options.plot is not None:
        plot(observations, options.plot)
    if figures["completed"] < figures["requests"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
