"""Qwen2-VL (Wang et al., 2024) and Qwen2.5-VL (Bai et al., 2025), as transformers computes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_core.configs import HFConfig
from engine_core.nn import (
    ApplyRotaryEmb,
    CosSin,
    DecoderLayer,
    GatedMLP,
    KVCacheLayer,
    LayerNorm,
    RMSNorm,
    RotaryCausalLM,
    SelfAttention,
    Weights,
    build_replicated_linear,
    load_stacked_weights,
)
from engine_core.step_context import StepContext, StepContextManager

Grid = tuple[int, int, int]
"""Patches of an item in time, height and width."""

Segments = Sequence[tuple[int, int]]
"""Patches that see each other: how many such groups of equal size follow, and that size."""


Norm = type[LayerNorm] | type[RMSNorm]


class VisionAttention(nn.Module):
    """Attention between the patches of a frame, or of a window in it, in both directions."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = build_replicated_linear(hidden_size, 3 * hidden_size, bias=True)
        self.proj = build_replicated_linear(hidden_size, hidden_size, bias=True)
        self.rotate = ApplyRotaryEmb()

    def forward(self, x: Tensor, cos_sin: CosSin, segments: Segments) -> Tensor:
        """``[N, E]`` to ``[N, E]``."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        q, k = self.rotate(q, k, *cos_sin)
        lengths = [count * size for count, size in segments]
        out = [
            # No items together: an item's embeddings must not depend on those beside it.
            _attend(*(part.unflatten(0, segment) for part in parts))
            for segment, *parts in zip(
                segments, q.split(lengths), k.split(lengths), v.split(lengths), strict=True
            )
        ]
        attended: Tensor = self.proj(torch.cat(out))
        return attended


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[count, size, heads, D]`` each, to ``[count * size, heads * D]``."""
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2).flatten(2).flatten(0, 1)


class VisionMLP(nn.Module):
    """``fc2(quick_gelu(fc1(x)))``."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.fc1 = build_replicated_linear(hidden_size, intermediate_size, bias=True)
        self.fc2 = build_replicated_linear(intermediate_size, hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, E]`` to ``[N, E]``."""
        x = self.fc1(x)
        out: Tensor = self.fc2(x * torch.sigmoid(1.702 * x))
        return out


