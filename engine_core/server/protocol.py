"""The bodies of requests: OpenAI's fields, and vLLM's names for what those lack.

The models are as strict as the OpenAPI document made from them: a number in quotes, an unknown key
or a value of an enumeration written otherwise is refused. None counts as not given, as OpenAI has
it. What would change the text and is not supported is refused; what is bookkeeping is taken, and
messages may have fields that are not known here.

A body of the largest size may hold millions of mistakes. Writing each of them down would take
minutes in which nobody else is served. So validation of a list ends at its first mistake, lists
that are too long are not validated, and one look tells the branch of a union.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    TypeAdapter,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from engine_core.configs import SamplingParams
from engine_core.configs.base import describe
from engine_core.media.parts import shows

_MAX_INT = 2**31 - 1

# Far above what anyone sends; they bound what one body can cost.
MAX_TOKEN_IDS = 2**20
MAX_PROMPTS = 2**16
MAX_INPUTS = 2048
MAX_MESSAGES = 2**14
MAX_PARTS = 1024
MAX_CALLS = 1024
MAX_TOOLS = 128
MAX_STOP = 64
MAX_STOP_LENGTH = 512
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 2**18
MAX_BIASES = 2**16
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_LENGTH = 128
MAX_CHOICES = 1024
# Unknown keys of an object that are named.
_MAX_UNKNOWN = 8


@dataclass(frozen=True, slots=True)
class Items:
    """How many entries a list or an object has; none is looked at if they are too many.

    Attributes:
        low: at least so many, 0 or 1.
        high: at most so many.
    """

    low: int
    high: int

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        inner = handler(source)
        assert inner["type"] in ("list", "dict"), "nothing else has entries"
        # The lengths are for the document: the check comes before.
        more: dict[str, Any] = {"min_length": self.low, "max_length": self.high}
        if inner["type"] == "list":
            more["fail_fast"] = True
        schema = cast("CoreSchema", {**inner, **more})
        return core_schema.no_info_before_validator_function(self._check, schema)

    def _check(self, value: Any) -> Any:
        if not isinstance(value, list | dict) or self.low <= len(value) <= self.high:
            return value
        if len(value) < self.low:
            message = "must not be empty"
        elif self.high == 0:
            message = "only an empty one is supported"
        else:
            message = "must have {high} entries or fewer, and has {length}"
        raise PydanticCustomError(
            "wrong_length", message, {"low": self.low, "high": self.high, "length": len(value)}
        )


def _integral(value: Any) -> Any:
    """JSON has one kind of number: 1.0 is the integer 1."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    return value


def _integrals(value: Any) -> Any:
    """As :func:`_integral`, at the cost of one pass where all are integers, as they nearly are."""
    if isinstance(value, list) and float in set(map(type, value)):
        return [_integral(each) for each in value]
    return value


def _only_false(value: Any) -> Any:
    """0 equals False, but is not a boolean."""
    if value is not False:
        raise ValueError("only false is supported")
    return value


