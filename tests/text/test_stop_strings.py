import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.text import StopStringMatcher

letters = st.text("abc", max_size=12)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def cut(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that begins first, the longest of those."""
    found = [(text.find(string), -len(string), string) for string in stop if string in text]
    if not found:
        return text, None
    start, _, string = min(found)
    return text[:start], string


def run(pieces: list[str], stop: list[str]) -> tuple[str, str | None]:
    matcher = StopStringMatcher(stop)
    released = ""
    for piece in pieces:
        text, stopped_by = matcher.append(piece)
        released += text
        if stopped_by is not None:
            return released, stopped_by
    return released + matcher.finish(), None


@given(letters, stop_lists)
def test_cuts_a_whole_text(text: str, stop: list[str]) -> None:
    assert run([text], stop) == cut(text, stop)


@given(st.lists(letters, max_size=6), stop_lists)
def test_ends_with_the_piece_that_completes_a_stop_string(
    pieces: list[str], stop: list[str]
) -> None:
    texts = ["".join(pieces[: count + 1]) for count in range(len(pieces))] or [""]
    ended = next((text for text in texts if cut(text, stop)[1] is not None), texts[-1])
    assert run(pieces, stop) == cut(ended, stop)


@given(st.lists(letters, max_size=8), st.text("abc", min_size=1, max_size=5))
def test_one_stop_string_is_found_however_the_text_is_cut(pieces: list[str], stop: str) -> None:
    assert run(pieces, [stop]) == cut("".join(pieces), [stop])


@given(st.lists(letters, max_size=6), stop_lists)
def test_releases_all_but_what_may_become_a_stop_string(pieces: list[str], stop: list[str]) -> None:
    matcher = StopStringMatcher(stop)
    text = released = ""
    for piece in pieces:
        given_out, stopped_by = matcher.append(piece)
        text += piece
        released += given_out
        if stopped_by is not None:
            break
        held = text[len(released) :]
        beginnings = [string[:length] for string in stop for length in range(1, len(string))]
        longest = max((item for item in beginnings if text.endswith(item)), key=len, default="")
        assert held == longest


def test_completed_strings_do_not_count_while_they_may_not_stop() -> None:
    matcher = StopStringMatcher(["END", "ENDLESS"])
    assert matcher.append("an END", may_stop=False) == ("an ", None)
    assert matcher.append("LES", may_stop=False) == ("", None)
    assert matcher.append("S END of it") == ("", "ENDLESS")


def test_ignored_string_is_released() -> None:
    matcher = StopStringMatcher(["END"])
    assert matcher.append("an END", may_stop=False) == ("an END", None)
    assert matcher.append(" more") == (" more", None)
    assert matcher.append(" END") == (" ", "END")


def test_long_stop_strings_take_no_more_memory_than_themselves() -> None:
    # As many, and as long, as a server takes; their beginnings alone would be 34 million bytes.
    stop = [chr(0x4E00 + number) + "\u5b57" * 511 for number in range(64)]
    tracemalloc.start()
    try:
        matcher = StopStringMatcher(stop)
        assert matcher.append("one \u4e00\u5b57\u5b57") == ("one ", None)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 100_000
    assert matcher.append("\u5b57" * 509 + "!") == ("", stop[0])


def test_texts_with_the_same_stop_strings_do_not_disturb_each_other() -> None:
    first, second = StopStringMatcher(["end", "dot"]), StopStringMatcher(["end", "dot"])
    assert first.append("the en") == ("the ", None)
    assert second.append("d") == ("", None)
    assert second.append("ay") == ("day", None)
    assert first.append("d") == ("", "end")
    assert second.append(" en") == (" ", None)


def test_no_stop_strings_hold_nothing_back() -> None:
    matcher = StopStringMatcher([])
    assert matcher.append("anything") == ("anything", None)
    assert matcher.finish() == ""


def test_refuses_an_empty_stop_string() -> None:
    with pytest.raises(ValueError, match="empty stop string"):
        StopStringMatcher(["a", ""])
