"""4-bit blocks of GGUF files against the gguf package's dequantisation."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from checkpoint_files import write_llama_gguf

from engine_core.checkpoint import open_checkpoint
from engine_core.checkpoint.gguf_blocks import BLOCK_TYPES, unpack_blocks
from engine_core_llama.gguf import LlamaGGUFAdapter

CONFIG = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_codes_scales_and_minima_give_the_numbers(type_name: str) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(0)
    raw = draw.integers(0, 256, (6, 2, block_bytes), dtype=np.uint8)
    # Finite scales; every other byte may be anything.
    raw[..., :4] = draw.standard_normal((6, 2, 2)).astype(np.float16).view(np.uint8)
    if type_name == "Q4_0":
        raw[..., 2:4] = draw.integers(0, 256, (6, 2, 2))
    expected = gguf.dequantize(raw.reshape(6, -1), kind)
    blocks = unpack_blocks(raw.reshape(-1), type_name, expected.shape)
    groups = blocks.codes.reshape(6, -1, 32).astype(np.float32)
    numbers = (groups * blocks.scales[..., None] + blocks.minima[..., None]).reshape(6, -1)
    assert blocks.codes.max() == 15
    np.testing.assert_allclose(numbers, expected, rtol=1e-5, atol=1e-4)


def test_kept_blocks_stand_in_the_order_of_an_ordinary_checkpoint(tmp_path) -> None:
    draw = np.random.default_rng(0)
    hidden, inner = 64, 128
    shapes = {
        "model.embed_tokens.weight": (96, hidden),
        "model.norm.weight": (hidden,),
        "model.layers.0.input_layernorm.weight": (hidden,),
        "model.layers.0.post_attention_layernorm.weight": (hidden,),
        "model.layers.0.self_attn.q_proj.weight": (hidden, hidden),
        "model.layers.0.self_attn.k_proj.weight": (hidden // 2, hidden),
        "model.layers.0.self_attn.v_proj.weight": (hidden // 2, hidden),
        "model.layers.0.self_attn.o_proj.weight": (hidden, hidden),
        "model.layers.0.mlp.gate_proj.weight": (inner, hidden),
        "model.layers.0.mlp.up_proj.weight": (inner, hidden),
        "model.layers.0.mlp.down_proj.weight": (hidden, inner),
    }
    tensors = {
        name: draw.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()
    }
    path = tmp_path / "tiny.gguf"
    write_llama_gguf(path, tensors, CONFIG, quantise="Q4_1")
    checkpoint = open_checkpoint(
        path, gguf_adapters={"llama": LlamaGGUFAdapter}, dtype="float32", convert=False
    )
    assert checkpoint.gguf is not None
    whole = dict(checkpoint.weights())
    names = {name for name in shapes if "_proj" in name}
    assert names <= checkpoint.gguf.block_tensors
    kept = checkpoint.keeping_blocks(names)
    read = dict(kept.weights())
    assert {name: (list(h.shape), h.dtype) for name, h in kept.headers.items()} == {
        name: (list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in read.items()
    }
    for name in shapes:
        if name not in names:
            assert torch.equal(read[name], whole[name])
            continue
        layer = name.removesuffix("weight")
        assert name not in read
        groups = read[f"{layer}qweight"].float().unflatten(1, (-1, 32))
        numbers = groups * read[f"{layer}scales"][..., None] + read[f"{layer}minima"][..., None]
        torch.testing.assert_close(numbers.flatten(1), whole[name])
