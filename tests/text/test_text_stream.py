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
    given_out, used, rest = "", 0, ids
    while rest and stream.stopped_by is None:
        size = data.draw(st.integers(1, len(rest)))
        update = stream.append(rest[:size])
        given_out += update.delta
        used += update.num_tokens_used
        rest = rest[size:]
        # Once given out, text stays.
        assert expected_text.startswith(given_out)
    given_out += stream.finish()
    assert (given_out, stream.stopped_by, used) == (expected_text, expected_stop, expected_used)
    assert stream.text == given_out


def test_says_which_token_completed_the_stop_string(byte_level: Tokenizer) -> None:
    ids = encode(byte_level, "hello world. more text")
    cut = len(encode(byte_level, "hello world."))
    update = make(byte_level, stop=("world.",)).append(ids)
    assert (update.delta, update.stopped_by) == ("hello ", "world.")
    assert update.num_tokens_used == cut < len(ids)


def test_newline_byte_stops_at_once(byte_fallback: Tokenizer) -> None:
    newline = byte_fallback.token_to_id("<0x0A>")
    assert newline is not None
    stream = TextStream(byte_fallback, SamplingParams(stop=("\n",)), ())
    assert stream.append([newline]).stopped_by == "\n"


def test_stop_string_counts_only_after_min_tokens(byte_level: Tokenizer) -> None:
    ids = encode(byte_level, "hello world hello world")
    once = len(encode(byte_level, "hello world"))
    assert (
        make(byte_level, stop=("world",), min_tokens=once - 1).append(ids).num_tokens_used == once
    )
    late = make(byte_level, stop=("world",), min_tokens=once)
    update = late.append(ids)
    assert (update.delta, update.num_tokens_used) == ("hello world hello ", len(ids))


def test_finish_gives_what_was_held_back(byte_level: Tokenizer) -> None:
    stream = make(byte_level, stop=("world",))
    ids = encode(byte_level, "hello wor")
    assert stream.append(ids).delta + stream.finish() == "hello wor"
    broken = make(byte_level)
    assert broken.append(encode(byte_level, "龘")[:-1]).delta == ""
    assert broken.finish() == broken.text == "\ufffd"


def test_finish_after_a_stop_string_is_empty(byte_level: Tokenizer) -> None:
    stream = make(byte_level, stop=("lo",))
    assert stream.append(encode(byte_level, "hello")).stopped_by == "lo"
    assert (stream.finish(), stream.text) == ("", "hel")


def test_special_tokens_are_shown_if_asked_for(byte_level: Tokenizer) -> None:
    end = byte_level.token_to_id("<|end|>")
    assert end is not None
    ids = [*encode(byte_level, "hello"), end]
    assert make(byte_level).append(ids).delta == "hello"
    assert make(byte_level, skip_special_tokens=False).append(ids).delta == "hello<|end|>"
