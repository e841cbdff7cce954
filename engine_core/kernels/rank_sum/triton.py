"""Sums over ranks on GPUs that reach each other's memory.

Program b of a rank meets program b of the others, and has buffers of its own in each region: what
happens in them follows from the history of program b alone, however many programs a sum has. There
are three ways:

- *Words.* A rank writes its term into a buffer of every other rank, in words of 8 bytes: 4 of the
  term, and the number of this sum. A word is written and read as a whole, so who finds the number
  has the numbers beside it. Nothing is flagged, and all that is waited for is one way over a link.
- *One shot.* A rank writes its term into its own buffer, meets the others, and reads their terms.
- *Two shots.* So it adds up its part of the elements alone, and writes that into a buffer of every
  rank. They meet again, and each finds the whole sum in its own memory.

A buffer is written again two exchanges later. In the one between, whoever writes heard of all
others, and each of them began that after it was done with this one: kernels on a stream run one
after another, and a program that exchanges several times in a launch has its threads wait for each
other before a flag. That holds with early launches too, as a sum waits for the kernel before it,
before it writes or tells anything. Ways may follow each other in any order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.launch.triton import launch_dependents, pdl_options, wait
from engine_core.kernels.rank_sum import layout
from engine_core.kernels.rank_sum.layout import RankMemory


@triton.jit
def _buffer(address, nbytes, DTYPE: tl.constexpr):
    """A pointer to what is so many bytes into the region at an address."""
    return tl.multiple_of((address + nbytes).to(tl.pointer_type(DTYPE)), 16)


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


@triton.jit
def _finish(
    summed,
    row,
    numel,
    bias_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Store a row of the sum, or the norm of it and the residual, and what was normalised."""
    cols = tl.arange(0, BLOCK)
    places = row * WIDTH + cols
    mask = (cols < WIDTH) & (places < numel)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if NORM:
        residual = tl.load(residual_ptr + places, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + cols, mask=cols < WIDTH, other=0.0)
            summed = (summed.to(tl.float32) + bias.to(tl.float32)).to(dtype)
        stream = (summed.to(tl.float32) + residual).to(dtype)
        tl.store(total_ptr + places, stream, mask=mask)
        y = stream.to(tl.float32)
        y *= 1.0 / tl.sqrt(tl.sum(y * y, axis=0) / WIDTH + eps)
        if OFFSET != 0:
            weight += OFFSET
        else:
            y = y.to(dtype).to(tl.float32)
        summed = (y * weight).to(dtype)
    tl.store(out_ptr + places, summed, mask=mask)


