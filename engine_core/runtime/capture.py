"""Captures of a device's work as graphs, by one rank alone or by all ranks of a model together.

Ranks must run a step in the same way: one that replays a graph, and waits in it for sums that
another rank never launches, waits for ever. Which graph a step needs follows from its plan and from
the graphs that there are, which is the same everywhere. What differs by rank, such as free memory
and whether a capture worked, is agreed on: see :func:`capture`. Nothing is exchanged in a step
whose graph is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed

from engine_core.nn.distributed import rehearsing
from engine_core.own_process import uncollected
from engine_core.plugin_code import described

T = TypeVar("T")


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> Any:
        """Have the device do it again."""


class Capturer(Protocol):
    """Captures functions, whose graphs share memory: none of them runs beside another."""

    def run(self, function: Callable[[], T]) -> T:
        """Run a function as it will be captured: that compiles and tunes what a capture must not.

        What it allocates and frees is there for later calls.
        """

    def capture(self, function: Callable[[], T]) -> tuple[Graph, T]:
        """A graph of what the function has the device do, and its result, which replays refill."""

    def reserve(self, count: int) -> None:
        """Have so many bytes for captures, whichever is the first.

        Else each that needs more than all before would take memory of its own.
        """

    def free_memory(self) -> int:
        """Bytes available to a step."""


class CudaCapturer:
    """Captures CUDA graphs, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: captures share memory only with those on the same stream.
        self._stream = torch.cuda.Stream(device)
        self._reserves: list[Graph] = []

    def run(self, function: Callable[[], T]) -> T:
        """See :class:`Capturer`."""
        return self._apart(function)

    def capture(self, function: Callable[[], T]) -> tuple[Graph, T]:
        """See :class:`Capturer`."""
        return self._recorded(function)

    def _recorded(self, function: Callable[[], T]) -> tuple[Graph, T]:
        graph = torch.cuda.CUDAGraph()

        def record() -> T:
            # To destroy a graph spoils a capture in the same thread. That of a capture that failed
            # lies in a cycle with its error, so that a collection may end it at any time. Other
            # threads of the user's process may use CUDA meanwhile.
            with (
                uncollected(),
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                return function()

        return graph, self._apart(record)

    def reserve(self, count: int) -> None:
        """See :class:`Capturer`. What a graph has freed is there for all others of its pool."""

        def take() -> None:
            room = torch.empty(count, dtype=torch.uint8, device=self._device)
            room[:1].zero_()  # an empty graph would be warned of

        self._reserves.append(self._recorded(take)[0])

    def free_memory(self) -> int:
        """Free memory of the device, and memory that PyTorch caches."""
        device = self._device
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def _apart(self, function: Callable[[], T]) -> T:
        """Call it with the stream of captures as the current one."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return function()
        finally:
            current.wait_stream(self._stream)


def capturer_of(device: torch.device) -> Callable[[torch.device], Capturer] | None:
    """The maker of capturers for a device; None if nothing is captured there."""
    return CudaCapturer if device.type == "cuda" else None


class Agreement:
    """Exchanges between the ranks of a model, for decisions that all must take alike.

    Attributes:
        rank: this process among them.
        size: how many there are.
    """

    def __init__(self, group: Any = None) -> None:
        """``group`` is a ``torch.distributed`` group for tensors on CPUs; None for one rank."""
        self._group = group
        self.rank, self.size = 0, 1
        if group is not None:
            self.rank = torch.distributed.get_rank(group)
            self.size = torch.distributed.get_world_size(group)

    def gather(self, mine: T) -> list[T]:
        """Return what every rank gives, in the order of the ranks; waits for all of them.

        Raises:
            RuntimeError: a rank is gone, or silent for as long as the group waits.
        """
        if self.size == 1:
            return [mine]
        every: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(every, mine, self._group)
        return every


class AttemptError(RuntimeError):
    """An attempt failed; of several ranks, on one at least, so that none goes on with it.

    Attributes:
        out_of_memory: whether a lack of memory was why.
    """

    def __init__(self, reason: str, *, out_of_memory: bool) -> None:
        super().__init__(reason)
        self.out_of_memory = out_of_memory


def _is_out_of_memory(error: Exception) -> bool:
    """Whether PyTorch's allocator, the CUDA runtime or Triton says that memory has run out."""
    return isinstance(error, RuntimeError) and (
        isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
    )


def run_once(capturer: Capturer, prepare: Callable[[], Callable[[], object]]) -> None:
    """Run the function that ``prepare`` makes by one rank, so that a capture need not.

    Raises:
        AttemptError: it could not.
    """
    try:
        capturer.run(prepare())
    except Exception as error:
        raise AttemptError(described(error), out_of_memory=_is_out_of_memory(error)) from error


def capture(
    capturer: Capturer,
    agreement: Agreement,
    prepare: Callable[[], Callable[[], T]],
    *,
    ran: bool = False,
) -> tuple[Graph, T]:
    """A graph of the function that ``prepare`` makes, and its result; on all ranks or on none.

    One rank runs the function, unless it ``ran`` before, and captures it. Several first rehearse
    it, each by itself: sums and gathers over the ranks do nothing
    (:func:`~engine_core.nn.distributed.rehearsing`), so that no rank waits in one for a rank that
    fails. Then they tell each other how it went, run it together, capture it, and tell each other
    again. What may happen to one rank while others go on:

    - It lacks memory, or its code fails, when it prepares or rehearses. No rank has launched
      anything that waits for another. All hear of it, and nobody goes on.
    - It fails in the run together, although it had the memory a moment ago. Others may wait in a
      sum on the device, and no host can call them back. That is a step that fails: the rank tells
      its executor, which ends all ranks with this cause, as for a step that is run eagerly.
    - Its capture fails. A capture launches nothing, so nobody waits; NCCL connects ranks at the
      first sum of a kind, in which it waits for them, and that was in the run before. All hear of
      it, and drop what they captured.
    - It is killed, or waits where it should not. If it is killed its executor ends all ranks. Else
      the others wait for its word as long as the group of the agreement does, and fail then, with
      the same end.

    Raises:
        AttemptError: a rank could not; says why and, of several, which. All ranks raise it.
        Exception: what a rank, of several, met in the run together, or in place of others' word.
            The ranks know nothing of each other then: whoever catches it may not go on.
    """
    if agreement.size == 1:
        try:
            function = prepare()
            if not ran:
                capturer.run(function)
            return capturer.capture(function)
        except Exception as error:
            raise AttemptError(described(error), out_of_memory=_is_out_of_memory(error)) from error

    def rehearse() -> Callable[[], T]:
        function = prepare()
        with rehearsing():
            capturer.run(function)
        return function

    function = agreed(agreement, rehearse)
    capturer.run(function)
    return agreed(agreement, lambda: capturer.capture(function))


def agreed(agreement: Agreement, attempt: Callable[[], T]) -> T:
    """Return the attempt's result, if that of every rank succeeds; waits for all of them.

    Raises:
        AttemptError: it failed on a rank; says on which and why. All ranks raise it.
        RuntimeError: as of :meth:`Agreement.gather`.
    """
    made, failure = None, None
    try:
        made = attempt()
    except Exception as error:
        failure = described(error), _is_out_of_memory(error)
    # The error would keep the frames of the attempt, and so its tensors.
    for rank, found in enumerate(agreement.gather(failure)):
        if found is not None:
            raise AttemptError(f"rank {rank}: {found[0]}", out_of_memory=found[1])
    return made  # type: ignore[return-value]