def tool_type(only: str) -> BeforeValidator:
    """The check of a tool's type, for the others of which a service has tools that it runs."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and value != only:
            message = "hosted tools are not offered, only those of type '{only}'"
            raise PydanticCustomError("tool_type", message, {"only": only})
        return value

    return BeforeValidator(check)


def _only_true(value: Any) -> Any:
    if value is not True:
        raise ValueError("only true is supported")
    return value


# The bounds stand before the validator, or the schema would not have them.
_Integral = BeforeValidator(_integral)
Count = Annotated[int, Field(ge=1, le=_MAX_INT), _Integral]
Number = Annotated[int, Field(ge=0, le=_MAX_INT), _Integral]
Top = Annotated[int, Field(ge=0, le=20), _Integral]
# A prompt has thousands, which a function in Python for each would take milliseconds for.
_TokenIds = list[Annotated[int, Field(ge=0, le=_MAX_INT)]]
_Integrals = BeforeValidator(_integrals)
OnlyFalse = Annotated[Literal[False], BeforeValidator(_only_false)]
OnlyTrue = Annotated[Literal[True], BeforeValidator(_only_true)]
Text = Annotated[str, Field(min_length=1)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_LENGTH)]
LogitBias = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")],
        Annotated[float, Field(ge=-100, le=100)],
    ],
    Items(0, MAX_BIASES),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_BIASES,
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]


class Body(BaseModel):
    """A body, or an object within one."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _few_unknown(cls, value: Any) -> Any:
        """Keep only the first unknown keys; each is then refused with an error."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields) + _MAX_UNKNOWN:
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = islice((key for key in value if key not in known), _MAX_UNKNOWN)
        return {key: value[key] for key in (*unknown, *(known & value.keys()))}


class OpenBody(Body):
    """An object that may have further fields, which have no effect."""

    model_config = ConfigDict(extra="ignore")


class ShowingBody(OpenBody):
    """An object that may have further fields, unless these would show something.

    Nobody is to be answered as if the model had seen what it was not given.
    """

    # Of the other fields none is left when this is looked at; in the schema they are open.
    model_config = ConfigDict(
        extra="forbid", json_schema_extra=lambda schema: schema.pop("additionalProperties", None)
    )

    @model_validator(mode="before")
    @classmethod
    def _only_media_unknown(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {key: each for key, each in value.items() if key in known or shows(key, each)}


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    """End with a chunk that has the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """Each chunk has the usage so far; needs include_usage."""
    include_obfuscation: OnlyFalse | None = None
    """Chunks are never padded."""


class JsonSchemaFormat(Body):
    """A schema and its name."""

    name: str | None = None
    """No effect; OpenAI wants one."""
    description: str | None = None
    """No effect."""
    schema_: dict[str, Any] = Field(alias="schema")
    """Required form of the output."""
    strict: bool | None = None
    """No effect: the output always follows the schema."""


class TextResponseFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectResponseFormat(Body):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchemaResponseFormat(Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


ResponseFormat = Annotated[
    TextResponseFormat | JsonObjectResponseFormat | JsonSchemaResponseFormat,
    Field(discriminator="type"),
]


class StructuredOutputs(Body):
    """vLLM's newer form of the fields that begin with guided_; one of them is given."""

    json_: dict[str, Any] | None = Field(default=None, alias="json")
    """As guided_json."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: Text | None = None
    """As guided_regex."""
    choice: Annotated[list[Text], Items(1, MAX_CHOICES)] | None = None
    """As guided_choice."""
    grammar: Text | None = None
    """As guided_grammar."""
    structural_tag: None = None
    whitespace_pattern: None = None
    disable_any_whitespace: OnlyFalse | None = None
    disable_additional_properties: OnlyFalse | None = None


def _sampled(name: str) -> Any:
    """An optional field that means what :class:`SamplingParams` says of its own."""
    return Field(default=None, description=describe(SamplingParams)[name])


class CommonBody(Body):
    """Fields of all kinds of generation."""

    model: str | None = None
    """One of the names under which the model is served; the first of them if not set."""
    stream: bool | None = None
    """Send the output as it comes."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = _sampled("temperature")
    top_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description=f"{_sampled('top_p').description} 0 is greedy."
    )
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT), _Integral] | None = _sampled("top_k")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = _sampled("min_p")
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = _sampled(
        "repetition_penalty"
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = _sampled("presence_penalty")
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = _sampled("frequency_penalty")
    logit_bias: LogitBias | None = _sampled("logit_bias")
    seed: Annotated[int, Field(ge=-1, lt=2**63), _Integral] | None = Field(
        default=None, description=f"{_sampled('seed').description} -1 counts as not set."
    )
    priority: Annotated[int, Field(ge=-(2**31), le=_MAX_INT), _Integral] | None = None
    """A request of a lower value runs before others; 0 if not set."""
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None
    """Seconds from the request's arrival to its end at most, if the server's own limit is not
    less."""
    cache_salt: Text | None = None
    """Only requests with the same salt share cached beginnings of prompts."""
    metadata: dict[str, Any] | None = None
    """Labels; no effect."""
    service_tier: str | None = None
    """No effect; see priority."""


class Labels(Body):
    """Fields that OpenAI's clients send for its books."""

    user: str | None = None
    """A label; no effect."""
    safety_identifier: str | None = None
    """A label; no effect."""
    prompt_cache_key: str | None = None
    """A label; no effect: equal beginnings share their cache anyway. See cache_salt."""
    prompt_cache_retention: str | None = None
    """No effect: what was not used for longest is dropped first."""


class GenerationBody(CommonBody, Labels):
    """Fields of chats and of completions."""

    stream_options: StreamOptions | None = None
    """Needs stream."""
    n: Annotated[int, Field(ge=1), _Integral] | None = None
    """Completions; each has its own seed."""
    max_tokens: Number | None = None
    """Tokens to generate at most; 0 only to echo a prompt."""
    min_tokens: Number | None = _sampled("min_tokens")
    stop: StopString | Annotated[list[StopString], Items(0, MAX_STOP)] | None = _sampled("stop")
    stop_token_ids: Annotated[_TokenIds, Items(0, MAX_STOP_TOKEN_IDS), _Integrals] | None = (
        _sampled("stop_token_ids")
    )
    include_stop_str_in_output: bool | None = _sampled("include_stop_str_in_output")
    ignore_eos: bool | None = _sampled("ignore_eos")
    allowed_token_ids: Annotated[_TokenIds, Items(1, MAX_ALLOWED_TOKEN_IDS), _Integrals] | None = (
        _sampled("allowed_token_ids")
    )
    bad_words: Annotated[list[BadWord], Items(0, MAX_BAD_WORDS)] | None = _sampled("bad_words")
    skip_special_tokens: bool | None = _sampled("skip_special_tokens")
    response_format: ResponseFormat | None = None
    """Required form of the text."""
    guided_json: dict[str, Any] | None = None
    """JSON schema that the text must follow."""
    guided_regex: Text | None = None
    """Regular expression that the whole text must match."""
    guided_choice: Annotated[list[Text], Items(1, MAX_CHOICES)] | None = None
    """The text must be one of these."""
    guided_grammar: Text | None = None
    """Grammar, in llguidance's form of Lark, that the text must follow."""
    structured_outputs: StructuredOutputs | None = None
    """The same four in one object."""
    prompt_logprobs: Top | None = None
    """Report the log-probability of each token of the prompt, and so many of the most probable
    ones; not in a stream."""
    truncate_prompt_tokens: Count | Literal[-1] | None = None
    """Keep only so many tokens of the prompt's end; -1 for as many as the server takes."""
    add_special_tokens: bool | None = None
    """Add what the tokenizer adds to a text by itself; so if not set, but not in a chat, whose
    template writes that."""
    return_token_ids: bool | None = None
    """Add the token ids of prompt and output to the answer."""
    return_tokens_as_token_ids: bool | None = None
    """Name tokens in log-probabilities "token_id:5"."""
    echo: bool | None = None
    """Begin the text with the prompt; in a chat, with the last message if it is the model's."""
    use_beam_search: OnlyFalse | None = None
    store: bool | None = None
    """No effect: nothing is stored."""
    early_stopping: OnlyFalse | None = None
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    """For beams only, of which there are none."""
    truncation_side: Literal["left"] | None = None
    """The end of a prompt that is cut is kept."""
    spaces_between_special_tokens: OnlyTrue | None = None
    """No effect: a tokenizer decides how its special tokens are written."""
    stream_interval: Count | None = None
    """No effect: what has come is sent at once."""
    guided_decoding_backend: str | None = None
    """No effect: there is one."""
    session_id: str | None = None
    """A label; no effect."""
    logprob_token_ids: None = None
    thinking_token_budget: None = None
    repetition_detection: None = None
    guided_whitespace_pattern: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    media_io_kwargs: None = None
    vllm_xargs: None = None
    request_id: None = None
    """See the header X-Request-Id."""


class TextPart(ShowingBody):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _shows_nothing(cls, value: Any) -> Any:
        """Refuse a part of another type where a message has text alone, in one sentence."""
        if isinstance(value, dict) and _part_kind(value) != "TextPart":
            raise PydanticCustomError(
                "shown_elsewhere",
                "'{kind}' is a part of a user's message alone; move it to one",
                {"kind": value["type"]},
            )
        return value


Detail = Literal["auto", "low", "high", "original"]
"""How closely a client wants a picture looked at. No effect: ``mm_processor_kwargs`` say it."""


class MediaUrl(Body):
    """The place of a picture, video or sound.

    Other services have options of its processing here, which would change the answer.
    """

    url: str | None = None
    """A data URL (``data:TYPE;base64,...``), or an address that the server's owner allows."""
    detail: Detail | None = None
    """No effect: see ``mm_processor_kwargs``."""


class _MediaPart(ShowingBody):
    uuid: str | None = None
    """A name for the item, by which it can be shown again without its content."""


class ImagePart(_MediaPart):
    """A picture of a message, for models that take them."""

    type: Literal["image_url", "input_image"]
    image_url: str | MediaUrl | None = None
    detail: Detail | None = None
    """No effect: see ``mm_processor_kwargs``."""


class VideoPart(_MediaPart):
    """A video of a message, for models that take them."""

    type: Literal["video_url"]
    video_url: str | MediaUrl | None = None


class AudioUrlPart(_MediaPart):
    """A sound of a message, for models that take them."""

    type: Literal["audio_url"]
    audio_url: str | MediaUrl | None = None


class AudioData(Body):
    """A file of sound."""

    data: str
    """Its bytes in base64."""
    format: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_]{1,16}$")]
    """Its kind, as wav or mp3."""


