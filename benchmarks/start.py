"""Time starts of an engine on a GPU, and say where its kernels came from.

    python benchmarks/start.py [llama3_8b] [--processes N] [--cache DIR] [--warm-up] [--requests S]
        [--ranks N] [--spawn] [--device cpu] [--map FILE]

Starts one engine with random weights and kernels kept in DIR (a new folder if not given), and
generates one token of a prompt of 64. ``--warm-up`` then captures all steps that are expected.
``--requests`` starts an engine process instead, that captures while it is idle, and sends it a
request every quarter of a second for S seconds: prompts of 8, 200 and 1500 tokens, one and three at
once, greedy and drawn, of which it says the longest time to a first token.

``--ranks`` shares the model out, and ``--spawn`` has the ranks be new processes where they would be
forks of this one. ``--map`` is a module map, which every rank runs.

A kernel is "loaded" if it was in the cache when it was first launched, else "compiled" there.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workloads import SHAPES, write_config

BEGIN = time.perf_counter()  # before the imports that take long


def config(arguments: argparse.Namespace):
    """The engine's settings."""
    from engine_core import EngineConfig

    return EngineConfig(
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=8192,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        compile_processes=arguments.processes,
        tensor_parallel_size=arguments.ranks,
        device=arguments.device,
        custom_module_map=str(arguments.map) if arguments.map else (),
    )


def count_kernels() -> dict[str, float]:
    """Counts of kernels from now on, which grow."""
    from triton import knobs

    counts = {"loaded": 0, "compiled": 0, "seconds": 0.0}

    def listen(*, times, cache_hit: bool, **_: object) -> None:
        counts["loaded" if cache_hit else "compiled"] += 1
        counts["seconds"] += 0.0 if cache_hit else times.total / 1e6

    knobs.compilation.listener = listen
    return counts


def start(model: Path, arguments: argparse.Namespace) -> None:
    """Start an engine in this process."""
    from engine_core import LLM, SamplingParams, own_process

    own_process.claim()
    if arguments.spawn:
        from engine_core.runtime import rank_processes

        rank_processes._why_not = lambda config: "--spawn"
    imported = time.perf_counter() - BEGIN
    counts = count_kernels()
    with LLM(str(model), config(arguments)) as llm:
        ready = time.perf_counter() - BEGIN
        llm.generate([[1000] * 64], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        seconds = time.perf_counter() - BEGIN
        phases = ", ".join(f"{name} {value:.2f}" for name, value in llm.startup.items())
        before = f"imports {imported:.2f}, ready {ready:.2f}: {phases}"
        print(f"first token after {seconds:.2f} s ({before}); {counts}")
        if arguments.warm_up:
            llm.warmup()
            print(f"all captured after {time.perf_counter() - BEGIN:.2f} s; {counts}", flush=True)


async def serve(model: Path, arguments: argparse.Namespace) -> None:
    """Start an engine in a process of its own, and send it requests while it captures."""
    from engine_core import AsyncEngine, SamplingParams

    engine = await AsyncEngine.start(str(model), config(arguments))
    ready = time.perf_counter()
    print(f"ready after {ready - BEGIN:.2f} s", flush=True)

    async def ask(tokens: int, temperature: float) -> float:
        params = SamplingParams(temperature=temperature, max_tokens=4, ignore_eos=True)
        begin = time.perf_counter()
        async with await engine.add_request([1000 + tokens] * tokens, params) as stream:
            first = None
            async for _ in stream:
                first = first or time.perf_counter() - begin
        return first or 0.0

    cases = [(n, many, heat) for heat in (0.0, 0.8) for n in (8, 200, 1500) for many in (1, 3)]
    longest: dict[tuple[int, int, float], tuple[float, float]] = {}
    turn = 0
    while time.perf_counter() < ready + arguments.requests:
        tokens, many, heat = case = cases[turn % len(cases)]
        at = time.perf_counter() - ready
        waits = await asyncio.gather(*(ask(tokens, heat) for _ in range(many)))
        longest[case] = max(longest.get(case, (0.0, 0.0)), (max(waits), at))
        turn += 1
        await asyncio.sleep(0.25)
    for (tokens, many, heat), (wait, at) in longest.items():
        kind = "greedy" if heat == 0 else "drawn"
        print(f"  {many} of {tokens:4} tokens, {kind}: {1e3 * wait:.0f} ms at most, at {at:.1f} s")
    await engine.close()


def main() -> None:
    """Start one engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", nargs="?", default="llama3_8b", help="its name, or a folder")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--warm-up", action="store_true")
    parser.add_argument("--requests", type=float, default=0.0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--spawn", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--map", type=Path, help="a module map, which every rank runs")
    arguments = parser.parse_args()
    logging.basicConfig(
        format="%(relativeCreated)6d ms %(levelname)s: %(message)s", level=logging.INFO
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = str(arguments.cache or Path(folder) / "kernels")
        model = Path(arguments.shape)
        if arguments.shape in SHAPES:
            model = write_config(arguments.shape, Path(folder) / arguments.shape)
        if arguments.requests:
            asyncio.run(serve(model, arguments))
        else:
            start(model, arguments)


if __name__ == "__main__":
    main()
