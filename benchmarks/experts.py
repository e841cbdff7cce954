"""Time experts of Qwen3-30B-A3B's shape on a GPU, a layer or the whole model, beside floors.

    python benchmarks/experts.py [layer] [model] [transformers] [--rows 1 32 256]
        [--no-fp8] [--without few route early] [--gate-tile 4 512 5] [--down-tile 2 4096 4]

Weights and routing are random. ``--without`` leaves parts out, to see what they save: the products
of few tokens without groups, the router as one kernel, and launches before the kernel ahead ends.
The tiles are those of the first and the second product of few tokens.

- ``layer``: each number of rows is captured as a CUDA graph of several layers whose weights do not
  fit the L2 cache together. The floor is the bytes of the experts that the rows chose, at the same
  4.28 TB/s as below.
- ``model``: the shared workload's decode steps at contexts of some 1,000 tokens and its prefill of
  8 x 1024. The floor is the bytes that a step reads, at 4.28 TB/s: of the experts that so many
  rows touch in a layer, which is counted, of the rest of the weights, and of the cache.
- ``transformers``: its class with the same shape, its fastest experts (grouped products), eagerly:
  decode steps of the same rows and contexts, and the same prefill.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.gpu import build, runner
from benchmarks.workloads import SHAPES
from engine_core import LLM, SamplingParams
from engine_core.bench.workloads import measure, random_ids
from engine_core.kernels import Fp8Weight, Routing, route, run_experts
from engine_core.kernels.experts import triton as kernels
from engine_core.nn.experts import Router
from engine_core.testing.reference import cache_argument

HIDDEN, INTER, EXPERTS, TOP_K = 2048, 768, 128, 8
LAYERS = 8
BYTES_A_MILLISECOND = 4.28e9
MODEL = "qwen3_30b_a3b"
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192)


def milliseconds(step: Callable[[], object], repeats: int = 20) -> float:
    """Median time of a captured ``step``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def layer(fp8: bool, device: str) -> tuple[Any, Any, Tensor]:
    """Weights of one layer: gates and ups, downs, and the router's."""
    router = torch.randn(EXPERTS, HIDDEN, dtype=torch.bfloat16, device=device)
    gate_up = torch.randn(EXPERTS, 2 * INTER, HIDDEN, dtype=torch.bfloat16, device=device)
    down = torch.randn(EXPERTS, HIDDEN, INTER, dtype=torch.bfloat16, device=device)
    gate_up, down = gate_up.mul_(HIDDEN**-0.5), down.mul_(INTER**-0.5)
    if not fp8:
        return gate_up, down, router
    flat = (gate_up.flatten(0, 1), down.flatten(0, 1))
    return Fp8Weight.quantized(flat[0]), Fp8Weight.quantized(flat[1]), router


ROUTING = Routing(TOP_K, renormalize=True)


def run(x: Tensor, layers: Sequence[tuple[Any, Any, Tensor]]) -> None:
    """The layers one after another, each with a router of its own, all of the same x."""
    for gate_up, down, router in layers:
        ids, weights = route(x, router, None, ROUTING)
        run_experts(x, ids, weights, gate_up, down, "silu")


def touched(x: Tensor, layers: Sequence[tuple[Any, Any, Tensor]]) -> int:
    """Experts that are chosen, of all layers."""
    return sum(len(route(x, router, None, ROUTING)[0].unique()) for *_, router in layers)


def time_layers(all_rows: Sequence[int], kinds: Sequence[bool]) -> None:
    """Print a table of single layers for each of ``kinds``: whether weights are e4m3."""
    print(torch.cuda.get_device_name())
    for fp8 in kinds:
        layers = [layer(fp8, "cuda") for _ in range(LAYERS)]
        size = sum(part.nbytes for part in layers[0][:2]) / EXPERTS
        print(f"{'e4m3' if fp8 else 'bfloat16'}: us a layer, floor by bytes, times the floor")
        for rows in all_rows:
            x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
            experts = touched(x, layers) / LAYERS
            floor = experts * size / BYTES_A_MILLISECOND
            took = milliseconds(partial(run, x, layers)) / LAYERS
            print(
                f"{rows:5} rows, {experts:5.1f} experts: {took * 1e3:8.1f} {floor * 1e3:8.1f} "
                f"{took / floor:6.2f}",
                flush=True,
            )
        del layers


def scatter(model: Any) -> None:
    """Let the token alone choose its experts, and any experts: by embeddings that stand out."""
    model.model.embed_tokens.weight.normal_()


def touched_in_steps(llm: LLM, rows: int) -> float:
    """Experts that decode steps of so many rows touch in a layer, on average."""
    counts: list[int] = []

    def look(_part: object, _given: object, result: Any) -> None:
        if len(result[0]) == rows:
            counts.append(len(result[0].unique()))

    def hooked(model: Any) -> list[Any]:
        routers = [part for part in model.modules() if isinstance(part, Router)]
        return [router.register_forward_hook(look) for router in routers]

    (handles,) = llm.apply_model(hooked)
    draw, vocab = random.Random(1), SHAPES[MODEL]["vocab_size"]
    prompts = [random_ids(3, vocab, draw) for _ in range(rows)]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    llm.apply_model(lambda _: [handle.remove() for handle in handles])
    return sum(counts) / len(counts)


