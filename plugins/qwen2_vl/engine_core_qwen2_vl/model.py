"""Qwen2-VL (Wang et al., 2024) and Qwen2.5-VL (Bai et al., 2025), as transformers computes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from engine_core.configs import HFConfig
from engine_core.kernels import Segments, attend_segments, rotary_angles
from engine_core.nn import (
    Activated,
    ApplyRotaryEmb,
    CosSin,
    DecoderLayer,
    FeedForward,
    GatedMLP,
    KVCacheLayer,
    LayerNorm,
    Linear,
    QuickGelu,
    RMSNorm,
    RotaryCausalLM,
    SelfAttention,
    Weights,
    build_replicated_linear,
    finished,
    load_stacked_weights,
)
from engine_core.step_context import StepContext, StepContextManager

Grid = tuple[int, int, int]
"""Patches of an item in time, height and width."""

Norm = type[LayerNorm] | type[RMSNorm]

_USUAL_SIDES = (448, 1024)


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
        out: Tensor = self.proj(attend_segments(q, k, v, segments).flatten(1))
        return out


class VisionMLP(FeedForward):
    """``fc2(quick_gelu(fc1(x)))``."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.fc1 = build_replicated_linear(hidden_size, intermediate_size, bias=True)
        self.fc2 = build_replicated_linear(intermediate_size, hidden_size, bias=True)
        self.act = QuickGelu()
        self.activated = Activated(self.act)

    def ends(self) -> tuple[Linear, Activated, Linear]:
        """The first linear, its activation, and the last linear."""
        return self.fc1, self.activated, self.fc2


