"""Decode steps as CUDA graphs, one a batch-size bucket, that need no input of the host."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_core.runtime.block_tables import BlockTables
from engine_core.step_context import AttentionMetadata, GroupMetadata, StepContext

# Powers of two, and from 16 on the half-way points too: a bucket is at most a third larger than
# the batch that runs in it.
_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
# Host buffers in rotation: more than there can be steps in flight.
_RING = 8


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step of one bucket, and the tensors that it leaves its results in."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor
    tokens: Tensor
    status: Tensor


class DecodeGraphs:
    """Captures and replays decode steps of the persistent batch.

    A replay takes each row's last token from the device, computes it at the row's position, leaves
    the most probable next token as the row's last one, and moves the position on: replayed again
    it computes the step after, without a word from the host. Rows of padding stand at position
    -1: they store nothing and stay where they are.
    """

    def __init__(
        self,
        logits_of: Callable[[StepContext], Tensor],
        tables: Sequence[BlockTables],
        last_tokens: Tensor,
        max_rows: int,
        max_model_len: int,
    ) -> None:
        """Nothing is captured yet.

        Args:
            logits_of: runs the model on a context of B rows of one token: ``[B, V]`` float32.
            tables: the block tables of each cache group.
            last_tokens: ``[max_rows + 1]`` int64, the token that each row sampled last.
            max_rows: rows of the persistent batch; that of padding comes after them.
            max_model_len: bounds the lengths that attention is captured for.
        """
        self._logits_of = logits_of
        self._tables = tables
        self._last_tokens = last_tokens
        self._max_rows = max_rows
        self._max_model_len = max_model_len
        device = last_tokens.device
        self._device = device
        self._buckets = [size for size in _BUCKETS if size < max_rows] + [max_rows]
        # Row numbers, then positions: what the host writes before the first replay of a plan.
        self._static = torch.full((2, max_rows), -1, dtype=torch.int64, device=device)
        self._static[0] = max_rows
        self._input_ring = [
            torch.empty(2, max_rows, dtype=torch.int64, pin_memory=True) for _ in range(_RING)
        ]
        self._turn = 0
        self._graphs: dict[int, _Graph] = {}
        self._row_state: Mapping[str, Tensor] = {}
        self._token_state: Mapping[str, int] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def set_state(self, row_state: Mapping[str, Tensor], token_state: Mapping[str, int]) -> None:
        """Name what families keep a row (``[max_rows + 1, ...]``) and a token (its width).

        Graphs captured with other names are dropped.
        """
        if row_state.keys() != self._row_state.keys() or token_state != self._token_state:
            self._graphs.clear()
            self._row_state = dict(row_state)
            self._token_state = dict(token_state)

    def capture_all(self) -> None:
        """Capture every bucket, the largest first so that the smaller ones reuse its memory."""
        for bucket in reversed(self._buckets):
            self._get(bucket)

    def begin(self, rows: Sequence[int], positions: Sequence[int]) -> int:
        """Set the rows, and the positions of the tokens they compute; returns the bucket."""
        count = len(rows)
        bucket = self._buckets[bisect_left(self._buckets, count)]
        # Capturing runs the step and so moves the static inputs; it comes before they are set.
        self._get(bucket)
        self._turn = (self._turn + 1) % _RING
        host = self._input_ring[self._turn].numpy()
        host[0, :count] = rows
        host[1, :count] = positions
        host[0, count:bucket] = self._max_rows
        host[1, count:bucket] = -1
        for line in range(2):
            self._static[line, :bucket].copy_(
                self._input_ring[self._turn][line, :bucket], non_blocking=True
            )
        for table in self._tables:
            table.flush()
        return bucket

    def replay(self, bucket: int) -> tuple[Tensor, Tensor, Tensor]:
        """Run the step once.

        Returns:
            Logits ``[bucket, V]`` float32, tokens ``[bucket]`` int64 and status ``[bucket]`` int8
            (1 where the logits are not finite), all overwritten by the next replay.
        """
        captured = self._graphs[bucket]
        captured.graph.replay()
        return captured.logits, captured.tokens, captured.status

    def _get(self, bucket: int) -> _Graph:
        if bucket not in self._graphs:
            self._graphs[bucket] = self._capture(bucket)
        return self._graphs[bucket]

    def _capture(self, bucket: int) -> _Graph:
        self._static[0] = self._max_rows
        self._static[1] = -1
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            # Compiles and tunes what a capture must not.
            self._step(bucket)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            logits, tokens, status = self._step(bucket)
        return _Graph(graph, logits, tokens, status)

    def _step(self, bucket: int) -> tuple[Tensor, Tensor, Tensor]:
        rows, positions = self._static[:, :bucket]
        logits = self._logits_of(self._context(rows, positions, bucket))
        status = (~logits.amax(dim=-1).isfinite()).to(torch.int8)
        tokens = logits.argmax(dim=-1)
        self._last_tokens[rows] = tokens
        positions += positions >= 0
        return logits, tokens, status

    def _context(self, rows: Tensor, positions: Tensor, bucket: int) -> StepContext:
        groups = []
        for table in self._tables:
            blocks = table.device_table[rows]
            column = (positions.clamp(min=0) // table.block_size).unsqueeze(-1)
            block = blocks.gather(-1, column).squeeze(-1).to(torch.int64)
            slots = block * table.block_size + positions % table.block_size
            groups.append(GroupMetadata(blocks, torch.where(positions < 0, positions, slots)))
        places = torch.arange(bucket + 1, device=self._device)
        return StepContext(
            input_ids=self._last_tokens[rows].unsqueeze(0),
            position_ids=positions.clamp(min=0).unsqueeze(0),
            row_ids=places[:bucket],
            attn_metadata=AttentionMetadata(
                query_start=places.to(torch.int32),
                kv_lens=(positions + 1).to(torch.int32),
                max_query_len=1,
                max_kv_len=self._max_model_len,
                num_decode_rows=bucket,
                groups=tuple(groups),
            ),
            row_state={name: state[rows] for name, state in self._row_state.items()},
            token_state={
                name: torch.zeros(width, bucket, dtype=torch.int64, device=self._device)
                for name, width in self._token_state.items()
            },
        )
