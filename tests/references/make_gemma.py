"""Writes the golden fixtures of Gemma 2 and Gemma 3, by transformers' own code.

    pip install torch==2.13.0 transformers==5.23.0 safetensors
    python tests/references/make_gemma.py

Weights and prompts are drawn at random, the outputs are transformers' own, in float32 on a CPU with
its plain attention. Nothing of engine-core is used. The caps are low enough and the window is short
enough to show; the configs are written with the keys that published checkpoints have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

GOLDEN = Path(__file__).parents[1] / "golden"
NEW_TOKENS = 16
LENGTHS = {"one-token": 1, "short": 9, "beyond-the-window": 31}

COMMON = {
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 10,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
    "torch_dtype": "float32",
}
GEMMA2 = {
    **COMMON,
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 4.0,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 256,
    "num_hidden_layers": 4,
    "rope_theta": 100.0,
    "sliding_window": 8,
}
GEMMA3 = {
    **COMMON,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "max_position_embeddings": 512,
    "num_hidden_layers": 4,
    "rope_local_base_freq": 30.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "rope_theta": 1000.0,
    "sliding_window": 7,
    "sliding_window_pattern": 3,
}


@torch.inference_mode()
def greedy(model: Any, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Logits of the prompt and of each new token, with the code's own cache, and the tokens."""
    out = model(input_ids=torch.tensor([ids]), use_cache=True)
    prompt = out.logits[0]
    rows, tokens = [prompt[-1]], [int(prompt[-1].argmax())]
    while len(tokens) < NEW_TOKENS:
        out = model(
            input_ids=torch.tensor([tokens[-1:]]),
            past_key_values=out.past_key_values,
            use_cache=True,
        )
        rows.append(out.logits[0, -1])
        tokens.append(int(rows[-1].argmax()))
    return prompt, torch.stack(rows), tokens


def write(
    name: str,
    values: Mapping[str, Any],
    model: Any,
    made_by: str = "make_gemma.py",
    *,
    published: bool = False,
) -> None:
    """Weights with which every part shows in the logits, and what the model makes of prompts.

    They get the names of published checkpoints or, as Gemma's are both, those of the model's parts.
    """
    for param in model.parameters():
        param.requires_grad_(False)
        # A norm's weight stands beside 1.
        param.normal_(0.0, 0.3 if param.dim() == 1 else 1.5 * param.shape[-1] ** -0.5)
    folder = GOLDEN / name
    folder.mkdir(parents=True, exist_ok=True)
    entries, tensors = [], {}
    for index, (title, length) in enumerate(LENGTHS.items()):
        ids = torch.randint(3, values["vocab_size"], (length,)).tolist()
        prompt, steps, tokens = greedy(model, ids)
        keys = {key: f"p{index}.{key}" for key in ("prefill_logits", "step_logits")}
        tensors |= dict(zip(keys.values(), (prompt.contiguous(), steps), strict=True))
        top = steps.topk(2).values
        margin = round(float((top[:, 0] - top[:, 1]).min()), 6)
        entries.append(
            {"name": title, "input_ids": ids, "new_tokens": tokens, **keys, "min_margin": margin}
        )
        print(name, title, margin, f"{steps.std():.2f}")
    expected = {
        "fixture": name,
        "made_by": f"tests/references/{made_by}",
        "reference": {
            "code": f"huggingface transformers {type(model).__name__}",
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "attn_implementation": "eager",
        },
        "prompts": entries,
    }
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    save_file(tensors, folder / "expected.safetensors")
    if published:
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
    else:
        tied = values.get("tie_word_embeddings", True)
        state = model.state_dict()
        state = {key: each for key, each in state.items() if not tied or key != "lm_head.weight"}
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n")


def main() -> None:
    for name, values, config, model in (
        ("gemma2-caps", GEMMA2, Gemma2Config, Gemma2ForCausalLM),
        ("gemma3-ropes", GEMMA3, Gemma3TextConfig, Gemma3ForCausalLM),
    ):
        torch.manual_seed(0)
        write(name, values, model(config(**values, attn_implementation="eager")).eval())


if __name__ == "__main__":
    main()
