"""Pictures, videos and sounds of prompts: decoded and processed in worker processes."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from engine_core.configs import EngineConfig, ModelConfig
from engine_core.engine.media_weight import weigh
from engine_core.engine.media_worker import Made, in_shared_memory
from engine_core.engine.prompt_inputs import process_prompt
from engine_core.errors import EngineError, ErrorCode, RequestError
from engine_core.inputs import (
    InputProcessor,
    MediaItem,
    MediaProcessor,
    ProcessedPrompt,
    check_media_options,
    packed_token_ids,
)
from engine_core.media.cache import MediaCache, MediaStats, content_key
from engine_core.media.fetch import MediaSources, names_source
from engine_core.media.parts import MediaPart
from engine_core.workers import Limits, WorkerError, WorkerPool

_First = TypeVar("_First")
_Then = TypeVar("_Then")
_ROOM = "engine_core.engine.media_worker"
# Of a prompt. Decoders and processors take several times what a picture has as floats.
_SECONDS = 30.0
_MEMORY_BYTES = 4 * 2**30
_STACK_BYTES = 2**20


class _Asked(NamedTuple):
    """A part of a prompt, the keys of its content and its uuid in the cache, and what is there."""

    part: MediaPart
    key: Hashable | None
    name: Hashable | None
    known: MediaItem | None = None


@dataclass(slots=True)
class _Coming:
    """A client's prompt that is being processed, and the task of a worker, once there is one."""

    made: Future[list[ProcessedPrompt]]
    client: Hashable
    work: Future[Made] | None = None

    def comes_first(self, client: Hashable) -> bool:
        """Whether ``client`` would not get it earlier by asking for it too."""
        return client == self.client or (self.work is not None and self.work.running())


