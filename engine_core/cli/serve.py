"""``engine-core serve``: a model behind OpenAI's HTTP API."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from engine_core.cli.command import Model, OptionGroup, command
from engine_core.configs import EngineConfig
from engine_core.server.settings import ServerSettings

ENGINE_OPTIONS = OptionGroup(EngineConfig)
SERVER_OPTIONS = OptionGroup(ServerSettings)
_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "orjson")


def _read_keys(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--api-key-file: {file} cannot be read: {error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise typer.BadParameter(f"--api-key-file: {file} has no key")
    return keys


@command(SERVER_OPTIONS, ENGINE_OPTIONS)
def serve(
    model: Model,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            envvar="ENGINE_CORE_API_KEY",
            show_envvar=True,
            help="Key that requests must send; without one anyone may send requests. May be given "
            "again. Other users of this machine can see it: prefer the environment or a file.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with one key a line; # begins a comment."),
    ] = None,
    **options: Any,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does, with a page to talk to it.

    SIGTERM or Ctrl-C ends it when the requests in flight are done; a second one at once.
    """
    settings = SERVER_OPTIONS.build(options)
    config = ENGINE_OPTIONS.build(options)
    keys = [key for key in api_key or () if key]
    if api_key and not keys:
        raise typer.BadParameter("--api-key: an empty key would let everyone in")
    if api_key_file is not None:
        keys += _read_keys(api_key_file)
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        typer.echo(
            f"engine-core: error: serving needs {', '.join(missing)}; install them with: "
            "pip install 'engine-core-llm[server]'",
            err=True,
        )
        raise typer.Exit(1)

    from engine_core.server import run_server

    run_server(model, config, settings, api_keys=keys)
