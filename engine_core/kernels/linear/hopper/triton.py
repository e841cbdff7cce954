"""Activated linears of many rows on Hopper, in Gluon, which is Triton's language below the tile.

One warp brings tiles to shared memory with the tensor memory accelerator, and two or three warp
groups multiply, each 64 rows of a tile; of a gated linear half of its columns are the gate's, half
those of up. Programs stay on their multiprocessor and take tiles in turn: the loads of the next
begin while this one's results are stored.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine_core.kernels.activation import reference
from engine_core.kernels.launch.gluon import Family, Trial
from engine_core.kernels.launch.hopper.triton import (
    launch_dependents,
    reinterpret,
    sync_threads,
    tma_load,
    tma_store,
    wait,
)
from engine_core.kernels.launch.triton import num_multiprocessors, pdl_options
from engine_core.kernels.linear.reference import DeferredRMSNorm, taken_apart

_FAMILY = Family("gate and up", "These and their activation take up to a fifth longer")
_UNGATED = Family("linears with a quick GELU", "The activation is a launch of its own")

# Rows of a warp group, and a step of K, which is the 128 bytes of the widest swizzle.
_ROWS = gl.constexpr(64)
_STEP = gl.constexpr(64)
WIDE = 128
# Bytes of shared memory of a program, but for its barriers; steps in flight at most.
_SHARED, _MOST_STAGES = 226 * 1024, 6
# Tiles of rows that share the tiles of the weight that they meet in the L2 cache.
_ROW_TILES = gl.constexpr(8)


@gluon.jit
def _place(
    tile,
    row_tiles,
    col_tiles,
    GROUPS: gl.constexpr,
    WIDTH: gl.constexpr,
    MORE: gl.constexpr,
    GATED: gl.constexpr,
):
    """Where a tile's rows and columns begin."""
    COLS: gl.constexpr = WIDTH + MORE if GATED else 2 * WIDTH
    of_group = _ROW_TILES * col_tiles
    first = tile // of_group * _ROW_TILES
    size = gl.minimum(row_tiles - first, _ROW_TILES)
    return (first + tile % of_group % size) * (GROUPS * _ROWS), tile % of_group // size * COLS


@gluon.jit
def _load_weight(
    desc,
    more_desc,
    boxes,
    more_boxes,
    barrier,
    stage,
    col,
    k,
    N,
    MORE: gl.constexpr,
    GATED: gl.constexpr,
):
    """Begin to load a tile of the weight: rows of the gate, then those of up."""
    WIDTH: gl.constexpr = boxes.shape[1]
    apart = N if GATED else WIDTH
    for part in gl.static_range(2):
        place = boxes.index(stage * 2 + part)
        tma_load(desc, [part * apart + col, k], barrier, place)
        if MORE:
            more = more_boxes.index(stage * 2 + part)
            tma_load(more_desc, [part * apart + col + WIDTH, k], barrier, more)


