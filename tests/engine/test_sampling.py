"""Sampling parameters through the whole engine, against transformers on the same weights."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_fixtures import GOLDEN, SETTINGS, golden_prompts
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.check import check_model
from engine_core.configs.sampling import BeamSearchParams, GuidedParams
from engine_core.errors import ConfigError, RequestError

MODEL = str(GOLDEN / "llama-gqa")
VOCAB = 320
PAD = 1
PROMPTS = [prompt.input_ids for prompt in golden_prompts("llama-gqa")]
# Of 1, 13 and 20 tokens.
SHORT = [ids for ids in PROMPTS if len(ids) < 80][::2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, EngineConfig(skip_tokenizer_init=True, max_model_len=200)) as llm:
        yield llm
        assert not llm.engine.has_unfinished


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def generated(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def transformers_greedy(
    model: PreTrainedModel, prompt: list[int], max_tokens: int = 24, **settings: Any
) -> list[int]:
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **settings}
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=max_tokens, **settings)
    return ids[0, len(prompt) :].tolist()


def unpenalised(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    return list(_unpenalised(model, tuple(prompt)))


@functools.cache
def _unpenalised(model: PreTrainedModel, prompt: tuple[int, ...]) -> list[int]:
    return transformers_greedy(model, list(prompt))


# Ours, and the same for transformers' generate.
AGREEING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition": ({"repetition_penalty": 1.8}, {"repetition_penalty": 1.8}),
    "repetition below one": ({"repetition_penalty": 0.7}, {"repetition_penalty": 0.7}),
    "bias": (
        {"logit_bias": {5: 1.5, 17: 2.0, 300: -100.0}},
        {"sequence_bias": [[[5], 1.5], [[17], 2.0], [[300], -100.0]]},
    ),
    "allowed": (
        {"allowed_token_ids": range(100, 140)},
        {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(100, 140))},
    ),
    "bias, penalty and allowed": (
        {
            "logit_bias": {5: 2.0, 250: 3.0},
            "repetition_penalty": 1.3,
            "allowed_token_ids": range(120),
        },
        {
            "sequence_bias": [[[5], 2.0], [[250], 3.0]],
            "repetition_penalty": 1.3,
            "prefix_allowed_tokens_fn": lambda batch, ids: list(range(120)),
        },
    ),
}


@pytest.mark.parametrize(("ours", "theirs"), AGREEING.values(), ids=AGREEING.keys())
def test_greedy_tokens_are_those_of_transformers(
    llm: LLM, reference: PreTrainedModel, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    got = generated(llm, SHORT, GREEDY.replace(**ours))
    expected = [transformers_greedy(reference, ids, **theirs) for ids in SHORT]
    assert got == expected
    assert got != [unpenalised(reference, ids) for ids in SHORT]


def penalised_greedy(
    model: PreTrainedModel, prompt: list[int], frequency: float, presence: float, steps: int
) -> list[int]:
    """OpenAI's formula in plain Python, on transformers' logits."""
    output: list[int] = []
    for _ in range(steps):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, -1].tolist()
        scores = [
            logit - output.count(token) * frequency - (presence if token in output else 0.0)
            for token, logit in enumerate(logits)
        ]
        output.append(scores.index(max(scores)))
    return output


# A negative penalty repeats, a positive one avoids: both change what follows.
PENALTIES = [(0.2, 0.0), (0.0, 0.3), (-0.1, -0.2), (0.15, 0.1)]


@pytest.mark.parametrize(("frequency", "presence"), PENALTIES)
def test_openai_penalties_follow_their_formula(
    llm: LLM, reference: PreTrainedModel, frequency: float, presence: float
) -> None:
    params = GREEDY.replace(frequency_penalty=frequency, presence_penalty=presence)
    got = generated(llm, SHORT, params)
    assert got == [penalised_greedy(reference, ids, frequency, presence, 24) for ids in SHORT]
    assert got != [unpenalised(reference, ids) for ids in SHORT]


def test_bad_words_are_banned_at_their_last_token(llm: LLM, reference: PreTrainedModel) -> None:
    prompt = SHORT[0]
    free = unpenalised(reference, prompt)
    words = ((free[3],), (free[6], free[7]), (free[9], free[10], free[11]))
    got = generated(llm, [prompt], GREEDY.replace(bad_words=words))[0]
    # transformers also bans a word that begins in the prompt; one without these tokens shows the
    # same as vLLM's rule.
    assert not {free[6], free[9]} & set(prompt[-2:])
    expected = transformers_greedy(reference, prompt, bad_words_ids=[list(w) for w in words])
    assert got == expected
    assert got != free


def everything() -> list[SamplingParams]:
    """Parameters of every kind, those that need the host and those that do not."""

    def cap(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(0, torch.tensor([len(output) % VOCAB]), -torch.inf)

    base = SamplingParams(max_tokens=24, ignore_eos=True, seed=3)
    return [
        base.replace(repetition_penalty=1.5, frequency_penalty=0.5),
        base.replace(bad_words=[[token] for token in range(160)]),
        base.replace(bad_words=[[a, b] for a in range(160) for b in range(a, 160, 7)], top_k=9),
        base.replace(logits_processors=[cap], temperature=0.0, presence_penalty=0.8),
        base.replace(logit_bias={5: 4.0, 6: 4.0}, allowed_token_ids=range(60), top_p=0.8),
        base.replace(min_tokens=20, stop_token_ids=range(0, 300, 3), temperature=0.0),
    ]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The result of each of :func:`everything` by itself for each short prompt."""
    with LLM(MODEL, skip_tokenizer_init=True, max_num_seqs=1, enable_prefix_caching=False) as llm:
        prompts, params = crossed()
        return [generated(llm, [p], q)[0] for p, q in zip(prompts, params, strict=True)]


