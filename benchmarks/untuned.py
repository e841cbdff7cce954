"""Measure shapes, batches and lengths that nothing was tuned for, beside vLLM's published figures.

    python benchmarks/untuned.py [--only 1b-long,8b-200] [--rounds 3] [--seconds 290] [--profile]
    python benchmarks/untuned.py --list
    python benchmarks/untuned.py --tiny              # tiny models on a CPU, to try the script

Prints one table, in Markdown. Ours is measured here and now, the median of ``--rounds`` rounds in
which the rows of a model take turns. Nothing of vLLM is run: its figures are the constants
``PUBLISHED``, of who measured them on another H200. They are also scaled to this card if its copy
or its product, measured before each model, are faster than that one's: steps by the copy, first
tokens by the product, the mixes by the faster. Where they are slower nothing is scaled, since how
those rates were measured is not known. The floor is the larger of the weights' bytes at 4.28 TB/s
and the products at 781 TFLOP/s, plus the bytes of the cache.

- Steps: prompts of 700 tokens (15,000) are completed with 97. They are in the prefix cache, so that
  all rows begin within a step or few; the time counts from where the last has its first token to
  where the first one ends, by the steps between.
- First tokens: new prompts, of which nothing is cached, though prefix caching is on; in a round the
  least of three, as in ``benchmarks/gpu.py``.
- Mixes: output tokens a second of 256 requests of 100 to 1024 tokens each way, as in
  ``benchmarks/gpu.py``, and of 400 with the log-normal lengths of ``benchmarks/serve.py``. Those of
  the published figure are not known, so that this row is only about the same.
- Starts: ``benchmarks/start.py --warm-up`` with an empty kernel cache. vLLM's is all of its start,
  and is compared with ours until all is captured.

Sampled rows have temperature 0.8 and top-p 0.95; with random weights their logits are even. Each
model runs in a process of its own, and a row or a model that fails is named and left out. After
``--seconds`` what is not done is left out. Clock and power are medians of nvidia-smi's readings.
``--profile`` runs each step and first token once more, and prints where a step's or its time went.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workloads import SHAPES
from engine_core.bench.workloads import mix_requests, random_ids

# Where the figures of PUBLISHED are from.
SOURCE = "vLLM 0.25.1 on another H200, as issue 25 had it on 2026-11-28; nothing of it was run here"
# The ceilings of the card that they were measured on: bytes read and written, and products.
BANDWIDTH, PRODUCTS = 4.28e12, 781e12
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
LOG_NORMAL = ((365.04, 1.0, 20, 3000), (148.41, 0.8, 10, 800))
RESULT = "RESULT "


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        model: a name of ``SHAPES``.
        kind: step, first, mix, lognormal or start.
        rows: that decode, or requests.
        tokens: of each prompt, if all are as long.
        sampled: or greedy.
        output: tokens that a step's prompts are completed with.
        shorter: by what the lengths of a mix are divided.
    """

    model: str
    kind: str
    rows: int = 1
    tokens: int = 700
    sampled: bool = False
    output: int = 97
    shorter: int = 1

    @property
    def label(self) -> str:
        """Name of the row in the table."""
        text = {
            "step": f"step of {self.rows} rows at {self.tokens:,}, ms",
            "first": f"first token of {self.tokens:,}, ms",
            "mix": f"mix of {self.rows} requests, tokens/s",
            "lognormal": f"{self.rows} requests, log-normal lengths, tokens/s",
            "start": "start, empty kernel cache, until all is captured, s",
        }[self.kind]
        return f"{self.model}: {text}{', sampled' if self.sampled else ''}"


