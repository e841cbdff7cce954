"""Which tokens a grammar allows, against languages so small that they can be written out."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from guided_model import VOCAB, backend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_examples import examples

from engine_core.configs import GuidedParams, SamplingParams
from engine_core.errors import ErrorCode, TokenizerError
from engine_core.runtime import guided
from engine_core.runtime.guided import GrammarCompiler, Guide, GuideBuilder
from engine_core.runtime.sampler import Sampler
from engine_core.runtime.sampler.sampler import apply_bitmask
from engine_core.text import FastTokenizer, token_bytes

TOKENIZER = FastTokenizer(backend(), special_tokens={}, chat_templates={})
TOKENS = token_bytes(TOKENIZER)
EOS = 2


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


COMPILER = GrammarCompiler(TOKENS, encode, VOCAB)


def allowed(guide: Guide) -> set[int]:
    """Every token that may come next, of the columns of the logits."""
    (row,) = COMPILER.masks([guide])
    assert guide.error is None
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:VOCAB]).tolist())


def possible(language: set[bytes], before: bytes) -> set[int]:
    """The same by looking at every text of the language."""
    rests = [text[len(before) :] for text in language if text.startswith(before)]
    tokens = {
        index
        for index, token in enumerate(TOKENS)
        if token and not token.startswith(b"\xff") and any(rest.startswith(token) for rest in rests)
    }
    return tokens | ({EOS} if before in language else set())


CHOICES = st.sets(
    st.text(alphabet='ab{}", :12é😀\n', min_size=1, max_size=8), min_size=1, max_size=6
)


@settings(max_examples=examples(60), deadline=None)
@given(choice=CHOICES, seed=st.integers(0, 1000))
def test_a_walk_through_a_finite_language_reaches_a_text_of_it(choice: set[str], seed: int) -> None:
    """Whatever is allowed leads on, and every text can be reached in the tokenizer's own tokens.

    Where the rest of the text has no choice left, the library insists on those tokens, so that what
    it allows may be fewer than what would be possible, never more.
    """
    params = GuidedParams(choice=tuple(sorted(choice)))
    COMPILER.check(params)
    language = {text.encode() for text in choice}
    guide = COMPILER.guide(params, [EOS])
    draw = random.Random(seed)
    text = b""
    while True:
        now = allowed(guide)
        assert now
        assert now <= possible(language, text)
        assert (EOS in now) == (text in language)
        token = draw.choice(sorted(now))
        guide.advance([token])
        if token == EOS:
            break
        text += TOKENS[token]
    assert text in language
    assert guide.ended


def test_free_choice_is_not_narrowed() -> None:
    """Where the grammar forces nothing, every token that fits is allowed."""
    guide = COMPILER.guide(GuidedParams(regex='[a-z" ,]{0,30}'), [EOS])
    fitting = {
        index
        for index, token in enumerate(TOKENS)
        if token and all(chr(byte) in 'abcdefghijklmnopqrstuvwxyz" ,' for byte in token)
    }
    assert allowed(guide) == fitting | {EOS}
    assert any(len(TOKENS[index]) > 3 for index in fitting)


def test_a_rebuilt_guide_goes_on_where_it_was() -> None:
    params = GuidedParams(json_schema={"type": "array", "items": {"type": "integer"}})
    tokens = encode("[12, 3")
    stepped, rebuilt = COMPILER.guide(params, [EOS]), COMPILER.guide(params, [EOS])
    for token in tokens:
        allowed(stepped)
        stepped.advance([token])
    rebuilt.advance(tokens)
    assert allowed(stepped) == allowed(rebuilt)
    rebuilt.advance([encode("x")[0]])
    assert rebuilt.error is not None
    assert rebuilt.error.code is ErrorCode.GUIDED
    assert "failed" in rebuilt.error.message
    assert (COMPILER.masks([rebuilt]) == 0xFFFFFFFF).all()


def test_several_masks_at_once_are_those_of_each() -> None:
    ways = [
        GuidedParams(json_object=True),
        GuidedParams(regex="[0-9]+"),
        GuidedParams(choice=("a", "b")),
    ]
    guides = [COMPILER.guide(way, [EOS]) for way in ways]
    ended = COMPILER.guide(ways[0], [EOS])
    ended.advance([EOS])
    together = COMPILER.masks([*guides, ended])
    assert (together[3] == 0xFFFFFFFF).all()
    for row, guide in zip(together, guides, strict=False):
        assert (COMPILER.masks([guide])[0] == row).all()


def test_a_special_token_is_allowed_only_where_a_grammar_names_it() -> None:
    table = [*TOKENS, b"\xff<|go|>"]
    compiler = GrammarCompiler(table, encode, len(table) + 10)
    named = compiler.guide(GuidedParams(grammar='start: <|go|> "x"'), [EOS])
    bits = np.unpackbits(compiler.masks([named]).view(np.uint8)[0], bitorder="little")
    assert np.flatnonzero(bits[: len(table) + 10]).tolist() == [len(TOKENS)]
    text = compiler.guide(GuidedParams(regex="(.|\n)+"), [EOS])
    bits = np.unpackbits(compiler.masks([text]).view(np.uint8)[0], bitorder="little")
    assert not bits[len(TOKENS) : len(table) + 10].any()
    assert bits[encode("x")[0]]


@pytest.mark.parametrize("vocab_size", [7, 8, 31, 32, 33, 320])
def test_bits_are_applied_to_the_logits_they_stand_for(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(3, vocab_size, generator=generator)
    bits = torch.rand(3, vocab_size, generator=generator) < 0.5
    words = np.packbits(bits.numpy(), axis=-1, bitorder="little")
    expected = logits.masked_fill(~bits, -torch.inf)
    assert torch.equal(apply_bitmask(logits.clone(), torch.from_numpy(words)), expected)


def test_rows_without_a_guide_are_not_touched() -> None:
    sampler = Sampler(4, torch.device("cpu"), lambda: COMPILER)
    plain = SamplingParams(temperature=0.0, seed=0)
    guided = plain.replace(guided=GuidedParams(choice=("{",)))
    for row, params in enumerate([plain, guided, plain]):
        sampler.admit(row, [3, 4], 2, params, [EOS])
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    tokens = sampler.sample(logits, [0, 1, 2], [2, 2, 2]).token_ids.tolist()
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert tokens == [before[0].argmax().item(), encode("{")[0], before[2].argmax().item()]
    following = sampler.sample(before[:2].clone(), [2, 1], [3, 3]).token_ids.tolist()
    assert following[1] == EOS


_INTEGERS = st.integers(-(2**53), 2**53)
# Schemas of the kind that tools have, small enough that any text of them is short.
_LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, width: {"type": "integer", "minimum": low, "maximum": low + width},
        st.integers(-1000, 1000),
        st.integers(0, 500),
    ),
    st.builds(
        lambda low, width: {"type": "string", "minLength": low, "maxLength": low + width},
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    st.builds(
        lambda values: {"enum": values},
        st.lists(
            st.none() | st.booleans() | _INTEGERS | st.text(max_size=5), min_size=1, max_size=4
        ),
    ),
    st.builds(lambda value: {"const": value}, st.text(max_size=6) | _INTEGERS),
    st.just({"type": "string", "pattern": "^[a-f]+(-[0-9]{2})?$", "maxLength": 9}),
    st.just({"type": "number", "minimum": -1.5, "exclusiveMaximum": 1.5}),
)


def _objects(children: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.text(alphabet='abc "\\é', min_size=1, max_size=4)

    def build(properties: dict[str, Any], optional: int) -> dict[str, Any]:
        required = [name for place, name in enumerate(properties) if not optional >> place & 1]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    return st.builds(build, st.dictionaries(names, children, max_size=3), st.integers(0, 7))


def _arrays(children: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda items, low, width: {
            "type": "array",
            "items": items,
            "minItems": low,
            "maxItems": low + width,
        },
        children,
        st.integers(0, 2),
        st.integers(0, 2),
    )


def _unions(children: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda parts: {"anyOf": parts}, st.lists(children, min_size=1, max_size=3))


SCHEMAS = st.recursive(
    _LEAVES, lambda inner: _objects(inner) | _arrays(inner) | _unions(inner), max_leaves=6
)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=SCHEMAS, seed=st.integers(0, 2**16))
def test_any_walk_through_any_schema_ends_in_what_it_allows(
    schema: dict[str, Any], seed: int
) -> None:
    params = GuidedParams(json_schema=schema)
    COMPILER.check(params)
    guide = COMPILER.guide(params, [EOS])
    draw = random.Random(seed)
    text = b""
    for _ in range(2000):
        now = sorted(allowed(guide))
        assert now, text
        # The end as soon as it may be, else anything.
        token = EOS if EOS in now and draw.random() < 0.5 else draw.choice(now)
        guide.advance([token])
        if token == EOS:
            break
        text += TOKENS[token]
    else:
        pytest.fail(f"no end after 2000 tokens: {text!r}")
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


def test_the_same_grammar_is_compiled_once() -> None:
    compiler = GrammarCompiler(TOKENS, encode, VOCAB)
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    for _ in range(3):
        compiler.check(GuidedParams(json_schema=schema))
        compiler.guide(GuidedParams(json_schema=dict(schema)), [EOS])
    assert len(compiler._kept) == 1


def test_a_grammar_is_kept_as_long_as_its_request() -> None:
    compiler = GrammarCompiler(TOKENS, encode, VOCAB)
    params = GuidedParams(regex="a+")
    first = compiler.compile(params)
    for count in range(100):
        compiler.compile(GuidedParams(regex=f"b{{{count + 1}}}"))
    assert compiler.compile(params) is first
    assert compiler.compile(GuidedParams(regex="a+")) is not first


def test_a_slow_mask_ends_its_own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = [GuidedParams(regex="[a-z]+"), GuidedParams(json_object=True)]
    guides = [COMPILER.guide(way, [EOS]) for way in ways]
    fitting = COMPILER.masks(guides)
    # No time at all: together they are suspected, each by itself is convicted.
    monkeypatch.setattr(guided, "MASK_SECONDS", 0.0)
    monkeypatch.setattr(guided, "_USUAL_MASK_SECONDS", 0.0)
    assert (COMPILER.masks(guides) == fitting).all()
    assert [guide.error for guide in guides] == [None, None]
    assert (COMPILER.masks(guides[:1]) == 0xFFFFFFFF).all()
    error = guides[0].error
    assert error is not None
    assert error.code is ErrorCode.GRAMMAR_TOO_COMPLEX
    assert "may take 0 s" in error.message
    # The other one had no part in it.
    monkeypatch.undo()
    assert (COMPILER.masks(guides)[1] == fitting[1]).all()
    assert guides[1].error is None


def test_grammars_are_compiled_beside_the_caller() -> None:
    made = []

    def make() -> GrammarCompiler:
        made.append(threading.current_thread())
        return GrammarCompiler(TOKENS, encode, VOCAB)

    builder = GuideBuilder(make)
    params = GuidedParams(json_schema={"type": "array", "items": {"type": "integer"}})
    futures = [builder.prepare(None), *(builder.prepare(params) for _ in range(5))]
    assert [future.result(60) for future in futures] == [None] * 6
    assert len(made) == 1
    assert made[0] is not threading.current_thread()
    assert encode("[")[0] in allowed(builder.compiler.guide(params, [EOS]))
    builder.close()


def test_a_compiler_that_cannot_be_made_is_told() -> None:
    def make() -> GrammarCompiler:
        raise TokenizerError("there is none")

    builder = GuideBuilder(make)
    for _ in range(3):
        assert isinstance(builder.prepare(None).exception(60), TokenizerError)
    builder.close()