def floor_ms(rows: int, experts: float) -> float:
    """The bytes of a step with contexts of 1,060 tokens, over 4.28 TB/s."""
    shape = SHAPES[MODEL]
    layers, hidden, width = shape["num_hidden_layers"], shape["hidden_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    attention = hidden * width * (2 * heads + 2 * kv_heads)
    cache = rows * 1060 * 2 * kv_heads * width
    a_layer = attention + hidden * EXPERTS + experts * 3 * hidden * INTER + cache
    return 2 * (layers * a_layer + hidden * shape["vocab_size"]) / BYTES_A_MILLISECOND


def time_model(all_rows: Sequence[int]) -> None:
    """Print decode steps beside their floors, and the prefill."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        with build(MODEL, Path(folder), deterministic=False) as llm:
            llm.apply_model(scatter)
            llm.warmup()
            print(f"{MODEL}: started in {time.perf_counter() - start:.1f} s", flush=True)
            batches = sorted({*all_rows, 8})
            figures = measure(runner(llm), SHAPES[MODEL]["vocab_size"], batches=batches, mix=0)
            print(figures, flush=True)
            found = [touched_in_steps(llm, rows) for rows in batches]
    for rows, experts in zip(batches, found, strict=True):
        took, floor = figures[f"tpot_ms_b{rows}"], floor_ms(rows, experts)
        print(
            f"{rows:5} rows, {experts:5.1f} experts a layer: {took:7.3f} ms, floor {floor:7.3f}, "
            f"{took / floor:5.2f} times",
            flush=True,
        )
    print(f"prefill of 8 x 1024: {figures['prefill_tok_s_b8']:.0f} tokens/s", flush=True)


@torch.inference_mode()
def time_transformers(all_rows: Sequence[int]) -> None:
    """Print the same of transformers' class."""
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

    shape = {key: value for key, value in SHAPES[MODEL].items() if key != "architectures"}
    config = AutoConfig.for_model(**shape)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
            experts_implementation="grouped_mm",
        ).eval()

    def seconds(work: Callable[[], object], repeats: int) -> float:
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times)

    kept = cache_argument(model)

    def prefill(rows: int, cache: Any = None) -> object:
        ids = torch.randint(1000, 140000, (rows, 1024), device="cuda")
        return model(ids, **{kept: cache}, use_cache=cache is not None, logits_to_keep=1)

    prefill(8)
    print(
        f"transformers, prefill of 8 x 1024: {8192 / seconds(lambda: prefill(8), 3):.0f} tokens/s"
    )
    for rows in all_rows:
        cache: Any = DynamicCache(config=config)
        filled = min(rows, 32)
        prefill(filled, cache)
        cache.batch_repeat_interleave(rows // filled)
        ids = torch.randint(1000, 140000, (rows, 1), device="cuda")
        took = seconds(lambda: model(ids, **{kept: cache}), 12)  # noqa: B023
        print(f"transformers, {rows:5} rows: {took * 1e3:7.2f} ms a step", flush=True)


def leave_out(parts: Sequence[str]) -> None:
    """Run as before there were such parts; see ``--without``."""
    if "few" in parts:
        kernels.sizes.are_few = lambda *_: False
    if "route" in parts:
        kernels.sizes.fits_route = lambda *_: False
    if "early" in parts:
        kernels.pdl_options = kernels.few.pdl_options = lambda _: {"PDL": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=["layer"], help="layer, model, transformers")
    parser.add_argument("--rows", type=int, nargs="*")
    parser.add_argument("--no-fp8", action="store_true", help="layers of bfloat16 alone")
    parser.add_argument("--without", nargs="*", default=[], choices=["few", "route", "early"])
    parser.add_argument("--gate-tile", type=int, nargs=3, default=kernels.few.GATE_TILE)
    parser.add_argument("--down-tile", type=int, nargs=3, default=kernels.few.DOWN_TILE)
    options = parser.parse_args()
    torch.manual_seed(0)
    leave_out(options.without)
    kernels.few.GATE_TILE = tuple(options.gate_tile)
    kernels.few.DOWN_TILE = tuple(options.down_tile)
    for part in options.parts:
        if part == "layer":
            time_layers(options.rows or ROWS, (False,) if options.no_fp8 else (False, True))
        elif part == "model":
            time_model(options.rows or (1, 32, 256))
        elif part == "transformers":
            time_transformers(options.rows or (1, 32, 256))
        else:
            parser.error(f"{part!r} is none of layer, model and transformers")


if __name__ == "__main__":
    main()
