"""A start of an engine without its GPU: which variants of which kernels its steps will launch.

The model is built, and all steps are run that an engine captures, on tensors without numbers; each
launch says which variant of a kernel it is. :func:`live` has them compiled while an engine starts,
:mod:`engine_core.engine.warm` ahead of any start.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from threading import Thread
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from triton.runtime.cache import triton_key

from engine_core.checkpoint import resolve_model
from engine_core.configs import EngineConfig
from engine_core.engine import kept_kernels
from engine_core.engine.beside import Rehearsal
from engine_core.engine.startup import Opened, load, open_engine
from engine_core.errors import CheckpointError
from engine_core.nn.decoder import Decoder
from engine_core.nn.distributed import is_rehearsing, without_ranks
from engine_core.plugin_code import described
from engine_core.runtime import rank_memory
from engine_core.runtime.absent import absent_gpu
from engine_core.runtime.ahead import (
    Compilers,
    Need,
    Part,
    Variant,
    packed,
    parts_of,
    recording,
    target_of,
)
from engine_core.runtime.capture import Agreement, Capturer, Graph
from engine_core.runtime.compiles import MEMORY, START, Compiles, name_of
from engine_core.runtime.executor import Executor
from engine_core.runtime.worker import Worker
from engine_core.step_context import BuildContext

T = TypeVar("T")

# Operations that most models have, and a first token needs.
_USUAL = ("linear", "attention", "embedding", "norm", "rotary_store", "greedy")

_SIGNALS = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGCHLD: signal.SIG_DFL,
    signal.SIGINT: signal.SIG_IGN,
}


class _Unplayed:
    """The graph of a step that was run once."""

    def replay(self) -> None:
        raise AssertionError("nothing is replayed without a GPU")


class _OnceCapturer:
    """Runs what is to be captured once."""

    def __init__(self, device: torch.device) -> None:
        del device
        self._last: Any = None

    def run(self, function: Callable[[], T]) -> T:
        self._last = function()
        return self._last  # type: ignore[no-any-return]

    def capture(self, function: Callable[[], T]) -> tuple[Graph, T]:
        del function
        return _Unplayed(), self._last

    def reserve(self, count: int) -> None:
        del count

    def free_memory(self) -> int:
        return 1 << 62


class _NextRank(_OnceCapturer):
    """Leaves out what each rank launches by itself, which the first has launched already."""

    def run(self, function: Callable[[], T]) -> T:
        return self._last if is_rehearsing() else super().run(function)


class _Steps(Compiles):
    """Notes what each step's launches need."""

    reads_weights = False
    capturer: Callable[[torch.device], Capturer] = _OnceCapturer

    def __init__(
        self, recorded: Callable[[str, list[str]], None], *, under_way: bool = True
    ) -> None:
        self._recorded = recorded
        self._under_way = under_way
        self._step: str | None = None
        self._kernels: dict[str, None] = {}

    @property
    def under_way(self) -> bool:
        """See :class:`Compiles`."""
        return self._under_way

    def note(self, part: Part) -> None:
        """A launch needs this."""
        self._kernels[part.key] = None

    def loaded(self, model: nn.Module) -> None:
        """See :class:`Compiles`. Of equal layers few are run: they launch the same."""
        for module in model.modules():
            if isinstance(module, Decoder):
                module.keep(_different(list(module.layers)))

    def wait(self, step: Any) -> None:
        """See :class:`Compiles`: the step is run next."""
        self.end()
        self._step = name_of(step)

    def end(self) -> None:
        """Tell what the last step has launched."""
        if self._step is not None:
            self._recorded(self._step, list(self._kernels))
        self._step, self._kernels = None, {}


def _different(layers: list[nn.Module]) -> list[int]:
    """The layers that differ, in themselves or in a neighbour, from all before."""
    kinds = [None, *map(_kind, layers), None]
    seen: dict[Any, int] = {}
    for index in range(len(layers)):
        seen.setdefault(tuple(kinds[index : index + 3]), index)
    return sorted(seen.values())


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """A description of what the layer is made of; equal for layers that launch the same."""
    return tuple(
        (
            name,
            type(module),
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, int | float | str | None)
            ),
            tuple(
                (key, param.shape, param.stride(), param.dtype)
                for key, param in module.named_parameters(recurse=False)
            ),
        )
        for name, module in layer.named_modules()
    )


def rehearse(
    task: Rehearsal, note: Callable[[Part, Need], None], recorded: Callable[[str, list[str]], None]
) -> Opened:
    """Run all steps that an engine captures, on a GPU that is not there.

    For a process that does nothing else afterwards but compile.

    Args:
        task: the start.
        note: called at each launch with what it needs, and who needs that. What takes longest to
            compile is needed soon, whoever needs it.
        recorded: called after each step with its name and the keys of what it launches.

    Raises:
        EngineError: the model cannot run; the subclass says why.
        Exception: a family's code may raise anything where numbers are missing.
    """
    config = task.config.replace(device="cuda", tokenizer=None, skip_tokenizer_init=True)
    ranks = config.num_ranks
    # What ranks capture does not depend on what is compiled: they know nothing of it.
    steps, need = _Steps(recorded, under_way=ranks == 1), Need.FIRST
    known: dict[str, None] = {}

    def launched(part: Part) -> None:
        steps.note(part)
        known[part.key] = None
        note(part, min(need, Need.SOON) if part.is_slow else need)

    @contextmanager
    def there() -> Iterator[None]:
        free, total = task.memory
        with (
            absent_gpu(task.gpu, total, free=free),
            recording(target_of(task.gpu.capability), launched),
            without_ranks(),
        ):
            yield

    with there():
        opened = _opened(task.model, config)
    executors: list[Executor | None] = [None]
    if ranks > 1:
        with there():
            executors = [*_ranks(opened, steps)]
        recorded(MEMORY, [*known])
    loaded = []
    for executor in executors:  # each on a GPU of its own
        with there():
            loaded.append(load(opened, compiles=steps, executor=executor).executor)
        steps.capturer = _NextRank
    for executor in loaded:  # what stands in for all that is compiled after it
        if isinstance(executor, Worker):
            with there():
                executor.runner.run_quick()
    if ranks == 1:
        need = Need.SOON
    # One more besides. The first request's second step is one of the largest batch, if the start
    # ended without it. Several ranks do not wait for what a step of the most tokens has by itself.
    for executor in loaded:
        with there():
            executor.capture_next()
    if ranks > 1:
        recorded(START, [*known])
    steps.end()
    need = Need.LATER
    for executor in loaded:
        with there():
            while executor.capture_next():
                pass
    steps.end()
    return opened


