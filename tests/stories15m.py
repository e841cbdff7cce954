"""The stories15M model, a small Llama published in float32, as an ordinary checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file


def write_stories15m(source: Path, folder: Path) -> Path:
    """Write ``config.json`` and ``model.safetensors`` of the llama2.c file ``source``.

    The format is that of ``legacy_export`` in llama2.c's ``export.py``: seven integers, then the
    tensors of all layers together, one kind after another. It rotates neighbouring rows of a head
    where ordinary checkpoints rotate the two halves.
    """
    dim, hidden, layers, heads, kv_heads, vocab, length = np.fromfile(source, "<i4", 7).tolist()
    numbers = torch.from_numpy(np.fromfile(source, "<f4", offset=28))
    head = dim // heads
    position = 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal position
        size = int(np.prod(shape))
        position += size
        return numbers[position - size : position].view(shape)

    def halves(weight: torch.Tensor) -> torch.Tensor:
        pairs = weight.view(layers, -1, head // 2, 2, dim)
        return pairs.transpose(2, 3).reshape(weight.shape)

    tensors = {"model.embed_tokens.weight": take(abs(vocab), dim)}
    stacked = {
        "input_layernorm": take(layers, dim),
        "self_attn.q_proj": halves(take(layers, heads * head, dim)),
        "self_attn.k_proj": halves(take(layers, kv_heads * head, dim)),
        "self_attn.v_proj": take(layers, kv_heads * head, dim),
        "self_attn.o_proj": take(layers, dim, heads * head),
        "post_attention_layernorm": take(layers, dim),
        "mlp.gate_proj": take(layers, hidden, dim),
        "mlp.down_proj": take(layers, dim, hidden),
        "mlp.up_proj": take(layers, hidden, dim),
    }
    tensors["model.norm.weight"] = take(dim)
    for name, weights in stacked.items():
        for layer, weight in enumerate(weights):
            tensors[f"model.layers.{layer}.{name}.weight"] = weight
    assert vocab > 0, "the head is tied"
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return folder
