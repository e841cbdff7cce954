"""The names of lmdeploy.pytorch's model interface, for porting a model file by its imports.

``README.md`` of this distribution says which import becomes which. Signatures and results are
lmdeploy's where they differ from :mod:`engine_core.nn`: head counts are the whole model's, cos and
sin are as wide as the rotated part of a head, ``is_tp=False`` keeps a linear whole on every rank.
An argument that is not supported is refused with a ``ValueError``. Accepted without effect are
those that lmdeploy, too, ignores without data parallelism or quantisation (``layer_type``,
``prefix``, ``check_dist``, ``dp_gather``, ``dp_disable_tp``). A new family should use the names of
:mod:`engine_core.nn`: they are shorter, and their kernels can fuse.

Reference: ``lmdeploy/pytorch/nn``, ``lmdeploy/pytorch/models/utils`` and
``docs/en/advance/pytorch_new_model.md`` of lmdeploy 0.10; ``models`` of 0.14.0.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from engine_core import nn as core
from engine_core.configs import HFConfig
from engine_core.nn import Linear, QKVLinear
from engine_core.nn import load_weight as _load_weight
from engine_core.nn.distributed import divide
from engine_core.nn.loading import copy_checked, note_filled
from engine_core.nn.rotary import DynamicNTKRotaryEmbedding
from engine_core.step_context import (
    AttentionMetadata,
    StepContextManager,
    building,
    current_build_context,
)
from engine_core.step_context import StepContext as _StepContext
from engine_core_lmdeploy.distributed import (
    get_dist_manager,
    get_ep_world_rank,
    get_tp_world_rank,
)
from engine_core_lmdeploy.experts import (
    EXPERT_PARTS,
    EPLBManager,
    FusedMoE,
    SoftmaxTopK,
    build_fused_moe,
    get_build_model_context,
)
from engine_core_lmdeploy.refusals import check_quant, refuse

__all__ = [
    "ApplyRotaryEmb",
    "Attention",
    "AttentionMetadata",
    "CudaGraphMixin",
    "DeployModelMixin",
    "DeployModelMixinV1",
    "EPLBManager",
    "FusedMoE",
    "GeluAndMul",
    "LayerNorm",
    "Llama3Parameters",
    "LongRoPEScalingParameters",
    "ParallelEmbedding",
    "ParallelLMHead",
    "RMSNorm",
    "RopeType",
    "SiluAndMul",
    "SoftmaxTopK",
    "StepContext",
    "StepContextManager",
    "YarnParameters",
    "add_prefix",
    "build_colwise_linear",
    "build_down_linear",
    "build_embedding",
    "build_fused_moe",
    "build_gateup_linear",
    "build_linear",
    "build_merged_colwise_linear",
    "build_o_proj",
    "build_qkv_proj",
    "build_rotary_embedding",
    "build_rotary_embedding_from_config",
    "build_rowwise_linear",
    "default_weight_loader",
    "get_build_model_context",
    "get_dist_manager",
    "get_ep_world_rank",
    "get_tp_world_rank",
    "load_weight",
]

GeluAndMul = core.GeluAndMul


def _check_align(function: str, align: int) -> None:
    if align != 1:
        refuse(function, "tp_align_size", align, "ranks get equal parts")


class SiluAndMul(core.SiluAndMul):
    """``silu(gate) * up``; ``inplace`` has no effect: the input is never overwritten."""

    def __init__(self, inplace: bool = True) -> None:
        super().__init__()


class RMSNorm(core.RMSNorm):
    """RMSNorm with lmdeploy's arguments.

    Raises:
        ValueError: ``quant_config`` or ``all_reduce_group`` is given, or ``tp`` on several ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        quant_config: Any = None,
        tp: bool = False,
        align: int = 1,
        prefix: str = "",
        all_reduce_group: str | None = None,
    ) -> None:
        check_quant("RMSNorm", quant_config)
        _check_align("RMSNorm", align)
        if tp and current_build_context().tp_size > 1:
            refuse("RMSNorm", "tp", tp, "a norm is computed whole on every rank")
        if all_reduce_group is not None:
            refuse("RMSNorm", "all_reduce_group", all_reduce_group, "rowwise linears sum at once")
        super().__init__(hidden_size, eps, dtype=dtype, device=device)


