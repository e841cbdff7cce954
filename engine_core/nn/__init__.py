"""Layers for model authors, which handle ranks, quantisation and the paged cache."""

from engine_core.nn.activation import (
    GeluAndMul,
    QuickGelu,
    SiluAndMul,
    build_gated_activation,
)
from engine_core.nn.attention import (
    Attention,
    CachedLayer,
    KVCacheLayer,
    alibi_slopes,
    cached_layers,
)
from engine_core.nn.blocks import (
    MLP,
    Branch,
    DecoderLayer,
    FeedForward,
    GatedMLP,
    PreNormed,
    SelfAttention,
    link_layers,
)
from engine_core.nn.causal_lm import CausalLM
from engine_core.nn.decoder import Decoder, RotaryCausalLM
from engine_core.nn.embedding import Embedding, LMHead, build_embedding, build_lm_head
from engine_core.nn.encoder import EncoderAttention, EncoderLayers, step_segments
from engine_core.nn.epilogue import Activated, CosSin
from engine_core.nn.experts import Experts, Router, SparseMoE
from engine_core.nn.latent import LatentAttention, LatentSelfAttention
from engine_core.nn.linear import (
    Linear,
    LinearMethod,
    QKVLinear,
    build_colwise_linear,
    build_down_linear,
    build_gateup_linear,
    build_merged_colwise_linear,
    build_o_proj,
    build_qkv_proj,
    build_replicated_linear,
    build_rowwise_linear,
)
from engine_core.nn.loading import (
    Weights,
    empty_parameter,
    load_stacked_weights,
    load_weight,
    stacked_loader,
)
from engine_core.nn.media import finished, sent
from engine_core.nn.norm import HeadsRMSNorm, LayerNorm, RMSNorm, build_heads_parameter
from engine_core.nn.rotary import (
    ApplyRotaryEmb,
    RotaryEmbedding,
    build_rotary_embedding,
    build_rotary_embedding_from_config,
    rope_lengths,
)
from engine_core.nn.state_space import GatedRMSNorm, StateSpace, StateSpaceMixer, StateSpec
from engine_core.nn.text_model import AroundTextModel

__all__ = [
    "MLP",
    "Activated",
    "ApplyRotaryEmb",
    "AroundTextModel",
    "Attention",
    "Branch",
    "CachedLayer",
    "CausalLM",
    "CosSin",
    "Decoder",
    "DecoderLayer",
    "Embedding",
    "EncoderAttention",
    "EncoderLayers",
    "Experts",
    "FeedForward",
    "GatedMLP",
    "GatedRMSNorm",
    "GeluAndMul",
    "HeadsRMSNorm",
    "KVCacheLayer",
    "LMHead",
    "LatentAttention",
    "LatentSelfAttention",
    "LayerNorm",
    "Linear",
    "LinearMethod",
    "PreNormed",
    "QKVLinear",
    "QuickGelu",
    "RMSNorm",
    "RotaryCausalLM",
    "RotaryEmbedding",
    "Router",
    "SelfAttention",
    "SiluAndMul",
    "SparseMoE",
    "StateSpace",
    "StateSpaceMixer",
    "StateSpec",
    "Weights",
    "alibi_slopes",
    "build_colwise_linear",
    "build_down_linear",
    "build_embedding",
    "build_gated_activation",
    "build_gateup_linear",
    "build_heads_parameter",
    "build_lm_head",
    "build_merged_colwise_linear",
    "build_o_proj",
    "build_qkv_proj",
    "build_replicated_linear",
    "build_rotary_embedding",
    "build_rotary_embedding_from_config",
    "build_rowwise_linear",
    "cached_layers",
    "empty_parameter",
    "finished",
    "link_layers",
    "load_stacked_weights",
    "load_weight",
    "rope_lengths",
    "sent",
    "stacked_loader",
    "step_segments",
]
