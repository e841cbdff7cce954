"""The input and output of one step, the same for every way of running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine_core.kernels.launch.quick import Quick
from engine_core.runtime.block_tables import BlockTables, IntArray
from engine_core.runtime.chosen import ChosenRoom
from engine_core.step_context import AttentionMetadata, GroupMetadata, StepContext
from engine_core.steps import PlanRow

# In 64-bit numbers: on a GPU each part of a batch begins at a multiple of 128 bytes, since Triton
# compiles another kernel for other alignments.
_ALIGNMENT = 16
# Tokens of a quick step, and of its longest prompt, are a multiple of this: fewer would be smaller
# tiles of attention, which are other kernels.
QUICK_GRAIN = 128


def chunk_size(tokens: int) -> int:
    """The size that a captured step has for so many tokens of prompts.

    At least ``tokens``, and a multiple of 64; above 512 tokens a multiple of a power of two that is
    an eighth to a quarter of ``tokens``.
    """
    grain = max(64, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // grain) * grain


def chunk_sizes(tokens: int) -> list[int]:
    """All sizes up to the one for ``tokens``."""
    sizes = [chunk_size(1)]
    while sizes[-1] < tokens:
        sizes.append(chunk_size(sizes[-1] + 1))
    return sizes


# Rows that decode for which steps with prompts are captured before they come. Each of these rows
# that there is not is a token of padding.
ROWS_BESIDE = (32, 64, 128, 256, 512, 1024)


def sizes_beside(rows: int, tokens: int) -> list[int]:
    """Tokens of prompts in the captured steps that have room for so many decoding rows.

    Prompts and rows together are one of :func:`chunk_sizes`: a GPU computes products in tiles of
    128 tokens or so, and one token more than fills them takes as long as a tile. Only the last,
    which holds ``tokens`` of prompts, may have the rows on top.
    """
    sizes = [size - rows for size in chunk_sizes(rows + tokens) if size > rows]
    return [*(size for size in sizes if size < tokens), min(sizes[-1], chunk_size(tokens))]


class Choice(IntEnum):
    """Ways of choosing tokens in a captured step; each includes those before it."""

    GREEDY = 0
    RANDOM = 1
    ADJUSTED = 2


class GraphKey(NamedTuple):
    """The shape of a step, and what is captured for it. A named tuple, for its hash is made in C.

    Attributes:
        tokens: of all rows, padding included.
        decode_rows: the first rows, of one token each.
        prefill_rows: the rows after them.
        choice: how their tokens are chosen inside a captured step.
        quick: what of it has kernels that compile sooner, and run for longer, than those of its
            like: while a start that has found none waits for these.
    """

    tokens: int
    decode_rows: int
    prefill_rows: int
    choice: Choice = Choice.GREEDY
    quick: Quick = Quick.NOTHING

    @property
    def rows(self) -> int:
        """Rows in all."""
        return self.decode_rows + self.prefill_rows


class KnownRow(Protocol):
    """The host's state of the sequence in a row.

    Attributes:
        token_ids: ``[N]``, its first tokens.
        token_state: what its family keeps for each token, ``[k, N]`` by name.
    """

    token_ids: IntArray
    token_state: Mapping[str, IntArray]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The numbers of one step, on the host. R rows and T tokens, padding included.

    Rows of padding are rows like others, in the last row of the persistent batch. They store
    nothing, and their results are not read. :class:`StepState` makes batches and reads them.

    Attributes:
        key: R, T and how many rows decode.
        numbers: everything that is sent, in one piece of int64: rows ``[R]``, tokens in the cache
            ``[R]``, positions ``[T]`` and the slots ``[T]`` of each cache group; unless
            ``decodes`` also where each row begins and ends, whether it samples, the row ``[T]`` and
            the id ``[T]`` of each token, and its state. An id is -1 where only the device knows it.
            For a model that takes embeddings also the row ``[T]`` of ``StepState.media`` in whose
            place each token stands, or -1.
        decodes: whether there are only rows that compute the token they sampled last and choose
            the next, and no padding: what the numbers leave out is the same for all such steps.
        padded: whether it has the shape of a captured step.
        embeds: whether embeddings come in for some of its tokens.
        max_query_len: bound of the tokens per row.
        max_kv_len: bound of the tokens per row in the cache.
        places: for each row of the plan, its row here.
        sampled: which rows of the plan sample.
        choice: how a captured step can choose all their tokens; None if the host has a part in it,
            or reports more than the tokens.
        whole: whether the hidden states of all tokens are wanted, not of those that sample alone.
    """

    key: GraphKey
    numbers: Tensor
    decodes: bool
    padded: bool
    embeds: bool
    max_query_len: int
    max_kv_len: int
    places: Sequence[int]
    sampled: Sequence[int]
    choice: Choice | None
    whole: bool = False


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Results of a step on the device. The next step may overwrite them.

    Attributes:
        logits: ``[S, V]`` of the rows that sample, in their order; None if none does, or if the
            step chose the tokens itself.
        tokens: ``[N]`` int64, chosen by the runner.
        status: ``[N]`` int8, as of :func:`~engine_core.kernels.sample_tokens`.
        room: what a captured step chose itself, in place of both.
        turn: the first of the room's turns that it did.
        turns: how many it did.
        places: for each row of the plan, where its token is among the N; None for their order.
        hidden: ``[T, H]``, the model's output for each token, where it may be needed.
    """

    logits: Tensor | None = None
    tokens: Tensor | None = None
    status: Tensor | None = None
    room: ChosenRoom | None = None
    turn: int = 0
    turns: int = 1
    places: Sequence[int] | None = None
    hidden: Tensor | None = None


class Steps(Protocol):
    """A way to run steps."""

    def run(self, batch: StepBatch) -> StepOutputs | None:
        """Run a step; None if it cannot be run this way, and nothing was done."""


class RowState(Mapping[str, Tensor]):
    """Per-row family state for the rows of a step, gathered when it is asked for."""

    def __init__(self, state: Mapping[str, Tensor], rows: Tensor) -> None:
        self._state = state
        self._rows = rows

    def __getitem__(self, name: str) -> Tensor:
        return self._state[name][self._rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


@dataclass(slots=True)
class StepState:
    """State that stays on the device from step to step, by row of the persistent batch.

    The last row is that of padding.

    Attributes:
        tables: the block tables of each cache group.
        last_tokens: ``[max_rows + 1]`` int64, the token that each row sampled last.
        max_model_len: tokens of the longest sequence.
        row_state: what families keep for each row, ``[max_rows + 1, ...]`` by name.
        token_state: the width of what they keep for each token, by name.
        media: ``[N, H]``, embeddings that may come in; None if the model takes none.
        embed_tokens: gives the embeddings ``[1, T, H]`` of tokens ``[1, T]``; None likewise.
        device: where steps run.
        max_rows: sequences at once; also the number of the row of padding.
        counting: ``[max_rows + 2]`` int64, numbers from 0 on.
        query_start: the same in int32.
    """

    tables: Sequence[BlockTables]
    last_tokens: Tensor
    max_model_len: int
    row_state: dict[str, Tensor] = field(default_factory=dict)
    token_state: dict[str, int] = field(default_factory=dict)
    media: Tensor | None = None
    embed_tokens: Callable[[Tensor], Tensor] | None = None
    device: torch.device = field(init=False)
    max_rows: int = field(init=False)
    counting: Tensor = field(init=False)
    query_start: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.device = self.last_tokens.device
        self.max_rows = len(self.last_tokens) - 1
        self.counting = torch.arange(self.max_rows + 2, device=self.device)
        self.query_start = self.counting.to(torch.int32)

    def decode_batch(
        self, rows: Sequence[int], positions: Sequence[int], choice: Choice | None
    ) -> StepBatch:
        """A batch of rows that compute the token they sampled last, for a CPU.

        It is made without numpy. A model evicts the code and data of small calls from the CPU's
        caches, so that dozens of them take several times as long as alone.
        """
        count = len(rows)
        numbers = [*rows, *[position + 1 for position in positions], *positions]
        for table in self.tables:
            numbers += map(table.slot, rows, positions)
        return StepBatch(
            key=GraphKey(count, count, 0),
            numbers=torch.tensor(numbers),
            decodes=True,
            padded=False,
            embeds=False,
            max_query_len=1,
            max_kv_len=max(positions) + 1,
            places=range(count),
            sampled=range(count),
            choice=choice,
        )

    def batch(
        self,
        rows: Sequence[PlanRow],
        known: Mapping[int, KnownRow],
        choice: Choice | None = None,
        fit: Callable[[GraphKey], tuple[GraphKey, bool]] | None = None,
        media: Sequence[tuple[int, int, IntArray]] = (),
        *,
        whole: bool = False,
    ) -> StepBatch:
        """A batch of any rows.

        Args:
            rows: decode rows first.
            known: the host's state of each row of the persistent batch.
            choice: see :class:`StepBatch`.
            fit: gives the shape to pad to, from that of the rows, and whether a captured step has
                it; None for no padding. Where it has no decode rows, all are like rows of prompts.
            media: embeddings that come in: the index of the row, which of its tokens in this step
                takes the first one, and their rows of ``self.media``.
            whole: see :class:`StepBatch`.
        """
        given = np.array(
            [(row.row, row.start, row.num_tokens, row.sample) for row in rows], dtype=np.int64
        )
        numbers_of, first_of, lengths_of, samples_of = given.reshape(-1, 4).T
        longer = np.flatnonzero(lengths_of != 1)
        num_decode = int(longer[0]) if longer.size else len(rows)
        own = GraphKey(int(lengths_of.sum()), num_decode, len(rows) - num_decode)
        key, padded = (own, False) if fit is None else fit(own)
        num_decode = min(num_decode, key.decode_rows)
        gap = slice(num_decode, key.decode_rows)
        places = np.arange(len(rows))
        places[num_decode:] += key.decode_rows - num_decode

        layout = self._layout(key, decodes=False)
        size = max(part.stop for part in layout.values())
        on_gpu = self.device.type == "cuda"
        numbers = torch.empty(size, dtype=torch.int64, pin_memory=on_gpu)
        host = numbers.numpy()
        part = {name: host[where] for name, where in layout.items()}
        lengths, first = np.zeros((2, key.rows), dtype=np.int64)
        lengths[: key.decode_rows] = 1
        lengths[places], first[places] = lengths_of, first_of
        part["rows"][:] = self.max_rows
        part["rows"][places] = numbers_of
        part["kv_lens"][:] = 0
        part["kv_lens"][places] = first_of + lengths_of
        part["samples"][:] = 0
        part["samples"][places] = samples_of
        starts = part["starts"]
        starts[0] = 0
        np.cumsum(lengths, out=starts[1:])
        np.maximum(starts[1:] - 1, 0, out=part["last"])
        end = int(starts[-1])
        for name in ("row_ids", "positions", "token_ids"):
            part[name][end:] = 0
        part["row_ids"][:end] = np.repeat(np.arange(key.rows), lengths)
        positions = part["positions"][:end]
        positions[:] = np.arange(end) + np.repeat(first - starts[:-1], lengths)
        for group, table in enumerate(self.tables):
            slots = part[f"slots {group}"]
            slots[:end] = table.slots(part["rows"], lengths, positions)
            slots[gap] = slots[end:] = -1
        token_ids = part["token_ids"]
        token_ids[:end] = -1
        token_ids[gap] = 0
        state = {
            name: part[f"state {name}"].reshape(width, -1)
            for name, width in self.token_state.items()
        }
        for values in state.values():
            values[:] = 0
        if self.media is not None:
            part["media"][:] = -1
            for index, offset, values in media:
                begin = starts[places[index]] + offset
                part["media"][begin : begin + len(values)] = values
        for row, begin in zip(rows, starts[places].tolist(), strict=True):
            sequence, stop = known[row.row], row.start + row.num_tokens
            tokens = sequence.token_ids[row.start : stop]
            token_ids[begin : begin + len(tokens)] = tokens
            for name, values in sequence.token_state.items():
                piece = values[:, row.start : stop]
                state[name][:, begin : begin + piece.shape[1]] = piece
        max_query_len = key.tokens - key.decode_rows if padded else int(lengths.max())
        if padded and key.quick and rows:
            # It is launched for these rows alone. Each of its many rows has programs for so many
            # tokens, and there would be millions.
            longest = -(-int(lengths.max()) // QUICK_GRAIN) * QUICK_GRAIN
            max_query_len = min(max_query_len, longest)
        return StepBatch(
            key=key,
            numbers=numbers,
            decodes=False,
            padded=padded,
            # A captured step serves those with and those without.
            embeds=self.media is not None and (padded or len(media) > 0),
            max_query_len=max_query_len,
            max_kv_len=self.max_model_len if padded else int(part["kv_lens"].max()),
            places=places.tolist(),
            sampled=np.flatnonzero(samples_of).tolist(),
            choice=choice,
            whole=whole,
        )

    def split(self, batch: StepBatch, numbers: Tensor) -> dict[str, Tensor]:
        """The parts of a batch's numbers by name."""
        layout = self._layout(batch.key, decodes=batch.decodes)
        return {name: numbers[where] for name, where in layout.items()}

    def _layout(self, key: GraphKey, *, decodes: bool) -> dict[str, slice]:
        """Offsets of the parts of a batch of this shape among its numbers."""
        tokens, rows = key.tokens, key.rows
        sizes = {"rows": rows, "kv_lens": rows, "positions": tokens}
        sizes |= {f"slots {group}": tokens for group in range(len(self.tables))}
        if not decodes:
            sizes |= {"starts": rows + 1, "last": rows, "samples": rows}
            sizes |= {"row_ids": tokens, "token_ids": tokens}
            sizes |= {f"state {name}": k * tokens for name, k in self.token_state.items()}
            sizes |= {"media": tokens} if self.media is not None else {}
        grain = _ALIGNMENT if self.device.type == "cuda" else 1
        layout, begin = {}, 0
        for name, size in sizes.items():
            layout[name] = slice(begin, begin + size)
            begin += -(-size // grain) * grain
        return layout

    def context(self, batch: StepBatch, parts: Mapping[str, Tensor]) -> StepContext:
        """The model's context of a batch whose parts are on the device."""
        rows, tokens = parts["rows"], batch.key.tokens
        if batch.decodes:
            row_ids = self.counting[:tokens]
            query_start = self.query_start[: tokens + 1]
            input_ids = self.last_tokens[rows]
        else:
            row_ids = parts["row_ids"]
            query_start = parts["starts"].to(torch.int32)
            token_ids = parts["token_ids"]
            # Sampled by an earlier step: only the device is sure to have it already.
            input_ids = torch.where(token_ids < 0, self.last_tokens[rows][row_ids], token_ids)
        input_ids = input_ids.unsqueeze(0)
        return StepContext(
            input_ids=input_ids,
            inputs_embeds=self._merged(input_ids, parts["media"]) if batch.embeds else None,
            position_ids=parts["positions"].unsqueeze(0),
            row_ids=row_ids,
            attn_metadata=AttentionMetadata(
                query_start=query_start,
                kv_lens=parts["kv_lens"].to(torch.int32),
                max_query_len=batch.max_query_len,
                max_kv_len=batch.max_kv_len,
                num_decode_rows=batch.key.decode_rows,
                groups=tuple(
                    GroupMetadata(
                        table.device_table[rows, : -(-batch.max_kv_len // table.block_size)],
                        parts[f"slots {group}"],
                    )
                    for group, table in enumerate(self.tables)
                ),
            ),
            row_state=RowState(self.row_state, rows),
            token_state=self.no_token_state(tokens)
            if batch.decodes
            else {
                name: parts[f"state {name}"].view(width, tokens)
                for name, width in self.token_state.items()
            },
        )

    def _merged(self, input_ids: Tensor, places: Tensor) -> Tensor:
        """The embeddings ``[1, T, H]`` of tokens ``[1, T]``, but where others come in."""
        assert self.media is not None, "the model takes some"
        assert self.embed_tokens is not None, "the runner gives both"
        others = self.media[places.clamp(min=0)]
        return torch.where(places.unsqueeze(-1) < 0, self.embed_tokens(input_ids), others)

    def no_token_state(self, tokens: int) -> dict[str, Tensor]:
        """Token state of tokens that no prompt has."""
        return {
            name: torch.zeros(width, tokens, dtype=torch.int64, device=self.device)
            for name, width in self.token_state.items()
        }
