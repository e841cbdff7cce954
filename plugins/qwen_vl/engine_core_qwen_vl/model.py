"""Qwen and Qwen-VL (Bai et al., 2023) of the first generation, as their own code computes them."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_core.configs import HFConfig
from engine_core.nn import (
    DecoderLayer,
    GatedMLP,
    KVCacheLayer,
    LayerNorm,
    RMSNorm,
    RotaryCausalLM,
    RotaryEmbedding,
    SelfAttention,
    Weights,
    build_replicated_linear,
    empty_parameter,
    finished,
    load_stacked_weights,
)
from engine_core.step_context import AttentionMetadata, StepContext, StepContextManager
from engine_core_qwen_vl.config import EMBEDDINGS

_EPS = 1e-6
# Of red, green and blue, from 0 to 1.
_MEAN, _STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_LEVELS = 32


class NTKRotaryEmbedding(RotaryEmbedding):
    """Angles whose base depends on the prompt's length, and the factor of queries (log-n).

    Up to ``seq_length`` tokens the base is the config's. For each doubling of the prompt beyond
    that it has another one, which the answer keeps. A query behind ``seq_length`` is multiplied by
    the logarithm of its place to the base of that length (Su, 2021).
    """

    table: Tensor
    lengths: Tensor

    def __init__(self, config: HFConfig) -> None:
        dim, length = config.head_dim, config.seq_length
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
        alphas = [2**level - 1 for level in range(1, _LEVELS + 1 if config.use_dynamic_ntk else 2)]
        bases = [config.rotary_emb_base * alpha ** (dim / (dim - 2)) for alpha in alphas]
        table = torch.stack([1.0 / base**exponents for base in bases])
        super().__init__(table[0])
        self.register_buffer("table", table, persistent=False)
        # Of the longest prompt of each level but the last.
        longest = [length * 2**level for level in range(len(alphas) - 1)]
        lengths = torch.tensor(longest, dtype=torch.int64, device="cpu")
        self.register_buffer("lengths", lengths, persistent=False)
        self.log_length = math.log(length) if config.use_logn_attn else None

    def forward(self, position_ids: Tensor, rope_lengths: Tensor | None = None) -> Any:
        """Cos and sin ``[T, half]``, and with log-n the factors ``[T, 1, 1]``, float32.

        Args:
            position_ids: ``[1, T]``.
            rope_lengths: ``[T]``: of each token's prompt.
        """
        assert rope_lengths is not None, "prepare_inputs_for_generation passes them"
        position = position_ids[0].float()
        angles = position[:, None] * self.table[torch.bucketize(rope_lengths, self.lengths)]
        if self.log_length is None:
            return angles.cos(), angles.sin()
        factors = ((position + 1).log() / self.log_length).clamp(min=1.0)
        return angles.cos(), angles.sin(), factors[:, None, None]


class LogNAttention(SelfAttention):
    """Attention whose queries grow with their place."""

    def forward(
        self,
        x: Any,
        cos_sin: Any,
        cache: KVCacheLayer,
        attn_metadata: AttentionMetadata,
        *then: Any,
    ) -> Any:
        """As :class:`SelfAttention`'s; ``cos_sin`` has the factors of the queries, too."""
        *cos_sin, factors = cos_sin
        first, epilogue, last = self.ends()
        if self.watched:
            q, k, v = epilogue.watched(first, x, cos_sin)
            heads = self.attend(q * factors.to(q.dtype), k, v, *cache[:2], attn_metadata)
        else:
            slots = attn_metadata.groups[self.attend.group_id].slot_mapping
            q = first(x, epilogue, cos_sin, cache, slots)
            heads = self.attend.attend(q * factors.to(q.dtype), *cache[:2], attn_metadata)
        return last(heads.flatten(1).unsqueeze(0), *then)


class VisionAttention(nn.Module):
    """Attention between the patches of an image. Parameters are named as in checkpoints."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.in_proj = build_replicated_linear(width, 3 * width, bias=True)
        self.out_proj = build_replicated_linear(width, width, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, N, E]`` to ``[B, N, E]``."""
        q, k, v = self.in_proj(x).unflatten(-1, (self.num_heads, 3, -1)).transpose(1, 2).unbind(3)
        out: Tensor = self.out_proj(_attended(q, k, v))
        return out


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[B, heads, N, D]`` each, to ``[B, N, heads * D]``."""
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class VisionMLP(nn.Module):
    """``c_proj(gelu(c_fc(x)))``."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.c_fc = build_replicated_linear(width, inner, bias=True)
        self.c_proj = build_replicated_linear(inner, width, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, N, E]`` to ``[B, N, E]``."""
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x)))
        return out


class VisionBlock(nn.Module):
    """A pre-norm layer of the tower."""

    def __init__(self, visual: HFConfig) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(visual.width, _EPS)
        self.attn = VisionAttention(visual.width, visual.heads)
        self.ln_2 = LayerNorm(visual.width, _EPS)
        self.mlp = VisionMLP(visual.width, int(visual.width * visual.mlp_ratio))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The next addition to the residual, ``[B, N, E]``, and it: each norm adds what is due."""
        x, residual = self.ln_1(x, residual)
        x, residual = self.ln_2(self.attn(x), residual)
        return self.mlp(x), residual


