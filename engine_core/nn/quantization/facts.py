"""Measurements of quantisation schemes: where they lose much, and where they take longer.

Figures of accuracy are those of ``benchmarks/accuracy.py`` in ``benchmarks/notes/quantisation.md``,
of an exported file's in ``docs/one-file.md``; those of speed are of ``benchmarks/README.md`` and
``benchmarks/notes/linears.md``. The models are those of ``make models``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from engine_core.kernels import GPU, gpu_of
from engine_core.kernels.linear.tiles import MOST_GROUP_ROWS, MOST_TEAMS_ROWS
from engine_core.nn.quantization.packed import integer_groups, puts_in_order
from engine_core.nn.quantization.scheme import QuantizationScheme

# Models for which losses were measured have 288 and 576; of wider ones nothing is known here.
_SMALL = 1024
# Inputs from which int4 at load has groups of 128, not of 32.
_WIDE = 2048
# Groups whose speed, and whose accuracy by rounding, was measured.
_TIMED, _ROUNDED = 128, (32, 64)
# Compute capabilities of devices: from the first of a pair, below the second.
_Range = tuple[tuple[int, int], tuple[int, int]]
_HOPPER: tuple[_Range, ...] = (((9, 0), (9, 1)),)
_BUT_HOPPER: tuple[_Range, ...] = (((8, 0), (9, 0)), ((9, 1), (99, 0)))
_FROM_AMPERE: tuple[_Range, ...] = (((8, 0), (99, 0)),)


@dataclass(frozen=True, slots=True)
class WeightForm:
    """Weights of a scheme, as far as measurements tell them apart.

    Attributes:
        kind: integers with scales, 8-bit floats with scales, or blocks of a GGUF file.
        bits: of the codes.
        group: inputs that share a scale; 0 for a whole row, None for a tensor, or if not known.
        maker: what chose the codes: this engine at load or for a file of ``engine-core export``
            (earlier: of weights that had 4 bits before), or a tool.
        activations: whether a GPU quantises those of steps of many tokens, too.
        ordered: whether the inputs of a group are not neighbours.
        zeros: whether groups have something for zero besides the scale.
    """

    kind: Literal["integers", "e4m3", "blocks"]
    bits: int = 8
    group: int | None = 0
    maker: Literal["load", "export", "earlier", "tool"] = "tool"
    activations: bool = False
    ordered: bool = False
    zeros: bool = False

    @property
    def kept_on_cpu(self) -> bool:
        """Whether torch's kernels multiply such integers on a CPU, if a weight's shape is fine."""
        if self.bits == 8:
            return self.by_rows
        return not self.group or self.group % 32 == 0

    @property
    def by_rows(self) -> bool:
        """Whether a row's scale is all that there is beside its integers."""
        return not self.group and not self.zeros

    @property
    def timed(self) -> bool:
        """Whether the speed of such integers was measured on a GPU."""
        return self.bits == 4 and self.group == _TIMED and not self.ordered


def forms_of(scheme: QuantizationScheme, hidden_size: int) -> frozenset[WeightForm]:
    """The forms that linears of a model of a hidden size have; none for a package's scheme."""
    settings = scheme.settings
    if scheme.name in ("int4", "int8"):
        four = scheme.name == "int4"
        group = (_TIMED if hidden_size >= _WIDE else 32) if four else 0
        found = [WeightForm("integers", 4 if four else 8, group, "load")]
    elif scheme.name == "gguf":
        found = [WeightForm("blocks")]
    elif scheme.name == "fp8" and settings is None:
        found = [WeightForm("e4m3", maker="load", activations=True)]
    elif scheme.name == "fp8":
        blocks = (settings or {}).get("weight_block_size") is not None
        found = [WeightForm("e4m3", group=128 if blocks else None, activations=not blocks)]
    elif scheme.name == "compressed-tensors":
        found = [_floats(given) for given in ((settings or {}).get("config_groups") or {}).values()]
    elif scheme.name in ("awq", "gptq"):
        given = settings or {}
        size = given.get("group_size", -1)
        found = [
            WeightForm(
                "integers",
                given.get("bits") or 4,
                0 if size == -1 else size,
                ordered=scheme.name == "gptq" and size != -1 and puts_in_order(given),
                zeros=True,
            )
        ]
    elif scheme.name == "compressed-tensors-int":
        found = _integers(settings or {})
    else:
        found = []
    return frozenset(found)


def _floats(given: Mapping[str, Any]) -> WeightForm:
    strategy = str((given.get("weights") or {}).get("strategy"))
    group = {"channel": 0, "block": 128, "group": 128}.get(strategy)
    inputs = given.get("input_activations") is not None
    return WeightForm("e4m3", group=group, activations=inputs and group != 128)


