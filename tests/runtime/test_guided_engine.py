"""Guided text through the whole engine, read by parsers that know nothing of the grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from guided_model import EOS, MODEL, VOCAB, write_tokenizer

from engine_core import LLM, EngineConfig, GuidedParams, SamplingParams
from engine_core.errors import ConfigError, ErrorCode, RequestError

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 3, "maximum": 200},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": PERSON,
    "nested": {
        "type": "object",
        "properties": {"inner": PERSON, "list": {"type": "array", "items": PERSON, "maxItems": 2}},
        "required": ["inner", "list"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["red", "green", 3, None, True, {"a": 1}]},
    "bounded array": {
        "type": "array",
        "items": {"type": "integer", "minimum": -5, "maximum": 5},
        "minItems": 3,
        "maxItems": 5,
    },
    "union": {
        "type": "array",
        "items": {
            "anyOf": [{"type": "string", "maxLength": 4}, {"type": "boolean"}, {"type": "null"}]
        },
        "minItems": 4,
        "maxItems": 6,
    },
    "references": {
        "$defs": {
            "leaf": {"type": "integer", "minimum": 0, "maximum": 9},
            "pair": {
                "type": "array",
                "prefixItems": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/leaf"}],
                "items": False,
                "minItems": 2,
            },
        },
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/pair"}, "b": {"$ref": "#/$defs/leaf"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "numbers": {
        "type": "array",
        "items": {"type": "number", "exclusiveMinimum": 0.5, "maximum": 2.25},
        "minItems": 3,
        "maxItems": 3,
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}(x|yz)?$"},
    "formats": {
        "type": "object",
        "properties": {
            "day": {"type": "string", "format": "date"},
            "time": {"type": "string", "format": "date-time"},
            "id": {"type": "string", "format": "uuid"},
        },
        "required": ["day", "time", "id"],
        "additionalProperties": False,
    },
    "constant": {
        "type": "object",
        "properties": {"kind": {"const": 'é\n"q"'}},
        "required": ["kind"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokenizer(tmp_path_factory.mktemp("guided") / "tokenizer"))


@pytest.fixture(scope="module")
def llm(tokenizer: str) -> Iterator[LLM]:
    with LLM(MODEL, EngineConfig(tokenizer=tokenizer, max_model_len=1024)) as llm:
        yield llm
        assert not llm.engine.has_unfinished


def wild(seed: int, **more: Any) -> SamplingParams:
    """The model's own taste is gone at this temperature: every token allowed is as likely."""
    return SamplingParams(**{"temperature": 100.0, "max_tokens": None, "seed": seed, **more})


def guided(seed: int, schema: dict[str, Any], **more: Any) -> SamplingParams:
    return wild(seed, guided=GuidedParams(json_schema=schema), **more)


def validate(text: str, schema: dict[str, Any]) -> None:
    jsonschema.validate(
        json.loads(text),
        schema,
        jsonschema.Draft202012Validator,
        format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
    )


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_text_is_what_the_schema_says(llm: LLM, name: str) -> None:
    schema = SCHEMAS[name]
    outputs = llm.generate(["Say it:"] * 6, [guided(seed, schema) for seed in range(6)])
    texts = set()
    for output in outputs:
        (completion,) = output.outputs
        assert completion.finish_reason == "stop", completion
        assert completion.stop_reason is None
        assert completion.token_ids[-1] == EOS
        validate(completion.text, schema)
        texts.add(completion.text)
    assert len(texts) > 1  # they were drawn, not written out


def test_regular_expressions_choices_and_grammars(llm: LLM) -> None:
    expression = r"[a-z]{3,5}(, [0-9]+){2}!"
    calls = 'start: "f(" NUMBER ("," NUMBER)* ")"\nNUMBER: /[0-9]{1,3}/'
    choices = ("yes", "no", "perhaps 😀", 'a "b"\n')
    ways = {
        "regex": GuidedParams(regex=expression),
        "choice": GuidedParams(choice=choices),
        "grammar": GuidedParams(grammar=calls),
        "json_object": GuidedParams(json_object=True),
    }
    checks = {
        "regex": lambda text: re.fullmatch(expression, text),
        "choice": lambda text: text in choices,
        "grammar": lambda text: re.fullmatch(r"f\(\d{1,3}(,\d{1,3})*\)", text),
        "json_object": lambda text: isinstance(json.loads(text), dict),
    }
    for name, way in ways.items():
        # A pull towards the end, as any text may go on for long.
        bias = {EOS: 100.0}
        params = [wild(seed, guided=way, temperature=20.0, logit_bias=bias) for seed in range(8)]
        for output in llm.generate(["Go:"] * 8, params):
            (completion,) = output.outputs
            assert completion.finish_reason == "stop", (name, completion)
            assert checks[name](completion.text), (name, completion.text)


