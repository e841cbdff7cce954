"""Gemma 2 and 3 of the blocks alone, against transformers: offsets, sandwich norms, caps, ropes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from engine_core.configs import HFConfig
from engine_core.kernels import GPU
from engine_core.nn import (
    Decoder,
    DecoderLayer,
    GatedMLP,
    RotaryCausalLM,
    RotaryEmbedding,
    SelfAttention,
    build_replicated_linear,
    build_rotary_embedding_from_config,
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

TOKENS = [3, 17, 49, 0, 8, 33]
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "query_pre_attn_scalar": 11,
    "sliding_window": 3,
    "final_logit_softcapping": 3.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "attn_implementation": "eager",
}
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
}


class Gemma2(RotaryCausalLM):
    norm_offset = 1.0
    qk_norm = False

    def __init__(self, config: HFConfig, *args: Any) -> None:
        super().__init__(config, *args)
        self.cap = config.final_logit_softcapping

    def embedding_scale(self, config: HFConfig) -> float:
        return float(config.hidden_size**0.5)

    def build_layer(self, config: HFConfig, index: int) -> DecoderLayer:
        slides = config.layer_types[index] == "sliding_attention"
        return DecoderLayer(
            SelfAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                qk_norm_eps=config.rms_norm_eps if self.qk_norm else None,
                qk_norm_offset=1.0,
                sliding_window=config.sliding_window if slides else None,
                scale=config.query_pre_attn_scalar**-0.5,
                logit_softcapping=None if self.qk_norm else config.attn_logit_softcapping,
            ),
            GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_activation),
            lambda: self.build_norm(config),
            sandwich=True,
        )

    def adjust_logits(self, logits: Tensor) -> Tensor:
        return self.cap * torch.tanh(logits / self.cap)


class Gemma3(Gemma2):
    qk_norm = True

    def build_rotary(self, config: HFConfig) -> list[RotaryEmbedding]:
        kinds = {
            kind: build_rotary_embedding_from_config(config.replace(rope_parameters=parameters))
            for kind, parameters in config.rope_parameters.items()
        }
        return [kinds[kind] for kind in config.layer_types]


def gemma2() -> tuple[Any, type[Gemma2]]:
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, attn_logit_softcapping=2.0)), Gemma2


def gemma3() -> tuple[Any, type[Gemma2]]:
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, rope_parameters=ROPES)), Gemma3


@pytest.mark.parametrize("pretend", [False, True])
@pytest.mark.parametrize(("make", "kinds"), [(gemma2, 1), (gemma3, 2)])
def test_a_gemma_is_the_blocks_with_other_options(
    make: Any, kinds: int, pretend: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    theirs, family = make()
    for param in theirs.parameters():
        values = torch.randn(param.shape, generator=generator)
        param.data.copy_(0.2 * values if param.dim() == 1 else values / param.shape[-1] ** 0.5)
    tokens = torch.tensor(TOKENS)
    with torch.no_grad():
        expected = theirs(tokens[None]).logits

    config = HFConfig(theirs.config.to_dict())
    with building(BuildContext(dtype=torch.float32)) as context:
        model = family(config, StepContextManager(context))
    model.load_weights(theirs.state_dict().items())
    if pretend:  # the methods of the linears are told of an H200
        for module in ("epilogue", "blocks"):
            h200 = GPU.of_capability((9, 0))
            monkeypatch.setattr(f"engine_core.nn.{module}.gpu_of", lambda device, gpu=h200: gpu)
    agree(model, torch.device("cpu"))
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, len(TOKENS)], dtype=torch.int32),
        kv_lens=torch.tensor([len(TOKENS)], dtype=torch.int32),
        max_query_len=len(TOKENS),
        max_kv_len=16,
        num_decode_rows=0,
        groups=(GroupMetadata(torch.zeros(1, 1, dtype=torch.int32), torch.arange(len(TOKENS))),),
    )
    shape = (1, 16, config.num_key_value_heads, config.head_dim)
    caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in model.model.layers]
    called: list[nn.Module] = []
    for _ in range(2):  # as usual, and watched by forward hooks
        hidden = model(tokens[None], torch.arange(len(TOKENS))[None], caches, metadata)
        torch.testing.assert_close(model.get_logits(hidden), expected, atol=1e-5, rtol=1e-4)
        for rotary in set(model.rotary_embs):
            rotary.register_forward_hook(lambda module, *_: called.append(module))
    assert len(called) == len(set(called)) == kinds


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 55.5), (torch.float32, 55.4256)])
def test_the_embedding_scale_is_rounded_to_the_dtype(dtype: torch.dtype, scale: float) -> None:
    """3072 ** 0.5 is 55.4256, of which bfloat16 has 55.5: what transformers multiplies by."""
    config = HFConfig({"vocab_size": 4, "hidden_size": 3072})
    with building(BuildContext(dtype=dtype)):
        decoder = Decoder(config, [], norm=nn.Identity(), embedding_scale=3072**0.5)
    assert decoder.embedding_scale == pytest.approx(scale, abs=1e-4)


def test_a_replicated_linear_is_whole_on_every_rank() -> None:
    weight, x = torch.randn(6, 4), torch.randn(3, 4)
    for rank in range(2):
        with building(BuildContext(tp_rank=rank, tp_size=2)):
            linear = build_replicated_linear(4, 6)
        load_weight(linear.weight, weight)
        torch.testing.assert_close(linear(x), F.linear(x, weight))