class AudioPart(_MediaPart):
    """A sound of a message, for models that take them."""

    type: Literal["input_audio"]
    input_audio: AudioData | None = None


# By type; none is a field of a part, which a place in it would be taken for.
_PART_TAGS = {"image_url": "ImagePart", "input_image": "ImagePart", "video_url": "VideoPart"}
_PART_TAGS |= {"audio_url": "AudioUrlPart", "input_audio": "AudioPart"}


def _part_kind(value: Any) -> str:
    # Asked of a body, and of its part when that is written out again.
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _PART_TAGS.get(kind, "TextPart") if isinstance(kind, str) else "TextPart"


Content = str | Annotated[list[TextPart], Items(1, MAX_PARTS)]
Part = Annotated[
    Annotated[TextPart, Tag("TextPart")]
    | Annotated[ImagePart, Tag("ImagePart")]
    | Annotated[VideoPart, Tag("VideoPart")]
    | Annotated[AudioUrlPart, Tag("AudioUrlPart")]
    | Annotated[AudioPart, Tag("AudioPart")],
    Discriminator(_part_kind),
]


class InstructionMessage(ShowingBody):
    """Instructions to the model; "developer" is OpenAI's newer word for "system"."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(ShowingBody):
    """A message of the user."""

    role: Literal["user"]
    content: str | Annotated[list[Part], Items(1, MAX_PARTS)]
    name: str | None = None


class FunctionCall(OpenBody):
    """The function that the model called, with its arguments as JSON in a string."""

    name: Text
    arguments: str


class ToolCall(OpenBody):
    """One call that the model made."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(ShowingBody):
    """An earlier answer of the model."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of reasoning_content."""
    tool_calls: Annotated[list[ToolCall], Items(0, MAX_CALLS)] | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    prefix: OnlyFalse | None = Field(default=None, exclude=True)
    """See continue_final_message."""
    partial: OnlyFalse | None = Field(default=None, exclude=True)
    """See continue_final_message."""


class ToolMessage(ShowingBody):
    """The result of a function call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[
    InstructionMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; none are taken if not set."""
    strict: bool | None = None
    """No effect."""


