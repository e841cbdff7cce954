"""Options of ChatGLM2 and ChatGLM3 that no fixture has, against plain torch.

The reference of the conformance cases is held to the fixtures first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_fixtures import GOLDEN, golden_prompts
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_core import LLM, SamplingParams
from engine_core_chatglm.reference import ChatGLM1, ChatGLM2

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


def plain_logits(model: type, config: dict[str, Any], path: Path, ids: list[int]) -> Tensor:
    """``[T, vocab]`` of one sequence, by the reference."""
    reference = model(config)
    reference.load_state_dict(load_file(path))
    with torch.inference_mode():
        return reference(torch.tensor([ids]))[0]


@pytest.mark.parametrize("name", ["chatglm1-tiny", "chatglm2-tiny", "chatglm3-tiny"])
def test_the_reference_gives_the_fixtures(name: str) -> None:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    model = ChatGLM1 if name.startswith("chatglm1") else ChatGLM2
    for prompt in golden_prompts(name):
        torch.testing.assert_close(
            plain_logits(model, config, GOLDEN / name / "model.safetensors", prompt.input_ids),
            prompt.prefill_logits,
            atol=1e-4,
            rtol=0,
        )


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_an_option_does_what_the_original_says(changes: dict[str, Any], tmp_path: Path) -> None:
    config = BASE | changes
    generator = torch.Generator().manual_seed(1)
    reference = ChatGLM2(config)
    weights = reference.state_dict()
    for name, parameter in reference.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        weights[name] = 0.2 * noise + (parameter.dim() == 1)
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
    expected = plain_logits(ChatGLM2, config, tmp_path / "model.safetensors", ids).log_softmax(-1)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
