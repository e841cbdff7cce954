"""Check every kernel on a GPU, search for better cuts of decode attention, time the main kernels.

    python benchmarks/kernels.py [--no-search] [--no-check] [--no-time] [--search]

Prints how near the choice for decode attention is to the best of its space on 200 points, by
decode_search.py with that program's own settings (about a minute); the largest error of each op and
dtype against the float32 reference, each case beyond its tolerance, and a table of median times
with the achieved bandwidth or rate. Exits with 1 if a point is more than 5% off the best or a case
fails. With ``--search`` it does no more than search. Needs the package, torch and triton; pytest is
not needed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kernels")]

from decode_search import search  # noqa: E402
from kernel_cases import TOLERANCE, make_paged, native_matrix  # noqa: E402

from benchmarks.sampling import list_seen  # noqa: E402
from engine_core import kernels  # noqa: E402
from engine_core.kernels.sampling import (  # noqa: E402
    COUNTED,
    NUMBERS,
    PENALISED,
    Adjustments,
    SamplingState,
)


def check() -> int:
    """Run the native matrix; returns the number of failures."""
    worst: dict[tuple[str, str], float] = {}
    counts: dict[tuple[str, str], int] = {}
    failures = 0
    begin = time.perf_counter()
    for case in native_matrix("cuda"):
        key = (case.op, str(case.dtype).removeprefix("torch."))
        try:
            error = case.run()
            torch.cuda.synchronize()
        except Exception:
            # One broken case must not hide the others: this machine may be lent for minutes.
            traceback.print_exc()
            error = float("inf")
        counts[key] = counts.get(key, 0) + 1
        worst[key] = max(worst.get(key, 0.0), error)
        if not error <= TOLERANCE[case.dtype]:
            failures += 1
            print(f"FAILED {case}: {error:.2e} > {TOLERANCE[case.dtype]:.0e}", flush=True)
    print(f"\n{'op':28}{'dtype':10}{'cases':>6}{'max error':>12}")
    for (op, dtype), error in worst.items():
        print(f"{op:28}{dtype:10}{counts[op, dtype]:6}{error:12.1e}")
    print(f"{failures} failures, {time.perf_counter() - begin:.0f} s\n")
    return failures


def report(
    name: str, run: Callable[[], object], *, gigabytes: float = 0, teraflop: float = 0
) -> None:
    """Print the median time of ``run``, and its bandwidth or rate."""
    from triton.testing import do_bench

    milliseconds: float = do_bench(run, warmup=50, rep=200, return_mode="median")
    achieved = (
        f"{gigabytes / milliseconds * 1e3:9.0f} GB/s"
        if gigabytes
        else f"{teraflop / milliseconds * 1e3:9.0f} TFLOP/s"
    )
    print(f"{name:58}{milliseconds * 1e3:10.1f} us{achieved}", flush=True)


def graphed(run: Callable[[], object]) -> Callable[[], None]:
    """Capture ``run`` in a CUDA graph, so that the host's launches are not timed."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def time_elementwise() -> None:
    """RMSNorm, SiLU and storing, in bfloat16."""
    options = {"device": "cuda", "dtype": torch.bfloat16}
    for tokens, hidden in [(1, 4096), (256, 4096), (16384, 4096)]:
        x, residual = torch.randn(2, tokens, hidden, **options)
        weight = torch.randn(hidden, **options)
        report(
            f"rms_norm {tokens}x{hidden} with residual",
            graphed(lambda x=x, w=weight, r=residual: kernels.rms_norm(x, w, 1e-5, residual=r)),
            gigabytes=4 * x.nbytes / 1e9,
        )
    for tokens, size in [(1, 14336), (256, 14336), (16384, 14336)]:
        x = torch.randn(tokens, 2 * size, **options)
        report(
            f"silu_and_mul {tokens}x{size}",
            graphed(lambda x=x: kernels.silu_and_mul(x)),
            gigabytes=1.5 * x.nbytes / 1e9,
        )
    for tokens in (1, 256, 16384):
        qkv = torch.randn(tokens, 48, 128, **options)
        cos, sin = torch.randn(2, tokens, 64, device="cuda")
        report(
            f"apply_rotary {tokens}x(32+8)x128",
            graphed(lambda x=qkv, c=cos, s=sin: kernels.apply_rotary(x[:, :32], x[:, 32:40], c, s)),
            gigabytes=(2 * qkv.nbytes * 40 / 48 + 2 * cos.nbytes) / 1e9,
        )
        cache = torch.zeros(2, tokens // 16 + 1, 16, 8, 128, **options)
        slots = torch.randperm(cache.shape[1] * 16, device="cuda")[:tokens]
        report(
            f"store_kv {tokens}x8x128",
            graphed(
                lambda x=qkv, c=cache, s=slots: kernels.store_kv(
                    x[:, 32:40], x[:, 40:], c[0], c[1], s
                )
            ),
            gigabytes=2 * qkv.nbytes * 16 / 48 / 1e9,
        )


def time_gated_linear(rows: int, n: int, k: int) -> None:
    """Time gate, up and SiLU as chosen, and by cuBLAS with a kernel for SiLU; in turns, twice.

    Each of eight weights is read in a run, so that none stays in the L2 cache.
    """
    options = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [torch.randn(n, k, **options) / k**0.5 for _ in range(8)]
    x = torch.randn(rows, k, **options)
    chosen = graphed(lambda: [kernels.linear(x, weight, gated=True) for weight in weights])
    apart = graphed(
        lambda: [kernels.silu_and_mul(torch.nn.functional.linear(x, weight)) for weight in weights]
    )
    for _ in range(2):
        for name, run in (("as chosen", chosen), ("cuBLAS and SiLU", apart)):
            report(
                f"8 gated linears {rows} by {n}x{k}, {name}",
                run,
                teraflop=8 * 2 * rows * n * k / 1e12,
            )


def time_attention(
    rows: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, graph: bool
) -> None:
    """Paged attention in bfloat16, blocks of 64 tokens as in the engine, scattered."""
    paged = make_paged(
        rows,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=64,
        dtype=torch.bfloat16,
        device="cuda",
    )
    out = paged.poisoned_out()

    def run() -> None:
        kernels.paged_attention(
            paged.q,
            paged.k_cache,
            paged.v_cache,
            out=out,
            scale=head_dim**-0.5,
            **paged.metadata(),
            **paged.sizes(),
        )

    name = f"{heads}/{kv_heads}/{head_dim}: {len(rows)} x ({rows[0][0]} of {rows[0][1]})"
    if graph:
        values = sum(kv_len for _, kv_len in rows) * kv_heads * head_dim * 2
        report(f"decode attention {name}", graphed(run), gigabytes=2 * values / 1e9)
    else:
        # Two products of 2 operations for each visible pair of query and key.
        pairs = sum(n * (kv_len - n) + n * (n + 1) / 2 for n, kv_len in rows)
        report(f"prefill attention {name}", run, teraflop=4 * pairs * heads * head_dim / 1e12)


# Parameters of a row unless a case sets others.
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_k 50": {"top_k": 50.0},
    "top_p 0.9": {"top_p": 0.9},
    "all": {"temperature": 0.7, "top_k": 50.0, "top_p": 0.9, "min_p": 0.05},
    "top_p 0.9, flat": {"temperature": 4.0, "top_p": 0.9},
    "penalties, top_p 0.9": {"top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
}


def time_sampling(num_rows: int, vocab: int) -> None:
    """Choices of a token from bfloat16 logits; as steep as a language model's, but for the flat."""
    logits = 2.5 * torch.randn(num_rows, vocab, device="cuda")
    # A few tokens stand out.
    logits[:, :: vocab // 8] += 8.0
    logits = logits.to(torch.bfloat16)
    rows = torch.arange(num_rows, device="cuda")
    last_tokens, positions = torch.zeros(2, num_rows, dtype=torch.int64, device="cuda")
    report(
        f"choose_greedy {num_rows}x{vocab}",
        graphed(
            lambda: kernels.choose_greedy(
                logits, rows=rows, last_tokens=last_tokens, positions=positions
            )
        ),
        gigabytes=logits.nbytes / 1e9,
    )
    for name, settings in SAMPLING.items():
        numbers = torch.tensor(
            [{**NEUTRAL, **settings}.get(column, 0.0) for column in NUMBERS],
            dtype=torch.float64,
            device="cuda",
        ).repeat(num_rows, 1)
        adjustments = None
        if "repetition_penalty" in settings:
            seen = (torch.rand(num_rows, vocab, device="cuda") < 0.01).to(torch.uint8)
            adjustments = Adjustments(
                torch.full_like(rows, PENALISED + COUNTED, dtype=torch.int32),
                torch.full((num_rows, 8), -1, dtype=torch.int32, device="cuda"),
                torch.zeros_like(rows),
                None,
                seen,
                torch.zeros(num_rows, vocab, dtype=torch.int32, device="cuda"),
                *list_seen(seen),
            )
        state = SamplingState(numbers, rows * 7, adjustments)
        report(
            f"sample_tokens {num_rows}x{vocab} {name}",
            graphed(lambda s=state: kernels.sample_tokens(logits, rows, positions, last_tokens, s)),
            gigabytes=logits.nbytes / 1e9,
        )


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-search", action="store_true", help="skip decode_search.py")
    parser.add_argument("--no-check", action="store_true", help="skip the native matrix")
    parser.add_argument("--no-time", action="store_true", help="skip the timings")
    parser.add_argument("--search", action="store_true", help="only decode_search.py")
    args = parser.parse_args()
    # The driver counts, not CUDA: the search forks compilers, which must not find it in use.
    if not torch.cuda.device_count():
        parser.error("needs a CUDA GPU")
    failures = 0 if args.no_search else search()
    if args.search:
        return 1 if failures else 0
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, {properties.multi_processor_count} SMs, torch {torch.__version__}")
    failures += 0 if args.no_check else check()
    if not args.no_time:
        for vocab in (151936, 128256):
            for num_rows in (1, 32, 256):
                time_sampling(num_rows, vocab)
        time_elementwise()
        for num_rows in (64, 96, 128, 192, 256, 512, 1024, 4096, 8192):
            time_gated_linear(num_rows, 28672, 4096)
            time_gated_linear(num_rows, 9728, 896)
        for num_rows in (1, 8, 32, 128, 256):
            time_attention([(1, 1024)] * num_rows, 32, 8, 128, graph=True)
        time_attention([(1, 1024)] * 256, 14, 2, 64, graph=True)
        time_attention([(1, 32768)], 32, 8, 128, graph=True)
        for rows in ([(4096, 4096)], [(1024, 1024)] * 8, [(512, 8192)] * 2):
            time_attention(rows, 32, 8, 128, graph=False)
        for rows in ([(4096, 4096)], [(1024, 1024)] * 8):
            time_attention(rows, 14, 2, 64, graph=False)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
