"""The HTTP service: OpenAI's API, a web page and metrics, in front of an engine process.

What needs the packages of the extra ``server`` is loaded on first use (PEP 562): the command line
reads the settings without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.lazy import lazy_names
from engine_core.server.settings import ServerSettings

if TYPE_CHECKING:
    from engine_core.server.app import create_app
    from engine_core.server.run import run_server

_HOMES = {"engine_core.server.app": "create_app", "engine_core.server.run": "run_server"}

__all__ = ["ServerSettings", "create_app", "run_server"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
