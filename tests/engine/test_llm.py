"""The offline interface: what it takes, what it gives, and what it refuses."""

from __future__ import annotations

import gc
import json
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_fixtures import GOLDEN, golden_prompts
from random_examples import examples
from serving import write_tiny_model

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.configs.sampling import BeamSearchParams
from engine_core.errors import (
    CacheMemoryError,
    CheckpointNotFoundError,
    ConfigError,
    EngineDeadError,
    OptionError,
    PluginLoadError,
    RequestError,
    UnknownArchitectureError,
)
from engine_core.kernels.launch import gluon

MODEL = str(GOLDEN / "llama-gqa")
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPTS = golden_prompts("llama-gqa")
IDS = [prompt.input_ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, EngineConfig(skip_tokenizer_init=True, max_model_len=200)) as llm:
        yield llm
        # Whatever the tests did, nothing may be left behind.
        assert not llm.engine.has_unfinished
        assert llm.engine.scheduler.num_running == 0


def tokens(outputs: list) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.mark.parametrize(
    ("release", "level", "line"),
    [
        ("3.6.0", logging.INFO, "Hopper's kernels are on: Triton 3.6.0 ran them in tests on GPUs"),
        ("3.10.0", logging.WARNING, "Hopper's kernels are off: Triton 3.10.0 was not tried"),
        (None, logging.WARNING, "Hopper's kernels are off: Triton is not installed"),
    ],
)
def test_the_start_says_whether_hoppers_kernels_are_on(
    release: str | None,
    level: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(gluon, "is_hopper", lambda device: True)
    monkeypatch.setattr(gluon, "triton_release", lambda: release)
    caplog.set_level(logging.INFO, "engine_core")
    with LLM(MODEL, EngineConfig(skip_tokenizer_init=True, max_model_len=200)):
        pass
    (record,) = [each for each in caplog.records if "Hopper" in each.getMessage()]
    assert record.levelno == level
    assert record.getMessage().startswith(line)


@pytest.mark.parametrize(
    "prompts",
    [IDS[2], [IDS[2]], {"prompt_token_ids": IDS[2]}, [{"prompt_token_ids": IDS[2]}]],
    ids=["ids", "list of ids", "dictionary", "list of dictionaries"],
)
def test_every_form_of_prompt_is_taken(llm: LLM, prompts: object) -> None:
    (output,) = llm.generate(prompts, GREEDY)
    assert output.prompt is None
    assert output.prompt_token_ids == IDS[2]
    assert output.outputs[0].token_ids == PROMPTS[2].new_tokens
    assert output.outputs[0].text == ""
    assert output.finished


def test_progress_is_shown_on_standard_error_while_prompts_are_completed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    outputs = llm.generate([IDS[2], IDS[2]], GREEDY, progress=True)
    assert tokens(outputs) == [PROMPTS[2].new_tokens] * 2
    written, shown = capsys.readouterr()
    assert written == ""
    assert "generating" in shown
    assert "2/2" in shown
    llm.generate(IDS[2], GREEDY)
    assert capsys.readouterr() == ("", "")


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [GREEDY.replace(max_tokens=index + 1) for index in range(len(IDS))]
    outputs = llm.generate(IDS, params)
    for index, (output, prompt) in enumerate(zip(outputs, PROMPTS, strict=True)):
        assert output.outputs[0].token_ids == prompt.new_tokens[: index + 1]
    with pytest.raises(RequestError, match="6 prompts, but 1 sampling_params"):
        llm.generate(IDS, [GREEDY])


def test_streaming_yields_one_more_token_each_time(llm: LLM) -> None:
    lengths = []
    for output in llm.stream(IDS[3], GREEDY):
        assert output.outputs[0].token_ids == PROMPTS[3].new_tokens[: len(lengths) + 1]
        lengths.append(len(output.outputs[0].token_ids))
    assert lengths == list(range(1, 17))
    assert output.finished
    assert output.outputs[0].finish_reason == "length"


def test_a_stream_that_is_left_frees_its_request(llm: LLM) -> None:
    stream = llm.stream(IDS[3], GREEDY)
    next(stream)
    assert llm.engine.scheduler.num_running == 1
    stream.close()
    assert llm.engine.scheduler.num_running == 0
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
def test_a_stream_that_is_never_read_frees_its_request(llm: LLM, close: bool) -> None:
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    stream = llm.stream(IDS[3], endless)
    assert llm.engine.has_unfinished
    if close:
        stream.close()
        assert list(stream) == []
    else:
        del stream
        gc.collect()
    assert not llm.engine.has_unfinished
    assert tokens(llm.generate(IDS[2], GREEDY)) == [PROMPTS[2].new_tokens]


def test_two_streams_may_be_read_in_turn(llm: LLM) -> None:
    one = llm.stream(IDS[2], GREEDY)
    two = llm.stream(IDS[3], GREEDY)
    next(one)
    assert list(two)[-1].outputs[0].token_ids == PROMPTS[3].new_tokens
    assert list(one)[-1].outputs[0].token_ids == PROMPTS[2].new_tokens


@pytest.mark.parametrize("kind", ["end of sequence", "stop token"])
def test_a_stopping_token_ends_the_sequence_and_is_part_of_it(kind: str) -> None:
    prompt = PROMPTS[0]
    stop = prompt.new_tokens[5]
    end = prompt.new_tokens.index(stop)
    overrides = {"eos_token_id": stop} if kind == "end of sequence" else {}
    params = GREEDY.replace(
        ignore_eos=False, stop_token_ids=() if kind == "end of sequence" else (stop,)
    )
    with LLM(MODEL, EngineConfig(skip_tokenizer_init=True, hf_overrides=overrides)) as llm:
        (output,) = llm.generate(prompt.input_ids, params)
        (ignored,) = llm.generate(prompt.input_ids, GREEDY)
    assert output.outputs[0].token_ids == prompt.new_tokens[: end + 1]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == (None if kind == "end of sequence" else stop)
    assert ignored.outputs[0].token_ids == prompt.new_tokens


def test_min_tokens_forbids_the_stop_token_before(llm: LLM) -> None:
    prompt = PROMPTS[0]
    stop = prompt.new_tokens[0]
    params = GREEDY.replace(stop_token_ids=(stop,), min_tokens=5)
    (output,) = llm.generate(prompt.input_ids, params)
    assert stop not in output.outputs[0].token_ids[:5]
    assert len(output.outputs[0].token_ids) >= 5


def test_max_tokens_beyond_the_context_are_cut_and_min_tokens_refused(llm: LLM) -> None:
    room = 200 - len(IDS[2])
    (output,) = llm.generate(IDS[2], GREEDY.replace(max_tokens=1000, min_tokens=room))
    assert len(output.outputs[0].token_ids) == room
    assert output.outputs[0].finish_reason == "length"
    with pytest.raises(RequestError, match=f"min_tokens {room + 1} cannot be kept.* leaves {room}"):
        llm.generate(IDS[2], GREEDY.replace(max_tokens=1000, min_tokens=room + 1))


def test_a_seed_repeats_and_n_completions_differ(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=7, max_tokens=12, ignore_eos=True)
    (first,) = llm.generate(IDS[2], params)
    (second,) = llm.generate(IDS[2], params)
    assert tokens([first]) == tokens([second])
    assert [completion.index for completion in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(ids) for ids in tokens([first])}) == 4
    # The first of n is what n=1 gives, and its neighbours in the batch do not matter.
    (single,) = llm.generate(IDS[2], params.replace(n=1))
    assert single.outputs[0].token_ids == first.outputs[0].token_ids