class Tool(Body):
    """A function that the model may call."""

    type: Annotated[Literal["function"], tool_type("function")]
    function: FunctionDefinition
    cache_control: Any = Field(default=None, exclude=True)
    """No effect."""


class NamedFunction(Body):
    """The name of a function."""

    name: Text


class NamedToolChoice(Body):
    """The function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Items(1, MAX_TOOLS)]


class AllowedToolChoice(Body):
    """The functions that the model may call; it is not told of others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Conversation(Body):
    """Parts of a conversation that its prompt is made of."""

    messages: Annotated[list[Message], Items(1, MAX_MESSAGES)]
    tools: Annotated[list[Tool], Items(0, MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    """End the prompt with the beginning of the model's turn; so if not set, unless the last message
    is continued."""
    continue_final_message: bool | None = None
    """End the prompt with the last message's content, so that the answer continues it."""
    add_special_tokens: bool | None = None
    """Add what the tokenizer adds to a text by itself, besides what the template writes."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the chat template."""
    reasoning_effort: Effort | None = None
    """Given to the chat template, and as its switches enable_thinking and thinking: off with
    "none". No effect if it has none of these."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Given to the chat template; no effect if it does not ask for it."""

    @property
    def template_variables(self) -> dict[str, Any]:
        """The further variables of the template."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            thinks = self.reasoning_effort != "none"
            variables = {"enable_thinking": thinks, "thinking": thinks}
            variables["reasoning_effort"] = self.reasoning_effort
        if self.verbosity is not None:
            variables["verbosity"] = self.verbosity
        return variables | (self.chat_template_kwargs or {})


class ChatBody(GenerationBody, Conversation):
    """The body of ``POST /v1/chat/completions``."""

    max_completion_tokens: Count | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    """Report the log-probability of each token."""
    top_logprobs: Top | None = None
    """Report so many of the most probable tokens too; needs logprobs."""
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedToolChoice | AllowedToolChoice, Field(discriminator="type")]
        | None
    ) = None
    """Whether the model may call functions, must, or which; auto if there are tools."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls; so if not set. Only the first is reported if
    not."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Settings of the family's processing of what the prompt shows, over those of the server."""
    include_reasoning: bool | None = None
    """Whether the answer has the reasoning that a parser found; so if not set."""
    modalities: Annotated[list[Literal["text"]], Items(1, 1)] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    documents: None = None
    """See chat_template_kwargs."""
    chat_template: None = None
    """It is code, which the server's owner chooses."""
    functions: None = None
    function_call: None = None

    @property
    def offered(self) -> dict[int, Tool]:
        """The tools that may be called, by their places."""
        tools = dict(enumerate(self.tools or ()))
        if not isinstance(self.tool_choice, AllowedToolChoice):
            return tools
        allowed = {choice.function.name for choice in self.tool_choice.allowed_tools.tools}
        return {place: tool for place, tool in tools.items() if tool.function.name in allowed}


TokenPrompt = Annotated[_TokenIds, Items(1, MAX_TOKEN_IDS), _Integrals]


def _prompt_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else None
    if isinstance(first, dict):
        return None
    if isinstance(first, str):
        return "texts"
    return "token_lists" if isinstance(first, list) else "tokens"


class CompletionBody(GenerationBody):
    """The body of ``POST /v1/completions``."""

    prompt: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[list[Text], Items(1, MAX_PROMPTS), Tag("texts")]
        | Annotated[TokenPrompt, Tag("tokens")]
        | Annotated[list[TokenPrompt], Items(1, MAX_PROMPTS), Tag("token_lists")],
        Discriminator(
            _prompt_kind,
            custom_error_type="no_prompt",
            custom_error_message="must be text, token ids, or a list of either",
        ),
    ]
    """Text, token ids, or several of either."""
    logprobs: Top | None = None
    """Report each token's log-probability and so many of the most probable ones."""
    best_of: Annotated[int, Field(ge=1, le=1), _Integral] | None = None
    """Completions are not generated to be thrown away."""
    prompt_embeds: None = None
    mm_processor_kwargs: None = None
    suffix: None = None
    """Filling in before a suffix is not supported."""


class PoolingBody(Body):
    """Fields of requests for vectors and for scores."""

    model: str | None = None
    """One of the names under which the model is served; the first of them if not set."""
    truncate_prompt_tokens: Count | Literal[-1] | None = None
    """Keep only so many tokens of each text, the first ones and the special ones; -1 for as many as
    the model takes. A longer text is refused if not set."""
    priority: Annotated[int, Field(ge=-(2**31), le=_MAX_INT), _Integral] | None = None
    """A request of a lower value runs before others; 0 if not set."""
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None
    """Seconds from the request's arrival to its end at most, if the server's own limit is not
    less."""
    cache_salt: Text | None = None
    """Only requests with the same salt share cached beginnings of texts."""
    user: str | None = None
    """A label; no effect."""


class EmbeddingBody(PoolingBody):
    """The body of ``POST /v1/embeddings``."""

    input: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[list[Text], Items(1, MAX_INPUTS), Tag("texts")]
        | Annotated[TokenPrompt, Tag("tokens")]
        | Annotated[list[TokenPrompt], Items(1, MAX_INPUTS), Tag("token_lists")],
        Discriminator(
            _prompt_kind,
            custom_error_type="no_prompt",
            custom_error_message="must be text, token ids, or a list of either",
        ),
    ]
    """Text, token ids, or several of either."""
    encoding_format: Literal["float", "base64"] | None = None
    """Whether a vector is a list of numbers (if not set), or its float32 in base64."""
    dimensions: Count | None = None
    """Numbers of a vector, for models that are trained so that its beginning is one too."""
    normalize: bool | None = None
    """Whether vectors have length 1; as the model says if not set."""
    prompt_name: Text | None = None
    """Which of the checkpoint's prompts goes before each text; its default one, if it has one, if
    not set."""


