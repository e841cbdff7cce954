"""The command and its subcommands."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from collections.abc import Iterator, MutableMapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from engine_core import __version__, own_process
from engine_core.cli.command import HelpfulCommand

# Errors of writing that are not the program's fault: no space, no reader or terminal any more.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)

# Each command's module, and the function there if it has another name. They are imported where
# they are run or listed: all of them take 60 ms of a processor.
_COMMANDS = {
    **{name: (name, name) for name in ("generate", "chat", "serve", "bench")},
    "check-model": ("check_model", "check_model"),
    "warm": ("warm", "warm"),
    "export": ("export", "export"),
    "plugins": ("plugins", "plugins"),
    "new-plugin": ("new_plugin", "new_plugin"),
    "env": ("env", "env"),
    "import": ("export", "import_folder"),
}


class _Commands(MutableMapping[str, Any]):
    """The commands by their names, made when they are asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            module, function = _COMMANDS[name]
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            callback = getattr(import_module(f"engine_core.cli.{module}"), function)
            alone.command(name, cls=HelpfulCommand)(callback)
            self._made[name] = get_command(alone)
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*_COMMANDS, *self._made)))

    def __len__(self) -> int:
        return len({*_COMMANDS, *self._made})


class _Group(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": _Commands()})


app = typer.Typer(
    name="engine-core",
    cls=_Group,
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