def test_without_a_seed_runs_differ_but_an_engine_repeats_itself(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    assert tokens(llm.generate(IDS[2], params)) != tokens(llm.generate(IDS[2], params))
    config = EngineConfig(skip_tokenizer_init=True, seed=5)
    runs = []
    for _ in range(2):
        with LLM(MODEL, config) as fresh:
            runs.append(tokens(fresh.generate([IDS[2], IDS[3]], params)))
    assert runs[0] == runs[1]


def test_logprobs_are_the_models_own_whatever_the_sampling(llm: LLM) -> None:
    params = SamplingParams(
        temperature=2.0, top_k=3, seed=1, max_tokens=4, ignore_eos=True, logprobs=2
    )
    (output,) = llm.generate(IDS[2], params)
    completion = output.outputs[0]
    first = PROMPTS[2].step_logits[0].log_softmax(-1)
    entry = completion.logprobs[0]
    assert len(completion.logprobs) == 4
    assert set(first.topk(2).indices.tolist()) <= set(entry)
    for token, value in entry.items():
        assert value.logprob == pytest.approx(float(first[token]), abs=1e-4)
        assert value.decoded_token is None
    assert completion.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for e, t in zip(completion.logprobs, completion.token_ids, strict=True))
    )


REFUSED = {
    "empty": ([], "prompt"),
    "too long": ([1] * 200, "200"),
    "outside": ([1, 320], "token 320 at position 1"),
    "negative": ([-1, 3], "token -1 at position 0"),
    "text": ("Hello", "no tokenizer"),
    "keys": ({"prompt": "a", "prompt_token_ids": [1]}, "exactly one key"),
    "beyond 64 bits": ([3, 2**63], "token 9223372036854775808 at position 1"),
    "true": ([3, True], "token True at position 1"),
    "numpy": ([3, 4, np.int64(5)], r"token (np.int64\(5\)|5) at position 2"),
    "float": ([{"prompt_token_ids": [1.5]}], "token 1.5 at position 0"),
    "none": ([None], "text or a list of token ids"),
    "bytes": ([b"ab"], "text or a list of token ids, got bytes"),
    "bytearray": ([bytearray(b"ab")], "text or a list of token ids, got bytearray"),
    "text for ids": ({"prompt_token_ids": "Hi"}, "'prompt_token_ids'.* a list of .*, got str"),
    "ids for text": ({"prompt": [1, 2]}, "'prompt' of a prompt holds text, got list"),
}