class ScoreBody(PoolingBody):
    """The body of ``POST /v1/score``."""

    text_1: Text | Annotated[list[Text], Items(1, MAX_INPUTS)]
    """A text for all of text_2, or as many."""
    text_2: Text | Annotated[list[Text], Items(1, MAX_INPUTS)]
    """A text, or several."""
    use_activation: bool | None = None
    """Whether a cross encoder's score passes the model's activation; so if not set."""


class RerankText(Body):
    """A document as an object."""

    text: Text


class RerankBody(PoolingBody):
    """The body of ``POST /v1/rerank``, as Jina and Cohere have it."""

    query: Text
    documents: Annotated[list[Text | RerankText], Items(1, MAX_INPUTS)]
    """The texts to put in order."""
    top_n: Count | None = None
    """How many of them the answer has at most; all if not set."""
    return_documents: bool | None = None
    """Whether the answer has their text; so if not set."""


class TokenizeTextBody(Body):
    """The body of ``POST /tokenize`` for a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    """Add what the tokenizer adds to a prompt by itself; so if not set."""
    return_token_strs: bool | None = None
    """Add the tokens as the vocabulary spells them."""


class TokenizeChatBody(Conversation):
    """The body of ``POST /tokenize`` for a conversation."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[_TokenIds, Items(0, MAX_TOKEN_IDS), _Integrals]


def _kind(value: Any) -> str:
    return "chat" if isinstance(value, dict) and "messages" in value else "text"


TOKENIZE_BODY: TypeAdapter[TokenizeTextBody | TokenizeChatBody] = TypeAdapter(
    Annotated[
        Annotated[TokenizeTextBody, Tag("text")] | Annotated[TokenizeChatBody, Tag("chat")],
        Discriminator(_kind),
    ]
)
CHAT_BODY = TypeAdapter(ChatBody)
COMPLETION_BODY = TypeAdapter(CompletionBody)
EMBEDDING_BODY = TypeAdapter(EmbeddingBody)
SCORE_BODY = TypeAdapter(ScoreBody)
RERANK_BODY = TypeAdapter(RerankBody)
DETOKENIZE_BODY = TypeAdapter(DetokenizeBody)