class LayerNorm(core.LayerNorm):
    """LayerNorm with lmdeploy's default of ``eps``."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, bias, dtype=dtype, device=device)


class _PartLinear(Linear):
    """A rowwise linear of which every rank gives its part of the sum."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """``x [..., in]`` to ``[..., out]``."""
        return self.partial(x)


def build_linear(
    in_features: int,
    out_features: int,
    bias: bool,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    colwise: bool = True,
    is_tp: bool = False,
    quant_config: Any = None,
    all_reduce: bool = True,
    tp_align_size: int = 1,
    dp_gather: bool = False,
    layer_type: str | None = "attn",
    prefix: str = "",
) -> Linear:
    """A linear, whole on every rank or, if ``is_tp``, split by columns or rows.

    ``all_reduce=False`` of a split rowwise linear leaves the sum over the ranks to others.

    Raises:
        ValueError: ``quant_config``, ``tp_align_size``, or a bias of a linear that does not sum.
    """
    check_quant("build_linear", quant_config)
    _check_align("build_linear", tp_align_size)
    if not is_tp:
        parts = [(None, out_features, 0, out_features)]
        return Linear(in_features, parts, bias=bias, dtype=dtype, device=device)
    if colwise:
        return core.build_colwise_linear(
            in_features, out_features, bias, dtype=dtype, device=device
        )
    if not all_reduce:
        if bias:
            refuse("build_linear", "all_reduce", all_reduce, "each rank would add the bias")
        parts = [(None, out_features, 0, out_features)]
        return _PartLinear(in_features, parts, bias=False, rowwise=True, dtype=dtype, device=device)
    return core.build_rowwise_linear(in_features, out_features, bias, dtype=dtype, device=device)


def build_colwise_linear(
    in_features: int,
    out_features: int,
    bias: bool,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    is_tp: bool = False,
    tp_align_size: int = 1,
    quant_config: Any = None,
    dp_disable_tp: bool = False,
    dp_gather: bool = False,
    check_dist: bool = True,
    layer_type: str = "attn",
    prefix: str = "",
) -> Linear:
    """:func:`build_linear` whose output is split if ``is_tp``."""
    return build_linear(
        in_features,
        out_features,
        bias,
        dtype=dtype,
        device=device,
        colwise=True,
        is_tp=is_tp,
        quant_config=quant_config,
        tp_align_size=tp_align_size,
    )


def build_rowwise_linear(
    in_features: int,
    out_features: int,
    bias: bool,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    is_tp: bool = False,
    tp_align_size: int = 1,
    quant_config: Any = None,
    all_reduce: bool = True,
    dp_disable_tp: bool = False,
    check_dist: bool = True,
    layer_type: str = "attn",
    prefix: str = "",
) -> Linear:
    """:func:`build_linear` whose input is split if ``is_tp``."""
    return build_linear(
        in_features,
        out_features,
        bias,
        dtype=dtype,
        device=device,
        colwise=False,
        is_tp=is_tp,
        quant_config=quant_config,
        all_reduce=all_reduce,
        tp_align_size=tp_align_size,
    )


build_o_proj = build_rowwise_linear
build_down_linear = build_rowwise_linear


def build_merged_colwise_linear(
    in_features: int,
    all_out_features: Sequence[int],
    bias: bool,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    quant_config: Any = None,
    is_tp: bool = True,
    out_names: Sequence[Hashable] | None = None,
    dp_gather: bool = False,
    check_dist: bool = True,
    layer_type: str = "attn",
    prefix: str = "",
) -> Linear:
    """Several linears of one input as one; shard ids are ``out_names`` or else 0, 1, ...

    Raises:
        ValueError: ``quant_config`` is given, or ``out_names`` are not as many as the outputs.
    """
    check_quant("build_merged_colwise_linear", quant_config)
    names = range(len(all_out_features)) if out_names is None else out_names
    if len(names) != len(all_out_features):
        raise ValueError(
            f"build_merged_colwise_linear: {len(names)} out_names for {len(all_out_features)} "
            "outputs"
        )
    context = current_build_context()
    ranks, rank = (context.tp_size, context.tp_rank) if is_tp else (1, 0)
    parts: list[tuple[Hashable, int, int, int]] = []
    for name, rows in zip(names, all_out_features, strict=True):
        size = divide(rows, ranks, "out_features of a linear")
        parts.append((name, rows, rank * size, size))
    return Linear(in_features, parts, bias=bias, dtype=dtype, device=device)


build_gateup_linear = build_merged_colwise_linear


def build_qkv_proj(
    in_features: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_size: int,
    head_size_v: int | None = None,
    bias: bool = False,
    quant_config: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    is_tp: bool = True,
    num_replicate_kv_heads: int = 1,
    prefix: str = "",
) -> QKVLinear:
    """The merged query, key and value projection, split by heads.

    Raises:
        ValueError: ``quant_config``, ``num_replicate_kv_heads``, or ``is_tp=False`` on several
            ranks, where :class:`Attention` has only a rank's share of the heads.
    """
    check_quant("build_qkv_proj", quant_config)
    if num_replicate_kv_heads != 1:
        refuse(
            "build_qkv_proj",
            "num_replicate_kv_heads",
            num_replicate_kv_heads,
            "give the checkpoint's num_kv_heads; where they are fewer than ranks, ranks share them",
        )
    if not is_tp and current_build_context().tp_size > 1:
        refuse("build_qkv_proj", "is_tp", is_tp, "attention is split over the ranks by heads")
    return core.build_qkv_proj(
        in_features,
        num_q_heads,
        num_kv_heads,
        head_size,
        v_head_dim=head_size_v,
        bias=bias,
        dtype=dtype,
        device=device,
    )


class ParallelEmbedding(core.Embedding):
    """The token embedding; whole on every rank or, if ``is_tp``, split over the vocabulary."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        padding_idx: int | None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        is_tp: bool = False,
        padding_size: int = 64,
        layer_type: str = "attn",
        force_dtype: torch.dtype | None = None,
    ) -> None:
        """The row ``padding_idx`` is zero after loading, as in lmdeploy.

        Raises:
            ValueError: ``force_dtype`` is given, or ``padding_idx`` is outside the vocabulary.
        """
        if force_dtype is not None:
            refuse("ParallelEmbedding", "force_dtype", force_dtype, "it has the model's dtype")
        if padding_idx is not None and not -vocab_size <= padding_idx < vocab_size:
            refuse("ParallelEmbedding", "padding_idx", padding_idx, f"{vocab_size} rows")
        context = current_build_context()
        with building(context if is_tp else replace(context, tp_rank=0, tp_size=1)):
            super().__init__(vocab_size, hidden_size, dtype, device)
        self.padding_idx = None if padding_idx is None else padding_idx % vocab_size

    def _load(self, param: nn.Parameter, tensor: Tensor, shard_id: object = None) -> None:
        super()._load(param, tensor, shard_id)
        if self.padding_idx is not None and not param.is_meta:
            row = self.padding_idx - self.first
            if 0 <= row < self.rows:
                param[row].zero_()


