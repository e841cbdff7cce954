"""Anthropic's Messages API: ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``.

A request becomes the chat that means the same, and the parts of its answer become blocks.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from engine_core.configs import SamplingParams
from engine_core.media.parts import split_media
from engine_core.server.body import read_body, validated
from engine_core.server.chat import (
    Chat,
    answer_in_form,
    name_pictures,
    refuse_to_count,
    template_messages,
    understood,
)
from engine_core.server.context import RequestContext
from engine_core.server.encoding import encode, named_event
from engine_core.server.errors import ApiError, conflict
from engine_core.server.generation import check_common
from engine_core.server.messages_protocol import (
    COUNT_BODY,
    MESSAGES_BODY,
    AssistantTurn,
    Base64Source,
    ImageBlock,
    MessagesBody,
    MessagesPrompt,
    NamedChoice,
    NoChoice,
    SystemTurn,
    TextBlock,
    Texts,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
)
from engine_core.server.parts import Form, Part, PartAnswer
from engine_core.server.protocol import CHAT_BODY, ChatBody, CommonBody
from engine_core.server.service import Service

_FIELD_NAMES = (
    (r"tools\.(\d+)\.function\.parameters", r"tools.\1.input_schema"),
    (r"response_format\.json_schema\.schema", "output_config.format.schema"),
    ("response_format", "output_config.format"),
    ("continue_final_message|multi_modal_data", "messages"),
    ("stop", "stop_sequences"),
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


async def create_message(request: Request) -> Response:
    """Answer a conversation, in Anthropic's form."""
    return await answer_in_form(request, MESSAGES_BODY, _FIELD_NAMES, _understood)


async def count_tokens(request: Request) -> Response:
    """The tokens of the prompt that a conversation makes, in Anthropic's form."""
    service = Service.of(request)
    context = RequestContext.of(request)
    body = await read_body(request, COUNT_BODY, service.bodies)
    context.field_names = _FIELD_NAMES

    def count() -> int:
        asked = _chat_body(body, model=service.check_model(body.model))
        name_pictures(context, asked, _pictures(body))
        refuse_to_count(split_media(template_messages(asked.messages))[1])
        return len(Chat(service, context, asked).prompt())

    tokens = await service.run_text(context.body_size, count)
    return Response(encode({"input_tokens": tokens}), media_type="application/json")


def _understood(
    service: Service, context: RequestContext, body: MessagesBody
) -> tuple[Chat, SamplingParams, list[int], _Message]:
    common = {name: getattr(body, name) for name in CommonBody.model_fields}
    asked = _chat_body(body, max_tokens=body.max_tokens, stop=body.stop_sequences, **common)
    name_pictures(context, asked, _pictures(body))
    check_common(asked, service)
    chat, params, prompt = understood(service, context, asked)
    form = _Message(context, service.check_model(body.model), splits_usage=_names_cache(body))
    return chat, params, prompt, form


