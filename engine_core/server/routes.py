"""The endpoints other than generation."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from engine_core import __version__
from engine_core.errors import RequestError
from engine_core.server.body import read_body
from engine_core.server.chat import prompt_text_length, template_messages, template_tools
from engine_core.server.encoding import encode
from engine_core.server.errors import ApiError, unavailable
from engine_core.server.protocol import DETOKENIZE_BODY, TOKENIZE_BODY, TokenizeTextBody
from engine_core.server.service import Service


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "engine-core",
        "max_model_len": service.engine.max_model_len,
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
    body = await read_body(request, TOKENIZE_BODY, service.settings.max_body_size)
    service.check_model(body.model)
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise RequestError("the server was started without a tokenizer")
    if isinstance(body, TokenizeTextBody):
        special = body.add_special_tokens is not False
        tokens = await service.run_text(
            len(body.prompt), lambda: tokenizer.encode(body.prompt, add_special_tokens=special)
        )
    else:
        tokens = await service.run_text(
            prompt_text_length(body.messages),
            lambda: engine.render_chat(
                template_messages(body.messages),
                add_generation_prompt=body.add_generation_prompt is not False,
                tools=template_tools(body.tools),
                template_kwargs=body.chat_template_kwargs,
            ),
        )
    spelled = [tokenizer.id_to_token(token) for token in tokens] if body.return_token_strs else None
    return _json(
        {
            "count": len(tokens),
            "max_model_len": engine.max_model_len,
            "tokens": tokens,
            "token_strs": spelled,
        }
    )


async def detokenize(request: Request) -> Response:
    """The text of tokens, special ones included."""
    service = Service.of(request)
    engine = service.engine
    body = await read_body(request, DETOKENIZE_BODY, service.settings.max_body_size)
    service.check_model(body.model)
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise RequestError("the server was started without a tokenizer")
    if body.tokens:
        engine.tokenize(body.tokens)  # refuses ids outside the vocabulary
    text = await service.run_text(
        len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special_tokens=False)
    )
    return _json({"prompt": text})


async def live(request: Request) -> Response:
    """Whether the process is worth keeping: it is until the engine has died."""
    service = Service.of(request)
    if service.phase == "dead":
        raise _dead(service)
    return _json({"status": service.phase})


async def ready(request: Request) -> Response:
    """Whether requests are taken."""
    service = Service.of(request)
    phase = service.phase
    if phase == "dead":
        raise _dead(service)
    if phase != "ready":
        raise unavailable(f"the server is {phase}", phase)
    return _json({"status": phase})


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
