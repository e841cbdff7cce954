"""``POST /v1/completions``."""

from __future__ import annotations

import uuid
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import Response

from engine_core.configs import SamplingParams
from engine_core.server.body import now, read_body
from engine_core.server.context import RequestContext
from engine_core.server.encoding import TextEvent, encode, event
from engine_core.server.errors import ApiError, conflict
from engine_core.server.generation import (
    Events,
    EventStream,
    Generation,
    StreamUsage,
    check_common,
    guided_fields,
    sampling_params,
    while_connected,
)
from engine_core.server.logprobs import CompletionLogprobs, prompt_logprobs
from engine_core.server.protocol import COMPLETION_BODY, CompletionBody
from engine_core.server.service import Service
from engine_core.text import TokenNames

if TYPE_CHECKING:
    from engine_core.steps import CompletionOutput, RequestOutput, TokenLogprobs


async def create_completion(request: Request) -> Response:
    """Complete one prompt or several."""
    service = Service.of(request)
    context = RequestContext.of(request)
    service.check_room()
    body = await read_body(request, COMPLETION_BODY, service.bodies)
    check_common(body, service)
    context.field_names = (("multi_modal_data", "prompt"),)
    given: list[str | list[int]] = _prompts(body)
    if len(given) > service.settings.max_prompts:
        raise ApiError(
            400,
            f"prompt: {len(given)} prompts are given, and this server takes at most "
            f"{service.settings.max_prompts} at once",
            param="prompt",
            code="invalid_value",
        )
    params = _sampling_params(service, body)
    prompts = []
    for prompt in given:
        work = partial(
            service.tokenize,
            prompt,
            truncate=body.truncate_prompt_tokens,
            add_special_tokens=body.add_special_tokens,
        )
        prompts.append(await service.run_text(context.body_size, work))
    if body.truncate_prompt_tokens is not None:
        # An echo begins where the prompt now does.
        given = list(prompts)
    if service.settings.log_prompts:
        context.details["prompts"] = given
    completion = _Completion(service, context, body, given, prompts, params)
    return await completion.answer(request)


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    if isinstance(body.prompt, str):
        return [body.prompt]
    if isinstance(body.prompt[0], int):
        return [list(body.prompt)]
    return list(body.prompt)


def _sampling_params(service: Service, body: CompletionBody) -> SamplingParams:
    if body.max_tokens == 0 and not body.echo:
        raise conflict("max_tokens is 0, which leaves nothing to do without echo", "max_tokens")
    of_prompt = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        of_prompt = max(of_prompt or 0, body.logprobs)
    own: dict[str, Any] = {"logprobs": body.logprobs, "prompt_logprobs": of_prompt}
    if body.max_tokens is not None:
        # Nothing runs without a token; with 0 it is left out of the answer.
        own["max_tokens"] = max(body.max_tokens, 1)
    return sampling_params(service.engine.default_sampling_params, body, guided_fields(body), **own)