def _chat_body(body: MessagesPrompt, **more: Any) -> ChatBody:
    """The chat that means the same.

    Raises:
        ApiError: 400; the blocks make no conversation.
    """
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _texts(body.system)})
    for turn in body.messages:
        messages += _turn(turn)
    last = body.messages[-1]
    if isinstance(last, AssistantTurn):
        if messages[-1].get("tool_calls"):
            place = f"messages.{len(body.messages) - 1}"
            raise conflict(f"{place}: a tool_use must be followed by its tool_result", place)
        more["continue_final_message"] = True
    choice = body.tool_choice
    if isinstance(choice, NamedChoice):
        more["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        more["tool_choice"] = _CHOICES[choice.type]
    if choice is not None and not isinstance(choice, NoChoice):
        more["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.tools:
        more["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                },
            }
            for tool in body.tools
        ]
    config = body.output_config
    if config is not None and config.format is not None:
        schema = {"schema": config.format.schema_}
        more["response_format"] = {"type": "json_schema", "json_schema": schema}
    variables = _thinking(body) | (body.chat_template_kwargs or {})
    effort = None if config is None else config.effort
    more |= {"reasoning_effort": effort, "chat_template_kwargs": variables or None}
    return validated({**more, "messages": messages}, CHAT_BODY)


def _thinking(body: MessagesPrompt) -> dict[str, Any]:
    """The template's variables that turn thinking on and off."""
    if isinstance(body.thinking, ThinkingEnabled):
        budget = body.thinking.budget_tokens
        return {"enable_thinking": True, "thinking": True, "thinking_budget": budget}
    if isinstance(body.thinking, ThinkingDisabled):
        return {"enable_thinking": False, "thinking": False}
    return {}


def _pictures(body: MessagesPrompt) -> list[str]:
    """Places of pictures in the body."""
    return [
        f"messages.{index}.content.{number}.source"
        for index, turn in enumerate(body.messages)
        if not isinstance(turn.content, str)
        for number, block in enumerate(turn.content)
        if isinstance(block, ImageBlock)
    ]


def _turn(turn: UserTurn | AssistantTurn | SystemTurn) -> Iterator[dict[str, Any]]:
    """The messages of a chat that a message is."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
    elif isinstance(turn, AssistantTurn):
        yield _assistant(turn.content)
    else:
        parts: list[TextBlock | ImageBlock] = []
        for block in turn.content:
            if not isinstance(block, ToolResultBlock):
                parts.append(block)
                continue
            if parts:
                yield {"role": turn.role, "content": _parts(parts)}
                parts = []
            content = _texts(block.content or "")
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        if parts:
            yield {"role": turn.role, "content": _parts(parts)}


def _parts(blocks: Sequence[TextBlock | ImageBlock]) -> str | list[dict[str, Any]]:
    """The content of a message: text, or parts if there are pictures among them."""
    made: list[dict[str, Any]] = []
    texts: list[TextBlock] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block)
            made.append({"type": "text", "text": block.text})
        elif isinstance(block.source, Base64Source):
            url = f"data:{block.source.media_type};base64,{block.source.data}"
            made.append({"type": "image_url", "image_url": url})
        else:
            made.append({"type": "image_url", "image_url": block.source.url})
    return _texts(texts) if len(texts) == len(blocks) else made


def _assistant(blocks: Sequence[TextBlock | ThinkingBlock | ToolUseBlock]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant"}
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        made["reasoning_content"] = "\n".join(thoughts)
    if texts := [block for block in blocks if isinstance(block, TextBlock)]:
        made["content"] = _texts(texts)
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    made["tool_calls"] = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.input)},
        }
        for call in calls
    ]
    return made


def _texts(content: Texts | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _names_cache(body: MessagesBody) -> bool:
    """Whether any part of the request has a ``cache_control``."""
    parts: list[Any] = [body, *(body.tools or ())]
    for content in (body.system, *(turn.content for turn in body.messages)):
        for block in () if content is None or isinstance(content, str) else content:
            parts.append(block)
            if isinstance(block, ToolResultBlock) and not isinstance(block.content, str):
                parts += block.content or ()
    return any(getattr(part, "cache_control", None) is not None for part in parts)


class _Message(Form):
    """An answer as a message of blocks.

    Args:
        context: the HTTP request's.
        model: the name under which it is served.
        splits_usage: whether cached tokens are counted apart from the others of the prompt.
    """

    def __init__(self, context: RequestContext, model: str, *, splits_usage: bool) -> None:
        self._context = context
        self._model = model
        self._splits_usage = splits_usage
        self._id = f"msg_{uuid.uuid4().hex}"

    def begin(self, answer: PartAnswer) -> bytes:
        """See :class:`Form`."""
        return named_event({"type": "message_start", "message": self._object(answer, [])})

    def open(self, part: Part) -> bytes:
        """See :class:`Form`."""
        block = _block(part, "", {})
        return named_event(
            {"type": "content_block_start", "index": part.index, "content_block": block}
        )

    def more(self, part: Part, text: str) -> bytes:
        """See :class:`Form`."""
        if part.kind == "call":
            delta = {"type": "input_json_delta", "partial_json": text}
        else:
            kind = "text" if part.kind == "text" else "thinking"
            delta = {"type": f"{kind}_delta", kind: text}
        return named_event({"type": "content_block_delta", "index": part.index, "delta": delta})

    def close(self, part: Part, answer: PartAnswer) -> bytes:
        """See :class:`Form`."""
        return named_event({"type": "content_block_stop", "index": part.index})

    def end(self, answer: PartAnswer) -> bytes:
        """See :class:`Form`."""
        made = {"type": "message_delta", "delta": _stop(answer), "usage": self._usage(answer)}
        return named_event(made) + named_event({"type": "message_stop"})

    def failed(self, failure: ApiError, answer: PartAnswer) -> bytes:
        """See :class:`Form`."""
        return named_event(failure.body(self._context))

    def whole(self, answer: PartAnswer) -> dict[str, Any]:
        """See :class:`Form`; a call that is cut off is left out, as its input is no object."""
        blocks = []
        for part in answer.parts:
            called = _input(part.text) if part.kind == "call" else {}
            if called is not None:
                blocks.append(_block(part, part.text, called))
        stop = _stop(answer)
        if stop["stop_reason"] == "tool_use" and not any(b["type"] == "tool_use" for b in blocks):
            stop["stop_reason"] = "end_turn"
        return self._object(answer, blocks) | stop

    def _object(self, answer: PartAnswer, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(answer),
        }

    def _usage(self, answer: PartAnswer) -> dict[str, int]:
        cached = answer.input_details.get("cached_tokens", 0) if self._splits_usage else 0
        return {
            "input_tokens": answer.input_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": answer.output_tokens,
        }


def _block(part: Part, text: str, called: dict[str, Any]) -> dict[str, Any]:
    if part.kind == "call":
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": called}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _input(text: str) -> dict[str, Any] | None:
    """The input of a call; None if it is no object."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _stop(answer: PartAnswer) -> dict[str, Any]:
    """Why the answer has ended."""
    reason = _STOP_REASONS.get(answer.finish_reason or "")
    sequence = answer.stop_reason if isinstance(answer.stop_reason, str) else None
    if reason is None:
        reason = "end_turn" if sequence is None else "stop_sequence"
    return {
        "stop_reason": reason,
        "stop_sequence": sequence if reason == "stop_sequence" else None,
    }
