"""The tokens that a model's last layer computes: those that are sampled, unless more are wanted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from golden_fixtures import check_output, golden_llm, golden_prompts, greedy_params
from torch import Tensor, nn

from engine_core import LLM
from engine_core.nn import DecoderLayer, GatedMLP, RMSNorm, RotaryCausalLM, SelfAttention
from engine_core.nn.blocks import FeedForward, may_end
from engine_core.step_context import BuildContext, building

NAME, LAYERS = "llama-gqa", 3
PROMPT = max(golden_prompts(NAME), key=lambda prompt: len(prompt.input_ids))
LENGTH = len(PROMPT.input_ids)
Rows = list[int]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """The number of tokens of each call of a feed-forward, layer by layer."""
    rows: Rows = []
    forward = FeedForward.forward

    def counted(self: FeedForward, x: Any, *then: Any) -> Any:
        rows.append(x.shape[1])
        return forward(self, x, *then)

    monkeypatch.setattr(FeedForward, "forward", counted)
    return rows


def parts(llm: LLM, kind: type[nn.Module]) -> Iterator[Any]:
    (model,) = llm.apply_model(lambda model: model)
    return (part for part in model.modules() if isinstance(part, kind))


def run(llm: LLM, rows: Rows, *, with_prompt: bool = False) -> Rows:
    """The tokens of each layer's feed-forward while a prompt is computed, whose answer is right."""
    rows.clear()
    (output,) = llm.generate(PROMPT.input_ids, greedy_params(NAME, with_prompt=with_prompt))
    check_output(output, PROMPT)
    # Sixteen tokens, of which the prompt gives the first.
    return rows[: -15 * LAYERS] if len(rows) > 15 * LAYERS else rows


SETTINGS: dict[str, Any] = {"device": "cpu", "eager": True, "enable_prefix_caching": False}
ALL = [LENGTH] * LAYERS


def test_the_last_layer_computes_the_sampled_token(rows: Rows) -> None:
    with golden_llm(NAME, **SETTINGS) as llm:
        assert run(llm, rows) == [*ALL[:-1], 1]


def test_a_chunk_that_samples_nothing_ends_with_keys_and_values(rows: Rows) -> None:
    with golden_llm(NAME, max_num_seqs=4, max_num_batched_tokens=8, **SETTINGS) as llm:
        whole, rest = divmod(LENGTH - 1, 8)
        expected = [8] * (LAYERS - 1) * whole + [rest + 1] * (LAYERS - 1) + [1]
        assert run(llm, rows) == expected


def test_rows_that_decode_beside_a_prompt_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = sorted(golden_prompts(NAME), key=lambda prompt: len(prompt.input_ids))
    params = greedy_params(NAME)
    seen: list[tuple[nn.Module, int]] = []
    forward = FeedForward.forward

    def noted(self: FeedForward, x: Any, *then: Any) -> Any:
        seen.append((self, x.shape[1]))
        return forward(self, x, *then)

    monkeypatch.setattr(FeedForward, "forward", noted)
    with golden_llm(NAME, max_num_seqs=4, max_num_batched_tokens=8, **SETTINGS) as llm:
        *_, last = parts(llm, GatedMLP)
        outputs = llm.generate([prompt.input_ids for prompt in prompts], params)
    for output, prompt in zip(outputs, prompts, strict=True):
        check_output(output, prompt)
    # Of a part of a prompt that samples nothing the last layer has none.
    assert sum(tokens for part, tokens in seen if part is last) == 16 * len(prompts)


def test_log_probabilities_of_a_prompt_take_all_of_it(rows: Rows) -> None:
    with golden_llm(NAME, **SETTINGS) as llm:
        assert run(llm, rows, with_prompt=True) == ALL
        assert run(llm, rows) == [*ALL[:-1], 1]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_model_computes_all(deterministic: bool) -> None:
    # There is none on a CPU, so only what the layer says is asked.
    context = BuildContext(device=torch.device("meta"), deterministic=deterministic)
    with building(context):
        layer = DecoderLayer(SelfAttention(8, 2, 1, 4), GatedMLP(8, 8), lambda: RMSNorm(8))
    assert may_end(layer) != deterministic


def test_a_hook_sees_all_tokens(rows: Rows) -> None:
    with golden_llm(NAME, **SETTINGS) as llm:
        *_, last = parts(llm, GatedMLP)
        handle = last.register_forward_hook(lambda *_: None)
        assert run(llm, rows) == ALL
        handle.remove()
        assert run(llm, rows) == [*ALL[:-1], 1]


def _halfway(self: Any, x: Any, *args: Any) -> Any:
    # As a family may write one whose tokens depend on each other.
    return super(type(self), self).forward(x, *args)


class OwnAttention(SelfAttention):
    forward = _halfway


class OwnMLP(GatedMLP):
    forward = _halfway


class OwnLayer(DecoderLayer):
    forward = _halfway


@pytest.mark.parametrize(
    ("part", "own"),
    [(SelfAttention, OwnAttention), (GatedMLP, OwnMLP), (DecoderLayer, OwnLayer)],
)
def test_a_part_with_a_forward_of_its_own_sees_all_tokens(
    part: type[nn.Module], own: type[nn.Module], rows: Rows
) -> None:
    with golden_llm(NAME, **SETTINGS) as llm:
        *_, last = parts(llm, part)
        last.__class__ = own
        for layer in parts(llm, DecoderLayer):
            layer.join()
        assert run(llm, rows) == ALL


def test_a_model_that_takes_no_such_argument_computes_all(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = RotaryCausalLM.forward

    def older(self: Any, input_ids: Tensor, position_ids: Tensor, **others: Any) -> Tensor:
        return forward(self, input_ids, position_ids, **others)

    monkeypatch.setattr(RotaryCausalLM, "forward", older)
    with golden_llm(NAME, **SETTINGS) as llm:
        assert run(llm, rows) == ALL
