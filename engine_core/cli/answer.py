"""The answer to a chat message, whether the model runs here or on a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Answer:
    """An answer so far.

    Attributes:
        text: its text.
        num_tokens: tokens generated.
        finish_reason: "stop", "length" or "error"; None while it goes on.
        error: what went wrong if the reason is "error".
    """

    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
