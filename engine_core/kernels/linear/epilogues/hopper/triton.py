"""The epilogues of few rows in Gluon, for kernels on Hopper that multiply as "wx".

They do what those of :mod:`engine_core.kernels.linear.epilogues.triton` do, whose tensors they are
given. KIND is "activated", "added" or "stored". HEAD_DIM is that of "stored", and 0 of the others;
a tile is then a head or a part of one, without a norm or codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from engine_core.kernels.activation.triton import activated
from engine_core.kernels.launch.gluon import Trial
from engine_core.kernels.launch.hopper.triton import sync_threads
from engine_core.kernels.launch.triton import arrival_counts
from engine_core.kernels.linear.epilogues.triton import Activated, Added, Stored
from engine_core.kernels.linear.reference import DeferredRMSNorm, taken_apart
from engine_core.kernels.linear.tiles import Tile


@gluon.constexpr_function
def out_layout(rows, cols, warps, halves):
    """Where threads have results ``[rows, cols]``: neighbours in neighbouring columns.

    With ``halves`` a thread that has a column of the left half has that of the right one too.
    """
    each = 4 if rows * cols >= 128 * warps else 2
    lanes = min(32, cols // each // (2 if halves else 1))
    return gl.BlockedLayout([1, each], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def halves_of(values):
    """The left and the right half of the columns, where threads have both."""
    ROWS: gl.constexpr = values.shape[0]
    COLS: gl.constexpr = values.shape[1] // 2
    OUT: gl.constexpr = out_layout(ROWS, COLS, gl.num_warps(), False)
    left, right = values.reshape([ROWS, 2, COLS]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, OUT), gl.convert_layout(right, OUT)


@gluon.jit
def output(tile, in_tile, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr):
    """The output that a column of a tile is; of heads, the left half rotates with the right one."""
    col = tile * BLOCK_N
    if HEAD_DIM:
        HALF: gl.constexpr = BLOCK_N // 2
        first = col // HEAD_DIM * HEAD_DIM + col % HEAD_DIM // 2
        result = first + in_tile % HALF + in_tile // HALF * (HEAD_DIM // 2)
    else:
        result = col + in_tile
    return result


@gluon.jit
def _rounded(x, like):
    """``x`` rounded to the type of what ``like`` points to, in float32."""
    return x.to(like.dtype.element_ty).to(gl.float32)


@gluon.jit
def _places(first_row, num_rows, tile, N, SHAPE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Of a tile's results: rows, whether there are such, and outputs."""
    OUT: gl.constexpr = out_layout(SHAPE[0], SHAPE[1], gl.num_warps(), HEAD_DIM > 0)
    rows = first_row + gl.arange(0, SHAPE[0], gl.SliceLayout(1, OUT)).to(gl.int64)
    in_tile = gl.arange(0, SHAPE[1], gl.SliceLayout(0, OUT))
    return rows, rows < num_rows, output(tile, in_tile, SHAPE[1], HEAD_DIM)


