"""Conversion of bodies to engine requests, and of their outputs to answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from engine_core.configs import GuidedParams, SamplingParams
from engine_core.engine.frontend import Prompt
from engine_core.errors import ConfigError, EngineDeadError, EngineError, ErrorCode, RequestError
from engine_core.server.connection import WRITER, Writer
from engine_core.server.context import RequestContext
from engine_core.server.encoding import DONE, event
from engine_core.server.errors import ApiError, ClientGone, as_api_error, conflict, unavailable
from engine_core.server.metrics import TokenClock
from engine_core.server.protocol import (
    ChatBody,
    GenerationBody,
    JsonObjectResponseFormat,
    JsonSchemaResponseFormat,
    NamedToolChoice,
)
from engine_core.server.service import DRAINING, Service

if TYPE_CHECKING:
    from engine_core.engine.async_engine import RequestStream
    from engine_core.steps import CompletionOutput, RequestOutput

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

_OWN_WAY = ("max_tokens", "logit_bias", "prompt_logprobs")
# Fields that are handed on as they are.
_SAME_NAME = [
    name
    for name in GenerationBody.model_fields
    if name in SamplingParams.model_fields and name not in _OWN_WAY
]


def sampling_params(
    defaults: Callable[..., SamplingParams],
    body: GenerationBody,
    guided: Mapping[str, GuidedParams],
    **own: Any,
) -> SamplingParams:
    """The parameters that ``body`` asks for, over ``defaults``.

    Args:
        defaults: a function that lays fields over the checkpoint's recommendations.
        body: the request's.
        guided: the constraint of each field that guides the text, by field name.
        **own: further fields of :class:`SamplingParams`.

    Raises:
        ApiError: they contradict each other.
    """
    values = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    if values.get("seed") == -1:
        del values["seed"]
    if values.get("top_p") == 0:
        # The fewest of the most probable tokens: one.
        del values["top_p"]
        values["temperature"] = 0.0
    if body.logit_bias is not None:
        values["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    try:
        return defaults(**values, **own, guided=_only(guided))
    except ConfigError as error:
        field = error.faults[0].field if error.faults else None
        param = field if field in type(body).model_fields else None
        message = error.named(lambda place: place)
        raise ApiError(400, message, param=param, code="conflicting_fields") from None


def guided_fields(body: GenerationBody) -> dict[str, GuidedParams]:
    """The constraint of each field that guides the text, by field name."""
    ways: dict[str, GuidedParams] = {}
    if isinstance(body.response_format, JsonObjectResponseFormat):
        ways["response_format"] = GuidedParams(json_object=True)
    elif isinstance(body.response_format, JsonSchemaResponseFormat):
        schema = body.response_format.json_schema.schema_
        ways["response_format"] = GuidedParams(json_schema=schema)
    if body.guided_json is not None:
        ways["guided_json"] = GuidedParams(json_schema=body.guided_json)
    if body.guided_regex is not None:
        ways["guided_regex"] = GuidedParams(regex=body.guided_regex)
    if body.guided_choice is not None:
        ways["guided_choice"] = GuidedParams(choice=tuple(body.guided_choice))
    if body.guided_grammar is not None:
        ways["guided_grammar"] = GuidedParams(grammar=body.guided_grammar)
    if body.structured_outputs is not None:
        given = body.structured_outputs.model_dump(exclude_none=True, exclude_defaults=True)
        for name, value in given.items():
            if name == "json_":
                ways["structured_outputs.json"] = GuidedParams(json_schema=value)
            elif value is not False:
                ways[f"structured_outputs.{name}"] = GuidedParams(**{name: value})
    return ways


def _only(ways: Mapping[str, GuidedParams]) -> GuidedParams | None:
    if len(ways) > 1:
        names = " and ".join(ways)
        raise conflict(
            f"{names} each say what the text must be; give one of them", next(iter(ways))
        )
    return next(iter(ways.values()), None)


def _named_by_field(
    error: RequestError, body: GenerationBody, *, of_calls: bool = False
) -> RequestError:
    """A complaint about the guided text in terms of the field that asked for it."""
    place = error.param
    if place is None or not place.startswith("guided."):
        return error
    _, _, inner = place.removeprefix("guided.").partition(".")
    param = _guided_place(body, inner, of_calls=of_calls)
    return RequestError(f"{param}{str(error).removeprefix(place)}", param=param)


def _guided_place(body: GenerationBody, inner: str = "", *, of_calls: bool = False) -> str:
    """The field that asked for the guided text, and in it the place ``inner`` of its schema.

    ``of_calls`` says that the schema is that of calls, where the text may be something else too.
    """
    ways = {} if of_calls else guided_fields(body)
    if isinstance(body.response_format, JsonSchemaResponseFormat) and not of_calls:
        field = "response_format.json_schema.schema"
    elif ways:
        field = next(iter(ways))
    else:
        assert isinstance(body, ChatBody), "a completion is guided by its own fields only"
        field, inner = _tool_field(body, inner)
    return f"{field}.{inner}" if inner else field


def _tool_field(body: ChatBody, inner: str) -> tuple[str, str]:
    """The parameters of the tool that a place in the schema of calls is in, and where in them."""
    chosen = body.tool_choice
    if isinstance(chosen, NamedToolChoice):
        names = [tool.function.name for tool in body.tools or ()]
        return f"tools.{names.index(chosen.function.name)}.function.parameters", inner
    found = re.match(r"\$defs\.tool_(\d+)(?:\.|$)", inner)
    if found is None:
        return "tools", ""
    place = list(body.offered)[int(found[1])]
    return f"tools.{place}.function.parameters", inner[found.end() :]


def check_common(body: GenerationBody, service: Service) -> None:
    """Check the common fields of both kinds of generation beyond what a schema can state.

    Raises:
        ApiError: 400 or 404.
    """
    service.check_model(body.model)
    service.engine.frontend.check_task("generate")
    if body.n is not None and body.n > service.settings.max_n:
        raise ApiError(
            400,
            f"n: {body.n} completions are asked for, and this server makes at most "
            f"{service.settings.max_n}",
            param="n",
            code="invalid_value",
        )
    if body.stream_options is not None and not body.stream:
        raise conflict("stream_options needs stream", "stream_options")
    options = body.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise conflict(
            "stream_options.continuous_usage_stats needs include_usage", "stream_options"
        )
    if body.prompt_logprobs is not None and body.stream:
        raise conflict("prompt_logprobs are not streamed; leave stream out", "prompt_logprobs")


def _check_count(service: Service, num_prompts: int, n: int) -> None:
    """Refuse a request that this server can never queue, even when it is idle.

    Raises:
        ApiError: 400.
    """
    rows = service.engine.num_rows
    queued = service.settings.max_queued_requests
    if num_prompts * n > rows + queued:
        raise ApiError(
            400,
            f"{num_prompts * n} sequences are asked for (prompts: {num_prompts}, n: {n}), and this "
            f"server takes at most {rows + queued} at once: {rows} that run and {queued} that wait",
            param="n" if n > 1 else "prompt",
            code="invalid_value",
        )


class Generation:
    """One HTTP request as engine requests, one per prompt.

    Args:
        service: the server.
        context: the HTTP request's.
        streams: what comes of the prompts.
        completes: whether their tokens are for the answer; else the prompts are only scored, which
            also generates one token.
        guided_by: the field that constrains the text, if one does.
    """

    def __init__(
        self,
        service: Service,
        context: RequestContext,
        streams: Sequence[RequestStream],
        *,
        completes: bool,
        guided_by: str | None,
    ) -> None:
        self._service = service
        self._context = context
        self._streams = streams
        self._completes = completes
        self._guided_by = guided_by
        self._clock = TokenClock(service.metrics, context.arrival)
        self._finish_reasons: list[str] = []
        self.prompt_token_ids = [stream.prompt_token_ids for stream in streams]
        self.completion_tokens = 0
        self._media_tokens: dict[str, int] = {}
        for kind, sizes in (item for stream in streams for item in stream.media_tokens.items()):
            field = f"{kind}_tokens"
            self._media_tokens[field] = self._media_tokens.get(field, 0) + sum(sizes)
            service.metrics.media_items.labels(kind).inc(len(sizes))
        self._cached: dict[int, int] = {}
        self._unfinished = len(streams)

    @classmethod
    async def start(
        cls,
        service: Service,
        context: RequestContext,
        identifier: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        body: GenerationBody,
        alternatives: Sequence[GuidedParams] = (),
    ) -> Generation:
        """Queue the requests, or none of them if one is refused.

        ``alternatives`` are the constraints of which a guided text keeps one: the answer's, and the
        calls'.

        Raises:
            EngineError: one is refused, or the engine is dead.
        """
        engine = service.engine
        _check_count(service, len(prompts), params.n)
        limits = [
            limit for limit in (service.settings.request_timeout, body.timeout) if limit is not None
        ]
        # The answer's constraint and the calls' one by one first: that finds the culprit.
        constraints = () if params.guided is None else (*alternatives, params.guided)
        try:
            for index, guided in enumerate(constraints):
                try:
                    await engine.frontend.grammars.check_async(guided)
                except RequestError as error:
                    of_calls = bool(alternatives) and index == 1
                    raise _named_by_field(error, body, of_calls=of_calls) from None
            media = engine.frontend.media
            shows = any("multi_modal_data" in each for each in prompts if isinstance(each, dict))
            with (
                service.metrics.preparing_media(lambda: media.stats)
                if shows
                else contextlib.nullcontext()
            ):
                streams = await engine.add_requests(
                    prompts,
                    params,
                    request_ids=[f"{identifier}-{index}" for index in range(len(prompts))],
                    priority=body.priority or 0,
                    timeout=min(limits, default=None),
                    arrival_time=context.arrival,
                    cache_salts=context.cache_salts(body.cache_salt),
                    client=context.client(body.cache_salt),
                    max_prompt_tokens=service.max_prompt_tokens,
                )
        except EngineDeadError:
            if service.phase == "draining":
                raise unavailable(DRAINING, "draining") from None
            raise
        except RequestError as error:
            if error.code is not ErrorCode.PROMPT_TOO_LONG:
                raise
            # With what it shows: its text alone was measured before. The name is the server's.
            _, _, why = str(error).partition(": ")
            raise service.too_long(why, "multi_modal_data") from None
        guided_by = None if params.guided is None else _guided_place(body)
        completes = body.max_tokens != 0
        return cls(service, context, streams, completes=completes, guided_by=guided_by)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield each new output with the index of its prompt.

        Raises:
            ApiError: a sequence failed, or was ended because the server shuts down.
            EngineError: a deadline passed, or the engine died.
        """
        ready: dict[int, None] = {}
        woken = asyncio.Event()

        def note(index: int) -> None:
            ready[index] = None
            woken.set()

        for index, stream in enumerate(self._streams):
            stream.listen(partial(note, index))
        while self._unfinished:
            await woken.wait()
            woken.clear()
            for index in list(ready):
                del ready[index]
                stream = self._streams[index]
                while (output := stream.take()) is not None:
                    self._take(index, output)
                    yield index, output
                    stream.wrote()

    async def push(self, events: Events, writer: Writer) -> None:
        """Write the events of all output that is to come, each as soon as its step's results come.

        While the client does not read, output is left where it becomes one.

        Raises:
            ApiError: a sequence failed, or was ended because the server shuts down.
            EngineError: a deadline passed, or the engine died.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def flow(index: int, stream: RequestStream) -> None:
            try:
                while stream.pending and not writer.paused and not ended.done():
                    if takes_text and (plain := stream.take_text()) is not None:
                        text, count = plain
                        self.completion_tokens += count
                        self._clock.tokens(index * 1024, count)
                        if piece := events.text(index, text):
                            writer.write(piece)
                    elif (output := stream.take()) is not None:
                        self._take(index, output)
                        if piece := events.output(index, output):
                            writer.write(piece)
                        stream.wrote()
                if not self._unfinished and not ended.done():
                    ended.set_result(None)
            except Exception as error:
                ended.set_exception(error)

        takes_text = events.takes_text and self._completes

        listeners = [partial(flow, *item) for item in enumerate(self._streams)]

        def resume() -> None:
            for listener in listeners:
                listener()

        writer.on_resume(resume)
        try:
            for stream, listener in zip(self._streams, listeners, strict=True):
                stream.wrote()  # what was taken before
                stream.listen(listener)
            await ended
        finally:
            writer.on_resume(None)
            for stream in self._streams:
                stream.listen(None)

    def _take(self, index: int, output: RequestOutput) -> None:
        self._cached[index] = output.metrics.num_cached_tokens
        self._unfinished -= output.finished
        for completion in output.outputs:
            count = len(completion.token_ids) if self._completes else 0
            self.completion_tokens += count
            if count:
                self._clock.tokens(index * 1024 + completion.index, count)
            if completion.finish_reason is not None:
                self._finish_reasons.append(completion.finish_reason)
                self._service.metrics.finished.labels(completion.finish_reason).inc()
                self._check(completion)

    def _check(self, completion: CompletionOutput) -> None:
        if completion.finish_reason == "error":
            error, code = str(completion.error), completion.error_code
            # What no check can foresee.
            if code in (ErrorCode.GRAMMAR_TOO_COMPLEX, ErrorCode.GRAMMAR_WITHOUT_END):
                raise ApiError(400, error, param=self._guided_by, code="invalid_request")
            if code is ErrorCode.NO_TOKEN:
                raise ApiError(400, error, code="invalid_request")
            raise ApiError(500, error, code="generation_failed")
        if completion.finish_reason == "abort":
            raise unavailable(
                "the server is shutting down and has ended this request before its end", "draining"
            )

    def usage(self) -> dict[str, Any]:
        """OpenAI's ``usage`` object, with the tokens of each kind of media that the prompt has."""
        prompt = sum(map(len, self.prompt_token_ids))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(self._cached.values()),
                **self._media_tokens,
            },
        }

    async def close(self) -> None:
        """End the sequences that still run, and add the counts to the log line."""
        for stream in self._streams:
            with contextlib.suppress(EngineError):
                await stream.abort()
        usage = self.usage()
        self._context.details |= {
            "prompt_tokens": usage["prompt_tokens"],
            **usage["prompt_tokens_details"],
            "completion_tokens": self.completion_tokens,
            "finish_reasons": self._finish_reasons,
        }
        if self._clock.first is not None:
            self._context.details["first_token_seconds"] = round(self._clock.first, 4)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``, which is cancelled if the client goes away.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class StreamUsage:
    """The usage in the chunks of a stream, as its ``stream_options`` ask for it.

    Attributes:
        continuous: whether each chunk has that so far.
    """

    def __init__(self, body: GenerationBody, generation: Generation) -> None:
        options = body.stream_options
        self._generation = generation
        self._asked = options is not None and bool(options.include_usage)
        self.continuous = options is not None and bool(options.continuous_usage_stats)

    def of_chunk(self) -> dict[str, Any]:
        """Fields of a chunk with choices."""
        if self.continuous:
            return {"usage": self._generation.usage()}
        return {"usage": None} if self._asked else {}

    def end(self, chunk: dict[str, Any]) -> bytes:
        """The events after all outputs, of which ``chunk`` has the usage if it is asked for."""
        return (event(chunk | {"usage": self._generation.usage()}) if self._asked else b"") + DONE