class MediaIntake:
    """Processes what prompts show, in workers with limits of memory and time.

    A file of some kilobytes may have gigabytes of pixels, and decoders have had bugs that a file
    exploits. Items that were processed before, for a request of the same salts, come from a cache
    if the family's processor takes them (``reuses_items``). Clients take turns at the workers. It
    may be used from several threads.

    Attributes:
        cache: items of earlier prompts.

    Args:
        processor: the family's, if it has one.
        model_config: the model's.
        config: the engine's settings.
        pool: whose workers process.
    """

    def __init__(
        self,
        processor: InputProcessor | None,
        model_config: ModelConfig,
        config: EngineConfig,
        pool: WorkerPool,
    ) -> None:
        self._processor = processor if isinstance(processor, MediaProcessor) else None
        self._model_config = model_config
        self._config = config
        check_media_options(processor, config.mm_processor_kwargs, model_config.architecture)
        self._sources = MediaSources(config.allowed_local_media_path, config.allowed_media_domains)
        self._stats = MediaStats()
        self._lock = threading.Lock()
        # Items that are being made for a prompt, by their keys.
        self._coming: dict[Hashable, _Coming] = {}
        size = int(config.mm_processor_cache_gb * 2**30)
        if not getattr(processor, "reuses_items", False):
            size = 0
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.cache = MediaCache(size, open_files // 4, self._stats)
        self._keeps = size > 0
        self._workers = pool.setup(
            f"{_ROOM}:open_processor",
            lambda: (model_config, config.custom_module_map),
            Limits(_SECONDS, _MEMORY_BYTES, _STACK_BYTES),
            what="the processor of pictures, videos and sounds",
        )

    @property
    def stats(self) -> MediaStats:
        """Counts since the start."""
        self._stats.waiting = self._workers.unfinished
        return self._stats

    def start(self) -> None:
        """Import what the workers need now, and not while the first picture waits.

        Does nothing for a model that sees and hears nothing.
        """
        if self._processor is not None:
            # Else it is closed, or the first request will report it.
            with contextlib.suppress(WorkerError, EngineError):
                self._workers.start()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds that are taken besides text: "image", "video" or "audio"."""
        return tuple(kind for kind in self._known_kinds if self._most(kind) != 0)

    @property
    def kinds_off(self) -> tuple[str, ...]:
        """Kinds that the model takes, and of which ``limit_mm_per_prompt`` allows none."""
        return tuple(kind for kind in self._known_kinds if self._most(kind) == 0)

    @property
    def _known_kinds(self) -> tuple[str, ...]:
        return () if self._processor is None else self._processor.media_kinds

    def _most(self, kind: str) -> int | None:
        """Items of a kind that a prompt may have."""
        limits: Mapping[str, int] = self._config.limit_mm_per_prompt  # type: ignore[assignment]
        return limits.get(kind)

    def check(self, media: Mapping[str, Sequence[MediaPart]]) -> None:
        """Refuse what the model cannot see or hear, and more than the engine allows of a kind.

        Raises:
            RequestError: something is of such a kind, or one too many.
        """
        for kind, parts in media.items():
            if kind not in self._known_kinds:
                param = parts[0].param
                kinds = self.kinds
                takes = f"takes {', '.join(kinds)} and text" if kinds else "takes text alone"
                architecture = self._model_config.architecture
                message = f"{param} has {kind!r}, and {architecture} {takes}"
                raise RequestError(message, param=param)
            most = self._most(kind)
            if most is not None and len(parts) > most:
                param = parts[most].param
                raise RequestError(
                    f"{param}: the prompt has {len(parts)} items of the kind {kind!r}, and {most} "
                    "are taken at most (limit_mm_per_prompt)",
                    param=param,
                )

    @property
    def finds_names(self) -> bool:
        """Whether a prompt's own tokens may name what it shows."""
        return hasattr(self._processor, "named_media")

    def named(self, token_ids: Sequence[int]) -> dict[str, list[MediaPart]]:
        """Files that a prompt's own tokens name, by kind; what is not allowed is not read.

        A path is below ``allowed_local_media_path``, unless it begins at the root.

        Raises:
            RequestError: the family's processor refuses the prompt.
        """
        if not self.finds_names:
            return {}
        processor: Any = self._processor
        root = Path(self._config.allowed_local_media_path or "/").absolute()
        return {
            kind: [
                MediaPart(kind, each if "://" in each else (root / each).as_uri(), "prompt")
                for each in names
            ]
            for kind, names in processor.named_media(token_ids).items()
        }

    def close(self) -> None:
        """Read and fetch nothing more, and forget the items of earlier prompts."""
        self._sources.close()
        self.cache.clear()

    def begin(
        self,
        token_ids: Sequence[int],
        media: Mapping[str, Sequence[MediaPart]],
        options: Mapping[str, Any],
        salts: tuple[Hashable, ...],
        *,
        here: bool,
        client: Hashable = None,
        longest: int | None = None,
    ) -> Future[list[ProcessedPrompt]]:
        """Begin to process a prompt.

        Args:
            token_ids: the prompt's.
            media: what it shows, by kind.
            options: settings of the family's processing.
            salts: see :class:`ProcessedPrompt`; requests share items only if theirs are equal.
            here: whether what is not encoded is processed in this process: it is its user's own.
            client: whose prompt it is; clients take turns at the workers. Their salts tell those
                apart for whom it is None.
            longest: tokens that the processed prompt may have, as far as this can be told before
                it is processed.

        Returns:
            The processed prompt in a list, out of which it is to be taken: a future may live until
            garbage is collected, and pictures must not. It raises :class:`RequestError` or
            :class:`ModelError` if it cannot be processed.

        Raises:
            QueueFullError: too many prompts wait for it.
            EngineDeadError: the engine is being shut down.
        """
        options = {**self._config.mm_processor_kwargs, **options}
        client = ("salts", *salts) if client is None else client
        parts = [part for each in media.values() for part in each]
        if not any(map(names_source, parts)):
            return self._begin(token_ids, media, options, salts, client, longest, here=here)

        def begin(read: list[MediaPart]) -> Future[list[ProcessedPrompt]]:
            left = iter(read)
            known = {kind: [next(left) for _ in each] for kind, each in media.items()}
            return self._begin(token_ids, known, options, salts, client, longest, here=here)

        def release(done: Future[list[MediaPart]]) -> None:
            if not done.cancelled() and done.exception() is None:
                came = zip(parts, done.result(), strict=True)
                size = sum(len(after.value) for before, after in came if names_source(before))
                made.add_done_callback(lambda _: self._sources.release(size, client))

        # A program waits for its prompts by itself, and would be refused for those before.
        coming = self._sources.begin(parts, client, bounded=not here)

        def refuse(done: Future[list[MediaPart]]) -> None:
            self._count(refused=not done.cancelled() and done.exception() is not None)

        coming.add_done_callback(refuse)
        made = _flattened(coming, begin)
        _follow(coming, made)
        coming.add_done_callback(release)
        return made

    def _begin(
        self,
        token_ids: Sequence[int],
        media: Mapping[str, Sequence[MediaPart]],
        options: Mapping[str, Any],
        salts: tuple[Hashable, ...],
        client: Hashable,
        longest: int | None,
        *,
        here: bool,
    ) -> Future[list[ProcessedPrompt]]:
        """The same of parts whose content is there."""
        asked = {
            kind: [self._asked(part, options, salts) for part in parts]
            for kind, parts in media.items()
        }
        return self._made(token_ids, asked, options, client, longest, here=here)

    def _made(
        self,
        token_ids: Sequence[int],
        asked: Mapping[str, Sequence[_Asked]],
        options: Mapping[str, Any],
        client: Hashable,
        longest: int | None,
        *,
        here: bool,
    ) -> Future[list[ProcessedPrompt]]:
        """The same of parts whose keys are known; after what is being made for another prompt."""
        asked = {
            kind: [
                each if each.key is None else each._replace(known=self.cache.get(each.key))
                for each in of_kind
            ]
            for kind, of_kind in asked.items()
        }
        same: dict[Hashable, Any] = {}  # of what the prompt shows several times, one object

        def value(each: _Asked) -> Any:
            given = each.part.value if each.known is None else each.known
            return given if each.key is None else same.setdefault(each.key, given)

        wanted = {
            kind: [each.part._replace(value=value(each)) for each in of_kind]
            for kind, of_kind in asked.items()
        }
        parts = [part for each in wanted.values() for part in each]
        made: Future[list[ProcessedPrompt]] = Future()
        work: Future[Made] = Future()
        new = [each for of_kind in asked.values() for each in of_kind if each.known is None]
        coming = _Coming(made, client)
        other = self._come(new, coming)
        if other is not None:
            return _flattened(
                _ended(other),
                lambda _: self._made(token_ids, asked, options, client, longest, here=here),
            )
        here = here and not any(isinstance(each.part.value, str | bytes | None) for each in new)
        if here or not new:
            _settle(work, partial(self._process_here, token_ids, wanted, options))
        else:
            try:
                self._check_content(parts)
                assert self._processor is not None, "else its kinds were refused"
                vocab_size = self._model_config.vocab_size
                asked_for = token_ids, wanted, options
                weight = weigh(self._processor, vocab_size, *asked_for, longest)
                self._check_length(parts, weight.length, longest)
                task = f"{_ROOM}:process", packed_token_ids(token_ids), wanted, options
                work = coming.work = self._workers.submit(
                    *task, client=client, cost=weight.cost, large=weight.large
                )
            except BaseException:
                made.cancel()
                raise
        self._count(items=len(parts))
        _then(work, made, lambda work: self._end(work, asked), partial(self._told, wanted))
        return made

    def _asked(
        self, part: MediaPart, options: Mapping[str, Any], salts: tuple[Hashable, ...]
    ) -> _Asked:
        """A part with its keys."""
        name = None
        if part.uuid is not None:
            # What was made with other options is another item.
            name = content_key(("uuid", part.owner, *salts), part.kind, part.uuid, options)
        key = name if part.value is None else content_key(salts, part.kind, part.value, options)
        return _Asked(part, key, name)

    def _check_content(self, parts: Sequence[MediaPart]) -> None:
        """Refuse a part that has no content, and of whose uuid nothing is known."""
        for part in parts:
            if part.value is None:
                self._count(refused=1)
                raise RequestError(
                    f"{part.param}: no {part.kind} is known by the uuid {part.uuid!r}: none was "
                    "given with the same key, cache_salt and mm_processor_kwargs, or it was "
                    "forgotten; send it again",
                    param=part.param,
                )

    def _check_length(self, parts: Sequence[MediaPart], length: int, longest: int | None) -> None:
        """Refuse a prompt that the sizes of its pictures make too long."""
        if longest is not None and length > longest:
            self._count(refused=1)
            place = _place(parts)
            raise RequestError(
                f"{place}: a prompt of {length} tokens with what it shows is longer than the "
                f"{longest} that are taken; send fewer or smaller pictures, or less text",
                param=place,
                code=ErrorCode.PROMPT_TOO_LONG,
            )

    def _come(
        self, asked: Sequence[_Asked], coming: _Coming
    ) -> Future[list[ProcessedPrompt]] | None:
        """Take note of what brings parts, unless another, which is returned, brings one earlier.

        Else a client would wait for the turns of another that asked for the same before.
        """
        if not self._keeps:
            return None
        new = {key: each for each in asked for key in (each.key, each.name) if key is not None}

        def come(made: Future[list[ProcessedPrompt]]) -> None:
            with self._lock:
                for key in new:
                    if key in self._coming and self._coming[key].made is made:
                        del self._coming[key]

        with self._lock:
            for key, each in new.items():
                other = self._coming.get(key)
                if other is None:
                    continue
                if each.part.value is None or other.comes_first(coming.client):
                    return other.made
            self._coming.update(dict.fromkeys(new, coming))
        coming.made.add_done_callback(come)
        return None

    def _process_here(
        self, token_ids: Sequence[int], wanted: Mapping[str, Sequence[MediaPart]], options: Any
    ) -> Made:
        begin = time.perf_counter()
        assert self._processor is not None, "else its kinds were refused"
        items = {kind: [part.value for part in parts] for kind, parts in wanted.items()}
        asked = (self._model_config.vocab_size, token_ids, items, options)
        made = process_prompt(self._processor, "process_media", *asked)
        if self._config.num_ranks > 1:  # the ranks are other processes
            made = in_shared_memory(made)
        return Made(made, 0.0, time.perf_counter() - begin)

    def _told(
        self, wanted: Mapping[str, Sequence[MediaPart]], error: BaseException
    ) -> BaseException:
        """Why what is shown was not processed, with its place in the request."""
        parts = [part for each in wanted.values() for part in each]
        place = _place(parts)
        self._count(refused=not isinstance(error, EngineError) or isinstance(error, RequestError))
        if isinstance(error, RequestError) and error.param in (None, "multi_modal_data"):
            return type(error)(str(error), param=place)
        if isinstance(error, RequestError) and error.param in (named := _family_names(wanted)):
            one, said = named[error.param]
            # Offline a part has the name that the family gives it, and a decoder said it already.
            text = str(error).removeprefix(f"{one.param}: ").removeprefix(said)
            return type(error)(f"{one.param}: {text}", param=one.param)
        if isinstance(error, EngineError):
            return error
        what = "processed" if isinstance(error, WorkerError | MemoryError) else "handed to a worker"
        return RequestError(f"{place}: what is shown was not {what}: {error}", param=place)

    def _end(self, made: Made, asked: Mapping[str, Sequence[_Asked]]) -> ProcessedPrompt:
        """The processed prompt; new items are kept."""
        self._count(decode_seconds=made.decode_seconds, process_seconds=made.process_seconds)
        items = list(made.prompt.media)
        for kind, of_kind in asked.items():
            places = sorted(
                (index for index, item in enumerate(items) if item.kind == kind),
                key=lambda index: items[index].span,
            )
            if len(places) != len(of_kind):
                continue  # a family that makes several items of one
            for index, each in zip(places, of_kind, strict=True):
                if each.known is not None:
                    items[index] = replace(items[index], features=each.known.features)
                elif each.key is not None:
                    self.cache.put(each.key, items[index])
                if each.name is not None and each.key not in (None, each.name):
                    self.cache.name(each.name, each.key)
        return replace(made.prompt, media=tuple(items))

    def _count(self, **more: float) -> None:
        with self._lock:
            for name, value in more.items():
                setattr(self._stats, name, getattr(self._stats, name) + value)


def _place(parts: Sequence[MediaPart]) -> str:
    """Where in the request it stands: the part, or what all of them stand in."""
    return parts[0].param if len(parts) == 1 else parts[0].param.split(".")[0]


def _family_names(
    wanted: Mapping[str, Sequence[MediaPart]],
) -> dict[str | None, tuple[MediaPart, str]]:
    """The parts by what a family's processor calls each, and what its refusal begins with."""
    return {
        f"multi_modal_data.{kind}.{index}": (part, f"{kind} {index}: ")
        for kind, parts in wanted.items()
        for index, part in enumerate(parts)
    }


def _flattened(first: Future[_First], then: Callable[[_First], Future[_Then]]) -> Future[_Then]:
    """The future of what ``then(first)`` begins."""
    made: Future[_Then] = Future()

    def ended(work: Future[_Then]) -> None:
        if made.set_running_or_notify_cancel():
            error = work.exception()
            if error is None:
                made.set_result(work.result())
            else:
                made.set_exception(error)

    def begun(done: Future[_First]) -> None:
        if made.cancelled():
            return
        error = done.exception()
        if error is None:
            try:
                work = then(done.result())
            except BaseException as refused:
                error = refused.with_traceback(None)  # whose frames hold ``made``
            else:
                _follow(work, made)
                work.add_done_callback(ended)
                return
        if made.set_running_or_notify_cancel():
            made.set_exception(error)

    first.add_done_callback(begun)
    return made


def _ended(other: Future[Any]) -> Future[None]:
    """A future that is done when ``other`` is, however that ends."""
    ended: Future[None] = Future()
    other.add_done_callback(lambda _: ended.set_result(None))
    return ended


def _then(
    work: Future[Made],
    made: Future[list[ProcessedPrompt]],
    end: Callable[[Made], ProcessedPrompt],
    told: Callable[[BaseException], BaseException],
) -> None:
    """Have ``made`` be ``[end(work)]``, or what ``told`` makes of an error."""

    def ended(work: Future[Made]) -> None:
        if not made.set_running_or_notify_cancel():
            return
        error = work.exception()
        if error is None:
            _settle(made, lambda: [end(work.result())])
        else:
            made.set_exception(told(error))

    _follow(work, made)
    work.add_done_callback(ended)


def _settle(future: Future[_Then], value: Callable[[], _Then]) -> None:
    """Give a future the value, or what is raised instead."""
    try:
        future.set_result(value())
    except BaseException as error:
        future.set_exception(error)


def _follow(work: Future[Any], made: Future[Any]) -> None:
    """Cancel ``work``, unless it has begun, when ``made`` of it is cancelled."""
    begun = weakref.ref(work)  # so that the two are no circle

    def ended(made: Future[Any]) -> None:
        if made.cancelled() and (work := begun()) is not None:
            work.cancel()

    made.add_done_callback(ended)


__all__ = ["MediaIntake"]
