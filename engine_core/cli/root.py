"""The command and its subcommands."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from engine_core import __version__, own_process
from engine_core.cli.bench import bench
from engine_core.cli.chat import chat
from engine_core.cli.check_model import check_model
from engine_core.cli.env import env
from engine_core.cli.export import export, import_folder
from engine_core.cli.generate import generate
from engine_core.cli.new_plugin import new_plugin
from engine_core.cli.plugins import plugins
from engine_core.cli.serve import serve

# Errors of writing that are not the program's fault: no space, no reader or terminal any more.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)

app = typer.Typer(
    name="engine-core",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Run transformer language models whose families are plugins."""


for _command in (generate, chat, serve, bench, check_model, export, plugins, new_plugin, env):
    app.command()(_command)
app.command("import")(import_folder)


def main() -> None:
    """Entry point of ``engine-core``: exits 0, 1 on an error, 2 on wrong usage, 130 on Ctrl-C."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may write what the terminal cannot show; that must not end the stream.
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            app()
        finally:
            # The interpreter's last collection would take longer than all else at the end. What is
            # left so nanobind, by which Triton is bound, would report as leaks.
            if "triton" not in sys.modules:
                own_process.freeze()
            # Flush while a failure can still be reported.
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        if error.errno != errno.EPIPE:  # a reader that has left knows
            name = "standard output" if error.filename is None else error.filename
            message = f"engine-core: error: {name} cannot be written: {error.strerror}"
            typer.echo(message, err=True)
        _drop_output()
        sys.exit(1)


def _drop_output() -> None:
    """Discard what standard output still buffers: the interpreter flushes it when it ends."""
    if sys.stdout is not None:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