def _opened(model: str, config: EngineConfig) -> Opened:
    """The model, of whose tensors no numbers are read.

    Those that are quantised say by their names, shapes and types which linears have which kernels.
    Of any other the config says it all, so that its files need not be there, or all there: of a
    clone without Git LFS they are pointers.

    Raises:
        EngineError: the model cannot run; the subclass says why.
    """
    try:
        # A GGUF file that is not kept in blocks is converted by the engine alone.
        return open_engine(model, config, convert=False)
    except CheckpointError:
        if not (resolve_model(model, config.revision) / "config.json").is_file():
            raise
        opened = open_engine(model, config.replace(load_format="dummy"), convert=False)
        scheme = opened.source.scheme
        if scheme is not None and scheme.cache_settings is not None:
            raise
        return opened


class _Word(Agreement):
    """A rank's own word, taken for that of the others."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size

    def gather(self, mine: T) -> list[T]:
        """See :class:`Agreement`."""
        return [mine] * self.size


def _ranks(opened: Opened, steps: _Steps) -> Iterator[Worker]:
    """Each rank by itself, after it has tried the memory that it would share."""
    config, source = opened.config, opened.source
    size = config.tensor_parallel_size
    for rank in range(size):
        memory = rank_memory.unshared(config, rank, source.device)
        if memory is not None:
            for _ in rank_memory.trials(memory):
                pass
        context = BuildContext(tp_rank=rank, tp_size=size, rank_memory=memory)
        yield Worker(source, config, context, agreement=_Word(rank, size), compiles=steps)


def _import_kernels() -> None:
    """Import what most models launch, and have Triton read itself for its keys.

    It takes a second of processors, in which the engine finds out what the task is. Reading and
    hashing Triton leaves the interpreter to the imports. There is one thread again in the end.
    """

    def read() -> None:
        with suppress(Exception):
            triton_key()

    # What cannot be read or imported is asked for again where it is needed, which says why.
    reading = Thread(target=read)
    reading.start()
    with suppress(Exception):
        for name in _USUAL:
            import_module(f"engine_core.kernels.{name}.triton")
    reading.join()


def live(given: int, told: int) -> NoReturn:
    """The life of the process that :func:`~engine_core.engine.beside.compile_beside` starts.

    Args:
        given: the open file that brings the pickled :class:`Rehearsal`.
        told: the open file that gets the events of
            :class:`~engine_core.runtime.compiles.CompileProcess`.
    """
    logging.disable(logging.CRITICAL)  # the engine says the same
    # Handlers that were forked with it are the engine's or its user's. A Ctrl-C means these too.
    for number, handler in _SIGNALS.items():
        signal.signal(number, handler)
    gc.freeze()  # what they dropped is not to be ended twice
    _import_kernels()
    with os.fdopen(given, "rb") as file:
        task: Rehearsal = pickle.load(file)
    events = os.fdopen(told, "w", buffering=1)

    def tell(**event: Any) -> None:
        events.write(json.dumps(event) + "\n")

    compilers = Compilers(task.processes)
    loads = task.config.num_ranks == 1  # ranks are other processes than who waits
    there: set[str] = set()
    # What can be loaded once all these are there, by its key.
    unloaded: dict[str, tuple[str, set[str]]] = {}

    def is_there(*keys: str) -> None:
        there.update(keys)
        for key, (text, missing) in list(unloaded.items()):
            if missing <= there:
                tell(load=text)
                del unloaded[key]

    def compiled(*, wait: bool = False) -> None:
        for end in compilers.poll(wait=wait):
            # One that failed says why where it is launched.
            tell(compiled=end.part.key)
            if end.error is None:
                is_there(end.part.key)

    def note(part: Part, need: Need) -> None:
        known = compilers.knows(part)
        if loads and not known and isinstance(part, Variant) and (text := packed(part)):
            unloaded[part.key] = text, {each.key for each in parts_of(part)}
        if not known and not compilers.add(part, need):
            tell(compiled=part.key)
            is_there(part.key)
        compiled()

    try:
        opened = rehearse(task, note, lambda step, kernels: tell(recorded=step, kernels=kernels))
        while compilers.busy:
            compiled(wait=True)
        if not compilers.failed:
            made_for = kept_kernels.made_for(opened.source, task.config, task.gpu)
            with suppress(OSError):
                kept_kernels.keep(made_for, compilers.done)
        tell(ended=compilers.summary())
    except BrokenPipeError:
        pass
    except Exception as error:
        with suppress(BrokenPipeError):
            while compilers.busy:
                compiled(wait=True)
            # Not that it could not be captured, with advice: the engine will capture it.
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            tell(failed=described(cause))
    finally:
        with suppress(BrokenPipeError):
            events.close()
        os._exit(0)