@pytest.mark.parametrize(("prompt", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_prompt_is_refused_and_the_engine_serves_on(
    llm: LLM, prompt: object, message: str
) -> None:
    bad = (
        prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        else ([prompt])
    )
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate([IDS[2], *bad], GREEDY)
    assert "prompt 1:" in str(caught.value)
    assert not llm.engine.has_unfinished
    (output,) = llm.generate(IDS[2], GREEDY)
    assert output.outputs[0].token_ids == PROMPTS[2].new_tokens


@pytest.mark.parametrize("prompts", [b"hi", bytearray(b"hi"), 5, None])
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match=f"list of these, got {type(prompts).__name__}"):
        llm.generate(prompts, GREEDY)
    if prompts is not None:
        with pytest.raises(RequestError, match=f"token ids, got {type(prompts).__name__}"):
            llm.stream(prompts, GREEDY)


BEAM = BeamSearchParams(beam_width=2, max_tokens=2)
NO_PARAMETERS: dict[str, tuple[Callable[[LLM], Any], str]] = {
    "stream dictionary": (lambda llm: llm.stream([1], {}), r"sampling_params .*; got \{\}"),
    "stream list": (lambda llm: llm.stream([1], [GREEDY]), r"sampling_params .*; got \[Sampling"),
    "generate dictionary": (lambda llm: llm.generate([1], {}), r"prompt 0: .*; got \{\}"),
    "generate number": (lambda llm: llm.generate([[1], [2]], 5), "prompt 0: .*; got 5"),
    "generate element": (lambda llm: llm.generate([[1], [2]], [GREEDY, 0]), "prompt 1: .*; got 0"),
    "generate length": (lambda llm: llm.generate([1], []), "1 prompts, but 0 sampling_params"),
    "generate beams": (lambda llm: llm.generate([1], BEAM), "prompt 0: .*; got BeamSearchParams"),
    "beams none": (lambda llm: llm.beam_search([1], None), "a BeamSearchParams, got None"),
    "beams dictionary": (lambda llm: llm.beam_search([1], {}), r"a BeamSearchParams, got \{\}"),
    "beams number": (lambda llm: llm.beam_search([1], 5), "a BeamSearchParams, got 5"),
    "beams sampling": (lambda llm: llm.beam_search([1], GREEDY), "a BeamSearchParams, got Sampl"),
    "priority fraction": (
        lambda llm: llm.generate([1], GREEDY, priority=1.5),
        "prompt 0: priority must be an integer, got 1.5",
    ),
    "priority text": (
        lambda llm: llm.generate([[1]], GREEDY, priority="1"),
        "prompt 0: priority must be an integer, got '1'",
    ),
    "priority element": (
        lambda llm: llm.generate([[1], [2]], GREEDY, priority=[0, True]),
        "prompt 1: priority must be an integer, got True",
    ),
    "priority length": (
        lambda llm: llm.generate([[1], [2]], GREEDY, priority=[0]),
        "2 prompts, but 1 priorities",
    ),
}


@pytest.mark.parametrize(("call", "message"), NO_PARAMETERS.values(), ids=NO_PARAMETERS.keys())
def test_parameters_of_another_type_are_refused(
    llm: LLM, call: Callable[[LLM], Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        call(llm)
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("priority", [None, 3, np.int64(3), [0, np.int64(-1)]])
def test_whatever_is_an_integer_is_a_priority(llm: LLM, priority: Any) -> None:
    outputs = llm.generate([IDS[2], IDS[3]], GREEDY, priority=priority)
    assert tokens(outputs) == [PROMPTS[2].new_tokens, PROMPTS[3].new_tokens]


def test_stop_strings_without_a_tokenizer_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        llm.generate(IDS[2], GREEDY.replace(stop=("x",)))


def test_a_stop_token_outside_the_vocabulary_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"stop_token_ids \[320\]"):
        llm.generate(IDS[2], GREEDY.replace(stop_token_ids=(3, 320)))


def test_a_request_id_is_taken_once(llm: LLM) -> None:
    llm.engine.add_request(IDS[2], GREEDY, request_id="mine")
    with pytest.raises(RequestError, match="already a request 'mine'"):
        llm.engine.add_request(IDS[2], GREEDY, request_id="mine")
    output = llm.engine.abort("mine")
    assert output.outputs[0].finish_reason == "abort"
    assert llm.engine.abort("mine") is None


CHAT_ARGUMENTS = {
    "chat_template": ({"chat_template": 5}, "chat_template must be .*, got 5"),
    "add_generation_prompt": (
        {"add_generation_prompt": "x"},
        "add_generation_prompt must be true or false, got 'x'",
    ),
    "tools": ({"tools": 5}, "tools must be a list of JSON schemas, got int"),
    "messages": ({"messages": 5}, "messages must be a list"),
    "sampling_params": ({"sampling_params": 5}, "sampling_params must be a SamplingParams"),
}


@pytest.mark.parametrize(("given", "message"), CHAT_ARGUMENTS.values(), ids=CHAT_ARGUMENTS.keys())
def test_arguments_of_a_chat_of_another_type_are_refused_by_name(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with LLM(write_tiny_model(tmp_path), kv_cache_memory=2**20) as llm:
        arguments = {"messages": [{"role": "user", "content": "Hello"}], **given}
        with pytest.raises(RequestError, match=message):
            llm.chat(**arguments)
        with pytest.raises(RequestError, match=message):
            llm.stream_chat(**arguments)


def test_chat_without_a_tokenizer_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="cannot chat"):
        llm.chat([{"role": "user", "content": "Hello"}])


SENSELESS = {
    "temperature": {"temperature": -1},
    "temperature nan": {"temperature": float("nan")},
    "top_p": {"top_p": 0.0},
    "top_p above": {"top_p": 1.1},
    "top_k": {"top_k": -2},
    "min_p": {"min_p": 2},
    "n": {"n": 0},
    "max_tokens": {"max_tokens": 0},
    "min_tokens": {"max_tokens": 2, "min_tokens": 3},
    "stop": {"stop": ("",)},
    "logprobs": {"logprobs": -2},
    "seed": {"seed": -1},
    "unknown": {"best_of": 2},
}


@pytest.mark.parametrize("values", SENSELESS.values(), ids=SENSELESS.keys())
def test_senseless_sampling_parameters_are_refused_by_name(values: dict) -> None:
    with pytest.raises(ConfigError, match=next(reversed(values))):
        SamplingParams(**values)


def test_many_requests_give_what_each_gives_alone() -> None:
    count = examples(200)
    generator = torch.Generator().manual_seed(0)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    prompts = [
        torch.randint(0, 320, (integer(1, 150),), generator=generator).tolist()
        for _ in range(count)
    ]
    params = [
        SamplingParams(
            temperature=0.0 if index % 2 else 0.8,
            top_p=0.9,
            seed=index,
            max_tokens=integer(1, 30),
            ignore_eos=True,
        )
        for index in range(count)
    ]
    with LLM(MODEL, EngineConfig(skip_tokenizer_init=True, max_num_seqs=count)) as llm:
        together = tokens(llm.generate(prompts, params))
    config = EngineConfig(skip_tokenizer_init=True, max_num_seqs=1, enable_prefix_caching=False)
    with LLM(MODEL, config) as llm:
        alone = [tokens(llm.generate(p, q))[0] for p, q in zip(prompts, params, strict=True)]
    assert together == alone


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_steps_repeated_on_the_runner_give_the_same(
    temperature: float, logprobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = GREEDY.replace(temperature=temperature, seed=11, logprobs=logprobs, max_tokens=13)
    results = []
    for repeat in (1, 4):
        with LLM(MODEL, skip_tokenizer_init=True) as llm:
            scheduler = llm.engine.scheduler
            scheduler.config = scheduler.config.replace(max_repeat=repeat)
            scheduler.repeat_limit = repeat
            repeats = []
            submit = llm.engine.core.executor.submit
            monkeypatch.setattr(
                llm.engine.core.executor,
                "submit",
                lambda plan, submit=submit, repeats=repeats: (
                    repeats.append(plan.repeat) or submit(plan)
                ),
            )
            results.append(llm.generate(IDS, params))
            # A prefill, then twelve decode steps.
            assert repeats == ([1] * 13 if repeat == 1 else [1, 4, 4, 4])
    assert tokens(results[0]) == tokens(results[1])
    for one, two in zip(*results, strict=True):
        assert one.outputs[0].logprobs == two.outputs[0].logprobs


def test_closing_frees_the_model_and_refuses_more_work() -> None:
    llm = LLM(MODEL, skip_tokenizer_init=True)
    (model,) = llm.apply_model(weakref.ref)
    llm.close()
    gc.collect()
    assert model() is None
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate(IDS[0], GREEDY)
    llm.close()


def test_every_way_to_work_says_that_the_engine_was_closed() -> None:
    llm = LLM(MODEL, skip_tokenizer_init=True)
    running = llm.stream(IDS[2], GREEDY)
    llm.close()
    search = BeamSearchParams(beam_width=2, max_tokens=2)
    ways: list[Callable[[], object]] = [
        lambda: llm.generate([]),
        lambda: llm.stream(IDS[2]),
        lambda: llm.chat([{"role": "user", "content": "Hello"}]),
        lambda: llm.stream_chat([{"role": "user", "content": "Hello"}]),
        lambda: llm.beam_search(IDS[2], search),
        lambda: llm.engine.add_request(IDS[2]),
        lambda: llm.engine.step(),
        lambda: llm.engine.trace_layers(),
        lambda: llm.warmup(),
        lambda: llm.apply_model(id),
        lambda: next(running),
    ]
    for way in ways:
        with pytest.raises(EngineDeadError, match="the engine was closed"):
            way()
    assert llm.engine.abort("request-0") is None


def test_a_failing_model_ends_the_engine_with_its_root_cause() -> None:
    class StrikeError(RuntimeError):
        pass

    def fail(*args: object, **kwargs: object) -> None:
        raise StrikeError("the tensor cores are on strike")

    with LLM(MODEL, skip_tokenizer_init=True) as llm:
        llm.apply_model(lambda model: setattr(model, "forward", fail))
        with pytest.raises(
            EngineDeadError, match="StrikeError: the tensor cores are on strike"
        ) as caught:
            llm.generate(IDS[0], GREEDY)
        assert isinstance(caught.value.__cause__, StrikeError)
        with pytest.raises(EngineDeadError, match="tensor cores"):
            llm.generate(IDS[0], GREEDY)


def test_dummy_weights_need_no_file_and_depend_on_the_seed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((GOLDEN / "llama-gqa" / "config.json").read_text())
    params = GREEDY.replace(logprobs=1)

    def logprob(seed: int) -> float:
        config = EngineConfig(load_format="dummy", skip_tokenizer_init=True, seed=seed)
        with LLM(str(tmp_path), config) as llm:
            return llm.generate([1, 2, 3], params)[0].outputs[0].cumulative_logprob

    assert logprob(0) == logprob(0)
    assert logprob(0) != logprob(1)


def test_hf_overrides_reach_the_model() -> None:
    config = EngineConfig(skip_tokenizer_init=True, hf_overrides={"rms_norm_eps": 0.5})
    with LLM(MODEL, config) as llm:
        assert llm.model_config.hf_config.rms_norm_eps == 0.5
        assert tokens(llm.generate(IDS[2], GREEDY)) != [PROMPTS[2].new_tokens]


def test_an_unknown_architecture_is_refused() -> None:
    config = EngineConfig(hf_overrides={"architectures": ["NobodyForCausalLM"]})
    with pytest.raises(UnknownArchitectureError, match="NobodyForCausalLM"):
        LLM(MODEL, config)


def test_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(CheckpointNotFoundError, match="no-such-folder"):
        LLM("./no-such-folder")


@pytest.mark.parametrize("model", [5, b"x", None])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match=f"path of .* or a hub id, as text; got {model!r}"):
        LLM(model)


@pytest.mark.parametrize("config", [{"dtype": "auto"}, {}, 5])
def test_what_is_no_config_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match="config must be an EngineConfig, got "):
        LLM(MODEL, config)


def test_a_revision_of_what_is_on_this_machine_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    with pytest.raises(
        OptionError, match=f"revision 'main' is for a hub id, but the model '{folder}"
    ):
        LLM(folder, revision="main")
    with pytest.raises(OptionError, match=f"the model '{folder}' and the tokenizer '{tmp_path}'"):
        LLM(folder, revision="main", tokenizer=str(tmp_path))


def test_a_tokenizer_that_is_not_to_be_read_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer names 'x', and skip_tokenizer_init says"):
        EngineConfig(tokenizer="x", skip_tokenizer_init=True)


@pytest.mark.parametrize("name", ["tokenizer", "revision"])
def test_an_empty_name_in_a_config_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"EngineConfig\.{name}: .*, got ''"):
        EngineConfig(**{name: ""})


