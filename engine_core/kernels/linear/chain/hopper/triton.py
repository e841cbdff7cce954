"""The linears from one attention to the next, or to the end, as one launch, on Hopper, in Gluon.

A program stays on its multiprocessor from the first linear to the last. The tensor memory
accelerator brings tiles of the weights to a ring in shared memory, and begins with those of the
next linear while the last tiles of the one before are multiplied, and while programs wait for one
another: the memory is never idle between two linears, as it is between two launches. 8-bit floats
are multiplied as they are: a row of x becomes two of 8-bit floats, together its numbers where they
are more than a 8,192nd of the greatest; smaller ones are off by a 4,000,000th of that.

The matrix units want 64 rows of the weight. A tile has 16, four times: once for each quarter of K,
by which as many groups of columns of x are multiplied. Of these products those of a quarter by its
own columns count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine_core.kernels.activation.triton import activated
from engine_core.kernels.launch.gluon import Family, Trial
from engine_core.kernels.launch.hopper.triton import (
    launch_dependents,
    reinterpret,
    sync_threads,
    tma_load,
    wait,
)
from engine_core.kernels.launch.triton import num_multiprocessors, pdl_options
from engine_core.kernels.linear.boxes.hopper.triton import barriers, room
from engine_core.kernels.linear.chain import Chain, ChainNorm, barrier_count
from engine_core.kernels.linear.epilogues.triton import Activated, Added
from engine_core.kernels.linear.fp8 import Fp8Weight
from engine_core.kernels.linear.tiles import Tile
from engine_core.kernels.row_codes import FP8

_FAMILY = Family("chains of linears", "Steps of one row in 8-bit floats take a tenth longer")

# Rows of the weight in a tile; quarters of K; chunks of 128 bytes of each quarter in a step.
_ROWS = gl.constexpr(16)
_QUARTERS = gl.constexpr(4)
_CHUNKS = gl.constexpr(4)
# Warps that multiply: two groups, of which each has every other chunk.
_WARPS = gl.constexpr(8)
# Rows of a chunk of x: both parts of each quarter.
_X_ROWS = gl.constexpr(2 * _QUARTERS.value)
# Columns of K in a step, and its bytes: what the ring holds some of.
_STEP = _QUARTERS.value * _CHUNKS.value * 128
_BYTES = gl.constexpr(_QUARTERS.value * _CHUNKS.value * _ROWS.value * 128)
# The lower part of x is larger by this, so that it keeps its bits.
_LOWER = gl.constexpr(16.0)
# Bytes of a multiprocessor's shared memory that a program may take. Beside up to 198 KiB one of
# attention over codes, the kernel ahead, has room, so that the first weights are there when
# attention ends. It has none beside a few widths of x that take more, as Qwen2 7B's of 18,944.
_MOST_SHARED = 200 * 1024
_MOST_STAGES = 5
# Of a thread at its launch; warps that multiply then take what the one that loads leaves.
_MOST_REGISTERS = 96
# Whether tiles of gate and up are dealt out to programs as they have done others: the memory serves
# some faster. Each has 13 or 14 of Llama 3 8B's; of queries, keys and values it has 3, and with
# these dealt out too a step took 1% longer.
_DEALS = True
# Rows of a weight that a trial turns into numbers at once.
_TRIED_ROWS = 1024


@gluon.jit
def ask_for_tile(dealt_ptr, tiles):
    """Count one more of the ``tiles`` that are dealt out; :func:`number_of` says which it is.

    Each of them asks for one: with the last the count is 0 again, as the next launch needs it.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .b32 lane, last;
        mov.u32 lane, %laneid;
        setp.eq.u32 p, lane, 0;
        sub.u32 last, $2, 1;
        mov.b32 $0, 0;
        @p atom.relaxed.gpu.global.inc.u32 $0, [$1], last;
        }""",
        "=&r,l,r",
        [dealt_ptr, tiles],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def number_of(asked):
    """The number that the first lane has, in all lanes."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;",
        "=r,r",
        [asked],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_tiles(
    load_step: gl.constexpr, descs, rings, full, empty, followers, dealt_ptr, TILES: gl.constexpr,
    NUM_STEPS: gl.constexpr, HALVES: gl.constexpr, DEALS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads the weights, all steps of this program, ahead as there is room.

    They are older than all kernels: the first ones do not wait for x. ``load_step`` loads one.
    A tile that is dealt out says which one follows it beside its first step.
    """
    WORD: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    programs = gl.num_programs(0)
    step = gl.program_id(0) * 0
    for i in gl.static_range(len(NUM_STEPS)):
        if DEALS and HALVES[i] == 2:
            tile = gl.program_id(0)
            # The first two are this program's own.
            following = tile + programs
            while tile < TILES[i]:
                asked = ask_for_tile(dealt_ptr, TILES[i])
                slot = step % STAGES
                mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
                followers.index(slot).store(gl.full([1], following, gl.int32, WORD))
                sync_threads()
                for of_tile in range(NUM_STEPS[i] - 1):
                    load_step(
                        descs[i], rings[i], full, empty, step, tile, of_tile, HALVES[i], STAGES
                    )
                    step += 1
                # Before the last step: all were counted when all have been multiplied, so that the
                # next launch, which has room where a program of this one has ended, counts from 0.
                after = 2 * programs + number_of(asked)
                load_step(
                    descs[i], rings[i], full, empty, step, tile, NUM_STEPS[i] - 1, HALVES[i],
                    STAGES,
                )  # fmt: skip
                step += 1
                tile = following
                following = after
        else:
            for tile in range(gl.program_id(0), TILES[i], programs):
                for of_tile in range(NUM_STEPS[i]):
                    load_step(
                        descs[i], rings[i], full, empty, step, tile, of_tile, HALVES[i], STAGES
                    )
                    step += 1


@gluon.jit
def room_for_followers(STAGES: gl.constexpr):
    """Shared memory for the number of a tile beside each stage."""
    return gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def follower(full, followers, step, WARPS: gl.constexpr, STAGES: gl.constexpr):
    """The tile that follows the one whose first step this is, as of tiles that are dealt out."""
    WORD: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
    return gl.max(followers.index(step % STAGES).load(WORD), 0)


@gluon.jit
def _load_step(
    desc, ring, full, empty, step, tile, of_tile, HALVES: gl.constexpr, STAGES: gl.constexpr
):
    """Load a step of a tile as soon as its place in the ring is empty."""
    slot = step % STAGES
    barrier = full.index(slot)
    mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
    mbarrier.expect(barrier, _BYTES)
    place = [of_tile * _CHUNKS, 0, 0, tile * (_ROWS // HALVES), 0]
    tma_load(desc, place, barrier, ring.index(slot))


@gluon.jit
def _load(
    descs, rings, full, empty, followers, dealt_ptr, TILES: gl.constexpr, NUM_STEPS: gl.constexpr,
    HALVES: gl.constexpr, DEALS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    load_tiles(
        _load_step, descs, rings, full, empty, followers, dealt_ptr, TILES, NUM_STEPS, HALVES,
        DEALS, STAGES,
    )  # fmt: skip


@gluon.jit
def arrive(count_ptr):
    """Say that this program has come, and stored what others are to see."""
    sync_threads()
    gl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 p, thread, 0;
        @p red.release.gpu.global.add.u64 [$1], 1;
        mov.b32 $0, thread;
        }""",
        "=r,l",
        [count_ptr],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def await_others(count_ptr, target):
    """Wait until so many have come; what they stored is visible then."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .b32 thread; .reg .b64 count;
        mov.u32 thread, %tid.x;
        setp.ne.u32 p, thread, 0;
        @p bra joined;
        again:
        ld.acquire.gpu.global.u64 count, [$1];
        setp.lt.u64 p, count, $2;
        @p bra again;
        joined:
        mov.b32 $0, thread;
        }""",
        "=r,l,l",
        [count_ptr, target],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    sync_threads()


@gluon.jit
def join_programs(count_ptr, target):
    """Wait until all programs have come here; what they stored is visible then."""
    arrive(count_ptr)
    await_others(count_ptr, target)


@gluon.jit
def _power_of_2(top):
    """A power of 2 by which ``top``, not negative, gets below 256, and one by it; NaN for inf."""
    exponent = gl.maximum(top.to(gl.int32, bitcast=True) >> 23, 27)
    factor = ((261 - exponent) << 23).to(gl.float32, bitcast=True)
    inverse = ((exponent - 7) << 23).to(gl.float32, bitcast=True)
    return gl.where(exponent == 255, float("nan"), factor), inverse


@gluon.jit
def _take_row(x, x_ptr, QUADS: gl.constexpr):
    """A row to shared memory as pairs of 8-bit floats; what products are to be multiplied by.

    Columns of a chunk lie as a weight's codes do: two that are 64 apart are neighbours.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 2, 4], [2, 1, 1, 16], [2, 4, 1, 1], [3, 2, 1, 0])
    L3: gl.constexpr = gl.SliceLayout(3, LAYOUT)
    L2: gl.constexpr = gl.SliceLayout(2, L3)
    GROUPS: gl.constexpr = (QUADS - 1) // _CHUNKS + 1
    quads = gl.arange(0, _CHUNKS, gl.SliceLayout(1, L2))
    quads = gl.expand_dims(gl.expand_dims(gl.expand_dims(quads, 1), 2), 3)
    quarters = gl.arange(0, _QUARTERS, gl.SliceLayout(0, L2))
    quarters = gl.expand_dims(gl.expand_dims(gl.expand_dims(quarters, 0), 2), 3)
    side = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, L3)))
    side = gl.expand_dims(gl.expand_dims(gl.expand_dims(side, 0), 1), 3)
    cols = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    cols = gl.expand_dims(gl.expand_dims(gl.expand_dims(cols, 0), 1), 2)
    places = x_ptr + (quarters * QUADS + quads) * 128 + side * 64 + cols
    values = ()
    top = gl.zeros([_CHUNKS, _QUARTERS, 2, 64], gl.float32, LAYOUT)
    for group in gl.static_range(GROUPS):
        # Other programs wrote it: not from this multiprocessor's own cache.
        found = gl.load(
            places + group * (_CHUNKS * 128),
            mask=quads + group * _CHUNKS < QUADS,
            other=0.0,
            cache_modifier=".cg",
        )
        top = gl.maximum(top, gl.abs(found.to(gl.float32)))
        values += (found,)  # type: ignore[assignment]
    factor, inverse = _power_of_2(gl.max(top.reshape([_CHUNKS * _QUARTERS * 128]), 0))
    for group in gl.static_range(GROUPS):
        scaled = values[group].to(gl.float32) * factor
        upper = scaled.to(gl.float8e4nv)  # type: ignore[unreachable]
        lower = ((scaled - upper.to(gl.float32)) * _LOWER).to(gl.float8e4nv)
        both = gl.join(upper, lower).permute((0, 1, 4, 3, 2))
        x.index(group).store(both.reshape([_CHUNKS, _X_ROWS, 128]))
    fence_async_shared()
    sync_threads()
    return inverse


@gluon.jit
def _multiply(weights, x, acc, slot, step):
    """``acc`` and the products of a step's chunks, of which two are multiplied at once.

    Each of them is 64 rows for a group of warps, and columns of x that the other has no use for.
    The matrix units keep few bits of a sum of 8-bit floats: chunks are added up here.
    """
    ACC: gl.constexpr = acc.type.layout
    PAIRS: gl.constexpr = _CHUNKS // 2
    zero = gl.zeros([2 * 64, 2 * _X_ROWS], gl.float32, ACC)
    parts = ()
    for pair in gl.static_range(PAIRS):
        part = warpgroup_mma(
            weights.index(slot * PAIRS + pair),
            x.index(step * PAIRS + pair).permute((1, 0)),
            zero,
            use_acc=False,
            is_async=True,
        )
        parts += (part,)  # type: ignore[assignment]
    a, b = warpgroup_mma_wait(0, deps=parts)
    return acc + (a + b)


@gluon.jit
def _own_products(acc):
    """Of ``acc [128, 16]`` those of quarters by their own columns, both parts: ``[128]``."""
    ACC: gl.constexpr = acc.type.layout
    quarters = gl.arange(0, 2 * 64, gl.SliceLayout(1, ACC)) // _ROWS
    cols = gl.arange(0, 2 * _X_ROWS, gl.SliceLayout(0, ACC))
    own = gl.expand_dims(quarters, 1) == gl.expand_dims(cols // 2, 0)
    factor = gl.where(cols % 2 == 1, 1.0 / _LOWER, 1.0)
    return gl.sum(gl.where(own, acc * gl.expand_dims(factor, 0), 0.0), 1)


@gluon.jit
def rounded(x, ELEMENT: gl.constexpr):
    """``x`` rounded to that type, in float32."""
    return x.to(ELEMENT).to(gl.float32)


@gluon.jit
def ask(ptr, cols, N):
    """Float32 of columns; 0 if there are none to load."""
    found = 0.0
    if ptr is not None:
        found = gl.load(ptr + cols, mask=cols < N, other=0.0).to(gl.float32)
    return found


@gluon.jit
def _ask_end(
    end, scales_ptr, bias_ptr, tile, N: gl.constexpr, COLS: gl.constexpr, GATED: gl.constexpr,
    ADDED: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Ask for all that the end of a tile takes beside its products, as it is in memory."""
    cols = tile * COLS + gl.arange(0, COLS, OUT)
    mask = cols < N
    scale = gl.load(scales_ptr + cols, mask=mask, other=0.0)
    bias = gl.full([COLS], 0.0, gl.float32, OUT)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + cols, mask=mask, other=0.0)
    other = scale
    more = bias
    if GATED:
        other = gl.load(scales_ptr + N + cols, mask=mask, other=0.0)
        if bias_ptr is not None:
            more = gl.load(bias_ptr + N + cols, mask=mask, other=0.0)
    elif ADDED:
        # Of the chain's middle it is what this program itself stored.
        other = gl.load(end.residual + cols, mask=mask, other=0.0, cache_modifier=".cg")
        more = gl.load(end.norm_weight + cols, mask=mask, other=0.0)
    return scale, bias, other, more


