"""A layer of experts from outside: no file of the core is changed, and transformers agrees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from extension_imports import check_imports

from engine_core import LLM, EngineConfig, SamplingParams

MAP = Path(__file__).with_name("mixtral.py")
PROMPTS = [[5, 9, 3], list(range(20, 60)), [7] * 11, [150, 2]]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    theirs = MixtralForCausalLM(config).float().eval()
    folder = tmp_path_factory.mktemp("mixtral")
    theirs.save_pretrained(folder)
    return folder, theirs


@pytest.fixture(scope="module", params=[512, 16], ids=["whole prompts", "chunks"])
def llm(checkpoint: tuple[Path, torch.nn.Module], request: pytest.FixtureRequest) -> Iterator[LLM]:
    config = EngineConfig(
        custom_module_map=str(MAP),
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        max_num_batched_tokens=request.param,
    )
    with LLM(str(checkpoint[0]), config) as llm:
        yield llm


@torch.inference_mode()
def test_tokens_and_logprobs_are_those_of_transformers(
    llm: LLM, checkpoint: tuple[Path, torch.nn.Module]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=1)
    outputs = llm.generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        (completion,) = output.outputs
        tokens, entries = completion.token_ids, completion.logprobs
        whole = torch.tensor([prompt + tokens])
        expected = checkpoint[1](whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert expected.argmax(-1).tolist() == tokens
        ours = [entry[token].logprob for entry, token in zip(entries, tokens, strict=True)]
        torch.testing.assert_close(torch.tensor(ours), expected.max(-1).values, atol=2e-4, rtol=0)


def test_every_expert_has_a_part(checkpoint: tuple[Path, torch.nn.Module]) -> None:
    chosen: set[int] = set()
    for module in checkpoint[1].modules():
        if type(module).__name__ == "MixtralTopKRouter":
            module.register_forward_hook(
                lambda _, __, out: chosen.update(out[2].flatten().tolist())
            )
    with torch.inference_mode():
        checkpoint[1](torch.tensor([PROMPTS[1]]))
    assert chosen == {0, 1, 2, 3}


def test_it_imports_public_names_only() -> None:
    check_imports(MAP)
