"""``POST /v1/chat/completions``."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from fastapi.responses import Response

from engine_core.configs import GuidedParams, SamplingParams
from engine_core.engine.frontend import Prompt
from engine_core.errors import RequestError
from engine_core.media.parts import MediaPart, split_media
from engine_core.parsers import (
    OutputParser,
    ParsedDelta,
    ToolCallDelta,
    ToolParser,
    build_output_parser,
    calls_or_answer_params,
    reasoned_params,
    tool_choice_params,
)
from engine_core.server.body import MAX_DEPTH, is_too_deep, now, read_body
from engine_core.server.context import RequestContext
from engine_core.server.encoding import TextEvent, encode, event
from engine_core.server.errors import ApiError, conflict
from engine_core.server.generation import (
    Events,
    EventStream,
    Generation,
    StreamUsage,
    check_common,
    guided_fields,
    sampling_params,
    while_connected,
)
from engine_core.server.logprobs import chat_logprobs, prompt_logprobs
from engine_core.server.parts import Form, PartEvents
from engine_core.server.protocol import (
    CHAT_BODY,
    AllowedToolChoice,
    ChatBody,
    Message,
    NamedToolChoice,
    TextPart,
    Tool,
)
from engine_core.server.service import Service

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from engine_core.steps import CompletionOutput, RequestOutput
    from engine_core.text import Tokenizer

_Body = TypeVar("_Body")
_FIELD_NAMES = (("multi_modal_data", "messages"),)
_CHUNK = "chat.completion.chunk"
# Characters of the prompt's end in which a template may open the reasoning.
_PROMPT_END = 32


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates were written for: text as a string, arguments as objects.

    Raises:
        ApiError: 400; arguments nest too deeply.
    """
    made = []
    for index, message in enumerate(messages):
        plain = message.model_dump(exclude_none=True)
        if plain["role"] == "developer":
            plain["role"] = "system"
        if not plain.get("tool_calls"):
            plain.pop("tool_calls", None)
        if isinstance(message.content, list):
            texts = [part.text for part in message.content if isinstance(part, TextPart)]
            if len(texts) == len(message.content):  # else the template is to see the parts
                plain["content"] = "\n".join(texts)
        elif plain["role"] == "assistant":
            plain.setdefault("content", "")
        for place, call in enumerate(plain.get("tool_calls", ())):
            function = call["function"]
            param = f"messages.{index}.tool_calls.{place}.function.arguments"
            function["arguments"] = _arguments(function["arguments"], param)
        made.append(plain)
    return made