@gluon.jit
def _tile(
    weights, x, full, empty, step, end, asked, tile, factor,
    N: gl.constexpr, COLS: gl.constexpr, GATED: gl.constexpr, ADDED: gl.constexpr,
    NUM_STEPS: gl.constexpr, STAGES: gl.constexpr, OUT: gl.constexpr, BOTH: gl.constexpr,
):  # fmt: skip
    """Multiply and store a tile, for whose end all was ``asked``; returned is the next step."""
    ELEMENT: gl.constexpr = end.out.dtype.element_ty
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, 2 * _X_ROWS, 32])
    cols = tile * COLS + gl.arange(0, COLS, OUT)
    mask = cols < N
    acc = gl.zeros([2 * 64, 2 * _X_ROWS], gl.float32, ACC)
    for of_tile in range(NUM_STEPS):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), step // STAGES & 1)
        acc = _multiply(weights, x, acc, slot, of_tile)
        sync_threads()
        mbarrier.arrive(empty.index(slot))
        step += 1
    products = _own_products(acc)
    scale, bias, other, more = asked
    bias = bias.to(gl.float32)
    more = more.to(gl.float32)
    if GATED:
        both = gl.sum(products.reshape([2 * _QUARTERS, 2, COLS]), 0).permute((1, 0))
        gate, up = gl.convert_layout(both, BOTH).split()
        gate = rounded(gate * scale * factor + bias, ELEMENT)
        up = rounded(up * other * factor + more, ELEMENT)
        gl.store(end.out + cols, (activated(gate, "silu") * up).to(ELEMENT), mask=mask)
    else:
        found = gl.convert_layout(gl.sum(products.reshape([2 * _QUARTERS, COLS]), 0), OUT)
        found = found * scale * factor + bias
        if ADDED:
            total = (rounded(found, ELEMENT) + other.to(gl.float32)).to(ELEMENT)
            gl.store(end.total + cols, total, mask=mask)
            total = total.to(gl.float32)
            gl.store(end.squares + tile, gl.sum(gl.where(mask, total * total, 0.0), 0))
            weighed = total * (more + end.OFFSET)
            gl.store(end.out + cols, weighed.to(ELEMENT), mask=mask)
        else:
            gl.store(end.out + cols, found.to(ELEMENT), mask=mask)
    return step


