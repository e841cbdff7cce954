from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.text import IncrementalDetokenizer, Tokenizer

NAMES = ["byte-level", "byte-fallback", "metaspace"]
# The small tokenizers have some 400 tokens, so that a few ids are outside the vocabulary.
any_ids = st.lists(st.integers(0, 420), max_size=24)


def stream(
    tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True, prompt: Sequence[int] = ()
) -> str:
    detokenizer = IncrementalDetokenizer(
        tokenizer, skip_special_tokens=skip, prompt_token_ids=prompt
    )
    pieces = [detokenizer.append([token_id]) for token_id in ids]
    return "".join([*pieces, detokenizer.finish()])


def ids_of(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[int]:
    ids = [tokenizer.token_to_id(token) for token in tokens]
    assert None not in ids
    return [token_id for token_id in ids if token_id is not None]


def byte_tokens(data: bytes) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in data]


@given(any_ids, st.booleans())
def test_byte_level_equals_decode(byte_level: Tokenizer, ids: list[int], skip: bool) -> None:
    assert stream(byte_level, ids, skip=skip) == byte_level.decode(ids, skip_special_tokens=skip)


@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf0\x9f\x98", b"\xe4\xbd", b"a"]
            ),
            st.binary(max_size=6),
            st.text(max_size=3).map(str.encode),
        )
    )
)
def test_byte_level_equals_decode_for_any_bytes(byte_level: Tokenizer, parts: list[bytes]) -> None:
    # The tokens of single bytes follow the three special ones, in the order of their characters.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    order = printable + [byte for byte in range(256) if byte not in printable]
    ids = [3 + order.index(byte) for byte in b"".join(parts)]
    expected = b"".join(parts).decode(errors="replace")
    assert byte_level.decode(ids) == expected
    assert stream(byte_level, ids) == expected


def complete_beginning(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


valid_runs = st.text(max_size=5).map(str.encode)
# Nothing of these can be given out before the whole of them is known to be broken.
broken_runs = (
    st.tuples(
        st.sampled_from([b"\x80", b"\xff", b"\xe4\xbd", b"\xf0\x9f\x98", b"\xe4A"]),
        st.binary(max_size=6),
    )
    .map(b"".join)
    .filter(lambda data: complete_beginning(data) == "")
)
other_tokens = st.lists(st.sampled_from(["▁the", "▁", "e", "</s>", "<s>", "<unk>"]), max_size=3)


@given(st.lists(st.tuples(other_tokens, st.one_of(valid_runs, broken_runs))), st.booleans())
def test_byte_fallback_equals_decode(
    byte_fallback: Tokenizer, parts: list[tuple[list[str], bytes]], skip: bool
) -> None:
    tokens: list[str] = []
    for others, data in parts:
        # "o" ends a run, where a special token that decoding leaves out would not.
        tokens += [*others, *byte_tokens(data), "o"]
    ids = ids_of(byte_fallback, tokens)
    expected = byte_fallback.decode(ids, skip_special_tokens=skip)
    assert stream(byte_fallback, ids, skip=skip) == expected


@given(st.text())
def test_byte_fallback_gives_any_text_back(byte_fallback: Tokenizer, text: str) -> None:
    ids = byte_fallback.encode(text)
    assert stream(byte_fallback, ids) == byte_fallback.decode(ids)


def test_byte_fallback_keeps_characters_that_were_given_out(byte_fallback: Tokenizer) -> None:
    ids = ids_of(byte_fallback, byte_tokens(b"\n\xffA"))
    assert byte_fallback.decode(ids) == "\ufffd\ufffd\ufffd"
    assert stream(byte_fallback, ids) == "\n\ufffd\ufffd"


class Opaque(Tokenizer):
    """A tokenizer that does not say how it decodes, as those of transformers in plain Python."""

    def __init__(self, inner: Tokenizer) -> None:
        super().__init__(special_tokens={}, chat_templates={})
        self.inner = inner
        self.vocab_size = inner.vocab_size
        self.special_ids = inner.special_ids
        self.most_decoded = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.inner.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.most_decoded = max(self.most_decoded, len(ids))
        return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        return self.inner.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self.inner.token_to_id(token)


@given(text=st.text(max_size=20), data=st.data())
def test_unknown_decoder_gives_characters_of_several_tokens(
    byte_level: Tokenizer, text: str, data: st.DataObject
) -> None:
    tokenizer = Opaque(byte_level)
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    expected = tokenizer.decode(ids)
    begun = tokenizer.decode(ids[:cut])
    if begun.endswith("\ufffd") and not expected.startswith(begun):
        begun = begun[:-1]
    got = stream(tokenizer, ids[cut:], prompt=ids[:cut])
    # U+FFFD of the text itself, at the end of the prompt, may be repeated.
    assert got.lstrip("\ufffd") == expected[len(begun) :].lstrip("\ufffd")


@given(any_ids, st.booleans())
def test_unknown_decoder_equals_decode(byte_level: Tokenizer, ids: list[int], skip: bool) -> None:
    expected = byte_level.decode(ids, skip_special_tokens=skip)
    assert stream(Opaque(byte_level), ids, skip=skip) == expected


def test_unknown_decoder_decodes_a_few_tokens_at_a_time(byte_level: Tokenizer) -> None:
    tokenizer = Opaque(byte_level)
    ids = byte_level.encode("the quick brown 狐狸 😀 " * 50)
    stream(tokenizer, ids, prompt=ids)
    assert tokenizer.most_decoded <= 16


@given(any_ids, st.booleans())
def test_any_other_decoder_equals_decode(metaspace: Tokenizer, ids: list[int], skip: bool) -> None:
    assert stream(metaspace, ids, skip=skip) == metaspace.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text("the wor ld你😀é", max_size=20), data=st.data())
