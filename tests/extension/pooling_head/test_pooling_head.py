"""A head over a mean of the prompt from outside: torch and transformers agree with its labels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from extension_imports import check_imports
from safetensors.torch import save_file

from engine_core import LLM, EngineConfig, SamplingParams

MAP = Path(__file__).with_name("classifier.py")
NUM_LABELS = 5
SHARED = list(range(30, 75))
PROMPTS = [[5, 9, 3], SHARED, [7] * 11, [150], [*SHARED, 8, 8]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A checkpoint, and for each prompt the log-probabilities of its labels."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        architectures=["LlamaMeanClassifier"],
    )
    theirs = LlamaModel(config).float().eval()
    score = torch.randn(NUM_LABELS, 64)
    folder = tmp_path_factory.mktemp("classifier")
    tensors = {f"model.{name}": value for name, value in theirs.state_dict().items()}
    save_file(tensors | {"score.weight": score}, folder / "model.safetensors")
    values = config.to_dict() | {"num_labels": NUM_LABELS, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(values, default=str))
    with torch.inference_mode():
        means = [theirs(torch.tensor([p])).last_hidden_state[0].mean(0) for p in PROMPTS]
        return folder, (torch.stack(means) @ score.T).log_softmax(-1)


@pytest.fixture(scope="module", params=[512, 16], ids=["whole prompts", "chunks"])
def llm(checkpoint: tuple[Path, torch.Tensor], request: pytest.FixtureRequest) -> Iterator[LLM]:
    config = EngineConfig(
        custom_module_map=str(MAP),
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        max_num_batched_tokens=request.param,
    )
    with LLM(str(checkpoint[0]), config) as llm:
        yield llm


def test_labels_are_those_of_the_mean(llm: LLM, checkpoint: tuple[Path, torch.Tensor]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=NUM_LABELS)
    # The second time prompts come out of the prefix cache, as far as their blocks are full.
    for turn in range(2):
        outputs = llm.generate(PROMPTS, params)
        for output, expected in zip(outputs, checkpoint[1], strict=True):
            (completion,) = output.outputs
            (entry,) = completion.logprobs
            assert completion.token_ids == [int(expected.argmax())]
            ours = torch.tensor([entry[label].logprob for label in range(NUM_LABELS)])
            torch.testing.assert_close(ours, expected, atol=2e-4, rtol=0)
        cached = outputs[1].metrics.num_cached_tokens
        assert cached > 0 if turn else cached == 0


def test_it_imports_public_names_only() -> None:
    check_imports(MAP)
