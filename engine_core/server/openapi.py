"""The operations of the API, and the OpenAPI document that is made from them.

FastAPI would describe what it parses and answers itself; here bodies are parsed more strictly and
answers are built without it, so that the document is made from the same table as the routes.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import TypeAdapter

from engine_core import __version__
from engine_core.server import routes
from engine_core.server.chat import create_chat_completion
from engine_core.server.completions import create_completion
from engine_core.server.messages import count_tokens, create_message
from engine_core.server.messages_protocol import (
    COUNT_BODY,
    MESSAGES_BODY,
    CountAnswer,
    MessageAnswer,
    MessagesErrorAnswer,
    MessagesEvent,
)
from engine_core.server.pooling import create_embedding, create_rerank, create_score
from engine_core.server.protocol import (
    CHAT_BODY,
    COMPLETION_BODY,
    DETOKENIZE_BODY,
    EMBEDDING_BODY,
    RERANK_BODY,
    SCORE_BODY,
    TOKENIZE_BODY,
)
from engine_core.server.responses import (
    Answer,
    ChatChunkAnswer,
    ChatCompletionAnswer,
    CompletionAnswer,
    CompletionChunkAnswer,
    DetokenizeAnswer,
    EmbeddingsAnswer,
    ErrorAnswer,
    HealthAnswer,
    LoadAnswer,
    ModelAnswer,
    ModelsAnswer,
    RerankAnswer,
    ScoresAnswer,
    TokenizeAnswer,
    TokenizerAnswer,
    VersionAnswer,
)
from engine_core.server.responses_api import (
    INPUT_ITEMS_QUERY,
    create_response,
    delete_response,
    list_input_items,
    retrieve_response,
)
from engine_core.server.responses_protocol import (
    RESPONSES_BODY,
    DeletedResponse,
    InputItems,
    ResponseAnswer,
    ResponseEvent,
)
from engine_core.server.settings import ServerSettings

Endpoint = Callable[[Request], Awaitable[Response]]
Mode = Literal["validation", "serialization"]

_JSON = "application/json"
_TEXT = "text/plain"
_EVENTS = "text/event-stream"
_REF = "#/components/schemas/{model}"
_IN_PATH = re.compile(r"\{(\w+)")

_UNAUTHORIZED = 401
_PHRASES = {
    400: "The body is not one that can be answered; says which field is at fault.",
    401: "The API key is missing or unknown.",
    404: "The model is not served here.",
    408: "The body or the answer was not complete in time.",
    413: "The body is too large.",
    415: "The body is not JSON in UTF-8.",
    429: "Too many requests are here; try again after Retry-After seconds.",
    500: "The model or the server failed on this request.",
    503: "The server is loading the model, shuts down or has lost its engine.",
}
_RETRY = (429, 503)
_ONE_RESPONSE = "/v1/responses/{response_id}"
_INPUT_ITEMS = f"{_ONE_RESPONSE}/input_items"


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint.

    Attributes:
        method: of HTTP.
        path: as FastAPI writes it.
        endpoint: the handler; its docstring is the summary.
        answer: the JSON body of status 200; None for plain text.
        body: the request body's model, or None.
        chunk: the model of each server-sent event, if it can stream.
        done: whether a stream ends with a word.
        query: the schema of each parameter in the query.
        tag: the part of the API that it belongs to.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    endpoint: Endpoint
    answer: type[Answer] | None
    body: TypeAdapter[Any] | None = None
    chunk: type[Answer] | None = None
    tag: Literal["OpenAI", "Anthropic", "Vectors", "Text", "Server"] = "OpenAI"
    done: bool = True
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its id in the document."""
        first, _, last = self.path.strip("/").partition("/{")
        name = first.replace("/", "_") + ("_one" if last else "")
        name += last.partition("}")[2].replace("/", "_")
        return f"delete_{name}" if self.method == "DELETE" else name

    @property
    def protected(self) -> bool:
        """Whether a key is asked for if the server has keys."""
        return self.tag != "Server"

    @property
    def errors(self) -> set[int]:
        """The statuses other than 200, but for those that keys bring."""
        errors = {500}
        if self.path not in ("/load", "/metrics", "/version"):
            errors.add(503)
        if self.body is not None:
            errors |= {400, 404, 408, 413, 415}
        if self.chunk is not None or self.tag == "Vectors":
            errors.add(429)
        if self.path in (_ONE_RESPONSE, _INPUT_ITEMS):
            errors.add(400)
        return errors | {404} if "{" in self.path else errors


