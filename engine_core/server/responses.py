"""The bodies of answers, as the OpenAPI document describes them.

Answers are built as plain dictionaries, which costs less; the tests hold the two together.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """An answer, or an object within one."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Answer):
    """Description of an error."""

    message: str
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "timeout_error",
        "rate_limit_error",
        "server_error",
    ]
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """A refusal or a failure."""

    error: ErrorDetail


class _Generated(Answer):
    id: str
    created: int
    model: str


class MediaTokens(Answer):
    """Tokens of a prompt that are embeddings of media; a kind that it has not is left out."""

    image_tokens: int | None = Field(default=None, ge=0)
    video_tokens: int | None = Field(default=None, ge=0)
    audio_tokens: int | None = Field(default=None, ge=0)


class PromptTokensDetails(MediaTokens):
    """Where the prompt's tokens came from."""

    cached_tokens: int = Field(ge=0)


class Usage(Answer):
    """Tokens in and out."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Answer):
    """A token that could have come."""

    token: str
    logprob: float = Field(le=0)
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token that came, and others that could have."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """Log-probabilities of an answer's tokens."""

    content: list[TokenLogprob]
    refusal: None


class PromptLogprob(Answer):
    """Log-probability of a token of the prompt."""

    logprob: float = Field(le=0)
    rank: int = Field(ge=1)
    decoded_token: str | None


class FunctionCallAnswer(Answer):
    """A function and its arguments."""

    name: str
    arguments: str


class ToolCallAnswer(Answer):
    """One call."""

    id: str
    type: Literal["function"]
    function: FunctionCallAnswer


class ChatMessageAnswer(Answer):
    """The model's answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCallAnswer] = []


class ChatChoice(Answer):
    """One answer."""

    index: int = Field(ge=0)
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    token_ids: list[int] = []


class ChatCompletionAnswer(_Generated):
    """Answers to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice] = Field(min_length=1)
    usage: Usage
    prompt_token_ids: list[int] = []
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class FunctionCallPiece(Answer):
    """A function's name, or more of its arguments."""

    name: str = ""
    arguments: str


class ToolCallPiece(Answer):
    """The beginning of a call, which has the names, or more of it."""

    index: int = Field(ge=0)
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCallPiece


class ChatDelta(Answer):
    """An addition to an answer."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallPiece] = []


class ChatChunkChoice(Answer):
    """More of one answer."""

    index: int = Field(ge=0)
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] = []


class ChatChunkAnswer(_Generated):
    """An event of a stream of answers to a conversation."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] = []


class CompletionLogprobsAnswer(Answer):
    """Log-probabilities of a text's tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One text."""

    index: int = Field(ge=0)
    text: str
    logprobs: CompletionLogprobsAnswer | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class CompletionAnswer(_Generated):
    """Completions of one prompt or several."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice] = Field(min_length=1)
    usage: Usage


class CompletionChunkChoice(Answer):
    """More of one text."""

    index: int = Field(ge=0)
    text: str
    logprobs: CompletionLogprobsAnswer | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []


class CompletionChunkAnswer(_Generated):
    """An event of a stream of completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


class PooledUsage(Answer):
    """Tokens of the texts."""

    prompt_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)


class EmbeddingItem(Answer):
    """One vector: numbers, or their float32 in base64."""

    object: Literal["embedding"]
    index: int = Field(ge=0)
    embedding: list[float] | str


class EmbeddingsAnswer(Answer):
    """A vector for each input."""

    object: Literal["list"]
    data: list[EmbeddingItem] = Field(min_length=1)
    model: str
    usage: PooledUsage


class ScoreItem(Answer):
    """The score of one pair."""

    index: int = Field(ge=0)
    object: Literal["score"]
    score: float


class ScoresAnswer(Answer):
    """A score for each pair."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreItem] = Field(min_length=1)
    usage: PooledUsage


class RerankedText(Answer):
    """A document."""

    text: str


class RerankItem(Answer):
    """One document's place in the request, and its score."""

    index: int = Field(ge=0)
    relevance_score: float
    document: RerankedText = RerankedText(text="")


class RerankAnswer(Answer):
    """Documents, the best first."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RerankItem] = Field(min_length=1)
    usage: PooledUsage


class ModelAnswer(Answer):
    """A name under which the model is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = Field(gt=0)
    input_modalities: list[Literal["text", "image", "video", "audio"]] = Field(min_length=1)


class ModelsAnswer(Answer):
    """Every name under which the model is served."""

    object: Literal["list"]
    data: list[ModelAnswer] = Field(min_length=1)


class TokenizeAnswer(Answer):
    """A text's tokens."""

    count: int = Field(ge=0)
    max_model_len: int = Field(gt=0)
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeAnswer(Answer):
    """The text of tokens."""

    prompt: str


class TokenizerAnswer(Answer):
    """The tokenizer; each special token that has a name is a field too, such as eos_token."""

    model_config = ConfigDict(extra="allow")

    vocab_size: int = Field(gt=0)
    model_max_length: int = Field(gt=0)
    chat_template: str | None


class LoadAnswer(Answer):
    """How much the server has to do."""

    server_load: int = Field(ge=0)


class ReplicaHealth(Answer):
    """How one of several replicas is."""

    replica: int = Field(ge=0)
    status: Literal["ready", "starting", "draining", "dead"]
    restarts: int = Field(ge=0)


class HealthAnswer(Answer):
    """How the server is."""

    status: Literal["loading", "ready", "restarting", "draining"]
    replicas: list[ReplicaHealth] | None = None


class VersionAnswer(Answer):
    """The running version."""

    version: str
