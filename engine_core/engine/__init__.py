"""The engine: requests in, outputs out, and the loop between.

``Engine`` and ``LLM`` bring torch and are loaded on first use (PEP 562): the process that serves
requests through an ``AsyncEngine`` needs none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from engine_core.engine.async_engine import AsyncEngine, RequestStream
from engine_core.engine.frontend import Message, Prompt

if TYPE_CHECKING:
    from engine_core.engine.engine import Engine
    from engine_core.engine.llm import LLM

_HOMES = {"Engine": "engine_core.engine.engine", "LLM": "engine_core.engine.llm"}

__all__ = ["LLM", "AsyncEngine", "Engine", "Message", "Prompt", "RequestStream"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'engine_core.engine' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
