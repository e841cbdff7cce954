"""Frozen configuration models and the builders that fill them. Imports no torch."""

from engine_core.configs.builder import ConfigBuilder, DefaultConfigBuilder
from engine_core.configs.cache import CacheConfig, KVCacheSpec
from engine_core.configs.engine import EngineConfig, Quantization
from engine_core.configs.hf_config import HFConfig
from engine_core.configs.model import ModelConfig
from engine_core.configs.sampling import BeamSearchParams, SamplingParams
from engine_core.configs.scheduler import SchedulerConfig

__all__ = [
    "BeamSearchParams",
    "CacheConfig",
    "ConfigBuilder",
    "DefaultConfigBuilder",
    "EngineConfig",
    "HFConfig",
    "KVCacheSpec",
    "ModelConfig",
    "Quantization",
    "SamplingParams",
    "SchedulerConfig",
]