class VisionBlock(nn.Module):
    """A pre-norm layer of the tower."""

    def __init__(self, vision: HFConfig, norm: Norm, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = norm(vision.embed_dim, 1e-6)
        self.attn = VisionAttention(vision.embed_dim, vision.num_heads)
        self.norm2 = norm(vision.embed_dim, 1e-6)
        self.mlp = mlp

    def forward(
        self, x: Tensor, residual: Tensor, cos_sin: CosSin, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """The next addition to the residual, ``[N, E]``, and it: each norm adds what is due."""
        x, residual = self.norm1(x, residual)
        x, residual = self.norm2(self.attn(x, cos_sin, segments), residual)
        return self.mlp(x), residual


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

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """``[N, E]``, and what it is added to, to ``[N / merged, H]``."""
        normed = self.ln_q(x, residual)[0]
        out: Tensor = self.mlp(normed.unflatten(0, (-1, self.merged)).flatten(1))
        return out


class PixelNorm(nn.Module):
    """Normalises patches of pixels, which come to the device as they are, a byte each."""

    mean: Tensor
    std: Tensor

    def __init__(self, vision: HFConfig, stated: Mapping[str, Any]) -> None:
        super().__init__()
        self.shape = (3, -1, vision.patch_size**2)
        self.frames = vision.temporal_patch_size
        for name in ("mean", "std"):
            values = torch.tensor(stated[f"image_{name}"], dtype=torch.float32, device="cpu")
            self.register_buffer(name, values.view(3, 1, 1), persistent=False)

    def forward(self, patches: Tensor) -> Tensor:
        """``[N, channels * frames * pixels]`` uint8 to float32; of float32 nothing is to be done.

        A patch of one frame, as a picture has, gets as many equal ones as there are in a patch.
        """
        if patches.dtype != torch.uint8:
            return patches
        pixels = patches.unflatten(1, self.shape).float() * (1 / 255)
        normed: Tensor = (pixels - self.mean) / self.std
        return normed.expand(-1, -1, self.frames, -1).flatten(1)


class VisionTower(nn.Module):
    """The vision transformer; every rank has the whole of it, but for what is said to be split.

    Parameters are named as in checkpoints.
    """

    inv_freq: Tensor
    norm: Norm = LayerNorm

    def __init__(self, vision: HFConfig) -> None:
        super().__init__()
        patch_width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        self.merge_size, self.patch_size = vision.spatial_merge_size, vision.patch_size
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
        return finished(self.parts(patches, grids))

    def parts(self, patches: Tensor, grids: Sequence[Grid]) -> Generator[float, None, Tensor]:
        """As :meth:`forward`; says after each layer which share of them is done.

        The grids are the host's: nobody waits for the device, which computes all else from them.
        """
        x = self.patch_embed(patches)
        frames = Segments(((frames, high * wide) for frames, high, wide in grids), x.device)
        cos_sin = self.angles(grids)
        residual = torch.zeros_like(x)
        for number, block in enumerate(self.blocks):
            x, residual = block(x, residual, cos_sin, frames)
            yield (number + 1) / len(self.blocks)
        out: Tensor = self.merger(x, residual)
        return out

    def angles(self, grids: Sequence[Grid]) -> CosSin:
        """Cosines and sines ``[N, D / 2]`` of each patch's place in its frame."""
        places = torch.cat([self._places(grid) for grid in grids])
        cos, sin = rotary_angles(places, self.inv_freq)
        return cos.flatten(1), sin.flatten(1)

    def _places(self, grid: Grid) -> Tensor:
        """``[N, 2]``: row and column of each patch, in the order in which they are merged."""
        frames, high, wide = grid
        merge, device = self.merge_size, self.inv_freq.device
        rows, columns = torch.arange(high, device=device), torch.arange(wide, device=device)
        places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)
        blocks = places.view(high // merge, merge, wide // merge, merge, 2).transpose(1, 2)
        return blocks.reshape(-1, 2).repeat(frames, 1)


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

    def parts(self, patches: Tensor, grids: Sequence[Grid]) -> Generator[float, None, Tensor]:
        """As :meth:`VisionTower.parts`."""
        x = self.patch_embed(patches)
        order, windows = self._windows(grids)
        frames = Segments(((frames, high * wide) for frames, high, wide in grids), x.device)
        x = self._ordered(x, order)
        cos, sin = (self._ordered(part, order) for part in self.angles(grids))
        residual = torch.zeros_like(x)
        for number, block in enumerate(self.blocks):
            seen = frames if number in self.full_layers else windows
            x, residual = block(x, residual, (cos, sin), seen)
            yield (number + 1) / len(self.blocks)
        merged: Tensor = self.merger(x, residual)
        out = torch.empty_like(merged)
        out[order] = merged
        return out

    def _ordered(self, x: Tensor, order: Tensor) -> Tensor:
        ordered: Tensor = x.unflatten(0, (-1, self.merge_size**2))[order].flatten(0, 1)
        return ordered

    def _windows(self, grids: Sequence[Grid]) -> tuple[Tensor, Segments]:
        """The places of embeddings in the order of their windows, and the windows in patches.

        Windows at the edges of a frame are smaller; those of one size stand together.
        """
        device = self.inv_freq.device
        order: list[Tensor] = []
        segments: list[tuple[int, int]] = []
        first = 0
        for frames, high, wide in grids:
            sides = [self._sides(length // self.merge_size) for length in (high, wide)]
            sizes = Counter(math.prod(size) for size in product(*sides))
            # A window's size and number, which sort its embeddings.
            heights, widths = (torch.arange(sum(side), device=device) for side in sides)
            areas = self._extents(heights)[:, None] * self._extents(widths)
            numbers = (heights // self.window)[:, None] * len(sides[1]) + widths // self.window
            keys = areas * math.prod(map(len, sides)) + numbers
            places = torch.argsort(keys.flatten(), stable=True)
            for _ in range(frames):
                order.append(first + places)
                segments += [(sizes[size], size * self.merge_size**2) for size in sorted(sizes)]
                first += len(places)
        return torch.cat(order), Segments(segments, device)

    def _sides(self, length: int) -> list[int]:
        """The windows along one side of a frame."""
        whole, rest = divmod(length, self.window)
        return [self.window] * whole + [rest] * (rest > 0)

    def _extents(self, places: Tensor) -> Tensor:
        """How long the window of each place along a side is."""
        left: Tensor = len(places) - places // self.window * self.window
        return left.clamp(max=self.window)


class Qwen2VLForConditionalGeneration(RotaryCausalLM):
    """Qwen2 with three positions a token, and a tower that makes embeddings of pictures."""

    tower: type[VisionTower] = VisionTower
    support_media_graph = True

    def __init__(
        self,
        config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(config, ctx_mgr, dtype, device)
        vision = HFConfig(config.vision_config)
        self.visual = self.tower(vision)
        self.pixels = nn.ModuleDict(
            {kind: PixelNorm(vision, stated) for kind, stated in config.preprocessor.items()}
        )

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
            items: ``pixel_values``, the patches that :class:`PixelNorm` takes, and ``grid_thw [3]``
                of each; the latter on the host.
        """
        return finished(self.embed_media_parts(kind, items))

    def embed_media_parts(
        self, kind: str, items: Sequence[Mapping[str, Tensor]]
    ) -> Generator[float, None, list[Tensor]]:
        """As :meth:`embed_media`; says after each layer which share of the work is done."""
        grids: list[Grid] = [tuple(item["grid_thw"].tolist()) for item in items]
        numbers = self.pixels[kind]
        pixels = [numbers(item["pixel_values"]) for item in items]
        patches = pixels[0] if len(pixels) == 1 else torch.cat(pixels)
        out = yield from self.visual.parts(patches, grids)
        merged = self.visual.merge_size**2
        return list(out.split([math.prod(grid) // merged for grid in grids]))

    def usual_media(self) -> list[tuple[str, list[dict[str, Tensor]]]]:
        """Pictures of 448 x 448 and, as near as patches come to it, of 1024 x 1024.

        The kernels that they need are compiled for pictures of other sizes, too.
        """
        merge, items = self.visual.merge_size, []
        for side in _USUAL_SIDES if "image" in self.pixels else ():
            count = merge * round(side / (merge * self.visual.patch_size))
            patches = torch.zeros(count**2, 3 * self.visual.patch_size**2, dtype=torch.uint8)
            grid = torch.tensor([1, count, count])
            items.append(("image", [{"pixel_values": patches, "grid_thw": grid}]))
        return items

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