class Resampler(nn.Module):
    """Cross attention of learned queries to the patches: as many embeddings for any grid."""

    def __init__(self, width: int, hidden_size: int, patches: int) -> None:
        super().__init__()
        self.num_heads = hidden_size // 128
        self.query = empty_parameter(EMBEDDINGS, hidden_size)
        self.pos_embed = empty_parameter(EMBEDDINGS, hidden_size)
        self.key_pos_embed = empty_parameter(patches, hidden_size)
        # Where the widths are equal the original has none.
        self.kv_proj = (
            nn.Identity() if width == hidden_size else build_replicated_linear(width, hidden_size)
        )
        self.ln_q = LayerNorm(hidden_size, _EPS)
        self.ln_kv = LayerNorm(hidden_size, _EPS)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            build_replicated_linear(hidden_size, hidden_size, bias=True) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Patches ``[B, N, E]`` to ``[B, 256, H]``."""
        x = self.ln_kv(self.kv_proj(x))
        q = self.q_proj(self.ln_q(self.query) + self.pos_embed).expand(len(x), -1, -1)
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (q, self.k_proj(x + self.key_pos_embed), self.v_proj(x))
        )
        out: Tensor = self.out_proj(_attended(q, k, v))
        return out


class VisionTower(nn.Module):
    """The vision transformer and its resampler; every rank has the whole of both."""

    mean: Tensor
    std: Tensor

    def __init__(self, visual: HFConfig) -> None:
        super().__init__()
        width, self.patch_size = visual.width, visual.patch_size
        self.grid = visual.image_size // visual.patch_size
        self.conv1 = build_replicated_linear(3 * self.patch_size**2, width)
        self.positional_embedding = empty_parameter(self.grid**2, width)
        self.ln_pre = LayerNorm(width, _EPS)
        self.resblocks = nn.ModuleList([VisionBlock(visual) for _ in range(visual.layers)])
        self.attn_pool = Resampler(width, visual.output_dim, self.grid**2)
        self.ln_post = LayerNorm(visual.output_dim, _EPS)
        self.proj = build_replicated_linear(visual.output_dim, visual.output_dim)
        for name, values in (("mean", _MEAN), ("std", _STD)):
            constant = torch.tensor(values, dtype=torch.float32, device="cpu").view(3, 1, 1)
            self.register_buffer(name, constant, persistent=False)

    def normalised(self, pixels: Tensor) -> Tensor:
        """Pixels ``[S, S, 3]`` in uint8 as ``[3, S, S]``; those in float32 as they are."""
        if pixels.dtype != torch.uint8:
            return pixels
        return (pixels.permute(2, 0, 1) / 255).sub_(self.mean).div_(self.std)

    def forward(self, pixels: Tensor) -> Tensor:
        """Images ``[B, 3, S, S]`` to ``[B, 256, H]``."""
        return finished(self.parts(pixels))

    def parts(self, pixels: Tensor) -> Generator[float, None, Tensor]:
        """As :meth:`forward`; says after each layer which share of them is done."""
        cut = pixels.unflatten(2, (self.grid, -1)).unflatten(4, (self.grid, -1))
        x = self.conv1(cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2).to(self.conv1.dtype))
        x = self.ln_pre(x + self.positional_embedding)
        residual = torch.zeros_like(x)
        for number, block in enumerate(self.resblocks):
            x, residual = block(x, residual)
            yield (number + 1) / len(self.resblocks)
        out: Tensor = self.proj(self.ln_post(self.attn_pool(x + residual)))
        return out

    def resized(self, table: Tensor) -> Tensor:
        """A stored table ``[n * n, E]`` of positions for the grid of patches, bicubically."""
        stored = math.isqrt(len(table))
        if stored == self.grid or stored**2 != len(table):
            return table  # One of another shape is refused by its name.
        if table.is_meta:  # There torch would take it apart into hundreds of operations.
            return table.new_empty(self.grid**2, table.shape[1])
        square = table.float().view(1, stored, stored, -1).permute(0, 3, 1, 2)
        fitted = F.interpolate(square, (self.grid, self.grid), mode="bicubic")
        return fitted[0].flatten(1).T.to(table.dtype)


class QWenLMHeadModel(RotaryCausalLM):
    """Qwen, and with ``visual`` in its config Qwen-VL."""

    def __init__(
        self,
        config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(config, ctx_mgr, dtype, device)
        if "visual" in config.to_dict():
            self.visual = VisionTower(HFConfig(config.visual))

    def build_rotary(self, config: HFConfig) -> list[RotaryEmbedding]:
        """One for all layers."""
        return [NTKRotaryEmbedding(config)] * config.num_hidden_layers

    def build_layer(self, config: HFConfig, index: int) -> DecoderLayer:
        """A layer: biases on q, k and v alone."""
        attention = LogNAttention if config.use_logn_attn else SelfAttention
        heads = config.num_attention_heads
        return DecoderLayer(
            attention(config.hidden_size, heads, heads, config.head_dim, qkv_bias=True),
            GatedMLP(config.hidden_size, config.ffn_size),
            lambda: RMSNorm(config.hidden_size, config.rms_norm_eps),
        )

    def embed_media(self, kind: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """The embeddings ``[256, H]`` of each of some images, which are computed together.

        Args:
            kind: "image".
            items: ``pixel_values`` of each: uint8 ``[S, S, 3]``, or float32 ``[3, S, S]`` that is
                normalised.
        """
        return finished(self.embed_media_parts(kind, items))

    def embed_media_parts(
        self, kind: str, items: Sequence[Mapping[str, Tensor]]
    ) -> Generator[float, None, list[Tensor]]:
        """As :meth:`embed_media`; says after each layer which share of the work is done."""
        del kind
        pixels = torch.stack([self.visual.normalised(item["pixel_values"]) for item in items])
        embeddings = yield from self.visual.parts(pixels)
        return list(embeddings)

    def prepare_inputs_for_generation(
        self,
        past_key_values: list[KVCacheLayer],
        inputs_embeds: Tensor | None = None,
        context: StepContext | None = None,
    ) -> dict[str, Any]:
        """The arguments of ``forward`` for one step; an answer keeps its prompt's base."""
        inputs = super().prepare_inputs_for_generation(past_key_values, inputs_embeds, context)
        assert context is not None, "the runner passes the step's context"
        inputs["rope_lengths"] = context.row_state["prompt_len"][context.row_ids]
        return inputs

    def load_weights(self, weights: Weights) -> None:
        """Fill the parameters from a checkpoint in its published naming."""
        load_stacked_weights(
            self,
            self._fitted(weights),
            {"c_attn": ("qkv_proj", None), "w2": ("gate_up_proj", 0), "w1": ("gate_up_proj", 1)},
            ignore=("rotary_emb.inv_freq",),
        )

    def _fitted(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """The tensors by the names that the parameters have, and in their shapes."""
        for name, tensor in weights:
            if name.startswith("transformer.visual."):
                yield from self._fitted_visual(name.removeprefix("transformer."), tensor)
                continue
            for theirs, ours in _NAMES:
                name = name.replace(theirs, ours)
            yield name, tensor

    def _fitted_visual(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        name = name.replace(".transformer.", ".").replace("attn_pool.attn.", "attn_pool.")
        if name == "visual.conv1.weight":
            yield name, tensor.flatten(1)
        elif name == "visual.proj":
            yield "visual.proj.weight", tensor.t()
        elif name == "visual.positional_embedding":
            yield name, self.visual.resized(tensor)
        elif ".in_proj_" in name:  # of torch's MultiheadAttention
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                yield name.replace("in_proj_", f"{part}_proj."), rows
        else:
            yield name, tensor
        if name == "visual.attn_pool.pos_embed":
            yield "visual.attn_pool.key_pos_embed", self.visual.resized(tensor)


_NAMES = (
    ("transformer.wte.", "model.embed_tokens."),
    ("transformer.ln_f.", "model.norm."),
    ("transformer.h.", "model.layers."),
    (".attn.c_proj.", ".self_attn.o_proj."),
    (".attn.", ".self_attn."),
    (".mlp.c_proj.", ".mlp.down_proj."),
    (".ln_1.", ".input_layernorm."),
    (".ln_2.", ".post_attention_layernorm."),
)
