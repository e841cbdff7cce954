"""The ``engine-core`` command. torch and the engine are imported only by the commands that run."""

from engine_core.cli.app import app, main

__all__ = ["app", "main"]