def test_a_tokenizer_that_is_not_there_is_called_one(tmp_path: Path) -> None:
    missing = tmp_path / "no-such-folder"
    with pytest.raises(CheckpointNotFoundError, match=f"^tokenizer: '{missing}' does not exist"):
        LLM(MODEL, tokenizer=str(missing))


def test_a_path_is_a_model() -> None:
    with LLM(GOLDEN / "llama-gqa", skip_tokenizer_init=True) as llm:
        assert tokens(llm.generate(IDS[2], GREEDY)) == [PROMPTS[2].new_tokens]


INTEGERS = [
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_memory",
    "swap_space",
    "tensor_parallel_size",
    "seed",
]


@pytest.mark.parametrize("name", INTEGERS)
def test_a_truth_value_is_no_number_of_a_config(name: str) -> None:
    for value in (True, b"1"):
        with pytest.raises(ConfigError, match=f"EngineConfig.{name}: a number .*, got {value!r}"):
            EngineConfig(**{name: value})
    assert getattr(EngineConfig(**{name: 1}), name) == 1


# Python writes out no number of so many digits.
BEYOND = 10**5000
LOOP: dict[str, Any] = {}
LOOP["itself"] = LOOP


@pytest.mark.parametrize("name", INTEGERS)
def test_a_number_without_end_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"EngineConfig\.{name}: .*, got a value of type int"):
        EngineConfig(**{name: BEYOND})


