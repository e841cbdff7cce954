"""A recurrence of an author's own: states in the paged cache, through the whole engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from extension_imports import check_imports
from golden_fixtures import GOLDEN, golden_prompts
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine_core import LLM, EngineConfig, SamplingParams

MODEL = Path(__file__).parent / "recurrent_model.py"
PROMPTS = [prompt.input_ids for prompt in golden_prompts("llama-gqa")]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


class Recurrence(nn.Module):
    """All of a sequence at once: ``states[t] = sum over s <= t of 0.9 ** (t - s) * x[s]``."""

    def __init__(self, o_proj: nn.Module) -> None:
        super().__init__()
        self.o_proj = o_proj

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """``[1, T, H]`` to ``[1, T, H]``."""
        places = torch.arange(hidden_states.shape[1])
        decay = (0.9 ** (places[:, None] - places)).tril()
        return self.o_proj(decay @ hidden_states), None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[int]]]:
    """A checkpoint, and each prompt's tokens by transformers and :class:`Recurrence`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("recurrent")
    source = GOLDEN / "llama-gqa"
    config = json.loads((source / "config.json").read_text())
    theirs = LlamaForCausalLM(LlamaConfig(**config)).float().eval()
    tensors = load_file(source / "model.safetensors")
    theirs.load_state_dict(tensors)
    for index in range(0, config["num_hidden_layers"], 2):
        layer = theirs.model.layers[index]
        layer.self_attn = Recurrence(layer.self_attn.o_proj)
        for part in "qkv":
            del tensors[f"model.layers.{index}.self_attn.{part}_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["RecurrentLlama"]}))
    expected = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            tokens = list(prompt)
            for _ in range(24):
                logits = theirs(torch.tensor([tokens]), use_cache=False).logits
                tokens.append(int(logits[0, -1].argmax()))
            expected.append(tokens[len(prompt) :])
    return str(folder), expected


# A block of states has eight times as many tokens as one of keys and values.
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 8, "max_num_seqs": 4},
        {"block_size": 1},
        {"kv_cache_memory": 19_456, "max_num_batched_tokens": 64},
        {"kv_cache_memory": 19_456, "max_num_batched_tokens": 64, "swap_space": "16MiB"},
    ],
    ids=str,
)
def test_states_are_kept_from_step_to_step_and_in_the_prefix_cache(
    checkpoint: tuple[str, list[list[int]]], settings: dict[str, Any]
) -> None:
    path, expected = checkpoint
    fixed = {"custom_module_map": str(MODEL), "skip_tokenizer_init": True, "device": "cpu"}
    config = EngineConfig(**{**fixed, "max_model_len": 128, "block_size": 4, **settings})
    with LLM(path, config) as llm:
        scarce = "kv_cache_memory" in settings
        if scarce:
            # On a CPU no step is left in flight by itself.
            llm.engine.core.depth = 2
        cached = 0
        for _ in range(2):
            outputs = llm.generate(PROMPTS * 2, PARAMS)
            assert [output.outputs[0].token_ids for output in outputs] == expected * 2
            cached += sum(output.metrics.num_cached_tokens for output in outputs)
        assert scarce or cached > 0
        assert (llm.engine.scheduler.num_preemptions > 0) == scarce
        assert (llm.engine.scheduler.num_swaps > 0) == ("swap_space" in settings)


def test_it_imports_public_names_only() -> None:
    check_imports(MODEL)
