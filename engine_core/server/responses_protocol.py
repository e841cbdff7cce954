"""The bodies of OpenAI's Responses API, and its answers as the OpenAPI document describes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from engine_core.server.protocol import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Body,
    CommonBody,
    Count,
    Detail,
    Effort,
    Items,
    JsonObjectResponseFormat,
    Labels,
    OnlyFalse,
    OpenBody,
    ShowingBody,
    Text,
    TextResponseFormat,
    Top,
    tool_type,
)
from engine_core.server.responses import Answer, MediaTokens, TokenLogprob


class InputText(ShowingBody):
    """A piece of a message's text."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputImage(ShowingBody):
    """A picture, for models that take them."""

    type: Literal["input_image"]
    image_url: str | None = None
    """A data URL (``data:TYPE;base64,...``), or an address that the server's owner allows."""
    detail: Detail | None = None
    """No effect: see ``mm_processor_kwargs``."""
    file_id: None = None
    uuid: str | None = None
    """A name for the picture, by which it can be shown again without its content."""


def _input_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "InputImage" if kind == "input_image" else "InputText"


Content = str | Annotated[list[InputText], Items(0, MAX_PARTS)]
Input = Annotated[
    Annotated[InputText, Tag("InputText")] | Annotated[InputImage, Tag("InputImage")],
    Discriminator(_input_kind),
]


class MessageItem(ShowingBody):
    """A message of the model, or instructions to it."""

    type: Literal["message"] | None = None
    role: Literal["assistant", "system", "developer"]
    content: Content


class UserItem(ShowingBody):
    """A message of the user."""

    type: Literal["message"] | None = None
    role: Literal["user"]
    content: str | Annotated[list[Input], Items(0, MAX_PARTS)]


class CallItem(OpenBody):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: Text
    arguments: str


class CallOutputItem(OpenBody):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningText(OpenBody):
    """A piece of what the model thought."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(OpenBody):
    """Thoughts of the model; ``encrypted_content`` has no effect."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Items(0, MAX_PARTS)] | None = None
    """No effect beside content."""
    content: Annotated[list[ReasoningText], Items(0, MAX_PARTS)] | None = None


def _item_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in (None, "message"):
        return "user" if isinstance(value, dict) and value.get("role") == "user" else "message"
    return str(kind)


Item = Annotated[
    Annotated[UserItem, Tag("user")]
    | Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _item_kind,
        custom_error_type="no_item",
        custom_error_message="must be of type message, function_call, function_call_output or "
        "reasoning",
    ),
]


class JsonSchemaTextFormat(Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    name: str | None = None
    """No effect."""
    description: str | None = None
    """No effect."""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """No effect: the output always follows the schema."""


class TextConfig(Body):
    """Form of the text."""

    format: (
        Annotated[
            TextResponseFormat | JsonObjectResponseFormat | JsonSchemaTextFormat,
            Field(discriminator="type"),
        ]
        | None
    ) = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Given to the chat template; no effect if it does not ask for it."""


class Reasoning(Body):
    """How the model thinks."""

    effort: Effort | None = None
    """Given to the chat template, as a chat's reasoning_effort is."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """No effect: reasoning is reported as it is."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """No effect."""


class FunctionTool(Body):
    """A function that the model may call."""

    type: Annotated[Literal["function"], tool_type("function")]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; none are taken if not set."""
    strict: bool | None = None
    """No effect."""
    defer_loading: OnlyFalse | None = Field(default=None, exclude=True)


class FunctionChoice(Body):
    """The function that the model must call."""

    type: Literal["function"]
    name: Text


class AllowedChoice(Body):
    """The functions that the model may call; it is not told of others."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Items(1, MAX_TOOLS)]


class ResponseStreamOptions(Body):
    """Options of a stream."""

    include_obfuscation: OnlyFalse | None = None
    """Events are never padded."""


Included = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


class ResponsesBody(CommonBody, Labels):
    """The body of ``POST /v1/responses``."""

    input: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[Item], Items(1, MAX_MESSAGES), Tag("items")],
        Discriminator(lambda value: "items" if isinstance(value, list) else "text"),
    ]
    """A message of the user, or the items of a conversation."""
    instructions: str | None = None
    """Comes before the conversation, and is not kept for the next request."""
    previous_response_id: str | None = None
    """The conversation goes on after this response."""
    store: bool | None = None
    """Keep the response and its conversation for later requests; so if not set, where the server
    does."""
    max_output_tokens: Count | None = None
    """Tokens to generate at most."""
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[FunctionTool], Items(0, MAX_TOOLS)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[FunctionChoice | AllowedChoice, Field(discriminator="type")]
        | None
    ) = None
    """Whether the model may call functions, must, or which; auto if there are tools."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls; so if not set. Only the first is reported if
    not."""
    truncation: Literal["auto", "disabled"] | None = None
    """Leave out the oldest turns of a conversation that is too long ("auto"), or refuse it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the chat template."""
    stream_options: ResponseStreamOptions | None = None
    include: Annotated[list[Included], Items(0, 16)] | None = None
    """No effect but for the log-probabilities of the text: there is nothing of the others."""
    max_tool_calls: Count | None = None
    """No effect: it is of tools that the server runs, and there are none."""
    top_logprobs: Top | None = None
    """Report so many of the most probable tokens too; implies the log-probabilities of the text
    unless it is 0."""
    background: OnlyFalse | None = None
    conversation: None = None
    prompt: None = None
    context_management: None = None
    moderation: None = None