class VisionBlock(nn.Module):
    """A pre-norm layer of the tower."""

    def __init__(self, vision: HFConfig, norm: Norm, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = norm(vision.embed_dim, 1e-6)
        self.attn = VisionAttention(vision.embed_dim, vision.num_heads)
        self.norm2 = norm(vision.embed_dim, 1e-6)
        self.mlp = mlp

    def forward(self, x: Tensor, cos_sin: CosSin, segments: Segments) -> Tensor:
        """``[N, E]`` to ``[N, E]``."""
        x = x + self.attn(self.norm1(x), cos_sin, segments)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class PatchEmbed(nn.Module):
    """A convolution whose stride is its kernel: a linear of each patch."""

    def __init__(self, patch_width: int, hidden_size: int) -> None:
        super().__init__()
        self.proj = build_replicated_linear(patch_width, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, patch]`` to ``[N, E]``."""
        out: Tensor = self.proj(x.to(self.proj.dtype))
        return out


class PatchMerger(nn.Module):
    """Neighbouring patches, which stand together, to one embedding of the text model."""

    def __init__(self, vision: HFConfig, norm: Norm) -> None:
        super().__init__()
        self.merged = vision.spatial_merge_size**2
        width = vision.embed_dim * self.merged
        self.ln_q = norm(vision.embed_dim, 1e-6)
        self.mlp = nn.Sequential(
            build_replicated_linear(width, width, bias=True),
            nn.GELU(),
            build_replicated_linear(width, vision.hidden_size, bias=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[N, E]`` to ``[N / merged, H]``."""
        out: Tensor = self.mlp(self.ln_q(x).unflatten(0, (-1, self.merged)).flatten(1))
        return out


class VisionTower(nn.Module):
    """The vision transformer; every rank has the whole of it, but for what is said to be split.

    Parameters are named as in checkpoints.
    """

    inv_freq: Tensor
    norm: Norm = LayerNorm

    def __init__(self, vision: HFConfig) -> None:
        super().__init__()
        patch_width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        self.merge_size = vision.spatial_merge_size
        self.patch_embed = PatchEmbed(patch_width, vision.embed_dim)
        self.blocks = nn.ModuleList(
            [VisionBlock(vision, self.norm, self.build_mlp(vision)) for _ in range(vision.depth)]
        )
        self.merger = PatchMerger(vision, self.norm)
        # A quarter of a head's dimensions turns, in pairs, with the height, a quarter with the
        # width.
        quarter = vision.embed_dim // vision.num_heads // 4
        exponents = torch.arange(quarter, dtype=torch.float32, device="cpu") / quarter
        self.register_buffer("inv_freq", vision.rope_theta**-exponents, persistent=False)

    def build_mlp(self, vision: HFConfig) -> nn.Module:
        """The feed-forward part of a layer."""
        return VisionMLP(vision.embed_dim, int(vision.embed_dim * vision.mlp_ratio))

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Patches ``[N, patch]`` of all items to their embeddings ``[N / merged, H]``."""
        x = self.patch_embed(patches)
        cos_sin = self.angles(grids)
        for block in self.blocks:
            x = block(x, cos_sin, _frames(grids))
        out: Tensor = self.merger(x)
        return out

    def angles(self, grids: Sequence[Grid]) -> CosSin:
        """Cosines and sines ``[N, D / 2]`` of each patch's place in its frame."""
        places = torch.cat([self._places(grid) for grid in grids]).to(self.inv_freq.device)
        angles = (places.float().unsqueeze(-1) * self.inv_freq).flatten(1)
        return angles.cos(), angles.sin()

    def _places(self, grid: Grid) -> Tensor:
        """``[N, 2]``: row and column of each patch, in the order in which they are merged."""
        frames, high, wide = grid
        merge = self.merge_size
        rows, columns = torch.arange(high, device="cpu"), torch.arange(wide, device="cpu")
        places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)
        blocks = places.view(high // merge, merge, wide // merge, merge, 2).transpose(1, 2)
        return blocks.reshape(-1, 2).repeat(frames, 1)


def _frames(grids: Sequence[Grid]) -> Segments:
    return [(frames, high * wide) for frames, high, wide in grids]


class WindowedVisionTower(VisionTower):
    """The tower of Qwen2.5-VL: in most layers a patch sees only those of its window.

    The patches are put in the order of their windows at first, and the embeddings back at last.
    """

    norm = RMSNorm

    def __init__(self, vision: HFConfig) -> None:
        super().__init__(vision)
        self.window = vision.window_size // vision.patch_size // self.merge_size
        self.full_layers = frozenset(vision.fullatt_block_indexes)

    def build_mlp(self, vision: HFConfig) -> nn.Module:
        """The feed-forward part of a layer, split over the ranks."""
        return GatedMLP(vision.embed_dim, vision.intermediate_size, "silu", bias=True)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """As :meth:`VisionTower.forward`."""
        indices, windows = self._windows(grids)
        order = indices.to(patches.device)
        x = self._ordered(self.patch_embed(patches), order)
        cos, sin = (self._ordered(part, order) for part in self.angles(grids))
        for number, block in enumerate(self.blocks):
            full = number in self.full_layers
            x = block(x, (cos, sin), _frames(grids) if full else windows)
        merged: Tensor = self.merger(x)
        out = torch.empty_like(merged)
        out[order] = merged
        return out

    def _ordered(self, x: Tensor, order: Tensor) -> Tensor:
        ordered: Tensor = x.unflatten(0, (-1, self.merge_size**2))[order].flatten(0, 1)
        return ordered

    def _windows(self, grids: Sequence[Grid]) -> tuple[Tensor, Segments]:
        """The places of embeddings in the order of their windows, and the windows in patches."""
        order: list[Tensor] = []
        segments: list[tuple[int, int]] = []
        first = 0
        for frames, high, wide in grids:
            shape = high // self.merge_size, wide // self.merge_size
            places = torch.arange(math.prod(shape), device="cpu").view(shape)
            windows = [
                window.flatten()
                for rows in places.split(self.window)
                for window in rows.split(self.window, dim=1)
            ]
            # Those at the edges are smaller; windows of one size are attended to at once.
            windows.sort(key=len)
            sizes = Counter(len(window) * self.merge_size**2 for window in windows)
            for _ in range(frames):
                order += [first + window for window in windows]
                segments += [(count, size) for size, count in sizes.items()]
                first += places.numel()
        return torch.cat(order), segments


class Qwen2VLForConditionalGeneration(RotaryCausalLM):
    """Qwen2 with three positions a token, and a tower that makes embeddings of pictures."""

    tower: type[VisionTower] = VisionTower

    def __init__(
        self,
        config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(config, ctx_mgr, dtype, device)
        self.visual = self.tower(HFConfig(config.vision_config))

    def build_layer(self, config: HFConfig, index: int) -> DecoderLayer:
        """A layer with biases on q, k and v and none on the output projection."""
        return DecoderLayer(
            SelfAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                qkv_bias=True,
            ),
            GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act),
            lambda: RMSNorm(config.hidden_size, config.rms_norm_eps),
        )

    def embed_media(self, kind: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """The embeddings ``[n, H]`` of each of some images or videos, which are computed together.

        Args:
            kind: "image" or "video"; to the tower an image is a video of one frame.
            items: ``pixel_values [N, patch]`` and ``grid_thw [3]`` of each.
        """
        del kind
        grids: list[Grid] = [tuple(item["grid_thw"].tolist()) for item in items]
        out = self.visual(torch.cat([item["pixel_values"] for item in items]), grids)
        merged = self.visual.merge_size**2
        return list(out.split([math.prod(grid) // merged for grid in grids]))

    def prepare_inputs_for_generation(
        self,
        past_key_values: list[KVCacheLayer],
        inputs_embeds: Tensor | None = None,
        context: StepContext | None = None,
    ) -> dict[str, Any]:
        """The arguments of ``forward`` for one step.

        Tokens of the prompt are where its processor put them; those after it follow in line.
        """
        inputs = super().prepare_inputs_for_generation(past_key_values, inputs_embeds, context)
        assert context is not None, "the runner passes the step's context"
        rows, position = context.row_ids, context.position_ids[0]
        inputs["position_ids"] = torch.where(
            position < context.row_state["prompt_len"][rows],
            context.token_state["mrope_positions"],
            position + context.row_state["mrope_delta"][rows],
        )
        return inputs

    def load_weights(self, weights: Weights) -> None:
        """Fill the parameters from a checkpoint in its published or transformers 5's naming."""
        load_stacked_weights(
            self,
            # A convolution's kernel, or a linear's weight as it is.
            (
                (name, tensor.flatten(1) if name.endswith("patch_embed.proj.weight") else tensor)
                for name, tensor in weights
            ),
            {
                "q_proj": ("qkv_proj", "q"),
                "k_proj": ("qkv_proj", "k"),
                "v_proj": ("qkv_proj", "v"),
                "gate_proj": ("gate_up_proj", 0),
                "up_proj": ("gate_up_proj", 1),
            },
            rename=lambda name: name.replace("model.language_model.", "model.").replace(
                "model.visual.", "visual."
            ),
        )


class Qwen25VLForConditionalGeneration(Qwen2VLForConditionalGeneration):
    """Qwen2.5-VL: another tower, and videos whose positions in time are their seconds."""

    tower = WindowedVisionTower
