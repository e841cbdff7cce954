"""State shared by the handlers: the engine, the server's phase, and its limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fastapi import Request

from engine_core.engine.shared_count import SharedCount
from engine_core.errors import EngineDeadError
from engine_core.server.body import BodyRoom, now
from engine_core.server.errors import ApiError, busy, conflict, unavailable
from engine_core.server.metrics import Metrics
from engine_core.server.protocol import Conversation
from engine_core.server.response_store import ResponseStore
from engine_core.server.settings import ServerSettings
from engine_core.text import token_bytes
from engine_core.text.token_bytes import SPECIAL

if TYPE_CHECKING:
    from engine_core.engine.async_engine import AsyncEngine, ReplicaStatus
    from engine_core.registry import Registry
    from engine_core.steps import EngineStats

Result = TypeVar("Result")

DRAINING = "the server is shutting down and takes no more requests"

# Below this many bytes or characters a thread, or a look at the vocabulary, costs more than it
# saves.
_LONG_TEXT = 8192


class Service:
    """The engine behind the endpoints, and the state of the server.

    Attributes:
        settings: the user's.
        names: the served names of the model; the first one is written into answers.
        metrics: the Prometheus metrics.
        created: when the server began, in seconds since 1970.
        in_flight: generation requests between their arrival and their end, of all processes that
            serve together.
        responses: those kept for later requests; None if there are other processes, which would not
            know them, or none are to be kept.
    """

    def __init__(self, settings: ServerSettings, in_flight: SharedCount | None = None) -> None:
        self.settings = settings
        self.bodies = BodyRoom(settings.max_body_size)
        self.names = settings.served_model_name
        self.created = now()
        self.in_flight = in_flight or SharedCount()
        self.responses: ResponseStore | None = None
        if settings.api_server_count == 1 and settings.max_stored_responses:
            self.responses = ResponseStore(settings.max_stored_responses, settings.max_stored_size)
        self._engine: AsyncEngine | None = None
        self._parsers: Registry | None = None
        self._token_bytes: Sequence[bytes] | None = None
        self._draining = False
        self.metrics = Metrics(self._stats, lambda: self.replicas)

    @classmethod
    def of(cls, request: Request) -> Service:
        """That of the application that ``request`` came to."""
        service: Service = request.app.state.service
        return service

    @property
    def phase(self) -> Literal["loading", "ready", "restarting", "draining", "dead"]:
        """The server's current phase; "restarting" if there are replicas, and none is ready."""
        if self._engine is None:
            return "draining" if self._draining else "loading"
        if self._engine.dead is not None:
            return "dead"
        if self._draining:
            return "draining"
        return "ready" if self._engine.takes_requests else "restarting"

    @property
    def dead(self) -> EngineDeadError | None:
        """Why the engine stopped, if it did."""
        return None if self._engine is None else self._engine.dead

    @property
    def replicas(self) -> list[ReplicaStatus]:
        """The state of each replica if there may be several, else nothing."""
        if self._engine is None or not self.settings.several_replicas:
            return []
        return self._engine.replicas

    def attach(self, engine: AsyncEngine, parsers: Registry) -> None:
        """The model is loaded; requests are taken from now on."""
        self._engine = engine
        self._parsers = parsers

    def drain(self) -> None:
        """Take no more requests."""
        self._draining = True

    @property
    def engine(self) -> AsyncEngine:
        """The engine, if it takes requests.

        Raises:
            ApiError: 503, and why.
        """
        phase = self.phase
        if phase == "ready":
            assert self._engine is not None, "it is ready"
            return self._engine
        if phase == "dead":
            raise unavailable(f"the engine has stopped: {self.dead}", "engine_dead")
        if phase == "draining":
            raise unavailable(DRAINING, "draining")
        if phase == "restarting":
            raise unavailable("all replicas are started again; try again soon", "restarting")
        raise unavailable("the model is being loaded; try again soon", "loading")

    @property
    def parsers(self) -> Registry:
        """The registry that has the parsers of tool calls and reasoning."""
        assert self._parsers is not None, "it comes with the engine"
        return self._parsers

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt: one token of the model's length is left for the answer."""
        longest = self.engine.max_model_len - 1
        wanted = self.settings.max_prompt_tokens
        return longest if wanted is None else min(wanted, longest)

    def check_room(self) -> None:
        """Refuse a request before its body is read if too many are here.

        Raises:
            ApiError: 429.
        """
        limit = self.engine.num_rows + self.settings.max_queued_requests
        if self.in_flight.total > limit:
            raise busy(
                f"{limit} requests are being answered or wait, which is as many as this "
                "server takes; try again soon"
            )

    def check_model(self, name: str | None) -> str:
        """The name under which a request's model is served: the first one if it names none.

        Raises:
            ApiError: 404; there is no such model.
        """
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise ApiError(
                404,
                f"the model {name[:100]!r} is not served here; there is "
                f"{', '.join(map(repr, self.names))}",
                param="model",
                code="model_not_found",
            )
        return name

    def check_length(self, token_ids: list[int], param: str) -> None:
        """Refuse a prompt that is too long.

        Raises:
            ApiError: 400.
        """
        if len(token_ids) > self.max_prompt_tokens:
            raise self._too_long(f"{len(token_ids)} tokens", str(self.max_prompt_tokens), param)

    def check_text(self, text: str, param: str) -> None:
        """Refuse a text that is too long in any tokenisation, without tokenising it for seconds.

        Raises:
            ApiError: 400.
        """
        if len(text) < _LONG_TEXT:
            return
        most = self.max_prompt_tokens * self._longest_token
        size = len(text.encode(errors="replace"))
        if size > most:
            tokens = f"{self.max_prompt_tokens} tokens of at most {self._longest_token} bytes each"
            raise self._too_long(f"{size} bytes of text", tokens, param)

    def _too_long(self, size: str, most: str, param: str) -> ApiError:
        return self.too_long(f"it has {size}, and the longest taken here has {most}", param)

    def too_long(self, why: str, param: str) -> ApiError:
        """Status 400, in words by which clients that do not look at the code tell it from others.

        langchain-openai looks for the first of them, litellm and pydantic-ai for the last.
        """
        return ApiError(
            400,
            f"the prompt is too long: {why}; this model's maximum context length is "
            f"{self.engine.max_model_len} tokens",
            param=param,
            code="context_length_exceeded",
        )

    def tokenize(
        self,
        prompt: str | list[int],
        *,
        truncate: int | None = None,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        """The token ids of a prompt.

        ``truncate`` is how many of its end are kept; see :meth:`truncated`.

        Raises:
            ApiError: 400; it is too long.
            RequestError: the engine has no tokenizer, or there is no such token.
        """
        tokenizer = self.engine.tokenizer
        if isinstance(prompt, str):
            if tokenizer is not None:
                self.check_text(prompt, "prompt")
                if add_special_tokens is False:
                    prompt = tokenizer.encode(prompt, add_special_tokens=False)
        elif truncate is None:
            self.check_length(prompt, "prompt")
        _, token_ids = self.engine.tokenize(prompt)
        return self.truncated(token_ids, truncate, "prompt")

    def truncated(self, token_ids: list[int], truncate: int | None, param: str) -> list[int]:
        """The last ``truncate`` tokens of a prompt; -1 for as many as are taken, None for all.

        Raises:
            ApiError: 400; it is too long.
        """
        if truncate is not None:
            token_ids = token_ids[-(self.max_prompt_tokens if truncate == -1 else truncate) :]
        self.check_length(token_ids, param)
        return token_ids

    def render_chat(
        self,
        body: Conversation,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> list[int]:
        """The token ids of the prompt that a conversation makes.

        Args:
            body: how it is made.
            messages: those of ``body`` as templates know them.
            tools: those of which the template is told.

        Raises:
            ApiError: 400; its text is too long, or the fields contradict each other.
            RequestError: the messages do not fit the template, or there is none.
        """
        continued = bool(body.continue_final_message)
        if continued and body.add_generation_prompt:
            raise conflict(
                "continue_final_message continues the last message, and add_generation_prompt "
                "begins another; leave one of them out",
                "continue_final_message",
            )
        return self.engine.frontend.render_chat(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False and not continued,
            continue_final_message=continued,
            add_special_tokens=bool(body.add_special_tokens),
            chat_template=self.settings.chat_template,
            tools=tools,
            template_kwargs=body.template_variables,
            check_text=lambda text: self.check_text(text, "messages"),
        )

    async def run_text(self, size: int, work: Callable[[], Result]) -> Result:
        """Run ``work`` on a body of ``size`` bytes, in a thread if it is long."""
        if size < _LONG_TEXT:
            return work()
        return await asyncio.to_thread(work)

    async def token_bytes(self) -> Sequence[bytes]:
        """Each token's bytes, computed on first use."""
        if self._token_bytes is None:
            return await asyncio.to_thread(self._all_token_bytes)
        return self._token_bytes

    def _all_token_bytes(self) -> Sequence[bytes]:
        if self._token_bytes is None:
            tokenizer = self.engine.tokenizer
            assert tokenizer is not None, "only texts are asked for their bytes"
            self._token_bytes = token_bytes(tokenizer)
        return self._token_bytes

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token."""
        return max(len(token.removeprefix(SPECIAL)) for token in self._all_token_bytes())

    def _stats(self) -> EngineStats | None:
        return None if self._engine is None else self._engine.stats()


def default_name(model: str) -> str:
    """The default served name: the last part of a path, or the hub id."""
    path = Path(model)
    return path.resolve().name if path.exists() else model
