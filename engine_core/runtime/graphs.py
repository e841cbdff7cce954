"""Steps as CUDA graphs, which need little or no input of the host."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from engine_core.errors import EngineError, OptionError
from engine_core.kernels import (
    CodedWeight,
    Turns,
    choose_greedy,
    decode_inputs,
    sample_tokens,
)
from engine_core.kernels.launch.quick import Quick, quickly
from engine_core.kernels.sampling import NUMBERS, Adjustments, SamplingState
from engine_core.nn.embedding import VocabularySplit
from engine_core.nn.linear import Linear
from engine_core.plugin_code import described
from engine_core.runtime.block_tables import IntArray
from engine_core.runtime.capture import (
    Agreement,
    AttemptError,
    Capturer,
    CudaCapturer,
    Graph,
    capture,
    run_once,
)
from engine_core.runtime.chosen import ChosenRoom
from engine_core.runtime.compiles import NOBODY, PATIENCE, QUICK, Compiles
from engine_core.runtime.platform import load_written_to_host, to_device
from engine_core.runtime.sampler.sampler import apply_bitmask
from engine_core.runtime.step_batch import (
    QUICK_GRAIN,
    ROWS_BESIDE,
    Choice,
    GraphKey,
    RowState,
    StepBatch,
    StepOutputs,
    StepState,
    chunk_size,
    chunk_sizes,
    sizes_beside,
)
from engine_core.step_context import AttentionMetadata, GroupMetadata, StepContext

logger = logging.getLogger(__name__)

# Few, as each takes a tenth of a second and some memory; from 16 on a bucket is at most half as
# large again as the batch that runs in it. From 96 on, where cuBLAS multiplies by tiles of rows in
# steps of 8, padding takes time: on an H200 steps of 7B and 8B are 1 to 8% shorter with 16 rows of
# it less, and from 160 on, where products bound them, up to 4% with 8. Beyond 256 there is an
# eighth at most.
_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, *range(96, 160, 16), *range(160, 256, 8))
_BUCKETS += (*range(256, 512, 32), *range(512, 1025, 64))
# On Hopper weights of few bits have kernels for so many rows; by cuBLAS 96 take no longer.
_PACKED_BUCKET = 80
# Host buffers in rotation: more than there can be steps in flight.
_RING = 8
# Steps between two captures for which a request waits, if a larger graph takes its place; and
# between those of steps with prompts, which can be launched kernel by kernel.
_APART, _PROMPTS_APART = 32, 1000
# A step with prompts takes a graph that is at most so many times as large, rather than launch its
# own kernels, however long that takes the device.
_LITTLE_LARGER = 1.25
# Tokens and rows of quick steps that launch what those of all shapes do. Weights of few bits have
# kernels by the number of tokens up to 256 there, and quick steps multiples of QUICK_GRAIN.
_QUICK_STEPS = ((1, 1), (2 * QUICK_GRAIN, 2), (500, 2), (1000, 20), (8000, 200))
# Tokens of steps that together have all kernels of weights of few bits: the most that share a tile
# of 16 to 256 rows, some of which so many rows are missing that they come in boxes, and those of
# blocks of 128 rows.
_FEW_TOKENS = (
    *(16, 32, 48, 64, 80, 96, 128, 150, 192, 200, 256),
    *(320, 384, 448, 512, 640, 768, 896, 1024),
)


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured step, and the tensors that it leaves its results in.

    Attributes:
        graph: to be replayed. That of a decode step takes its rows from where they were put for the
            step that began last: of another number of rows it would read elsewhere, and take
            anything for the number of a row.
        logits: ``[rows, V]`` as the model gives them; None where nobody needs them; another capture
            may then use the memory.
        room: where it leaves the tokens that it chooses.
        numbers: what it reads, as in :class:`StepBatch`; None if that is shared with others.
    """

    graph: Graph
    logits: Tensor | None
    room: ChosenRoom
    numbers: Tensor | None


@dataclass(slots=True)
class GraphState:
    """State that captured steps share with the runner, and with each other.

    Attributes:
        steps: the device's state from step to step.
        logits_of: runs the model on a context and gives the logits, ``[S, V]``, of the tokens at
            the given places.
        sampling: gives how the rows of the persistent batch choose.
        step_bytes: what the activations of the largest step take. Where less memory is free,
            nothing is captured before it is needed.
        agreement: with the other ranks of the model.
        deterministic: whether a step's kernels must not depend on when it runs.
        capturer: makes what captures on a device.
        compiles: the kernels that are compiled beside; of one rank alone.
        coded: whether the cache keeps codes, of which attention that is not quick has kernels by
            the number of prompts and of their tokens.
        packed: whether weights are kept in another form, of which linears have kernels by the
            number of few tokens.
        max_repeat: how often a decode step is replayed, at most, before its tokens are sent.
        uncaptured: keys of the steps that could not be captured; they are not tried again.
        ahead: whether steps are captured before they are needed: until one could not be.
        since_capture: steps since the last capture; None before anybody captures ahead, as a server
            does it while it is idle, and after everything was forgotten.
    """

    steps: StepState
    logits_of: Callable[[StepContext, Tensor | None], Tensor]
    sampling: Callable[[], SamplingState]
    step_bytes: int
    agreement: Agreement = field(default_factory=Agreement)
    deterministic: bool = False
    capturer: Callable[[torch.device], Capturer] = CudaCapturer
    compiles: Compiles = NOBODY
    coded: bool = False
    packed: bool = False
    max_repeat: int = 1
    uncaptured: set[GraphKey] = field(default_factory=set)
    ahead: bool = True
    since_capture: int | None = None

    def spares_captures(self, apart: int) -> bool:
        """Whether a step that has something in its place does not wait for the capture of its own.

        Few requests wait for a capture so, and none for two in a row: there are so many steps
        between them. Where that many were, it loads a kernel in its place, if one was compiled; so
        nobody asks for a step that was captured, or is whatever this says. Offline none is spared:
        equal calls have equal steps.
        """
        if self.since_capture is None:
            return False
        return self.since_capture < apart or self.compiles.load_next()

    @property
    def runs_quickly(self) -> bool:
        """Whether a step of any shape may be quick, kernel by kernel, as others are compiled."""
        compiles = self.compiles
        return compiles.under_way and not self.deterministic and compiles.ready(QUICK)

    def count_step(self) -> None:
        """Take note of a step that is about to run."""
        if self.since_capture is not None:
            self.since_capture += 1


