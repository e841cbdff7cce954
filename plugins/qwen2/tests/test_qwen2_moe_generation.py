"""Beams, several outputs and log-probabilities of models with experts, against transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from golden_fixtures import GOLDEN, golden_llm, golden_prompts
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine_core import LLM, BeamSearchParams, SamplingParams

NAMES = ["qwen2moe-shared", "qwen3moe-stacked"]
IDS = [prompt.input_ids for prompt in golden_prompts(NAMES[0])]


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(name: str) -> Iterator[LLM]:
    """Prompts come in chunks, and rows take turns: tokens meet others' in each expert."""
    with golden_llm(name, max_num_seqs=3, max_num_batched_tokens=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def theirs(name: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.float32).eval()


@torch.inference_mode()
def test_beams_are_those_of_transformers(llm: LLM, theirs: PreTrainedModel) -> None:
    width, length = 3, 8
    params = BeamSearchParams(beam_width=width, max_tokens=length)
    for prompt, found in zip(IDS, llm.beam_search(IDS, params), strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            early_stopping="never",
            max_new_tokens=length,
            pad_token_id=0,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        ours = [each.token_ids for each in found.sequences]
        assert ours == [
            row[len(prompt) :][: len(mine)]
            for row, mine in zip(expected.sequences.tolist(), ours, strict=True)
        ]
        scores = torch.tensor([each.score for each in found.sequences])
        torch.testing.assert_close(scores, expected.sequences_scores, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_outputs_of_one_prompt_have_the_log_probabilities_of_transformers(
    llm: LLM, theirs: PreTrainedModel
) -> None:
    params = SamplingParams(
        n=4, seed=7, max_tokens=6, ignore_eos=True, logprobs=5, prompt_logprobs=3
    )
    together = llm.generate(IDS, params)
    for prompt, found in zip(IDS, together, strict=True):
        alone = llm.generate(prompt, params)[0]
        assert [each.token_ids for each in alone.outputs] == [
            each.token_ids for each in found.outputs
        ]
        assert len({tuple(each.token_ids) for each in found.outputs}) > 1
        for each in found.outputs:
            rows = theirs(torch.tensor([[*prompt, *each.token_ids]])).logits[0].log_softmax(-1)
            entries = [*(found.prompt_logprobs or ())[1:], *(each.logprobs or ())]
            assert len(entries) == len(rows) - 1
            for row, entry in zip(rows, entries, strict=False):
                assert entry
                for token, value in entry.items():
                    assert abs(value.logprob - row[token].item()) < 1e-4
