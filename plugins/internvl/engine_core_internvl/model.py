"""InternVL (Chen et al., 2023, 2024): InternViT before a text model of another family."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_core.configs import HFConfig
from engine_core.nn import (
    MLP,
    AroundTextModel,
    LayerNorm,
    Linear,
    RMSNorm,
    Weights,
    build_replicated_linear,
    finished,
    sent,
    stacked_loader,
)
from engine_core.step_context import StepContextManager

# More fill a GPU no better, and take more memory.
_TILES_AT_ONCE = 32

# Parts of the names in transformers' layout, and those of the original one, in this order.
_NAMES = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_model.",
    "vision_tower.": "vision_model.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "multi_modal_projector.layer_norm.": "mlp1.0.",
    "multi_modal_projector.linear_1.": "mlp1.1.",
    "multi_modal_projector.linear_2.": "mlp1.3.",
}
_VISION_NAMES = {
    ".embeddings.cls_token": ".embeddings.class_embedding",
    ".patch_embeddings.projection.": ".patch_embedding.",
    ".position_embeddings": ".position_embedding",
    ".encoder.layer.": ".encoder.layers.",
    ".attention.projection_layer.": ".attn.proj.",
    ".attention.": ".attn.",
    ".layernorm_before.": ".norm1.",
    ".layernorm_after.": ".norm2.",
    ".lambda_": ".ls",
}


class VisionEmbeddings(nn.Module):
    """A tile's patches, with a class token before them and learnt positions."""

    def __init__(self, vision: HFConfig, tile_size: int, dtype: torch.dtype | None) -> None:
        super().__init__()
        width, self.patch_size = vision.hidden_size, vision.patch_size
        self.side = tile_size // self.patch_size
        self.trained_side = vision.image_size // self.patch_size
        self.class_embedding = nn.Parameter(torch.empty(1, 1, width, dtype=dtype))
        self.patch_embedding = build_replicated_linear(3 * self.patch_size**2, width, bias=True)
        positions = torch.empty(1, 1 + self.trained_side**2, width, dtype=dtype)
        self.position_embedding = nn.Parameter(positions)

    def forward(self, tiles: Tensor) -> Tensor:
        """Pixels ``[n, 3, S, S]`` to ``[n, 1 + patches, E]``."""
        side, patch = self.side, self.patch_size
        # A convolution whose stride is its kernel is a linear of each patch.
        cut = tiles.unflatten(3, (side, patch)).unflatten(2, (side, patch))
        patches = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        x = self.patch_embedding(patches.to(self.patch_embedding.dtype))
        x = torch.cat([self.class_embedding.expand(len(x), -1, -1), x], dim=1)
        out: Tensor = x + self._positions()
        return out

    def _positions(self) -> Tensor:
        """``[1, 1 + patches, E]``: for tiles of another size than was trained, stretched."""
        learnt = self.position_embedding
        if self.side == self.trained_side:
            return learnt
        grid = learnt[:, 1:].float().unflatten(1, (self.trained_side, -1)).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, size=(self.side, self.side), mode="bicubic")
        return torch.cat([learnt[:, :1], grid.flatten(2).transpose(1, 2).to(learnt.dtype)], dim=1)


class VisionAttention(nn.Module):
    """Attention between the patches of a tile; queries and keys may be normalised as a whole."""

    def __init__(self, vision: HFConfig) -> None:
        super().__init__()
        width, self.num_heads = vision.hidden_size, vision.num_attention_heads
        # Every rank computes the whole: the largest tower has 25 heads.
        parts = [(part, width, 0, width) for part in "qkv"]
        self.qkv = Linear(width, parts, bias=vision.qkv_bias)
        self.proj = build_replicated_linear(width, width, bias=True)
        self.q_norm = self.k_norm = None
        if vision.qk_normalization:
            self.q_norm = RMSNorm(width, vision.qk_norm_eps)
            self.k_norm = RMSNorm(width, vision.qk_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, N, E]`` to ``[n, N, E]``."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q.contiguous()), self.k_norm(k.contiguous())
        heads = [part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (q, k, v)]
        out = F.scaled_dot_product_attention(*heads)
        projected: Tensor = self.proj(out.transpose(1, 2).flatten(2))
        return projected


