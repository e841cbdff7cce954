"""Measure what was asked of one GPU in whole workloads, and say what is met.

    python benchmarks/asked.py [fp8] [cache] [int4] [gguf] [small] [plain]

Without names all parts run, some six minutes on an H200 from an empty kernel cache. The figures are
those of ``gpu.py``, each beside what issues 21 and 25 ask. Cards of one kind differ, by 5% and more
where power bounds them, so that what one misses another may meet. What this card copies and
multiplies is printed first, and its clock and power after each part. Exits with 1 if anything is
missed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.decode import CLOCK_AND_POWER
from benchmarks.gpu import build, release, runner
from benchmarks.untuned import ceilings
from benchmarks.workloads import SHAPES
from engine_core.bench.workloads import MIX, measure


@dataclass(frozen=True, slots=True)
class Part:
    """An engine, and the figures that are asked of it.

    Attributes:
        model: its shape.
        asked: milliseconds at most, and tokens/s at least, by the names of ``measure``.
        options: of the engine.
    """

    model: str
    asked: dict[str, float]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def batches(self) -> tuple[int, ...]:
        """Batches of the figures, each once."""
        names = (name.rsplit("_b", 1) for name in self.asked)
        return tuple(sorted({int(parts[1]) for parts in names if len(parts) == 2}))


PARTS = {
    "fp8": Part(
        "llama3_8b",
        {
            "tpot_ms_b1": 2.4,
            "tpot_ms_b32": 3.4,
            "tpot_ms_b128": 5.6,
            "tpot_ms_b256": 9.4,
            "prefill_tok_s_b8": 74000,
            "ttft_ms_4k": 59,
            "mix_out_tok_s": 17300,
        },
        {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    ),
    "int4": Part("llama3_8b", {"tpot_ms_b1": 1.8, "tpot_ms_b32": 3.2}, {"quantization": "int4"}),
    "small": Part("qwen2_0_5b", {"tpot_ms_b1": 0.55, "tpot_ms_b256": 1.8, "mix_out_tok_s": 90000}),
    "plain": Part(
        "llama3_8b",
        {
            "tpot_ms_b32": 5.3,
            "tpot_ms_b128": 9.4,
            "tpot_ms_b256": 15.5,
            "ttft_ms_4k": 92,
            "mix_out_tok_s": 11000,
        },
    ),
    "cache": Part(
        "llama3_8b", {"tpot_ms_b256": 11.8, "mix_out_tok_s": 12300}, {"kv_cache_dtype": "fp8"}
    ),
    "gguf": Part("llama3_8b", {"tpot_ms_b1": 2.0}, {"gguf": "Q4_K"}),
}


def missed_by(name: str, value: float, asked: float) -> float:
    """How far a figure is from what is asked, as a part of that; 0 or less if it is met."""
    return (value - asked) / asked if "_ms_" in name else (asked - value) / asked


def clock() -> str:
    """The card's clock and power, as nvidia-smi has them."""
    return subprocess.check_output(CLOCK_AND_POWER, text=True).strip()


def run_part(name: str, part: Part, folder: Path) -> int:
    """Measure a part and print its lines; returns how many figures are missed."""
    begin = time.perf_counter()
    folder.mkdir()
    with build(part.model, folder, deterministic=False, **part.options) as llm:
        llm.warmup()
        mix = MIX if "mix_out_tok_s" in part.asked else 0
        figures = measure(
            runner(llm), SHAPES[part.model]["vocab_size"], batches=part.batches, mix=mix
        )
    release()
    missed = 0
    for key, asked in part.asked.items():
        far = missed_by(key, figures[key], asked)
        missed += far > 0
        verdict = f"missed by {far:.1%}" if far > 0 else "met"
        print(f"{name:6} {part.model:11} {key:17} {figures[key]:10.5g} {asked:8g}  {verdict}")
    print(f"{name:6} {time.perf_counter() - begin:.0f} s; {clock()}", flush=True)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    names = parser.parse_args().parts or list(PARTS)
    for name in names:
        if name not in PARTS:
            parser.error(f"{name!r} is no part; there are {', '.join(PARTS)}")
    print(torch.cuda.get_device_name(), torch.__version__, clock())
    copied, multiplied = ceilings()
    print(f"copies {copied / 1e12:.2f} TB/s, multiplies {multiplied / 1e12:.0f} TFLOP/s; {clock()}")
    with tempfile.TemporaryDirectory() as folder:
        missed = sum(run_part(name, PARTS[name], Path(folder, name)) for name in names)
    print(f"{missed} missed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
