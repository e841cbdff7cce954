"""Options of ChatGLM2 and ChatGLM3 that no fixture has, against plain torch.

The plain code below is held to the fixtures first, then to what ``modeling_chatglm.py`` says each
option does.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from golden_fixtures import GOLDEN, golden_prompts
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_core import LLM, SamplingParams

VOCAB = 48
BASE = {
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_residual_connection_post_layernorm": False,
    "ffn_hidden_size": 20,
    "hidden_size": 32,
    "kv_channels": 8,
    "layernorm_epsilon": 1e-5,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 4,
    "num_layers": 2,
    "padded_vocab_size": VOCAB,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 64,
    "torch_dtype": "float32",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "published": {},
    "every-head-its-own": {"multi_query_attention": False},
    "layer-norm": {"rmsnorm": False},
    "all-biases": {"add_bias_linear": True},
    "no-bias": {"add_qkv_bias": False},
    "normed-residual": {"apply_residual_connection_post_layernorm": True},
    "no-final-norm": {"post_layer_norm": False},
    "no-final-norm-normed-residual": {
        "post_layer_norm": False,
        "apply_residual_connection_post_layernorm": True,
    },
    "wide-heads": {"kv_channels": 16},
    "longer-version-2": {"rope_ratio": 4, "_name_or_path": "THUDM/chatglm2-6b-32k"},
    "longer-version-3": {"rope_ratio": 50, "_name_or_path": "THUDM/chatglm3-6b-32k"},
}


def shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint."""
    hidden, ffn, size = c["hidden_size"], c["ffn_hidden_size"], c["kv_channels"]
    groups = c["multi_query_group_num"] if c["multi_query_attention"] else c["num_attention_heads"]
    query = c["num_attention_heads"] * size
    norms = ("weight",) if c["rmsnorm"] else ("weight", "bias")
    linears = {
        "self_attention.query_key_value": (query + 2 * groups * size, hidden),
        "self_attention.dense": (hidden, query),
        "mlp.dense_h_to_4h": (2 * ffn, hidden),
        "mlp.dense_4h_to_h": (hidden, ffn),
    }
    out: dict[str, tuple[int, ...]] = {
        "transformer.embedding.word_embeddings.weight": (VOCAB, hidden),
        "transformer.output_layer.weight": (VOCAB, hidden),
        "transformer.rotary_pos_emb.inv_freq": (size // 4,),
    }
    if c["post_layer_norm"]:
        out |= {f"transformer.encoder.final_layernorm.{leaf}": (hidden,) for leaf in norms}
    for index in range(c["num_layers"]):
        layer = f"transformer.encoder.layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            out |= {f"{layer}.{name}.{leaf}": (hidden,) for leaf in norms}
        for name, shape in linears.items():
            out[f"{layer}.{name}.weight"] = shape
            if c["add_bias_linear"] or (name.endswith("value") and c["add_qkv_bias"]):
                out[f"{layer}.{name}.bias"] = shape[:1]
    return out


def plain_logits(c: dict[str, Any], weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """``[T, vocab]`` of one sequence, every step written out."""
    heads, size = c["num_attention_heads"], c["kv_channels"]
    groups = c["multi_query_group_num"] if c["multi_query_attention"] else heads
    length = len(ids)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        weight = weights[f"{name}.weight"]
        if c["rmsnorm"]:
            return (
                x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + c["layernorm_epsilon"]) * weight
            )
        return F.layer_norm(
            x, x.shape[-1:], weight, weights[f"{name}.bias"], c["layernorm_epsilon"]
        )

    def rotate(x: Tensor) -> Tensor:
        rotary = size // 2
        ratio, base, positions = c.get("rope_ratio", 1), 10000, torch.arange(length).float()
        # forward_impl of RotaryEmbedding in modeling_chatglm.py of the two 32k checkpoints.
        if "chatglm2" in c.get("_name_or_path", ""):
            positions = positions / ratio
        else:
            base = base * ratio
        freq = 1.0 / base ** (torch.arange(0, rotary, 2) / rotary)
        turn = torch.polar(torch.ones(1), torch.outer(positions, freq))
        pairs = torch.view_as_complex(x[..., :rotary].reshape(length, -1, rotary // 2, 2))
        turned = torch.view_as_real(pairs * turn[:, None]).flatten(-2)
        return torch.cat([turned, x[..., rotary:]], dim=-1)

    def attention(name: str, x: Tensor) -> Tensor:
        qkv = linear(f"{name}.query_key_value", x)
        if c["multi_query_attention"]:
            q, k, v = qkv.split([heads * size, groups * size, groups * size], dim=-1)
            q, k, v = (t.reshape(length, -1, size) for t in (q, k, v))
        else:
            q, k, v = qkv.reshape(length, heads, 3 * size).chunk(3, dim=-1)
        q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(heads // groups, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(size)
        hidden = torch.ones(length, length).triu(1).bool()
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return linear(f"{name}.dense", torch.einsum("hqk,khd->qhd", probs, v).flatten(1))

    x = weights["transformer.embedding.word_embeddings.weight"][torch.tensor(ids)]
    for index in range(c["num_layers"]):
        layer = f"transformer.encoder.layers.{index}"
        normed = norm(f"{layer}.input_layernorm", x)
        residual = normed if c["apply_residual_connection_post_layernorm"] else x
        x = residual + attention(f"{layer}.self_attention", normed)
        normed = norm(f"{layer}.post_attention_layernorm", x)
        residual = normed if c["apply_residual_connection_post_layernorm"] else x
        gate, up = linear(f"{layer}.mlp.dense_h_to_4h", normed).chunk(2, dim=-1)
        x = residual + linear(f"{layer}.mlp.dense_4h_to_h", F.silu(gate) * up)
    if c["post_layer_norm"]:
        x = norm("transformer.encoder.final_layernorm", x)
    return linear("transformer.output_layer", x)


@pytest.mark.parametrize("name", ["chatglm2-tiny", "chatglm3-tiny"])
def test_the_plain_code_gives_the_fixtures(name: str) -> None:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    weights = load_file(GOLDEN / name / "model.safetensors")
    for prompt in golden_prompts(name):
        torch.testing.assert_close(
            plain_logits(config, weights, prompt.input_ids),
            prompt.prefill_logits,
            atol=1e-4,
            rtol=0,
        )


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_an_option_does_what_the_original_says(changes: dict[str, Any], tmp_path: Path) -> None:
    config = BASE | changes
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: 0.2 * torch.randn(shape, generator=generator) + (len(shape) == 1)
        for name, shape in shapes(config).items()
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    ids = torch.randint(VOCAB, (23,), generator=generator).tolist()
    params = SamplingParams(
        temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=VOCAB, prompt_logprobs=VOCAB
    )
    settings = {"skip_tokenizer_init": True, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    with LLM(str(tmp_path), **settings) as llm:
        (output,) = llm.generate(ids, params)
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    got = torch.tensor([[entry[token].logprob for token in range(VOCAB)] for entry in entries])
    expected = plain_logits(config, weights, ids).log_softmax(-1)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
