"""Measurements of quantisation schemes: where they lose much, and where they take longer.

Figures of accuracy are those of ``benchmarks/accuracy.py`` in ``benchmarks/notes/quantisation.md``;
those of speed are of ``benchmarks/README.md`` and ``benchmarks/notes/linears.md``. The models are
those of ``make models``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from engine_core.kernels import GPU, gpu_of
from engine_core.kernels.linear.tiles import MOST_GROUP_ROWS
from engine_core.nn.quantization.scheme import QuantizationScheme

_GROUPS = ("int4", "int8", "awq", "gptq", "compressed-tensors-int")
_INTEGERS = (*_GROUPS, "gguf")
_E4M3 = ("fp8", "compressed-tensors")
# Models for which losses were measured have 288 and 576; of wider ones nothing is known here.
_SMALL = 1024


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that was measured of some schemes on a kind of device.

    Attributes:
        schemes: their names.
        device: its type.
        text: what is lost, against bfloat16 or float32.
        loses: whether that is accuracy; else it is time or memory.
        severe: whether it is a warning; else what is lost in one place is won in another.
        widest: the greatest hidden size for which it is known; None for any.
        capability: compute capabilities for which it holds: from the first, below the second.
    """

    schemes: tuple[str, ...]
    device: Literal["cpu", "cuda"]
    text: str
    loses: bool = False
    severe: bool = True
    widest: int | None = None
    capability: tuple[tuple[int, int], tuple[int, int]] | None = None


FACTS = (
    Fact(
        ("int4",),
        "cpu",
        "models as small as this one lose much by 4 bits: the mean KL from float32 was 0.080 with "
        "one of 15M weights, whose likeliest token stayed at 89.5% of the positions; 'int8' had "
        "0.001 and 99.0%",
        loses=True,
        widest=_SMALL,
    ),
    Fact(
        ("int4",),
        "cuda",
        "models as small as this one lose much by 4 bits: the mean KL from float32 was 0.067 with "
        "one of 15M weights and 0.31 with one of 135M, whose likeliest token stayed at 72% of the "
        "positions; 'int8' had 0.004 and 97.6%",
        loses=True,
        widest=_SMALL,
    ),
    Fact(
        ("awq", "gptq"),
        "cuda",
        "models as small as this one lose much by 4 bits: rounded to nearest, the mean KL from "
        "float32 was 0.067 to 0.11 with one of 15M weights and 0.35 to 0.52 with one of 135M",
        loses=True,
        widest=_SMALL,
    ),
    Fact(
        ("fp8",),
        "cuda",
        "models as small as this one lose more by e4m3 than by 'int8': with one of 135M weights "
        "the mean KL from float32 was 0.019, for more than 64 tokens in a step 0.034, and 0.004",
        loses=True,
        widest=_SMALL,
    ),
    Fact(
        ("int8",),
        "cpu",
        "prompts and batches take longer than with bfloat16 weights, 1.2 times with a model of "
        "135M weights; a single sequence takes 0.7 times",
        severe=False,
    ),
    Fact(
        ("int4",),
        "cpu",
        "prompts take longer than with bfloat16 weights, 1.5 times with a model of 135M weights, "
        "and batches 1.2 times; a single sequence takes 0.6 times",
        severe=False,
    ),
    Fact(
        _INTEGERS,
        "cuda",
        "there are no kernels for this GPU: each step turns the weights into numbers",
        capability=((0, 0), (8, 0)),
    ),
    Fact(
        _GROUPS,
        "cuda",
        "steps of more than 64 tokens take longer than with bfloat16 weights: on an H200 linears "
        "of 4 bits, in groups of 128, take 0.5 times as long with 1 to 32 tokens, 0.7 with 64, "
        "1.6 with 128; "
        f"more than {MOST_GROUP_ROWS} turn the weights into numbers first",
        capability=((8, 0), (99, 0)),
    ),
    *(
        Fact(
            ("gguf",),
            "cuda",
            "steps take longer than with bfloat16 weights: on an H200 one of a model of 8B weights "
            "in Q4_K took 4.9 ms with 1 token, 5.2 with 8 and 12.9 with 32, against 3.9, 4.4 and "
            "5.5, by the kernels that this GPU has; "
            f"more than {MOST_GROUP_ROWS} tokens turn the weights into numbers first",
            capability=capability,
        )
        for capability in (((8, 0), (9, 0)), ((9, 1), (99, 0)))
    ),
    Fact(
        ("gguf",),
        "cuda",
        "steps of more than 16 tokens may take longer than with bfloat16 weights: on an H200 one "
        "of a model of 8B weights in Q4_K took 1.9 ms with 1 token, 2.9 with 8 and 5.7 with 32, "
        "against 3.9, 4.4 and 5.5; with weights of less than 2048 rows or columns, or of columns "
        "that are no multiple of 256, any may; "
        f"more than {MOST_GROUP_ROWS} tokens turn the weights into numbers first",
        capability=((9, 0), (9, 1)),
    ),
    Fact(
        _E4M3,
        "cpu",
        "no kernel of a CPU multiplies e4m3; the weights are turned into numbers, which saves no "
        "memory",
    ),
    *(
        Fact(
            _E4M3,
            "cuda",
            "kernels of few rows are for compute capability 9.0; here the weights are turned into "
            "numbers in each step, which takes time",
            capability=capability,
        )
        for capability in (((1, 0), (9, 0)), ((9, 1), (99, 0)))
    ),
)
"""All that is known. A later measurement belongs here and in the notes."""


def facts_of(
    scheme: QuantizationScheme,
    device: torch.device,
    hidden_size: int,
    capability: tuple[int, int] | None = None,
) -> Iterator[Fact]:
    """The facts of a scheme for a model of a hidden size; none of one that takes no weights.

    ``capability`` is that of a GPU which is planned for; None for that of ``device``.
    """
    if not scheme.takes_weights:
        return
    if device.type == "cuda" and capability is None:
        gpu: GPU | None = gpu_of(device) if torch.cuda.is_available() else None
        capability = (0, 0) if gpu is None else gpu.capability
    for fact in FACTS:
        if scheme.name not in fact.schemes or device.type != fact.device:
            continue
        if fact.widest is not None and hidden_size > fact.widest:
            continue
        if fact.capability is None or (
            capability is not None and fact.capability[0] <= capability < fact.capability[1]
        ):
            yield fact