@pytest.mark.parametrize("size", ["1" * 5000, "1" * 400 + "GiB", f"0.{'1' * 400}GB"])
def test_a_size_without_end_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match=rf"kv_cache_memory: a size is .*, got '{size[:100]}"):
        EngineConfig(kv_cache_memory=size)


@pytest.mark.parametrize(
    "value",
    [
        {"n": BEYOND},
        {"seed": BEYOND},
        {"temperature": BEYOND},
        {"max_tokens": BEYOND},
        {"min_tokens": BEYOND},
        {"logprobs": BEYOND},
        {"stop_token_ids": [BEYOND]},
        {"allowed_token_ids": [BEYOND]},
        {"logit_bias": {BEYOND: 1}},
        {"bad_words": [[BEYOND]]},
    ],
    ids=lambda value: next(iter(value)),
)
def test_a_parameter_without_end_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"SamplingParams\.{next(iter(value))}") as refused:
        SamplingParams(**value)
    assert len(str(refused.value)) < 1000


def test_a_token_without_end_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"token a value of type int .* at position 1 of the"):
        llm.generate([1, BEYOND], GREEDY)


@pytest.mark.parametrize(
    "overrides",
    [LOOP, {"vocab_size": BEYOND}, {"torch_dtype": torch.float32}, {"rope_scaling": LOOP}],
    ids=["a loop", "a number", "an object", "a loop inside"],
)
def test_overrides_that_no_file_can_hold_are_refused(overrides: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"hf_overrides: no config\.json can hold this: "):
        EngineConfig(hf_overrides=overrides)