def _integers(settings: Mapping[str, Any]) -> list[WeightForm]:
    groups = integer_groups(settings)
    maker: Literal["export", "earlier", "tool"] = "export" if "vocabulary" in groups else "tool"
    if settings.get("quant_method") == "engine-core":
        maker = "earlier"
    found = []
    for name, given in groups.items():
        if name == "vocabulary":  # of a file of 'export', and no linears
            continue
        weights = given["weights"]
        bits, strategy = weights.get("num_bits"), weights.get("strategy")
        rows, order = strategy == "channel", weights.get("actorder")
        symmetric = weights.get("symmetric") is not False
        many = given.get("input_activations") is not None and bits == 8 and symmetric
        found.append(
            WeightForm(
                "integers",
                bits,
                {"group": weights.get("group_size"), "channel": 0}.get(strategy),
                maker,
                activations=many and strategy in ("channel", "tensor"),
                ordered=not rows and order in (True, "group", "dynamic"),
                zeros=not symmetric,
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that was measured of some forms of weights on a kind of device.

    Attributes:
        holds: of which forms.
        device: its type; None for any.
        text: what is lost, against bfloat16 or float32.
        loses: whether that is accuracy; else it is time or memory.
        severe: whether it is a warning; else what is lost in one place is won in another, or was
            not measured.
        widest: the greatest hidden size for which it is known; None for any.
        capabilities: ranges of compute capability for which it holds: from the first of a pair,
            below the second; None for all devices.
    """

    holds: Callable[[WeightForm], bool]
    device: Literal["cpu", "cuda"] | None
    text: str
    loses: bool = False
    severe: bool = True
    widest: int | None = None
    capabilities: tuple[_Range, ...] | None = None


def _made(bits: int) -> Callable[[WeightForm], bool]:
    """Integers that are made at load."""
    return lambda form: (form.kind, form.maker, form.bits) == ("integers", "load", bits)


def _of_eight(form: WeightForm) -> bool:
    return form.kind == "integers" and form.bits == 8 and not form.activations


def _by_tool(form: WeightForm) -> bool:
    return form.kind == "integers" and form.maker == "tool" and form.bits == 4


def _is(kind: str) -> Callable[[WeightForm], bool]:
    return lambda form: form.kind == kind


_ROUNDED_TO_NEAREST = "; a tool that calibrates comes nearer"
_TO_NUMBERS = f"more than {MOST_GROUP_ROWS} turn the weights into numbers first"
_MORE_TO_NUMBERS = (
    f"more than {MOST_TEAMS_ROWS}, or than {MOST_GROUP_ROWS} where that is faster, turn the "
    "weights into numbers first"
)

FACTS = (
    Fact(
        _made(4),
        "cpu",
        "models as small as this one lose much by 4 bits: the mean KL from float32 was 0.080 with "
        "one of 15M weights, whose likeliest token stayed at 89.5% of the positions; 'int8' had "
        "0.001 and 99.0%",
        loses=True,
        widest=_SMALL,
    ),
    Fact(
        _made(4),
        "cuda",
        "models as small as this one lose much by 4 bits: the mean KL from float32 was 0.067 with "
        "one of 15M weights and 0.31 with one of 135M, whose likeliest token stayed at 72% of the "
        "positions; 'int8' had 0.004 and 97.6%",
        loses=True,
        widest=_SMALL,
    ),
    Fact(
        lambda form: _by_tool(form) and form.group in _ROUNDED,
        None,
        "models as small as this one lose much by 4 bits: rounded to nearest in groups of 32 and "
        "64, the mean KL from float32 was 0.067 to 0.11 with one of 15M weights and 0.35 to 0.52 "
        f"with one of 135M{_ROUNDED_TO_NEAREST}",
        loses=True,
        widest=_SMALL,
    ),
    Fact(
        lambda form: _by_tool(form) and form.group == 0,
        None,
        "models as small as this one lose much by 4 bits with a scale for each row: rounded to "
        "nearest, the mean KL from float32 was 0.20 with one of 15M weights and 0.81 with one of "
        f"135M{_ROUNDED_TO_NEAREST}",
        loses=True,
        widest=_SMALL,
    ),
    Fact(
        lambda form: _by_tool(form) and form.group not in (0, *_ROUNDED),
        None,
        "models as small as this one lose much by 4 bits: not measured with groups of such a size, "
        "but in smaller ones, of 32 and 64, the mean KL from float32 was 0.067 to 0.11 with one of "
        f"15M weights and 0.35 to 0.52 with one of 135M{_ROUNDED_TO_NEAREST}",
        loses=True,
        widest=_SMALL,
    ),
    Fact(
        lambda form: form.kind == "integers" and form.maker == "export" and form.bits == 4,
        None,
        "models as small as this one lose much by 4 bits: exported in groups of 32, the mean KL "
        "from float32 was 0.060 with one of 15M weights; 'int8' had 0.001",
        loses=True,
        widest=_SMALL,
    ),
    Fact(
        lambda form: form.kind == "integers" and form.activations,
        "cuda",
        "models as small as this one lose by activations of 8 bits, as steps of more than 64 "
        "tokens have them: with one of 135M weights the mean KL from float32 was 0.045, and the "
        "likeliest token stayed at 89.0% of the positions; by such weights alone 0.004 and 96.8%",
        loses=True,
        widest=_SMALL,
    ),
    Fact(
        lambda form: form.kind == "e4m3" and form.activations and form.maker == "load",
        "cuda",
        "models as small as this one lose more by e4m3 than by 'int8': with one of 135M weights "
        "the mean KL from float32 was 0.019, for more than 64 tokens in a step 0.034, and 0.004",
        loses=True,
        widest=_SMALL,
    ),
    Fact(
        lambda form: form.kind == "e4m3" and form.activations and form.maker == "tool",
        "cuda",
        "models as small as this one lose more by e4m3 than by 'int8': with one of 135M weights "
        "the mean KL from float32 was 0.019, for more than 64 tokens in a step 0.031 by a scale "
        "for each tensor and 0.034 for each row, and 0.004",
        loses=True,
        widest=_SMALL,
    ),
    Fact(
        lambda form: form.kind == "e4m3" and not form.activations,
        "cuda",
        "models as small as this one lose more by e4m3 than by 'int8': with one of 135M weights "
        "the mean KL from float32 was 0.019, and 0.004",
        loses=True,
        widest=_SMALL,
    ),
    Fact(
        _is("e4m3"),
        "cpu",
        "models as small as this one lose more by e4m3 than by 'int8': with one of 135M weights "
        "the mean KL from float32 was 0.019, and 0.005",
        loses=True,
        widest=_SMALL,
    ),
    Fact(
        _made(8),
        "cpu",
        "prompts and batches take longer than with bfloat16 weights, 1.2 times with a model of "
        "135M weights; a single sequence takes 0.7 times",
        severe=False,
    ),
    Fact(
        _made(4),
        "cpu",
        "prompts take longer than with bfloat16 weights, 1.5 times with a model of 135M weights, "
        "and batches 1.2 times; a single sequence takes 0.6 times",
        severe=False,
    ),
    Fact(
        lambda form: form.kind == "integers" and form.maker != "load" and form.kept_on_cpu,
        "cpu",
        "prompts and batches may take longer than with bfloat16 weights, which was not measured "
        "with such a checkpoint; with 'int8' and 'int4', whose kernels multiply its codes, they do",
        severe=False,
    ),
    Fact(
        lambda form: form.kind == "blocks" or (form.kind == "integers" and not form.activations),
        "cuda",
        "there are no kernels for this GPU: each step turns the weights into numbers",
        capabilities=(((0, 0), (8, 0)),),
    ),
    Fact(
        lambda form: form.kind == "integers" and form.activations,
        "cuda",
        "there are no kernels of few rows for this GPU: each step of up to 64 tokens turns the "
        "weights into numbers",
        capabilities=(((0, 0), (8, 0)),),
    ),
    Fact(
        lambda form: form.kind == "integers" and form.timed,
        "cuda",
        "steps of more than 128 tokens take longer than with bfloat16 weights: on an H200 linears "
        "of 4 bits, in groups of 128, take 0.5 times as long with 1 to 32 tokens, 0.7 with 64, 1.0 "
        "with 72, 0.9 with 128, 1.3 with 192, 1.2 with 256, 1.5 with 257 and 1.1 to 1.25 with 384 "
        "to 1024; with weights of fewer than 2048 columns, or of columns that are no multiple of "
        "256, steps of any size may; "
        f"{_MORE_TO_NUMBERS}",
        capabilities=_HOPPER,
    ),
    Fact(
        lambda form: form.kind == "integers" and form.timed,
        "cuda",
        "steps of more than 64 tokens take longer than with bfloat16 weights: on an H200 "
        "linears of 4 bits, in groups of 128, took 0.6 times as long with 1 token, 0.8 with "
        "32, 1.6 with 128 and 2.0 with 256 by the kernels that this GPU has, in other tiles; "
        f"{_TO_NUMBERS}",
        capabilities=_BUT_HOPPER,
    ),
    Fact(
        lambda form: form.kind == "integers" and form.bits == 4 and form.ordered,
        "cuda",
        "steps of many tokens may take longer than with bfloat16 weights, which was not measured "
        "with 4 bits in groups whose inputs are no neighbours, as act-order (desc_act, actorder) "
        f"chooses them; {_TO_NUMBERS}",
        severe=False,
        capabilities=_FROM_AMPERE,
    ),
    Fact(
        lambda form: (
            form.kind == "integers" and form.bits == 4 and not form.timed and not form.ordered
        ),
        "cuda",
        "steps of many tokens may take longer than with bfloat16 weights, which was not measured "
        f"with 4 bits in groups other than 128 inputs; {_TO_NUMBERS}",
        severe=False,
        capabilities=_FROM_AMPERE,
    ),
    Fact(
        lambda form: _of_eight(form) and form.by_rows,
        "cuda",
        "steps of more than 96 tokens take longer than with bfloat16 weights: on an H200 one of a "
        "model of 8B weights with a scale for each row takes 0.65 times as long with 1 token, 0.75 "
        "with 32, 0.8 with 64, 0.9 with 72, 1.1 with 100, 1.0 with 128 and 1.1 with 160 to 256; "
        "linears take 1.4 times as long with 257 and 1.1 to 1.25 with 384 to 1024; "
        f"with weights of fewer than 2048 columns steps of any size may; {_MORE_TO_NUMBERS}",
        capabilities=_HOPPER,
    ),
    Fact(
        lambda form: _of_eight(form) and form.by_rows,
        "cuda",
        "steps of more than 64 tokens take longer than with bfloat16 weights: on an H200 one of a "
        "model of 8B weights with a scale for each row took 0.85 times as long with 1 token, 0.95 "
        "with 32 and 64, 1.25 with 72 and 128 and 1.3 with 256 by the kernels that this GPU has; "
        f"{_TO_NUMBERS}",
        capabilities=_BUT_HOPPER,
    ),
    Fact(
        lambda form: _of_eight(form) and not form.by_rows,
        "cuda",
        "steps of many tokens may take longer than with bfloat16 weights, which was not measured "
        f"with 8 bits in groups or with zero points; {_TO_NUMBERS}",
        severe=False,
        capabilities=_FROM_AMPERE,
    ),
    Fact(
        lambda form: form.kind == "integers" and form.activations,
        "cuda",
        "steps may take longer than with bfloat16 weights, which was not measured with 8 bits; for "
        "more than 64 tokens the activations are quantised to 8 bits, too",
        severe=False,
        capabilities=_FROM_AMPERE,
    ),
    Fact(
        _is("blocks"),
        "cuda",
        "steps take longer than with bfloat16 weights: on an H200 one of a model of 8B weights "
        "in Q4_K took 4.9 ms with 1 token, 5.2 with 8 and 12.9 with 32, against 3.9, 4.4 and "
        "5.5, by the kernels that this GPU has; "
        f"more than {MOST_GROUP_ROWS} tokens turn the weights into numbers first",
        capabilities=_BUT_HOPPER,
    ),
    Fact(
        _is("blocks"),
        "cuda",
        "steps of more than 16 tokens may take longer than with bfloat16 weights: on an H200 one "
        "of a model of 8B weights in Q4_K took 1.9 ms with 1 token, 2.9 with 8 and 5.7 with 32, "
        "against 3.9, 4.4 and 5.5; with weights of less than 2048 rows or columns, or of columns "
        "that are no multiple of 256, any may; "
        f"more than {MOST_GROUP_ROWS} tokens turn the weights into numbers first",
        capabilities=_HOPPER,
    ),
    Fact(
        _is("e4m3"),
        "cpu",
        "no kernel of a CPU multiplies e4m3; the weights are turned into numbers, which saves no "
        "memory",
    ),
    Fact(
        _is("e4m3"),
        "cuda",
        "kernels of few rows are for compute capability 9.0; here the weights are turned into "
        "numbers in each step, which takes time",
        capabilities=(((1, 0), (9, 0)), ((9, 1), (99, 0))),
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
    forms = forms_of(scheme, hidden_size)
    for fact in FACTS:
        if fact.device not in (None, device.type) or not any(map(fact.holds, forms)):
            continue
        if fact.widest is not None and hidden_size > fact.widest:
            continue
        if fact.capabilities is None or (
            capability is not None
            and any(first <= capability < end for first, end in fact.capabilities)
        ):
            yield fact