def test_the_text_may_go_on_where_it_could_end(llm: LLM) -> None:
    """The end is allowed and not forced: only the length ends a text that never wants to."""
    never = {EOS: -100.0}
    params = SamplingParams(
        temperature=0.0, max_tokens=40, guided=GuidedParams(regex="(ab)*"), logit_bias=never
    )
    (completion,) = llm.generate("Go:", params)[0].outputs
    assert completion.finish_reason == "length"
    assert re.fullmatch("(ab)*a?", completion.text)
    forced = params.replace(guided=GuidedParams(regex="abab"))
    (completion,) = llm.generate("Go:", forced)[0].outputs
    assert (completion.text, completion.finish_reason) == ("abab", "stop")


def test_an_end_is_no_text_even_if_the_vocabulary_holds_it_as_text(llm: LLM) -> None:
    """``<call>`` is ordinary text to the tokenizer; as a stop token it may not cut a string off."""
    call = llm.tokenizer.token_to_id("<call>")
    params = [
        guided(
            seed, {"type": "string", "maxLength": 30}, stop_token_ids=[call], logit_bias={call: 100}
        )
        for seed in range(6)
    ]
    for output in llm.generate(["Go:"] * 6, params):
        (completion,) = output.outputs
        assert completion.finish_reason == "stop"
        validate(completion.text, {"type": "string"})
        assert completion.stop_reason == call


def everything() -> list[SamplingParams]:
    """Guided rows with parameters of every kind, and rows that are not guided."""
    schema = SCHEMAS["union"]
    plain = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    return [
        guided(1, schema),
        plain,
        guided(2, PERSON, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2),
        guided(3, PERSON, top_k=5),
        guided(4, PERSON, top_p=0.7, min_p=0.01),
        guided(5, PERSON, temperature=0.0, logprobs=2),
        plain.replace(temperature=1.0, seed=9),
        guided(6, PERSON, bad_words=["x"], logit_bias={40: 2.0}),
        wild(7, guided=GuidedParams(choice=("left", "right"))),
        guided(8, PERSON, n=2),
    ]


PROMPT = "A somewhat long prompt, so that it is computed in several pieces and several steps. " * 2


