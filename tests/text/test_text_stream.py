from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine_core.configs import SamplingParams
from engine_core.text import TextStream, Tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def make(tokenizer: Tokenizer, **sampling: Any) -> TextStream:
    return TextStream(tokenizer, SamplingParams(max_tokens=None, **sampling), ())


def reference(
    tokenizer: Tokenizer, ids: list[int], stop: list[str], min_tokens: int
) -> tuple[str, str | None, int]:
    """Text, stop string and number of tokens, found by decoding everything for each token."""
    done = 0
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        text = text.removesuffix("\ufffd")  # may be completed by the next token
        if count > min_tokens:
            found = []
            for string in stop:
                start = text.find(string, max(0, done + 1 - len(string)))
                if start >= 0:
                    found.append((start, -len(string), string))
            if found:
                start, _, string = min(found)
                return text[:start], string, count
        done = len(text)
    return tokenizer.decode(ids), None, len(ids)


@given(
    st.text("the wor ld你😀", max_size=24),
    st.lists(st.text("the 你😀", min_size=1, max_size=4), max_size=3),
    st.integers(0, 8),
    st.data(),
)
def test_equals_decoding_everything_for_each_token(
    byte_level: Tokenizer, text: str, stop: list[str], min_tokens: int, data: st.DataObject
) -> None:
    ids = encode(byte_level, text)
    expected_text, expected_stop, expected_used = reference(byte_level, ids, stop, min_tokens)
    stream = make(byte_level, stop=tuple(stop), min_tokens=min_tokens)
    given_out, rest = "", ids
    while rest and stream.stopped_by is None:
        size = data.draw(st.integers(1, len(rest)))
        given_out += stream.append(rest[:size])
        rest = rest[size:]
        # Once given out, text stays.
        assert expected_text.startswith(given_out)
    given_out += stream.finish()
    assert (given_out, stream.stopped_by) == (expected_text, expected_stop)
    assert stream.num_tokens == expected_used


def test_says_which_token_completed_the_stop_string(byte_level: Tokenizer) -> None:
    ids = encode(byte_level, "hello world. more text")
    cut = len(encode(byte_level, "hello world."))
    stream = make(byte_level, stop=("world.",))
    assert (stream.append(ids), stream.stopped_by) == ("hello ", "world.")
    assert stream.num_tokens == cut < len(ids)


def test_newline_byte_stops_at_once(byte_fallback: Tokenizer) -> None:
    newline = byte_fallback.token_to_id("<0x0A>")
    assert newline is not None
    stream = TextStream(byte_fallback, SamplingParams(stop=("\n",)), ())
    stream.append([newline])
    assert stream.stopped_by == "\n"


def test_stop_string_counts_only_after_min_tokens(byte_level: Tokenizer) -> None:
    ids = encode(byte_level, "hello world hello world")
    once = len(encode(byte_level, "hello world"))
    early = make(byte_level, stop=("world",), min_tokens=once - 1)
    assert (early.append(ids), early.num_tokens) == ("hello ", once)
    late = make(byte_level, stop=("world",), min_tokens=once)
    assert (late.append(ids), late.num_tokens) == ("hello world hello ", len(ids))


def test_finish_gives_what_was_held_back(byte_level: Tokenizer) -> None:
    stream = make(byte_level, stop=("world",))
    ids = encode(byte_level, "hello wor")
    assert stream.append(ids) + stream.finish() == "hello wor"
    broken = make(byte_level)
    assert broken.append(encode(byte_level, "龘")[:-1]) == ""
    assert broken.finish() == "\ufffd"


def test_finish_after_a_stop_string_is_empty(byte_level: Tokenizer) -> None:
    stream = make(byte_level, stop=("lo",))
    assert stream.append(encode(byte_level, "hello")) == "hel"
    assert (stream.stopped_by, stream.finish()) == ("lo", "")


def test_special_tokens_are_shown_if_asked_for(byte_level: Tokenizer) -> None:
    end = byte_level.token_to_id("<|end|>")
    assert end is not None
    ids = [*encode(byte_level, "hello"), end]
    assert make(byte_level).append(ids) == "hello"
    assert make(byte_level, skip_special_tokens=False).append(ids) == "hello<|end|>"
