"""engine-core: an inference engine whose model families are plugins.

Names are loaded on first use (PEP 562), so that importing the package, as every plugin does for
``hookimpl``, brings no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.lazy import lazy_names

if TYPE_CHECKING:
    from engine_core.configs import (
        BeamSearchParams,
        EngineConfig,
        GuidedParams,
        PoolingParams,
        SamplingParams,
    )
    from engine_core.engine import LLM, AsyncEngine, Engine
    from engine_core.registry.hookspecs import API_VERSION, hookimpl
    from engine_core.steps import CompletionOutput, Logprob, RequestOutput

__version__ = "0.1.0"

_HOMES = {
    "engine_core.configs": (
        "BeamSearchParams EngineConfig GuidedParams PoolingParams SamplingParams"
    ),
    "engine_core.engine": "AsyncEngine Engine LLM",
    "engine_core.registry.hookspecs": "API_VERSION hookimpl",
    "engine_core.steps": "CompletionOutput Logprob RequestOutput",
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
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "hookimpl",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
