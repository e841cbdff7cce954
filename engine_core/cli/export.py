"""``engine-core export`` and ``import``: a model as one file, and such a file as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from engine_core.cli.command import Model, OptionGroup, command
from engine_core.configs import EngineConfig

_FIELDS = ("quantization", "revision", "hf_overrides", "custom_module_map", "model_impl")
ENGINE_OPTIONS = OptionGroup(EngineConfig, only=_FIELDS)


@command(ENGINE_OPTIONS)
def export(
    model: Model,
    out: Annotated[
        Path, typer.Argument(metavar="OUT.safetensors", help="The file that is written.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is there.")] = False,
    **options: Any,
) -> None:
    """Write a model to one safetensors file, with its config and tokenizer, and quantised if asked.

    The file is a MODEL for every command. Quantisations are int4, int8 and fp8.
    """
    config = ENGINE_OPTIONS.build(options)
    if out.suffix.lower() != ".safetensors":
        raise typer.BadParameter(f"OUT is {out}; its name must end with .safetensors")

    from engine_core.engine.export import export_model

    made = export_model(model, out, config, force=force)
    typer.echo(f"{made.path}: {made.num_tensors} tensors, {made.nbytes / 2**20:.1f} MiB")
    if made.left:
        shown = ", ".join(made.left[:4]) + (", ..." if made.left[4:] else "")
        typer.echo(f"not quantised: {len(made.left)} linears ({shown})")


@command()
def import_folder(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.safetensors", help="A file that 'export' wrote.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that is made.")],
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="Write numbers in the place of quantised weights.")
    ] = False,
) -> None:
    """Write a file of 'export' as a folder that transformers loads.

    Transformers needs the package compressed-tensors for quantised weights, and for scales of a
    calibrated cache.
    """
    from engine_core.engine.export import import_model

    made = import_model(file, folder, dequantize=dequantize)
    typer.echo(f"{made.path}: {made.num_tensors} tensors, {made.nbytes / 2**20:.1f} MiB")
    if made.needs_compressed_tensors:
        typer.echo("transformers needs compressed-tensors to load it")
