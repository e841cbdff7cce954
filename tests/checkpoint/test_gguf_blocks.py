"""Tensors of a GGUF file that stay in blocks."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from checkpoint_files import write_llama_gguf

from engine_core.checkpoint import open_checkpoint
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
    assert checkpoint.gguf.block_types == dict.fromkeys(
        {name for name, shape in shapes.items() if len(shape) == 2}, "Q4_1"
    )
    kept = checkpoint.keeping_blocks(names)
    assert kept.gguf is not None
    assert kept.gguf.kept == {"Q4_1": 7}
    assert kept.gguf.unpacked == {"Q4_1": ["model.embed_tokens.weight"]}
    read = dict(kept.weights())
    assert {name: (list(h.shape), h.dtype) for name, h in kept.headers.items()} == {
        name: (list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in read.items()
    }
    for name, (rows, *columns) in shapes.items():
        if name not in names:
            assert torch.equal(read[name], whole[name])
            continue
        assert list(read[name].shape) == [rows, columns[0] // 32, 20]
        blocks = read[name].numpy().reshape(rows, -1)
        numbers = gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q4_1)
        torch.testing.assert_close(torch.from_numpy(numbers), whole[name])
