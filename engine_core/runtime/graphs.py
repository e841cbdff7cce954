"""Steps as CUDA graphs, which need little or no input of the host."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from engine_core.errors import OptionError
from engine_core.kernels import choose_greedy, decode_inputs, sample_tokens
from engine_core.kernels.sampling import Adjustments, SamplingState
from engine_core.nn.embedding import VocabularySplit
from engine_core.runtime.block_tables import BlockTables, IntArray
from engine_core.step_context import AttentionMetadata, GroupMetadata, StepContext

logger = logging.getLogger(__name__)

_Key = TypeVar("_Key", bound=Hashable)
_Graph = TypeVar("_Graph")

# Powers of two, and from 16 on the half-way points too: a bucket is at most a third larger than
# the batch that runs in it.
_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
# Host buffers in rotation: more than there can be steps in flight.
_RING = 8


class Choice(IntEnum):
    """How the rows of a captured step choose their tokens; each can do what those before it can."""

    GREEDY = 0
    RANDOM = 1
    ADJUSTED = 2


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured step, and the tensors that it leaves its results in.

    Attributes:
        graph: to be replayed.
        logits: ``[rows, V]`` as the model gives them; None where nobody wants them, whose memory
            another capture may use.
        tokens: ``[rows]`` int64, the chosen ones.
        status: ``[rows]`` int8, as of :func:`~engine_core.kernels.sample_tokens`.
    """

    graph: torch.cuda.CUDAGraph
    logits: Tensor | None
    tokens: Tensor
    status: Tensor


@dataclass(slots=True)
class GraphState:
    """What captured steps share with the runner, and with each other.

    Attributes:
        logits_of: runs the model on a context and gives the logits, ``[S, V]``, of the tokens at
            the given places.
        sampling: gives how the rows of the persistent batch choose.
        tables: the block tables of each cache group.
        last_tokens: ``[max_rows + 1]`` int64, the token that each row sampled last; the last row
            is that of padding.
        max_rows: sequences at once.
        max_model_len: bounds the lengths that attention is captured for.
        step_bytes: what the activations of the largest step take. Where less memory is free,
            nothing is captured before it is needed.
        uncaptured: keys of the steps that could not be captured; they are not tried again.
        ahead: whether steps are captured before they are needed: until one could not be.
    """

    logits_of: Callable[[StepContext, Tensor | None], Tensor]
    sampling: Callable[[], SamplingState]
    tables: Sequence[BlockTables]
    last_tokens: Tensor
    max_rows: int
    max_model_len: int
    step_bytes: int
    uncaptured: set[Hashable] = field(default_factory=set)
    ahead: bool = True


