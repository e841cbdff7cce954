"""A Gemma-like model of the blocks alone, against plain torch: offsets, sandwich norms, caps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine_core.configs import HFConfig
from engine_core.kernels import GPU
from engine_core.nn import (
    DecoderLayer,
    GatedMLP,
    RMSNorm,
    RotaryCausalLM,
    SelfAttention,
    build_replicated_linear,
    load_weight,
)
from engine_core.nn.blocks import agree
from engine_core.step_context import (
    AttentionMetadata,
    BuildContext,
    GroupMetadata,
    StepContextManager,
    building,
)

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, TOKENS, EPS = 32, 4, 2, 16, 5, 1e-6
CONFIG = HFConfig(
    hidden_size=HIDDEN, vocab_size=50, num_hidden_layers=2, rms_norm_eps=EPS, head_dim=HEAD_DIM,
    num_attention_heads=HEADS, max_position_embeddings=64, rope_theta=10000.0, rope_scaling=None,
    tie_word_embeddings=True,
)  # fmt: skip


class Gemma(RotaryCausalLM):
    norm_offset = 1.0

    def embedding_scale(self, config: HFConfig) -> float:
        return float(config.hidden_size**0.5)

    def build_layer(self, config: HFConfig, index: int) -> DecoderLayer:
        return DecoderLayer(
            SelfAttention(
                HIDDEN, HEADS, KV_HEADS, HEAD_DIM, qk_norm_eps=EPS, qk_norm_offset=1.0,
                scale=0.3, logit_softcapping=2.0,
            ),
            GatedMLP(HIDDEN, 48, "gelu_pytorch_tanh"),
            lambda: RMSNorm(HIDDEN, EPS, offset=1.0),
            sandwich=True,
        )  # fmt: skip

    def adjust_logits(self, logits: Tensor) -> Tensor:
        return 3.0 * torch.tanh(logits / 3.0)


def made() -> Gemma:
    with building(BuildContext(dtype=torch.float32)) as context:
        model = Gemma(CONFIG, StepContextManager(context))
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        values = torch.randn(param.shape, generator=generator)
        param.data.copy_(0.2 * values if param.dim() == 1 else values / param.shape[-1] ** 0.5)
    return model


def norm(x: Tensor, module: Any) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (1 + module.weight)


def rotate(x: Tensor) -> Tensor:
    frequencies = 1 / 10000.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = (torch.arange(TOKENS)[:, None] * frequencies)[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat(
        [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1
    )


def expected_logits(model: Gemma, tokens: Tensor) -> Tensor:
    x = F.embedding(tokens, model.model.embed_tokens.weight) * math.sqrt(HIDDEN)
    for layer in model.model.layers:
        part: Any = layer
        attention, mlp = part.self_attn, part.mlp
        qkv = F.linear(norm(x, part.input_layernorm), attention.qkv_proj.weight)
        q, k, v = qkv.view(TOKENS, -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        q, k = rotate(norm(q, attention.q_norm)), rotate(norm(k, attention.k_norm))
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=1) for y in (k, v))
        scores = 2.0 * torch.tanh(0.3 * torch.einsum("qhd,khd->hqk", q, k) / 2.0)
        scores += torch.full((TOKENS, TOKENS), -torch.inf).triu(1)
        heads = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        out = F.linear(heads, attention.o_proj.weight)
        x = x + norm(out, part.post_attention_layernorm)
        y = F.linear(norm(x, part.pre_feedforward_layernorm), mlp.gate_up_proj.weight)
        gate, up = y.chunk(2, dim=-1)
        out = F.linear(F.gelu(gate, approximate="tanh") * up, mlp.down_proj.weight)
        x = x + norm(out, part.post_feedforward_layernorm)
    x = norm(x, model.model.norm)
    return 3.0 * torch.tanh(F.linear(x, model.model.embed_tokens.weight) / 3.0)


@pytest.mark.parametrize("pretend", [False, True])
def test_a_gemma_is_the_blocks_with_other_options(
    pretend: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made()
    if pretend:  # the methods of the linears are told of an H200
        for module in ("epilogue", "blocks"):
            h200 = GPU.of_capability((9, 0))
            monkeypatch.setattr(f"engine_core.nn.{module}.gpu_of", lambda device, gpu=h200: gpu)
    agree(model, torch.device("cpu"))
    tokens = torch.tensor([3, 17, 49, 0, 8])
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, TOKENS], dtype=torch.int32),
        kv_lens=torch.tensor([TOKENS], dtype=torch.int32),
        max_query_len=TOKENS,
        max_kv_len=16,
        num_decode_rows=0,
        groups=(GroupMetadata(torch.zeros(1, 1, dtype=torch.int32), torch.arange(TOKENS)),),
    )
    shape = (1, 16, KV_HEADS, HEAD_DIM)
    caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in model.model.layers]
    hidden = model(tokens[None], torch.arange(TOKENS)[None], caches, metadata)
    logits = model.get_logits(hidden)
    torch.testing.assert_close(logits[0], expected_logits(model, tokens), atol=1e-5, rtol=1e-4)


def test_a_replicated_linear_is_whole_on_every_rank() -> None:
    weight, x = torch.randn(6, 4), torch.randn(3, 4)
    for rank in range(2):
        with building(BuildContext(tp_rank=rank, tp_size=2)):
            linear = build_replicated_linear(4, 6)
        load_weight(linear.weight, weight)
        torch.testing.assert_close(linear(x), F.linear(x, weight))
