"""Qwen and Qwen-VL in plain torch, after their modeling_qwen.py and visual.py: the kit's reference.

Nothing here is of the engine's: no cache, no merged layers, one sequence at a time. The package's
tests hold it to outputs of the original code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _part(**parts: nn.Module) -> nn.Module:
    """A container of what a checkpoint names."""
    module = nn.Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def _attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """``[T, heads, D]`` each, to ``[T, heads * D]``; ``seen`` says which key a query sees."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


def _table(count: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(count, width))


class Visual(nn.Module):
    """A vision transformer, and queries that attend to its patches."""

    def __init__(self, visual: Mapping[str, Any]) -> None:
        super().__init__()
        self.values = c = visual
        width, out = c["width"], c["output_dim"]
        self.grid = c["image_size"] // c["patch_size"]
        self.conv1 = nn.Conv2d(3, width, c["patch_size"], c["patch_size"], bias=False)
        self.positional_embedding = _table(self.grid**2, width)
        self.ln_pre = nn.LayerNorm(width, 1e-6)
        inner = int(width * c["mlp_ratio"])

        def block() -> nn.Module:
            return _part(
                ln_1=nn.LayerNorm(width, 1e-6),
                attn=_part(in_proj=nn.Linear(width, 3 * width), out_proj=nn.Linear(width, width)),
                ln_2=nn.LayerNorm(width, 1e-6),
                mlp=_part(c_fc=nn.Linear(width, inner), c_proj=nn.Linear(inner, width)),
            )

        self.transformer: Any = _part(resblocks=nn.ModuleList(block() for _ in range(c["layers"])))
        self.attn_pool: Any = _part(
            kv_proj=nn.Linear(width, out, bias=False),
            attn=nn.MultiheadAttention(out, out // 128),
            ln_q=nn.LayerNorm(out, 1e-6),
            ln_kv=nn.LayerNorm(out, 1e-6),
        )
        self.attn_pool.pos_embed, self.attn_pool.query = _table(256, out), _table(256, out)
        self.ln_post = nn.LayerNorm(out, 1e-6)
        self.proj = _table(out, out)

    def forward(self, pixels: Tensor) -> Tensor:
        """An image ``[3, S, S]`` to ``[256, H]``."""
        x = self.conv1(pixels[None])[0].flatten(1).T + self.positional_embedding
        x = self.ln_pre(x)
        for block in self.transformer.resblocks:
            qkv = block.attn.in_proj(block.ln_1(x)).unflatten(-1, (self.values["heads"], -1))
            x = x + block.attn.out_proj(_attended(*qkv.chunk(3, dim=-1)))
            x = x + block.mlp.c_proj(F.gelu(block.mlp.c_fc(block.ln_2(x))))
        pool = self.attn_pool
        x = pool.ln_kv(pool.kv_proj(x))
        square = pool.pos_embed.view(1, 16, 16, -1).permute(0, 3, 1, 2)
        places = F.interpolate(square, (self.grid, self.grid), mode="bicubic")[0].flatten(1).T
        out = pool.attn(pool.ln_q(pool.query) + pool.pos_embed, x + places, x)[0]
        embeddings: Tensor = self.ln_post(out) @ self.proj
        return embeddings


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"] // 2
        self.size = config["kv_channels"]
        self.ln_1 = nn.RMSNorm(hidden, config["layer_norm_epsilon"])
        self.attn: Any = _part(
            c_attn=nn.Linear(hidden, 3 * hidden), c_proj=nn.Linear(hidden, hidden, bias=False)
        )
        self.ln_2 = nn.RMSNorm(hidden, config["layer_norm_epsilon"])
        self.mlp: Any = _part(
            w1=nn.Linear(hidden, inner, bias=False),
            w2=nn.Linear(hidden, inner, bias=False),
            c_proj=nn.Linear(inner, hidden, bias=False),
        )

    def forward(self, x: Tensor, angles: Tensor, factors: Tensor, seen: Tensor) -> Tensor:
        """``[1, T, H]`` to ``[1, T, H]``."""
        x = x[0]
        qkv = self.attn.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.size)) for part in qkv)
        q, k = (_rotated(part, angles) for part in (q, k))
        x = x + self.attn.c_proj(_attended(q * factors[:, None, None], k, v, seen))
        normed = self.ln_2(x)
        out: Tensor = x + self.mlp.c_proj(self.mlp.w1(normed) * F.silu(self.mlp.w2(normed)))
        return out[None]


class QWen(nn.Module):
    """Qwen, and with ``visual`` in its config Qwen-VL."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.values = c = {**DEFAULTS, **config}
        hidden = c["hidden_size"]
        word_embeddings = nn.Embedding(c["vocab_size"], hidden)
        self.transformer: Any = _part(
            wte=word_embeddings,
            h=nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"])),
            ln_f=nn.RMSNorm(hidden, c["layer_norm_epsilon"]),
        )
        if "visual" in c:
            self.transformer.add_module("visual", Visual(c["visual"]))
        self.lm_head = nn.Linear(hidden, c["vocab_size"], bias=False)
        if c.get("tie_word_embeddings"):
            self.lm_head.weight = word_embeddings.weight

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
        """``[1, T]`` to logits ``[1, T, vocab]``; ``pixel_values [images, 3, S, S]``."""
        c, ids = self.values, input_ids[0]
        length = len(ids)
        x = self.transformer.wte(ids)
        if pixel_values is not None:
            starts = (ids == c["visual"]["image_start_id"]).nonzero().flatten().tolist()
            for start, pixels in zip(starts, pixel_values, strict=True):
                x[start + 1 : start + 257] = self.transformer.visual(pixels)
        size, trained = c["kv_channels"], c["seq_length"]
        alpha = 1
        if c["use_dynamic_ntk"] and length > trained:
            alpha = 2 ** math.ceil(math.log2(length / trained) + 1) - 1
        base = c["rotary_emb_base"] * alpha ** (size / (size - 2))
        index = torch.arange(length)
        angles = torch.outer(index.float(), 1.0 / base ** (torch.arange(0, size, 2) / size))
        factors = (index + 1).float().log() / math.log(trained)
        factors = factors.clamp(min=1.0) if c["use_logn_attn"] else torch.ones(length)
        seen = index[:, None] >= index
        for layer in self.transformer.h:
            x = layer(x[None], angles, factors, seen)[0]
        logits: Tensor = self.lm_head(self.transformer.ln_f(x))
        return logits[None]


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


DEFAULTS: dict[str, Any] = {
    "layer_norm_epsilon": 1e-6,
    "kv_channels": 128,
    "rotary_emb_base": 10000,
    "seq_length": 8192,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
}
