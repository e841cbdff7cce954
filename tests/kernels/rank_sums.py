"""Ranks as processes of Triton's interpreter, whose regions are memory that they share.

Run as ``rank_sums.py FOLDER RANK SIZE ROUNDS FAULT``. One of them waits for random times at thread
barriers, as in the middle of a sum, and between sums: now one is ahead and now another. Prints a
line for each wrong result. A FAULT takes a protection away: "buffers" leaves one buffer, "waiting"
has nobody wait for others. With "words-" before it all sums go in words, where one buffer may leave
a rank waiting for what was written over; it says so and ends.
"""

from __future__ import annotations

import mmap
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from interpreter import quicken
from torch import Tensor
from triton.runtime import interpreter

from engine_core.kernels.norm import reference as norm_reference
from engine_core.kernels.rank_sum import layout, reference
from engine_core.kernels.rank_sum import triton as kernels
from engine_core.kernels.rank_sum.layout import RankMemory, region_bytes

# Few, so that each has several blocks now and then, and more than its buffers hold.
layout.PROGRAMS = PROGRAMS = 4
layout.WORDS_PROGRAMS = 2
CAPACITY = 16384 * PROGRAMS
EPS = 1e-5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def open_memory(path: Path, rank: int, size: int) -> RankMemory:
    """The regions of all ranks in a file of zeros, mapped at an address of this process's own."""
    nbytes = region_bytes(size, CAPACITY)
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), size * nbytes)
    everything = torch.frombuffer(mapped, dtype=torch.uint8)
    addresses = [everything.data_ptr() + each * nbytes for each in range(size)]
    epochs = torch.zeros(PROGRAMS, dtype=torch.int32)
    # The count of 32 bits begins anew soon; ranks began at flags that say so.
    epochs += START
    flags = everything.view(size, nbytes)[rank, : layout.flags_bytes(size)].view(torch.int32)
    flags.fill_(START)
    return RankMemory(rank, size, torch.tensor(addresses), epochs, CAPACITY, everything)


START = 2**31 - 5


class Delays:
    """Random times that one rank waits at barriers and between sums, and every ten sums another."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.sums = rank, size, 0
        self.generator = random.Random(rank)
        interpreter.InterpreterBuilder.create_barrier = lambda _: self.wait()

    def wait(self) -> None:
        slow = self.sums // 10 % self.size == self.rank
        if slow and self.generator.random() < 0.5:
            time.sleep(self.generator.random() * 0.006)


def break_protection(fault: str) -> None:
    words, _, fault = fault.rpartition("-")
    if fault == "buffers":
        layout.BUFFERS = 1
    if words:
        break_words(fault)
    elif fault == "waiting":
        break_flags()


def break_words(fault: str) -> None:
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    last, looks = [0], [0]

    def remember(self: Any, ptrs: Any, value: Any, *rest: Any) -> Any:
        if value.data.dtype == "int64":
            last[0], looks[0] = int(value.data.flat[0]) >> 32, 0
        return store(self, ptrs, value, *rest)

    def look(self: Any, *given: Any) -> Any:
        told = load(self, *given)
        if given[-1]:  # volatile
            looks[0] += 1
            if fault == "waiting":
                told.data[...] = (told.data & 0xFFFFFFFF) | (last[0] << 32)
            elif looks[0] > 3000:
                sys.stdout.write("waits for what was written over\n")
                sys.stdout.flush()
                os._exit(0)
        return told

    builder.create_masked_load, builder.create_masked_store = look, remember


def break_flags() -> None:
    whole, operations = interpreter.InterpreterBuilder.create_atomic_rmw, interpreter._ir.ATOMIC_OP
    epochs: list[Any] = []

    def hear_at_once(self: Any, op: Any, ptr: Any, val: Any, *rest: Any) -> Any:
        told = whole(self, op, ptr, val, *rest)
        if op == operations.XCHG:
            epochs[:] = [val.data]
        else:
            told.data[...] = epochs[0]
        return told

    interpreter.InterpreterBuilder.create_atomic_rmw = hear_at_once


class Rounds:
    """The same random sums on every rank, of terms that each can make of all ranks."""

    def __init__(self, rank: int, size: int, ways: tuple[layout.Way, ...], seed: int = 0) -> None:
        self.rank, self.size, self.ways = rank, size, ways
        self.choices = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def terms(self, *shape: int, dtype: torch.dtype) -> Tensor:
        scale = 10.0 ** torch.arange(self.size).remainder(3)
        terms = torch.randn(self.size, *shape, generator=self.generator)
        return (terms * scale.view(-1, *[1] * len(shape))).to(dtype)

    def run(self, memory: RankMemory) -> str | None:
        """The next sum; says what is wrong with it, or None."""
        dtype = self.choices.choice(DTYPES)
        kind = self.choices.choice(("sum", "sum", "gather", "norm", "norm"))
        way = self.choices.choice(self.ways)
        layout.way_of = lambda nbytes, size: way
        rows = self.choices.choice((1, 2, 3, 5, 9))
        width = self.choices.choice((64, 128, 200, 577, 1024))
        if self.choices.random() < 0.06:  # in several exchanges
            rows, width = (37, 1024) if kind == "norm" else (11, 5001)
        terms = self.terms(rows, width, dtype=dtype)
        own = terms[self.rank].clone()
        if kind == "sum":
            right = torch.equal(kernels.rank_sum(own, memory), reference.rank_sum(terms))
        elif kind == "gather":
            right = torch.equal(kernels.rank_gather(own, memory), reference.rank_gather(terms))
        else:
            right = self.norm(own, terms, memory)
        return None if right else f"{kind} of {rows} x {width} {dtype}, {way}"

    def norm(self, own: Tensor, terms: Tensor, memory: RankMemory) -> bool:
        dtype = terms.dtype
        residual = self.terms(*terms.shape[1:], dtype=dtype)[0]
        weight, bias = self.terms(2, terms.shape[-1], dtype=dtype)[0]
        given = bias if self.choices.random() < 0.5 else None
        offset = self.choices.choice((0.0, 1.0))
        stream = reference.rank_sum(terms)
        if given is not None:
            stream = stream + given
        stream = stream + residual
        expected = norm_reference.rms_norm(stream, weight, EPS, offset)
        normed, total = kernels.rank_sum_add_norm(
            own, memory, given, residual, weight, EPS, offset=offset
        )
        error = (normed.float() - expected.float()).abs() / (1 + expected.float().abs())
        # Squares are added up in another order.
        return (
            torch.equal(total, stream)
            and float(error.max()) <= {4: 1e-5, 2: 1.6e-2}[dtype.itemsize]
        )


def main(folder: Path, rank: int, size: int, rounds: int, fault: str) -> None:
    quicken()
    break_protection(fault)
    delays = Delays(rank, size)
    memory = open_memory(folder / "regions", rank, size)
    (folder / f"ready-{rank}").touch()
    while not all((folder / f"ready-{each}").exists() for each in range(size)):
        time.sleep(0.01)
    ways: tuple[layout.Way, ...] = ("words", "one shot", "two shots")
    if fault != "none":
        ways = ways[:1] if fault.startswith("words") else ways[1:]
    sums = Rounds(rank, size, ways)
    for number in range(rounds):
        wrong = sums.run(memory)
        if wrong is not None:
            sys.stdout.write(f"{number}: {wrong}\n")
        delays.sums += 1
        delays.wait()


if __name__ == "__main__":
    given = sys.argv[1:]
    main(Path(given[0]), int(given[1]), int(given[2]), int(given[3]), given[4])
