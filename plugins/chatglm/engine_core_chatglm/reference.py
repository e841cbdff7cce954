"""ChatGLM in plain torch, after each version's modeling_chatglm.py: the kit's reference.

Nothing here is of the engine's: no cache, no merged layers, one sequence at a time. The package's
tests hold it to outputs of the original code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _scores(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention of ``[T, heads, D]``; ``seen [T, T]`` says which key a query sees."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    probabilities = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probabilities, v).flatten(1)


class _Layers(nn.Module):
    """A container of what a checkpoint names, and what is computed with it."""

    def __init__(self, compute: Callable[..., Tensor] | None = None, **parts: nn.Module) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        """``[1, T, H]`` to ``[1, T, H]``."""
        assert self.compute is not None, "not a container alone"
        return self.compute(self, x[0], *more)[None]


def _mlp(hidden: int, first: int, second: int, *, bias: bool) -> nn.Module:
    return _Layers(
        dense_h_to_4h=nn.Linear(hidden, first, bias=bias),
        dense_4h_to_h=nn.Linear(second, hidden, bias=bias),
    )


class ChatGLM1(nn.Module):
    """ChatGLM-6B: a context that sees all of itself, and two kinds of position."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.values = c = {"layernorm_epsilon": 1e-5, **config}
        hidden, size = c["hidden_size"], c["hidden_size"] // c["num_attention_heads"]
        freq = 1.0 / 10000 ** (torch.arange(0, size // 2, 2) / (size // 2))

        def layer() -> nn.Module:
            rotary = nn.Module()
            rotary.register_buffer("inv_freq", freq.half())
            attention = _Layers(
                rotary_emb=rotary,
                query_key_value=nn.Linear(hidden, 3 * hidden),
                dense=nn.Linear(hidden, hidden),
            )
            inner = c["inner_hidden_size"]
            mlp = _mlp(hidden, inner, inner, bias=True)
            norms = {name: self._norm() for name in ("input_layernorm", "post_attention_layernorm")}
            return _Layers(self._layer, attention=attention, mlp=mlp, **norms)

        self.transformer: Any = _Layers(
            word_embeddings=nn.Embedding(c["vocab_size"], hidden),
            layers=nn.ModuleList(layer() for _ in range(c["num_layers"])),
            final_layernorm=self._norm(),
        )
        self.lm_head = nn.Linear(hidden, c["vocab_size"], bias=False)

    def _norm(self) -> nn.Module:
        return nn.LayerNorm(self.values["hidden_size"], self.values["layernorm_epsilon"])

    def forward(self, input_ids: Tensor) -> Tensor:
        """``[1, T]`` to logits ``[1, T, vocab]``."""
        c, parts = self.values, self.transformer
        ids, index = input_ids[0].tolist(), torch.arange(input_ids.shape[1])
        context = ids.index(c["bos_token_id"])
        mask = c["gmask_token_id"] if c["gmask_token_id"] in ids else c["mask_token_id"]
        first = torch.where(index < context, index, ids.index(mask))
        second = (index - context + 1).clamp(min=0)
        seen = (index[:, None] >= index) | (index < context)
        x = parts.word_embeddings(input_ids)
        for layer in parts.layers:
            x = layer(x, (first, second), seen)
        logits: Tensor = self.lm_head(parts.final_layernorm(x))
        return logits

    def _layer(self, layer: Any, x: Tensor, places: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
        alpha = (2 * 28) ** 0.5
        freq = layer.attention.rotary_emb.inv_freq.float()
        angles = [torch.outer(place.float(), freq) for place in places]
        x = layer.input_layernorm(x)
        qkv = layer.attention.query_key_value(x)
        q, k, v = qkv.unflatten(-1, (self.values["num_attention_heads"], -1)).chunk(3, dim=-1)
        q, k = self._rotated(q, angles), self._rotated(k, angles)
        x = alpha * x + layer.attention.dense(_scores(q, k, v, seen))
        x = layer.post_attention_layernorm(x)
        inner = F.gelu(layer.mlp.dense_h_to_4h(x), approximate="tanh")
        out: Tensor = alpha * x + layer.mlp.dense_4h_to_h(inner)
        return out

    def _rotated(self, x: Tensor, angles: list[Tensor]) -> Tensor:
        """Each half of a head turned by one kind of position, its own halves as pairs."""
        turned = []
        for part, angle in zip(x.chunk(2, dim=-1), angles, strict=True):
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]
            left, right = part.chunk(2, dim=-1)
            turned += [left * cos - right * sin, right * cos + left * sin]
        return torch.cat(turned, dim=-1)


class ChatGLM2(nn.Module):
    """ChatGLM2-6B and ChatGLM3-6B, with every option of their configs."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.values = c = {**DEFAULTS_2, **config}
        hidden, heads = c["hidden_size"], c["num_attention_heads"]
        self.size = size = c.get("kv_channels", hidden // heads)
        self.groups = c["multi_query_group_num"] if c["multi_query_attention"] else heads
        bias = c["add_bias_linear"]
        width = (heads + 2 * self.groups) * size
        freq = 1.0 / self._base() ** (torch.arange(0, size // 2, 2) / (size // 2))

        def layer() -> nn.Module:
            attention = _Layers(
                query_key_value=nn.Linear(hidden, width, bias=bias or c["add_qkv_bias"]),
                dense=nn.Linear(heads * size, hidden, bias=bias),
            )
            inner = c["ffn_hidden_size"]
            mlp = _mlp(hidden, 2 * inner, inner, bias=bias)
            norms = {name: self._norm() for name in ("input_layernorm", "post_attention_layernorm")}
            return _Layers(self._layer, self_attention=attention, mlp=mlp, **norms)

        rotary = nn.Module()
        rotary.register_buffer("inv_freq", freq)
        encoder: Any = _Layers(layers=nn.ModuleList(layer() for _ in range(c["num_layers"])))
        if c["post_layer_norm"]:
            encoder.final_layernorm = self._norm()
        self.transformer: Any = _Layers(
            embedding=_Layers(word_embeddings=nn.Embedding(c["padded_vocab_size"], hidden)),
            rotary_pos_emb=rotary,
            encoder=encoder,
            output_layer=nn.Linear(hidden, c["padded_vocab_size"], bias=False),
        )

    def _norm(self) -> nn.Module:
        kind = nn.RMSNorm if self.values["rmsnorm"] else nn.LayerNorm
        return kind(self.values["hidden_size"], self.values["layernorm_epsilon"])

    def _divides(self) -> bool:
        """Whether ``rope_ratio`` divides positions, as in ChatGLM2-6B-32K alone."""
        return "chatglm2" in self.values.get("_name_or_path", "")

    def _base(self) -> float:
        return 10000.0 if self._divides() else 10000.0 * float(self.values["rope_ratio"])

    def forward(self, input_ids: Tensor) -> Tensor:
        """``[1, T]`` to logits ``[1, T, vocab]``."""
        c, parts = self.values, self.transformer
        index = torch.arange(input_ids.shape[1])
        places = index / (c["rope_ratio"] if self._divides() else 1)
        turn = torch.polar(torch.ones(1), torch.outer(places, parts.rotary_pos_emb.inv_freq))
        seen = index[:, None] >= index
        x = parts.embedding.word_embeddings(input_ids)
        for layer in parts.encoder.layers:
            x = layer(x, turn, seen)
        if c["post_layer_norm"]:
            x = parts.encoder.final_layernorm(x)
        logits: Tensor = parts.output_layer(x)
        return logits

    def _layer(self, layer: Any, x: Tensor, turn: Tensor, seen: Tensor) -> Tensor:
        c, heads, size = self.values, self.values["num_attention_heads"], self.size
        normed_residual = c["apply_residual_connection_post_layernorm"]
        normed = layer.input_layernorm(x)
        qkv = layer.self_attention.query_key_value(normed)
        if c["multi_query_attention"]:
            widths = [heads * size, self.groups * size, self.groups * size]
            q, k, v = (part.unflatten(-1, (-1, size)) for part in qkv.split(widths, dim=-1))
        else:
            q, k, v = qkv.unflatten(-1, (heads, -1)).chunk(3, dim=-1)
        q, k = self._rotated(q, turn), self._rotated(k, turn)
        k, v = (part.repeat_interleave(heads // self.groups, dim=1) for part in (k, v))
        x = normed if normed_residual else x
        x = x + layer.self_attention.dense(_scores(q, k, v, seen))
        normed = layer.post_attention_layernorm(x)
        gate, up = layer.mlp.dense_h_to_4h(normed).chunk(2, dim=-1)
        x = normed if normed_residual else x
        out: Tensor = x + layer.mlp.dense_4h_to_h(F.silu(gate) * up)
        return out

    def _rotated(self, x: Tensor, turn: Tensor) -> Tensor:
        """Neighbours in the first half of each head turned as pairs; the other half as it is."""
        half = self.size // 2
        pairs = torch.view_as_complex(x[..., :half].unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * turn[:, None]).flatten(-2)
        return torch.cat([turned, x[..., half:]], dim=-1)


DEFAULTS_2: dict[str, Any] = {
    "layernorm_epsilon": 1e-5,
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "multi_query_attention": False,
    "multi_query_group_num": 1,
    "rope_ratio": 1,
}
