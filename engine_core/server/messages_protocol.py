"""The bodies of Anthropic's Messages API, and its answers as the OpenAPI document describes them.

Blocks may have fields that are not known here, as messages may in
:mod:`engine_core.server.protocol`; ``cache_control`` asks for nothing that is not done anyway.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from engine_core.server.protocol import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOP,
    MAX_TOOLS,
    Body,
    CommonBody,
    Count,
    Items,
    OnlyFalse,
    OpenBody,
    ShowingBody,
    StopString,
    Text,
    tool_type,
)
from engine_core.server.responses import Answer


class _Cached(ShowingBody):
    cache_control: Any = None
    """No effect but on the usage, which then counts cached tokens apart."""


class TextBlock(_Cached):
    """A piece of text."""

    type: Literal["text"]
    text: str
    source: None = None
    """That of a picture, which has a block of its own."""


class Base64Source(OpenBody):
    """A file's content."""

    type: Literal["base64"]
    media_type: Annotated[str, Field(pattern=r"^image/[a-zA-Z0-9.+-]{1,40}$")]
    data: str


class UrlSource(OpenBody):
    """An address that the server's owner allows, or a data URL."""

    type: Literal["url"]
    url: str


class ImageBlock(_Cached):
    """A picture, for models that take them."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class ThinkingBlock(OpenBody):
    """Thoughts of the model."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(_Cached):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: Text
    input: dict[str, Any]


Texts = str | Annotated[list[TextBlock], Items(0, MAX_PARTS)]


class ToolResultBlock(_Cached):
    """The result of a call; ``is_error`` has no effect."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None


UserBlock = Annotated[TextBlock | ImageBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class UserTurn(ShowingBody):
    """A message of the user, or results of calls."""

    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Items(1, MAX_PARTS)]


class AssistantTurn(ShowingBody):
    """An earlier answer of the model; the answer continues the last message if it is one."""

    role: Literal["assistant"]
    content: str | Annotated[list[AssistantBlock], Items(0, MAX_PARTS)]


class SystemTurn(ShowingBody):
    """Instructions in the course of a conversation."""

    role: Literal["system"]
    content: str | Annotated[list[TextBlock], Items(1, MAX_PARTS)]


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class CustomTool(Body):
    """A tool that the client runs."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    type: Annotated[Literal["custom"], tool_type("custom")] | None = None
    description: str | None = None
    input_schema: dict[str, Any]
    """JSON schema of the input."""
    cache_control: Any = None
    """See that of a text."""
    strict: bool | None = None
    """No effect."""
    eager_input_streaming: bool | None = None
    """No effect: input is streamed as it comes."""
    defer_loading: OnlyFalse | None = None


class _Parallel(Body):
    disable_parallel_tool_use: bool | None = None
    """Report only the first call."""


class AutoChoice(_Parallel):
    """The model may use tools."""

    type: Literal["auto"]


class AnyChoice(_Parallel):
    """The model must use a tool."""

    type: Literal["any"]


class NamedChoice(_Parallel):
    """The model must use this tool."""

    type: Literal["tool"]
    name: Text


class NoChoice(Body):
    """The model is not told of tools."""

    type: Literal["none"]


Choice = Annotated[AutoChoice | AnyChoice | NamedChoice | NoChoice, Field(discriminator="type")]


class ThinkingEnabled(Body):
    """The model thinks before it answers."""

    type: Literal["enabled"]
    budget_tokens: Count
    """Given to the chat template as thinking_budget; no effect if it does not ask for it."""
    display: Literal["summarized"] | None = None
    """Thoughts are reported as they are."""


class ThinkingAdaptive(Body):
    """The model thinks as its chat template has it."""

    type: Literal["adaptive"]
    display: Literal["summarized"] | None = None
    """Thoughts are reported as they are."""


class ThinkingDisabled(Body):
    """The model answers at once."""

    type: Literal["disabled"]


Thinking = Annotated[
    ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled, Field(discriminator="type")
]


class JsonFormat(Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Given to the chat template as reasoning_effort."""
    format: JsonFormat | None = None


class MessagesPrompt(Body):
    """Parts of a request that its prompt is made of."""

    system: Texts | None = None
    """Instructions before the conversation."""
    messages: Annotated[list[Turn], Items(1, MAX_MESSAGES)]
    tools: Annotated[list[CustomTool], Items(0, MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the chat template."""
    cache_control: Any = None
    """See that of a text."""
    speed: str | None = None
    """No effect."""
    user_profile_id: str | None = None
    """A label; no effect."""
    workspace_id: str | None = None
    """A label; no effect."""


class MessagesBody(CommonBody, MessagesPrompt):
    """The body of ``POST /v1/messages``."""

    max_tokens: Count
    """Tokens to generate at most."""
    stop_sequences: Annotated[list[StopString], Items(0, MAX_STOP)] | None = None
    """Texts that end the answer where they appear."""
    inference_geo: str | None = None
    """No effect."""
    container: None = None
    mcp_servers: Annotated[list[Any], Items(0, 0)] | None = None
    context_management: None = None


class CountBody(MessagesPrompt):
    """The body of ``POST /v1/messages/count_tokens``."""

    model: str | None = None


MESSAGES_BODY = TypeAdapter(MessagesBody)
COUNT_BODY = TypeAdapter(CountBody)


class MessagesErrorDetail(Answer):
    """Description of an error; the last two are not Anthropic's."""

    type: str
    message: str
    param: str | None
    code: str | None


class MessagesErrorAnswer(Answer):
    """A refusal or a failure in Anthropic's form."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class MessagesUsage(Answer):
    """Tokens in and out."""

    input_tokens: int = Field(ge=0)
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)


class TextBlockAnswer(Answer):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlockAnswer(Answer):
    """Thoughts of the model; nothing is signed."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class ToolUseBlockAnswer(Answer):
    """A call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


BlockAnswer = TextBlockAnswer | ThinkingBlockAnswer | ToolUseBlockAnswer
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageAnswer(Answer):
    """The model's answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[BlockAnswer]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class BlockDelta(Answer):
    """More of a block; ``type`` says of which kind."""

    type: Literal["text_delta", "thinking_delta", "input_json_delta"]
    text: str = ""
    thinking: str = ""
    partial_json: str = ""


class StopDelta(Answer):
    """Why an answer has ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessagesEvent(Answer):
    """An event of a stream, which has the name of its ``type``."""

    model_config = ConfigDict(extra="forbid")

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    message: MessageAnswer | None = None
    index: int = Field(default=0, ge=0)
    content_block: BlockAnswer | None = None
    delta: BlockDelta | StopDelta | None = None
    usage: MessagesUsage | None = None
    error: MessagesErrorDetail | None = None
    request_id: str = ""


class CountAnswer(Answer):
    """The length of a prompt."""

    input_tokens: int = Field(ge=0)