def build_embedding(
    vocab_size: int,
    hidden_size: int,
    padding_idx: int | None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    is_tp: bool = False,
    **kwargs: Any,
) -> ParallelEmbedding:
    """A :class:`ParallelEmbedding`, which takes ``kwargs``."""
    return ParallelEmbedding(
        vocab_size, hidden_size, padding_idx, dtype=dtype, device=device, is_tp=is_tp, **kwargs
    )


class ParallelLMHead(core.LMHead):
    """The output head; split over the vocabulary whatever ``is_tp``, with the same result.

    Tied to an embedding it is split as that is.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        is_tp: bool = True,
        padding_size: int = 64,
        layer_type: str = "attn",
    ) -> None:
        if bias:
            refuse("ParallelLMHead", "bias", bias, "use build_rowwise_linear for a head with one")
        super().__init__(vocab_size, hidden_size, dtype, device)

    def tie_weights(self, embedding: ParallelEmbedding) -> None:
        """Share the embedding's matrix."""
        self.weight = embedding.weight
        self.context, self.rows, self.first = embedding.context, embedding.rows, embedding.first


class Attention(core.Attention):
    """Attention over the paged cache; head counts are the whole model's."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        v_head_size: int | None = None,
        alibi: bool = False,
        sliding_window: int | None = None,
        logit_softcapping: float | None = None,
        causal: bool = True,
        use_flash_mla: bool = False,
        learnable_sink: bool = False,
        **kwargs: Any,
    ) -> None:
        """Split the heads over the ranks; a ``sliding_window`` of -1 is none.

        Raises:
            ValueError: it is not causal, or has MLA, sinks, a window that is not a positive
                integer, or an unknown argument.
        """
        if not causal:
            refuse("Attention", "causal", causal, "see ProcessedPrompt for a seen-by-all prefix")
        if use_flash_mla:
            refuse("Attention", "use_flash_mla", use_flash_mla, "there is no latent attention")
        if learnable_sink:
            refuse("Attention", "learnable_sink", learnable_sink, "there are no attention sinks")
        if kwargs:
            refuse("Attention", *next(iter(kwargs.items())), "there is no such argument")
        if sliding_window == -1:
            sliding_window = None
        if sliding_window is not None and (type(sliding_window) is not int or sliding_window < 1):
            refuse("Attention", "sliding_window", sliding_window, "give a number of keys or None")
        ranks = current_build_context().tp_size
        num_kv_heads = num_kv_heads or num_heads
        super().__init__(
            divide(num_heads, ranks, "number of query heads"),
            head_size,
            num_kv_heads=max(1, num_kv_heads // ranks),
            v_head_dim=v_head_size,
            scale=scale,
            alibi=alibi,
            sliding_window=sliding_window,
            logit_softcapping=logit_softcapping or None,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        attn_metadata: AttentionMetadata,
        k_scales_zeros: Tensor | None = None,
        v_scales_zeros: Tensor | None = None,
        s_aux: Tensor | None = None,
        inplace: bool = True,
    ) -> Tensor:
        """``query [T, heads, D]``, ``key [T, kv, D]``, ``value [T, kv, Dv]`` to ``[T, heads, Dv]``.

        ``inplace`` has no effect: the query is never overwritten.

        Raises:
            ValueError: scales of a quantised cache or sinks are given.
        """
        for name, given in (
            ("k_scales_zeros", k_scales_zeros),
            ("v_scales_zeros", v_scales_zeros),
            ("s_aux", s_aux),
        ):
            if given is not None:
                refuse("Attention", name, tuple(given.shape), "the cache is not quantised")
        return super().forward(query, key, value, k_cache, v_cache, attn_metadata)


class RopeType(Enum):
    """Kinds of rotary embedding. DynamicNTKScaling, LongRoPEScaling and Fope are refused."""

    Default = auto()
    LinearScaling = auto()
    DynamicNTKScaling = auto()
    Llama3 = auto()
    Yarn = auto()
    LongRoPEScaling = auto()
    Fope = auto()


@dataclass
class YarnParameters:
    """Parameters of YaRN; ``attention_factor`` None is computed from the two mscales."""

    beta_fast: float = 32
    beta_slow: float = 1
    mscale: float = 1
    mscale_all_dim: float = 0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass
class Llama3Parameters:
    """Parameters of Llama 3's rope scaling."""

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass
class LongRoPEScalingParameters:
    """Parameters of LongRoPE, which :func:`build_rotary_embedding` refuses."""

    short_factor: list[float]
    long_factor: list[float]
    original_max_position_embeddings: int
    long_mscale: float | None = None
    short_mscale: float | None = None


