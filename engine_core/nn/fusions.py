"""The fusions of a model's layers, asked of its linears before anything runs; it may be on meta."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from engine_core.kernels import GPU
from engine_core.nn.blocks import Branch, DecoderLayer, FeedForward
from engine_core.nn.epilogue import Call

# All that any table tells apart, and prompts.
_ROWS = (*range(1, 513), 1024, 2048, 4096, 8192)
_Question = tuple[str, str, Callable[[Call], str | None]]
_Answer = tuple[str, str, str, str | None]


@dataclass(frozen=True, slots=True)
class Fusion:
    """An epilogue of a linear, and for how many rows its method fuses it.

    Attributes:
        layers: the layers that are alike, as ``model.layers.0-27``.
        linear: the linear's name in the layer; two names for what two linears agree on.
        epilogue: the operations that follow the product.
        rows: the numbers of rows that are fused, as ``1-64, 256``; empty for none.
        reason: why others are not; None if all are.
    """

    layers: str
    linear: str
    epilogue: str
    rows: str
    reason: str | None


def fusions(model: nn.Module, gpu: GPU | None, dtype: torch.dtype) -> list[Fusion]:
    """The fusions of each kind of layer on a kind of GPU; ``gpu`` None for a CPU."""
    kinds: dict[tuple[str, tuple[_Answer, ...]], list[int]] = {}
    seen: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in seen or not isinstance(module, DecoderLayer | Branch):
            continue
        seen.update(module.modules())
        answers = tuple(
            (linear, epilogue, *_asked(declined, gpu, dtype))
            for linear, epilogue, declined in _questions(module, gpu)
        )
        # The number nearest the end tells layers of one kind apart.
        parts = name.split(".")
        at = max((i for i, part in enumerate(parts) if part.isdigit()), default=None)
        number = 0 if at is None else int(parts[at])
        pattern = ".".join("{}" if i == at else part for i, part in enumerate(parts))
        kinds.setdefault((pattern, answers), []).append(number)
    return [
        Fusion(pattern.format(_runs(numbers, range(max(numbers) + 1))), *answer)
        for (pattern, answers), numbers in kinds.items()
        for answer in answers
    ]


def _questions(module: DecoderLayer | Branch, gpu: GPU | None) -> Iterator[_Question]:
    names = {part: name for name, part in module.named_modules()}
    branches = [part for part in module.modules() if isinstance(part, Branch)]
    joints = list(module.join(gpu, settled=True)) if isinstance(module, DecoderLayer) else []
    ends = [module.self_attn, module.mlp] if isinstance(module, DecoderLayer) else []
    chain = module.chained if isinstance(module, DecoderLayer) else None
    if chain is not None and isinstance(module.self_attn, Branch):
        project = module.self_attn.ends()[2]
        end = "the final norm" if chain.following is None else "the next linear"
        yield f"{names[project]} to {end}", str(chain), partial(project.declined, chain)
    for branch in branches:
        first, epilogue, last = branch.ends()
        yield names[first], str(epilogue), partial(first.declined, epilogue)
        if isinstance(branch, FeedForward):
            branch.settle(gpu)
            if branch.coding is not None:
                yield names[last], "rows quantised by the activation", branch.coding.declined
        joint = next((j for end, j in zip(ends, joints, strict=True) if end is branch), None)
        if joint is None:
            continue
        yield names[last], str(joint.add), partial(last.declined, joint.add)
        between = f"{names[last]}, next linear"
        refusal = joint.refusal
        asked = joint.deferral.declined if joint.deferral else lambda call, why=refusal: why
        yield between, "division of the norm between them deferred", asked
        if joint.coding is not None:
            yield between, "rows quantised by the norm between them", joint.coding.declined


def _asked(
    declined: Callable[[Call], str | None], gpu: GPU | None, dtype: torch.dtype
) -> tuple[str, str | None]:
    answers = {rows: declined(Call(rows, dtype, gpu)) for rows in _ROWS}
    fused = [rows for rows, answer in answers.items() if answer is None]
    reasons = dict.fromkeys(answer for answer in answers.values() if answer is not None)
    return _runs(fused, _ROWS), "; ".join(reasons) or None


def _runs(numbers: Sequence[int], among: Sequence[int]) -> str:
    """``[1, 2, 3, 7]`` as "1-3, 7": runs of those that follow one another ``among`` all."""
    places = {number: place for place, number in enumerate(among)}
    runs: list[list[int]] = []
    for number in numbers:
        if runs and places[number] == places[runs[-1][1]] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
