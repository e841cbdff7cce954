"""``--trace-layers``: each layer's outputs, summarised as text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from engine_core import LLM
    from engine_core.runtime.layer_trace import LayerRecord, StepTrace

_TITLES = {"prefill": "first prefill step", "decode": "first decode step"}


@contextlib.contextmanager
def traced_layers(llm: LLM) -> Iterator[None]:
    """Print the layers' outputs of the first prefill and decode steps to stderr at the end.

    Outputs of a step that failed half-way are printed too.
    """
    with llm.engine.trace_layers() as trace:
        try:
            yield
        finally:
            for step in trace.steps:
                typer.echo("\n".join(_lines(step)), err=True)


def _lines(step: StepTrace) -> list[str]:
    titles = ("layer", "shape", "dtype", "mean", "max abs", "not finite")
    rows = [titles, *map(_cells, step.layers)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    count = "1 token" if step.num_tokens == 1 else f"{step.num_tokens} tokens"
    lines = [f"{_TITLES[step.phase]}, {count}"]
    for row in rows:
        text = (cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True))
        numbers = (cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True))
        lines.append("  ".join((*text, *numbers)))
    if step.first_non_finite is not None:
        lines.append(f"first that is not finite: {_place(step, step.first_non_finite)}")
    return [*lines, ""]


def _cells(layer: LayerRecord) -> tuple[str, ...]:
    return (
        layer.name,
        "x".join(map(str, layer.shape)),
        layer.dtype,
        f"{layer.mean:.4g}",
        f"{layer.max_abs:.4g}",
        str(layer.num_non_finite or "-"),
    )


def _place(step: StepTrace, module: str) -> str:
    """The layer that holds ``module``, and the module if it is not the layer itself."""
    for layer in step.layers:
        if module.startswith(f"{layer.name}."):
            return f"{layer.name}, in {module.removeprefix(layer.name + '.')}"
    return module