_CHAT = (create_chat_completion, ChatCompletionAnswer, CHAT_BODY, ChatChunkAnswer)
_COMPLETION = (create_completion, CompletionAnswer, COMPLETION_BODY, CompletionChunkAnswer)
_MESSAGE = (create_message, MessageAnswer, MESSAGES_BODY, MessagesEvent)
_COUNT = (count_tokens, CountAnswer, COUNT_BODY)
_RESPONSE = (create_response, ResponseAnswer, RESPONSES_BODY, ResponseEvent)
_EMBEDDING = (create_embedding, EmbeddingsAnswer, EMBEDDING_BODY)
_SCORE = (create_score, ScoresAnswer, SCORE_BODY)
_RERANK = (create_rerank, RerankAnswer, RERANK_BODY)
_DETOKENIZE = (routes.detokenize, DetokenizeAnswer, DETOKENIZE_BODY)
OPERATIONS = (
    Operation("POST", "/v1/chat/completions", *_CHAT),
    Operation("POST", "/v1/completions", *_COMPLETION),
    Operation("POST", "/v1/responses", *_RESPONSE, done=False),
    Operation("GET", _ONE_RESPONSE, retrieve_response, ResponseAnswer),
    Operation("GET", _INPUT_ITEMS, list_input_items, InputItems, query=INPUT_ITEMS_QUERY),
    Operation("DELETE", _ONE_RESPONSE, delete_response, DeletedResponse),
    Operation("POST", "/v1/messages", *_MESSAGE, tag="Anthropic", done=False),
    Operation("POST", "/v1/messages/count_tokens", *_COUNT, tag="Anthropic"),
    Operation("POST", "/v1/embeddings", *_EMBEDDING, tag="Vectors"),
    Operation("POST", "/v1/score", *_SCORE, tag="Vectors"),
    Operation("POST", "/score", *_SCORE, tag="Vectors"),
    Operation("POST", "/v1/rerank", *_RERANK, tag="Vectors"),
    Operation("POST", "/v2/rerank", *_RERANK, tag="Vectors"),
    Operation("POST", "/rerank", *_RERANK, tag="Vectors"),
    Operation("GET", "/v1/models", routes.list_models, ModelsAnswer),
    Operation("GET", "/v1/models/{model:path}", routes.retrieve_model, ModelAnswer),
    Operation("POST", "/tokenize", routes.tokenize, TokenizeAnswer, TOKENIZE_BODY, tag="Text"),
    Operation("POST", "/detokenize", *_DETOKENIZE, tag="Text"),
    Operation("GET", "/tokenizer_info", routes.tokenizer_info, TokenizerAnswer, tag="Text"),
    Operation("GET", "/health", routes.ready, HealthAnswer, tag="Server"),
    Operation("GET", "/health/live", routes.live, HealthAnswer, tag="Server"),
    Operation("GET", "/health/ready", routes.ready, HealthAnswer, tag="Server"),
    Operation("GET", "/ping", routes.ready, HealthAnswer, tag="Server"),
    Operation("GET", "/load", routes.load, LoadAnswer, tag="Server"),
    Operation("GET", "/metrics", routes.metrics, None, tag="Server"),
    Operation("GET", "/version", routes.version, VersionAnswer, tag="Server"),
)