@gluon.jit
def _load(
    x_desc,
    weight_desc,
    more_desc,
    x_smem,
    weight_smem,
    more_smem,
    full,
    empty,
    row_tiles,
    col_tiles,
    steps,
    N,
    WIDTH: gl.constexpr,
    MORE: gl.constexpr,
    GATED: gl.constexpr,
    FRESH: gl.constexpr,
    PDL: gl.constexpr,
):
    """The warp that loads."""
    STAGES: gl.constexpr = weight_smem.shape[0]
    GROUPS: gl.constexpr = x_smem.shape[0] // STAGES
    BYTES: gl.constexpr = (GROUPS * _ROWS + 2 * WIDTH + 2 * MORE) * _STEP * 2
    swizzle: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    boxes = reinterpret(weight_smem, weight_desc.dtype, [STAGES * 2, WIDTH, _STEP], swizzle)
    more_boxes = boxes
    if MORE:
        more_boxes = reinterpret(more_smem, weight_desc.dtype, [STAGES * 2, MORE, _STEP], swizzle)
    # A weight that is older than all kernels does not wait for x with its first tiles.
    if FRESH:
        wait(PDL)
    _, col = _place(gl.program_id(0), row_tiles, col_tiles, GROUPS, WIDTH, MORE, GATED)
    preloaded = gl.minimum(steps, STAGES)
    for stage in range(preloaded):
        barrier = full.index(stage)
        mbarrier.expect(barrier, BYTES)
        _load_weight(
            *(weight_desc, more_desc, boxes, more_boxes, barrier, stage, col, stage * _STEP, N),
            *(MORE, GATED),
        )
    wait(PDL)
    loaded = 0
    for tile in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
        row, col = _place(tile, row_tiles, col_tiles, GROUPS, WIDTH, MORE, GATED)
        for step in range(steps):
            stage = loaded % STAGES
            barrier = full.index(stage)
            if loaded >= preloaded:
                mbarrier.wait(empty.index(stage), (loaded // STAGES & 1) ^ 1)
                mbarrier.expect(barrier, BYTES)
                _load_weight(
                    *(weight_desc, more_desc, boxes, more_boxes, barrier, stage, col),
                    *(step * _STEP, N, MORE, GATED),
                )
            for group in gl.static_range(GROUPS):
                place = x_smem.index(stage * GROUPS + group)
                coordinates = [row + group * _ROWS, step * _STEP]
                tma_load(x_desc, coordinates, barrier, place)
            loaded += 1


@gluon.jit
def _halves(y):
    """The left and the right half of the columns, both in the registers that they are in."""
    COLS: gl.constexpr = y.shape[1]
    return y.reshape([_ROWS, 2, COLS // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _rounded(x, ELEMENT: gl.constexpr):
    """``x`` rounded to ELEMENT and back, two at a time: one alone takes a slow conversion."""
    if ELEMENT.is_bf16():
        x = gl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2;"
            " shl.b32 $0, t, 16; and.b32 $1, t, 0xFFFF0000; }",
            "=r,=r,r,r", [x], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        x = gl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 low, high; cvt.rn.f16x2.f32 t, $3, $2;"
            " mov.b32 {low, high}, t; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=r,=r,r,r", [x], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return x


@gluon.jit
def _sigmoid(x):
    """Without care for subnormal numbers, of which there are none worth it: the sum is above 1."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.ftz.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;"
        " add.ftz.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
        "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _quick_gelu(x):
    """``x * sigmoid(1.702 x)``, which is ``x / 2 * (1 + tanh(0.851 x))``.

    The approximate tanh is off by 5e-4 at most. A reciprocal besides the power would take as long
    again as that: a multiprocessor makes 16 of either in the time of 128 products.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .f32 h, t; mul.f32 t, $1, 0f3F59DB23; tanh.approx.f32 t, t;"
        " mul.f32 h, $1, 0f3F000000; fma.rn.f32 $0, h, t, h; }",
        "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _biased(acc, bias_ptr, col, N, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    WIDTH: gl.constexpr = acc.shape[1] // 2
    in_tile = gl.arange(0, 2 * WIDTH, gl.SliceLayout(0, LAYOUT))
    cols = col + in_tile
    place = cols
    if GATED:
        cols = col + in_tile % WIDTH
        place = in_tile // WIDTH * N + cols
    bias = gl.load(bias_ptr + place, mask=cols < N, other=0.0)
    return acc + bias.to(gl.float32)[None, :]


@gluon.jit
def _mean_squares(squares_ptr, first, num_rows, columns, SQUARES: gl.constexpr, ACC: gl.constexpr):
    """The mean squares of a warp group's rows, whose sums are in SQUARES parts; 0 beyond them."""
    rows = first + gl.arange(0, _ROWS, gl.SliceLayout(1, ACC))
    sums = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, ACC))
    for part in gl.static_range(SQUARES):
        sums += gl.load(squares_ptr + rows * SQUARES + part, mask=rows < num_rows, other=0.0)
    return sums / columns


@gluon.jit
def _store_panel(values, out_desc, buffer, row, col):
    """Begin to store a panel; rows and columns that the result does not have are left out."""
    tma.store_wait(1)
    buffer.store(values)
    fence_async_shared()
    sync_threads()
    tma_store(out_desc, [row, col], buffer)


@gluon.jit
def _store(values, out_desc, out_smem, row, col, GROUP: gl.constexpr):
    """Begin to store two panels."""
    panels = _halves(values.to(out_smem.dtype))
    for panel in gl.static_range(2):
        buffer = out_smem.index(GROUP * 2 + panel)
        at = col + panel * buffer.shape[1]
        _store_panel(panels[panel], out_desc, buffer, row + GROUP * _ROWS, at)


@gluon.jit
def _multiply(
    GROUP: gl.constexpr,
    out_desc,
    more_out_desc,
    bias_ptr,
    squares_ptr,
    eps,
    num_rows,
    x_smem,
    weight_smem,
    more_smem,
    out_smem,
    more_out_smem,
    full,
    empty,
    row_tiles,
    col_tiles,
    steps,
    N,
    WIDTH: gl.constexpr,
    MORE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SQUARES: gl.constexpr,
    PDL: gl.constexpr,
):
    """A warp group that multiplies 64 of a tile's rows."""
    STAGES: gl.constexpr = weight_smem.shape[0]
    GROUPS: gl.constexpr = x_smem.shape[0] // STAGES
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * WIDTH, 16])
    MORE_ACC: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, 2 * (MORE if MORE else WIDTH), 16]
    )
    wait(PDL)
    used = 0
    for tile in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
        row, col = _place(tile, row_tiles, col_tiles, GROUPS, WIDTH, MORE, GATED)
        acc = gl.zeros([_ROWS, 2 * WIDTH], gl.float32, ACC)
        more = acc
        if MORE:
            more = gl.zeros([_ROWS, 2 * MORE], gl.float32, MORE_ACC)
        if SQUARES:
            first = row + GROUP * _ROWS
            means = _mean_squares(squares_ptr, first, num_rows, steps * _STEP, SQUARES, ACC)
        for step in range(steps):
            stage = used % STAGES
            mbarrier.wait(full.index(stage), used // STAGES & 1)
            x = x_smem.index(stage * GROUPS + GROUP)
            weight = weight_smem.index(stage).permute((1, 0))
            acc = warpgroup_mma(x, weight, acc, is_async=True)
            # The next product is begun before this one is complete.
            if MORE:
                more_weight = more_smem.index(stage).permute((1, 0))
                more = warpgroup_mma(x, more_weight, more, is_async=True)
                acc, more = warpgroup_mma_wait(2, deps=(acc, more))
            else:
                acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES), pred=step > 0)
            used += 1
        if MORE:
            acc, more = warpgroup_mma_wait(0, deps=(acc, more))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES))
        if SQUARES:
            inverses = 1.0 / gl.sqrt(means + eps)
            acc *= gl.expand_dims(inverses, 1)
            if MORE:
                inverses = gl.convert_layout(inverses, gl.SliceLayout(1, MORE_ACC))
                more *= gl.expand_dims(inverses, 1)
        if HAS_BIAS:
            acc = _biased(acc, bias_ptr, col, N, GATED, ACC)
            if MORE:
                more = _biased(more, bias_ptr, col + WIDTH, N, GATED, MORE_ACC)
        # Rounded where a linear followed by an activation of its own rounds.
        left, right = _halves(_rounded(acc, out_smem.dtype))
        if GATED:
            _store(left * _sigmoid(left) * right, out_desc, out_smem, row, col, GROUP)
            if MORE:
                left, right = _halves(_rounded(more, out_smem.dtype))
                values = (left * _sigmoid(left) * right).to(out_smem.dtype)
                buffer = more_out_smem.index(GROUP)
                _store_panel(values, more_out_desc, buffer, row + GROUP * _ROWS, col + WIDTH)
        else:
            _store(_quick_gelu(left), out_desc, out_smem, row, col, GROUP)
            _store(_quick_gelu(right), out_desc, out_smem, row, col + WIDTH, GROUP)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "row_tiles", "col_tiles", "steps", "N"])
