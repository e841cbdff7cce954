"""Pictures, videos and sounds of prompts: decoded and processed in worker processes."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from engine_core.configs import EngineConfig, ModelConfig
from engine_core.engine.media_worker import Made
from engine_core.engine.prompt_inputs import process_prompt
from engine_core.errors import EngineError, OptionError, RequestError
from engine_core.inputs import (
    InputProcessor,
    MediaItem,
    MediaProcessor,
    ProcessedPrompt,
    packed_token_ids,
)
from engine_core.media.cache import MediaCache, MediaStats, content_key
from engine_core.media.fetch import MediaSources, names_source
from engine_core.media.parts import MediaPart
from engine_core.media.shared import shared
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
    known: MediaItem | None


class MediaIntake:
    """Processes what prompts show, in workers with limits of memory and time.

    A file of some kilobytes may have gigabytes of pixels, and decoders have had bugs that a file
    exploits. Items that were processed before, for a request of the same salts, come from a cache
    if the family's processor takes them (``reuses_items``). It may be used from several threads.

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
        if config.mm_processor_kwargs and self._processor is None:
            raise OptionError(
                "mm_processor_kwargs are for models that see or hear, and "
                f"{model_config.architecture} takes text alone; leave them out"
            )
        self._sources = MediaSources(config.allowed_local_media_path, config.allowed_media_domains)
        self._stats = MediaStats()
        self._lock = threading.Lock()
        size = int(config.mm_processor_cache_gb * 2**30)
        if not getattr(processor, "reuses_items", False):
            size = 0
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.cache = MediaCache(size, open_files // 4, self._stats)
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
        """Kinds that the model takes besides text: "image", "video" or "audio"."""
        return () if self._processor is None else self._processor.media_kinds

    def check(self, media: Mapping[str, Sequence[MediaPart]]) -> None:
        """Refuse what the model cannot see or hear, and more than the engine allows of a kind.

        Raises:
            RequestError: something is of such a kind, or one too many.
        """
        kinds = self.kinds
        for kind, parts in media.items():
            if kind not in kinds:
                param = parts[0].param
                takes = f"takes {', '.join(kinds)} and text" if kinds else "takes text alone"
                architecture = self._model_config.architecture
                message = f"{param} has {kind!r}, and {architecture} {takes}"
                raise RequestError(message, param=param)
            most = self._config.limit_mm_per_prompt.get(kind)  # type: ignore[call-overload]
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
    ) -> Future[list[ProcessedPrompt]]:
        """Begin to process a prompt.

        Args:
            token_ids: the prompt's.
            media: what it shows, by kind.
            options: settings of the family's processing.
            salts: see :class:`ProcessedPrompt`; requests share items only if theirs are equal.
            here: whether what is not encoded is processed in this process: it is its user's own.

        Returns:
            The processed prompt in a list, out of which it is to be taken: a future may live until
            garbage is collected, and pictures must not. It raises :class:`RequestError` or
            :class:`ModelError` if it cannot be processed.

        Raises:
            QueueFullError: too many prompts wait for it.
            EngineDeadError: the engine is being shut down.
        """
        options = {**self._config.mm_processor_kwargs, **options}
        parts = [part for each in media.values() for part in each]
        if not any(map(names_source, parts)):
            return self._begin(token_ids, media, options, salts, here=here)

        def begin(read: list[MediaPart]) -> Future[list[ProcessedPrompt]]:
            left = iter(read)
            known = {kind: [next(left) for _ in each] for kind, each in media.items()}
            return self._begin(token_ids, known, options, salts, here=here)

        def release(done: Future[list[MediaPart]]) -> None:
            if done.exception() is None:
                self._sources.release(parts, done.result())

        coming = self._sources.begin(parts)
        coming.add_done_callback(lambda done: self._count(refused=done.exception() is not None))
        made = _flattened(coming, begin)
        made.add_done_callback(lambda _: coming.add_done_callback(release))
        return made

    def _begin(
        self,
        token_ids: Sequence[int],
        media: Mapping[str, Sequence[MediaPart]],
        options: Mapping[str, Any],
        salts: tuple[Hashable, ...],
        *,
        here: bool,
    ) -> Future[list[ProcessedPrompt]]:
        """The same of parts whose content is there."""
        asked: dict[str, list[_Asked]] = {
            kind: [self._asked(part, options, salts) for part in parts]
            for kind, parts in media.items()
        }
        wanted = {
            kind: [
                each.part if each.known is None else each.part._replace(value=each.known)
                for each in of_kind
            ]
            for kind, of_kind in asked.items()
        }
        parts = [part for each in wanted.values() for part in each]
        self._count(items=len(parts))
        work: Future[Made]
        if all(isinstance(part.value, MediaItem) for part in parts) or (
            here and not any(isinstance(part.value, str | bytes) for part in parts)
        ):
            work = Future()
            try:
                work.set_result(self._process_here(token_ids, wanted, options))
            except Exception as error:
                work.set_exception(error)
        else:
            work = self._workers.submit(
                f"{_ROOM}:process", packed_token_ids(token_ids), wanted, options
            )
        return _then(work, lambda made: self._end(made, asked))

    def _asked(
        self, part: MediaPart, options: Mapping[str, Any], salts: tuple[Hashable, ...]
    ) -> _Asked:
        """A part with what is known of it.

        Raises:
            RequestError: it has no content, and nothing is known by its uuid.
        """
        name = None
        if part.uuid is not None:
            # What was made with other options is another item.
            name = content_key(("uuid", part.owner, *salts), part.kind, part.uuid, options)
        key = name if part.value is None else content_key(salts, part.kind, part.value, options)
        known = None if key is None else self.cache.get(key)
        if known is None and part.value is None:
            self._count(refused=1)
            raise RequestError(
                f"{part.param}: no {part.kind} is known by the uuid {part.uuid!r}: none was given "
                "with the same key, cache_salt and mm_processor_kwargs, or it was forgotten; send "
                "it again",
                param=part.param,
            )
        return _Asked(part, key, name, known)

    def _process_here(
        self, token_ids: Sequence[int], wanted: Mapping[str, Sequence[MediaPart]], options: Any
    ) -> Made:
        begin = time.perf_counter()
        assert self._processor is not None, "else its kinds were refused"
        items = {kind: [part.value for part in parts] for kind, parts in wanted.items()}
        asked = (self._model_config.vocab_size, token_ids, items, options)
        made = process_prompt(self._processor, "process_media", *asked)
        if self._config.tensor_parallel_size > 1:  # the ranks are other processes
            own = [replace(item, features=shared(item.features)) for item in made.media]
            made = replace(made, media=tuple(own))
        return Made(made, 0.0, time.perf_counter() - begin)

    def _end(self, work: Future[Made], asked: Mapping[str, Sequence[_Asked]]) -> ProcessedPrompt:
        """The processed prompt; new items are kept."""
        parts = [each.part for of_kind in asked.values() for each in of_kind]
        try:
            made = work.result()
        except EngineError as error:
            self._count(refused=isinstance(error, RequestError))
            if isinstance(error, RequestError) and error.param in (None, "multi_modal_data"):
                raise type(error)(str(error), param=_place(parts)) from None
            raise
        except Exception as error:
            self._count(refused=1)
            param = _place(parts)
            what = "processed" if isinstance(error, WorkerError) else "handed to a worker"
            message = f"{param}: what is shown was not {what}: {error}"
            raise RequestError(message, param=param) from None
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


