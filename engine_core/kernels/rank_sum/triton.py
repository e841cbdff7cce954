"""Sums over ranks on GPUs that read each other's memory.

Program b of a rank meets program b of the others, and has buffers of its own in each region: what
happens in them follows from the history of program b alone, however many programs a sum has. It
writes its blocks, meets, and reads. It writes to the same buffer two sums later. By then it has met
the others in the sum between, which they began after they were done with this one: kernels on a
stream run one after another. That holds with early launches too, as a sum waits for the kernel
before it, before it writes or tells anything.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.launch.triton import launch_dependents, pdl_options, wait
from engine_core.kernels.rank_sum import layout
from engine_core.kernels.rank_sum.layout import PROGRAMS, RankMemory, flags_bytes


@triton.jit
def _buffer(addresses_ptr, rank, nbytes, like_ptr):
    """A pointer to what is so many bytes into a rank's region, to elements like those of like."""
    address = tl.load(addresses_ptr + rank) + nbytes
    return tl.multiple_of(address.to(tl.pointer_type(like_ptr.dtype.element_ty)), 16)


@triton.jit
def _meet(
    addresses_ptr,
    flags_begin,
    epoch,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    FLAG_BYTES: tl.constexpr,
):
    """Tell all ranks that this program's writes are there, and wait for their word.

    Every thread's writes come before the flags, and its reads after them. Rank r has a flag for
    each rank in its own region, so that it waits without a word over the link.
    """
    ranks = tl.arange(0, SIZE)
    flag = tl.pointer_type(tl.int32)
    theirs = tl.load(addresses_ptr + ranks) + flags_begin + RANK * FLAG_BYTES
    own = tl.load(addresses_ptr + RANK) + flags_begin + ranks.to(tl.int64) * FLAG_BYTES
    epochs = tl.zeros([SIZE], tl.int32) + epoch
    tl.debug_barrier()
    tl.atomic_xchg(theirs.to(flag), epochs, sem="release", scope="sys")
    missing = epoch * 0 + 1
    while missing > 0:
        told = tl.atomic_add(own.to(flag), epochs * 0, sem="acquire", scope="sys")
        # The difference, since a count of 32 bits begins anew one day.
        missing = tl.sum((told - epochs < 0).to(tl.int32), axis=0)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["num_rows"])