def _linear_kernel(
    out_desc,
    more_out_desc,
    x_desc,
    weight_desc,
    more_desc,
    bias_ptr,
    squares_ptr,
    eps,
    num_rows,
    row_tiles,
    col_tiles,
    steps,
    N,
    WIDTH: gl.constexpr,
    MORE: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SQUARES: gl.constexpr,
    FRESH: gl.constexpr,
    PDL: gl.constexpr,
):
    """Tiles of GROUPS * _ROWS rows by WIDTH + MORE of N columns, for both halves of the weight.

    Its rows are those of the gate, then those of up. The columns are two products, for one has a
    power of 2 of columns here. If it is not gated, tiles have 2 * WIDTH columns, whose activation
    is a quick GELU. With SQUARES, x still lacks RMSNorm's division, which is made up for after the
    products. A weight that is FRESH may still be written by the kernel ahead.
    """
    launch_dependents(PDL)
    element: gl.constexpr = x_desc.dtype
    swizzle: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    single: gl.constexpr = mbarrier.MBarrierLayout()
    x_smem = gl.allocate_shared_memory(element, [STAGES * GROUPS, _ROWS, _STEP], swizzle)
    weight_smem = gl.allocate_shared_memory(element, [STAGES, 2 * WIDTH, _STEP], swizzle)
    out_smem = gl.allocate_shared_memory(element, [2 * GROUPS, _ROWS, WIDTH // 2], out_desc.layout)
    more_smem = weight_smem
    more_out_smem = out_smem
    if MORE:
        more_smem = gl.allocate_shared_memory(element, [STAGES, 2 * MORE, _STEP], swizzle)
        more_out_smem = gl.allocate_shared_memory(
            element, [GROUPS, _ROWS, MORE], more_out_desc.layout
        )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], single)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], single)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    if GROUPS == 3:
        # Registers of a thread: 3 * 128 * 152 + 128 * 40 fit a multiprocessor's 65536.
        gl.warp_specialize(
            [
                (_multiply, (
                    0, out_desc, more_out_desc, bias_ptr, squares_ptr, eps, num_rows, x_smem,
                    weight_smem, more_smem, out_smem, more_out_smem, full, empty, row_tiles,
                    col_tiles, steps, N, WIDTH, MORE, GATED, HAS_BIAS, SQUARES, PDL,
                )),
                (_multiply, (
                    1, out_desc, more_out_desc, bias_ptr, squares_ptr, eps, num_rows, x_smem,
                    weight_smem, more_smem, out_smem, more_out_smem, full, empty, row_tiles,
                    col_tiles, steps, N, WIDTH, MORE, GATED, HAS_BIAS, SQUARES, PDL,
                )),
                (_multiply, (
                    2, out_desc, more_out_desc, bias_ptr, squares_ptr, eps, num_rows, x_smem,
                    weight_smem, more_smem, out_smem, more_out_smem, full, empty, row_tiles,
                    col_tiles, steps, N, WIDTH, MORE, GATED, HAS_BIAS, SQUARES, PDL,
                )),
                (_load, (
                    x_desc, weight_desc, more_desc, x_smem, weight_smem, more_smem, full, empty,
                    row_tiles, col_tiles, steps, N, WIDTH, MORE, GATED, FRESH, PDL,
                )),
            ],
            [4, 4, 1],
            [152, 152, 40],
        )  # fmt: skip
    else:
        # 2 * 128 * 232 + 128 * 40 fit them.
        gl.warp_specialize(
            [
                (_multiply, (
                    0, out_desc, more_out_desc, bias_ptr, squares_ptr, eps, num_rows, x_smem,
                    weight_smem, more_smem, out_smem, more_out_smem, full, empty, row_tiles,
                    col_tiles, steps, N, WIDTH, MORE, GATED, HAS_BIAS, SQUARES, PDL,
                )),
                (_multiply, (
                    1, out_desc, more_out_desc, bias_ptr, squares_ptr, eps, num_rows, x_smem,
                    weight_smem, more_smem, out_smem, more_out_smem, full, empty, row_tiles,
                    col_tiles, steps, N, WIDTH, MORE, GATED, HAS_BIAS, SQUARES, PDL,
                )),
                (_load, (
                    x_desc, weight_desc, more_desc, x_smem, weight_smem, more_smem, full, empty,
                    row_tiles, col_tiles, steps, N, WIDTH, MORE, GATED, FRESH, PDL,
                )),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether this module takes tensors of these shapes and places."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and weight.dtype == x.dtype
        and x.shape[1] % _STEP.value == 0
        and weight.shape[0] % 16 == 0
        and all(
            tensor.data_ptr() % 16 == 0 and tensor.stride(0) % 8 == 0 and tensor.stride(1) == 1
            for tensor in (x, weight)
        )
    )


def is_trusted(
    x: Tensor | DeferredRMSNorm,
    has_bias: bool,
    gated: bool = True,
    width: int = WIDE,
    groups: int = 2,
) -> bool:
    """Whether a kernel may be used for such rows; it may be tried for that."""
    values, squares, _ = taken_apart(x)
    parts = 0 if squares is None else squares.shape[1]
    family, kind = _FAMILY if gated else _UNGATED, (values.dtype, has_bias, width, parts, groups)
    trial = functools.partial(_trial, values, has_bias, gated, parts, width, groups)
    return family.allows(values.device, kind, trial)


def _trial(like: Tensor, has_bias: bool, gated: bool, parts: int, width: int, groups: int) -> Trial:
    """More tiles than programs, the last of which end early.

    If there are ``parts`` of squares, they are those of rows half as large as x.
    """
    draw = torch.Generator(like.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=like.device)

    k = 4 * _STEP.value
    x, weight, bias = (
        numbers.to(like.dtype)
        for numbers in (normal(2000, k), normal(2 * 2504, k) / 16, normal(2 * 2504))
    )
    product = x.float() @ weight.float().T
    given: Tensor | DeferredRMSNorm = x
    if parts:
        norms = x.float().square().sum(1, keepdim=True) / 4
        shares = torch.arange(1, parts + 1, device=x.device) / (parts * (parts + 1) / 2)
        given = DeferredRMSNorm(x, norms * shares, 1e-5)
        product *= given.inverse()
    if has_bias:
        product += bias.float()
    rest = weight, bias if has_bias else None
    if not gated:
        return Trial(lambda: quick_gelu_linear(x, *rest), reference.quick_gelu(product))
    gate, up = product.chunk(2, -1)
    return Trial(lambda: gated_linear(given, *rest, width, groups), F.silu(gate) * up)


def gated_linear(
    x: Tensor | DeferredRMSNorm,
    weight: Tensor,
    bias: Tensor | None,
    width: int = WIDE,
    groups: int = 2,
    *,
    fresh: bool = False,
) -> Tensor:
    """silu_and_mul of ``x [M, K]`` by ``weight [2 N, K]``: ``[M, N]``.

    x may lack an RMSNorm's division, which is made up for, with contiguous squares. A tile has
    ``width`` columns of N, a power of 2 from 32 to 128 or the sum of it and a smaller one from 8
    on, 160 at most, and 64 rows of each of ``groups``, 2 or, by at most 64 columns, 3.
    What :func:`fits` asks of x and the weight holds, and there are rows. Nothing that is still
    running writes the weight, which is read before the kernels before are waited for, unless it is
    ``fresh``.
    """
    return _launch(x, weight, bias, width, groups, gated=True, fresh=fresh)


def quick_gelu_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, fresh: bool = False
) -> Tensor:
    """quick_gelu of ``x [M, K]`` by ``weight [N, K]``: ``[M, N]``; as :func:`gated_linear`."""
    return _launch(x, weight, bias, WIDE, 2, gated=False, fresh=fresh)