def run_everything(llm: LLM) -> list[list[tuple[list[int], str]]]:
    outputs = llm.generate([f"{index} {PROMPT}" for index in range(10)], everything())
    return [[(c.token_ids, c.text) for c in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone(tokenizer: str) -> list[list[tuple[list[int], str]]]:
    config = EngineConfig(
        tokenizer=tokenizer, max_model_len=512, max_num_seqs=1, enable_prefix_caching=False
    )
    with LLM(MODEL, config) as llm:
        return run_everything(llm)


def test_every_row_of_a_mixed_batch_is_what_it_is_alone(
    llm: LLM, alone: list[list[tuple[list[int], str]]]
) -> None:
    assert run_everything(llm) == alone
    for params, texts in zip(everything(), alone, strict=True):
        if params.guided is None:
            continue
        for _, text in texts:
            if params.guided.choice is not None:
                assert text in params.guided.choice
            else:
                validate(text, params.guided.json_schema)
    assert "x" not in alone[7][0][1]


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    """A token that the grammar forced may be improbable, and the report says so."""
    params = SamplingParams(
        temperature=0.0, logprobs=1, guided=GuidedParams(choice=("zebra",)), max_tokens=20
    )
    (completion,) = llm.generate("Go:", params)[0].outputs
    assert completion.text == "zebra"
    entries = zip(completion.token_ids, completion.logprobs, strict=True)
    assert any(entry[token].rank > 1 for token, entry in entries)


def test_a_stop_string_ends_a_guided_text(llm: LLM) -> None:
    params = guided(3, PERSON, stop=['"age"'])
    (completion,) = llm.generate("Go:", params)[0].outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", '"age"')
    assert completion.text.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("depth", "chunk"),
    [
        *((2, 64), (0, 256)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((0, 64), (2, 256))),
    ],
)
def test_preemption_chunks_and_steps_in_flight_do_not_show(
    tokenizer: str, depth: int, chunk: int, alone: list[list[tuple[list[int], str]]]
) -> None:
    with LLM(MODEL, EngineConfig(tokenizer=tokenizer, max_model_len=512)) as llm:
        one_token = llm.engine.cache_plan.bytes_per_block // 16
    config = EngineConfig(
        tokenizer=tokenizer,
        max_model_len=512,
        block_size=4,
        kv_cache_memory=one_token * 4 * 140,
        max_num_batched_tokens=chunk,
        max_num_seqs=32,
    )
    with LLM(MODEL, config) as llm:
        # On a CPU no step is left in flight by itself.
        llm.engine.core.pacing.depth = depth
        outputs = llm.generate([f"{index} {PROMPT}" for index in range(10)], everything())
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert [[(c.token_ids, c.text) for c in o.outputs] for o in outputs] == alone


def test_two_ranks_write_the_same(tokenizer: str, alone: list[list[tuple[list[int], str]]]) -> None:
    config = EngineConfig(tokenizer=tokenizer, max_model_len=512, tensor_parallel_size=2)
    some = [1, 3, 8]
    with LLM(MODEL, config) as llm:
        params = [everything()[index] for index in some]
        outputs = llm.generate([f"{index} {PROMPT}" for index in some], params)
    assert [[(c.token_ids, c.text) for c in o.outputs] for o in outputs] == [
        alone[index] for index in some
    ]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": (
        {"json_schema": {"properties": {"a": {"items": {"type": "strin"}}}}},
        r"json_schema\.properties\.a\.items: Invalid type: strin",
    ),
    "not known to the library": (
        {"json_schema": {"anyOf": [{"type": "null"}, {"not": {"type": "string"}}]}},
        r'json_schema\.anyOf\[1\]: Unimplemented keys: \["not"\]',
    ),
    "unsatisfiable": (
        {"json_schema": {"type": "string", "minLength": 5, "maxLength": 2}},
        r"json_schema: Unsatisfiable schema: minLength \(5\) is greater than maxLength \(2\)",
    ),
    "contradiction": (
        {"json_schema": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
        "Unsatisfiable",
    ),
    "reference to nothing": (
        {"json_schema": {"properties": {"a": {"$ref": "#/$defs/nothing"}}}},
        r"properties\.a: Pointer '/\$defs/nothing' does not exist",
    ),
    "reference elsewhere": ({"json_schema": {"$ref": "http://example.com/x"}}, "retrieving"),
    "a number that would be rounded": (
        {"json_schema": {"anyOf": [{"type": "null"}, {"enum": [2**63]}]}},
        r"json_schema\.anyOf\[1\]: the number 9223372036854775808 is beyond",
    ),
    "a multiple with too many remainders": (
        {"json_schema": {"items": {"type": "number", "multipleOf": 23.5310852}}},
        r"json_schema\.items: multipleOf 23\.5310852 has too many digits",
    ),
    "unknown format": ({"json_schema": {"type": "string", "format": "shoe"}}, "format: shoe"),
    "expression": ({"regex": "a(b"}, r"guided\.regex: .*unclosed group"),
    "look-ahead": ({"regex": "a(?=b)"}, "look-around"),
    "grammar": ({"grammar": 'start: "a" rest'}, r"guided\.grammar: .*unknown name: \"rest\""),
    "unknown token": ({"grammar": "start: <|nothing|>"}, "unknown special token"),
    "no text at all": ({"regex": r"[^\s\S]"}, "no text satisfies it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(llm: LLM, name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises(RequestError, match=message):
        llm.generate("Go:", SamplingParams(guided=GuidedParams(**given)))
    assert not llm.engine.has_unfinished


def test_a_grammar_that_would_end_the_process_is_refused(llm: LLM) -> None:
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(2750))
    chain = GuidedParams(grammar=f'start: r0\n{rules}\nr2750: "a"')
    with pytest.raises(RequestError, match="more than 1024 KiB of stack") as caught:
        llm.generate("x", SamplingParams(guided=chain))
    assert "SIGSEGV" in str(caught.value)
    params = SamplingParams(guided=GuidedParams(choice=("a", "b")), max_tokens=5)
    assert llm.generate("x", params)[0].outputs[0].text in ("a", "b")


def test_contradictory_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_tokens cannot be kept by a guided text"):
        SamplingParams(guided=GuidedParams(regex="a"), min_tokens=3)
    with pytest.raises(ConfigError, match="ignore_eos cannot be kept"):
        SamplingParams(guided=GuidedParams(regex="a"), ignore_eos=True)
    with pytest.raises(ConfigError, match=r"exactly one of .* got none"):
        GuidedParams()
    with pytest.raises(ConfigError, match="got json_object and regex"):
        GuidedParams(json_object=True, regex="a")
    with pytest.raises(ConfigError, match="json_schema: not JSON"):
        GuidedParams(json_schema="{")
    with pytest.raises(ConfigError, match="false allows no text"):
        GuidedParams(json_schema=False)
    assert GuidedParams(json_schema='{"type": "null"}').json_schema == {"type": "null"}


def test_parameters_that_leave_no_token_end_the_request_with_an_error(llm: LLM) -> None:
    params = SamplingParams(guided=GuidedParams(regex="abc"), allowed_token_ids=[200])
    good = SamplingParams(guided=GuidedParams(choice=("abc",)), max_tokens=9)
    outputs = llm.generate(["Go:"] * 2, [params, good])
    assert outputs[0].outputs[0].finish_reason == "error"
    assert "leave no token" in outputs[0].outputs[0].error
    assert outputs[0].outputs[0].error_code is ErrorCode.NO_TOKEN
    assert outputs[1].outputs[0].text == "abc"


def test_a_model_without_an_end_of_sequence_says_what_is_missing(tokenizer: str) -> None:
    config = EngineConfig(
        tokenizer=tokenizer, max_model_len=64, hf_overrides={"eos_token_id": None}
    )
    params = SamplingParams(guided=GuidedParams(choice=("abc",)), max_tokens=9)
    with LLM(MODEL, config) as llm:
        (output,) = llm.generate("Go:", params)
        assert "name one in stop_token_ids" in output.outputs[0].error
        assert output.outputs[0].error_code is ErrorCode.GRAMMAR_WITHOUT_END
        (output,) = llm.generate("Go:", params.replace(stop_token_ids=[VOCAB - 1]))
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abc", "stop")


def test_an_engine_without_a_tokenizer_refuses() -> None:
    with (
        LLM(MODEL, EngineConfig(skip_tokenizer_init=True, max_model_len=64)) as llm,
        pytest.raises(RequestError, match="needs a tokenizer"),
    ):
        llm.generate([[5, 6]], SamplingParams(guided=GuidedParams(regex="a")))


@pytest.mark.slow
def test_a_real_model_from_a_gguf_file(smollm2_gguf: Path) -> None:
    """Its tokenizer is made from the file's metadata."""
    with LLM(str(smollm2_gguf), EngineConfig(max_model_len=512)) as llm:
        params = [
            SamplingParams(
                temperature=0.0, max_tokens=200, guided=GuidedParams(json_schema=PERSON)
            ),
            guided(1, PERSON, temperature=1.5),
            wild(2, guided=GuidedParams(regex=r"[a-z]{3,8} [0-9]{2}"), temperature=3.0),
        ]
        outputs = llm.generate(["Bob is 12 years old. As JSON:"] * 3, params)
    for output in outputs[:2]:
        assert output.outputs[0].finish_reason == "stop"
        validate(output.outputs[0].text, PERSON)
    assert re.fullmatch(r"[a-z]{3,8} [0-9]{2}", outputs[2].outputs[0].text)
