"""Files that a command shows to a model: pictures, videos and sounds."""

from __future__ import annotations

import base64
import mimetypes
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine_core.errors import RequestError

KINDS = ("image", "video", "audio")
_LARGEST_BYTES = 2**30
_PLACE = re.compile(r"messages\.(\d+)\.content\.(\d+)(\.\w+)*")


class FilePart(dict[str, Any]):
    """A part of a message that has a file's content, as OpenAI's and vLLM's clients send it.

    Args:
        kind: "image", "video" or "audio".
        path: the file's.

    Raises:
        RequestError: it cannot be read.
    """

    def __init__(self, kind: str, path: Path) -> None:
        try:
            if not path.is_file():
                known = "is no file" if path.exists() else "is not there; check the path"
                if re.match(r"https?:/", str(path)):
                    known = "is an address; fetch it, and give the file"
                raise RequestError(f"{kind} {path} {known}")
            if (size := path.stat().st_size) > _LARGEST_BYTES:
                raise RequestError(
                    f"{kind} {path} has {size} bytes, and {_LARGEST_BYTES} are taken at most"
                )
            content = path.read_bytes()
        except RequestError:
            raise
        except (OSError, ValueError) as error:
            raise RequestError(f"{kind} {path} cannot be read: {error}") from None
        guessed = mimetypes.guess_type(path.name)[0] or ""
        # The decoder looks at the content; the type only has to name the kind.
        mime = guessed if guessed.startswith(f"{kind}/") else f"{kind}/unknown"
        url = f"data:{mime};base64,{base64.b64encode(content).decode()}"
        super().__init__(type=f"{kind}_url", **{f"{kind}_url": {"url": url}})
        self.kind = kind
        self.path = path


def typed_path(text: str) -> Path:
    """The path of what somebody typed or dropped into a terminal: perhaps quoted, or with ``~``."""
    path = Path(text).expanduser()
    if not path.exists():
        try:
            words = shlex.split(text)
        except ValueError:  # a lone quotation mark
            words = []
        if len(words) == 1:
            return Path(words[0]).expanduser()
    return path


def content(text: str, parts: Sequence[FilePart]) -> str | list[Any]:
    """A message's content: the files, and then the text."""
    return [*parts, {"type": "text", "text": text}] if parts else text


def check_takes(
    parts: Iterable[FilePart], kinds: Sequence[str], model: str, off: Sequence[str] = ()
) -> None:
    """Refuse files of which a model takes none.

    Args:
        parts: the files.
        kinds: that are taken.
        model: its name.
        off: kinds that it would take if ``limit_mm_per_prompt`` were not 0 for them.

    Raises:
        RequestError: names the file, and what the model takes, or the option.
    """
    for part in parts:
        if part.kind in off:
            raise RequestError(
                f"{part.path} is given as {part.kind}, and --limit-mm-per-prompt is 0 for the kind "
                f"{part.kind!r}, which {model} would take; raise it or leave it out"
            )
        if part.kind not in kinds:
            takes = f"takes {', '.join(kinds)} and text" if kinds else "takes text alone"
            raise RequestError(
                f"{part.path} is given as {part.kind}, and {model} {takes}; leave it out"
            )


def named(error: RequestError, messages: Sequence[Mapping[str, Any]]) -> RequestError:
    """The error in terms of the files in ``messages`` that it is about."""

    def name(place: re.Match[str]) -> str:
        try:
            part = messages[int(place[1])]["content"][int(place[2])]
        except (IndexError, KeyError):
            return place[0]
        return str(part.path) if isinstance(part, FilePart) else place[0]

    return RequestError(_PLACE.sub(name, str(error)))


__all__ = ["KINDS", "FilePart", "check_takes", "content", "named", "typed_path"]
