"""OpenAI's Responses API: ``/v1/responses``.

A request becomes the chat that means the same, and the parts of its answer become items.
"""

from __future__ import annotations

import uuid
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response

from engine_core.configs import SamplingParams
from engine_core.server.body import now, validated
from engine_core.server.chat import Chat, answer_in_form, name_pictures
from engine_core.server.context import RequestContext
from engine_core.server.encoding import encode, named_event
from engine_core.server.errors import ApiError
from engine_core.server.generation import check_common
from engine_core.server.parts import Form, Part, PartAnswer
from engine_core.server.protocol import CHAT_BODY, ChatBody, CommonBody
from engine_core.server.response_store import StoredResponse
from engine_core.server.responses_protocol import (
    RESPONSES_BODY,
    AllowedChoice,
    CallItem,
    CallOutputItem,
    Content,
    FunctionChoice,
    Input,
    InputImage,
    InputText,
    Item,
    JsonSchemaTextFormat,
    MessageItem,
    ReasoningItem,
    ResponsesBody,
    UserItem,
)
from engine_core.server.service import Service

_FIELD_NAMES = (
    (r"tools\.(\d+)\.function\.parameters", r"tools.\1.parameters"),
    (r"response_format\.json_schema\.schema", "text.format.schema"),
    ("response_format", "text.format"),
    (r"messages(\..*)?|multi_modal_data", "input"),
    ("max_tokens|max_completion_tokens", "max_output_tokens"),
)
# Items of a page if the query does not say, and at most.
_PAGE, _LONGEST_PAGE = 20, 100
INPUT_ITEMS_QUERY: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": _LONGEST_PAGE, "default": _PAGE},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}
_FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
_ECHOED = (
    *("instructions", "previous_response_id", "max_output_tokens", "max_tool_calls"),
    *("service_tier", "user", "safety_identifier", "prompt_cache_key"),
)


async def create_response(request: Request) -> Response:
    """Answer a conversation, in items."""
    return await answer_in_form(request, RESPONSES_BODY, _FIELD_NAMES, _understood)


async def retrieve_response(request: Request) -> Response:
    """A stored response."""
    if request.query_params.get("stream", "false") != "false":
        raise ApiError(
            400, "stream: a stored response is not streamed", param="stream", code="invalid_value"
        )
    answer = _stored(request).answer
    return Response(answer, media_type="application/json")


async def list_input_items(request: Request) -> Response:
    """The conversation before a stored response, as items."""
    found = _stored(request)
    query = request.query_params
    limit = query.get("limit", str(_PAGE))
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _LONGEST_PAGE):
        raise _wrong_query("limit", limit, f"a number from 1 to {_LONGEST_PAGE}")
    if (order := query.get("order", "desc")) not in ("asc", "desc"):
        raise _wrong_query("order", order, "'asc' or 'desc'")
    messages = orjson.loads(found.messages)[:-1]
    items = _input_items(messages, request.path_params["response_id"].removeprefix("resp_"))
    if order == "desc":
        items.reverse()
    names = [item["id"] for item in items]
    if (after := query.get("after")) is not None:
        if after not in names:
            raise _wrong_query("after", after, "the id of one of the items")
        items = items[names.index(after) + 1 :]
    page = items[: int(limit)]
    made = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }
    return Response(encode(made), media_type="application/json")


def _wrong_query(name: str, value: str, wanted: str) -> ApiError:
    message = f"{name}: must be {wanted}, got {value[:100]!r}"
    return ApiError(400, message, param=name, code="invalid_value")


