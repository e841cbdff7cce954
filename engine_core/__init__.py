"""engine-core: an inference engine whose model families are plugins.

Names are loaded on first use (PEP 562), so that importing the package, as every plugin does for
``hookimpl``, brings no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_core.configs import BeamSearchParams, EngineConfig, GuidedParams, SamplingParams
    from engine_core.engine import LLM, AsyncEngine, Engine
    from engine_core.registry.hookspecs import API_VERSION, hookimpl
    from engine_core.steps import CompletionOutput, Logprob, RequestOutput

__version__ = "0.1.0"

_HOMES = {
    "BeamSearchParams": "engine_core.configs",
    "AsyncEngine": "engine_core.engine",
    "API_VERSION": "engine_core.registry.hookspecs",
    "CompletionOutput": "engine_core.steps",
    "Engine": "engine_core.engine",
    "EngineConfig": "engine_core.configs",
    "GuidedParams": "engine_core.configs",
    "LLM": "engine_core.engine",
    "Logprob": "engine_core.steps",
    "RequestOutput": "engine_core.steps",
    "SamplingParams": "engine_core.configs",
    "hookimpl": "engine_core.registry.hookspecs",
}

__all__ = [
    "API_VERSION",
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "GuidedParams",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'engine_core' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
