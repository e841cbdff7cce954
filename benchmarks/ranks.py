"""Compare ranks that share a model with one card, and their sums with NCCL's and torch's.

    python benchmarks/ranks.py [llama3_8b] [llama3_70b] [qwen2_0_5b] [--ranks 2] [--batches 1,32]
        [--no-mix] [--no-alone] [--eager] [--rank-sums nccl] [--set NAME=NUMBER]
    python benchmarks/ranks.py --sums [--rows 1,8,32] [--ours]
    python benchmarks/ranks.py --replicas [llama3_8b]

Each model runs on one card, if it has room, and on ``--ranks`` cards, one after the other, with
random weights. Figures are printed as they come. The table has what issue 22 asks of two H200s, and
vLLM 0.25.1 on two of them. Then it says how far ahead of its device each rank's host was: the share
of steps that were launched while so many before them were not done. At 0 the device waited for the
host. ``--set`` gives a number of ``engine_core.kernels.rank_sum.layout``, such as MOST_BYTES (sums
above go by NCCL) or FUSED_BYTES (above, the norm is a launch of its own), or of
``engine_core.nn.distributed``, another value, so that runs with and without something compare.

``--sums`` times sums alone, in CUDA graphs of 50 that follow each other, in microseconds: NCCL,
torch's symmetric memory with one and two shots, ours as the engine takes them and in each way, and
then with the residual and the norm. ``--ours`` leaves the others' out.

``--replicas`` serves a model over HTTP, by one engine and then by one on each of two cards, and
sends each engine the mix's 256 requests at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed
import torch.multiprocessing

from benchmarks.workloads import SHAPES, write_config
from engine_core import LLM, EngineConfig, SamplingParams, own_process
from engine_core.bench.workloads import measure, mix_requests
from engine_core.errors import EngineError

# Figure -> (by bytes, vLLM, asked, goal) for two ranks; None where there is none.
Asked = dict[str, tuple[float | None, float | None, float | None, float | None]]
ASKED: dict[str, Asked] = {
    "llama3_8b": {
        "tpot_ms_b1": (1.8, 3.50, 2.6, 2.3),
        "tpot_ms_b8": (None, 3.80, None, None),
        "tpot_ms_b32": (2.3, 4.29, 3.5, 3.2),
        "tpot_ms_b128": (3.9, 6.57, 6.1, 5.6),
        "tpot_ms_b256": (6.8, 10.42, 9.6, 8.8),
        "ttft_ms_4k": (39, 62.1, 59, 54),
        "prefill_tok_s_b8": (110000, 67392, 72000, 80000),
        "mix_out_tok_s": (27500, 16403, 17000, 18500),
        "start_s": (None, 46.9, 15, 10),
    },
    "llama3_70b": {"tpot_ms_b1": (16.3, None, 19.0, 18.2)},
}


def write_settings(folder: Path, settings: list[str]) -> tuple[str, ...]:
    """A module map, which every rank runs, that gives numbers of modules other values."""
    if not settings:
        return ()
    lines = [
        "from engine_core.kernels.rank_sum import layout",
        "from engine_core.nn import distributed",
        "MODULE_MAP = {}",
    ]
    for setting in settings:
        name, _, value = setting.partition("=")
        lines += [
            f"place = layout if hasattr(layout, {name!r}) else distributed",
            f"assert hasattr(place, {name!r}), {name!r}",
            f"place.{name} = {int(value)}",
        ]
    file = folder / "settings.py"
    file.write_text("\n".join(lines) + "\n")
    return (str(file),)


def run_model(
    name: str, folder: Path, ranks: int, arguments: argparse.Namespace
) -> tuple[dict[str, float], list[dict[int, int]]]:
    """The figures of the shared workloads, and how far ahead each rank was in decode steps."""
    config = EngineConfig(
        tensor_parallel_size=ranks,
        eager=arguments.eager,
        rank_sums=arguments.rank_sums,
        device=arguments.device,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=8192,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        custom_module_map=write_settings(folder, arguments.set),
    )
    start = time.perf_counter()
    with LLM(str(write_config(name, folder / name)), config) as llm:

        def run(prompts: list[list[int]], lengths: list[int]) -> float:
            params = [
                SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
                for length in lengths
            ]
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds = time.perf_counter() - begin
            assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
            return seconds

        run([[1000] * 64], [1])
        started = time.perf_counter() - start
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in llm.startup.items())
        print(f"{name}, {ranks} ranks: first token after {started:.2f} s ({phases})", flush=True)
        llm.warmup()
        vocab, batches = SHAPES[name]["vocab_size"], arguments.batches
        figures = {"start_s": started}
        # One after another, so that a run that is cut off has shown what it has.
        for some, mix in [((batch,), 0) for batch in batches] + [((), 256)]:
            if mix and arguments.no_mix:
                continue
            figures |= measure(run, vocab, batches=some, mix=mix)
            print(f"{name}, {ranks} ranks: {json.dumps(figures)}", flush=True)
        leads: list[dict[int, int]] = []
        if ranks > 1:
            executor: Any = llm.engine.core.executor
            run([[1000] * 1024] * batches[0], [8] * batches[0])
            executor.leads()
            run([[1000] * 1024] * batches[0], [129] * batches[0])
            leads = executor.leads()
    own_process.thaw()
    return figures, leads


def show(name: str, alone: dict[str, float], together: dict[str, float], ranks: int) -> None:
    """One table: one card, several, their ratio, and what is asked of two."""
    heads = ("one card", f"{ranks} ranks", "ratio", "by bytes", "vLLM", "asked", "goal")
    print(f"\n{name:18}" + "".join(f"{head:>11}" for head in heads))
    for key, value in together.items():
        one = alone.get(key)
        faster = key.endswith("tok_s") or "tok_s" in key
        ratio = None if one is None else value / one if faster else one / value
        cells = [one, value, ratio, *ASKED.get(name, {}).get(key, (None,) * 4)]
        print(f"{key:18}" + "".join(f"{'' if c is None else f'{c:.4g}':>11}" for c in cells))


def show_leads(leads: list[dict[int, int]]) -> None:
    """How far ahead the hosts were, by rank."""
    for rank, counts in enumerate(leads):
        total = sum(counts.values())
        shares = (f"{lead}: {counts[lead] / total:.1%}" for lead in sorted(counts))
        print(f"rank {rank}: steps launched with so many before them not done: {', '.join(shares)}")


def time_sums(rank: int, size: int, folder: str, counts: tuple[int, ...], only_ours: bool) -> None:
    """Print a table of sums in microseconds; one process of ``size``."""
    import torch.distributed._symmetric_memory as symmetric

    from engine_core.kernels import fits_fused_sum, rank_sum, rank_sum_add_norm
    from engine_core.kernels.rank_sum import layout
    from engine_core.runtime.capture import Agreement
    from engine_core.runtime.rank_memory import keep_off_multicast, share_memory

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    keep_off_multicast()
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{folder}/meeting", rank=rank, world_size=size
    )
    group: Any = torch.distributed.group.WORLD
    memory = share_memory(Agreement(torch.distributed.new_group(backend="gloo")), group, device)
    assert memory is not None, "these GPUs share no memory; the log says why"

    def seconds(function: Callable[[], Any]) -> float:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                function()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for _ in range(50):
                    function()
            times = []
            for _ in range(7):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.distributed.barrier()
                graph.replay()
                begin.record()
                for _ in range(5):
                    graph.replay()
                end.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end) / 250)
        return sorted(times)[len(times) // 2] * 1e3

    hidden, name = 4096, group.group_name
    chosen = layout.way_of
    kinds: tuple[layout.Way | None, ...] = (None, "words", "one shot", "two shots")
    heads = ("rows", "bytes", "NCCL", "torch 1", "torch 2", "ours", *kinds[1:])
    heads += ("norm", *(f"+{kind}" for kind in kinds[1:]))
    if rank == 0:
        print("".join(f"{head:>11}" for head in heads), flush=True)
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    for rows in counts:
        x = torch.zeros(rows, hidden, dtype=torch.bfloat16, device=device)
        ways: list[Callable[[], Any] | None] = [None] * 3
        if not only_ours:
            shared = symmetric.empty(rows, hidden, dtype=torch.bfloat16, device=device).zero_()
            symmetric.rendezvous(shared, group)
            ways = [
                lambda x=x: torch.distributed.all_reduce(x),
                lambda s=shared: torch.ops.symm_mem.one_shot_all_reduce(s, "sum", name),
                lambda s=shared: torch.ops.symm_mem.two_shot_all_reduce_(s, "sum", name),
            ]

        def ours(x: torch.Tensor = x) -> Any:
            return rank_sum(x, memory)

        def normed(x: torch.Tensor = x) -> Any:
            return rank_sum_add_norm(x, memory, None, x, weight, 1e-5)

        assert fits_fused_sum(rows, hidden, x.dtype, size, memory.capacity)
        if rank == 0:
            print(f"{rows:11}{x.nbytes:11}", end="", flush=True)
        for way, kind in [
            *((way, None) for way in ways),
            *zip((ours,) * 4 + (normed,) * 4, kinds * 2, strict=True),
        ]:
            layout.way_of = chosen if kind is None else lambda nbytes, size, kind=kind: kind
            fits = kind != "words" or layout.has_words(rows, hidden, x.numel(), x.element_size())
            cell = "" if way is None or not fits else f"{seconds(way):.2f}"
            if rank == 0:
                print(f"{cell:>11}", end="", flush=True)
        if rank == 0:
            print(flush=True)
    torch.distributed.destroy_process_group()


def serve_replicas(name: str, folder: Path) -> None:
    """Print output tokens/s through HTTP of one engine, of one on each of two cards, and how many
    times as many these are."""
    from benchmarks.serve import Server, fetch
    from benchmarks.serve_client import Client, Request

    model = str(write_config(name, folder / name))
    options = ["--load-format", "dummy", "--skip-tokenizer-init", "--no-enable-prefix-caching"]
    options += ["--max-model-len", "8192", "--max-num-seqs", "256"]
    prompts, lengths = mix_requests(SHAPES[name]["vocab_size"])
    rates: list[float] = []
    for replicas in (1, 2):
        with Server(model, [*options, "--replicas", str(replicas)]) as server:
            print(f"{replicas} replicas: ready after {server.start_s:.1f} s", flush=True)
            served = fetch(server.url, "/v1/models", None)["data"][0]["id"]
            requests = [
                Request(
                    0.0,
                    {
                        "model": served,
                        "prompt": prompt,
                        "max_tokens": length,
                        "temperature": 0.0,
                        "ignore_eos": True,
                        "stream": True,
                        "stream_options": {"include_usage": True},
                        "return_token_ids": True,
                    },
                    len(prompt),
                )
                for prompt, length in zip(prompts, lengths, strict=True)
                for _ in range(replicas)
            ]
            run = Client(server.url, processes=4).run(requests)
        failed = [seen.error for seen in run.observations if seen.error is not None]
        assert not failed, failed[:3]
        tokens = sum(seen.usage or 0 for seen in run.observations)
        assert tokens == replicas * sum(lengths), (tokens, sum(lengths))
        rates.append(tokens / max(seen.ended for seen in run.observations))
        print(f"{replicas} replicas: {tokens} tokens, {rates[-1]:,.0f} tokens/s", flush=True)
    print(f"two are {rates[1] / rates[0]:.3f} times one (asked 1.9)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["llama3_8b"], help=", ".join(SHAPES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", default="1,8,32,128,256")
    parser.add_argument("--no-mix", action="store_true")
    parser.add_argument("--no-alone", action="store_true", help="leave one card out")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--rank-sums", default="auto", help="auto or nccl")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sums", action="store_true", help="time sums alone, and nothing else")
    parser.add_argument("--rows", default="1,8,16,32,64,128,256,512,1000,4096", help="of --sums")
    parser.add_argument("--ours", action="store_true", help="of --sums, leave the others' out")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=NUMBER")
    parser.add_argument("--replicas", action="store_true", help="serve one engine, and two")
    arguments = parser.parse_args()
    arguments.batches = tuple(int(part) for part in arguments.batches.split(","))
    with tempfile.TemporaryDirectory() as folder:
        if arguments.sums:
            counts = tuple(int(part) for part in arguments.rows.split(","))
            given = (arguments.ranks, folder, counts, arguments.ours)
            torch.multiprocessing.spawn(time_sums, given, nprocs=arguments.ranks)
            return
        for name in arguments.models:
            if arguments.replicas:
                serve_replicas(name, Path(folder))
                continue
            alone: dict[str, float] = {}
            # First, for afterwards this process would hold some of the first card's memory.
            together, leads = run_model(name, Path(folder), arguments.ranks, arguments)
            if not arguments.no_alone:
                with contextlib.suppress(EngineError):  # no room
                    alone, _ = run_model(name, Path(folder), 1, arguments)
            show(name, alone, together, arguments.ranks)
            show_leads(leads)
            result = {"model": name, "ranks": arguments.ranks, **together, "alone": alone}
            print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