def _input_items(messages: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Items that the messages of a chat are; their ids have ``name``, and stay the same."""
    items: list[dict[str, Any]] = []

    def add(prefix: str, kind: str, **fields: Any) -> None:
        items.append({"id": f"{prefix}_{name}{len(items)}", "type": kind, **fields})

    done = {"status": "completed"}
    for message in messages:
        role, text = message["role"], message.get("content")
        if role == "tool":
            call_id = message["tool_call_id"]
            add("fco", "function_call_output", **done, call_id=call_id, output=text)
            continue
        if thoughts := message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": thoughts}]
            add("rs", "reasoning", summary=[], content=content)
        if text or role != "assistant":
            kind = "output_text" if role == "assistant" else "input_text"
            # A picture is kept as it was given.
            parts = text if isinstance(text, list) else [{"type": "text", "text": text}]
            content = [
                {"type": kind, "text": part["text"]} if part["type"] == "text" else part
                for part in parts
            ]
            add("msg", "message", **done, role=role, content=content)
        for call in message.get("tool_calls", ()):
            add("fc", "function_call", **done, call_id=call["id"], **call["function"])
    return items


async def delete_response(request: Request) -> Response:
    """Drop a stored response."""
    _stored(request)
    store = Service.of(request).responses
    name = request.path_params["response_id"]
    assert store is not None, "the response was in it"
    store.delete(RequestContext.of(request).key, name)
    made = {"id": name, "object": "response", "deleted": True}
    return Response(encode(made), media_type="application/json")


def _stored(request: Request) -> StoredResponse:
    service = Service.of(request)
    name = request.path_params["response_id"]
    found = _find(service, RequestContext.of(request), name)
    if found is None:
        raise ApiError(404, _not_found(service, name), code="response_not_found")
    return found


def _find(service: Service, context: RequestContext, name: str) -> StoredResponse | None:
    return None if service.responses is None else service.responses.get(context.key, name)


def _not_found(service: Service, name: str) -> str:
    if service.responses is None:
        return _no_store(service)
    return (
        f"the response {name[:100]!r} is not stored here: it was dropped for newer ones, deleted, "
        "not to be stored, or another key's; send the conversation as input"
    )


def _no_store(service: Service) -> str:
    count = service.settings.api_server_count
    return (
        "this server stores no responses: "
        + (
            f"it has {count} processes that answer (--api-server-count), and each would know its "
            "own alone"
            if count > 1
            else "--max-stored-responses is 0"
        )
        + "; send the whole conversation as input"
    )


def _understood(
    service: Service, context: RequestContext, body: ResponsesBody
) -> tuple[Chat, SamplingParams, list[int], _Response]:
    """Validate the body; return its chat, parameters, prompt and the form of its answer."""
    if body.store and service.responses is None:
        message = f"store: {_no_store(service)}, without store"
        raise ApiError(400, message, param="store", code="invalid_value")
    conversation: list[dict[str, Any]] = []
    name = body.previous_response_id
    if name is not None:
        found = _find(service, context, name)
        if found is None:
            raise ApiError(
                400,
                f"previous_response_id: {_not_found(service, name)}",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        conversation += orjson.loads(found.messages)
    conversation += _messages(body.input)
    asked = _chat_body(body, conversation)
    check_common(asked, service)
    name_pictures(context, asked, _pictures(body.input))
    chat = Chat(service, context, asked)
    params = chat.sampling_params()
    if body.truncation == "auto" and not chat.media:  # which belongs to its turns
        prompt = _fitting(service, chat)
    else:
        prompt = service.truncated(chat.prompt(), None, "messages")
    params = chat.reasoned(params, prompt)
    return chat, params, prompt, _Response(service, context, body, params, conversation)


def _chat_body(body: ResponsesBody, conversation: list[dict[str, Any]]) -> ChatBody:
    """The chat that means the same."""
    made: dict[str, Any] = {name: getattr(body, name) for name in CommonBody.model_fields}
    instructions: list[dict[str, Any]] = []
    if body.instructions is not None:
        instructions.append({"role": "system", "content": body.instructions})
    text, choice = body.text, body.tool_choice
    if isinstance(choice, FunctionChoice):
        made["tool_choice"] = _chosen(choice)
    elif isinstance(choice, AllowedChoice):
        allowed = {"mode": choice.mode, "tools": [_chosen(tool) for tool in choice.tools]}
        made["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    else:
        made["tool_choice"] = choice
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        made |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.tools:
        made["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"})}
            for tool in body.tools
        ]
    if text is not None and isinstance(text.format, JsonSchemaTextFormat):
        schema = {"schema": text.format.schema_}
        made["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif text is not None and text.format is not None:
        made["response_format"] = {"type": text.format.type}
    made |= {
        "messages": instructions + conversation,
        "max_completion_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "verbosity": None if text is None else text.verbosity,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    return validated(made, CHAT_BODY)


def _chosen(choice: FunctionChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


def _messages(items: str | Sequence[Item]) -> list[dict[str, Any]]:
    """The messages of a chat that items are.

    Reasoning, a text and calls that follow each other are one message of the model.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    made: list[dict[str, Any]] = []
    # The model's message that goes on.
    answer: dict[str, Any] | None = None
    for item in items:
        if isinstance(item, CallOutputItem):
            content = _text(item.output)
            made.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            answer = None
            continue
        of_model = isinstance(item, MessageItem) and item.role == "assistant"
        if isinstance(item, UserItem) or (isinstance(item, MessageItem) and not of_model):
            made.append({"role": item.role, "content": _message_content(item.content)})
            answer = None
            continue
        begins = not isinstance(item, CallItem) and answer is not None
        if answer is None or (begins and {"content", "tool_calls"} & answer.keys()):
            answer = {"role": "assistant"}
            made.append(answer)
        if isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            answer.setdefault("tool_calls", []).append(call)
        elif isinstance(item, ReasoningItem):
            texts = item.content or item.summary or ()
            answer["reasoning_content"] = "\n".join(text.text for text in texts)
        else:
            answer["content"] = _text(item.content)
    return made


def _pictures(items: str | Sequence[Item]) -> list[str]:
    """Places of pictures in the input."""
    return [
        f"input.{index}.content.{number}.image_url"
        for index, item in enumerate(items)
        if isinstance(item, UserItem) and not isinstance(item.content, str)
        for number, part in enumerate(item.content)
        if isinstance(part, InputImage)
    ]


def _message_content(content: str | Sequence[Input]) -> str | list[dict[str, Any]]:
    """The content of a message: text, or parts if there are pictures among them."""
    if isinstance(content, str):
        return content
    texts = [part for part in content if isinstance(part, InputText)]
    if len(texts) == len(content):
        return _text(texts)
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, InputText)
        else part.model_dump(exclude_none=True)
        for part in content
    ]


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _fitting(service: Service, chat: Chat) -> list[int]:
    """The prompt, without as many of the oldest turns as it takes to be short enough.

    Instructions at the beginning stay. What is left begins with a message of the user, so that no
    result of a call is without its call.

    Raises:
        ApiError: 400; the last turn alone is too long.
    """
    messages = chat.messages
    head = next((i for i, each in enumerate(messages) if each["role"] != "system"), len(messages))
    turns = [i for i, each in enumerate(messages) if i > head and each["role"] == "user"]
    cuts = [head, *turns]

    def prompt(cut: int) -> list[int]:
        chat.messages = messages[:head] + messages[cut:]
        return service.truncated(chat.prompt(), None, "messages")

    def fits(cut: int) -> bool:
        try:
            prompt(cut)
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            return False
        return True

    first = 0 if fits(head) else bisect_left(cuts, True, lo=1, key=fits)
    return prompt(cuts[min(first, len(cuts) - 1)])


