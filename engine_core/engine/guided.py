"""Grammars of requests: each is tried in a process of its own first. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import pickle
import threading
from collections import OrderedDict
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any

from engine_core.configs import GuidedParams
from engine_core.errors import EngineDeadError, RequestError
from engine_core.runtime.guided import NOT_INSTALLED
from engine_core.text import Tokenizer, token_bytes
from engine_core.workers import Limits, WorkerError, WorkerPool

_ROOM = "engine_core.runtime.grammar_trial"
# Beyond what the process begins with. Usual grammars take some MiB, one of 50,000 texts takes 45.
_MEMORY_BYTES = 128 * 2**20
# An engine's threads have at least 2 MiB: what passes here does not overflow there.
_STACK_BYTES = 2**20
# Of a JSON schema. The compiler takes no more, and writing it for the process would hold up all.
_MOST_VALUES = 2**17
# Verdicts kept for requests to come.
_KEPT = 1024


class GrammarTrials:
    """Tries grammars, each once, in processes with limits of memory, stack and time.

    A grammar may be small and take gigabytes, minutes or all of a stack to compile. What passes
    is compiled again where tokens are chosen. It may be used from several threads.

    Args:
        tokenizer: whose vocabulary is guided; None if the engine has none.
        vocab_size: columns of the logits.
        timeout: seconds that a trial may take.
        pool: whose workers try.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, timeout: float, pool: WorkerPool
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._workers = pool.setup(
            f"{_ROOM}:open_compiler",
            self._vocabulary,
            Limits(timeout, _MEMORY_BYTES, _STACK_BYTES),
            what="the grammar's compiler",
        )
        self._verdicts: OrderedDict[bytes, Future[None]] = OrderedDict()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Read the vocabulary now, and not while the first guided request waits.

        Does nothing where there can be no guided requests.
        """
        if self._tokenizer is not None and find_spec("llguidance") is not None:
            # Else it is closed, or the first request will report it.
            with contextlib.suppress(WorkerError, EngineDeadError):
                self._workers.start()

    def check(self, params: GuidedParams) -> None:
        """Try a grammar, or wait for its verdict.

        Raises:
            RequestError: there is no tokenizer, llguidance is not installed, or the grammar cannot
                be compiled, within the limits; the message says what and where, or which limit.
            QueueFullError: too many grammars wait for their trial.
            EngineDeadError: the engine is being shut down.
        """
        try:
            self._verdict(params).result()
        except WorkerError as error:
            raise _refusal(params, error) from None

    async def check_async(self, params: GuidedParams) -> None:
        """Try a grammar as :meth:`check` does, without holding up the event loop."""
        # Hashing a large grammar takes a while.
        verdict = await asyncio.to_thread(self._verdict, params)
        try:
            # Shielded, as others may wait for the same verdict.
            await asyncio.shield(asyncio.wrap_future(verdict))
        except WorkerError as error:
            raise _refusal(params, error) from None

    def _vocabulary(self) -> tuple[Any, ...]:
        assert self._tokenizer is not None, "checked before"
        return token_bytes(self._tokenizer), self._vocab_size

    def _verdict(self, params: GuidedParams) -> Future[None]:
        """The trial of a grammar, begun now if there was none."""
        if self._tokenizer is None:
            raise RequestError(
                "guided decoding needs a tokenizer, and this engine has none (skip_tokenizer_init)"
            )
        if find_spec("llguidance") is None:
            raise RequestError(NOT_INSTALLED)
        param = f"guided.{params.kind}"
        if params.json_schema is not None and _is_large(params.json_schema):
            message = f"{param}: it has more than {_MOST_VALUES} keys and values; make it smaller"
            raise RequestError(message, param=param)
        try:
            content = pickle.dumps(params)
        except RecursionError:
            raise RequestError(f"{param}: it is nested too deeply", param=param) from None
        key = hashlib.blake2b(content, digest_size=16).digest()
        with self._lock:
            verdict = self._verdicts.get(key)
            if verdict is not None:
                self._verdicts.move_to_end(key)
                return verdict
            verdict = self._verdicts[key] = self._workers.submit(f"{_ROOM}:try_grammar", params)
            if len(self._verdicts) > _KEPT:
                self._verdicts.popitem(last=False)
        verdict.add_done_callback(lambda done: self._forget(key, done))
        return verdict

    def _forget(self, key: bytes, verdict: Future[None]) -> None:
        """Drop a verdict that another trial may not repeat, such as one for lack of time."""
        if not verdict.cancelled():
            error = verdict.exception()
            if error is None or isinstance(error, RequestError) or _is_repeatable(error):
                return
        with self._lock:
            if self._verdicts.get(key) is verdict:
                del self._verdicts[key]


def _is_large(schema: Any) -> bool:
    """Whether there is more in a schema than is compiled, without looking at all of it."""
    count = 0
    left = [schema]
    while left and count <= _MOST_VALUES:
        value = left.pop()
        if isinstance(value, dict | list):
            count += len(value)
            left += value.values() if isinstance(value, dict) else value
    return count > _MOST_VALUES


def _refusal(params: GuidedParams, error: WorkerError) -> RequestError:
    param = f"guided.{params.kind}"
    message = f"{param}: it cannot be compiled: {error}; make it smaller"
    return RequestError(message, param=param)


def _is_repeatable(error: BaseException) -> bool:
    return isinstance(error, WorkerError) and error.repeatable


__all__ = ["GrammarTrials"]
