"""The endpoints other than generation."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from engine_core import __version__
from engine_core.engine.frontend import check_token_ids
from engine_core.errors import RequestError
from engine_core.media import split_media
from engine_core.server.body import read_body
from engine_core.server.chat import refuse_to_count, template_messages, template_tools
from engine_core.server.context import RequestContext
from engine_core.server.encoding import encode
from engine_core.server.errors import ApiError, unavailable
from engine_core.server.protocol import (
    DETOKENIZE_BODY,
    TOKENIZE_BODY,
    TokenizeChatBody,
    TokenizeTextBody,
)
from engine_core.server.service import Service
from engine_core.text import Tokenizer


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "engine-core",
        "max_model_len": service.engine.max_model_len,
        "input_modalities": ["text", *service.engine.frontend.media.kinds],
    }


async def list_models(request: Request) -> Response:
    """Every name under which the model is served."""
    service = Service.of(request)
    return _json({"object": "list", "data": [_model(service, name) for name in service.names]})


async def retrieve_model(request: Request) -> Response:
    """One name under which the model is served."""
    service = Service.of(request)
    name = request.path_params["model"]
    service.check_model(name)
    return _json(_model(service, name))


async def tokenize(request: Request) -> Response:
    """The tokens of a text, or of the prompt that a conversation makes."""
    service = Service.of(request)
    engine = service.engine
    body = await read_body(request, TOKENIZE_BODY, service.bodies)
    service.check_model(body.model)
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise RequestError("the server was started without a tokenizer")
    size = RequestContext.of(request).body_size
    return await service.run_text(size, partial(_tokenized, service, tokenizer, body))


def _tokenized(
    service: Service, tokenizer: Tokenizer, body: TokenizeTextBody | TokenizeChatBody
) -> Response:
    if isinstance(body, TokenizeTextBody):
        service.check_text(body.prompt, "prompt")
        special = body.add_special_tokens is not False
        tokens = tokenizer.encode(body.prompt, add_special_tokens=special)
    else:
        messages, parts = split_media(template_messages(body.messages))
        refuse_to_count(parts)
        tokens = service.render_chat(body, messages, template_tools(body.tools))
    spelled = [tokenizer.id_to_token(token) for token in tokens] if body.return_token_strs else None
    return _json(
        {
            "count": len(tokens),
            "max_model_len": service.engine.max_model_len,
            "tokens": tokens,
            "token_strs": spelled,
        }
    )


async def detokenize(request: Request) -> Response:
    """The text of tokens, special ones included."""
    service = Service.of(request)
    engine = service.engine
    body = await read_body(request, DETOKENIZE_BODY, service.bodies)
    service.check_model(body.model)
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise RequestError("the server was started without a tokenizer")
    vocab_size = engine.model_config.vocab_size

    def decode() -> Response:
        check_token_ids(body.tokens, vocab_size, "tokens")
        return _json({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

    return await service.run_text(RequestContext.of(request).body_size, decode)


async def tokenizer_info(request: Request) -> Response:
    """The tokenizer's special tokens and its chat template, as tokenizer_config.json names them."""
    service = Service.of(request)
    engine = service.engine
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise RequestError("the server was started without a tokenizer")
    own = tokenizer.chat_template or engine.model_config.default_chat_template
    return _json(
        {
            **tokenizer.special_tokens,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": engine.max_model_len,
            "chat_template": service.settings.chat_template or own,
        }
    )


async def load(request: Request) -> Response:
    """How many generation requests are here, in all processes."""
    return _json({"server_load": Service.of(request).in_flight.total})


async def live(request: Request) -> Response:
    """Whether the process is worth keeping: it is until the engine has died."""
    service = Service.of(request)
    if service.phase == "dead":
        raise _dead(service)
    return _health(service)


async def ready(request: Request) -> Response:
    """Whether requests are taken."""
    service = Service.of(request)
    phase = service.phase
    if phase == "dead":
        raise _dead(service)
    if phase != "ready":
        raise unavailable(f"the server is {phase}", phase)
    return _health(service)


def _health(service: Service) -> Response:
    answer: dict[str, Any] = {"status": service.phase}
    if each := service.replicas:
        answer["replicas"] = [
            {"replica": one.index, "status": one.phase, "restarts": one.restarts} for one in each
        ]
    return _json(answer)


def _dead(service: Service) -> ApiError:
    return unavailable(f"the engine has stopped: {service.dead}", "engine_dead")


async def metrics(request: Request) -> Response:
    """Figures for Prometheus."""
    return Response(
        Service.of(request).metrics.text(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4}
    )


async def version(request: Request) -> Response:
    """The version of this server."""
    return _json({"version": __version__})