class _Completion:
    """One request and its answer."""

    def __init__(
        self,
        service: Service,
        context: RequestContext,
        body: CompletionBody,
        given: list[str | list[int]],
        prompts: list[list[int]],
        params: SamplingParams,
    ) -> None:
        self._service = service
        self._context = context
        self.body = body
        self._given = given
        self.prompts = prompts
        self._params = params
        self._tokenizer = tokenizer = service.engine.tokenizer
        self._token_names: TokenNames | None = None
        named = body.logprobs is not None and not body.return_tokens_as_token_ids
        if tokenizer is not None and named:
            self._token_names = TokenNames(tokenizer)
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = now()
        self._model = service.check_model(body.model)

    async def answer(self, request: Request) -> Response:
        """Run the requests and make the response of them."""
        generation = await Generation.start(
            self._service, self._context, self._id, self.prompts, self._params, self.body
        )
        if self.body.stream:
            return EventStream(generation, _Events(self, generation), self._context)
        try:
            return await while_connected(request.receive, self._whole(generation))
        finally:
            await generation.close()

    def choices(self) -> list[_Choice]:
        """A choice for each completion of each prompt."""
        return [
            _Choice(self, prompt, prompt * self.n + index)
            for prompt in range(len(self.prompts))
            for index in range(self.n)
        ]

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """OpenAI's object around these choices."""
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    async def _whole(self, generation: Generation) -> Response:
        choices = self.choices()
        async for prompt, output in generation.outputs():
            for completion in output.outputs:
                choices[prompt * self.n + completion.index].add(completion, output)
        made = self.chunk([choice.whole() for choice in choices])
        made["usage"] = generation.usage()
        if self._service.settings.log_prompts:
            self._context.details["outputs"] = [choice["text"] for choice in made["choices"]]
        return Response(encode(made), media_type="application/json")

    def log_outputs(self, count: int) -> list[str] | None:
        """The texts that the log is to have, to be added to; None if it is to have none."""
        if not self._service.settings.log_prompts:
            return None
        outputs = self._context.details["outputs"] = [""] * count
        return outputs

    @property
    def n(self) -> int:
        """Completions per prompt."""
        return self._params.n

    def prompt_text(self, index: int) -> str:
        """A prompt as text; empty if it was given as tokens and there is no tokenizer."""
        given = self._given[index]
        if isinstance(given, str):
            return given
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(given, skip_special_tokens=False)

    def num_added(self, index: int) -> int:
        """How many tokens a prompt begins with that the tokenizer put before its text."""
        if self._tokenizer is None or not isinstance(self._given[index], str):
            return 0
        if self.body.add_special_tokens is False:
            return 0
        pairs = zip(self._tokenizer.encode(""), self.prompts[index], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def logprobs(self, index: int) -> CompletionLogprobs | None:
        """The builder of a completion's ``logprobs`` objects, or None if they are not asked for."""
        if self.body.logprobs is None:
            return None
        return CompletionLogprobs(
            self._tokenizer,
            self._token_names,
            self.body.logprobs,
            prompt_token_ids=self.prompts[index],
            skip_special_tokens=self._params.skip_special_tokens,
        )


class _Events(Events):
    """The events of a stream; see :class:`~engine_core.server.generation.Events`."""

    def __init__(self, request: _Completion, generation: Generation) -> None:
        self._request = request
        self._usage = StreamUsage(request.body, generation)
        self._choices = request.choices()
        self._outputs = request.log_outputs(len(self._choices))
        self._text_events: dict[int, TextEvent] = {}
        # An echo is put before the first text.
        plain = not request.body.echo and not request.body.return_token_ids
        plain = plain and not self._usage.continuous
        self.takes_text = plain and self._outputs is None

    def output(self, index: int, output: RequestOutput) -> bytes:
        """See :class:`~engine_core.server.generation.Events`."""
        piece = b""
        for completion in output.outputs:
            choice = self._choices[index * self._request.n + completion.index]
            choice.add(completion, output)
            taken = choice.take()
            if taken is None:
                continue
            if self._outputs is not None:
                self._outputs[taken["index"]] += taken["text"]
            piece += event(self._request.chunk([taken]) | self._usage.of_chunk())
        return piece

    def text(self, index: int, text: str) -> bytes:
        """See :class:`~engine_core.server.generation.Events`."""
        if not text:
            return b""
        made = self._text_events.get(index)
        if made is None:
            choice = self._choices[index]
            made = self._text_events[index] = TextEvent(
                lambda text: (
                    self._request.chunk([choice.object(text, None)]) | self._usage.of_chunk()
                )
            )
        return made(text)

    async def end(self) -> bytes:
        """See :class:`~engine_core.server.generation.Events`."""
        return self._usage.end(self._request.chunk([]))


class _Choice:
    """One completion: what has come of it, and in a stream what was not sent yet."""

    def __init__(self, request: _Completion, prompt: int, index: int) -> None:
        self._request = request
        self._prompt = prompt
        self._index = index
        self._logprobs = request.logprobs(prompt)
        self._of_prompt: list[TokenLogprobs | None] | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._made: list[dict[str, Any]] = []
        self._begun = False
        self._taken = False
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    def add(self, completion: CompletionOutput, output: RequestOutput) -> None:
        """Take what is new."""
        body = self._request.body
        if output.prompt_logprobs is not None:
            self._of_prompt = output.prompt_logprobs
        if body.echo and not self._begun:
            self._echo()
        self._begun = True
        self._finish_reason = completion.finish_reason
        self._stop_reason = completion.stop_reason
        if body.max_tokens == 0:
            if completion.finish_reason is not None:
                self._finish_reason, self._stop_reason = "length", None
            return
        self._text.append(completion.text)
        self._token_ids += completion.token_ids
        if self._logprobs is not None and completion.logprobs:
            self._made.append(self._logprobs.add(completion.token_ids, completion.logprobs))

    def _echo(self) -> None:
        text = self._request.prompt_text(self._prompt)
        self._text.append(text)
        if self._logprobs is not None:
            of_prompt = self._of_prompt or [None] * len(self._request.prompts[self._prompt])
            num_added = self._request.num_added(self._prompt)
            self._made.append(self._logprobs.echo(text, of_prompt, num_added=num_added))

    def object(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """The choice with this text."""
        made: dict[str, Any] = {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason,
        }
        if self._finish_reason is not None:
            made["stop_reason"] = self._stop_reason
        if self._request.body.return_token_ids:
            made["token_ids"] = self._token_ids
        return made

    def take(self) -> dict[str, Any] | None:
        """The choice of a chunk, or None if there is nothing to say yet."""
        text = "".join(self._text)
        logprobs = self._taken_logprobs()
        more = self._request.body.return_token_ids and self._token_ids
        if not text and logprobs is None and self._finish_reason is None and not more:
            return None
        made = self.object(text, logprobs)
        if self._request.body.return_token_ids and not self._taken:
            made["prompt_token_ids"] = self._request.prompts[self._prompt]
        self._taken = True
        self._text.clear()
        self._token_ids = []
        return made

    def whole(self) -> dict[str, Any]:
        """The choice of a whole answer."""
        made = self.object("".join(self._text), self._taken_logprobs())
        body = self._request.body
        if body.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(self._of_prompt)
        if body.return_token_ids:
            made["prompt_token_ids"] = self._request.prompts[self._prompt]
        return made

    def _taken_logprobs(self) -> dict[str, Any] | None:
        if self._logprobs is None or not self._made:
            return None
        pieces, self._made = self._made, []
        return {name: [item for piece in pieces for item in piece[name]] for name in pieces[0]}