def _arguments(text: str, param: str) -> Any:
    """The object in ``text``; text that is no valid object stays text."""
    try:
        value = json.loads(text or "{}")
        deep = is_too_deep(value)
    except ValueError:
        return text
    except RecursionError:
        deep = True
    if deep:
        message = f"{param}: the arguments nest deeper than {MAX_DEPTH} levels"
        raise ApiError(400, message, param=param, code="invalid_value")
    return value if isinstance(value, dict) else text


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as chat templates know them; None if there are none."""
    if not tools:
        return None
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    service = Service.of(request)
    context = RequestContext.of(request)
    service.check_room()
    body = await read_body(request, CHAT_BODY, service.bodies)
    check_common(body, service)
    context.field_names = _FIELD_NAMES
    chat, params, prompt = await service.run_text(
        context.body_size, partial(understood, service, context, body)
    )
    return await chat.answer(request, prompt, params)


async def answer_in_form(
    request: Request,
    model: TypeAdapter[_Body],
    field_names: Sequence[tuple[str, str]],
    translated: Callable[
        [Service, RequestContext, _Body], tuple[Chat, SamplingParams, list[int], Form]
    ],
) -> Response:
    """Answer the request of a service that writes chats in a form of its own.

    Args:
        request: whose body is a ``model``.
        model: the service's.
        field_names: see :class:`RequestContext`.
        translated: makes a chat of the body, with its parameters, its prompt and its form.
    """
    service = Service.of(request)
    context = RequestContext.of(request)
    service.check_room()
    body = await read_body(request, model, service.bodies)
    context.field_names = field_names
    chat, params, prompt, form = await service.run_text(
        context.body_size, partial(translated, service, context, body)
    )
    return await chat.answer(request, prompt, params, form)


def understood(
    service: Service, context: RequestContext, body: ChatBody
) -> tuple[Chat, SamplingParams, list[int]]:
    """Validate the body; return its request and prompt.

    Raises:
        ApiError: 400.
        RequestError: the messages do not fit the template, or there is none.
    """
    chat = Chat(service, context, body)
    params = chat.sampling_params()
    prompt = chat.prompt()
    if body.mm_processor_kwargs and not chat.media:
        raise conflict(
            "mm_processor_kwargs are for what the messages show, and there is only text; leave "
            "them out",
            "mm_processor_kwargs",
        )
    if chat.media and body.truncate_prompt_tokens is not None:
        raise conflict(
            "truncate_prompt_tokens would cut pictures off; leave it out", "truncate_prompt_tokens"
        )
    prompt = service.truncated(prompt, body.truncate_prompt_tokens, "messages")
    return chat, chat.reasoned(params, prompt), prompt


def name_pictures(context: RequestContext, chat: ChatBody, own: Sequence[str]) -> None:
    """Have errors name pictures by their places in the request that ``chat`` was made of.

    Args:
        context: of the request.
        chat: the chat that it became.
        own: the places in the request, in their order. Pictures of earlier requests, which come
            before them in the chat, keep their names.
    """
    places = [
        f"messages.{index}.content.{number}.image_url"
        for index, message in enumerate(chat.messages)
        if isinstance(message.content, list)
        for number, part in enumerate(message.content)
        if not isinstance(part, TextPart)
    ]
    ends = zip(reversed(places), reversed(own), strict=False)
    names = [(re.escape(place), name) for place, name in ends]
    context.field_names = (*names, *context.field_names)


def refuse_to_count(parts: Sequence[MediaPart]) -> None:
    """Refuse to count the tokens of a prompt that shows something, before it is processed.

    Raises:
        RequestError: it does.
    """
    if parts:
        raise RequestError(
            f"{parts[0].param}: tokens of pictures, videos and sounds are not counted here; the "
            "usage of an answer has their number",
            param=parts[0].param,
        )


def _tool_choice(body: ChatBody) -> str | dict[str, Any] | None:
    """The choice among the tools that are offered.

    Raises:
        ApiError: 400; a tool is allowed that is not there.
    """
    choice = body.tool_choice
    if isinstance(choice, AllowedToolChoice):
        names = {tool.function.name for tool in body.offered.values()}
        for allowed in choice.allowed_tools.tools:
            if (name := allowed.function.name) not in names:
                message = f"tool_choice allows {name[:100]!r}, which is not one of the tools"
                raise ApiError(400, message, param="tool_choice", code="invalid_request")
        return choice.allowed_tools.mode
    return choice.model_dump() if isinstance(choice, NamedToolChoice) else choice


class Chat:
    """One request and its answer."""

    def __init__(self, service: Service, context: RequestContext, body: ChatBody) -> None:
        self._service = service
        self._context = context
        self._body = body
        self.messages, parts = split_media(template_messages(body.messages))
        # What the prompt shows, by kind, as the engine takes it.
        self.media = service.engine.frontend.shown(
            [part._replace(owner=context.key) for part in parts]
        )
        self._tool_choice = _tool_choice(body)
        self._offered = template_tools(list(body.offered.values()))
        # A model that must not call functions is not told of them.
        self.tools = None if self._tool_choice == "none" else self._offered
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = now()
        self._model = service.check_model(body.model)
        last = self.messages[-1]
        # What an answer begins with that the model did not write.
        self.echo: str = last["content"] if body.echo and last["role"] == "assistant" else ""
        self._parsers: list[OutputParser] = []
        # For each completion that calls functions, the arguments of its last call.
        self._last_call: dict[int, list[str]] = {}
        self._token_bytes: Sequence[bytes] = ()
        # The constraints of a guided text that may still call tools: the answer's, and the calls'.
        self._alternatives: tuple[GuidedParams, ...] = ()
        # The constraint of calls that must come, and whether reasoning may come before them.
        self._forced: GuidedParams | None = None
        self._reasoned = False
        if service.settings.log_prompts:
            context.details["messages"] = self.messages

    def prompt(self) -> list[int]:
        """The token ids of the prompt, of any length."""
        return self._service.render_chat(self._body, self.messages, self.tools)

    def sampling_params(self) -> SamplingParams:
        """The sampling parameters of the body."""
        body = self._body
        if body.top_logprobs and not body.logprobs:
            raise conflict("top_logprobs needs logprobs", "top_logprobs")
        if body.max_tokens == 0:
            raise conflict("max_tokens must be 1 or more in a chat", "max_tokens")
        longest = body.max_completion_tokens
        if longest is None:
            longest = body.max_tokens
        elif body.max_tokens not in (None, longest):
            raise conflict(
                "max_tokens and max_completion_tokens differ; give one of them", "max_tokens"
            )
        parallel = body.parallel_tool_calls is not False
        engine = self._service.engine
        defaults = engine.default_sampling_params()
        if longest is None and "max_tokens" in defaults.model_fields_set:
            longest = defaults.max_tokens
        return sampling_params(
            engine.default_sampling_params,
            body,
            self._guided(parallel),
            max_tokens=longest,
            logprobs=body.top_logprobs or 0 if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
        )

    def _guided(self, parallel: bool) -> dict[str, GuidedParams]:
        """The constraint of each field that guides the text, by field name."""
        ways = guided_fields(self._body)
        forced = tool_choice_params(self._offered, self._tool_choice, parallel_tool_calls=parallel)
        if forced is not None:
            self._forced = forced
            return {"tool_choice": forced, **ways}
        if not ways or not self.tools:
            return ways
        field = next(iter(ways))
        engine = self._service.engine
        name = self._service.settings.tool_parser or engine.model_config.tool_parser
        parser: type[ToolParser] | None = None
        if name is not None:
            parser = self._service.parsers.tool_parser(name)
        tags = None if parser is None else parser.call_tags()
        if list(ways) != ["response_format"] or tags is None:
            raise conflict(
                f"{field} says what the text must be, which leaves no room for calls of tools"
                + (f" as {name!r} reads them" if field == "response_format" and name else "")
                + "; leave one of them out, or set tool_choice to 'none'",
                field,
            )
        calls = tool_choice_params(self._offered, "required")
        assert calls is not None, "calls are asked for"
        self._alternatives = (ways[field], calls)
        special = {} if engine.tokenizer is None else _special_tokens(engine.tokenizer, tags)
        return {field: calls_or_answer_params(self._offered, ways[field], tags, special)}

    def reasoned(self, params: SamplingParams, prompt: list[int]) -> SamplingParams:
        """``params`` that leave room for reasoning before calls that must come."""
        engine = self._service.engine
        name = self._service.settings.reasoning_parser or engine.model_config.reasoning_parser
        if self._forced is None or name is None or engine.tokenizer is None:
            return params
        tags = self._service.parsers.reasoning_parser(name)(self._prompt_end(prompt)).tags()
        if tags is None:
            return params
        self._reasoned = True
        self._alternatives = (self._forced,)
        special = _special_tokens(engine.tokenizer, tags)
        return params.replace(guided=reasoned_params(self._forced, tags, special))

    def _prompt_end(self, prompt: list[int]) -> str:
        tokenizer = self._service.engine.tokenizer
        assert tokenizer is not None, "without one the template was refused"
        return tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False)

    async def answer(
        self,
        request: Request,
        prompt: list[int],
        params: SamplingParams,
        form: Form | None = None,
    ) -> Response:
        """Run the request and make the response of it, in the ``form`` of another service if given.

        Raises:
            ApiError: it is refused, or failed before its first token.
            EngineError: the same.
        """
        self._parsers = [self._parser(prompt, params) for _ in range(params.n)]
        if not all(parser.skip_special_tokens for parser in self._parsers):
            params = params.replace(skip_special_tokens=False)
        if self._body.logprobs:
            self._token_bytes = await self._service.token_bytes()
        shown: Prompt = prompt
        if self.media:
            shown = {"prompt_token_ids": prompt, "multi_modal_data": self.media}
            if self._body.mm_processor_kwargs:
                shown["mm_processor_kwargs"] = self._body.mm_processor_kwargs
        starting = Generation.start(
            self._service, self._context, self._id, [shown], params, self._body, self._alternatives
        )
        # What is shown may take seconds to process, which nobody needs who is gone.
        if self.media:
            starting = while_connected(request.receive, starting)
        generation = await starting
        parts = None if form is None else PartEvents(self, generation, form)
        if self._body.stream:
            events = parts or _Events(self, generation)
            return EventStream(generation, events, self._context)
        whole = self._whole(generation) if parts is None else parts.whole()
        try:
            return await while_connected(request.receive, whole)
        finally:
            await generation.close()

    def _parser(self, prompt: list[int], params: SamplingParams) -> OutputParser:
        return build_output_parser(
            self._service.engine.model_config,
            self._service.parsers,
            tools=self._offered,
            tool_choice=self._tool_choice,
            tool_parser=self._service.settings.tool_parser,
            reasoning_parser=self._service.settings.reasoning_parser,
            prompt_end=self._prompt_end(prompt),
            guided=params.guided is not None,
            calls_or_answer=bool(self._alternatives),
            reasoned=self._reasoned,
        )

    def parse(self, index: int, text: str, *, ended: bool = False) -> ParsedDelta:
        """The parts that a piece of completion ``index`` adds."""
        parser = self._parsers[index]
        parsed = parser.feed(text) if text else ParsedDelta()
        if ended:
            parsed += parser.finish()
        if self._body.parallel_tool_calls is False:
            first = tuple(call for call in parsed.tool_calls if call.index == 0)
            parsed = replace(parsed, tool_calls=first)
        if self._body.include_reasoning is False:
            parsed = replace(parsed, reasoning="")
        for call in parsed.tool_calls:
            if call.name is not None:
                self._last_call[index] = []
            self._last_call.setdefault(index, []).append(call.arguments)
        return parsed

    @property
    def body(self) -> ChatBody:
        """The request's."""
        return self._body

    async def count_tokens(self, text: str) -> int:
        """How many tokens make a part of an answer."""
        tokenizer = self._service.engine.tokenizer
        assert tokenizer is not None, "without one the template was refused"
        encode = partial(tokenizer.encode, text, add_special_tokens=False)
        return len(await self._service.run_text(len(text), encode))

    @property
    def logs(self) -> bool:
        """Whether the log is to have the text."""
        return self._service.settings.log_prompts

    def note(self, completion: CompletionOutput) -> None:
        """Keep the text of a stream if the log is to have it."""
        if self.logs:
            outputs = self._context.details.setdefault("outputs", [""] * len(self._parsers))
            outputs[completion.index] += completion.text

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        """OpenAI's reason why a completion has ended; None if it goes on."""
        arguments = self._last_call.get(completion.index)
        if completion.finish_reason != "stop" or arguments is None:
            return completion.finish_reason
        # Clients run calls that ended so, which must exclude a call that a stop string or token cut
        # off.
        cut = completion.stop_reason is not None and not _is_json("".join(arguments))
        return "stop" if cut else "tool_calls"

    def logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """OpenAI's ``logprobs`` object of a piece, if it is asked for."""
        if not self._body.logprobs or not completion.logprobs:
            return None
        return chat_logprobs(
            completion.token_ids,
            completion.logprobs,
            self._body.top_logprobs or 0,
            self._token_bytes,
            as_ids=bool(self._body.return_tokens_as_token_ids),
        )

    def object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """OpenAI's object around these choices."""
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    async def _whole(self, generation: Generation) -> Response:
        answers = [_Answer() for _ in self._parsers]
        of_prompt = None
        async for _, output in generation.outputs():
            of_prompt = output.prompt_logprobs or of_prompt
            for completion in output.outputs:
                answer = answers[completion.index]
                ended = completion.finish_reason is not None
                answer.add(self.parse(completion.index, completion.text, ended=ended))
                answer.token_ids += completion.token_ids
                logprobs = self.logprobs(completion)
                if logprobs is not None:
                    answer.logprobs += logprobs["content"]
                if ended:
                    answer.finish_reason = self.finish_reason(completion)
                    answer.stop_reason = completion.stop_reason
        choices = []
        for index, answer in enumerate(answers):
            choice: dict[str, Any] = {
                "index": index,
                "message": answer.message(self.echo),
                "logprobs": None,
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            if self._body.logprobs:
                choice["logprobs"] = {"content": answer.logprobs, "refusal": None}
            if self._body.return_token_ids:
                choice["token_ids"] = answer.token_ids
            choices.append(choice)
        made = self.object("chat.completion", choices) | {"usage": generation.usage()}
        if self._body.return_token_ids:
            made["prompt_token_ids"] = generation.prompt_token_ids[0]
        if self._body.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(of_prompt)
        if self._service.settings.log_prompts:
            self._context.details["outputs"] = [choice["message"] for choice in choices]
        return Response(encode(made), media_type="application/json")


def _special_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, int]:
    """Those of ``texts`` that are special tokens, with their ids."""
    ids = {text: tokenizer.token_to_id(text) for text in texts}
    return {text: token for text, token in ids.items() if token in tokenizer.special_ids}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _tool_call_chunk(call: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    made: dict[str, Any] = {"index": call.index, "function": function}
    if call.name is not None:
        function["name"] = call.name
        made |= {"id": call.id, "type": "function"}
    return made


class _Events(Events):
    """The events of a stream; see :class:`~engine_core.server.generation.Events`."""

    def __init__(self, request: Chat, generation: Generation) -> None:
        self._request = request
        self._generation = generation
        self._usage = StreamUsage(request.body, generation)
        self._begun: set[int] = set()
        plain = not request.logs and not request.body.return_token_ids
        self.takes_text = plain and not self._usage.continuous
        self._text_event = TextEvent(lambda text: self._value([_choice(0, {"content": text})]))

    def output(self, index: int, output: RequestOutput) -> bytes:
        """See :class:`~engine_core.server.generation.Events`."""
        piece = b""
        for completion in output.outputs:
            self._request.note(completion)
            choice = self._chunk(completion)
            if choice is None:
                continue
            made = self._value([choice])
            if self._request.body.return_token_ids and not self._begun:
                made["prompt_token_ids"] = self._generation.prompt_token_ids[index]
            self._begun.add(completion.index)
            piece += event(made)
        return piece

    def text(self, index: int, text: str) -> bytes:
        """See :class:`~engine_core.server.generation.Events`."""
        delta = _delta(self._request.parse(index, text))
        if not delta:
            return b""
        if list(delta) == ["content"]:
            return self._text_event(delta["content"])
        return event(self._value([_choice(index, delta)]))

    async def end(self) -> bytes:
        """See :class:`~engine_core.server.generation.Events`."""
        return self._usage.end(self._request.object(_CHUNK, []))

    def _value(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._request.object(_CHUNK, choices) | self._usage.of_chunk()

    def _chunk(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """The choice of a chunk, or None if there is nothing to say yet."""
        request = self._request
        ended = completion.finish_reason is not None
        delta = _delta(request.parse(completion.index, completion.text, ended=ended))
        reason = request.finish_reason(completion)
        logprobs = request.logprobs(completion)
        with_tokens = bool(request.body.return_token_ids)
        more = logprobs is not None or (with_tokens and completion.token_ids)
        if not delta and reason is None and not more:
            return None
        if completion.index not in self._begun:
            delta = {"role": "assistant", "content": "", **delta}
            delta["content"] = request.echo + delta["content"]
        choice = _choice(completion.index, delta, logprobs, reason)
        if reason is not None:
            choice["stop_reason"] = completion.stop_reason
        if with_tokens:
            choice["token_ids"] = completion.token_ids
        return choice


def _delta(parsed: ParsedDelta) -> dict[str, Any]:
    """OpenAI's ``delta`` object."""
    delta: dict[str, Any] = {}
    if parsed.content:
        delta["content"] = parsed.content
    if parsed.reasoning:
        delta["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        delta["tool_calls"] = [_tool_call_chunk(call) for call in parsed.tool_calls]
    return delta


def _choice(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    """A chunk's choice."""
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


class _Answer:
    """One choice, put together."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self.token_ids: list[int] = []
        self.logprobs: list[Mapping[str, Any]] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def add(self, parsed: ParsedDelta) -> None:
        """Take further parts."""
        self._content.append(parsed.content)
        self._reasoning.append(parsed.reasoning)
        for call in parsed.tool_calls:
            made = self._calls.setdefault(
                call.index,
                {"id": None, "type": "function", "function": {"name": None, "arguments": ""}},
            )
            if call.name is not None:
                made["id"] = call.id
                made["function"]["name"] = call.name
            made["function"]["arguments"] += call.arguments

    def message(self, echo: str) -> dict[str, Any]:
        """OpenAI's ``message`` object, whose content begins with ``echo``."""
        content = echo + "".join(self._content)
        reasoning = "".join(self._reasoning)
        made: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            made["reasoning_content"] = reasoning
        if self._calls:
            made["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
            made["content"] = content or None
        return made