def test_prompt_is_context_and_not_part_of_the_text(
    small_tokenizers: dict[str, Tokenizer], name: str, text: str, data: st.DataObject
) -> None:
    tokenizer = small_tokenizers[name]
    ids = tokenizer.encode(text)
    whole = [
        count
        for count in range(len(ids) + 1)
        if not tokenizer.decode(ids[:count]).endswith("\ufffd")
    ]
    cut = data.draw(st.sampled_from(whole))
    expected = tokenizer.decode(ids)[len(tokenizer.decode(ids[:cut])) :]
    assert stream(tokenizer, ids[cut:], prompt=ids[:cut]) == expected


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_character_begun_in_the_prompt_is_given_out_whole(
    small_tokenizers: dict[str, Tokenizer], name: str
) -> None:
    tokenizer = small_tokenizers[name]
    ids = tokenizer.encode("the 𝄞 end")
    inside = [
        count for count in range(len(ids)) if tokenizer.decode(ids[:count]).endswith("\ufffd")
    ]
    assert len(inside) == 3
    for cut in inside:
        assert stream(tokenizer, ids[cut:], prompt=ids[:cut]) == "𝄞 end"


def test_leading_space_is_kept_after_a_prompt_and_dropped_without(byte_fallback: Tokenizer) -> None:
    begin, the = ids_of(byte_fallback, ["<s>", "▁the"])
    assert stream(byte_fallback, [the, the]) == "the the"
    assert stream(byte_fallback, [the, the], prompt=[begin]) == "the the"
    assert stream(byte_fallback, [the, the], prompt=[begin, the]) == " the the"
    assert stream(byte_fallback, [the], prompt=[begin], skip=False) == " the"


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_character_is_given_out_with_its_last_token(
    small_tokenizers: dict[str, Tokenizer], name: str
) -> None:
    tokenizer = small_tokenizers[name]
    ids = tokenizer.encode("x龘", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.append([token_id]) for token_id in ids]
    assert pieces[-4:] == ["x", "", "", "龘"]
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("name", NAMES)
def test_long_run_of_broken_characters(small_tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer = small_tokenizers[name]
    ids = tokenizer.encode("龘", add_special_tokens=False)[-1:] * 500
    assert stream(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "chatglm3"])
def test_real_tokenizers(
    real_tokenizers: dict[str, Tokenizer], texts: list[str], name: str
) -> None:
    tokenizer = real_tokenizers[name]
    for text in texts:
        ids = tokenizer.encode(text)
        for skip in (True, False):
            expected = tokenizer.decode(ids, skip_special_tokens=skip)
            assert stream(tokenizer, ids, skip=skip) == expected
        half = len(ids) // 2
        before = tokenizer.decode(ids[:half])
        if not before.endswith("\ufffd"):
            expected = tokenizer.decode(ids)[len(before) :]
            assert stream(tokenizer, ids[half:], prompt=ids[:half]) == expected
