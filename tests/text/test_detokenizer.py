from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import TEXTS, byte_fallback_backend, byte_level_backend, metaspace_backend
from engine_core.text import FastTokenizer, IncrementalDetokenizer, Tokenizer

BYTE_LEVEL = FastTokenizer(byte_level_backend(), special_tokens={}, chat_templates={})
BYTE_FALLBACK = FastTokenizer(byte_fallback_backend(), special_tokens={}, chat_templates={})
METASPACE = FastTokenizer(metaspace_backend(), special_tokens={}, chat_templates={})
SMALL = pytest.mark.parametrize(
    "tokenizer",
    [BYTE_LEVEL, BYTE_FALLBACK, METASPACE],
    ids=["byte-level", "byte-fallback", "metaspace"],
)


def stream(
    tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True, prompt: Sequence[int] = ()
) -> str:
    detokenizer = IncrementalDetokenizer(
        tokenizer, skip_special_tokens=skip, prompt_token_ids=prompt
    )
    pieces = [detokenizer.append([token_id]) for token_id in ids]
    assert detokenizer.text == "".join(pieces)
    pieces.append(detokenizer.finish())
    assert detokenizer.text == "".join(pieces)
    return detokenizer.text


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, some of them outside the vocabulary."""
    return st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=24)


@given(ids_of(BYTE_LEVEL), st.booleans())
def test_byte_level_equals_decode(ids: list[int], skip: bool) -> None:
    assert stream(BYTE_LEVEL, ids, skip=skip) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(st.binary(max_size=24))
def test_byte_level_equals_decode_for_any_bytes(data: bytes) -> None:
    alphabet = {
        byte: BYTE_LEVEL.encode(bytes([byte]).decode("latin-1"), add_special_tokens=False)[-1]
        for byte in range(0x80)
    }
    # The tokens of the bytes above are those of a two-byte character.
    for code in range(0x80, 0x800):
        tokens = BYTE_LEVEL.encode(chr(code), add_special_tokens=False)
        if len(tokens) == 2:
            alphabet.update(zip(chr(code).encode(), tokens, strict=True))
    ids = [alphabet[byte] for byte in data if byte in alphabet]
    assert stream(BYTE_LEVEL, ids) == BYTE_LEVEL.decode(ids)


@st.composite
def byte_fallback_ids(draw: st.DrawFn) -> list[int]:
    """Ids in which each run of bytes is valid, or has no complete character at its beginning."""

    def of_bytes(data: bytes) -> list[int]:
        tokens = [BYTE_FALLBACK.token_to_id(f"<0x{byte:02X}>") for byte in data]
        return [token for token in tokens if token is not None]

    word = st.sampled_from(["▁the", "▁", "o", "▁hello", "</s>", "<s>"])
    valid = st.text(max_size=5).map(str.encode)
    invalid = st.tuples(
        st.sampled_from([b"\x80", b"\xff", b"\xe4\xbd", b"\xf0\x9f\x98", b"\xe4A"]), st.binary()
    ).map(lambda parts: parts[0] + parts[1])
    first_byte_ends_nothing = invalid.filter(lambda data: _complete_beginning(data) == "")
    ids: list[int] = []
    for data in draw(st.lists(st.one_of(valid, first_byte_ends_nothing), max_size=4)):
        ids += of_bytes(data)
        # A word ends the run; special tokens would not, as decoding leaves them out.
        ids += [BYTE_FALLBACK.token_to_id("o") or 0]
        ids += [BYTE_FALLBACK.token_to_id(token) or 0 for token in draw(st.lists(word, max_size=3))]
    return ids


def _complete_beginning(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


@given(byte_fallback_ids(), st.booleans())
def test_byte_fallback_equals_decode(ids: list[int], skip: bool) -> None:
    expected = BYTE_FALLBACK.decode(ids, skip_special_tokens=skip)
    assert stream(BYTE_FALLBACK, ids, skip=skip) == expected


@given(st.text())
def test_byte_fallback_gives_any_text_back(text: str) -> None:
    ids = BYTE_FALLBACK.encode(text)
    assert stream(BYTE_FALLBACK, ids) == BYTE_FALLBACK.decode(ids)


def test_byte_fallback_keeps_characters_that_were_given_out() -> None:
    tokens = [f"<0x{byte:02X}>" for byte in b"\n\xffA"]
    ids = [BYTE_FALLBACK.token_to_id(token) or 0 for token in tokens]
    assert BYTE_FALLBACK.decode(ids) == "\ufffd\ufffd\ufffd"
    assert stream(BYTE_FALLBACK, ids) == "\n\ufffd\ufffd"


@given(ids_of(METASPACE), st.booleans())
def test_any_other_decoder_equals_decode(ids: list[int], skip: bool) -> None:
    assert stream(METASPACE, ids, skip=skip) == METASPACE.decode(ids, skip_special_tokens=skip)


@SMALL
@given(data=st.data())
def test_prompt_is_context_and_not_part_of_the_text(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = tokenizer.encode(data.draw(st.text("the wor ld你😀é", max_size=20)))
    prompt = ids[: data.draw(st.integers(0, len(ids)))]
    before = tokenizer.decode(prompt)
    if before.endswith("\ufffd"):  # inside a character: see the next test
        return
    expected = tokenizer.decode(ids)[len(before) :]
    assert stream(tokenizer, ids[len(prompt) :], prompt=prompt) == expected


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])
def test_character_begun_in_the_prompt_is_given_out_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the 龘 end")
    inside = next(
        count for count in range(len(ids)) if tokenizer.decode(ids[:count]).endswith("\ufffd")
    )
    assert stream(tokenizer, ids[inside:], prompt=ids[:inside]) == "龘 end"


def test_leading_space_is_kept_after_a_prompt_and_dropped_without() -> None:
    the = BYTE_FALLBACK.token_to_id("▁the") or 0
    assert stream(BYTE_FALLBACK, [the, the]) == "the the"
    assert stream(BYTE_FALLBACK, [the, the], prompt=[1]) == "the the"
    assert stream(BYTE_FALLBACK, [the, the], prompt=[1, the]) == " the the"
    assert stream(BYTE_FALLBACK, [the], prompt=[1], skip=False) == " the"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])
def test_character_is_given_out_with_its_last_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x龘", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.append([token_id]) for token_id in ids] == ["x"] * (len(ids) == 4) + (
        [] if len(ids) == 4 else ["", "x"]
    ) + ["", "", "龘"]
    assert detokenizer.finish() == ""


@SMALL
def test_long_run_of_broken_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("龘", add_special_tokens=False)[-2:-1] * 500
    assert stream(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "chatglm3"])
def test_real_tokenizers(real_tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer = real_tokenizers[name]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        for skip in (True, False):
            expected = tokenizer.decode(ids, skip_special_tokens=skip)
            assert stream(tokenizer, ids, skip=skip) == expected
        half = len(ids) // 2
        before = tokenizer.decode(ids[:half])
        if not before.endswith("\ufffd"):
            expected = tokenizer.decode(ids)[len(before) :]
            assert stream(tokenizer, ids[half:], prompt=ids[:half]) == expected