def test_a_module_map_of_a_name_that_no_file_has_is_refused() -> None:
    with pytest.raises(PluginLoadError, match=r"custom module map 'a{5000}': File name too long"):
        LLM(MODEL, skip_tokenizer_init=True, custom_module_map="a" * 5000)


def test_a_folder_of_a_name_that_no_file_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"allowed_local_media_path: 'a{40,}.* is no folder"):
        EngineConfig(allowed_local_media_path="a" * 5000)


def test_names_of_fields_are_texts() -> None:
    guided: Any = {1: "a"}
    with pytest.raises(ConfigError, match="SamplingParams: keywords must be strings"):
        SamplingParams(guided=guided)


def test_sizes_may_be_text() -> None:
    config = EngineConfig(kv_cache_memory="8MiB", swap_space="1.5kB")
    assert (config.kv_cache_memory, config.swap_space) == (8 * 2**20, 1500)


def test_too_small_a_cache_is_refused_with_what_would_fit() -> None:
    config = EngineConfig(
        skip_tokenizer_init=True, kv_cache_memory=40_000, max_model_len=100, block_size=16
    )
    # 3 layers of 2 heads of 8 + 8 float32 values: 6144 bytes a block, and one is not handed out.
    with pytest.raises(CacheMemoryError, match=r"or set max_model_len to at most 80$"):
        LLM(MODEL, config)