def crossed() -> tuple[list[list[int]], list[SamplingParams]]:
    pairs = [(prompt, params) for prompt in SHORT for params in everything()]
    return [prompt for prompt, _ in pairs], [params for _, params in pairs]


# One by one they are alone.
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=name, marks=pytest.mark.long if name == "one-by-one" else ())
        for name, settings in SETTINGS.items()
    ],
)
def test_no_setting_of_the_engine_shows_in_the_tokens(
    settings: dict[str, Any], alone: list[list[int]]
) -> None:
    with LLM(MODEL, skip_tokenizer_init=True, max_model_len=160, **settings) as llm:
        assert generated(llm, *crossed()) == alone


@pytest.mark.parametrize("depth", [0, 2])
def test_preemption_and_steps_in_flight_do_not_show(depth: int, alone: list[list[int]]) -> None:
    with LLM(MODEL, skip_tokenizer_init=True, max_model_len=160) as llm:
        one_token = llm.engine.cache_plan.bytes_per_block // 16
    config = EngineConfig(
        skip_tokenizer_init=True,
        max_model_len=160,
        block_size=4,
        kv_cache_memory=one_token * 4 * 41,
        max_num_batched_tokens=256,
    )
    with LLM(MODEL, config) as llm:
        # On a CPU no step is left in flight by itself.
        llm.engine.core.pacing.depth = depth
        outputs = llm.generate(*crossed())
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert [output.outputs[0].token_ids for output in outputs] == alone


