"""``engine-core warm``: the kernels of a start, compiled ahead and without the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_core.cli.command import Model, OptionGroup, command
from engine_core.configs import EngineConfig
from engine_core.errors import ConfigError, OptionError

if TYPE_CHECKING:
    from engine_core.check.gpus import NamedGPU
    from engine_core.engine.warm import WarmReport

ENGINE_OPTIONS = OptionGroup(EngineConfig)


def _lines(report: WarmReport, gpu: str) -> list[str]:
    total = sum(report.variants.values())
    compiled = total - report.kept
    modules = f", with {report.modules} modules to launch them" if report.modules else ""
    lines = [
        f"{len(report.variants)} kernels in {total} variants, for {report.steps} kinds of steps on "
        f"{gpu}{modules}:",
        *(f"  {count:3} {name}" for name, count in report.variants.items()),
        f"{report.kept} were there, {compiled} compiled in {report.seconds:.1f} s: "
        f"{report.rehearsal_seconds:.1f} s until all were known, {report.compile_seconds:.1f} s of "
        "compiling processes",
        f"in {report.folder}",
    ]
    return lines + [f"not compiled: {why}" for why in report.failed]


@command(ENGINE_OPTIONS)
def warm(
    model: Model,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The GPU, like H200; this machine's if not given."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The cache's folder; Triton's own if not given."),
    ] = None,
    **options: Any,
) -> None:
    """Compile the kernels that a start with these options needs, without a GPU.

    A start with the same GPU, options and versions finds them if TRITON_CACHE_DIR names the folder.
    """
    config = ENGINE_OPTIONS.build(options)
    if find_spec("triton") is None:
        raise OptionError(
            "there is nothing to compile with, since Triton is not installed: pip install "
            "'engine-core-llm[triton]'"
        )
    if os.environ.pop("TRITON_INTERPRET", "0") not in ("", "0"):
        raise OptionError("TRITON_INTERPRET is set, with which nothing is compiled: unset it")
    from engine_core.check.gpus import find_gpu

    try:
        named = _here() if gpu is None else find_gpu(gpu)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"{output} cannot be a folder: {error.strerror}") from error
        os.environ["TRITON_CACHE_DIR"] = str(output.absolute())
    from engine_core.engine.warm import warm as compile_ahead

    report = compile_ahead(
        model,
        config,
        capability=named.capability,
        multiprocessors=named.multiprocessors,
        memory=named.memory,
    )
    print("\n".join(_lines(report, named.name)))
    sys.stdout.flush()
    # What PyTorch and Triton were made to believe is not to be taken apart.
    os._exit(1 if report.failed else 0)


# In a process of its own: one in which a GPU was touched is not to be forked.
_ASK = """
import json, torch
if torch.cuda.is_available():
    it = torch.cuda.get_device_properties(0)
    print(json.dumps([it.name, it.total_memory, [it.major, it.minor], it.multi_processor_count]))
"""


def _here() -> NamedGPU:
    """This machine's first GPU."""
    from engine_core.check.gpus import NamedGPU, gpu_names

    command = [sys.executable, "-c", _ASK]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    if not said.strip():
        raise ConfigError(
            f"this machine has no GPU: name one with --gpu; known are {', '.join(gpu_names())}"
        )
    name, memory, capability, multiprocessors = json.loads(said)
    return NamedGPU(name, memory, tuple(capability), multiprocessors)