def bucket_of(count: int) -> int:
    """The rows of the smallest captured step that decodes so many; ``count`` if there is none."""
    return next((size for size in _BUCKETS if size >= count), count)


def largest_step_bytes(model: nn.Module, tokens: int) -> int:
    """About how many bytes the activations of a step of ``tokens`` tokens take.

    Twice the output of the widest linear, as it is freed only after its successor was computed.
    Narrower ones before and after it use the same memory. Embeddings do not count, nor heads, which
    give the logits of a few tokens alone.
    """
    embeddings = {
        param
        for module in model.modules()
        if isinstance(module, nn.Embedding | VocabularySplit)
        for param in module.parameters(recurse=False)
    }
    vocabularies = {param.shape[0] for param in embeddings}
    widths = [
        param.shape[-2] * param.element_size()
        for param in model.parameters()
        if param.dim() >= 2 and param.shape[-2] not in vocabularies
    ]
    packed = [layer.out_features * layer.dtype.itemsize for layer in _packed_linears(model)]
    return 2 * tokens * max([*widths, *packed], default=0)


def launch_bound_tokens(model: nn.Module, num_layers: int) -> int:
    """Tokens of a step that the device computes while the host launches its kernels one by one.

    On an H200 host: about 1 ms per layer for the launches, and 600 TFLOP/s for the products. Where
    codes are multiplied 2 ms, as rows are quantised and contexts become numbers besides, and 1,200
    TFLOP/s: on a host that was slow Llama 3 8B's launches of a prompt of 4,096 tokens took 87 ms
    where the device takes 56. Numbers that are packed count like others: they are no parameters any
    more, but as many products.
    """
    counts = [param.numel() for param in dict.fromkeys(model.parameters())]
    seconds = 1e-3
    for layer in _packed_linears(model):
        count = layer.out_features * layer.in_features
        codes = isinstance(layer.packed, CodedWeight) and layer.packed.multiplies_codes
        counts.append(count // 2 if codes else count)
        seconds = 2e-3 if codes else seconds
    return int(seconds * num_layers * 600e12 / (2 * sum(counts)))


def is_packed(model: nn.Module) -> bool:
    """Whether any linear's weight is kept in another form than its parameter."""
    return any(_packed_linears(model))


def _packed_linears(model: nn.Module) -> Iterator[Linear]:
    """Linears whose weight is kept in another form than its parameter."""
    for module in model.modules():
        if isinstance(module, Linear) and module.packed is not None:
            yield module


def others_of(kind: type[_Graphs]) -> str:
    """The name of what steps without a graph need, as :class:`Compiles` knows it."""
    return f"{kind.__name__} others"


# Gives the logits, if they are to be kept, as all that a capture gives.
_Step = Callable[[], tuple[Tensor | None]]


class _Prepared(NamedTuple):
    """The step to capture, and what it writes and reads; as of :class:`Captured`."""

    step: _Step
    room: ChosenRoom
    numbers: Tensor | None


@dataclass(slots=True)
class _Standing:
    """The rows of decode steps as they are on the device, but for what the last replays moved.

    Attributes:
        bucket: rows of the step that they were sent for, padding included.
        rows: numbers in the persistent batch.
        positions: as they were before those replays.
        moved: how many these are.
    """

    bucket: int
    rows: IntArray
    positions: IntArray
    moved: int = 0


class _Graphs(ABC):
    """The common part of the two kinds of captured steps.

    A graph is captured when a step first needs it, if it was not before. A step for whose graph
    there is no memory runs without one, from then on. Several ranks capture together
    (:func:`~engine_core.runtime.capture.capture`), and a step that one of them cannot capture, for
    whatever reason, runs without a graph on all. What else these classes decide follows from plans
    and from earlier captures alone, so that it is the same on every rank.
    """

    def __init__(
        self, state: GraphState, at_start: Sequence[GraphKey], later: Sequence[GraphKey]
    ) -> None:
        """Nothing is captured yet.

        Args:
            state: what is shared with the runner.
            at_start: what :meth:`starts` captures, in this order.
            later: what :meth:`capture_next` captures after that, in this order. What is quick has
                its like among them.
        """
        self._state = state
        self._steps = state.steps
        self._device = state.steps.device
        self._at_start = tuple(dict.fromkeys(at_start))
        every = dict.fromkeys((*at_start, *later))
        self._expected = tuple(key for key in every if not key.quick)
        self._graphs: dict[GraphKey, Captured] = {}
        # Whether all that is expected was captured, as somebody took the time to ask for; and what
        # is left of the rest.
        self._complete = False
        self._rest: Iterator[None] | None = None
        self._capturer = state.capturer(self._device)
        # Bytes that the largest step takes, if others may be captured before it.
        self._largest_bytes = 0
        # The expected step that was run, so that to capture it takes half as long.
        self._ran: GraphKey | None = None

    def forget(self) -> None:
        """Drop all graphs, as there is more state per row or token than when captured."""
        self._graphs.clear()
        self._complete, self._rest = False, None
        self._ran = None
        self._state.since_capture = None

    @property
    def num_captured(self) -> int:
        """How many steps are captured."""
        return len(self._graphs)

    def starts(self) -> Iterator[GraphKey]:
        """Capture what the first greedy request with a short prompt needs, a step at a time.

        Gives the key of each before it is captured.

        Raises:
            OptionError: there is no memory for it, and there is one rank.
            EngineError: it cannot be captured for another reason, and there is one rank.
        """
        for key in self._at_start:
            yield key
            if key in self._graphs:
                continue  # somebody else captured it meanwhile
            try:
                self._graphs[key] = self._make(key)
            except AttemptError as error:
                if self._state.agreement.size == 1:
                    kind = OptionError if error.out_of_memory else EngineError
                    raise kind(self._reason(key, error)) from error.__cause__
                self._give_up(key, error)

    def capture_next(self, *, part: bool = False) -> bool:
        """Capture one more step that is likely to be needed.

        ``part`` says to do a part of it, if there is one rank: to load a kernel that was compiled,
        or to run the step, and by the next call to capture it. Either of the last two takes some 50
        ms of a large model, beside which a request may come.

        Returns:
            False if there is none left, or too little memory, or one could not be captured. True
            also if its kernels are still being compiled, after a moment. Last of all, the kernels
            of steps without a graph are compiled, a step at a time.
        """
        if self._state.since_capture is None:
            self._state.since_capture = _APART  # who may be idle has others that wait
        if part and self._state.compiles.load_next():
            # To run a step that launches several for the first time would take as long as all.
            self._state.compiles.late += 1
            return True
        key = self._next()
        if self._awaits_kernels(key):
            self._state.compiles.late += 1
            self._state.compiles.ready(self._others if key is None else key, PATIENCE)
            return True
        if key is None and not self._complete:
            if self._rest is None:
                self._state.compiles.wait(self._others)
                self._rest = self._compile_others()
            if next(self._rest, self) is not self:
                self._state.compiles.late += 1
                return True
            self._complete, self._rest = True, None
        if key is None or not self._state.ahead:
            return False
        free = min(self._state.agreement.gather(self._capturer.free_memory()))
        if free < self._state.step_bytes:
            self._state.ahead = False
            self._warn(
                "%d MiB of GPU memory are free, and the largest step takes about %d: no more CUDA "
                "graphs are captured before they are needed; set kv_cache_memory lower to leave "
                "more",
                free >> 20,
                self._state.step_bytes >> 20,
            )
            return False
        try:
            if part and self._ran != key and self._state.agreement.size == 1:
                self._reserve()
                run_once(self._capturer, lambda: self._prepare(key).step)
                self._ran = key
                self._state.compiles.late += 1
            else:
                self._graphs[key] = self._make(key)
        except AttemptError as error:
            self._give_up(key, error)
            return False
        finally:
            self._state.since_capture = 0  # who came meanwhile has waited for it
        return True

    @property
    def awaits_kernels(self) -> bool:
        """Whether :meth:`capture_next` has nothing to do before a kernel is compiled."""
        return self._awaits_kernels(self._next())

    def _awaits_kernels(self, key: GraphKey | None) -> bool:
        """Whether those of the step that is next, or of all others if None, are missing."""
        if not self._state.ahead or (key is None and self._complete):
            return False
        return not self._state.compiles.ready(self._others if key is None else key)

    def _next(self) -> GraphKey | None:
        """The expected step that is captured next: the first one whose kernels are there.

        If there is none, the first one; None if all are captured.
        """
        missing = [key for key in self._expected if key not in self._graphs]
        if self._ran in missing:
            return self._ran
        ready = (key for key in missing if self._state.compiles.ready(key))
        return next(ready, missing[0] if missing else None)

    def _get(self, key: GraphKey) -> Captured | None:
        """The graph of a step, captured now if need be; None if there is no memory for it.

        Raises:
            RuntimeError: it cannot be captured for another reason, and there is one rank.
        """
        if key not in self._graphs and key not in self._state.uncaptured:
            try:
                self._graphs[key] = self._make(key)
            except AttemptError as error:
                if self._state.agreement.size == 1 and not error.out_of_memory:
                    raise RuntimeError(self._reason(key, error)) from error.__cause__
                self._give_up(key, error)
            finally:
                if self._state.since_capture is not None:
                    self._state.since_capture = 0
        return self._graphs.get(key)

    def _give_up(self, key: GraphKey, error: AttemptError) -> None:
        """Run the step of this key without a graph from now on."""
        self._state.uncaptured.add(key)
        self._state.ahead = False
        self._warn(
            "%s. From now on such a step launches its kernels one by one, which is slower, and "
            "nothing more is captured before it is needed",
            self._reason(key, error),
        )

    def _warn(self, message: str, *args: object) -> None:
        """Log it once, not by every rank."""
        if self._state.agreement.rank == 0:
            logger.warning(message, *args)

    def _reason(self, key: GraphKey, error: AttemptError) -> str:
        """Why the step of this key was not captured, and what to do."""
        step = self._describe(key)
        if error.out_of_memory:
            where = f" ({error})" if self._state.agreement.size > 1 else ""
            return (
                f"no memory to capture {step} as a CUDA graph{where}; set kv_cache_memory lower to "
                "leave more"
            )
        return (
            f"{step} could not be captured as a CUDA graph: {error}; with eager=True (--eager) "
            "nothing is captured"
        )

    @abstractmethod
    def _compile_others(self) -> Iterator[None]:
        """Run what no graph is captured for beforehand, so that no request waits for a compile.

        A part at a time: a request may come between two of them.
        """

    @abstractmethod
    def _prepare(self, key: GraphKey) -> _Prepared:
        """Return the step to capture for this key.

        It may run at once, and leaves everything as it is but its room.
        """

    @abstractmethod
    def _describe(self, key: GraphKey) -> str:
        """The step of this key in words."""

    @property
    def _others(self) -> str:
        """The name of what :meth:`_compile_others` runs."""
        return others_of(type(self))

    def _make(self, key: GraphKey) -> Captured:
        """Capture the step of this key."""
        self._state.compiles.wait(key)
        self._reserve()
        prepared: list[_Prepared] = []

        def prepare() -> _Step:
            prepared.append(self._prepare(key))
            return prepared[-1].step

        ran = self._ran == key
        if ran:
            self._ran = None
        graph, (logits,) = capture(self._capturer, self._state.agreement, prepare, ran=ran)
        # Where there is no memory for a step a quick one stays, as it takes less than launches.
        self._graphs.pop(key._replace(quick=Quick.ATTENTION), None)
        return Captured(graph, logits, prepared[-1].room, prepared[-1].numbers)

    def _reserve(self) -> None:
        """Before the first capture: have the memory of the largest, if there is plenty."""
        count, self._largest_bytes = self._largest_bytes, 0
        if count and self._capturer.free_memory() >= count + self._state.step_bytes:
            try:
                self._capturer.reserve(count)
            except RuntimeError as error:
                # It would save memory, and nothing needs it.
                logger.info("no memory is set aside for graphs: %s", described(error))


class DecodeGraphs(_Graphs):
    """Steps in which every row decodes, one graph for each size of batches and :class:`Choice`.

    The device moves the rows on by itself, so the host sends row numbers and positions only, in one
    copy, and none where a plan goes on with the rows of the one before. A replay takes each row's
    last token from the device, computes it at the row's position, leaves the chosen next token as
    the row's last one, and moves the position on: replayed again it computes the step after,
    without the host. It counts its turns, and each leaves its tokens at a place of its own, so that
    one kernel after the last replay sends them all. Rows of padding stand at position -1: they
    store nothing and stay where they are.
    """

    def __init__(self, state: GraphState) -> None:
        """Nothing is captured yet."""
        rows = state.steps.max_rows
        sizes = sorted({*_BUCKETS, _PACKED_BUCKET}) if state.packed else _BUCKETS
        self._buckets = [size for size in sizes if size < rows] + [rows]
        # By choice, and by the place of the bucket.
        self._keys = [[GraphKey(size, size, 0, c) for size in self._buckets] for c in Choice]
        greedy, random, _ = self._keys
        super().__init__(
            state,
            # The largest of a kind before all others, which reuse its memory. It has few kernels of
            # ours: while these are still to come it runs all batches.
            at_start=greedy[-1:] if state.compiles.under_way else [greedy[-1], greedy[0]],
            # A request by itself, and the kernels with which tokens are drawn at random, come even
            # before that.
            later=[greedy[0], random[0], random[-1], *chain(*zip(greedy, random, strict=True))],
        )
        # Row numbers, then positions, then the turn: what the host writes before the first replay
        # of a plan. Captured steps of few rows have them nearer to each other, for one copy.
        size = _places_of(rows).turn.stop
        self._static = torch.full((size,), -1, dtype=torch.int64, device=self._device)
        # What is chosen in each turn of a plan, which is sent after the last.
        self._chosen = torch.zeros(
            ChosenRoom.bytes_of(rows, state.max_repeat), dtype=torch.uint8, device=self._device
        )
        load_written_to_host(self._chosen)
        on_gpu = self._device.type == "cuda"
        self._ring = [torch.empty(size, dtype=torch.int64, pin_memory=on_gpu) for _ in range(_RING)]
        self._sent = 0
        self._standing: _Standing | None = None
        # The place of the next turn's tokens.
        self._turn = 0
        # Those whose tensors the adjusted graphs have captured.
        self._adjustments: Adjustments | None = None
        # Whether the step that begins next does without a capture, and has loaded its kernel.
        self._spared = False

    def _compile_others(self) -> Iterator[None]:
        # Those of adjusted choice, which is made by the logits until it is captured, and those of
        # choices in which the host has a part, which are made by logits in float32.
        captured = self._graphs[self._keys[Choice.GREEDY][0]].logits
        assert captured is not None, "greedy steps keep their logits"
        logits = captured[:1]

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(2, *shape, dtype=dtype, device=self._device)

        vocab = logits.shape[-1]
        every = torch.full((1, -(-vocab // 8)), 255, dtype=torch.uint8, device=self._device)
        of_host = apply_bitmask(logits.to(torch.float32, copy=True), every)
        row, last_tokens, seeds = (zeros(dtype=torch.int64) for _ in range(3))

        def choose(logits: Tensor, adjustments: Adjustments | None) -> None:
            numbers = zeros(len(NUMBERS), dtype=torch.float64)
            state = SamplingState(numbers, seeds, adjustments)
            sample_tokens(logits, row[:1], row[:1] - 1, last_tokens, state)

        choose(of_host, None)
        # The same kernels make all adjustments.
        bans = zeros(8, dtype=torch.int32)
        adjustments = Adjustments(zeros(dtype=torch.int32), bans, zeros(dtype=torch.int64))
        choose(logits, adjustments)
        choose(of_host, adjustments)
        return iter(())

    def offer(self, count: int, choice: Choice | None) -> Choice | None:
        """The choice that a step of ``count`` rows makes by itself; None to choose by its logits.

        ``choice`` is one that every row's parameters can be followed with, None if there is none.
        Once all that is expected was captured, no request waits for a capture: adjusted choice,
        which needs tensors over the vocabulary that few servers ever need, is made by the logits
        until :meth:`capture_next` has captured it. So is one whose kernels are being compiled, and
        one right after a capture, where kernels that choose by logits are there.
        """
        if choice is None or choice is Choice.GREEDY:
            return choice
        keys = self._keys[choice][bisect_left(self._buckets, count) :]
        if choice is Choice.ADJUSTED:
            return self._offer_adjusted(keys)
        if any(key in self._graphs for key in keys):
            return choice
        return choice if self._may_capture(keys[0], count) else None

    def chooses(self, count: int | None) -> bool:
        """Whether the kernels that choose randomly by logits need no compile.

        ``count`` is how many rows choose by logits that nothing adjusts; None if something does.
        """
        compiles = self._state.compiles
        if compiles.ready(self._others):
            return True
        if count is None:
            return False
        # A captured step of fewer rows has the same: there are others from some of its sizes on.
        fewer = max(0, bisect_right(self._buckets, count) - 1)
        return compiles.ready(self._keys[Choice.RANDOM][fewer])

    def _may_capture(self, key: GraphKey, count: int | None) -> bool:
        """Whether a step of this key, whose choice may be made by logits, is captured by need.

        Without kernels for it, as ``count`` says to :meth:`chooses`, PyTorch chooses by logits. For
        many rows that takes longer in a few steps than a capture, and a seed draws other tokens.
        """
        state = self._state
        if not state.compiles.ready(key):
            return False
        stands_in = not state.deterministic and self.chooses(count)
        self._spared = stands_in and state.spares_captures(_APART)
        return not self._spared

    def _offer_adjusted(self, keys: Sequence[GraphKey]) -> Choice | None:
        """As :meth:`offer`; the keys are those of enough rows."""
        choice, key = Choice.ADJUSTED, keys[0]
        adjustments = self._state.sampling().adjustments
        if adjustments is not self._adjustments:
            # These have captured other tensors.
            self._adjustments = adjustments
            for stale in [stale for stale in self._graphs if stale.choice is choice]:
                del self._graphs[stale]
            if self._ran is not None and self._ran.choice is choice:
                self._ran = None
        if any(each in self._graphs for each in (keys if not self._complete else keys[:1])):
            return choice
        if not self._complete:
            return choice if self._may_capture(key, None) else None
        if key not in self._expected:
            self._expected += (key,)
        return None

    def begin(
        self,
        rows: Sequence[int] | IntArray,
        positions: Sequence[int] | IntArray,
        choice: Choice = Choice.GREEDY,
    ) -> Captured | None:
        """Set the rows, and the positions of the tokens they compute; returns what to replay.

        None if this step is to be run without a graph. ``choice`` is as :meth:`offer` gave it.
        """
        count = len(rows)
        keys = self._keys[choice][bisect_left(self._buckets, count) :]
        key = keys[0]
        state = self._state
        state.count_step()
        missing = key not in self._graphs and key not in state.uncaptured
        larger = next((each for each in keys if each in self._graphs), None)
        offered, self._spared = self._spared, False
        spared = missing and larger is not None and (offered or state.spares_captures(_APART))
        if spared or (missing and not state.compiles.ready(key)):
            ready = (each for each in keys if state.compiles.ready(each))
            there = larger or next(ready, None)
            if there is None and state.runs_quickly:
                return None
            key = there or keys[-1]
        # Capturing runs the step and so moves the static inputs; it comes before they are set.
        captured = self._get(key)
        if captured is None:
            return None
        if not self._stand(key.decode_rows, rows, positions):
            self._send(key.decode_rows, rows, positions)
        for table in self._steps.tables:
            table.flush()
        return captured

    def replays(
        self, captured: Captured, turns: int, rows: int, *, chosen: bool
    ) -> Iterator[StepOutputs]:
        """Replay what has begun so often; return results of the first ``rows`` rows.

        ``chosen`` says whether its own choice is wanted, of as many turns at once as there is room
        for, not the logits of each.
        """
        assert self._standing is not None, "it has begun"
        bucket, num_turns = captured.room.rows, len(captured.room.room)
        assert self._standing.bucket == bucket, (
            f"a step of {self._standing.bucket} rows has begun, not one of {bucket}"
        )
        while turns:
            some = min(turns, num_turns) if chosen else 1
            if self._turn + some > num_turns:
                # They are sent by places that follow each other.
                self._static[_places_of(bucket).turn] = -1
                self._turn = 0
            first = self._turn
            for _ in range(some):
                captured.graph.replay()
            turns -= some
            self._standing.moved += some
            self._turn = (first + some) % num_turns
            if chosen:
                yield StepOutputs(room=captured.room, turn=first, turns=some)
            else:
                assert captured.logits is not None, "greedy steps keep their logits"
                yield StepOutputs(captured.logits[:rows])

    def _stand(
        self, bucket: int, rows: Sequence[int] | IntArray, positions: Sequence[int] | IntArray
    ) -> bool:
        """Whether the device has these rows at these positions, by itself."""
        standing = self._standing
        # Without a replay by :meth:`replays` somebody else may have replayed.
        if standing is None or standing.bucket != bucket or not standing.moved:
            return False
        standing.positions += standing.moved
        standing.moved = 0
        same = np.array_equal(standing.rows, rows)
        return same and np.array_equal(standing.positions, positions)

    def _send(
        self, bucket: int, rows: Sequence[int] | IntArray, positions: Sequence[int] | IntArray
    ) -> None:
        """Bring the rows and their positions to the device, where turns begin anew."""
        count = len(rows)
        self._standing = _Standing(bucket, np.array(rows), np.array(positions))
        self._turn = 0
        self._sent = (self._sent + 1) % _RING
        places = _places_of(bucket)
        sent = self._ring[self._sent][: places.turn.stop]
        host = sent.numpy()
        # Padding, and the turn before the first.
        host[: places.positions.start] = self._steps.max_rows
        host[places.positions.start :] = -1
        host[:count] = rows
        host[places.positions][:count] = positions
        self._static[: len(sent)].copy_(sent, non_blocking=True)

    def _prepare(self, key: GraphKey) -> _Prepared:
        rows, positions, turn = (self._static[part] for part in _places_of(key.decode_rows))
        # Padding is all there is in the step that is captured.
        self._standing = None
        self._static[:] = -1
        rows.fill_(self._steps.max_rows)
        room = ChosenRoom.of(key.decode_rows, self._state.max_repeat, self._chosen, turn)
        step = partial(self._step, rows, positions, room.turns, key.choice)
        return _Prepared(step, room, None)

    def _describe(self, key: GraphKey) -> str:
        return f"a decode step of up to {key.decode_rows} rows ({key.choice.name.lower()} choice)"

    def _step(
        self, rows: Tensor, positions: Tensor, turns: Turns, choice: Choice
    ) -> tuple[Tensor | None]:
        logits = self._state.logits_of(self._context(rows, positions, turns), None)
        last_tokens = self._steps.last_tokens
        if choice is Choice.GREEDY:
            choose_greedy(
                logits, rows=rows, last_tokens=last_tokens, positions=positions, turns=turns
            )
            return (logits,)
        state = self._state.sampling()
        if choice is Choice.RANDOM:
            state = replace(state, adjustments=None)
        sample_tokens(logits, rows, positions, last_tokens, state, turns=turns)
        return (None,)

    def _context(self, rows: Tensor, positions: Tensor, turns: Turns) -> StepContext:
        steps, bucket = self._steps, len(rows)
        inputs = decode_inputs(
            rows,
            positions,
            steps.last_tokens,
            [table.device_table for table in steps.tables],
            [table.block_size for table in steps.tables],
            turn=turns.turn,
            num_turns=len(turns.tokens),
        )
        groups = zip(inputs.block_tables, inputs.slot_mappings, strict=True)
        return StepContext(
            input_ids=inputs.input_ids.unsqueeze(0),
            position_ids=inputs.position_ids.unsqueeze(0),
            row_ids=steps.counting[:bucket],
            attn_metadata=AttentionMetadata(
                query_start=steps.query_start[: bucket + 1],
                kv_lens=inputs.kv_lens,
                max_query_len=1,
                max_kv_len=steps.max_model_len,
                num_decode_rows=bucket,
                groups=tuple(GroupMetadata(*group) for group in groups),
            ),
            row_state=RowState(steps.row_state, rows),
            token_state=steps.no_token_state(bucket),
        )


class _Places(NamedTuple):
    """Where the numbers of a decode step are among those that the host sends it."""

    rows: slice
    positions: slice
    turn: slice


def _places_of(rows: int) -> _Places:
    """The places of a step of so many rows.

    They are aligned to 16 bytes, for which kernels are compiled, as tensors are without a graph.
    """
    even = rows + rows % 2
    return _Places(slice(rows), slice(even, even + rows), slice(2 * even, 2 * even + 1))


# Decode rows and prefill rows that a step with prompts is captured for. Each decode row that there
# is not is a token of padding; prompts that there are not take next to nothing.
_DECODE_ROWS = (0, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
_PREFILL_ROWS = (1, 8, 32)


def _full_steps(max_num_batched_tokens: int, max_chunk: int, max_rows: int) -> Iterator[GraphKey]:
    """Full steps in which no prompt is alone."""
    tokens = chunk_size(max_num_batched_tokens)
    for fewer, decode in pairwise((-1, *_DECODE_ROWS)):
        for less, prefill in pairwise((0, *_PREFILL_ROWS)):
            # At most so many rows prefill beside the fewest that decode.
            rows = min(prefill, max_rows - fewer - 1)
            full = rows > less and rows * max_chunk >= max_num_batched_tokens
            if full and decode + prefill > 1:
                yield GraphKey(decode + tokens, decode, prefill)


def _steps_beside(max_chunk: int, max_rows: int) -> Iterator[GraphKey]:
    """Steps of prompts up to this size beside rows that decode: few, which hold all others.

    More prompts than there are cost programs that end at once, so these have room for several, and
    the longer ones for many.
    """
    for decode in _rows_beside(max_rows):
        for tokens in sizes_beside(decode, max_chunk):
            likely = min(max(8, tokens // 64), max_rows - 1, _PREFILL_ROWS[-1])
            prefill = next(size for size in _PREFILL_ROWS if size >= likely)
            yield GraphKey(decode + tokens, decode, prefill)


def _rows_beside(max_rows: int) -> list[int]:
    """Rows that decode, as many as they are filled up to, beside one prompt at least."""
    return [decode for fewer, decode in pairwise((0, *ROWS_BESIDE)) if fewer < max_rows - 1]


def _odd_steps(
    max_num_batched_tokens: int, max_rows: int, coded: bool, packed: bool
) -> list[GraphKey]:
    """Steps that launch what steps without a graph do, of any number of tokens and rows.

    Of 1,023 and of 2,047 tokens gate and up of most models have Hopper's kernel, which has a
    variant for weights of few bits that were just turned into numbers, as up to 1,024 tokens they
    seldom are. Of many prompts a cache that is ``coded`` has kernels by powers of 2, and one for
    those that have no room as numbers. Weights that are ``packed`` have some by few tokens: those
    of more than steps that decode have are still to come.
    """
    decode = ROWS_BESIDE[0]
    counts = [count for count in (128, 256, 512, 1024) if count < max_rows] + [max_rows]
    many = [(250, count) for count in counts] if coded else []
    keys = []
    full = [(2015, 3)] if packed else []
    for least, rows in [(250, 3), (991, 3), *full, (2050, 3), *many]:
        tokens = min(max(least, rows), max_num_batched_tokens)
        keys.append(GraphKey(decode + tokens, decode, min(rows, tokens, max_rows)))
    few = [count for count in _FEW_TOKENS if packed and count > max_rows]
    for count in few:
        # Of more tokens than those of prompts some are of rows that decode.
        fitting = (0, *_rows_beside(max_rows))
        beside = next((each for each in fitting if count - each <= max_num_batched_tokens), None)
        if beside is not None:
            keys.append(GraphKey(count, beside, 1))
    return [*dict.fromkeys(keys)]


def _spread(keys: Sequence[GraphKey]) -> list[GraphKey]:
    """The keys in an order in which the first few leave little padding to steps of any size.

    The largest comes first, then the one in the middle of the others, then those in the middle of
    either half, and so on.
    """
    ordered = sorted(keys, reverse=True)
    spread, parts = ordered[:1], deque([ordered[1:]])
    while parts:
        part = parts.popleft()
        if part:
            middle = len(part) // 2
            spread.append(part[middle])
            parts += part[:middle], part[middle + 1 :]
    return spread


def _holds(held: GraphKey, key: GraphKey) -> bool:
    """Whether a step of the shape ``held`` has room for one of this shape."""
    return (
        held.decode_rows >= key.decode_rows
        and held.prefill_rows >= key.prefill_rows
        and held.tokens - held.decode_rows >= key.tokens - key.decode_rows
    )


class GraphSteps(_Graphs):
    """Steps with prefill chunks, one graph for each number of tokens, decode and prefill rows.

    They are padded as :meth:`fit` says: rows that decode, padding, rows that prefill, padding. The
    host sends all of a step's numbers in one transfer. In a server that captures while it is idle,
    a step whose graph is missing takes one that is little larger, or launches its kernels in the
    same padded form; now and then it is captured all the same, for servers that are never idle.
    Once all expected steps are captured, none is captured by need any more: it takes a larger
    graph, or runs without one.
    """

    def __init__(self, state: GraphState, max_tokens: int, max_num_batched_tokens: int) -> None:
        """Nothing is captured yet.

        Args:
            state: what is shared with the runner.
            max_tokens: in a step of more the device is the slower one, and a graph's padding would
                only add to its work.
            max_num_batched_tokens: tokens of prompts in a step at most. Captured before they are
                needed, for the sake of the first of each size, are steps full of them, prompts that
                come alone, and prompts beside rows that decode.
        """
        max_chunk = min(max_num_batched_tokens, state.steps.max_model_len)
        sizes = chunk_sizes(max_chunk)
        alone = [GraphKey(tokens, 0, 1) for tokens in sizes]
        full = _full_steps(max_num_batched_tokens, max_chunk, state.steps.max_rows)
        expected = [key for key in (*alone, *full) if key.tokens <= max_tokens]
        if state.steps.max_rows > 1:
            # Their padding is next to nothing where prompts are cut to these sizes, as a server
            # cuts them, so they may be longer; and a host that launches kernels for as long as the
            # device runs them can do nothing else.
            beside = _steps_beside(max_chunk, state.steps.max_rows)
            expected += [key for key in beside if key.tokens <= 2 * max_tokens]
        at_start, others = expected[:1], expected[1:]
        if state.compiles.under_way and not state.deterministic:
            # The larger takes the place of both until these are captured.
            some = [key for key in alone[:2] if key in expected]
            at_start, others = [key._replace(quick=Quick.ATTENTION) for key in some[-1:]], expected
        # The largest of the others first: what comes after reuses its memory. But one that is
        # needed, or whose kernels are there, may come before.
        super().__init__(state, at_start=at_start, later=_spread(others))
        self._longest = max((key for key in alone if key in expected), default=None)
        largest = max((key.tokens for key in expected), default=0)
        most = max_num_batched_tokens + state.steps.max_rows
        self._largest_bytes = state.step_bytes * largest // most
        self._max_tokens = max_tokens
        rows = state.steps.max_rows
        self._odd = _odd_steps(max_num_batched_tokens, rows, state.coded, state.packed)
        # Whether a step of any shape may be quick, kernel by kernel, while others are compiled.
        self._stands_in = any(key.quick for key in at_start)
        self._most_tokens = max_num_batched_tokens

    def fit(self, key: GraphKey) -> tuple[GraphKey, bool]:
        """The captured step that holds one of this shape, and True.

        Or a step for the model itself, and False. It has as many decoding rows as steps that were
        captured, since attention has kernels by their number, which would be compiled now.
        """
        self._state.count_step()
        own = self._own_shape(key)
        if own is not None and own in self._graphs:
            return own, True
        is_due = own is not None and not self._complete
        is_ready = own is not None and is_due and self._state.compiles.ready(own)
        holding = min((held for held in self._graphs if _holds(held, key)), default=None)
        if own is not None and is_ready:
            # In a step of so many tokens the device is no slower than the host that launches it.
            most = max(self._max_tokens, _LITTLE_LARGER * own.tokens)
            if holding is None or holding.tokens > most or not self._spares_captures:
                return own, True
        if holding is not None:
            return holding, True
        # Its kernels are still being compiled, and those of a larger one may be there.
        larger = self._larger(key) if is_due else []
        there = next((each for each in larger if self._state.compiles.ready(each)), None)
        there = there or self._quick_for(key)
        if there is None and larger and self._state.compiles.under_way:
            there = larger[0]
            self._state.compiles.wait(there)
        if there is not None:
            return there, True
        # To launch what is not compiled yet would compile it here, one after another.
        self._wait_for_longest()
        decode = next((size for size in (0, *ROWS_BESIDE) if size >= key.decode_rows), None)
        decode = key.decode_rows if decode is None else decode
        prompts = key.tokens - key.decode_rows
        return GraphKey(decode + prompts, decode, key.prefill_rows), False

    def fit_decodes(self, key: GraphKey) -> tuple[GraphKey, bool]:
        """As :meth:`fit`, for rows that all decode, and for whose step there is no graph.

        While kernels for it are compiled they are like prompts of one token, in a quick step.
        """
        quick = self._quick_for(key)
        return (key, False) if quick is None else (quick, True)

    def _quick_for(self, key: GraphKey) -> GraphKey | None:
        """The quick step for one of this shape; None if its kernels are there, or it has none."""
        compiles = self._state.compiles
        if not self._stands_in or compiles.ready(self._others):
            return None
        compiles.wait(QUICK)  # they are among the first
        if not self._state.runs_quickly:
            return None
        # Those of the longest prompt are those of all, but of codes.
        known = self._longest is not None and not self._state.coded
        fast = known and compiles.ready(self._longest)
        return self._quick_shape(key, Quick.PRODUCTS if fast else Quick.ATTENTION)

    def _quick_shape(self, key: GraphKey, quick: Quick) -> GraphKey:
        """The shape of a quick step for one of this shape: rows that decode are like others."""
        most = self._steps.max_rows
        rows = next((size for size in _PREFILL_ROWS if size >= key.rows), most)
        tokens = -(-key.tokens // QUICK_GRAIN) * QUICK_GRAIN
        return GraphKey(tokens, 0, min(rows, most), quick=quick)

    def run_quick(self) -> None:
        """Run what launches the same as quick steps of all shapes, to find out what that is."""
        if not self._stands_in:
            return
        self._state.compiles.wait(QUICK)
        for tokens, rows in _QUICK_STEPS:
            rows = min(rows, self._steps.max_rows)
            shape = GraphKey(min(tokens, self._most_tokens), 0, rows)
            batch, numbers = self._padding(self._quick_shape(shape, Quick.ATTENTION))
            parts = self._steps.split(batch, numbers)
            with quickly(batch.key.quick):
                self._state.logits_of(self._steps.context(batch, parts), parts["last"])

    def _larger(self, key: GraphKey) -> list[GraphKey]:
        """The expected steps that hold one of this shape, the smallest first."""
        left = self._state.uncaptured
        return sorted(each for each in self._expected if _holds(each, key) and each not in left)

    def wait_for_prompts(self) -> None:
        """Return once no prompt waits for a kernel: it has its own, or is a quick step."""
        if self._stands_in and self._state.compiles.under_way:
            self._state.compiles.wait(QUICK)
        if not self._state.runs_quickly:
            self._wait_for_longest()

    def _wait_for_longest(self) -> None:
        """Return once the kernels of prompts of any length need no compile.

        The step of the first token has others.
        """
        if self._longest is not None and self._state.compiles.under_way:
            self._state.compiles.wait(self._longest)

    @property
    def _spares_captures(self) -> bool:
        """Whether a step whose kernels are compiled launches them rather than be captured now."""
        return self._state.spares_captures(_PROMPTS_APART)

    def _own_shape(self, key: GraphKey) -> GraphKey | None:
        """The closest shape that a step of this one is captured for by need; None for none."""
        decode = next((size for size in _DECODE_ROWS if size >= key.decode_rows), None)
        prefill = next((size for size in _PREFILL_ROWS if size >= key.prefill_rows), None)
        if decode is None or prefill is None:
            return None
        tokens = decode + chunk_size(key.tokens - key.decode_rows)
        fitting = GraphKey(tokens, decode, prefill)
        taken = tokens <= self._max_tokens and fitting not in self._state.uncaptured
        return fitting if taken else None

    def run(self, batch: StepBatch) -> StepOutputs | None:
        """Replay a step; see :class:`~engine_core.runtime.step_batch.Steps`."""
        if not batch.padded:
            return None
        if batch.key not in self._graphs and (batch.key.quick or self._spares_captures):
            return None
        captured = self._get(batch.key)
        if captured is None:
            return None
        assert captured.numbers is not None, "each has its own"
        captured.numbers.copy_(batch.numbers, non_blocking=True)
        for table in self._steps.tables:
            table.flush()
        captured.graph.replay()
        if batch.choice is Choice.GREEDY:
            return StepOutputs(room=captured.room, places=batch.places)
        if not batch.sampled:
            return StepOutputs()
        assert captured.logits is not None, "these steps keep their logits"
        where = torch.tensor([batch.places[index] for index in batch.sampled])
        return StepOutputs(captured.logits[to_device(where, self._device)])

    def _prepare(self, key: GraphKey) -> _Prepared:
        batch, numbers = self._padding(key)
        memory = torch.zeros(
            ChosenRoom.bytes_of(key.rows, 1), dtype=torch.uint8, device=self._device
        )
        room = ChosenRoom.of(key.rows, 1, memory, None)

        def step() -> tuple[Tensor]:
            with quickly(key.quick):
                return self._step(batch, numbers, room.turns)

        return _Prepared(step, room, numbers)

    def _compile_others(self) -> Iterator[None]:
        # For odd numbers of tokens kernels are compiled anew.
        for key in self._odd:
            self._prepare(key).step()
            yield

    def _padding(self, key: GraphKey) -> tuple[StepBatch, Tensor]:
        """A step of this shape in which there is nothing but padding, and its numbers."""
        batch = self._steps.batch((), {}, fit=lambda _: (key, True))
        return batch, batch.numbers.to(self._device)

    def _describe(self, key: GraphKey) -> str:
        return f"a step of up to {key.tokens} tokens with prompts among them"

    def _step(self, batch: StepBatch, numbers: Tensor, turns: Turns) -> tuple[Tensor]:
        parts = self._steps.split(batch, numbers)
        rows, last_tokens = parts["rows"], self._steps.last_tokens
        latest = last_tokens[rows]
        logits = self._state.logits_of(self._steps.context(batch, parts), parts["last"])
        choose_greedy(logits, turns=turns)
        last_tokens[rows] = torch.where(parts["samples"] > 0, turns.tokens[0], latest)
        return (logits,)