def build_document(
    settings: ServerSettings, names: Sequence[str], with_keys: bool
) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a server.

    Args:
        settings: the limits that it has.
        names: the served names of the model.
        with_keys: whether it asks for API keys.
    """
    inputs: list[tuple[str, Mode, TypeAdapter[Any]]] = [
        ("error", "serialization", TypeAdapter(ErrorAnswer)),
        ("Anthropic error", "serialization", TypeAdapter(MessagesErrorAnswer)),
    ]
    for operation in OPERATIONS:
        if operation.body is not None:
            inputs.append((f"{operation.name} body", "validation", operation.body))
        if operation.answer is not None:
            answer = TypeAdapter[Any](operation.answer)
            inputs.append((f"{operation.name} answer", "serialization", answer))
        if operation.chunk is not None:
            chunk = TypeAdapter[Any](operation.chunk)
            inputs.append((f"{operation.name} chunk", "serialization", chunk))
    schemas, definitions = TypeAdapter.json_schemas(inputs, ref_template=_REF)
    components = definitions["$defs"]
    for name, schema in components.items():
        _state_limits(name, schema, settings, names)
    of = {key: schema for (key, _), schema in schemas.items()}
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        path = operation.path.replace(":path", "")
        paths.setdefault(path, {})[operation.method.lower()] = _describe(operation, of, with_keys)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "engine-core", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if with_keys:
        document["components"]["securitySchemes"] = {
            "ApiKey": {"type": "http", "scheme": "bearer"},
            "ApiKeyHeader": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return document


def _state_limits(
    name: str, schema: dict[str, Any], settings: ServerSettings, names: Sequence[str]
) -> None:
    """Write this server's limits into a body's schema."""
    fields = schema.get("properties", {})
    if "model" in fields and name.endswith("Body"):
        fields["model"]["enum"] = list(names)
    if "n" in fields:
        for form in fields["n"]["anyOf"]:
            if form["type"] == "integer":
                form["maximum"] = settings.max_n
    for form in fields.get("prompt", {}).get("oneOf", ()):
        if form["type"] == "array" and form["items"]["type"] != "integer":
            form["maxItems"] = min(form["maxItems"], settings.max_prompts)


def _describe(operation: Operation, schemas: Mapping[str, Any], with_keys: bool) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is None:
        content[_TEXT] = {"schema": {"type": "string"}}
    else:
        content[_JSON] = {"schema": schemas[f"{operation.name} answer"]}
    if operation.chunk is not None:
        content[_EVENTS] = {
            "itemSchema": _event(schemas[f"{operation.name} chunk"], done=operation.done)
        }
    errors = operation.errors
    if with_keys and operation.protected:
        errors.add(_UNAUTHORIZED)
    error = schemas["Anthropic error" if operation.tag == "Anthropic" else "error"]
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": (operation.endpoint.__doc__ or "").strip(),
        "tags": [operation.tag],
        "responses": {
            "200": {"description": "The answer.", "headers": _headers(200), "content": content},
            **{
                str(status): {
                    "description": _PHRASES[status],
                    "headers": _headers(status),
                    "content": {_JSON: {"schema": error}},
                }
                for status in sorted(errors)
            },
        },
    }
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {_JSON: {"schema": schemas[f"{operation.name} body"]}},
        }
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _IN_PATH.findall(operation.path)
    ]
    parameters += [
        {"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()
    ]
    if parameters:
        described["parameters"] = parameters
    if with_keys and operation.protected:
        described["security"] = [{"ApiKey": []}, {"ApiKeyHeader": []}]
    return described


def _event(chunk: dict[str, Any], *, done: bool) -> dict[str, Any]:
    """A server-sent event: a chunk or an error as JSON in ``data``, and at the end a word."""
    data = {"type": "string", "contentMediaType": _JSON, "contentSchema": chunk}
    return {
        "type": "object",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]} if done else data},
        "required": ["data"],
    }


def _headers(status: int) -> dict[str, Any]:
    headers: dict[str, Any] = {
        "X-Request-Id": {
            "description": "The request's name in the log.",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
        }
    }
    if status in _RETRY:
        headers["Retry-After"] = {
            "description": "Seconds after which to try again.",
            "required": True,
            "schema": {"type": "integer", "minimum": 1},
        }
    if status == _UNAUTHORIZED:
        headers["WWW-Authenticate"] = {"required": True, "schema": {"type": "string"}}
    return headers