def test_repeats_do_not_show(alone: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that the host has no part in are repeated by fours."""
    prompts, params = crossed()
    chosen = [index for index, each in enumerate(params) if not each.needs_host]
    lengths = [(5, 14, 24)[index % 3] for index in chosen]
    repeats = []
    with LLM(MODEL, skip_tokenizer_init=True, max_model_len=160) as llm:
        scheduler = llm.engine.scheduler
        scheduler.config = scheduler.config.replace(max_repeat=4)
        scheduler.repeat_limit = 4
        cut = [
            params[index].replace(
                max_tokens=length, min_tokens=min(length, params[index].min_tokens)
            )
            for index, length in zip(chosen, lengths, strict=True)
        ]
        submit = llm.engine.core.executor.submit
        monkeypatch.setattr(
            llm.engine.core.executor,
            "submit",
            lambda plan: repeats.append(plan.repeat) or submit(plan),
        )
        got = generated(llm, [prompts[index] for index in chosen], cut)
    assert max(repeats) == 4
    for index, length, tokens in zip(chosen, lengths, got, strict=True):
        # With fewer tokens than min_tokens bans hold to the end, as they do for the longer one.
        assert tokens == alone[index][:length]


def test_every_logprob_can_be_asked_for(llm: LLM) -> None:
    prompt = golden_prompts("llama-gqa")[2]
    params = GREEDY.replace(
        max_tokens=2, logprobs=-1, prompt_logprobs=-1, repetition_penalty=1.5, bad_words=[[7]]
    )
    (output,) = llm.generate(prompt.input_ids, params)
    entry = output.outputs[0].logprobs[0]
    assert set(entry) == set(range(VOCAB))
    got = torch.tensor([entry[token].logprob for token in range(VOCAB)])
    torch.testing.assert_close(got, prompt.step_logits[0].log_softmax(-1), atol=1e-4, rtol=0)
    assert all(len(item) == VOCAB for item in output.prompt_logprobs[1:])


def test_completions_of_one_request_have_their_own_penalties_and_seeds(llm: LLM) -> None:
    params = SamplingParams(
        n=3, seed=11, max_tokens=20, ignore_eos=True, frequency_penalty=1.0, bad_words=[[4], [5, 6]]
    )
    (together,) = llm.generate(SHORT[1], params)
    for index, completion in enumerate(together.outputs):
        hashed = hashlib.blake2b(f"11#{index}".encode(), digest_size=8).digest()
        seed = int.from_bytes(hashed, "big") >> 1 if index else 11
        single = generated(llm, [SHORT[1]], params.replace(n=1, seed=seed))[0]
        assert completion.token_ids == single


def test_neighbouring_seeds_share_no_completion(llm: LLM) -> None:
    params = SamplingParams(n=4, max_tokens=12, ignore_eos=True)
    runs = [params.replace(seed=seed) for seed in (0, 1, 2, 3)]
    outputs = llm.generate([SHORT[1]] * 4, runs)
    completions = {tuple(c.token_ids) for output in outputs for c in output.outputs}
    assert len(completions) == 16


def test_a_failing_processor_ends_its_request_and_no_other(llm: LLM) -> None:
    def fail_later(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output) == 3:
            raise ValueError("three is too many")
        return logits

    failed, fine = llm.generate(SHORT[:2], [GREEDY.replace(logits_processors=[fail_later]), GREEDY])
    (completion,) = failed.outputs
    assert completion.finish_reason == "error"
    assert "fail_later failed: ValueError: three is too many" in completion.error
    assert len(completion.token_ids) == 3
    assert len(fine.outputs[0].token_ids) == 24


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bias": ({"logit_bias": {3: 1.0, 320: 1.0}}, r"logit_bias \[320\] are outside the vocabulary"),
    "allowed": ({"allowed_token_ids": [-1, 5]}, r"allowed_token_ids \[-1\]"),
    "bad ids": ({"bad_words": [[3, 999]]}, r"bad_words \[999\]"),
    "bad words": ({"bad_words": ["hello"]}, "bad_words as text need a tokenizer"),
    "logprobs": ({"logprobs": 321}, "logprobs 321 is above the vocabulary of 320; -1"),
    "prompt logprobs": ({"prompt_logprobs": 400}, "prompt_logprobs 400"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_the_model_cannot_serve_is_refused(
    llm: LLM, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(SHORT[0], GREEDY.replace(**settings))
    assert not llm.engine.has_unfinished


SENSELESS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 0.0},
    "presence_penalty": {"presence_penalty": 2.1},
    "frequency_penalty": {"frequency_penalty": -2.1},
    "logit_bias above": {"logit_bias": {1: 100.5}},
    "logit_bias below": {"logit_bias": {1: -101}},
    "logit_bias nan": {"logit_bias": {1: float("nan")}},
    "logit_bias key": {"logit_bias": {"a": 1.0}},
    "allowed_token_ids": {"allowed_token_ids": []},
    "bad_words": {"bad_words": [""]},
    "bad_words ids": {"bad_words": [[]]},
    "logits_processors": {"logits_processors": [3]},
    "logits_processors form": {"logits_processors": [lambda logits: logits]},
    "prompt_logprobs": {"prompt_logprobs": -2},
    "temperature text": {"temperature": "0.5"},
    "top_p truth value": {"top_p": True},
    "max_tokens truth value": {"max_tokens": True},
    "max_tokens fraction": {"max_tokens": 1.5},
    "n text": {"n": "2"},
    "seed text": {"seed": "0"},
    "stop_token_ids text": {"stop_token_ids": ["5"]},
    "stop_token_ids truth value": {"stop_token_ids": (5, True)},
    "bad_words truth value": {"bad_words": [[True]]},
    "logit_bias text": {"logit_bias": {1: "2.0"}},
}


@pytest.mark.parametrize("settings", SENSELESS.values(), ids=SENSELESS.keys())
def test_senseless_parameters_are_refused_by_name(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=f"SamplingParams.{name}"):
        SamplingParams(**settings)


def test_whole_numbers_are_numbers() -> None:
    params = SamplingParams(temperature=1, top_p=1, logit_bias={3: 2}, stop_token_ids=[5])
    assert (params.temperature, params.top_p) == (1.0, 1.0)
    assert (params.logit_bias, params.stop_token_ids) == ({3: 2.0}, (5,))
    with pytest.raises(ConfigError, match=r"BeamSearchParams.beam_width: a number.*got '2'"):
        BeamSearchParams(beam_width="2", max_tokens=3)


def test_the_checkpoints_own_penalty_is_a_default(tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(GOLDEN / "llama-gqa" / file)
    (tmp_path / "generation_config.json").write_text(
        '{"repetition_penalty": 1.8, "do_sample": false, "max_new_tokens": 24}'
    )
    with LLM(str(tmp_path), skip_tokenizer_init=True) as llm:
        params = llm.default_sampling_params()
        assert params == SamplingParams(temperature=0.0, repetition_penalty=1.8, max_tokens=24)


def with_generation_config(folder: Path, **values: Any) -> Path:
    """A checkpoint that recommends ``values``."""
    for file in ("config.json", "model.safetensors"):
        (folder / file).symlink_to(GOLDEN / "llama-gqa" / file)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": -5, "top_p": 7}, ["temperature: .*got -5", "top_p: .*got 7"]),
        ({"temperature": "0.5"}, ["temperature: .*got '0.5'"]),
        ({"do_sample": "no"}, ["do_sample: true or false is expected, got 'no'"]),
        ({"max_new_tokens": True}, ["max_new_tokens: .*got True"]),
        ({"suppress_tokens": 5}, ["suppress_tokens: a list is expected, got 5"]),
        ({"bad_words_ids": [3]}, [r"bad_words_ids: .*got \[3\]"]),
        ({"min_new_tokens": -1}, ["min_new_tokens: .*got -1"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_senseless_generation_config_is_refused_at_start_up(
    tmp_path: Path, values: dict[str, Any], says: list[str]
) -> None:
    folder = with_generation_config(tmp_path, **values)
    with pytest.raises(ConfigError) as caught:
        LLM(str(folder), skip_tokenizer_init=True)
    report = check_model(folder, EngineConfig(skip_tokenizer_init=True))
    (problem,) = [p for p in report.problems if p.code == "generation-config-invalid"]
    assert problem.severity == "error"
    for message in says:
        assert re.search(f"generation_config.json: {message}", str(caught.value))
        assert re.search(f"generation_config.json: {message}", problem.message)


def test_tokens_that_the_checkpoint_suppresses_never_come(
    tmp_path: Path, reference: PreTrainedModel
) -> None:
    first, second = unpenalised(reference, SHORT[0])[:2]
    suppressed: dict[str, Any] = {
        "suppress_tokens": [first],
        "bad_words_ids": [[second], [first]],
    }
    expected = transformers_greedy(reference, SHORT[0], **suppressed)
    assert not {first, second} & {*expected}
    # One that nobody can generate.
    suppressed["suppress_tokens"].append(VOCAB)
    folder = with_generation_config(tmp_path, do_sample=False, max_new_tokens=24, **suppressed)
    with LLM(str(folder), skip_tokenizer_init=True) as llm:
        params = llm.default_sampling_params().replace(ignore_eos=True)
        assert generated(llm, [SHORT[0]], params) == [expected]


def test_bad_words_of_several_tokens_that_the_checkpoint_names(
    tmp_path: Path, reference: PreTrainedModel
) -> None:
    """Among single ones, one that nobody can generate, and an end, which none may forbid."""
    prompt = SHORT[0]
    free = unpenalised(reference, prompt)
    ends = [2]
    words = [[free[3]], ends, [free[6], free[7]], [free[9], free[10], free[11]]]
    # What begins in the prompt is banned by transformers alone.
    assert not {free[6], free[9]} & set(prompt[-2:])
    expected = transformers_greedy(reference, prompt, bad_words_ids=words, eos_token_id=ends)
    assert expected != free
    folder = with_generation_config(
        tmp_path,
        do_sample=False,
        max_new_tokens=24,
        bad_words_ids=[*words, [free[0], VOCAB]],
        eos_token_id=ends,
    )
    with LLM(str(folder), skip_tokenizer_init=True) as llm:
        params = llm.default_sampling_params()
        assert tuple(ends) not in params.bad_words
        assert generated(llm, [prompt], params.replace(ignore_eos=True)) == [expected]
        # A request's own words take their place.
        params = llm.default_sampling_params(bad_words=(), ignore_eos=True)
        assert generated(llm, [prompt], params) == [free]


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize(
    "more",
    [{}, pytest.param({"min_length": 1}, marks=pytest.mark.long), {"max_new_tokens": 6}],
    ids=str,
)
def test_the_checkpoints_own_minimum_is_that_of_transformers(
    tmp_path: Path,
    reference: PreTrainedModel,
    caplog: pytest.LogCaptureFixture,
    more: dict[str, int],
) -> None:
    """With many tokens that end a sequence, so that one comes early; max_tokens go before."""
    ends = [2, *range(3, VOCAB, 8)]
    settings: dict[str, Any] = {"eos_token_id": ends, "do_sample": False, "min_new_tokens": 9}
    lengths = [more["max_new_tokens"]] if "max_new_tokens" in more else [4, 8, 9, 24]
    expected = {
        (number, length): transformers_greedy(
            reference, prompt, length, min_new_tokens=9, eos_token_id=ends
        )
        for number, prompt in enumerate(SHORT)
        for length in lengths
    }
    folder = with_generation_config(tmp_path, **settings, **more)
    with LLM(str(folder), skip_tokenizer_init=True) as llm:
        for length in lengths:
            given = {} if more.get("max_new_tokens") == length else {"max_tokens": length}
            params = llm.default_sampling_params(**given)
            for number, tokens in enumerate(generated(llm, SHORT, params)):
                assert tokens == expected[number, length]
        short = generated(llm, SHORT, llm.default_sampling_params(min_tokens=0))
        assert min(map(len, short)) < min(9, *lengths)
        if not more:
            # Our own 16 are no reason to end before.
            assert llm.default_sampling_params().min_tokens == 9
            assert llm.default_sampling_params(max_tokens=None).min_tokens == 9
            # A guided text ends where it is complete; both asked for contradict each other.
            digits = GuidedParams(regex="[0-9]")
            assert llm.default_sampling_params(guided=digits).min_tokens == 0
            with pytest.raises(ConfigError, match="min_tokens cannot be kept by a guided text"):
                llm.default_sampling_params(guided=digits, min_tokens=2)
            with pytest.raises(ConfigError, match=r"min_tokens \(5\) is above max_tokens \(3\)"):
                llm.default_sampling_params(max_tokens=3, min_tokens=5)
            with pytest.raises(ConfigError, match=r"SamplingParams.max_tokens: .*got 0$"):
                llm.default_sampling_params(max_tokens=0)
    assert not [r for r in caplog.records if "generation_config" in r.getMessage()]


def test_keys_that_are_not_read_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unread = {
        "no_repeat_ngram_size": 3,
        "num_beams": 4,
        "min_length": 5,
        "forced_bos_token_id": 0,
        "bad_words_ids": [[3, 4]],
        "typical_p": 0.9,
    }
    folder = with_generation_config(tmp_path, **unread, max_length=4096, transformers_version="4")
    with LLM(str(folder), skip_tokenizer_init=True) as llm:
        for _ in range(2):
            llm.generate([3, 4])
    (said,) = [r.getMessage() for r in caplog.records if "generation_config" in r.getMessage()]
    report = check_model(folder, EngineConfig(skip_tokenizer_init=True))
    (problem,) = [p for p in report.problems if p.code == "generation-config-unread"]
    assert problem.severity == "warning"
    for name, value in unread.items():
        assert f"{name} {value!r}" in said
        assert f"{name} {value!r}" in problem.message
    assert "bad_words_ids [[3, 4]]: a word of several tokens is kept out of the output" in said
    assert "max_length" not in said


def test_keys_that_are_off_give_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file that transformers 4 wrote for a GenerationConfig in which nothing was set."""
    off = {
        "bad_words_ids": None,
        "begin_suppress_tokens": None,
        "diversity_penalty": 0.0,
        "do_sample": False,
        "early_stopping": False,
        "encoder_no_repeat_ngram_size": 0,
        "encoder_repetition_penalty": 1.0,
        "epsilon_cutoff": 0.0,
        "eta_cutoff": 0.0,
        "force_words_ids": None,
        "forced_eos_token_id": None,
        "guidance_scale": None,
        "length_penalty": 1.0,
        "max_length": 20,
        "min_length": 0,
        "no_repeat_ngram_size": 0,
        "num_beam_groups": 1,
        "num_beams": 1,
        "num_return_sequences": 1,
        "renormalize_logits": False,
        "repetition_penalty": 1.0,
        "sequence_bias": None,
        "suppress_tokens": None,
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 1.0,
        "typical_p": 1.0,
        "use_cache": True,
    }
    folder = with_generation_config(tmp_path, **off)
    with LLM(str(folder), skip_tokenizer_init=True) as llm:
        assert llm.default_sampling_params() == SamplingParams(temperature=0.0, top_k=50)
    assert not [r for r in caplog.records if "generation_config" in r.getMessage()]


BEAMS: dict[str, dict[str, Any]] = {
    "two": {"beam_width": 2, "max_tokens": 8},
    "five": {"beam_width": 5, "max_tokens": 12},
    "long": {"beam_width": 3, "max_tokens": 12, "length_penalty": 2.0},
    "short": {"beam_width": 3, "max_tokens": 12, "length_penalty": -1.0},
    "sum": {"beam_width": 4, "max_tokens": 10, "length_penalty": 0.0},
    "past the end": {"beam_width": 3, "max_tokens": 10, "ignore_eos": True},
    "one token": {"beam_width": 4, "max_tokens": 1},
}


@pytest.mark.parametrize(
    ("settings", "num_eos"),
    [
        # Each with few ends or with many, in turn.
        pytest.param(
            settings,
            (1, 40)[many],
            id=f"{name}-{('one end', 'many ends')[many]}",
            marks=() if index % 2 == many else pytest.mark.long,
        )
        for index, (name, settings) in enumerate(BEAMS.items())
        for many in (False, True)
    ],
)
def test_beam_search_is_that_of_transformers(
    reference: PreTrainedModel, settings: dict[str, Any], num_eos: int
) -> None:
    """With one end-of-sequence token few sequences end, with many most do."""
    params = BeamSearchParams(**settings)
    ends = list(range(3, VOCAB, VOCAB // num_eos))[:num_eos]
    prompts = SHORT[:3]
    with LLM(MODEL, skip_tokenizer_init=True, hf_overrides={"eos_token_id": ends}) as llm:
        outputs = llm.beam_search(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        width = params.beam_width
        found = reference.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping="never",
            do_sample=False,
            eos_token_id=None if params.ignore_eos else ends,
            pad_token_id=PAD,
            output_scores=True,
            return_dict_in_generate=True,
        )
        assert output.prompt_token_ids == prompt
        assert len(output.sequences) == width
        for sequence, ids, score in zip(
            output.sequences, found.sequences, found.sequences_scores, strict=True
        ):
            length = len(sequence.token_ids)
            assert ids[len(prompt) : len(prompt) + length].tolist() == sequence.token_ids
            assert set(ids[len(prompt) + length :].tolist()) <= {PAD}
            assert sequence.score == pytest.approx(float(score), rel=1e-5)
            ended = sequence.token_ids[-1] in ends and not params.ignore_eos
            assert sequence.finish_reason == ("stop" if ended else "length")


def test_beam_search_refuses_what_it_cannot_serve(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=2)
    with pytest.raises(RequestError, match="prompt 1: token 320"):
        llm.beam_search([[1], [320]], params)
    with pytest.raises(RequestError, match="prompt 0: 200 tokens"):
        llm.beam_search([[1] * 200], params)
    (output,) = llm.beam_search([[1] * 199], params)
    assert [len(sequence.token_ids) for sequence in output.sequences] == [1, 1]
    with pytest.raises(ConfigError, match="beam_width"):
        BeamSearchParams(beam_width=0, max_tokens=2)


@pytest.mark.parametrize("penalty", [1000, -1000, 10.1, -10.1])
def test_a_length_penalty_beyond_a_floats_range_is_refused(penalty: float) -> None:
    with pytest.raises(
        ConfigError, match=r"BeamSearchParams.length_penalty: .* equal to -?10, got"
    ):
        BeamSearchParams(beam_width=2, max_tokens=2, length_penalty=penalty)


@pytest.mark.parametrize("penalty", [10, pytest.param(-10, marks=pytest.mark.long)])
def test_the_greatest_length_penalty_can_be_computed(llm: LLM, penalty: float) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=190, length_penalty=penalty, ignore_eos=True)
    (output,) = llm.beam_search([[1] * 9], params)
    for sequence in output.sequences:
        # 190 tokens to the tenth is about 6e22.
        length = len(sequence.token_ids)
        assert sequence.score == pytest.approx(sequence.cumulative_logprob / length**penalty)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Iterator[LLM]:
    config = EngineConfig(dtype="float32", kv_cache_memory="256MiB", max_model_len=512)
    with LLM(str(smollm2_gguf), config) as llm:
        yield llm


TEXT = SamplingParams(temperature=0.0, max_tokens=16)
COUNTING = "1, 2, 3, 4, 5, 6,"


def text_of(llm: LLM, prompt: str, params: SamplingParams) -> str:
    return llm.generate(prompt, params)[0].outputs[0].text


def test_bad_words_stay_out_of_the_text(smollm2: LLM) -> None:
    """Each is what the model would say next; one is written without the space before it."""
    prompt = "The capital of France is"
    said = text_of(smollm2, prompt, TEXT)
    assert said.startswith(" Paris")
    for words in (["Paris"], [" Paris"], ["Paris", "the city"]):
        without = text_of(smollm2, prompt, TEXT.replace(bad_words=words))
        assert without
        assert not any(word.strip() in without for word in words)
    # Several tokens in a row.
    phrase = " ".join(said.split()[:3])
    assert len(smollm2.tokenizer.encode(f" {phrase}")) > 2
    without = text_of(smollm2, prompt, TEXT.replace(bad_words=[phrase]))
    assert phrase not in without
    assert without.startswith(" Paris")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_is_left_in_if_asked_for(smollm2: LLM, include: bool) -> None:
    free = text_of(smollm2, COUNTING, TEXT)
    before, stop = free.split("9,")[0], "9,"
    params = TEXT.replace(stop=[stop], include_stop_str_in_output=include)
    streamed = [output.outputs[0].text for output in smollm2.stream(COUNTING, params)]
    assert streamed[-1] == before + (stop if include else "")
    assert all(late.startswith(early) for early, late in pairwise(streamed))


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_a_stop_token_is_left_in_if_asked_for(smollm2: LLM, include: bool, skip: bool) -> None:
    (comma,) = smollm2.tokenizer.encode(",")
    params = TEXT.replace(
        stop_token_ids=[comma], include_stop_str_in_output=include, skip_special_tokens=skip
    )
    assert text_of(smollm2, "1, 2, 3, 4", params) == ("," if include else "")
    end = smollm2.engine.eos_token_ids[0]
    forced = params.replace(allowed_token_ids=[end], stop_token_ids=[])
    name = smollm2.tokenizer.id_to_token(end)
    expected = name if include and not skip else ""
    assert text_of(smollm2, COUNTING, forced) == expected


def test_beam_search_gives_text(smollm2: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    (output,) = smollm2.beam_search("The capital of France is", params)
    best, second = output.sequences
    assert "Paris" in best.text
    assert best.score > second.score
    assert best.text != second.text