class _Response(Form):
    """An answer as a response of items.

    Args:
        service: the server.
        context: the HTTP request's.
        body: the request's.
        params: what the text is sampled with.
        conversation: the messages before the answer, without the instructions.
    """

    def __init__(
        self,
        service: Service,
        context: RequestContext,
        body: ResponsesBody,
        params: SamplingParams,
        conversation: list[dict[str, Any]],
    ) -> None:
        self._key = context.key
        self._store = None if body.store is False else service.responses
        self._conversation = conversation
        self._number = 0
        self._items: dict[int, str] = {}
        tool_choice = body.tool_choice or "auto"
        text = {} if body.text is None else body.text.model_dump(by_alias=True, exclude_none=True)
        self._object: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": now(),
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": service.check_model(body.model),
            "output": [],
            "usage": None,
            "background": False,
            "store": self._store is not None,
            **{name: getattr(body, name) for name in _ECHOED},
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {
                "effort": None if body.reasoning is None else body.reasoning.effort,
                "summary": None,
            },
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": tool_choice
            if isinstance(tool_choice, str)
            else tool_choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "truncation": body.truncation or "disabled",
        }

    def begin(self, answer: PartAnswer) -> bytes:
        """See :class:`Form`."""
        return self._event("created", response=self._object) + self._event(
            "in_progress", response=self._object
        )

    def open(self, part: Part) -> bytes:
        """See :class:`Form`."""
        item = self._item(part, "in_progress")
        if part.kind != "call":
            item["content"] = []
        piece = self._event("output_item.added", output_index=part.index, item=item)
        if part.kind == "call":
            return piece
        return piece + self._event("content_part.added", **self._place(part), part=_content(part))

    def more(self, part: Part, text: str) -> bytes:
        """See :class:`Form`."""
        place = self._place(part, part.newest)
        return self._event(f"{_CONTENTS[part.kind]}.delta", **place, delta=text)

    def close(self, part: Part, answer: PartAnswer) -> bytes:
        """See :class:`Form`."""
        done = f"{_CONTENTS[part.kind]}.done"
        place = self._place(part, part.logprobs)
        if part.kind == "call":
            piece = self._event(done, **place, name=part.name, arguments=part.text)
        else:
            piece = self._event(done, **place, text=part.text)
            piece += self._event("content_part.done", **self._place(part), part=_content(part))
        item = self._item(part, _status(answer))
        return piece + self._event("output_item.done", output_index=part.index, item=item)

    def end(self, answer: PartAnswer) -> bytes:
        """See :class:`Form`."""
        return self._event(_status(answer), response=self.whole(answer))

    def failed(self, failure: ApiError, answer: PartAnswer) -> bytes:
        """See :class:`Form`."""
        code = _FAILURES.get(failure.status_code, "server_error")
        made = self._ended("failed", answer) | {"usage": None}
        made["error"] = {"code": code, "message": failure.message}
        return self._event("failed", response=made)

    def whole(self, answer: PartAnswer) -> dict[str, Any]:
        """See :class:`Form`; the response is stored if it is to be."""
        made = self._ended(_status(answer), answer)
        if made["status"] == "incomplete":
            made["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._store is not None:
            messages = encode([*self._conversation, _message(answer)])
            stored = StoredResponse(encode(made), messages)
            made["store"] = self._store.put(self._key, made["id"], stored)
        return made

    def _ended(self, status: str, answer: PartAnswer) -> dict[str, Any]:
        last = "completed" if status == "completed" else "incomplete"
        output = [self._item(part, "completed") for part in answer.parts[:-1]]
        output += [self._item(part, last) for part in answer.parts[-1:]]
        usage = {
            "input_tokens": answer.input_tokens,
            "input_tokens_details": {
                "cached_tokens": 0,
                "cache_write_tokens": 0,
                **answer.input_details,
            },
            "output_tokens": answer.output_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": answer.input_tokens + answer.output_tokens,
        }
        return self._object | {
            "status": status,
            "completed_at": now() if status == "completed" else None,
            "output": output,
            "usage": usage,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event({"type": f"response.{kind}", "sequence_number": number, **fields})

    def _place(self, part: Part, logprobs: list[Any] | None = None) -> dict[str, Any]:
        """Fields of an event about a part; one about its text has ``logprobs``."""
        place: dict[str, Any] = {"item_id": self._id(part), "output_index": part.index}
        if part.kind != "call":
            place["content_index"] = 0
        if part.kind == "text" and logprobs is not None:
            place["logprobs"] = logprobs
        return place

    def _id(self, part: Part) -> str:
        prefix = {"call": "fc", "reasoning": "rs", "text": "msg"}[part.kind]
        return self._items.setdefault(part.index, f"{prefix}_{uuid.uuid4().hex}")

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        made = {"id": self._id(part), "status": status}
        if part.kind == "call":
            call = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
            return {"type": "function_call", **made, **call}
        content = [_content(part)]
        if part.kind == "reasoning":
            return {"type": "reasoning", **made, "summary": [], "content": content}
        return {"type": "message", **made, "role": "assistant", "content": content}


_CONTENTS = {
    "text": "output_text",
    "reasoning": "reasoning_text",
    "call": "function_call_arguments",
}


def _content(part: Part) -> dict[str, Any]:
    """The content of an item that is no call."""
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": part.logprobs}


def _status(answer: PartAnswer) -> str:
    """That of the answer, and of its last item when that has ended."""
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _message(answer: PartAnswer) -> dict[str, Any]:
    """The answer as a message of a chat."""
    texts = {
        kind: "".join(part.text for part in answer.parts if part.kind == kind)
        for kind in ("text", "reasoning")
    }
    made: dict[str, Any] = {"role": "assistant", "content": texts["text"]}
    if texts["reasoning"]:
        made["reasoning_content"] = texts["reasoning"]
    made["tool_calls"] = [
        {
            "id": part.call_id,
            "type": "function",
            "function": {"name": part.name, "arguments": part.text},
        }
        for part in answer.parts
        if part.kind == "call"
    ]
    return made
