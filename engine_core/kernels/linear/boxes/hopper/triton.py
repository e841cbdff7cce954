"""Boxes of a weight's rows on Hopper: what the tensor memory accelerator brings of them at once.

The rows of a program need not be neighbours in the weight: with a gate they are so many of it and
as many of up, and of heads as many of both halves. One box has both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine_core.kernels.launch.hopper.triton import sync_threads, tma_load
from engine_core.kernels.linear.epilogues.hopper.triton import Launch


@gluon.constexpr_function
def rows_layout(rows, width, warps, register, lane):
    """``[rows, width]`` in tiles of 16 rows, ``register`` columns for each of ``lane`` lanes.

    A thread has those rows of the first operand that the matrix units want of it.
    """
    registers, column = [], 1
    while column < register:
        registers.append([0, column])
        column *= 2
    lanes = []
    while column < register * lane:
        lanes.append([0, column])
        column *= 2
    # Fewer columns than lanes are the same in some of these.
    lanes += [[0, 0]] * (2 - len(lanes)) + [[1, 0], [2, 0], [4, 0]]
    registers.append([8, 0])
    while column < width:
        registers.append([0, column])
        column *= 2
    of_warps, size = [], 16
    while size < 16 * warps:
        of_warps.append([size, 0])
        size *= 2
    while size < rows:
        registers.append([size, 0])
        size *= 2
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [rows, width])


@gluon.jit
def room(desc, STAGES: gl.constexpr):
    """Shared memory for boxes of a tensor."""
    SHAPE: gl.constexpr = desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, [STAGES] + SHAPE, desc.layout)  # noqa: RUF005 (Triton unpacks none)


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """So many barriers, each of one arrival; what was stored before is seen by the matrix units."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(COUNT):
        mbarrier.init(made.index(each), count=1)
    fence_async_shared()
    sync_threads()
    return made


@gluon.jit
def place_of(tile, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr):
    """The head of a program's rows, 0 without heads, and the first of them in a half."""
    row = tile * BLOCK_N
    head = 0
    if HEAD_DIM:
        head = row // HEAD_DIM
        row = row % HEAD_DIM // 2
    return head, row


@gluon.jit
def load_box(
    desc, boxes, barrier, stage, head, row, run, pred, DEPTH: gl.constexpr = 1,
    WIDTH: gl.constexpr = 1,
):  # fmt: skip
    """Begin to load a stage's box of :class:`Boxes`: DEPTH runs of columns of all rows.

    WIDTH is that of a row in one of :meth:`Boxes.across`.
    """
    SHAPE: gl.constexpr = desc.block_type.shape
    first = run * (SHAPE[0] // DEPTH)
    if len(SHAPE) == 5:
        tma_load(desc, [first, head, 0, row, 0], barrier, boxes.index(stage), pred=pred)
    else:
        tma_load(desc, [first, head, 0, row * WIDTH], barrier, boxes.index(stage), pred=pred)


@gluon.jit
def float_of(values, LAYOUT: gl.constexpr):
    """Of each row, ``[rows, 1]`` in shared memory, in float32 and of this layout."""
    ROWS: gl.constexpr = values.shape[0]
    found = values.load(rows_layout(ROWS, 1, gl.num_warps(), 1, 1)).reshape([ROWS])
    return gl.convert_layout(found.to(gl.float32), LAYOUT)


class Boxes(NamedTuple):
    """How the rows of a weight are parted.

    Attributes:
        heads: of all rows; 1 without heads.
        halves: of a head, or the gate and up; 1 if there are none.
        rows: of a half.
        box: rows of a half that a program has.
    """

    heads: int
    halves: int
    rows: int
    box: int

    @classmethod
    def of(cls, launch: Launch, epilogue: Any, outputs: int, block_n: int) -> Boxes:
        """Of a weight of so many rows, ``block_n`` outputs a program."""
        head_dim = epilogue.HEAD_DIM.value if launch.kind == "stored" else 0
        heads = outputs // head_dim if head_dim else 1
        halves = 2 if head_dim or epilogue.GATED.value else 1
        box = block_n // 2 if head_dim else block_n
        return cls(heads, halves, outputs // (heads * halves), box)

    def along(self, weight: Tensor, width: int, at_once: int) -> TensorDescriptor:
        """Rows of ``weight [N, ...]``: ``at_once`` runs of ``width`` values, one after another."""
        row, size = weight[0].numel(), weight.itemsize
        swizzle = width * size if width * size >= 32 else 0
        return TensorDescriptor(
            weight,
            [row // width, self.heads, self.halves, self.rows, width],
            [width, self.halves * self.rows * row, self.rows * row, row, 1],
            [at_once, 1, self.halves, self.box, width],
            gl.NVMMASharedLayout(swizzle, 8 * size, rank=5),
        )

    def across(self, values: Tensor, at_once: int) -> TensorDescriptor:
        """``values [groups, N]``, or some neighbours of each row, of so many groups at once."""
        width = values[0].numel() // (self.heads * self.halves * self.rows)
        return TensorDescriptor.from_tensor(
            values.view(-1, self.heads, self.halves, self.rows * width),
            [at_once, 1, self.halves, self.box * width],
            gl.NVMMASharedLayout(0, 8 * values.itemsize, rank=4),
        )