def _flattened(first: Future[_First], then: Callable[[_First], Future[_Then]]) -> Future[_Then]:
    """The future of what ``then(first)`` begins."""
    made: Future[_Then] = Future()

    def ended(work: Future[_Then]) -> None:
        if made.set_running_or_notify_cancel():
            try:
                made.set_result(work.result())
            except BaseException as error:
                made.set_exception(error)

    def begun(done: Future[_First]) -> None:
        if made.cancelled():
            return
        try:
            work = then(done.result())
        except BaseException as error:
            if made.set_running_or_notify_cancel():
                made.set_exception(error)
        else:
            _follow(work, made)
            work.add_done_callback(ended)

    first.add_done_callback(begun)
    return made


def _then(
    work: Future[Made], end: Callable[[Future[Made]], ProcessedPrompt]
) -> Future[list[ProcessedPrompt]]:
    """The future of ``[end(work)]``."""
    made: Future[list[ProcessedPrompt]] = Future()

    def ended(work: Future[Made]) -> None:
        if made.set_running_or_notify_cancel():
            try:
                made.set_result([end(work)])
            except BaseException as error:
                made.set_exception(error)

    _follow(work, made)
    work.add_done_callback(ended)
    return made


def _follow(work: Future[Any], made: Future[Any]) -> None:
    """Cancel ``work``, unless it has begun, when ``made`` of it is cancelled."""
    begun = weakref.ref(work)  # so that the two are no circle

    def ended(made: Future[Any]) -> None:
        if made.cancelled() and (work := begun()) is not None:
            work.cancel()

    made.add_done_callback(ended)


__all__ = ["MediaIntake"]