def largest_step_bytes(model: nn.Module, tokens: int) -> int:
    """About how many bytes the activations of a step of ``tokens`` tokens take.

    What the widest linear gives, twice, as something is made of it before it is freed. Narrower
    ones before and after it use the same memory. Embeddings do not count, nor heads, which give the
    logits of a few tokens alone.
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
    return 2 * tokens * max(widths, default=0)


def _free_memory(device: torch.device) -> int:
    """Bytes that a step can take: what no process has, and what PyTorch keeps for later use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class _RowState(Mapping[str, Tensor]):
    """What families keep a row, of the step's rows; gathered when it is asked for."""

    def __init__(self, state: Mapping[str, Tensor], rows: Tensor) -> None:
        self._state = state
        self._rows = rows

    def __getitem__(self, name: str) -> Tensor:
        return self._state[name][self._rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


class _Graphs(ABC, Generic[_Key, _Graph]):
    """What the two kinds of captured steps have in common.

    A graph is captured when a step first needs it, if it was not before. A step for whose graph
    there is no memory runs without one, from then on.
    """

    def __init__(self, state: GraphState, at_start: Sequence[_Key], later: Sequence[_Key]) -> None:
        """Nothing is captured yet.

        Args:
            state: what is shared with the runner.
            at_start: what :meth:`capture_at_start` captures, in this order.
            later: what :meth:`capture_next` captures after that, in this order.
        """
        self._state = state
        self._device = state.last_tokens.device
        self._row_state: Mapping[str, Tensor] = {}
        self._token_state: Mapping[str, int] = {}
        self._at_start = tuple(dict.fromkeys(at_start))
        self._expected = tuple(dict.fromkeys((*at_start, *later)))
        self._graphs: dict[_Key, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: captures share memory only with those on the same stream.
        self._stream = torch.cuda.Stream(self._device)

    def set_state(self, row_state: Mapping[str, Tensor], token_state: Mapping[str, int]) -> None:
        """Name what families keep a row (``[max_rows + 1, ...]``) and a token (its width).

        Graphs captured with other names are dropped.
        """
        if row_state.keys() != self._row_state.keys() or token_state != self._token_state:
            self._row_state = dict(row_state)
            self._token_state = dict(token_state)
            self._graphs.clear()

    def capture_at_start(self) -> None:
        """Capture what the first greedy request with a short prompt needs.

        Raises:
            OptionError: there is no memory for it.
            RuntimeError: it cannot be captured for another reason.
        """
        for key in self._at_start:
            try:
                self._graphs[key] = self._make(key)
            except Exception as error:
                kind = OptionError if _is_out_of_memory(error) else RuntimeError
                raise kind(self._reason(key, error)) from error

    def capture_next(self) -> bool:
        """Capture one more step that is likely to be needed.

        Returns:
            False if there is none left, or too little memory, or one could not be captured.
        """
        key = next((key for key in self._expected if key not in self._graphs), None)
        if key is None or not self._state.ahead:
            return False
        free = _free_memory(self._device)
        if free < self._state.step_bytes:
            self._state.ahead = False
            logger.warning(
                "%d MiB of GPU memory are free, and the largest step takes about %d: no more CUDA "
                "graphs are captured before they are needed; set kv_cache_memory lower to leave "
                "more",
                free >> 20,
                self._state.step_bytes >> 20,
            )
            return False
        try:
            self._graphs[key] = self._make(key)
        except Exception as error:
            self._give_up(key, error)
            return False
        return True

    def _get(self, key: _Key) -> _Graph | None:
        """The graph of a step, captured now if need be; None if there is no memory for it.

        Raises:
            RuntimeError: it cannot be captured for another reason.
        """
        if key not in self._graphs and key not in self._state.uncaptured:
            try:
                self._graphs[key] = self._make(key)
            except Exception as error:
                if not _is_out_of_memory(error):
                    raise RuntimeError(self._reason(key, error)) from error
                self._give_up(key, error)
        return self._graphs.get(key)

    def _give_up(self, key: _Key, error: Exception) -> None:
        """Have the step of this key run without a graph from now on."""
        self._state.uncaptured.add(key)
        self._state.ahead = False
        logger.warning(
            "%s. From now on such a step launches its kernels one by one, which is slower, and "
            "nothing more is captured before it is needed",
            self._reason(key, error),
        )

    def _reason(self, key: _Key, error: Exception) -> str:
        """Why the step of this key was not captured, and what to do."""
        if _is_out_of_memory(error):
            return (
                f"no memory to capture {self._describe(key)} as a CUDA graph; set kv_cache_memory "
                "lower to leave more"
            )
        return (
            f"{self._describe(key)} could not be captured as a CUDA graph: {type(error).__name__}: "
            f"{error}; with eager=True (--eager) nothing is captured"
        )

    @abstractmethod
    def _make(self, key: _Key) -> _Graph:
        """Capture the step of this key."""

    @abstractmethod
    def _describe(self, key: _Key) -> str:
        """The step of this key in words."""

    def _capture(self, step: Callable[[], tuple[Tensor | None, Tensor, Tensor]]) -> Captured:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                # Compiles and tunes what a capture must not.
                step()
                # Other threads of the user's process may use CUDA meanwhile.
                with torch.cuda.graph(
                    graph,
                    pool=self._pool,
                    stream=self._stream,
                    capture_error_mode="thread_local",
                ):
                    results = step()
        finally:
            current.wait_stream(self._stream)
        return Captured(graph, *results)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether PyTorch's allocator, the CUDA runtime or Triton says that memory has run out."""
    return isinstance(error, RuntimeError) and (
        isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
    )


class DecodeGraphs(_Graphs[tuple[int, Choice], Captured]):
    """Steps in which every row decodes, one graph a batch-size bucket and :class:`Choice`.

    A replay takes each row's last token from the device, computes it at the row's position, leaves
    the chosen next token as the row's last one, and moves the position on: replayed again it
    computes the step after, without a word from the host. Rows of padding stand at position
    -1: they store nothing and stay where they are.
    """

    def __init__(self, state: GraphState) -> None:
        """Nothing is captured yet."""
        rows = state.max_rows
        self._buckets = [size for size in _BUCKETS if size < rows] + [rows]
        smallest, largest = self._buckets[0], self._buckets[-1]
        super().__init__(
            state,
            # The largest of a kind before all others, which reuse its memory.
            at_start=[(largest, Choice.GREEDY), (smallest, Choice.GREEDY)],
            # A request by itself, and the kernels with which tokens are drawn at random, come even
            # before that.
            later=[
                (smallest, Choice.RANDOM),
                (largest, Choice.RANDOM),
                *(
                    (bucket, choice)
                    for bucket in self._buckets
                    for choice in (Choice.GREEDY, Choice.RANDOM)
                ),
            ],
        )
        # Row numbers, then positions: what the host writes before the first replay of a plan.
        self._static = torch.full((2, rows), -1, dtype=torch.int64, device=self._device)
        self._static[0] = rows
        self._places = torch.arange(rows + 1, device=self._device)
        self._query_start = self._places.to(torch.int32)
        self._ring = [
            torch.empty(2, rows, dtype=torch.int64, pin_memory=True) for _ in range(_RING)
        ]
        self._turn = 0
        # Those whose tensors the adjusted graphs have captured.
        self._adjustments: Adjustments | None = None

    def begin(
        self,
        rows: Sequence[int],
        positions: Sequence[int],
        choice: Choice = Choice.GREEDY,
    ) -> Captured | None:
        """Set the rows, and the positions of the tokens they compute; returns what to replay.

        None if this step is to be run without a graph. ``choice`` is one that every row's
        parameters can be followed with.
        """
        count = len(rows)
        bucket = self._buckets[bisect_left(self._buckets, count)]
        if choice is Choice.ADJUSTED:
            self._drop_outdated()
        # Capturing runs the step and so moves the static inputs; it comes before they are set.
        captured = self._get((bucket, choice))
        if captured is None:
            return None
        self._turn = (self._turn + 1) % _RING
        pinned = self._ring[self._turn]
        host = pinned.numpy()
        host[0, :count] = rows
        host[1, :count] = positions
        host[0, count:bucket] = self._state.max_rows
        host[1, count:bucket] = -1
        for line in range(2):
            self._static[line, :bucket].copy_(pinned[line, :bucket], non_blocking=True)
        for table in self._state.tables:
            table.flush()
        return captured

    def _drop_outdated(self) -> None:
        """Drop adjusted graphs that have captured other tensors than those of now."""
        adjustments = self._state.sampling().adjustments
        if adjustments is not self._adjustments:
            self._adjustments = adjustments
            for key in [key for key in self._graphs if key[1] is Choice.ADJUSTED]:
                del self._graphs[key]

    def _make(self, key: tuple[int, Choice]) -> Captured:
        # Padding is all there is in the step that is captured.
        self._static[0] = self._state.max_rows
        self._static[1] = -1
        return self._capture(lambda: self._step(*key))

    def _describe(self, key: tuple[int, Choice]) -> str:
        bucket, choice = key
        return f"a decode step of up to {bucket} rows ({choice.name.lower()} choice)"

    def _step(self, bucket: int, choice: Choice) -> tuple[Tensor | None, Tensor, Tensor]:
        rows, positions = self._static[:, :bucket]
        logits = self._state.logits_of(self._context(rows, positions, bucket), None)
        last_tokens = self._state.last_tokens
        if choice is Choice.GREEDY:
            tokens, status = choose_greedy(
                logits, rows=rows, last_tokens=last_tokens, positions=positions
            )
            return logits, tokens, status
        state = self._state.sampling()
        if choice is Choice.RANDOM:
            state = replace(state, adjustments=None)
        return None, *sample_tokens(logits, rows, positions, last_tokens, state)

    def _context(self, rows: Tensor, positions: Tensor, bucket: int) -> StepContext:
        inputs = decode_inputs(
            rows,
            positions,
            self._state.last_tokens,
            [table.device_table for table in self._state.tables],
            [table.block_size for table in self._state.tables],
        )
        groups = zip(inputs.block_tables, inputs.slot_mappings, strict=True)
        return StepContext(
            input_ids=inputs.input_ids.unsqueeze(0),
            position_ids=inputs.position_ids.unsqueeze(0),
            row_ids=self._places[:bucket],
            attn_metadata=AttentionMetadata(
                query_start=self._query_start[: bucket + 1],
                kv_lens=inputs.kv_lens,
                max_query_len=1,
                max_kv_len=self._state.max_model_len,
                num_decode_rows=bucket,
                groups=tuple(GroupMetadata(*group) for group in groups),
            ),
            row_state=_RowState(self._row_state, rows),
            token_state={
                name: torch.zeros(width, bucket, dtype=torch.int64, device=self._device)
                for name, width in self._token_state.items()
            },
        )


@dataclass(frozen=True, slots=True)
class MixedStep:
    """A step with prefill chunks, as the host knows it. R rows, T tokens, decode rows first.

    Attributes:
        rows: ``[R]``, rows of the persistent batch.
        starts: ``[R + 1]``, where each row's tokens begin.
        num_decode_rows: rows of one token before the others.
        token_ids: ``[T]``; -1 where only the device knows it.
        positions: ``[T]``.
        row_ids: ``[T]``, the place in ``rows`` of each token.
        slots: ``[T]`` a cache group.
        samples: ``[R]`` bool, which rows sample.
        token_state: what families keep a token, ``[k, T]`` by name.
    """

    rows: IntArray
    starts: IntArray
    num_decode_rows: int
    token_ids: IntArray
    positions: IntArray
    row_ids: IntArray
    slots: Sequence[IntArray]
    samples: IntArray
    token_state: Mapping[str, IntArray]


# Decode rows and prefill rows that a mixed step is captured for. Each decode row that there is not
# is a token of padding; prompts that there are not take next to nothing.
_DECODE_ROWS = (0, 32, 64, 128, 192, 256, 384, 512)
_PREFILL_ROWS = (1, 8, 32)


def _chunk_bucket(tokens: int) -> int:
    """At least ``tokens``: multiples of 64, from 256 on powers of two and half-way points."""
    grain = max(64, 1 << max(0, (tokens - 1).bit_length() - 2))
    return -(-tokens // grain) * grain


def _full_steps(
    max_num_batched_tokens: int, max_chunk: int, max_rows: int
) -> Iterator[tuple[int, int, int]]:
    """Tokens, decode rows and prefill rows of full steps in which no prompt is alone."""
    tokens = _chunk_bucket(max_num_batched_tokens)
    for fewer, decode in pairwise((-1, *_DECODE_ROWS)):
        for less, prefill in pairwise((0, *_PREFILL_ROWS)):
            # At most so many rows prefill beside the fewest that decode.
            rows = min(prefill, max_rows - fewer - 1)
            full = rows > less and rows * max_chunk >= max_num_batched_tokens
            if full and decode + prefill > 1:
                yield decode + tokens, decode, prefill


class MixedGraphs(_Graphs[tuple[int, int, int], tuple[Captured, Tensor]]):
    """Steps with prefill chunks, one graph for each (tokens, decode rows, prefill rows) bucket.

    The host sends all of a step's numbers in one transfer. Tokens of padding are stored nowhere,
    and rows of padding have no tokens.
    """

    def __init__(self, state: GraphState, max_tokens: int, max_num_batched_tokens: int) -> None:
        """Nothing is captured yet.

        Args:
            state: what is shared with the runner.
            max_tokens: in a step of more the device is the slower one, and a graph's padding would
                only add to its work.
            max_num_batched_tokens: tokens of prompts in a step at most. Steps full of them, which
                are what comes under load, and prompts that come alone are captured before they are
                needed, for the sake of the first of each size.
        """
        max_chunk = min(max_num_batched_tokens, state.max_model_len)
        sizes = [0]
        while sizes[-1] < max_chunk:
            sizes.append(_chunk_bucket(sizes[-1] + 1))
        alone = [(tokens, 0, 1) for tokens in sizes[1:]]
        expected = [
            key
            for key in (*alone, *_full_steps(max_num_batched_tokens, max_chunk, state.max_rows))
            if key[0] <= max_tokens
        ]
        # The largest of the others first: what comes after reuses its memory.
        super().__init__(state, at_start=expected[:1], later=sorted(expected[1:], reverse=True))
        self._max_tokens = max_tokens
        self._ring: list[Tensor | None] = [None] * _RING
        self._turn = 0

    def begin(self, step: MixedStep) -> tuple[Captured, IntArray] | None:
        """Set the step; what to replay, and the place of each of its rows in the results.

        None if this step is to be run without a graph.
        """
        key = self._key(step)
        found = None if key is None else self._get(key)
        if key is None or found is None:
            return None
        captured, static = found
        size = static.shape[0]
        self._turn = (self._turn + 1) % _RING
        pinned = self._ring[self._turn]
        if pinned is None or pinned.shape[0] < size:
            pinned = torch.empty(size, dtype=torch.int64, pin_memory=True)
            self._ring[self._turn] = pinned
        places = self._pack(key, step, pinned.numpy()[:size])
        static.copy_(pinned[:size], non_blocking=True)
        for table in self._state.tables:
            table.flush()
        return captured, places

    def _make(self, key: tuple[int, int, int]) -> tuple[Captured, Tensor]:
        static = self._empty(key)
        return self._capture(lambda: self._step(key, static)), static

    def _describe(self, key: tuple[int, int, int]) -> str:
        return f"a step of up to {key[0]} tokens with prompts among them"

    def _key(self, step: MixedStep) -> tuple[int, int, int] | None:
        num_prefill = len(step.rows) - step.num_decode_rows
        decode = next((size for size in _DECODE_ROWS if size >= step.num_decode_rows), None)
        prefill = next((size for size in _PREFILL_ROWS if size >= num_prefill), None)
        if decode is None or prefill is None:
            return None
        tokens = decode + _chunk_bucket(len(step.token_ids) - step.num_decode_rows)
        return (tokens, decode, prefill) if tokens <= self._max_tokens else None

    def _sizes(self, key: tuple[int, int, int]) -> dict[str, int]:
        """How many numbers of each kind a step of this shape has, in the order they are sent."""
        tokens, decode, prefill = key
        rows = decode + prefill
        return {
            "token_ids": tokens,
            "positions": tokens,
            "row_ids": tokens,
            **{f"slots {index}": tokens for index in range(len(self._state.tables))},
            **{f"state {name}": width * tokens for name, width in self._token_state.items()},
            "rows": rows,
            "starts": rows + 1,
            "kv_lens": rows,
            "last": rows,
            "samples": rows,
        }

    def _empty(self, key: tuple[int, int, int]) -> Tensor:
        """Inputs of a step that is padding alone."""
        sizes = self._sizes(key)
        values = {name: np.zeros(size, dtype=np.int64) for name, size in sizes.items()}
        for index in range(len(self._state.tables)):
            values[f"slots {index}"][:] = -1
        values["rows"][:] = self._state.max_rows
        values["starts"][:] = np.minimum(np.arange(sizes["starts"]), key[1])
        return torch.from_numpy(np.concatenate(list(values.values()))).to(self._device)

    def _pack(self, key: tuple[int, int, int], step: MixedStep, out: IntArray) -> IntArray:
        """Write the step's numbers to ``out``; returns the place of each of its rows.

        There is padding between decode and prefill rows, and at the end. What is of rows and what
        is of tokens has it at the same places, as decode rows have one token each.
        """
        _, decode, _ = key
        num_decode = step.num_decode_rows
        gap = decode - num_decode
        parts: dict[str, IntArray] = {}
        begin = 0
        for name, size in self._sizes(key).items():
            parts[name] = out[begin : begin + size]
            begin += size

        def spread(name: str, values: IntArray, padding: int = 0, shift: int = 0) -> None:
            """Write numbers with padding; those behind the gap grow by ``shift``."""
            part, end = parts[name], len(values) + gap
            part[:num_decode] = values[:num_decode]
            part[num_decode:decode] = padding
            part[decode:end] = values[num_decode:]
            part[end:] = padding
            if shift:
                part[decode:end] += shift

        spread("token_ids", step.token_ids)
        spread("positions", step.positions)
        spread("row_ids", step.row_ids, shift=gap)
        for index, slots in enumerate(step.slots):
            spread(f"slots {index}", slots, padding=-1)
        for name, width in self._token_state.items():
            given = step.token_state.get(name)
            lines = parts[f"state {name}"].reshape(width, -1)
            lines[:] = 0
            if given is not None:
                lines[:, :num_decode] = given[:, :num_decode]
                lines[:, decode : given.shape[1] + gap] = given[:, num_decode:]
        last = step.starts[1:] - 1
        spread("rows", step.rows, padding=self._state.max_rows)
        spread("kv_lens", step.positions[last] + 1)
        spread("last", last, shift=gap)
        spread("samples", step.samples)
        starts = parts["starts"]
        starts[:decode] = np.arange(decode)
        shifted = step.starts[num_decode:] + gap
        starts[decode : decode + len(shifted)] = shifted
        starts[decode + len(shifted) :] = shifted[-1]
        places = np.arange(len(step.rows))
        places[num_decode:] += gap
        return places

    def _step(self, key: tuple[int, int, int], static: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, decode, _ = key
        sizes = self._sizes(key)
        named = dict(zip(sizes, static.split(list(sizes.values())), strict=True))
        rows = named["rows"]
        latest = self._state.last_tokens[rows]
        input_ids = named["token_ids"]
        input_ids = torch.where(input_ids < 0, latest[named["row_ids"]], input_ids)
        context = StepContext(
            input_ids=input_ids.unsqueeze(0),
            position_ids=named["positions"].unsqueeze(0),
            row_ids=named["row_ids"],
            attn_metadata=AttentionMetadata(
                query_start=named["starts"].to(torch.int32),
                kv_lens=named["kv_lens"].to(torch.int32),
                max_query_len=tokens - decode,
                max_kv_len=self._state.max_model_len,
                num_decode_rows=decode,
                groups=tuple(
                    GroupMetadata(table.device_table[rows], named[f"slots {index}"])
                    for index, table in enumerate(self._state.tables)
                ),
            ),
            row_state=_RowState(self._row_state, rows),
            token_state={
                name: named[f"state {name}"].view(width, tokens)
                for name, width in self._token_state.items()
            },
        )
        logits = self._state.logits_of(context, named["last"])
        chosen, status = choose_greedy(logits)
        self._state.last_tokens[rows] = torch.where(named["samples"] > 0, chosen, latest)
        return logits, chosen, status
