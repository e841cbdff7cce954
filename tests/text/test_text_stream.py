from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from conftest import byte_fallback_backend, byte_level_backend
from engine_core.configs import SamplingParams
from engine_core.text import FastTokenizer, TextStream

TOKENIZER = FastTokenizer(byte_level_backend(), special_tokens={}, chat_templates={})
BYTE_FALLBACK = FastTokenizer(byte_fallback_backend(), special_tokens={}, chat_templates={})


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def make(**sampling: Any) -> TextStream:
    return TextStream(TOKENIZER, SamplingParams(max_tokens=None, **sampling), ())


def reference(ids: list[int], stop: list[str], min_tokens: int) -> tuple[str, str | None, int]:
    """Text, stop string and number of tokens, found by decoding everything for each token."""
    done = 0
    for count in range(1, len(ids) + 1):
        text = TOKENIZER.decode(ids[:count])
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
    return TOKENIZER.decode(ids), None, len(ids)


@given(
    st.text("the wor ld你😀", max_size=24),
    st.lists(st.text("the 你😀", min_size=1, max_size=4), max_size=3),
    st.integers(0, 8),
    st.data(),
)
def test_equals_decoding_everything_for_each_token(
    text: str, stop: list[str], min_tokens: int, data: st.DataObject
) -> None:
    ids = ids_of(text)
    expected_text, expected_stop, expected_used = reference(ids, stop, min_tokens)
    stream = make(stop=tuple(stop), min_tokens=min_tokens)
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


def test_says_which_token_completed_the_stop_string() -> None:
    ids = ids_of("hello world. more text")
    cut = len(ids_of("hello world."))
    update = make(stop=("world.",)).append(ids)
    assert (update.delta, update.stopped_by) == ("hello ", "world.")
    assert update.num_tokens_used == cut < len(ids)


def test_newline_byte_stops_at_once() -> None:
    newline = BYTE_FALLBACK.token_to_id("<0x0A>")
    assert newline is not None
    stream = TextStream(BYTE_FALLBACK, SamplingParams(stop=("\n",)), ())
    assert stream.append([newline]).stopped_by == "\n"


def test_stop_string_counts_only_after_min_tokens() -> None:
    ids = ids_of("hello world hello world")
    once = len(ids_of("hello world"))
    assert make(stop=("world",), min_tokens=once - 1).append(ids).num_tokens_used == once
    late = make(stop=("world",), min_tokens=once)
    update = late.append(ids)
    assert (update.delta, update.num_tokens_used) == ("hello world hello ", len(ids))


def test_finish_gives_what_was_held_back() -> None:
    stream = make(stop=("world",))
    ids = ids_of("hello wor")
    assert stream.append(ids).delta + stream.finish() == "hello wor"
    broken = make()
    assert broken.append(ids_of("龘")[:-1]).delta == ""
    assert broken.finish() == broken.text == "\ufffd"


def test_finish_after_a_stop_string_is_empty() -> None:
    stream = make(stop=("lo",))
    assert stream.append(ids_of("hello")).stopped_by == "lo"
    assert (stream.finish(), stream.text) == ("", "hel")


def test_special_tokens_are_shown_if_asked_for() -> None:
    end = TOKENIZER.token_to_id("<|end|>")
    assert end is not None
    ids = [*ids_of("hello"), end]
    assert make().append(ids).delta == "hello"
    assert make(skip_special_tokens=False).append(ids).delta == "hello<|end|>"