def _stages(width: int, groups: int) -> int:
    """Steps in flight of tiles of so many columns and warp groups, beside their results."""
    rows: int = groups * _ROWS.value
    of_step: int = 2 * _STEP.value * (rows + 2 * width)
    return min(_MOST_STAGES, (_SHARED - 2 * rows * width) // of_step)


def _launch(
    given: Tensor | DeferredRMSNorm,
    weight: Tensor,
    bias: Tensor | None,
    width: int,
    groups: int,
    *,
    gated: bool,
    fresh: bool,
) -> Tensor:
    x, squares, eps = taken_apart(given)
    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    row_tiles = triton.cdiv(rows, groups * _ROWS.value)
    col_tiles = triton.cdiv(weight.shape[0], 2 * width)
    swizzle = gl.NVMMASharedLayout(128, 16, rank=2)
    first = 1 << width.bit_length() - 1
    more = width - first
    panel = gl.NVMMASharedLayout(first, 16, rank=2)
    more_out = more_weight = None
    if more:
        more_panel = gl.NVMMASharedLayout(2 * more if more > 8 else 0, 16, rank=2)
        more_out = TensorDescriptor.from_tensor(out, [_ROWS.value, more], more_panel)
        more_weight = TensorDescriptor.from_tensor(weight, [more, _STEP.value], swizzle)
    _linear_kernel[(min(num_multiprocessors(x.device), row_tiles * col_tiles),)](
        TensorDescriptor.from_tensor(out, [_ROWS.value, first // 2], panel),
        more_out,
        TensorDescriptor.from_tensor(x, [_ROWS.value, _STEP.value], swizzle),
        TensorDescriptor.from_tensor(weight, [first, _STEP.value], swizzle),
        more_weight,
        bias,
        squares,
        eps,
        rows,
        row_tiles,
        col_tiles,
        k // _STEP.value,
        n,
        WIDTH=first,
        MORE=more,
        GROUPS=groups,
        STAGES=_stages(width, groups),
        GATED=gated,
        HAS_BIAS=bias is not None,
        SQUARES=0 if squares is None else squares.shape[1],
        FRESH=fresh,
        num_warps=4,
        **pdl_options(x.device),
    )
    return out