def test_a_length_is_cut_to_what_the_cache_holds_if_none_was_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = EngineConfig(skip_tokenizer_init=True, kv_cache_memory="200KB", block_size=16)
    with LLM(MODEL, config) as llm:
        # 3 layers of 2 heads of 8 + 8 float32 values.
        blocks = 200_000 // (3 * 2 * 16 * 4 * 16) - 1
        assert llm.engine.max_model_len == blocks * 16
        assert "max_model_len is cut" in caplog.text
        assert tokens(llm.generate(IDS[2], GREEDY)) == [PROMPTS[2].new_tokens]


@pytest.mark.parametrize("number", [10**12, 10**20])
def test_more_sequences_than_the_machine_has_memory_for_are_refused(number: int) -> None:
    wanted = rf"is {number}, .* bytes per sequence, .* set max_num_seqs to at most [1-9]\d*$"
    with pytest.raises(OptionError, match=wanted):
        LLM(MODEL, skip_tokenizer_init=True, max_num_seqs=number)
    with pytest.raises(OptionError, match=r"kv_cache_memory makes .* set kv_cache_memory lower$"):
        LLM(MODEL, skip_tokenizer_init=True, max_num_seqs=number, kv_cache_memory=10**16)


@pytest.mark.parametrize("number", [10**12, 10**20])
def test_steps_that_the_machine_has_no_memory_for_are_refused(number: int) -> None:
    # Four integers of 8 bytes, and twice the hidden state.
    hidden = json.loads((GOLDEN / "llama-gqa" / "config.json").read_text())["hidden_size"]
    least = 4 * 8 + 2 * hidden * 4
    wanted = rf"max_num_batched_tokens is {number}, .* at least {least} bytes per token"
    with pytest.raises(
        OptionError, match=rf"{wanted}, .* set max_num_batched_tokens to at most [1-9]\d*$"
    ):
        LLM(MODEL, skip_tokenizer_init=True, dtype="float32", max_num_batched_tokens=number)


@pytest.mark.parametrize(
    "settings", [{"max_num_seqs": 50_000}, {"max_num_batched_tokens": 200_000}], ids=str
)
def test_much_at_once_is_no_harm(settings: dict[str, int]) -> None:
    with LLM(MODEL, skip_tokenizer_init=True, **settings) as llm:
        assert tokens(llm.generate(IDS[2], GREEDY)) == [PROMPTS[2].new_tokens]


def test_a_length_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len 4096 is above the 2048"):
        LLM(MODEL, skip_tokenizer_init=True, max_model_len=4096)


@pytest.mark.parametrize("device", ["cuda:99", "cuda:07", "cuda:\u0663", f"cuda:{10**30}"])
def test_a_gpu_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=f"^device '{device}' "):
        LLM(MODEL, skip_tokenizer_init=True, device=device)


