"""Vectors and scores: ``/v1/embeddings``, ``/v1/score`` and ``/v1/rerank``."""

from __future__ import annotations

import base64
import contextlib
import uuid
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import Request
from fastapi.responses import Response

from engine_core.configs import PoolingParams
from engine_core.engine.frontend import TokenizedPrompt
from engine_core.engine.pooled import Vector, paired, similarities
from engine_core.errors import EngineDeadError, EngineError
from engine_core.server.body import now, read_body
from engine_core.server.context import RequestContext
from engine_core.server.encoding import encode
from engine_core.server.errors import ApiError, conflict, unavailable
from engine_core.server.generation import while_connected
from engine_core.server.protocol import (
    EMBEDDING_BODY,
    RERANK_BODY,
    SCORE_BODY,
    EmbeddingBody,
    PoolingBody,
)
from engine_core.server.service import DRAINING, Service

if TYPE_CHECKING:
    from engine_core.engine.async_engine import RequestStream

# Steps' worth of prompts that a request has with the engine at once: the next ones are there when a
# step ends, and other requests need not wait for all of them.
_AHEAD = 3


async def create_embedding(request: Request) -> Response:
    """A vector for each of one input or several."""
    service, context = Service.of(request), RequestContext.of(request)
    service.check_room()
    body = await read_body(request, EMBEDDING_BODY, service.bodies)
    _check(service, body)
    if service.engine.frontend.pooling.task != "embed":
        raise ApiError(
            400,
            "the model scores pairs of texts and gives no vectors; use /v1/score or /v1/rerank",
            code="invalid_request",
        )
    context.field_names = (("dimensions", "dimensions"), ("prompt", "input"))
    params = PoolingParams(dimensions=body.dimensions, normalize=body.normalize)
    pooled = _Pooled(service, context, body, params)
    inputs = _inputs(body)
    if service.settings.log_prompts:
        context.details["prompts"] = inputs
    names = ["input"] if inputs == [body.input] else _names("input", inputs)
    prompts = await pooled.tokenize(inputs, names, body.prompt_name)
    vectors = await while_connected(request.receive, pooled.run(prompts))
    written: Sequence[Any] = vectors
    if body.encoding_format == "base64":
        written = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    items = [
        {"object": "embedding", "index": index, "embedding": vector}
        for index, vector in enumerate(written)
    ]
    return pooled.answer({"object": "list", "data": items})