class VisionLayer(nn.Module):
    """A pre-norm layer whose branches are scaled."""

    def __init__(self, vision: HFConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        width = vision.hidden_size
        norm = RMSNorm if vision.norm_type == "rms_norm" else LayerNorm
        self.norm1 = norm(width, vision.layer_norm_eps)
        self.attn = VisionAttention(vision)
        self.norm2 = norm(width, vision.layer_norm_eps)
        self.mlp = MLP(width, vision.intermediate_size, vision.hidden_act, bias=True)
        self.ls1 = nn.Parameter(torch.empty(width, dtype=dtype))
        self.ls2 = nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """``[n, N, E]`` to ``[n, N, E]``."""
        x = x + self.attn(self.norm1(x)) * self.ls1
        rows = self.norm2(x).flatten(0, 1).unsqueeze(0)
        out: Tensor = x + self.mlp(rows).view_as(x) * self.ls2
        return out


class VisionEncoder(nn.Module):
    """The layers up to the one whose output is used."""

    def __init__(self, vision: HFConfig, depth: int, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([VisionLayer(vision, dtype) for _ in range(depth)])


class VisionTower(nn.Module):
    """The vision tower, named as in checkpoints; the model calls its modules one by one."""

    def __init__(self, config: HFConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        vision = HFConfig(config.vision_config)
        self.embeddings = VisionEmbeddings(vision, config.tile_size, dtype)
        self.encoder = VisionEncoder(vision, config.vision_depth, dtype)


class InternVLModel(AroundTextModel):
    """A text model, and a tower that makes embeddings of tiles of pictures."""

    pixel_mean: Tensor
    pixel_std: Tensor
    support_media_graph = True

    def __init__(
        self,
        config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(HFConfig(config.text_config), ctx_mgr, dtype, device)
        self.vision_model = VisionTower(config, dtype)
        self.merge_size = config.merge_size
        self.transposed = config.ps_version == "v1"
        self.tower_depth = config.vision_config["num_hidden_layers"]
        width = config.vision_config["hidden_size"] * self.merge_size**2
        hidden_size = config.text_config["hidden_size"]
        self.mlp1 = nn.Sequential(
            LayerNorm(width, 1e-5),
            build_replicated_linear(width, hidden_size, bias=True),
            nn.GELU(),
            build_replicated_linear(hidden_size, hidden_size, bias=True),
        )
        for name, values in (("mean", config.image_mean), ("std", config.image_std)):
            constant = torch.tensor(values, dtype=torch.float32, device="cpu").view(3, 1, 1)
            self.register_buffer(f"pixel_{name}", constant, persistent=False)

    def embed_media(self, kind: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """The embeddings ``[n, H]`` of each of some images or videos, which are computed together.

        Args:
            kind: "image" or "video".
            items: ``pixel_values`` of each: tiles ``[n, S, S, 3]`` uint8, or ``[n, 3, S, S]``
                float32 that are normalised. A video, whose frames are a tile each, also has the
                tokens of its span, ``token_ids``, and where the tiles' embeddings go, ``places``,
                both on the host.
        """
        return finished(self.embed_media_parts(kind, items))

    def embed_media_parts(
        self, kind: str, items: Sequence[Mapping[str, Tensor]]
    ) -> Generator[float, None, list[Tensor]]:
        """As :meth:`embed_media`; says after each layer which share of the work is done."""
        counts = [len(item["pixel_values"]) for item in items]
        tiles = torch.cat([self._normalised(item["pixel_values"]) for item in items])
        groups = tiles.split(_TILES_AT_ONCE)
        layers = self.vision_model.encoder.layers
        merged = []
        for number, group in enumerate(groups):
            x = self.vision_model.embeddings(group)
            for index, layer in enumerate(layers):
                x = layer(x)
                yield (number + (index + 1) / len(layers)) / len(groups)
            merged.append(self._merged(x[:, 1:]))  # without the class token
        out = [part.flatten(0, 1) for part in torch.cat(merged).split(counts)]
        if kind == "image":
            return out
        embed = self.get_input_embeddings()
        return [
            embed(sent(item["token_ids"], part.device)).index_copy(
                0, sent(item["places"], part.device), part
            )
            for item, part in zip(items, out, strict=True)
        ]

    def usual_media(self) -> list[tuple[str, list[dict[str, Tensor]]]]:
        """Pictures of one tile, and of two to six with a small one of the whole."""
        size = self.vision_model.embeddings.side * self.vision_model.embeddings.patch_size
        return [
            ("image", [{"pixel_values": torch.zeros(n, size, size, 3, dtype=torch.uint8)}])
            for n in (1, *range(3, 8))
        ]

    def _normalised(self, tiles: Tensor) -> Tensor:
        if tiles.dtype == torch.uint8:
            tiles = (tiles.permute(0, 3, 1, 2) / 255 - self.pixel_mean) / self.pixel_std
        return tiles

    def _merged(self, x: Tensor) -> Tensor:
        """Patches ``[n, N, E]`` to embeddings ``[n, N / merge**2, H]``: the pixel shuffle."""
        merge, side = self.merge_size, self.vision_model.embeddings.side
        x = x.unflatten(1, (side, side // merge, merge)).flatten(3).transpose(1, 2)
        x = x.unflatten(2, (side // merge, merge)).flatten(3)
        if not self.transposed:
            x = x.transpose(1, 2)
        out: Tensor = self.mlp1(x.flatten(1, 2))
        return out

    def load_weights(self, weights: Weights) -> None:
        """Fill the parameters from a checkpoint in its original or in transformers' naming."""
        kept = len(self.vision_model.encoder.layers)
        unused = [f"vision_model.encoder.layers.{i}." for i in range(kept, self.tower_depth)]
        load = stacked_loader(
            self,
            {
                "q_proj": ("qkv", "q"),
                "k_proj": ("qkv", "k"),
                "v_proj": ("qkv", "v"),
                "fc1": ("up_proj", None),
                "fc2": ("down_proj", None),
            },
            ignore=unused,
        )
        self.load_text_weights(_renamed(weights), "language_model.", load)


def _renamed(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        for theirs, ours in _NAMES.items():
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        if name.startswith("vision_model."):
            for theirs, ours in _VISION_NAMES.items():
                name = name.replace(theirs, ours)
            if name.endswith(".patch_embedding.weight"):
                tensor = tensor.flatten(1)  # a convolution's kernel
        yield name, tensor