def test_threads_share_an_engine(llm: LLM) -> None:
    alone = [tokens(llm.generate(ids, GREEDY)) for ids in IDS]
    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(llm.generate, IDS[i % len(IDS)], GREEDY) for i in range(24)]
        streams = [pool.submit(lambda ids=ids: list(llm.stream(ids, GREEDY))[-1]) for ids in IDS]
        for index, call in enumerate(calls):
            assert tokens(call.result()) == alone[index % len(IDS)]
        for index, stream in enumerate(streams):
            assert tokens([stream.result()]) == alone[index]


def test_a_long_call_keeps_no_other_thread_out(llm: LLM) -> None:
    begun = threading.Event()
    lengths = []

    def watch(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        begun.set()
        lengths.append(len(output))
        return logits

    long = GREEDY.replace(max_tokens=150, logits_processors=(watch,))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.generate, [3, 4, 5], long)
        assert begun.wait(60)
        llm.generate(IDS[0], GREEDY.replace(max_tokens=2))
        assert len(lengths) < 150
        assert len(call.result()[0].outputs[0].token_ids) == 150


def leave(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    sys.exit(3)


def test_a_processor_that_exits_ends_its_own_request(llm: LLM) -> None:
    params = GREEDY.replace(logits_processors=(leave,))
    left, other = llm.generate(IDS[:2], [params, GREEDY])
    assert left.outputs[0].finish_reason == "error"
    assert "logits processor leave failed: SystemExit: 3" in (left.outputs[0].error or "")
    assert tokens([other]) == tokens(llm.generate(IDS[1], GREEDY))


ENTRIES: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate(IDS[0], GREEDY),
    "close": lambda llm: llm.close(),
    "step": lambda llm: llm.engine.step(),
    "add_request": lambda llm: llm.engine.add_request(IDS[0], GREEDY),
    "abort": lambda llm: llm.engine.abort("request-0"),
    "close the engine": lambda llm: llm.engine.close(),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_processor_that_calls_the_engine_is_refused(llm: LLM, entry: str) -> None:
    def call(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        ENTRIES[entry](llm)
        return logits

    (ended,) = llm.generate(IDS[0], GREEDY.replace(logits_processors=(call,)))
    assert "called from within its own step" in (ended.outputs[0].error or "")
    assert tokens(llm.generate(IDS[2], GREEDY)) == [PROMPTS[2].new_tokens]


def test_streams_that_are_collected_amid_a_step_end_after_it(llm: LLM) -> None:
    def lose() -> None:
        streams: list[object] = [llm.stream(ids, GREEDY) for ids in IDS[:3]]
        streams.append(streams)

    def collect(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        running.append(llm.engine.scheduler.num_running)
        gc.collect()
        running.append(llm.engine.scheduler.num_running)
        return logits

    running: list[int] = []
    gc.collect()
    gc.disable()
    try:
        lose()
        outputs = llm.generate(IDS[2], GREEDY.replace(logits_processors=(collect,)))
    finally:
        gc.enable()
    assert running[:3] == [4, 4, 1]
    assert tokens(outputs) == [PROMPTS[2].new_tokens]


def test_a_top_k_that_no_tensor_holds() -> None:
    with pytest.raises(ConfigError, match=r"SamplingParams.top_k: .*less than 2147483648"):
        SamplingParams(top_k=10**400)


def test_prompts_of_a_call_begin_to_decode_together_if_all_have_a_row(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a stream, and of more prompts than rows, do not wait; tokens are the same."""
    executor = llm.engine.core.executor
    submit, plans = executor.submit, []

    def counted(plan: Any) -> Any:
        plans.append([row.num_tokens for row in plan.rows])
        return submit(plan)

    monkeypatch.setattr(executor, "submit", counted)
    config = llm.engine.core.scheduler.config
    room = config.replace(max_num_batched_tokens=16, max_num_seqs=3)
    monkeypatch.setattr(llm.engine.core.scheduler, "config", room)
    given = [[*range(first, first + 16)] for first in (5, 25, 45)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    together = tokens(llm.generate(given, params))
    assert plans == [[16], [16], [16], *[[1, 1, 1]] * 3]
    plans.clear()
    streams = [llm.stream(each, params) for each in given]
    outputs = [[*stream][-1] for stream in streams]
    assert plans[:3] == [[16], [1, 16], [1, 1, 16]]
    assert tokens(outputs) == together
    plans.clear()
    two = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, n=2)
    llm.generate(given[:2], two)
    assert [1, 16] in plans
