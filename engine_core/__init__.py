"""engine-core: an inference engine whose model families are plugins.

Names are loaded on first use (PEP 562), so that importing the package, as every plugin does for
``hookimpl``, brings no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.lazy import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
