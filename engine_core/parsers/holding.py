"""Length of a text's end that may still become a tag."""

from __future__ import annotations


def held_back(text: str, tag: str, leading: str = "") -> int:
    """Length of the longest end of ``text`` that may be the beginning of ``leading* tag``.

    Args:
        text: does not contain ``tag``.
        tag: the tag to look for.
        leading: characters that are dropped before the tag.
    """
    length = next(n for n in range(len(tag) - 1, -1, -1) if text.endswith(tag[:n]))
    before = text[: len(text) - length]
    return length + len(before) - len(before.rstrip(leading)) if leading else length
