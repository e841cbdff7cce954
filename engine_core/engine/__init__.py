"""The engine: requests in, outputs out, and the loop between.

Names are loaded on first use (PEP 562): ``Engine`` and ``LLM`` bring torch, which the process that
serves requests through an ``AsyncEngine`` needs not, and that brings what a script needs not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core import own_process
from engine_core.lazy import lazy_names

if TYPE_CHECKING:
    from engine_core.engine.async_engine import AsyncEngine, RequestStream
    from engine_core.engine.engine import Engine
    from engine_core.engine.frontend import Message, Prompt
    from engine_core.engine.llm import LLM

_HOMES = {
    "engine_core.engine.async_engine": "AsyncEngine RequestStream",
    "engine_core.engine.engine": "Engine",
    "engine_core.engine.frontend": "Message Prompt",
    "engine_core.engine.llm": "LLM",
}

__all__ = ["LLM", "AsyncEngine", "Engine", "Message", "Prompt", "RequestStream"]

# Before torch is imported, which is for an LLM in a user's process too.
own_process.poll_briefly()

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