def _rank_sum_kernel(
    x_ptr,
    addresses_ptr,
    epochs_ptr,
    bias_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    num_rows,
    numel,
    first,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BUFFERS: tl.constexpr,
    CAPACITY: tl.constexpr,
    FLAGS_BYTES: tl.constexpr,
    FLAG_BYTES: tl.constexpr,
    TWO_SHOTS: tl.constexpr,
    GATHERED: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    """x is rows of WIDTH numbers, the last of which may be shorter.

    GATHERED: if it is not 0, x is a piece of rows of so many numbers, from number ``first`` on, and
    nothing is added: out has these rows of all ranks side by side. NORM: the residual is added to
    the sum, and out is the norm of that.
    """
    wait(PDL)
    # The next kernel may fetch its weights while this one waits for the others.
    launch_dependents(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs_ptr + program) + 1
    share: tl.constexpr = CAPACITY // PROGRAMS
    # Neither the number of programs nor what others have is in it.
    turn = (epoch & (BUFFERS - 1)) * PROGRAMS + program
    terms_begin = FLAGS_BYTES + turn.to(tl.int64) * share
    sums_begin = terms_begin + BUFFERS * CAPACITY
    flags_begin = program.to(tl.int64) * SIZE * FLAG_BYTES
    cols = tl.arange(0, BLOCK)

    own_ptr = _buffer(addresses_ptr, RANK, terms_begin, x_ptr)
    for row in range(program, num_rows, programs):
        places = row * WIDTH + cols
        mask = (cols < WIDTH) & (places < numel)
        own_places = (row // programs) * BLOCK + cols
        tl.store(own_ptr + own_places, tl.load(x_ptr + places, mask=mask), mask=mask)
    _meet(addresses_ptr, flags_begin, epoch, RANK, SIZE, FLAG_BYTES)

    part: tl.constexpr = BLOCK // SIZE
    if TWO_SHOTS:
        part_cols = RANK * part + tl.arange(0, part)
        sums_ptr = _buffer(addresses_ptr, RANK, sums_begin, x_ptr)
        for row in range(program, num_rows, programs):
            places = row * WIDTH + part_cols
            mask = (part_cols < WIDTH) & (places < numel)
            own_places = (row // programs) * BLOCK + part_cols
            for rank in tl.static_range(SIZE):
                terms_ptr = _buffer(addresses_ptr, rank, terms_begin, x_ptr)
                term = tl.load(terms_ptr + own_places, mask=mask, other=0.0).to(tl.float32)
                if rank == 0:
                    added = term
                else:
                    added += term
            tl.store(sums_ptr + own_places, added.to(x_ptr.dtype.element_ty), mask=mask)
        second = flags_begin + PROGRAMS * SIZE * FLAG_BYTES
        _meet(addresses_ptr, second, epoch, RANK, SIZE, FLAG_BYTES)

    for row in range(program, num_rows, programs):
        places = row * WIDTH + cols
        mask = (cols < WIDTH) & (places < numel)
        own_places = (row // programs) * BLOCK + cols
        for rank in tl.static_range(SIZE):
            if TWO_SHOTS:
                # The ranks' parts, beside each other.
                sums_ptr = _buffer(addresses_ptr, rank, sums_begin, x_ptr)
                mine = cols // part == rank
                found = tl.load(sums_ptr + own_places, mask=mask & mine, other=0.0)
                if rank == 0:  # noqa: SIM108 - the other side is not compiled
                    summed = found
                else:
                    summed = tl.where(mine, found, summed)
            else:
                terms_ptr = _buffer(addresses_ptr, rank, terms_begin, x_ptr)
                term = tl.load(terms_ptr + own_places, mask=mask, other=0.0)
                if GATHERED:
                    before = (first + places.to(tl.int64)) // GATHERED * (SIZE - 1) + rank
                    tl.store(out_ptr + first + places + before * GATHERED, term, mask=mask)
                elif rank == 0:
                    total = term.to(tl.float32)
                else:
                    total += term.to(tl.float32)
        if not GATHERED:
            if not TWO_SHOTS:
                summed = total.to(x_ptr.dtype.element_ty)
            if NORM:
                if bias_ptr is not None:
                    bias = tl.load(bias_ptr + cols, mask=cols < WIDTH, other=0.0)
                    summed = summed.to(tl.float32) + bias.to(tl.float32)
                    summed = summed.to(x_ptr.dtype.element_ty)
                residual = tl.load(residual_ptr + places, mask=mask, other=0.0).to(tl.float32)
                stream = (summed.to(tl.float32) + residual).to(total_ptr.dtype.element_ty)
                tl.store(total_ptr + places, stream, mask=mask)
                y = stream.to(tl.float32)
                y *= 1.0 / tl.sqrt(tl.sum(y * y, axis=0) / WIDTH + eps)
                weight = tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
                if OFFSET != 0:
                    weight += OFFSET
                else:
                    y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
                summed = (y * weight).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + places, summed, mask=mask)
    tl.store(epochs_ptr + program, epoch)


def rank_sum(x: Tensor, memory: RankMemory) -> Tensor:
    """The sum of every rank's ``x``."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = layout.plain_block(x.numel())
    _launch(x, memory, out, width=width, two_shots=layout.takes_two_shots(x.nbytes))
    return out


def rank_gather(x: Tensor, memory: RankMemory) -> Tensor:
    """Every rank's ``x [..., N]`` side by side."""
    count, x = x.shape[-1], x.contiguous()
    out = x.new_empty(*x.shape[:-1], memory.size * count)
    flat = x.view(-1)
    block = layout.plain_block(flat.numel())
    most = memory.capacity // (block * x.element_size()) * block
    for first in range(0, flat.numel(), most):
        piece = flat[first : first + most]
        _launch(piece, memory, out, width=block, gathered=count, first=first)
    return out


def rank_sum_add_norm(
    x: Tensor,
    memory: RankMemory,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of the sum over ranks plus a bias and the residual, and what was normalised."""
    x = x.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(
        x,
        memory,
        out,
        width=x.shape[-1],
        two_shots=layout.takes_two_shots(x.nbytes),
        norm=(bias, residual.contiguous(), weight, eps, total),
        offset=offset,
    )
    return out, total


def _launch(
    x: Tensor,
    memory: RankMemory,
    out: Tensor,
    *,
    width: int,
    two_shots: bool = False,
    gathered: int = 0,
    first: int = 0,
    norm: tuple[Tensor | None, Tensor, Tensor, float, Tensor] | None = None,
    offset: float = 0.0,
) -> None:
    """Fill ``out`` from ``x``, contiguous and not empty, in rows of ``width`` numbers."""
    rows = triton.cdiv(x.numel(), width)
    block = triton.next_power_of_2(width)
    bias, residual, weight, eps, total = norm or (None, None, None, 0.0, None)
    _rank_sum_kernel[(min(rows, PROGRAMS),)](
        x,
        memory.addresses,
        memory.epochs,
        bias,
        residual,
        weight,
        out,
        total,
        rows,
        x.numel(),
        first,
        eps,
        WIDTH=width,
        BLOCK=block,
        RANK=memory.rank,
        SIZE=memory.size,
        PROGRAMS=PROGRAMS,
        BUFFERS=layout.BUFFERS,
        CAPACITY=memory.capacity,
        FLAGS_BYTES=flags_bytes(memory.size),
        FLAG_BYTES=layout.FLAG_BYTES,
        TWO_SHOTS=two_shots,
        GATHERED=gathered,
        NORM=norm is not None,
        OFFSET=offset,
        num_warps=4 if block <= 2048 else 8 if block <= 8192 else 16,
        **pdl_options(x.device),
    )
