"""Decode attention of several layers behind the linears that store its tokens, step after step.

On a GPU the steps are replays of one CUDA graph, as in the engine: attention of few rows asks for
earlier steps' tokens before the linear ahead of it is complete.
"""

from __future__ import annotations

import pytest
import torch
from kernel_cases import TOLERANCE, error
from torch import Tensor

from engine_core.kernels import linear_rotary_store, paged_attention
from engine_core.kernels.attention import reference

LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH = 6, 14, 2, 64, 896
BLOCK_SIZE, BLOCKS_OF_ROW, LONGEST = 64, 20, 1280
SCALE = HEAD_DIM**-0.5


class Steps:
    """Layers with weights and caches of their own, and rows that have seen some tokens."""

    def __init__(self, rows: int, device: str) -> None:
        torch.manual_seed(rows)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).bfloat16()

        blocks = rows * BLOCKS_OF_ROW
        outputs = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.x = normal(LAYERS, rows, WIDTH)
        self.weights = normal(LAYERS, outputs, WIDTH) / WIDTH**0.5
        self.caches = normal(LAYERS, 2, blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.angles = torch.rand(2, rows, HEAD_DIM // 2, device=device)
        self.lens = torch.randint(1, LONGEST - 64, (rows,), device=device).int()
        self.lens[0] = BLOCK_SIZE - 2  # soon at the beginning of a block
        tables = torch.randperm(blocks, device=device).view(rows, BLOCKS_OF_ROW)
        self.tables = tables.int()
        self.starts = torch.arange(rows + 1, device=device).int()
        self.slots = torch.zeros(rows, dtype=torch.int64, device=device)

    def next(self) -> None:
        """Another token of each row, of other layers' inputs."""
        position = self.lens.long()
        block = self.tables.gather(1, (position // BLOCK_SIZE)[:, None])[:, 0]
        self.slots.copy_(block * BLOCK_SIZE + position % BLOCK_SIZE)
        self.lens += 1
        self.x.copy_(self.x.roll(1, 0))

    def run(self) -> list[tuple[Tensor, Tensor]]:
        """Queries of each layer, and what they attend to."""
        memo: dict[object, object] = {}
        found = []
        for x, weight, (keys, values) in zip(self.x, self.weights, self.caches, strict=True):
            q = linear_rotary_store(x, weight, None, *self.angles, keys, values, self.slots)
            out = paged_attention(
                q, keys, values, block_tables=self.tables, query_start=self.starts,
                kv_lens=self.lens, max_query_len=1, max_kv_len=LONGEST, num_decode_rows=len(q),
                scale=SCALE, memo=memo,
            )  # fmt: skip
            found.append((q, out))
        return found

    def expected(self, q: Tensor, layer: int) -> Tensor:
        """Attention of a layer, by the reference."""
        keys, values = self.caches[layer].float()
        out = torch.empty_like(q, dtype=torch.float32)
        reference.paged_attention(
            q.float(), keys, values, out, block_tables=self.tables, query_start=self.starts,
            kv_lens=self.lens, scale=SCALE,
        )  # fmt: skip
        return out


@pytest.mark.parametrize(
    "rows", [2, *(pytest.param(rows, marks=pytest.mark.gpu) for rows in (1, 4, 16, 33, 64, 100))]
)
def test_each_step_sees_all_tokens_with_the_last(rows: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = Steps(rows, device)
    found, graph = steps.run(), None
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = steps.run()
    # On a CPU there is no graph, and a few show that the test itself is right.
    for step in range(64 if graph else 3):
        steps.next()
        if graph is None:
            found = steps.run()
        else:
            graph.replay()
        for layer in range(LAYERS if step % 8 == 0 else 1):
            q, out = found[layer]
            assert error(out, steps.expected(q, layer)) < TOLERANCE[torch.bfloat16]