async def create_score(request: Request) -> Response:
    """A score for each of one pair of texts or several."""
    service, context = Service.of(request), RequestContext.of(request)
    service.check_room()
    body = await read_body(request, SCORE_BODY, service.bodies)
    _check(service, body)
    ones, others = _listed(body.text_1), _listed(body.text_2)
    if len(ones) not in (1, len(others)):
        raise conflict("text_1 has one text, or as many as text_2", "text_1")
    pooled = _Pooled(service, context, body, _score_params(body.use_activation))
    names = _names("text_1", body.text_1), _names("text_2", body.text_2)
    scores = await pooled.scores(request, ones, others, names)
    items = [
        {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
    ]
    made = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": now(), "data": items}
    return pooled.answer(made)


async def create_rerank(request: Request) -> Response:
    """Documents in the order in which they go with a query."""
    service, context = Service.of(request), RequestContext.of(request)
    service.check_room()
    body = await read_body(request, RERANK_BODY, service.bodies)
    _check(service, body)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    pooled = _Pooled(service, context, body, _score_params(None))
    names = ["query"], _names("documents", texts)
    scores = await pooled.scores(request, [body.query], texts, names)
    order = sorted(range(len(texts)), key=lambda index: -scores[index])
    results = []
    for index in order[: body.top_n]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if body.return_documents is not False:
            result["document"] = {"text": texts[index]}
        results.append(result)
    return pooled.answer({"id": f"rerank-{uuid.uuid4().hex}", "object": "list", "results": results})


def _check(service: Service, body: PoolingBody) -> None:
    service.check_model(body.model)
    service.engine.frontend.check_task("pool")


def _score_params(use_activation: bool | None) -> PoolingParams:
    return PoolingParams(activate=use_activation is not False)


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _names(field: str, texts: str | Sequence[Any]) -> list[str]:
    """The name of each text of a field, as errors have it."""
    many = not isinstance(texts, str)
    return [f"{field}.{index}" for index in range(len(texts))] if many else [field]


def _inputs(body: EmbeddingBody) -> list[Any]:
    if isinstance(body.input, str) or isinstance(body.input[0], int):
        return [body.input]
    return list(body.input)


class _Pooled:
    """One HTTP request for vectors or scores."""

    def __init__(
        self, service: Service, context: RequestContext, body: PoolingBody, params: PoolingParams
    ) -> None:
        self._service = service
        self._context = context
        self._body = body
        self._params = service.engine.frontend.pooling.resolve(params)
        self._model = service.check_model(body.model)
        self._tokens = 0

    async def tokenize(
        self, inputs: Sequence[Any], names: Sequence[str], prompt_name: str | None = None
    ) -> list[TokenizedPrompt]:
        """The tokens of each input, none of them too many; ``names`` are those of their fields.

        Raises:
            ApiError: 400; one is too long.
            RequestError: there is no tokenizer, or no such prompt or token.
        """
        service, most = self._service, self._body.truncate_prompt_tokens
        for text, name in zip(inputs, names, strict=True):
            for each in text if isinstance(text, tuple) else (text,):
                if isinstance(each, str) and most is None:
                    service.check_text(each, name)
        work = partial(
            service.engine.frontend.tokenize_all, inputs, prompt_name=prompt_name, most=most
        )
        prompts = await service.run_text(self._context.body_size, work)
        longest = service.engine.max_model_len
        for text, name, prompt in zip(inputs, names, prompts, strict=True):
            if len(prompt.packed) > longest:
                what = "pair of texts" if isinstance(text, tuple) else "text"
                raise ApiError(
                    400,
                    f"{name}: the {what} is too long: it has {len(prompt.packed)} tokens, and this "
                    f"model's maximum context length is {longest} tokens; cut it with "
                    "truncate_prompt_tokens",
                    param=name,
                    code="context_length_exceeded",
                )
        self._tokens += sum(len(prompt.packed) for prompt in prompts)
        return prompts

    async def scores(
        self,
        request: Request,
        queries: list[str],
        documents: list[str],
        names: tuple[list[str], list[str]],
    ) -> list[float]:
        """A score for each pair; one query stands for all. ``names`` are those of the texts."""
        ones, others = paired(queries, documents)
        pooling = self._service.engine.frontend.pooling
        if self._service.settings.log_prompts:
            self._context.details["prompts"] = [queries, documents]
        if pooling.task == "score":
            prompts = await self.tokenize(list(zip(ones, others, strict=True)), names[1])
            given = await while_connected(request.receive, self.run(prompts))
            return [float(each[0]) for each in given]
        named: dict[str, str] = {}  # each text once
        for text, name in zip((*queries, *documents), (*names[0], *names[1]), strict=True):
            named.setdefault(text, name)
        texts = list(named)
        prompts = await self.tokenize(texts, list(named.values()))
        vectors = await while_connected(request.receive, self.run(prompts))
        of = dict(zip(texts, vectors, strict=True))
        first, second = (np.stack([of[text] for text in each]) for each in (ones, others))
        return similarities(first, second, pooling.similarity)

    async def run(self, prompts: Sequence[TokenizedPrompt]) -> list[Vector]:
        """The vector or score of each prompt.

        Prompts go to the engine in portions, each about what a step takes.

        Raises:
            ApiError: the server shuts down, or the model's numbers are not finite.
            EngineError: the requests are refused, a deadline passed, or the engine died.
        """
        done: list[Vector | None] = [None] * len(prompts)
        waiting = deque(self._portions(prompts))
        running: deque[tuple[list[int], RequestStream]] = deque()
        try:
            first = True
            while waiting or running:
                while waiting and len(running) < _AHEAD:
                    places = waiting.popleft()
                    running.append((places, self._add(prompts, places, queues=first)))
                    first = False
                places, stream = running[0]
                async for output in stream:
                    for completion in output.outputs:
                        if completion.pooled is None:
                            raise _failure(completion.finish_reason, completion.error)
                        vector = np.frombuffer(completion.pooled, np.float32)
                        done[places[completion.index]] = vector
                running.popleft()
        except EngineDeadError:
            if self._service.phase == "draining":
                raise unavailable(DRAINING, "draining") from None
            raise
        finally:
            for _, stream in running:
                with contextlib.suppress(EngineError):
                    await stream.aclose()
            self._context.details |= {"prompt_tokens": self._tokens, "inputs": len(prompts)}
        return [vector for vector in done if vector is not None]

    def _portions(self, prompts: Sequence[TokenizedPrompt]) -> list[list[int]]:
        """Places of prompts by length, in portions that a step takes."""
        config = self._service.engine.config
        portions: list[list[int]] = []
        room = 0
        for place in sorted(range(len(prompts)), key=lambda index: len(prompts[index].packed)):
            size = len(prompts[place].packed)
            if not portions or size > room or len(portions[-1]) == config.max_num_seqs:
                portions.append([])
                room = config.max_num_batched_tokens
            portions[-1].append(place)
            room -= size
        return portions

    def _add(
        self, prompts: Sequence[TokenizedPrompt], places: list[int], *, queues: bool
    ) -> RequestStream:
        service, body, context = self._service, self._body, self._context
        limits = [
            limit for limit in (service.settings.request_timeout, body.timeout) if limit is not None
        ]
        return service.engine.add_pooled(
            [prompts[place] for place in places],
            self._params,
            priority=body.priority or 0,
            timeout=min(limits, default=None),
            arrival_time=context.arrival,
            cache_salts=context.cache_salts(body.cache_salt),
            queues=queues,
        )

    def answer(self, made: dict[str, Any]) -> Response:
        """The response with ``made``, the model and the usage."""
        made["model"] = self._model
        made["usage"] = {"prompt_tokens": self._tokens, "total_tokens": self._tokens}
        return Response(encode(made), media_type="application/json")


def _failure(reason: str | None, error: str | None) -> ApiError:
    if reason == "abort":
        return unavailable(
            "the server is shutting down and has ended this request before its end", "draining"
        )
    return ApiError(500, str(error), code="generation_failed")


__all__ = ["create_embedding", "create_rerank", "create_score"]