class Events(Protocol):
    """The events of a stream.

    Attributes:
        takes_text: whether :meth:`text` may be called.
    """

    takes_text: bool

    def output(self, index: int, output: RequestOutput) -> bytes:
        """The events of a new output of prompt ``index``; empty if there are none yet."""

    def text(self, index: int, text: str) -> bytes:
        """The same of an output that is nothing but more text of the only completion."""

    async def end(self) -> bytes:
        """The events after all outputs."""

    def failed(self, failure: ApiError) -> bytes:
        """The last events of a stream that cannot go on."""
        return event(failure.body()) + DONE


class EventStream(Response):
    """Server-sent events, made while the client is there.

    The first event is waited for before anything is sent, so that what goes wrong until then has
    its own status. What goes wrong later is sent as an event. Where the server has a
    :class:`Writer`, later events are written to the connection when their step's results come,
    without a task or messages between.

    Args:
        generation: gives the outputs.
        events: makes the events of them.
        context: the HTTP request's.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, events: Events, context: RequestContext) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._events = events
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await while_connected(receive, self._send(send, scope.pop(WRITER, None)))
        finally:
            await self._generation.close()

    async def _send(self, send: Send, writer: Writer | None) -> None:
        started = False
        try:
            async with contextlib.aclosing(self._generation.outputs()) as outputs:
                async for index, output in outputs:
                    piece = self._events.output(index, output)
                    if not piece:
                        continue
                    if not started:
                        started = True
                        await self._start(send)
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    if writer is not None:
                        break
            if writer is not None:
                await self._generation.push(self._events, writer)
            if not started:
                started = True
                await self._start(send)
            piece = await self._events.end()
        except Exception as error:
            if not started:
                raise
            failure = as_api_error(error, self._context)
            if failure.code == "internal_error":
                logger.exception("request %s failed", self._context.request_id)
            self._context.note(failure)
            piece = self._events.failed(failure)
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