RESPONSES_BODY = TypeAdapter(ResponsesBody)


class OutputText(Answer):
    """Text."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(max_length=0)
    logprobs: list[TokenLogprob]


class OutputReasoningText(Answer):
    """Thoughts of the model."""

    type: Literal["reasoning_text"]
    text: str


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(Answer):
    """Text of the answer."""

    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(Answer):
    """Reasoning before the answer."""

    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[Any] = Field(max_length=0)
    content: list[OutputReasoningText]


class OutputCall(Answer):
    """A call."""

    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputTokensDetails(MediaTokens):
    """Where the prompt's tokens came from."""

    cached_tokens: int = Field(ge=0)
    cache_write_tokens: Literal[0]


class OutputTokensDetails(Answer):
    """Kinds of the output's tokens."""

    reasoning_tokens: int = Field(ge=0)


class ResponseUsage(Answer):
    """Tokens in and out."""

    input_tokens: int = Field(ge=0)
    input_tokens_details: InputTokensDetails
    output_tokens: int = Field(ge=0)
    output_tokens_details: OutputTokensDetails
    total_tokens: int = Field(ge=0)


class ResponseFailure(Answer):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(Answer):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseAnswer(Answer):
    """A response, with the settings that it was made with."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    background: Literal[False]
    store: bool
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    temperature: float
    top_p: float
    top_logprobs: int = Field(ge=0, le=20)
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    truncation: Literal["auto", "disabled"]
    service_tier: str | None
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None


class DeletedResponse(Answer):
    """A response that is stored no more."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemText(Answer):
    """Text of a message."""

    type: Literal["input_text", "output_text"]
    text: str


class InputMessage(Answer):
    """A message."""

    type: Literal["message"]
    id: str
    status: Literal["completed"]
    role: str
    content: list[InputItemText]


class InputReasoning(Answer):
    """Thoughts of the model."""

    type: Literal["reasoning"]
    id: str
    summary: list[Any] = Field(max_length=0)
    content: list[OutputReasoningText]


class InputCallOutput(Answer):
    """The result of a call."""

    type: Literal["function_call_output"]
    id: str
    status: Literal["completed"]
    call_id: str
    output: str


class InputItems(Answer):
    """Items of the conversation before a response."""

    object: Literal["list"]
    data: list[InputMessage | InputReasoning | OutputCall | InputCallOutput]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseEvent(Answer):
    """An event of a stream, which has the name of its ``type``."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int = Field(ge=0)
    response: ResponseAnswer | None = None
    output_index: int = Field(default=0, ge=0)
    content_index: Literal[0] = 0
    item_id: str = ""
    item: OutputItem | None = None
    part: OutputText | OutputReasoningText | None = None
    delta: str = ""
    text: str = ""
    name: str = ""
    arguments: str = ""
    logprobs: list[TokenLogprob] = Field(default=[])