ROWS = {
    "8b-start": Row("llama3_8b", "start"),
    "8b-100": Row("llama3_8b", "step", 100),
    "8b-200": Row("llama3_8b", "step", 200),
    "8b-200-sampled": Row("llama3_8b", "step", 200, sampled=True),
    "8b-first": Row("llama3_8b", "first", tokens=4096),
    "8b-mix": Row("llama3_8b", "mix", 256),
    "8b-lognormal": Row("llama3_8b", "lognormal", 400, sampled=True),
    "1b-long": Row("llama3_2_1b", "step", 8, 15_000),
    "1b-first": Row("llama3_2_1b", "first", tokens=30_000),
    "1b-100": Row("llama3_2_1b", "step", 100),
    "1b-200": Row("llama3_2_1b", "step", 200),
    "1b-32-sampled": Row("llama3_2_1b", "step", 32, sampled=True),
    "1b-200-sampled": Row("llama3_2_1b", "step", 200, sampled=True),
    "7b-100": Row("qwen2_5_7b", "step", 100),
    "7b-200": Row("qwen2_5_7b", "step", 200),
}
# Ours when it was published, and vLLM's. Our start was 25.4 to the first token, and then 20.2.
PUBLISHED: dict[str, tuple[float, float | None]] = {
    "8b-start": (45.6, 60.5),
    "8b-100": (8.11, 8.46),
    "8b-200": (12.49, 12.48),
    "8b-200-sampled": (13.66, 13.21),
    "8b-first": (94.4, 94.9),
    "8b-mix": (10524, 10338),
    # vLLM made 6,713 there of other requests: the issue does not say which lengths it had.
    "8b-lognormal": (7074, None),
    "1b-long": (2.95, 2.41),
    "1b-first": (237, 222),
    "1b-100": (2.29, 2.92),
    "1b-200": (3.21, 4.13),
    "1b-32-sampled": (2.04, 2.00),
    "1b-200-sampled": (4.46, 4.44),
    "7b-100": (6.41, None),
    "7b-200": (10.58, None),
}
# Times as fast as vLLM, as asked: less where products and power bound both.
ASKED, ASKED_OF_PRODUCTS = 1.05, 1.02

