"""A model behind an OpenAI-compatible server, as ``engine-core chat --url`` sees it."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine_core.errors import EngineError, RequestError

_TIMEOUT = 600.0  # seconds without a byte


@dataclass(slots=True)
class Answer:
    """An answer to a chat message so far, from a model here or on a server.

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


class RemoteModel:
    """A model of a server.

    Args:
        url: the server's, with or without ``/v1`` at its end.
        name: which of its models; the first one if None.
        api_key: sent with every request if given.

    Attributes:
        name: the model's name there.
        max_len: tokens of its context, or None if the server does not say.
        media_kinds: what it takes besides text, or None if the server does not say.
        media_kinds_off: what it would take but for an option; a server does not say.

    Raises:
        EngineError: the server cannot be reached, or has no such model.
    """

    def __init__(self, url: str, name: str | None, api_key: str | None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        if not self._url.startswith(("http://", "https://")):
            raise RequestError(f"a server's URL begins with http:// or https://, got {url!r}")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        with self._open("/v1/models") as response:
            models = {model["id"]: model for model in json.load(response)["data"]}
        if name is not None and name not in models:
            known = ", ".join(map(repr, models))
            raise RequestError(f"{self._url} has no model {name!r}; it has {known}")
        self.name: str = name if name is not None else next(iter(models))
        self.max_len: int | None = models[self.name].get("max_model_len")
        takes = models[self.name].get("input_modalities")
        self.media_kinds = (
            None if takes is None else tuple(each for each in takes if each != "text")
        )
        self.media_kinds_off: tuple[str, ...] = ()
        self._counts = True

    def count(self, messages: Sequence[Mapping[str, Any]]) -> int | None:
        """Tokens of the prompt that ``messages`` make; None if the server does not tell.

        Of a prompt that shows something no server tells.

        Raises:
            RequestError: the messages do not fit the model's chat template.
        """
        if not self._counts or any(isinstance(message["content"], list) for message in messages):
            return None
        try:
            with self._open("/tokenize", {"model": self.name, "messages": messages}) as response:
                count: int = json.load(response)["count"]
                return count
        except _UnknownPathError:
            self._counts = False
            return None

    def stream(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> Generator[Answer, None, None]:
        """Answer ``messages``; yields the whole answer so far after each piece of it.

        Raises:
            RequestError: the server refused the request.
            EngineError: it failed, or the connection did.
        """
        body = {
            **options,
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        response = self._open("/v1/chat/completions", body)
        answer = Answer()
        with response:
            for line in _lines(response):
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise EngineError(event["error"]["message"])
                if event.get("usage"):
                    answer.num_tokens = event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    piece = choice["delta"].get("content")
                    if piece:
                        answer.text += piece
                        # Until the usage comes: one token per piece is near enough.
                        answer.num_tokens += 1
                    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                yield answer
        raise EngineError("the server closed the connection before the answer's end")

    def _open(self, path: str, body: Any = None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=_TIMEOUT)
            return response
        except urllib.error.HTTPError as error:
            with error:
                message = _message(error.read(), f"{self._url} answered {error.code}")
                code = error.code
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise EngineError(
                f"{self._url} cannot be reached: {reason}; start a server there with "
                "'engine-core serve', or correct the --url"
            ) from None
        if code in (404, 405) and path == "/tokenize":
            raise _UnknownPathError(message)
        raise RequestError(message) if code < 500 else EngineError(message)


class _UnknownPathError(RequestError):
    pass


def _message(content: bytes, otherwise: str) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return otherwise


def _lines(response: http.client.HTTPResponse) -> Generator[bytes, None, None]:
    try:
        yield from response
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(f"the connection to the server broke: {error}") from None
