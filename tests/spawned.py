"""Targets of spawned processes, which cannot import a test's own module."""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch
import torch.distributed
from torch import Tensor

from engine_core.nn.distributed import all_reduce
from engine_core.runtime.ring import MessageRing
from engine_core.step_context import BuildContext

# The last three are above what is gathered whole; two of them do not divide by the ranks.
SHAPES = [(1, 8), (1, 577), (3, 577), (257, 577), (512, 576), (523, 577)]
DTYPES = [torch.float32, torch.bfloat16]


def terms(rank: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A rank's term; that of fewer rows is the beginning of that of more."""
    generator = torch.Generator().manual_seed(rank)
    largest = torch.randn(SHAPES[-1], generator=generator) * 10.0 ** (rank % 3)
    return largest[: shape[0], : shape[1]].to(dtype).contiguous()


def add_up(rank: int, size: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size
    )
    group = torch.distributed.group.WORLD
    context = BuildContext(tp_rank=rank, tp_size=size, process_group=group)
    sums = {
        (shape, dtype): all_reduce(terms(rank, shape, dtype), context)
        for shape in SHAPES
        for dtype in DTYPES
    }
    torch.save(sums, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def echo(ring: MessageRing, connection: Connection) -> None:
    while True:
        message = ring.read(connection.recv_bytes(), 0)
        connection.send(message)
        if message is None:
            return