TINY = {
    **SHAPES["llama3_8b"],
    "torch_dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def smaller(row: Row) -> Row:
    """A row for a tiny model on a CPU."""
    return row._replace(rows=min(row.rows, 4), tokens=row.tokens // 100, output=9, shorter=100)


class Readings:
    """Clock and power of the card, read four times a second."""

    def __init__(self, card: str | None) -> None:
        """Begin to read; nothing is read without a card."""
        self._all: list[tuple[float, float, float]] = []
        self._process: subprocess.Popen[str] | None = None
        if card is None:
            return
        query = "--query-gpu=clocks.sm,power.draw"
        command = ["nvidia-smi", "-i", card, query, "--format=csv,noheader,nounits", "-lms", "250"]
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            with contextlib.suppress(ValueError):
                clock, power = map(float, line.split(","))
                self._all.append((time.monotonic(), clock, power))

    def since(self, begin: float) -> list[tuple[float, float]]:
        """Clock and power of each reading from then on."""
        return [(clock, power) for at, clock, power in self._all if at >= begin]

    def close(self) -> None:
        """Read no more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def ceilings() -> tuple[float, float]:
    """Bytes a second of a copy, and operations a second of a product, on this card."""
    import torch

    def rate(work: float, call: Callable[[], object], seconds: float) -> float:
        times: list[float] = []
        call()
        while sum(times) < seconds:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(4):
                call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return 4 * work / min(times)

    def copied() -> float:
        source, target = torch.empty(2, 2**31, dtype=torch.uint8, device="cuda").random_()
        return rate(2 * source.numel(), lambda: target.copy_(source), 0.3)

    def multiplied() -> float:
        left, right = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device="cuda")
        return rate(2 * len(left) ** 3, lambda: left @ right, 0.6)

    rates = copied(), multiplied()
    torch.cuda.empty_cache()
    return rates


def lengths_of(row: Row) -> list[tuple[int, int]]:
    """The tokens of each request of a mix: its prompt's, and those that complete it."""
    if row.kind == "mix":
        # Of this vocabulary the ids are drawn as for any: lengths are the same.
        prompts, outputs = mix_requests(SHAPES[row.model]["vocab_size"], row.rows)
        pairs = [*zip(map(len, prompts), outputs, strict=True)]
    else:
        draw = random.Random(0)
        pairs = [tuple(log_normal(draw, *of) for of in LOG_NORMAL) for _ in range(row.rows)]
    return [(-(-size // row.shorter), -(-output // row.shorter)) for size, output in pairs]


def log_normal(draw: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    """A length with this median, and the deviation of its logarithm."""
    return int(min(high, max(low, median * draw.lognormvariate(0.0, sigma))))


class Measured(NamedTuple):
    """A model that is measured.

    Attributes:
        llm: the engine.
        vocab: size of the vocabulary.
        draw: for new prompts.
        kept: the prompts that are in the prefix cache, by row.
    """

    llm: Any
    vocab: int
    draw: random.Random
    kept: dict[Row, list[list[int]]]

    def prompts(self, sizes: Sequence[int]) -> list[list[int]]:
        """New prompts."""
        return [random_ids(size, self.vocab, self.draw) for size in sizes]

    def complete(
        self, prompts: list[list[int]], lengths: Sequence[int], *, sampled: bool
    ) -> tuple[float, list[Any]]:
        """Seconds, and the outputs."""
        from engine_core import SamplingParams

        way = SAMPLED if sampled else {"temperature": 0.0}
        params = [
            SamplingParams(**way, seed=number, max_tokens=length, ignore_eos=True)
            for number, length in enumerate(lengths)
        ]
        begin = time.monotonic()
        outputs = self.llm.generate(prompts, params)
        seconds = time.monotonic() - begin
        assert [len(output.outputs[0].token_ids) for output in outputs] == list(lengths)
        return seconds, outputs

    def profile(self, key: str, row: Row) -> None:
        """Print the kernels of the row that take longest, for each step."""
        from torch.profiler import ProfilerActivity, profile

        prompts = self.kept.get(row) or self.prompts([row.tokens])
        count = row.output if row.kind == "step" else 1
        activity = ProfilerActivity.CPU if SHAPES[row.model] is TINY else ProfilerActivity.CUDA
        with profile(activities=[activity]) as result:
            self.complete(prompts, [count] * len(prompts), sampled=row.sampled)
        events = result.key_averages()
        events.sort(key=lambda event: -event.self_device_time_total)
        print(f"{key}: us and launches of a step, kernel")
        for event in events[:12]:
            each = event.self_device_time_total / count
            print(f"  {each:9.1f} {event.count / count:6.1f} {event.key[:90]}")

    def step_ms(self, row: Row) -> float:
        """Milliseconds of a decode step in which all rows take part."""
        lengths = [row.output] * row.rows
        if row not in self.kept:
            self.kept[row] = self.prompts([row.tokens] * row.rows)
            self.complete(self.kept[row], lengths, sampled=row.sampled)
        # The first of two finds a rested card.
        self.complete(self.kept[row], lengths, sampled=row.sampled)
        stats = type(self.llm.engine.step_stats)()
        self.llm.engine.step_stats = stats
        _, outputs = self.complete(self.kept[row], lengths, sampled=row.sampled)
        firsts = {output.metrics.first_token_time for output in outputs}
        begun = stats.prefill.steps + stats.mixed.steps
        if len(firsts) != begun:
            raise RuntimeError(f"{begun} steps had prompts, and {len(firsts)} first tokens")
        end = min(output.metrics.finished_time for output in outputs)
        return 1e3 * (end - max(firsts)) / (row.output - len(firsts))

    def figure(self, row: Row) -> float:
        """The row's figure, measured once."""
        if row.kind == "step":
            return self.step_ms(row)
        if row.kind == "first":
            prompts = (self.prompts([row.tokens]) for _ in range(3))
            times = [self.complete(prompt, [1], sampled=row.sampled)[0] for prompt in prompts]
            return 1e3 * min(times)
        sizes, outputs = zip(*lengths_of(row), strict=True)
        seconds, _ = self.complete(self.prompts(sizes), outputs, sampled=row.sampled)
        return sum(outputs) / seconds


def mix_floor(shape: Any, lengths: Sequence[tuple[int, int]]) -> float:
    """Output tokens a second, if each step of 256 rows and 8192 tokens takes what it must.

    ``shape`` is a ``benchmarks.draws.Draw``; prompts are computed in their order.
    """
    waiting = deque(lengths)
    running: list[list[int]] = []  # tokens in the cache, and those still to come
    done, seconds = 0, 0.0
    own = shape._replace(rows=1, tokens=1).cache
    weights = shape.layers * shape.layer_weights
    while waiting or running:
        room, new, products = 8192, [], 0
        while waiting and room and len(running) + len(new) < 256:
            size, output = waiting[0]
            took = min(room, size - done)
            pairs = 2 * (2 * done + took) * took * shape.heads * shape.head_dim * shape.layers
            products += 2 * weights * took + pairs
            room -= took
            done += took
            if done == size:
                waiting.popleft()
                done = 0
                new.append([size, output - 1])
        products += len(running) * shape.read_weights
        seconds += max(shape.read_weights / BANDWIDTH, products / PRODUCTS)
        seconds += own * sum(tokens for tokens, _ in running) / BANDWIDTH
        running = [[tokens + 1, left - 1] for tokens, left in running] + new
        running = [row for row in running if row[1]]
    return sum(output for _, output in lengths) / seconds


def floor(row: Row) -> float | None:
    """The row's, in the units of its figure."""
    from benchmarks.draws import Draw

    shape = Draw.of(SHAPES[row.model], row.rows, row.tokens + row.output // 2)
    if row.kind == "step":
        return 1e3 * shape.step_floor()
    if row.kind == "first":
        return 1e3 * shape.prompt_floor(row.tokens)
    if row.kind == "start":
        return None
    return mix_floor(shape, lengths_of(row))


def tell(key: str, **figures: object) -> None:
    """Tell the process that prints the table."""
    print(RESULT + json.dumps({"key": key, **figures}), flush=True)


def measure_model(arguments: argparse.Namespace) -> None:
    """Measure rows of one model in this process, round by round, and tell each figure."""
    import torch

    from benchmarks.gpu import build

    until = time.monotonic() + arguments.seconds
    rows = {key: ROWS[key] for key in arguments.only}
    (name,) = {row.model for row in rows.values()}
    card = None
    if arguments.tiny:
        SHAPES[name] = TINY
        rows = {key: smaller(row) for key, row in rows.items()}
    else:
        card = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        copied, multiplied = ceilings()
        tell(name, copied=copied, multiplied=multiplied)
        for key, row in rows.items():
            tell(key, floor=floor(row))
    readings = Readings(card)
    begin = time.monotonic()
    longest = max(row.tokens + row.output for row in rows.values()) + 64
    options: dict[str, Any] = {"enable_prefix_caching": True, "max_model_len": max(longest, 8192)}
    if arguments.tiny:
        options = {**options, "max_model_len": 2048, "kv_cache_memory": 2**24, "device": "cpu"}
    with (
        tempfile.TemporaryDirectory() as folder,
        build(name, Path(folder), deterministic=False, **options) as llm,
    ):
        llm.warmup()
        print(f"{name}: ready after {time.monotonic() - begin:.1f} s", flush=True)
        measured = Measured(llm, SHAPES[name]["vocab_size"], random.Random(1), {})
        for _, (key, row) in itertools.product(range(arguments.rounds), rows.items()):
            if time.monotonic() > until:
                print(f"{name}: no time is left", flush=True)
                break
            begin = time.monotonic()
            try:
                figure = measured.figure(row)
            except Exception:
                traceback.print_exc()
                llm.engine.core.check_alive()
                continue
            tell(key, figure=figure, readings=readings.since(begin))
        for key, row in rows.items():
            if arguments.profile and row.kind in ("step", "first") and time.monotonic() < until:
                measured.profile(key, row)
    readings.close()


def start_figures(arguments: argparse.Namespace, cache: Path, folder: Path) -> list[str]:
    """The command of a start with an empty kernel cache."""
    shape = "llama3_8b"
    options = ["--cache", str(cache), "--warm-up"]
    if arguments.tiny:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(TINY))
        shape, options = str(folder), [*options, "--device", "cpu"]
    return [sys.executable, str(Path(__file__).with_name("start.py")), shape, *options]


def lines_of(command: list[str], cache: Path, seconds: float) -> Iterator[str]:
    """Lines of a command, which is ended with all that it started after so many seconds."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        start_new_session=True,
    )

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        assert process.stdout is not None, "it was piped"
        yield from process.stdout
        if code := process.wait():
            yield f"ended with exit code {code}: {' '.join(command)}\n"
    finally:
        timer.cancel()
        end()
        process.wait()


class Results:
    """Figures and floors that were told so far.

    Args:
        tiny: beside what tiny models take nothing is shown that was published.
    """

    def __init__(self, *, tiny: bool) -> None:
        self.tiny = tiny
        self.floors: dict[str, float | None] = {}
        self.figures: dict[str, list[float]] = {}
        self.readings: dict[str, list[tuple[float, float]]] = {}
        self.copied: list[float] = []
        self.multiplied: list[float] = []

    def take(self, line: str) -> None:
        """Take a line of a process, which is printed if it is for people."""
        if not line.startswith(RESULT):
            print(line, end="", flush=True)
            return
        told = json.loads(line.removeprefix(RESULT))
        key = told["key"]
        if "copied" in told:
            self.copied.append(told["copied"])
            self.multiplied.append(told["multiplied"])
        elif "floor" in told:
            self.floors[key] = told["floor"]
        else:
            self.figures.setdefault(key, []).append(told["figure"])
            self.readings.setdefault(key, []).extend(told["readings"])
            print(f"{key} {told['figure']:.4g}", flush=True)

    def scale(self, row: Row) -> float:
        """How much faster than the card of vLLM's figures this one is, or 1."""
        if not self.copied or row.kind == "start":
            return 1.0
        of_bytes = statistics.median(self.copied) / BANDWIDTH
        of_products = statistics.median(self.multiplied) / PRODUCTS
        one = {"step": of_bytes, "first": of_products}
        return max(1.0, one.get(row.kind, max(of_bytes, of_products)))

    def cells(self, key: str, row: Row) -> list[str]:
        """A line of the table; empty are those that nobody measured."""
        figures = self.figures.get(key)
        if not figures:
            return [row.label, "not measured", *[""] * 8]
        if self.tiny:
            return [row.label, f"{statistics.median(figures):.4g}", *[""] * 8]
        ours, least = statistics.median(figures), self.floors.get(key)
        earlier, vllm = PUBLISHED[key]
        is_rate = row.kind in ("mix", "lognormal")

        def times(other: float) -> float:
            return ours / other if is_rate else other / ours

        cells = [row.label, f"{ours:.4g}", f"{min(figures):.4g} to {max(figures):.4g}"]
        cells += [""] * 2 if least is None else [f"{least:.4g}", f"{1 / times(least):.2f}"]
        cells.append(f"{earlier:g}")
        if vllm is None:
            cells += ["", "", ""]
        else:
            scale = self.scale(row)
            scaled = times(vllm * scale if is_rate else vllm / scale)
            asked = ASKED_OF_PRODUCTS if row.kind == "first" else ASKED
            mark = "" if min(scaled, times(vllm)) >= asked else f" (asked {asked})"
            cells += [f"{vllm:g}", f"{times(vllm):.2f}", f"{scaled:.2f}{mark}"]
        readings = self.readings.get(key)
        clock = ""
        if readings:
            parts = zip(*readings, strict=True)
            clock = ", ".join(f"{statistics.median(part):.0f}" for part in parts)
        return [*cells, clock]

    def show(self, keys: Sequence[str]) -> None:
        """Print the table."""
        print(f"\nBeside {SOURCE}.")
        if self.copied:
            copied, multiplied = map(statistics.median, (self.copied, self.multiplied))
            print(
                f"This card copies {copied / 1e12:.3f} TB/s and multiplies {multiplied / 1e12:.0f} "
                f"TFLOP/s; that one {BANDWIDTH / 1e12:.2f} and {PRODUCTS / 1e12:.0f}."
            )
        head = ["", "ours", "least, most", "floor", "over it", "ours, earlier", "vLLM, published"]
        head += ["times as fast", "the same, scaled", "MHz, W"]
        print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
        for key in keys:
            print("| " + " | ".join(self.cells(key, ROWS[key])) + " |")


def measure(arguments: argparse.Namespace) -> None:
    """Have each model's rows measured, and print the table whatever comes between."""
    until = time.monotonic() + arguments.seconds
    results = Results(tiny=arguments.tiny)
    models = list(dict.fromkeys(ROWS[key].model for key in arguments.only))
    try:
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder) / "kernels"
            for key in arguments.only:
                if ROWS[key].kind == "start":
                    command = start_figures(arguments, cache, Path(folder) / "tiny")
                    for line in lines_of(command, cache, until - time.monotonic()):
                        results.take(line)
                        if ended := re.match(r"all captured after ([\d.]+) s", line):
                            results.figures[key] = [float(ended[1])]
            for name in models:
                keys = [k for k in arguments.only if ROWS[k].model == name]
                keys = [key for key in keys if ROWS[key].kind != "start"]
                left = until - time.monotonic()
                if not keys or left <= 0:
                    continue
                command = [sys.executable, __file__, "--here", "--only", ",".join(keys)]
                command += ["--rounds", str(arguments.rounds), "--seconds", f"{left - 10:.0f}"]
                command += [f"--{name}" for name in ("tiny", "profile") if vars(arguments)[name]]
                for line in lines_of(command, cache, left):
                    results.take(line)
    finally:
        results.show(arguments.only)
    if not results.figures:
        raise SystemExit("nothing was measured")


def chosen(text: str) -> list[str]:
    """Parse keys of rows with commas between them."""
    keys = text.split(",")
    if unknown := set(keys) - set(ROWS):
        raise argparse.ArgumentTypeError(
            f"there are no rows {', '.join(sorted(unknown))}; take some of {', '.join(ROWS)}"
        )
    return keys


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=chosen, default=list(ROWS), help="keys of rows, a,b,c")
    parser.add_argument("--list", action="store_true", help="the keys, and what they measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=290.0, help="that all of it may take")
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.list:
        for key, row in ROWS.items():
            print(f"{key:16} {row.label}")
    elif arguments.here:
        measure_model(arguments)
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