@triton.jit
def _half(word, DTYPE: tl.constexpr):
    """The number of 16 bits at the lower end of each word, as float32."""
    return (word & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _words_kernel(
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
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIR: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BUFFERS: tl.constexpr,
    BEGIN: tl.constexpr,
    SHARE: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    """x is rows of WIDTH numbers, PAIR of which are a word; the last may be shorter."""
    # No kernel writes these.
    own_address = tl.load(addresses_ptr + RANK)
    next_address = tl.load(addresses_ptr + (RANK + 1) % SIZE)
    wait(PDL)
    # The next kernel may fetch its weights while this one waits for the others.
    launch_dependents(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    epoch = tl.load(epochs_ptr + program) + 1
    # 32 bits begin anew after two days. Only a word that nothing was written to in exactly so many
    # sums would be mistaken for a new one.
    number = epoch.to(tl.int64) << 32
    turn = (epoch & (BUFFERS - 1)) * PROGRAMS + program
    begin = BEGIN + turn.to(tl.int64) * (SIZE * SHARE)
    words = tl.arange(0, BLOCK // PAIR)
    own_ptr = x_ptr.to(tl.pointer_type(tl.int32))

    for row in range(program, num_rows, programs):
        places = row * (WIDTH // PAIR) + words
        mask = (words < WIDTH // PAIR) & (places < numel // PAIR)
        own = tl.load(own_ptr + places, mask=mask, other=0)
        word = (own.to(tl.int64) & 0xFFFFFFFF) | number
        at = (row // programs) * (BLOCK // PAIR) + words
        for step in tl.static_range(1, SIZE):
            # Ranks begin at different ones.
            address = next_address
            if step > 1:
                address = tl.load(addresses_ptr + (RANK + step) % SIZE)
            theirs = _buffer(address, begin + RANK * SHARE, tl.int64)
            tl.store(theirs + at, word, mask=mask, cache_modifier=".wt")

    for row in range(program, num_rows, programs):
        places = row * (WIDTH // PAIR) + words
        mask = (words < WIDTH // PAIR) & (places < numel // PAIR)
        own = tl.load(own_ptr + places, mask=mask, other=0)
        at = (row // programs) * (BLOCK // PAIR) + words
        got = tl.zeros([BLOCK // PAIR], tl.int64)
        missing = epoch * 0 + 1
        while missing > 0:
            late = tl.zeros([BLOCK // PAIR], tl.int32)
            for rank in tl.static_range(SIZE):
                if rank != RANK:
                    told = _buffer(own_address, begin + rank * SHARE, tl.int64)
                    got = tl.load(told + at, mask=mask, other=0, volatile=True)
                    late |= (got >> 32).to(tl.int32) ^ epoch
            missing = tl.max((mask & (late != 0)).to(tl.int32), axis=0)
        for rank in tl.static_range(SIZE):
            data = own
            if rank != RANK:
                if SIZE > 2:
                    # They are all there now.
                    told = _buffer(own_address, begin + rank * SHARE, tl.int64)
                    got = tl.load(told + at, mask=mask, other=0, volatile=True)
                data = got.to(tl.int32)
            if PAIR == 2:
                first, second = _half(data, dtype), _half(data >> 16, dtype)
            else:
                first, second = data.to(tl.float32, bitcast=True), 0.0
            if rank == 0:
                low, high = first, second
            else:
                low, high = low + first, high + second
        if PAIR == 2:  # noqa: SIM108 - the other side is not compiled
            summed = tl.interleave(low.to(dtype), high.to(dtype))
        else:
            summed = low
        _finish(
            summed,
            row,
            numel,
            bias_ptr,
            residual_ptr,
            weight_ptr,
            out_ptr,
            total_ptr,
            eps,
            WIDTH,
            BLOCK,
            NORM,
            OFFSET,
        )
    tl.store(epochs_ptr + program, epoch)


@triton.jit(do_not_specialize=["num_rows"])
def _shots_kernel(
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
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
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

    A program exchanges HELD of its rows at a time. GATHERED: if it is not 0, x is rows of so many
    numbers, and nothing is added: out has these rows of all ranks side by side. NORM: the residual
    is added to the sum, and out is the norm of that.
    """
    own_address = tl.load(addresses_ptr + RANK)
    wait(PDL)
    launch_dependents(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    epoch = tl.load(epochs_ptr + program)
    share: tl.constexpr = CAPACITY // PROGRAMS
    part: tl.constexpr = BLOCK // SIZE
    flags_begin = program.to(tl.int64) * SIZE * FLAG_BYTES
    cols = tl.arange(0, BLOCK)
    part_cols = RANK * part + tl.arange(0, part)

    for first in range(program, num_rows, HELD * programs):
        epoch += 1
        # Neither the number of programs nor what others have is in it.
        turn = (epoch & (BUFFERS - 1)) * PROGRAMS + program
        terms_begin = FLAGS_BYTES + turn.to(tl.int64) * share
        sums_begin = terms_begin + BUFFERS * CAPACITY
        end = tl.minimum(first + HELD * programs, num_rows)

        own_ptr = _buffer(own_address, terms_begin, dtype)
        for row in range(first, end, programs):
            places = row * WIDTH + cols
            mask = (cols < WIDTH) & (places < numel)
            held_places = (row - first) // programs * BLOCK + cols
            tl.store(own_ptr + held_places, tl.load(x_ptr + places, mask=mask), mask=mask)
        _meet(addresses_ptr, flags_begin, epoch, RANK, SIZE, FLAG_BYTES)

        if TWO_SHOTS:
            for row in range(first, end, programs):
                places = row * WIDTH + part_cols
                mask = (part_cols < WIDTH) & (places < numel)
                held_places = (row - first) // programs * BLOCK + part_cols
                for rank in tl.static_range(SIZE):
                    if rank == RANK:
                        term = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)
                    else:
                        address = tl.load(addresses_ptr + rank)
                        terms_ptr = _buffer(address, terms_begin, dtype)
                        term = tl.load(terms_ptr + held_places, mask=mask, other=0.0)
                        term = term.to(tl.float32)
                    if rank == 0:
                        added = term
                    else:
                        added += term
                for step in tl.static_range(SIZE):
                    address = tl.load(addresses_ptr + (RANK + step) % SIZE)
                    tl.store(
                        _buffer(address, sums_begin, dtype) + held_places,
                        added.to(dtype),
                        mask=mask,
                    )
            second = flags_begin + PROGRAMS * SIZE * FLAG_BYTES
            _meet(addresses_ptr, second, epoch, RANK, SIZE, FLAG_BYTES)

        for row in range(first, end, programs):
            places = row * WIDTH + cols
            mask = (cols < WIDTH) & (places < numel)
            held_places = (row - first) // programs * BLOCK + cols
            if TWO_SHOTS:
                sums_ptr = _buffer(own_address, sums_begin, dtype)
                summed = tl.load(sums_ptr + held_places, mask=mask, other=0.0)
            else:
                for rank in tl.static_range(SIZE):
                    if rank == RANK:
                        term = tl.load(x_ptr + places, mask=mask, other=0.0)
                    else:
                        address = tl.load(addresses_ptr + rank)
                        terms_ptr = _buffer(address, terms_begin, dtype)
                        term = tl.load(terms_ptr + held_places, mask=mask, other=0.0)
                    if GATHERED:
                        before = places.to(tl.int64) // GATHERED * (SIZE - 1) + rank
                        tl.store(out_ptr + places + before * GATHERED, term, mask=mask)
                    elif rank == 0:
                        total = term.to(tl.float32)
                    else:
                        total += term.to(tl.float32)
                if not GATHERED:
                    summed = total.to(dtype)
            if not GATHERED:
                _finish(
                    summed,
                    row,
                    numel,
                    bias_ptr,
                    residual_ptr,
                    weight_ptr,
                    out_ptr,
                    total_ptr,
                    eps,
                    WIDTH,
                    BLOCK,
                    NORM,
                    OFFSET,
                )
    tl.store(epochs_ptr + program, epoch)


class _Norm(NamedTuple):
    """The operands of what follows a sum."""

    bias: Tensor | None
    residual: Tensor
    weight: Tensor
    eps: float
    total: Tensor
    offset: float


def rank_sum(x: Tensor, memory: RankMemory) -> Tensor:
    """The sum of every rank's ``x``."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, memory, out, width=layout.plain_block(x.numel()))
    return out


def rank_gather(x: Tensor, memory: RankMemory) -> Tensor:
    """Every rank's ``x [..., N]`` side by side."""
    count, x = x.shape[-1], x.contiguous()
    out = x.new_empty(*x.shape[:-1], memory.size * count)
    _launch(x, memory, out, width=layout.plain_block(x.numel()), gathered=count)
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
    norm = _Norm(bias, residual.contiguous(), weight, eps, total, offset)
    _launch(x, memory, out, width=x.shape[-1], norm=norm)
    return out, total


def _launch(
    x: Tensor,
    memory: RankMemory,
    out: Tensor,
    *,
    width: int,
    gathered: int = 0,
    norm: _Norm | None = None,
) -> None:
    """Fill ``out`` from ``x``, contiguous and not empty, in rows of ``width`` numbers."""
    numel, itemsize = x.numel(), x.element_size()
    rows = triton.cdiv(numel, width)
    block = triton.next_power_of_2(width)
    bias, residual, weight, eps, total, offset = norm or (None, None, None, 0.0, None, 0.0)
    tensors = (x, memory.addresses, memory.epochs, bias, residual, weight, out, total)
    options = {
        "WIDTH": width,
        "BLOCK": block,
        "RANK": memory.rank,
        "SIZE": memory.size,
        "BUFFERS": layout.BUFFERS,
        "NORM": norm is not None,
        "OFFSET": offset,
        "num_warps": 4 if block <= 2048 else 8 if block <= 8192 else 16,
        **pdl_options(x.device),
    }
    way = "one shot" if gathered else layout.way_of(x.nbytes, memory.size)
    if way == "words" and layout.has_words(rows, width, numel, itemsize):
        _words_kernel[(min(rows, layout.WORDS_PROGRAMS),)](
            *tensors,
            rows,
            numel,
            eps,
            PAIR=4 // itemsize,
            PROGRAMS=layout.WORDS_PROGRAMS,
            BEGIN=layout.words_begin(memory.size, memory.capacity),
            SHARE=layout.WORDS_SHARE * layout.WORD_BYTES,
            **options,
        )
        return
    _shots_kernel[(min(rows, layout.PROGRAMS),)](
        *tensors,
        rows,
        numel,
        eps,
        HELD=layout.held_rows(memory.capacity, block, itemsize),
        PROGRAMS=layout.PROGRAMS,
        CAPACITY=memory.capacity,
        FLAGS_BYTES=layout.flags_bytes(memory.size),
        FLAG_BYTES=layout.FLAG_BYTES,
        TWO_SHOTS=way == "two shots",
        GATHERED=gathered,
        **options,
    )
