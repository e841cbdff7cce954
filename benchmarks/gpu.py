"""Run the shared workloads on a GPU, beside the peers' figures and the floors.

    python benchmarks/gpu.py [llama3_8b] [qwen2_0_5b] [--batches 1,32] [--no-mix] [--profile]
        [--deterministic] [--quantization fp8|int4|int8]

The peers' figures were measured on one NVIDIA H200 on 2026-11-20 with the same workload: vLLM
0.24.0 and lmdeploy.pytorch 0.18.0. A floor is the larger of the weights' bytes over 4.28 TB/s and
the matmuls over 781 TFLOP/s, plus the bytes of the cache; no engine can be faster on that card.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from benchmarks.workloads import SHAPES, write_config
from engine_core import LLM, EngineConfig, SamplingParams, own_process
from engine_core.bench.workloads import measure

# name -> (floor, vLLM, lmdeploy); None where it was not measured.
Peers = dict[str, tuple[float | None, float | None, float | None]]
PEERS: dict[str, Peers] = {
    "llama3_8b": {
        "tpot_ms_b1": (3.54, 4.94, 4.77),
        "tpot_ms_b8": (3.77, 5.34, 5.12),
        "tpot_ms_b32": (4.57, 6.42, 6.35),
        "tpot_ms_b128": (7.77, 10.83, 10.59),
        "tpot_ms_b256": (13.45, 18.14, 17.61),
        "prefill_tok_s_b1": (None, 39296, 29699),
        "prefill_tok_s_b8": (54900, 44564, 42612),
        "prefill_tok_s_b256": (None, 43450, 42236),
        "ttft_ms_4k": (79, 98.2, 108.8),
        "mix_out_tok_s": (13800, 10076, 8233),
        "start_s": (None, 62.4, 38.5),
    },
    "qwen2_0_5b": {
        "tpot_ms_b1": (0.23, 2.02, 2.59),
        "tpot_ms_b8": (0.26, 2.16, 3.59),
        "tpot_ms_b32": (0.33, 3.16, 4.44),
        "tpot_ms_b128": (0.63, 3.68, 6.18),
        "tpot_ms_b256": (1.03, 5.80, 8.37),
        "prefill_tok_s_b1": (None, 44972, 26731),
        "prefill_tok_s_b8": (None, 142595, 127409),
        "prefill_tok_s_b256": (None, 556793, 142406),
        "ttft_ms_4k": (4.7, 16.5, 54.9),
        "mix_out_tok_s": (187000, 25303, 17177),
        "start_s": (None, 58.0, 35.6),
    },
}


def build(
    name: str,
    folder: Path,
    *,
    deterministic: bool,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    gguf: str | None = None,
    **overrides: Any,
) -> LLM:
    """The engine with random weights of the shape, or of a GGUF file of blocks of this type.

    ``overrides`` are other fields of the engine's settings.
    """
    if gguf is None:
        model = write_config(name, folder / name)
    else:
        from benchmarks import gguf_file

        model = gguf_file.write(SHAPES[name], gguf, folder / f"{name}.gguf")
        quantization = "gguf"
    config = EngineConfig(
        deterministic=deterministic,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        load_format="dummy" if gguf is None else "auto",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=8192,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
    )
    own_process.claim()
    return LLM(str(model), config, **overrides)


def release() -> None:
    """Free the memory of an engine that was closed, for the next.

    A process that an engine has claimed keeps what it had at its start out of the collector's way.
    """
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


def runner(llm: LLM):
    """The workload's ``run`` on ``llm``."""

    def run(prompts: list[list[int]], lengths: list[int]) -> float:
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
        torch.cuda.synchronize()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
        return seconds

    return run


def show(name: str, figures: dict[str, float]) -> None:
    """One table: ours, the floor, and the peers'."""
    print(f"\n{name:22}{'engine-core':>13}{'floor':>10}{'vLLM':>10}{'lmdeploy':>10}")
    for key, value in figures.items():
        cells = "".join(
            f"{'' if peer is None else f'{peer:g}':>10}" for peer in PEERS[name].get(key, ())
        )
        print(f"{key:22}{value:13.4g}{cells}")


def trace_events(result: torch_profile, *kinds: str) -> list[dict[str, Any]]:
    """Events of a profile in order, of some kinds: kernel, gpu_memcpy or gpu_memset.

    They are as a Chrome trace has them.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        result.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    found = [event for event in events if event.get("cat") in kinds]
    return sorted(found, key=lambda event: event["ts"])


def by_kernel(result: torch_profile) -> str:
    """A table of the kernels that were profiled, the one with the most time first."""
    table: str = result.key_averages().table(
        sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=60
    )
    return table


def profile(llm: LLM, vocab: int, batch: int) -> None:
    """Where the time of decode steps goes, by kernel."""
    run = runner(llm)
    prompts = [list(range(1000, 2024)) for _ in range(batch)]
    run(prompts, [8] * batch)
    with torch_profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as result:
        run(prompts, [33] * batch)
    print(f"profile of 32 decode steps and one prefill, batch {batch}\n{by_kernel(result)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=", ".join(PEERS))
    parser.add_argument("--batches", default="1,8,32,128,256")
    parser.add_argument("--no-mix", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--quantization", help="fp8, int4 or int8; the peers have none")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto, fp8 or int8")
    arguments = parser.parse_args()
    batches = tuple(int(part) for part in arguments.batches.split(","))
    print(torch.cuda.get_device_name(), torch.__version__)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models or list(PEERS):
            start = time.perf_counter()
            options = {"deterministic": arguments.deterministic}
            options["quantization"] = arguments.quantization
            options["kv_cache_dtype"] = arguments.kv_cache_dtype
            with build(name, Path(folder), **options) as llm:
                run = runner(llm)
                run([[1000] * 64], [1])
                started = time.perf_counter() - start
                phases = ", ".join(f"{k} {v:.2f}" for k, v in llm.startup.items())
                print(f"{name}: start {started:.1f} s ({phases})", flush=True)
                start = time.perf_counter()
                llm.warmup()
                seconds = time.perf_counter() - start
                print(f"{name}: the other CUDA graphs {seconds:.1f} s", flush=True)
                vocab = SHAPES[name]["vocab_size"]
                figures = measure(run, vocab, batches=batches, mix=0 if arguments.no_mix else 256)
                figures["start_s"] = started
                show(name, figures)
                print("RESULT " + json.dumps({"model": name, **figures}), flush=True)
                if arguments.profile:
                    profile(llm, vocab, batches[0])
            release()


if __name__ == "__main__":
    main()