@gluon.jit
def _linear(
    weights, xs, full, empty, followers, step, count_ptr, count, x_ptr, end, scales_ptr, bias_ptr,
    squares_ptr, eps,
    INDEX: gl.constexpr, K: gl.constexpr, N: gl.constexpr, SQUARES: gl.constexpr,
    TILES: gl.constexpr, NUM_STEPS: gl.constexpr, HALVES: gl.constexpr, DEALS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The linear number INDEX of the chain, of N columns; of what follows, see :class:`Added`.

    All but the first begin with a meeting. With SQUARES, x lacks an RMSNorm's division by those.
    Returned is the next step's number.
    """
    QUADS: gl.constexpr = K // (_QUARTERS * 128)
    GATED: gl.constexpr = HALVES[INDEX] == 2
    ADDED: gl.constexpr = INDEX % 2 == 0
    COLS: gl.constexpr = _ROWS // HALVES[INDEX]
    # A thread has both a gate's product and its up's.
    BOTH: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [_WARPS, 1], [1, 0])
    OUT: gl.constexpr = gl.SliceLayout(1, BOTH)
    programs = gl.num_programs(0)
    if INDEX:
        arrive(count_ptr)
    # For the first tile: behind the arrival, which waits for what was asked for before it.
    asked = _ask_end(end, scales_ptr, bias_ptr, gl.program_id(0), N, COLS, GATED, ADDED, OUT)
    if INDEX:
        # Some programs may have come to the first meeting when it was read, but not all.
        await_others(count_ptr, count - count % programs + INDEX * programs)
    squares = 0.0
    if SQUARES:
        FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
        places = gl.arange(0, triton.next_power_of_2(SQUARES), FLAT)
        squares = gl.load(
            squares_ptr + places, mask=places < SQUARES, other=0.0, cache_modifier=".cg"
        )
    factor = _take_row(xs[0], x_ptr, QUADS)
    if SQUARES:
        factor *= 1.0 / gl.sqrt(gl.sum(squares, 0) / K + eps)
    # What the end of a tile takes is asked for a tile ahead: while others read weights this takes
    # longer than the products of a tile.
    if DEALS and GATED:
        tile = gl.program_id(0)
        while tile < TILES[INDEX]:
            next_tile = follower(full, followers, step, _WARPS, STAGES)
            following = _ask_end(end, scales_ptr, bias_ptr, next_tile, N, COLS, GATED, ADDED, OUT)
            step = _tile(
                weights, xs[1], full, empty, step, end, asked, tile, factor, N, COLS, GATED,
                ADDED, NUM_STEPS[INDEX], STAGES, OUT, BOTH,
            )  # fmt: skip
            asked = following
            tile = next_tile
    else:
        for tile in range(gl.program_id(0), TILES[INDEX], programs):
            following = _ask_end(
                end, scales_ptr, bias_ptr, tile + programs, N, COLS, GATED, ADDED, OUT
            )
            step = _tile(
                weights, xs[1], full, empty, step, end, asked, tile, factor, N, COLS, GATED,
                ADDED, NUM_STEPS[INDEX], STAGES, OUT, BOTH,
            )  # fmt: skip
            asked = following
    return step


@gluon.jit
def _ask_columns(end, start, N: gl.constexpr, WARPS: gl.constexpr):
    """Sums of the columns from ``start`` on, one for each thread, and the norm's weight."""
    cols = start + gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    total = gl.load(end.total + cols, mask=cols < N, other=0.0, cache_modifier=".cg")
    return cols, total, ask(end.norm_weight, cols, N) + end.OFFSET


@gluon.jit
def divide(
    end, eps, count_ptr, target, N: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """The end of a chain of three: the result of ``end``'s norm, rounded as one by itself rounds.

    Programs that have columns wait for all others; no more than a thread's are asked for at once.
    """
    ELEMENT: gl.constexpr = end.out.dtype.element_ty
    arrive(count_ptr)
    first = gl.program_id(0) * (32 * WARPS)
    if first < N:
        await_others(count_ptr, target)
        places = gl.arange(
            0, triton.next_power_of_2(TILES), gl.BlockedLayout([1], [32], [WARPS], [0])
        )
        squares = gl.load(
            end.squares + places, mask=places < TILES, other=0.0, cache_modifier=".cg"
        )
        cols, total, weight = _ask_columns(end, first, N, WARPS)
        inverse = 1.0 / gl.sqrt(gl.sum(squares, 0) / N + eps)
        stride = gl.num_programs(0) * (32 * WARPS)
        for start in range(first, N, stride):
            normed = total.to(gl.float32) * inverse
            if end.OFFSET == 0:
                normed = rounded(normed, ELEMENT)
            gl.store(end.out + cols, (normed * weight).to(ELEMENT), mask=cols < N)
            cols, total, weight = _ask_columns(end, start + stride, N, WARPS)


@gluon.jit
def _multiply_all(
    x_ptr, o_end, gate_up_end, down_end, qkv_end, scales, biases, middle_eps, end_eps, count_ptr,
    weights, xs, full, empty, followers,
    KS: gl.constexpr, NS: gl.constexpr, TILES: gl.constexpr, NUM_STEPS: gl.constexpr,
    HALVES: gl.constexpr, DEALS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The warps that multiply: all of the chain but its loads of weights."""
    wait(PDL)
    count = gl.load(count_ptr, volatile=True)
    step = gl.program_id(0) * 0
    step = _linear(
        weights, xs, full, empty, followers, step, count_ptr, count, x_ptr, o_end, scales[0],
        biases[0], None, 0.0, 0, KS[0], NS[0], 0, TILES, NUM_STEPS, HALVES, DEALS, STAGES,
    )  # fmt: skip
    step = _linear(
        weights, xs, full, empty, followers, step, count_ptr, count, o_end.out, gate_up_end,
        scales[1], biases[1], o_end.squares, middle_eps, 1, KS[1], NS[1], TILES[0], TILES,
        NUM_STEPS, HALVES, DEALS, STAGES,
    )  # fmt: skip
    step = _linear(
        weights, xs, full, empty, followers, step, count_ptr, count, gate_up_end.out, down_end,
        scales[2], biases[2], None, 0.0, 2, KS[2], NS[2], 0, TILES, NUM_STEPS, HALVES, DEALS,
        STAGES,
    )  # fmt: skip
    if len(NUM_STEPS) == 4:
        _linear(
            weights, xs, full, empty, followers, step, count_ptr, count, down_end.out, qkv_end,
            scales[3], biases[3], down_end.squares, end_eps, 3, KS[3], NS[3], TILES[2], TILES,
            NUM_STEPS, HALVES, DEALS, STAGES,
        )  # fmt: skip
    else:
        programs = gl.num_programs(0)
        target = count - count % programs + 3 * programs
        divide(down_end, end_eps, count_ptr, target, NS[2], TILES[2], _WARPS)


@gluon.jit
def _chain_kernel(
    o_desc, gate_up_desc, down_desc, qkv_desc,
    x_ptr,
    o_end, gate_up_end, down_end, qkv_end,
    o_scales, gate_up_scales, down_scales, qkv_scales,
    o_bias, gate_up_bias, down_bias, qkv_bias,
    middle_eps, end_eps,
    count_ptr,
    KS: gl.constexpr, NS: gl.constexpr, TILES: gl.constexpr, NUM_STEPS: gl.constexpr,
    DEALS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The projection back, gate and up, down, and the next queries, keys and values, of one row.

    Of three linears the last has no tensors: the final norm's division stands in its place.
    ``count`` is a number that all launches add to, a multiple of the programs before each, and one
    of the tiles that were dealt out, 0 before and after each.
    """
    launch_dependents(PDL)
    HALVES: gl.constexpr = (1, 2, 1, 1)
    WORD: gl.constexpr = o_desc.dtype
    CODE: gl.constexpr = gl.float8e4nv
    CHUNK: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    CHUNKS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=3)
    ring = room(o_desc, STAGES)
    halves = reinterpret(
        ring, WORD, [STAGES, _CHUNKS, _QUARTERS, 2, _ROWS // 2, 64], gate_up_desc.layout
    )
    # Two chunks, one for each group of warps.
    weights = reinterpret(ring, CODE, [STAGES * _CHUNKS // 2, 2 * 64, 128], CHUNK)
    x = gl.allocate_shared_memory(CODE, [GROUPS, _CHUNKS, _X_ROWS, 128], CHUNKS_LAYOUT)
    xs = (x, reinterpret(x, CODE, [GROUPS * _CHUNKS // 2, 2 * _X_ROWS, 128], CHUNK))
    full = barriers(STAGES)
    empty = barriers(STAGES)
    followers = room_for_followers(STAGES)
    gl.warp_specialize(
        [
            (_multiply_all, (
                x_ptr, o_end, gate_up_end, down_end, qkv_end,
                (o_scales, gate_up_scales, down_scales, qkv_scales),
                (o_bias, gate_up_bias, down_bias, qkv_bias), middle_eps, end_eps, count_ptr,
                weights, xs, full, empty, followers, KS, NS, TILES, NUM_STEPS, HALVES, DEALS,
                STAGES, PDL,
            )),
            (_load, (
                (o_desc, gate_up_desc, down_desc, qkv_desc), (ring, halves, ring, ring), full,
                empty, followers, count_ptr + 1, TILES, NUM_STEPS, HALVES, DEALS, STAGES,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip


def fits(x: Tensor, chain: Chain) -> bool:
    """Whether :func:`chain` takes tensors of these forms and places."""
    weights: Any = chain.weights
    return x.stride(-1) == 1 and all(
        weight.scales.dim() == 1
        and weight.codes.is_contiguous()
        and weight.codes.data_ptr() % 16 == 0
        for weight in weights
    )


def is_trusted(x: Tensor, chain: Chain) -> bool:
    """Whether :func:`chain` may be used for such rows; it may be tried for that."""
    shapes = tuple(tuple(weight.shape) for weight in chain.weights)
    biased = tuple(bias is not None for bias in chain.biases)
    offsets = chain.middle.offset, chain.end.offset
    kind = (x.dtype, shapes, biased, offsets)
    return _FAMILY.allows(x.device, kind, lambda: _trial(x, shapes, biased, offsets))


def _trial(
    x: Tensor,
    shapes: tuple[tuple[int, ...], ...],
    biased: tuple[bool, ...],
    offsets: tuple[float, float],
) -> Trial:
    draw = torch.Generator(x.device).manual_seed(0)

    def weight(n: int, k: int) -> Fp8Weight:
        codes = torch.randint(256, (n, k), generator=draw, device=x.device, dtype=torch.uint8)
        scales = torch.full((n,), 2 / k**0.5, device=x.device)
        return Fp8Weight(codes.bitwise_and_(0xB7).view(FP8), scales, x.dtype)  # below 2

    def numbers(weight: Fp8Weight, rows: slice) -> Tensor:
        part = Fp8Weight(weight.codes[rows], weight.scales[rows], x.dtype)
        return part.numbers(torch.float32)

    made = [weight(*shape) for shape in shapes]
    return trial_of_chain(x, made, numbers, biased, offsets, chain)


def trial_of_chain(
    x: Tensor,
    weights: Sequence[Any],
    numbers: Callable[[Any, slice], Tensor],
    biased: tuple[bool, ...],
    offsets: tuple[float, float],
    launch: Callable[[Tensor, Tensor, Chain], tuple[Tensor, Tensor]],
) -> Trial:
    """A row by weights of the real sizes, which machine code depends on; little more is kept.

    Args:
        x: a row like those to come.
        weights: four, or three, random.
        numbers: what some rows of a weight stand for, float32.
        biased: which of them have a bias.
        offsets: of the norms.
        launch: the kernel.
    """
    draw = torch.Generator(x.device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=x.device).to(x.dtype)

    def product(rows: Tensor, index: int) -> Tensor:
        weight, bias = weights[index], biases[index]
        starts = range(0, len(weight), _TRIED_ROWS)
        parts = (numbers(weight, slice(start, start + _TRIED_ROWS)) for start in starts)
        sums = torch.cat([rows.float() @ part.T for part in parts], 1)
        return sums if bias is None else sums + bias.float()

    width = len(weights[0])
    norms = [ChainNorm(normal(width), 1e-6, offset) for offset in offsets]
    biases: Any = tuple(
        normal(len(weight)) if has_bias else None
        for weight, has_bias in zip(weights, biased, strict=True)
    )
    tried = Chain(tuple(weights), norms[0], norms[1], biases)
    heads, residual = normal(1, weights[0].shape[1]), normal(1, width)

    def run() -> Tensor:
        out, total = launch(heads, residual, tried)
        return torch.cat((out, total), 1)

    total = product(heads, 0).to(x.dtype) + residual
    gate, up = product(_normed(total, norms[0]), 1).to(x.dtype).float().chunk(2, 1)
    total = product((torch.nn.functional.silu(gate) * up).to(x.dtype), 2).to(x.dtype) + total
    out = _normed(total, norms[1])
    if len(weights) == 4:
        out = product(out, 3)
    return Trial(run, torch.cat((out, total.float()), 1))


def _normed(total: Tensor, norm: ChainNorm) -> Tensor:
    wide = total.float()
    mean = wide.square().mean(1, keepdim=True)
    weighed = (wide * (norm.weight.float() + norm.offset)).to(total.dtype).float()
    return weighed * torch.rsqrt(mean + norm.eps)


def of_four(given: Iterable[Any]) -> tuple[Any, ...]:
    """An argument for each of four linears; None for the last if there are three."""
    first, second, third, *last = given
    return first, second, third, last[0] if last else None


def _descriptor(weight: Fp8Weight, halves: int) -> TensorDescriptor:
    """A weight's words by chunks, quarters of K, halves that a tile has both of, and rows."""
    n, k = weight.shape
    words, rows = k // 2, n // halves
    quads = words // 64 // _QUARTERS.value
    return TensorDescriptor(
        weight.codes.view(torch.int16),
        [quads, _QUARTERS.value, halves, rows, 64],
        [64, quads * 64, rows * words, words, 1],
        [_CHUNKS.value, _QUARTERS.value, halves, _ROWS.value // halves, 64],
        gl.NVMMASharedLayout(128, 16, rank=5),
    )


def chain(x: Tensor, residual: Tensor, chain: Chain) -> tuple[Tensor, Tensor]:
    """As :func:`engine_core.kernels.linear.chain.linear_chain`.

    What :func:`fits` asks holds. Nothing that is still running writes the weights: they are read
    before the kernels before are waited for.
    """
    tile = Tile(_ROWS.value, 0)
    weights: Any = chain.weights
    sizes = [(weight.shape[0], weight.shape[1]) for weight in weights]
    o_end = Added.of(residual, chain.middle.weight, tile, chain.middle.offset)
    gate_up_end = Activated.of(o_end.out, sizes[1][0], gated=True)
    down_end = Added.of(o_end.total, chain.end.weight, tile, chain.end.offset)
    ends: list[Any] = [o_end, gate_up_end, down_end]
    ends += [Activated.of(o_end.out, n) for n, _ in sizes[3:]]
    halves = (1, 2, 1, 1)[: len(sizes)]
    described = (_descriptor(*each) for each in zip(weights, halves, strict=True))
    groups = max(triton.cdiv(k, _STEP) for _, k in sizes)
    shared = groups * _CHUNKS.value * _X_ROWS.value * 128
    programs = num_multiprocessors(x.device)
    _chain_kernel[(programs,)](
        *of_four(described),
        x,
        *of_four(ends),
        *of_four(weight.scales for weight in weights),
        *of_four(chain.biases),
        chain.middle.eps,
        chain.end.eps,
        barrier_count(x.device),
        KS=tuple(k for _, k in sizes),
        NS=tuple(n // half for (n, _), half in zip(sizes, halves, strict=True)),
        TILES=tuple(triton.cdiv(n, _ROWS.value) for n, _ in sizes),
        NUM_STEPS=tuple(triton.cdiv(k, _STEP) for _, k in sizes),
        DEALS=_DEALS,
        STAGES=max(2, min(_MOST_STAGES, (_MOST_SHARED - shared) // _BYTES.value)),
        GROUPS=groups,
        num_warps=_WARPS.value,
        maxnreg=_MOST_REGISTERS,
        **pdl_options(x.device),
    )
    return ends[-1].out, down_end.total
