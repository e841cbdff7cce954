"""Frozen configuration models and the builders that fill them. Imports no torch.

Names are loaded on first use (PEP 562): what a plugin's discovery needs comes without pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.lazy import lazy_names

if TYPE_CHECKING:
    from engine_core.configs.builder import (
        ConfigBuilder,
        DefaultConfigBuilder,
        check_kinds,
        object_of,
        stated_keys,
    )
    from engine_core.configs.cache import (
        CacheConfig,
        CacheGroup,
        CacheSpec,
        CacheTensor,
        KVCacheSpec,
        LatentCacheSpec,
    )
    from engine_core.configs.engine import EngineConfig, SchedulerConfig
    from engine_core.configs.gguf import GGUFDecoderAdapter
    from engine_core.configs.hf_config import HFConfig
    from engine_core.configs.model import ModelConfig
    from engine_core.configs.pooling import PoolingConfig, PoolingParams
    from engine_core.configs.rope import (
        RotaryConfigBuilder,
        longest_sequence,
        refuse_partial_rotary,
        rope_keys,
    )
    from engine_core.configs.sampling import BeamSearchParams, GuidedParams, SamplingParams
    from engine_core.configs.tokenizer import SentencePieceFormat, TiktokenFormat

_HOMES = {
    "engine_core.configs.builder": (
        "ConfigBuilder DefaultConfigBuilder check_kinds object_of stated_keys"
    ),
    "engine_core.configs.cache": (
        "CacheConfig CacheGroup CacheSpec CacheTensor KVCacheSpec LatentCacheSpec"
    ),
    "engine_core.configs.engine": "EngineConfig SchedulerConfig",
    "engine_core.configs.gguf": "GGUFDecoderAdapter",
    "engine_core.configs.hf_config": "HFConfig",
    "engine_core.configs.model": "ModelConfig",
    "engine_core.configs.pooling": "PoolingConfig PoolingParams",
    "engine_core.configs.rope": (
        "RotaryConfigBuilder longest_sequence refuse_partial_rotary rope_keys"
    ),
    "engine_core.configs.sampling": "BeamSearchParams GuidedParams SamplingParams",
    "engine_core.configs.tokenizer": "SentencePieceFormat TiktokenFormat",
}

__all__ = [
    "BeamSearchParams",
    "CacheConfig",
    "CacheGroup",
    "CacheSpec",
    "CacheTensor",
    "ConfigBuilder",
    "DefaultConfigBuilder",
    "EngineConfig",
    "GGUFDecoderAdapter",
    "GuidedParams",
    "HFConfig",
    "KVCacheSpec",
    "LatentCacheSpec",
    "ModelConfig",
    "PoolingConfig",
    "PoolingParams",
    "RotaryConfigBuilder",
    "SamplingParams",
    "SchedulerConfig",
    "SentencePieceFormat",
    "TiktokenFormat",
    "check_kinds",
    "longest_sequence",
    "object_of",
    "refuse_partial_rotary",
    "rope_keys",
    "stated_keys",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