class RotaryEmbedding(nn.Module):
    """Cosines and sines in lmdeploy's layout."""

    def __init__(self, rotary: core.RotaryEmbedding) -> None:
        """Raises ValueError if ``rotary`` is dynamic: its angles depend on the prompt's length."""
        super().__init__()
        if isinstance(rotary, DynamicNTKRotaryEmbedding):
            raise ValueError(
                "rotary embedding: dynamic NTK scaling is not supported in a ported model: its "
                "angles depend on the prompt's length; use engine_core.nn's rotary embedding and "
                "nn.rope_lengths(context)"
            )
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """``position_ids [1, T]`` to cos and sin ``[1, T, D]`` in x's dtype, the halves equal.

        Raises:
            ValueError: there are several rows of positions.
        """
        if position_ids.dim() != 2 or position_ids.shape[0] != 1:
            raise ValueError(
                f"rotary embedding: position_ids must be [1, T], got {tuple(position_ids.shape)}"
            )
        cos, sin = self.rotary(position_ids)
        return _both_halves(cos, x.dtype), _both_halves(sin, x.dtype)


def _both_halves(half: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat((half, half), dim=-1).unsqueeze(0).to(dtype)


def build_rotary_embedding(
    dim: int,
    max_position_embeddings: int = 2048,
    base: float = 10000,
    scaling_factor: float = 1.0,
    yarn_params: YarnParameters | None = None,
    longrope_params: Any = None,
    llama3_params: Llama3Parameters | None = None,
    fope_params: Any = None,
    mrope_params: Any = None,
    emb_type: RopeType = RopeType.Default,
    partial_rotary_factor: float | None = None,
    device: torch.device | None = None,
) -> RotaryEmbedding:
    """The rotary embedding of ``dim`` dimensions, or of a part of them.

    Raises:
        ValueError: ``emb_type`` is not supported, or its parameters are missing.
    """
    function = "build_rotary_embedding"
    for name, given in (
        ("longrope_params", longrope_params),
        ("fope_params", fope_params),
        ("mrope_params", mrope_params),
    ):
        if given is not None:
            refuse(function, name, given, "there is no such rotary embedding")
    scaling: dict[str, Any] = {"factor": scaling_factor}
    if emb_type is RopeType.Default:
        if scaling_factor != 1.0:
            refuse(function, "scaling_factor", scaling_factor, "RopeType.Default does not scale")
        scaling = {}
    elif emb_type is RopeType.LinearScaling:
        scaling["rope_type"] = "linear"
    elif emb_type is RopeType.Llama3:
        scaling |= {"rope_type": "llama3", **vars(llama3_params or Llama3Parameters())}
    elif emb_type is RopeType.Yarn:
        scaling |= {"rope_type": "yarn", **vars(yarn_params or YarnParameters())}
    else:
        refuse(function, "emb_type", emb_type, "use Default, LinearScaling, Llama3 or Yarn")
    return RotaryEmbedding(
        core.build_rotary_embedding(
            dim if partial_rotary_factor is None else int(dim * partial_rotary_factor),
            base=base,
            max_position_embeddings=max_position_embeddings,
            scaling=scaling,
        )
    )


def build_rotary_embedding_from_config(
    config: Any, device: torch.device | None = None
) -> RotaryEmbedding:
    """The rotary embedding that a config describes.

    Raises:
        ValueError: its ``rope_scaling`` is of an unsupported kind.
    """
    return RotaryEmbedding(core.build_rotary_embedding_from_config(config))


class ApplyRotaryEmb(nn.Module):
    """Rotates queries and keys."""

    def __init__(self, interleaved: bool = False) -> None:
        super().__init__()
        self.rotate = core.ApplyRotaryEmb(interleaved)

    def forward(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, inplace: bool = True
    ) -> tuple[Tensor, Tensor]:
        """``query [T, Hq, D]`` and ``key [T, Hk, D]`` by ``cos`` and ``sin [T, D]``.

        Of cos and sin the first half is read; the second, as :class:`RotaryEmbedding` makes it,
        repeats it.

        Raises:
            ValueError: cos and sin are for each head apart.
        """
        if cos.dim() != 2:
            raise ValueError(f"ApplyRotaryEmb: cos must be [T, D], got {tuple(cos.shape)}")
        if not inplace:
            query, key = query.clone(), key.clone()
        half = cos.shape[-1] // 2
        rotated: tuple[Tensor, Tensor] = self.rotate(
            query, key, cos[:, :half].float(), sin[:, :half].float()
        )
        return rotated


def add_prefix(name: str, prefix: str) -> str:
    """``name`` below ``prefix``, as model files join their ``prefix`` arguments."""
    return f"{prefix}.{name}" if prefix else name


def load_weight(
    param: nn.Parameter, loaded_weight: Tensor, shard_id: Any = None, expert_id: int | None = None
) -> None:
    """Put a checkpoint's tensor into a parameter, or into a part of it.

    With ``expert_id`` the parts of a :class:`FusedMoE` are "gate", "up" and "down".

    Raises:
        ShapeMismatchError: it does not fit, and nobody keeps an account of it.
        ValueError: there is no such part.
    """
    if expert_id is not None:
        if shard_id not in EXPERT_PARTS:
            refuse("load_weight", "shard_id", shard_id, f"an expert has {', '.join(EXPERT_PARTS)}")
        shard_id = (expert_id, EXPERT_PARTS[shard_id])
    _load_weight(param, loaded_weight, shard_id)


def default_weight_loader(param: nn.Parameter, loaded_weight: Tensor) -> None:
    """Copy a tensor of the parameter's shape.

    Raises:
        ShapeMismatchError: the shapes differ.
    """
    if param.numel() == loaded_weight.numel() == 1:
        loaded_weight = loaded_weight.view(param.shape)
    with torch.no_grad():
        copy_checked(param, loaded_weight)
    note_filled(param, loaded_weight)


class StepContext:
    """A step's context with lmdeploy's names beside its own."""

    # Where a prompt has embeddings the engine has already put them into inputs_embeds.
    input_embeddings = None
    input_embedding_indexing = None
    input_multimodals = None
    local_adapter_ids = None
    model_metas = None

    def __init__(self, context: _StepContext) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    @property
    def is_decoding(self) -> bool:
        """Whether every row has one token."""
        return self._context.attn_metadata.max_query_len == 1

    @property
    def q_start_loc(self) -> Tensor:
        """``[R]``: where each row's tokens begin."""
        return self._context.attn_metadata.query_start[:-1]

    @property
    def q_seqlens(self) -> Tensor:
        """``[R]``: tokens of each row in this step."""
        return self._context.attn_metadata.query_start.diff()

    @property
    def kv_seqlens(self) -> Tensor:
        """``[R]``: tokens of each row in the cache after this step."""
        return self._context.attn_metadata.kv_lens


# Keys that transformers' config classes have even if config.json lacks them.
_CONFIG_DEFAULTS: Mapping[str, Any] = {
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": True,
}
# lmdeploy's way to fill the buffers of a captured graph. Here the engine fills its own.
_GRAPH_HOOKS = (
    "make_buffers_cudagraph",
    "fill_buffers_cudagraph",
    "update_context_cudagraph",
)


class _PortedModel(type):
    """Makes models as lmdeploy does: with a full config and its context."""

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:
        super().__init__(name, bases, namespace)
        hooks = [hook for hook in _GRAPH_HOOKS if hook in namespace]
        if hooks:
            raise TypeError(
                f"{name} defines {', '.join(hooks)}, which engine-core never calls: a step's "
                "tensors are static by themselves; read what is added there from the context's "
                "row_state or token_state in prepare_inputs_for_generation"
            )
        if "prepare_inputs_for_generation" in namespace:
            cls.prepare_inputs_for_generation = _with_lmdeploy_context(
                namespace["prepare_inputs_for_generation"]
            )

    def __call__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(config, HFConfig):
            config = HFConfig({**_CONFIG_DEFAULTS, **config.to_dict()})
        return super().__call__(config, *args, **kwargs)


def _with_lmdeploy_context(prepare: Any) -> Any:
    def prepare_inputs_for_generation(
        self: Any,
        past_key_values: Any,
        inputs_embeds: Tensor | None = None,
        context: Any = None,
    ) -> Any:
        if isinstance(context, _StepContext):
            context = StepContext(context)
        return prepare(self, past_key_values, inputs_embeds, context)

    return prepare_inputs_for_generation


class DeployModelMixin(metaclass=_PortedModel):
    """Base of ported models.

    It does the work of lmdeploy's engine around a model's own methods: keys that transformers'
    config classes always have are present, and ``prepare_inputs_for_generation`` gets lmdeploy's
    :class:`StepContext`.
    """


class CudaGraphMixin(DeployModelMixin):
    """Marks a model whose decode steps may be captured.

    Raises:
        TypeError: a subclass fills graph buffers itself.
    """

    support_cuda_graph = True


class DeployModelMixinV1(DeployModelMixin):
    """A model with an ``lm_head`` from :meth:`build_lm_head`, tied if its config says so."""

    config: Any
    lm_head: nn.Module

    def get_lm_head(self) -> nn.Module:
        """The output head."""
        return self.lm_head

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding; a subclass says which layer it is."""
        raise NotImplementedError(f"{type(self).__name__} must define get_input_embeddings")

    def get_logits(self, hidden_states: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., vocab]``."""
        head: Any = self.get_lm_head()
        logits: Tensor = head(hidden_states.to(head.weight.dtype))
        return logits

    def update_weights(self) -> None:
        """Share the embedding's matrix with the head.

        Raises:
            ValueError: one of them is split over the ranks and the other is not.
        """
        if self.config.tie_word_embeddings:
            head: Any = self.get_lm_head()
            embedding: Any = self.get_input_embeddings()
            if head.weight.shape != embedding.weight.shape:
                raise ValueError(
                    f"{type(self).__name__}: tie_word_embeddings, but on a rank the head is "
                    f"{list(head.weight.shape)} and the embedding {list(embedding.weight.shape)}; "
                    "give both is_tp=False, or tie them with ParallelLMHead.tie_weights"
                )
            head.weight = embedding.weight

    def build_lm_head(
        self,
        hidden_size: int,
        vocab_size: int,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        **kwargs: Any,
    ) -> Linear:
        """The head, whole on every rank unless ``is_tp``."""
        return build_rowwise_linear(
            hidden_size, vocab_size, bias, dtype=dtype, device=device, **kwargs
        )
