"""The cost of the HTTP service: the same requests offline and through a server, side by side.

    python benchmarks/serve_overhead.py [--rounds 3] [--model .cache/models/SmolLM2-...gguf]
    python benchmarks/serve_overhead.py --crowd 900 [--rounds 5]
    python benchmarks/serve_overhead.py --limits [--rounds 5]

Two figures, each the median of rounds in which both sides take turns on this machine:

- time to first token with 50 streams at once on a model of almost no weight, whose steps take about
  a millisecond: what HTTP, the second process and the load generator add to it. Offline, the engine
  is kept as full by a loop that adds a request whenever one ends.
- output tokens a second of 32 requests at once on SmolLM2-135M in bfloat16.

With ``--crowd``, instead, 100 streams on the model of almost no weight, in turns alone and beside
so many connections of a process of its own: of ten, eight wait after an answer, one sends its
headers a byte at a time, and one its body. With ``--limits`` two servers take turns, one of which
holds its clients to no limits of connections, headers, times and reading. Both print the HTTP
process's own seconds too, which other work on the machine changes less than a throughput.

The load generator (benchmarks/serve.py) runs on the same cores as the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

# In place of this folder, whose kernels.py is not the package of that name that transformers knows.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.serve import ROOT, SMOLLM2, Server

Load = dict[str, Any]
STREAMS = 50
# Answers of different lengths, so that requests do not all end, and begin, at once.
FIRST_TOKEN: Load = {
    "requests": 600,
    "concurrency": STREAMS,
    "prompt": 64,
    "output": (16, 48),
    "tokens": (3, 320),
}
THROUGHPUT: Load = {
    "requests": 32,
    "concurrency": 32,
    "prompt": 128,
    "output": (96, 96),
    "tokens": (100, 1000),
}


BESIDE_A_CROWD: Load = {**FIRST_TOKEN, "requests": 400, "concurrency": 100}
_HEADERS = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
# What each of ten connections sends at once, and what again and again.
MEMBERS = (
    *[(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"")] * 8,
    (_HEADERS, b"a"),
    (_HEADERS + b"Content-Length: 9999\r\n\r\n{", b" "),
)


async def be_a_crowd(host: str, port: int, count: int) -> None:
    """Keep ``count`` connections open; say so once they are."""
    opened = asyncio.Semaphore(0)

    async def member(first: bytes, again: bytes) -> None:
        told = False
        while True:
            try:
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(first)
                if not told:
                    opened.release()
                told = True
                answers = asyncio.ensure_future(reader.read())
                while not answers.done():
                    writer.write(again)
                    await asyncio.wait([answers], timeout=1)
                answers.result()
                writer.close()
            except OSError:
                await asyncio.sleep(0.5)

    async with asyncio.TaskGroup() as group:
        for index in range(count):
            group.create_task(member(*MEMBERS[index % len(MEMBERS)]))
        for _ in range(count):
            await opened.acquire()
        print(flush=True)


def beside_a_crowd(served: Served, count: int, rounds: int) -> None:
    """Print what streams get alone, and beside a crowd."""
    address = served.url.removeprefix("http://").replace(":", " ").split()
    command = [sys.executable, __file__, "--be-a-crowd", *address, str(count)]
    turns: list[list[dict[str, float]]] = [[], []]
    for turn in range(rounds + 1):
        alone = served.run(BESIDE_A_CROWD)
        with subprocess.Popen(command, stdout=subprocess.PIPE) as crowd:
            assert crowd.stdout is not None
            crowd.stdout.readline()
            beside = served.run(BESIDE_A_CROWD)
            crowd.kill()
        if turn:
            for side, figures in zip(turns, (alone, beside), strict=True):
                side.append(figures)
    show(turns, f"alone and beside {count}")


def show(turns: list[list[dict[str, float]]], sides: str) -> None:
    """Print the figures of both sides, and the median and quartiles of the turns' ratios."""
    for name in turns[0][0]:
        first, second = ([run[name] for run in side] for side in turns)
        ratios = [y / x for x, y in zip(first, second, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        medians = statistics.median(first), statistics.median(second)
        print(
            f"{name}, {sides}: medians {medians[0]:.3g} and {medians[1]:.3g}, "
            f"{medians[1] / medians[0]:.1%}; ratios of {len(ratios)} turns: median {middle:.1%}, "
            f"quartiles {low:.1%} and {high:.1%}"
        )


def serve_without_limits() -> None:
    """``engine-core`` with uvicorn's own connections, that write as ours do."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    from engine_core.cli.root import main
    from engine_core.server import run
    from engine_core.server.connection import WRITER, Writer

    class Connection(HttpToolsProtocol):
        resumed: Any = None

        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            self.scope[WRITER] = Writer(self)  # type: ignore[literal-required]

        def resume_writing(self) -> None:
            super().resume_writing()
            if self.resumed is not None:
                self.resumed()

    run.connection_class = lambda *_: Connection  # type: ignore[assignment]
    sys.argv[1:2] = []
    main()


def with_and_without_limits(tiny: Path, flags: list[str], rounds: int) -> None:
    """Print what streams get from a server with limits, and from one without."""
    turns: list[list[dict[str, float]]] = [[], []]
    with Unlimited(str(tiny), flags) as without, Served(str(tiny), flags) as limited:
        for turn in range(rounds + 1):
            sides = [(0, without), (1, limited)]
            for side, server in sides if turn % 2 else sides[::-1]:
                figures = server.run(BESIDE_A_CROWD)
                if turn:
                    turns[side].append(figures)
    show(turns, "without and with limits")


class Offline:
    """The engine in a process of its own, asked over its standard input."""

    def __init__(self, model: Path, options: dict[str, Any]) -> None:
        command = [sys.executable, __file__, "--serve-offline", str(model), json.dumps(options)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, load: Load) -> dict[str, float]:
        """Figures of a load."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(load), file=self._process.stdin, flush=True)
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve_offline(model: str, options: dict[str, Any]) -> None:
    """Answer loads, one per line: keep the engine as full as ``concurrency`` clients would."""
    from engine_core import EngineConfig, SamplingParams
    from engine_core.engine import Engine

    engine = Engine(model, EngineConfig(**options))
    for line in sys.stdin:
        load = json.loads(line)
        draw = random.Random(0)
        params = SamplingParams(temperature=0, ignore_eos=True)
        left, added = load["requests"], {}
        tokens = 0
        firsts: list[float] = []
        start = time.perf_counter()
        while left or engine.has_unfinished:
            while left and len(added) < load["concurrency"]:
                prompt = [draw.randrange(*load["tokens"]) for _ in range(load["prompt"])]
                length = draw.randint(*load["output"])
                request = engine.add_request(prompt, params.replace(max_tokens=length))
                added[request] = time.perf_counter()
                tokens += length
                left -= 1
            for output in engine.step():
                if len(output.outputs[0].token_ids) == 1:
                    firsts.append(time.perf_counter() - added[output.request_id])
                if output.finished:
                    del added[output.request_id]
        seconds = time.perf_counter() - start
        figures = {
            "ttft_ms": statistics.median(firsts) * 1e3,
            "tokens_s": tokens / seconds,
        }
        print(json.dumps(figures), flush=True)


class Served(Server):
    """``engine-core serve`` on a free port."""

    def cpu_s(self) -> float:
        """Seconds of a processor that the HTTP process has had."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def run(self, load: Load) -> dict[str, float]:
        """Figures of a load, as its clients see them."""
        before = self.cpu_s()
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as result:
            options = {
                "--url": self.url,
                "--burst": load["requests"],
                "--concurrency": load["concurrency"],
                "--prompt-tokens": load["prompt"],
                "--output-tokens": "uniform:{}:{}".format(*load["output"]),
                "--output": result.name,
            }
            command = [sys.executable, str(ROOT / "benchmarks" / "serve.py")]
            command += [str(part) for pair in options.items() for part in pair]
            command += ["--token-range", *map(str, load["tokens"])]
            subprocess.run(
                command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            figures = json.loads(Path(result.name).read_text())
        return {
            "ttft_ms": figures["first_token_ms"]["p50"],
            "tokens_s": figures["output_tokens_s"],
            "http_cpu_ms_per_request": (self.cpu_s() - before) / load["requests"] * 1e3,
        }


class Unlimited(Served):
    """The same without limits for clients."""

    COMMAND = (sys.executable, __file__, "--unlimited")


def compare(
    offline: Offline, served: Served, load: Load, rounds: int
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Figures of both sides, round by round, after one that is not counted."""
    turns = [(offline.run(load), served.run(load)) for _ in range(rounds + 1)]
    return [alone for alone, _ in turns[1:]], [through for _, through in turns[1:]]


def main() -> None:
    if sys.argv[1:2] == ["--unlimited"]:
        serve_without_limits()
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=SMOLLM2)
    parser.add_argument("--crowd", type=int, default=0, help="connections beside 100 streams")
    parser.add_argument("--limits", action="store_true", help="what the limits cost")
    parser.add_argument("--serve-offline", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--be-a-crowd", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be_a_crowd:
        host, port, count = options.be_a_crowd
        asyncio.run(be_a_crowd(host, int(port), int(count)))
        return
    if options.serve_offline:
        model, given = options.serve_offline
        serve_offline(model, json.loads(given))
        return

    sys.path.append(str(ROOT / "tests"))
    from serving import write_tiny_model

    print(f"{time.strftime('%Y-%m-%d')}, {len(os.sched_getaffinity(0))} cores")
    with tempfile.TemporaryDirectory() as folder:
        tiny = write_tiny_model(Path(folder) / "tiny")
        settings = {"enable_prefix_caching": False, "kv_cache_memory": "64MiB"}
        flags = ["--no-enable-prefix-caching", "--kv-cache-memory", "64MiB"]
        if options.limits:
            with_and_without_limits(tiny, flags, options.rounds)
            return
        if options.crowd:
            theirs = Served(str(tiny), flags)
            beside_a_crowd(theirs, options.crowd, options.rounds)
            theirs.close()
            return
        ours, theirs = Offline(tiny, settings), Served(str(tiny), flags)
        alone, through = compare(ours, theirs, FIRST_TOKEN, options.rounds)
        ours.close()
        theirs.close()
        first = [statistics.median(run["ttft_ms"] for run in side) for side in (alone, through)]
        print(
            f"time to first token, {STREAMS} streams, almost no weight: offline {first[0]:.1f} ms, "
            f"through HTTP {first[1]:.1f} ms, added {first[1] - first[0]:.1f} ms"
        )
    settings = {"enable_prefix_caching": False, "kv_cache_memory": "1GiB", "max_model_len": 1024}
    flags = ["--no-enable-prefix-caching", "--kv-cache-memory", "1GiB", "--max-model-len", "1024"]
    ours, theirs = Offline(options.model, settings), Served(str(options.model), flags)
    alone, through = compare(ours, theirs, THROUGHPUT, options.rounds)
    ours.close()
    theirs.close()
    rate = [statistics.median(run["tokens_s"] for run in side) for side in (alone, through)]
    print(
        f"throughput, {options.model.stem}, 32 requests: offline {rate[0]:.0f} tokens/s, "
        f"through HTTP {rate[1]:.0f} ({rate[1] / rate[0]:.0%})"
    )


if __name__ == "__main__":
    main()