@gluon.jit
def _pair_places(first_row, num_rows, tile, SHAPE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Of pairs of a tile's results: rows, whether there are such, and dimensions of a head."""
    OUT: gl.constexpr = out_layout(SHAPE[0], SHAPE[1] // 2, gl.num_warps(), False)
    rows = first_row + gl.arange(0, SHAPE[0], gl.SliceLayout(1, OUT)).to(gl.int64)
    dims = gl.arange(0, SHAPE[1] // 2, gl.SliceLayout(0, OUT))
    return rows, rows < num_rows, tile * SHAPE[1] % HEAD_DIM // 2 + dims


@gluon.jit
def ask_weights(
    epilogue, bias_ptr, tile, N, SHAPE: gl.constexpr, KIND: gl.constexpr, HEAD_DIM: gl.constexpr
):
    """Values older than all kernels: biases, and the weight of a norm; 0 where there is none."""
    _rows, _mask, cols = _places(0, 0, tile, N, SHAPE, HEAD_DIM)
    bias = 0.0
    up_bias = 0.0
    weight = 0.0
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)
        if epilogue.GATED:
            up_bias = gl.load(bias_ptr + N + cols, mask=cols < N, other=0.0).to(gl.float32)
    if KIND == "added":
        weight = gl.load(epilogue.norm_weight + cols, mask=cols < N, other=0.0).to(gl.float32)
        if epilogue.OFFSET != 0:
            weight += epilogue.OFFSET
    return bias, up_bias, weight


@gluon.jit
def _ask_squares(squares_ptr, rows, row_mask, SQUARES: gl.constexpr, OUT: gl.constexpr):
    """The squares of rows as the linear before added them up, a sum a tile of its own."""
    PARTS: gl.constexpr = triton.next_power_of_2(SQUARES)
    parts = gl.arange(0, PARTS, gl.SliceLayout(0, OUT))
    places = gl.expand_dims(rows, 1) * SQUARES + gl.expand_dims(parts, 0)
    inside = gl.expand_dims(row_mask, 1) & gl.expand_dims(parts < SQUARES, 0)
    return gl.load(squares_ptr + places, mask=inside, other=0.0)


@gluon.jit
def _inverse_of(squares, K, eps):
    """One by the root of the mean square of each row."""
    return 1.0 / gl.sqrt(gl.sum(squares, axis=1) / K + eps)


@gluon.jit
def ask_inverse(
    squares_ptr, eps, first_row, num_rows, N, K, SHAPE: gl.constexpr, SQUARES: gl.constexpr,
):  # fmt: skip
    """The factors ``[BLOCK_M]`` that :func:`finish` finds if SQUARES, before there are products.

    A thread has but a few of them, so that they may wait in registers.
    """
    OUT: gl.constexpr = out_layout(SHAPE[0], SHAPE[1], gl.num_warps(), False)
    rows, row_mask, _cols = _places(first_row, num_rows, 0, N, SHAPE, 0)
    squares = _ask_squares(squares_ptr, rows, row_mask, SQUARES, OUT)
    return _inverse_of(squares, K, eps)


@gluon.jit
def ask_rows(
    epilogue, squares_ptr, first_row, num_rows, tile, N, SHAPE: gl.constexpr, KIND: gl.constexpr,
    SQUARES: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Values that the kernels before wrote: squares, and residuals or slots and angles; else 0."""
    OUT: gl.constexpr = out_layout(SHAPE[0], SHAPE[1], gl.num_warps(), HEAD_DIM > 0)
    rows, row_mask, cols = _places(first_row, num_rows, tile, N, SHAPE, HEAD_DIM)
    squares = 0.0
    if SQUARES:
        squares = _ask_squares(squares_ptr, rows, row_mask, SQUARES, OUT)
    first = 0.0
    second = 0.0
    third = 0.0
    if KIND == "added":
        mask = gl.expand_dims(row_mask, 1) & gl.expand_dims(cols < N, 0)
        offsets = gl.expand_dims(rows, 1) * N + gl.expand_dims(cols, 0)
        first = gl.load(epilogue.residual + offsets, mask=mask, other=0.0)
    if KIND == "stored":
        HALF: gl.constexpr = HEAD_DIM // 2
        rows, row_mask, dims = _pair_places(first_row, num_rows, tile, SHAPE, HEAD_DIM)
        head = tile * SHAPE[1] // HEAD_DIM
        first = gl.load(epilogue.slots + rows, mask=row_mask, other=-1)
        if epilogue.cos is not None:
            rotates = row_mask & (head < epilogue.NUM_HEADS + epilogue.NUM_KV_HEADS)
            mask = gl.expand_dims(rotates, 1) & gl.expand_dims(dims < HALF, 0)
            places = gl.expand_dims(rows, 1) * HALF + gl.expand_dims(dims, 0)
            second = gl.load(epilogue.cos + places, mask=mask, other=0.0)
            third = gl.load(epilogue.sin + places, mask=mask, other=0.0)
    return squares, first, second, third


@gluon.jit
def _activate(epilogue, total, up, rows, row_mask, cols, N):
    """As :class:`Activated`."""
    if epilogue.ACTIVATION is not None:
        total = activated(_rounded(total, epilogue.out), epilogue.ACTIVATION)
    if epilogue.GATED:
        total *= _rounded(up, epilogue.out)
    offsets = gl.expand_dims(rows, 1) * N + gl.expand_dims(cols, 0)
    mask = gl.expand_dims(row_mask, 1) & gl.expand_dims(cols < N, 0)
    gl.store(epilogue.out + offsets, total.to(epilogue.out.dtype.element_ty), mask=mask)


@gluon.jit
def _add_and_weigh(epilogue, tile, tiles, total, residual, weight, rows, row_mask, cols, N):
    """As :class:`Added`."""
    ELEMENT: gl.constexpr = epilogue.out.dtype.element_ty
    offsets = gl.expand_dims(rows, 1) * N + gl.expand_dims(cols, 0)
    mask = gl.expand_dims(row_mask, 1) & gl.expand_dims(cols < N, 0)
    total = (_rounded(total, epilogue.out) + residual.to(gl.float32)).to(ELEMENT)
    gl.store(epilogue.total + offsets, total, mask=mask)
    total = gl.where(mask, total.to(gl.float32), 0.0)
    squares = gl.sum(total * total, axis=1)
    gl.store(epilogue.squares + rows * tiles + tile, squares, mask=row_mask)
    gl.store(epilogue.out + offsets, (total * gl.expand_dims(weight, 0)).to(ELEMENT), mask=mask)


@gluon.jit
def _store_pairs(ptrs, dims, a, b, mask, HALF: gl.constexpr):
    gl.store(ptrs + dims, a, mask=mask)
    gl.store(ptrs + dims + HALF, b, mask=mask)


@gluon.jit
def _store_in_cache(cache, strides, head, slots, dims, a, b, mask, SIZE, HALF: gl.constexpr):
    """Store pairs of a head in its cache, of blocks of SIZE; not where slots are negative."""
    block_stride, slot_stride, head_stride = strides
    ptrs = cache + (slots // SIZE * block_stride + slots % SIZE * slot_stride + head * head_stride)
    stored = mask & gl.expand_dims(slots >= 0, 1)
    _store_pairs(gl.expand_dims(ptrs, 1), dims, a, b, stored, HALF)


@gluon.jit
def _rotate_and_store(epilogue, tile, total, slots, cos, sin, first_row, num_rows):
    """As :class:`Stored`, of a tile that is a head or a part of one, without a norm or codes."""
    ELEMENT: gl.constexpr = epilogue.out.dtype.element_ty
    D: gl.constexpr = epilogue.HEAD_DIM
    HALF: gl.constexpr = D // 2
    rows, row_mask, dims = _pair_places(first_row, num_rows, tile, total.shape, D)
    a, b = halves_of(_rounded(total, epilogue.out))
    head = tile * total.shape[1] // D
    mask = gl.expand_dims(row_mask, 1) & gl.expand_dims(dims < HALF, 0)
    dims = gl.expand_dims(dims, 0)
    if epilogue.cos is not None:  # noqa: SIM102
        # Only the outer one is known to the compiler.
        if head < epilogue.NUM_HEADS + epilogue.NUM_KV_HEADS:
            # As engine_core.kernels.rotary.triton.rotated.
            turned = gl.fma(a, cos, -(b * sin))
            b = gl.fma(b, cos, a * sin)
            a = turned
    a = a.to(ELEMENT)
    b = b.to(ELEMENT)
    if head < epilogue.NUM_HEADS:
        out = epilogue.out + gl.expand_dims(rows, 1) * (epilogue.NUM_HEADS * D) + head * D
        _store_pairs(out, dims, a, b, mask, HALF)
    else:
        kv_head = head - epilogue.NUM_HEADS
        if kv_head < epilogue.NUM_KV_HEADS:
            _store_in_cache(
                epilogue.k_cache, epilogue.k_strides, kv_head, slots, dims, a, b, mask,
                epilogue.BLOCK_SIZE, HALF,
            )  # fmt: skip
        else:
            _store_in_cache(
                epilogue.v_cache, epilogue.v_strides, kv_head - epilogue.NUM_KV_HEADS, slots, dims,
                a, b, mask, epilogue.BLOCK_SIZE, HALF,
            )  # fmt: skip


@gluon.jit
def finish(
    epilogue, total, up, weights, asked, eps, first_row, num_rows, tile, tiles, N, K,
    SHAPE: gl.constexpr, KIND: gl.constexpr, SQUARES: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Apply the epilogue to products ``[BLOCK_M, BLOCK_N]``, and store.

    ``weights`` and ``asked`` are what :func:`ask_weights` and :func:`ask_rows` gave; ``up`` is
    looked at if GATED.
    """
    rows, row_mask, cols = _places(first_row, num_rows, tile, N, SHAPE, HEAD_DIM)
    bias, up_bias, weight = weights
    squares, first, second, third = asked
    if SQUARES:
        inverse = gl.expand_dims(_inverse_of(squares, K, eps), 1)
        total *= inverse
        if epilogue.GATED:
            up *= inverse
    if bias.type.is_block():
        total += gl.expand_dims(bias, 0)
        if epilogue.GATED:
            up += gl.expand_dims(up_bias, 0)
    if KIND == "stored":
        _rotate_and_store(epilogue, tile, total, first, second, third, first_row, num_rows)
    elif KIND == "added":
        _add_and_weigh(epilogue, tile, tiles, total, first, weight, rows, row_mask, cols, N)
    else:
        _activate(epilogue, total, up, rows, row_mask, cols, N)


@gluon.jit
def partial_offsets(
    tile, first_row, num_rows, N, ROWS: gl.constexpr, COLS: gl.constexpr, LAYOUT: gl.constexpr
):
    """From the start of a split's results, by the order of tiles, and whether they are inside."""
    rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    cols = tile * COLS + gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
    mask = gl.expand_dims(rows < num_rows, 1) & gl.expand_dims(cols < N, 0)
    return gl.expand_dims(rows, 1) * N + gl.expand_dims(cols, 0), mask


@gluon.jit
def sum_splits(
    partial_ptr, tile, first_row, num_rows, N, size, SPLITS: gl.constexpr, ROWS: gl.constexpr,
    COLS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The splits' results, always added in the same order."""
    offsets, mask = partial_offsets(tile, first_row, num_rows, N, ROWS, COLS, LAYOUT)
    ptrs = partial_ptr + offsets
    acc = gl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    for split in gl.static_range(1, SPLITS):
        acc += gl.load(ptrs + split * size, mask=mask, other=0.0, cache_modifier=".cg")
    return acc


@gluon.jit
def conclude(
    epilogue, acc, up, bias_ptr, squares_ptr, partial_ptr, arrivals_ptr, eps, tile, split, block,
    num_rows, N, K, SPLITS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    KIND: gl.constexpr, SQUARES: gl.constexpr, HEAD_DIM: gl.constexpr, tiles=None,
):  # fmt: skip
    """Apply the epilogue to a split's products ``[BLOCK_N, BLOCK_M]``; the last split to all.

    There are so many ``tiles``, or else as many as programs.
    """
    if tiles is None:
        tiles = gl.num_programs(0)
    WARPS: gl.constexpr = gl.num_warps()
    OUT: gl.constexpr = out_layout(BLOCK_M, BLOCK_N, WARPS, HEAD_DIM > 0)
    SHAPE: gl.constexpr = (BLOCK_M, BLOCK_N)
    first_row = block * BLOCK_M
    acc = acc.permute((1, 0))
    up = up.permute((1, 0))
    if SPLITS == 1:
        weights = ask_weights(epilogue, bias_ptr, tile, N, SHAPE, KIND, HEAD_DIM)
        asked = ask_rows(
            epilogue, squares_ptr, first_row, num_rows, tile, N, SHAPE, KIND, SQUARES, HEAD_DIM
        )
        finish(
            epilogue, gl.convert_layout(acc, OUT), gl.convert_layout(up, OUT), weights, asked, eps,
            first_row, num_rows, tile, tiles, N, K, SHAPE, KIND, SQUARES, HEAD_DIM,
        )  # fmt: skip
    else:
        part = num_rows * N
        size = part * 2 if epilogue.GATED else part
        PRODUCTS: gl.constexpr = acc.type.layout
        offsets, mask = partial_offsets(tile, first_row, num_rows, N, BLOCK_M, BLOCK_N, PRODUCTS)
        gl.store(partial_ptr + split * size + offsets, acc, mask=mask)
        if epilogue.GATED:
            gl.store(partial_ptr + split * size + part + offsets, up, mask=mask)
        arrivals_ptr += block * tiles + tile
        sync_threads()
        if gl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == SPLITS - 1:
            gl.store(arrivals_ptr, 0)
            total = sum_splits(
                partial_ptr, tile, first_row, num_rows, N, size, SPLITS, BLOCK_M, BLOCK_N, OUT
            )
            total_up = total
            if epilogue.GATED:
                total_up = sum_splits(
                    partial_ptr + part, tile, first_row, num_rows, N, size, SPLITS, BLOCK_M,
                    BLOCK_N, OUT,
                )  # fmt: skip
            weights = ask_weights(epilogue, bias_ptr, tile, N, SHAPE, KIND, HEAD_DIM)
            asked = ask_rows(
                epilogue, squares_ptr, first_row, num_rows, tile, N, SHAPE, KIND, SQUARES, HEAD_DIM
            )
            finish(
                epilogue, total, total_up, weights, asked, eps, first_row, num_rows, tile,
                tiles, N, K, SHAPE, KIND, SQUARES, HEAD_DIM,
            )  # fmt: skip


def rows_of_program(tile: Tile, rows: int) -> int:
    """BLOCK_M of so many rows."""
    block_m: int = triton.next_power_of_2(rows)
    return min(tile.most_rows, max(tile.least_rows, block_m))


def kind_of(epilogue: Any) -> str:
    """KIND of an epilogue."""
    if isinstance(epilogue, Stored):
        return "stored"
    return "added" if isinstance(epilogue, Added) else "activated"


def takes_rows(x: Tensor) -> bool:
    """Whether the tensor memory accelerator can bring rows of ``x [..., K]``, of 16 bits."""
    rows = x.reshape(-1, x.shape[-1])
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and rows.data_ptr() % 16 == 0
        and rows.stride(0) > 0
        and rows.stride(0) % 8 == 0
        and rows.stride(1) == 1
    )


class Launch(NamedTuple):
    """Arguments of a launch of these kernels, whatever form the weight has.

    Attributes:
        rows: x, ``[M, K]``.
        block_m: rows of a program.
        grid: tiles, splits and blocks of rows.
        kind: KIND.
        given: the arguments from ``epilogue`` to ``N``.
        constants: by their names.
    """

    rows: Tensor
    block_m: int
    grid: tuple[int, int, int]
    kind: str
    given: tuple[Any, ...]
    constants: dict[str, Any]

    @classmethod
    def of(
        cls,
        x: Tensor | DeferredRMSNorm,
        outputs: int,
        epilogue: Any,
        tile: Tile,
        bias: Tensor | None,
        block_n: int | None = None,
    ) -> Launch:
        """Of a weight of so many rows, ``block_n`` a tile, if that is not the tile's."""
        values, squares, eps = taken_apart(x)
        rows = values.reshape(-1, values.shape[-1])
        parts = 2 if epilogue.GATED.value else 1
        n, block_n = outputs // parts, block_n or tile.block_n
        block_m = rows_of_program(tile, len(rows))
        blocks, tiles = triton.cdiv(len(rows), block_m), triton.cdiv(n, block_n)
        # Those of a second product arrive by themselves, as the block of so many rows that it is.
        arriving = blocks
        if tile.more_rows:
            assert block_m < len(rows) <= block_m + tile.more_rows, "a program has all rows"
            blocks, arriving = 1, block_m // tile.more_rows + 1
        partial = arrivals = None
        if tile.splits > 1:
            # Where splits leave their sums, in the order of tiles, and arrive.
            shape = (tile.splits, parts, len(rows), tiles * block_n)
            partial = torch.empty(shape, dtype=torch.float32, device=rows.device)
            arrivals = arrival_counts(rows.device, tiles * arriving)
        kind = kind_of(epilogue)
        return cls(
            rows,
            block_m,
            (tiles, tile.splits, blocks),
            kind,
            (epilogue, bias, squares, partial, arrivals, eps, len(rows), n),
            {
                "BLOCK_M": block_m,
                "SPLITS": tile.splits,
                "KIND": kind,
                "SQUARES": 0 if squares is None else squares.shape[1],
                "num_warps": tile.num_warps,
                "maxnreg": tile.max_registers or None,
            },
        )


def trial_of(
    ending: str, x: Tensor, product: Tensor, tile: Tile, launch: Callable[[Any], Tensor]
) -> Trial:
    """A small case of a kernel, ``launch``, which is given an epilogue.

    Args:
        ending: what follows the products: "activated", "gated", "added" or "stored".
        x: ``[M, K]``.
        product: ``[M, N]`` float32, what is to follow from x.
        tile: the kernel's.
        launch: returns the epilogue's ``out``.
    """
    n = product.shape[1]
    if ending == "stored":
        return _trial_of_heads(x, product, launch)
    if ending != "added":
        expected = product
        if ending == "gated":
            gate, up = product.chunk(2, -1)
            expected = torch.nn.functional.silu(gate) * up
        return Trial(lambda: launch(Activated.of(x, n, ending == "gated")), expected)
    draw = torch.Generator(x.device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=x.device).to(x.dtype) / 2

    residual, norm_weight = normal(*product.shape), normal(n)
    total = product + residual.float()
    squares = total.square().mean(1, keepdim=True)

    def run() -> Tensor:
        added = Added.of(residual, norm_weight, tile)
        out = launch(added)
        squares = added.squares.sum(1, keepdim=True) / n
        return torch.cat((out, added.total, squares.to(out.dtype)), 1)

    return Trial(run, torch.cat((total * norm_weight.float(), total, squares), 1))


def _trial_of_heads(x: Tensor, product: Tensor, launch: Callable[[Any], Tensor]) -> Trial:
    """Two heads of queries and one of keys and values, of two tiles each."""
    rows, n = product.shape
    dim = n // 4
    angles = torch.arange(rows * dim // 2, device=x.device).view(rows, 1, -1) / 7
    a, b = product.view(rows, 4, 2, -1)[:, :3].unbind(2)
    turned = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
    expected = torch.cat((torch.cat(turned, -1).flatten(1), product[:, 3 * dim :]), 1)

    def run() -> Tensor:
        caches = x.new_zeros(2, rows, 1, 1, dim)
        slots = torch.arange(rows, device=x.device).flip(0)
        cos, sin = angles.cos().flatten(1), angles.sin().flatten(1)
        q = launch(Stored.of(n, cos, sin, caches[0], caches[1], slots, False))
        return torch.cat((q.flatten(1), *(cache.flip(0).view(rows, -1) for cache in caches)), 1)

    return Trial(run, expected)
