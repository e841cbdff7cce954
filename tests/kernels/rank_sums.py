"""Ranks as processes of Triton's interpreter, whose regions are memory that they share.

Run as ``rank_sums.py FOLDER CASE...``, where a case is SIZE:ROUNDS:FAULT. Each is run by forks of
this process, which has imported all they need. One of them waits for random times at thread
barriers, as in the middle of a sum, and between sums: now one is ahead and now another. Prints a
line for each wrong result, after the case. A FAULT takes a protection away: "buffers" leaves one
buffer, "waiting" has nobody wait for others. With "words-" before it all sums go in words, where
one buffer may leave a rank waiting for what was written over. The first wrong result ends a case.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import sys
import time
from multiprocessing.queues import Queue
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
        """Wait, if it is this rank's turn to be slow."""
        slow = self.sums // 10 % self.size == self.rank
        if slow and self.generator.random() < 0.5:
            time.sleep(self.generator.random() * 0.006)


def look_calmly() -> None:
    """Let who looks for what another rank writes leave it a processor."""
    builder, operations = interpreter.InterpreterBuilder, interpreter._ir.ATOMIC_OP
    load, change = builder.create_masked_load, builder.create_atomic_rmw

    def look_at_words(self: Any, *given: Any) -> Any:
        if given[-1]:  # volatile
            time.sleep(LOOK)
        return load(self, *given)

    def look_at_flags(self: Any, op: Any, *given: Any) -> Any:
        if op != operations.XCHG:
            time.sleep(LOOK)
        return change(self, op, *given)

    builder.create_masked_load, builder.create_atomic_rmw = look_at_words, look_at_flags


LOOK = 0.0001


def break_protection(fault: str) -> None:
    """Take away what the fault names."""
    words, _, fault = fault.rpartition("-")
    if fault == "buffers":
        layout.BUFFERS = 1
    if words:
        break_words(fault)
    elif fault == "waiting":
        break_flags()


class WrittenOverError(Exception):
    """A rank waits for a word in whose place a later one is."""


def break_words(fault: str) -> None:
    """Leave out waiting for words, or end a wait that has no end."""
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
                raise WrittenOverError
        return told

    builder.create_masked_load, builder.create_masked_store = look, remember


def break_flags() -> None:
    """Find every flag set at once."""
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


def run_rank(
    path: Path, rank: int, size: int, rounds: int, fault: str, wrong: Queue[str | None]
) -> None:
    """Put what is wrong into the queue, and None at the end."""
    look_calmly()
    break_protection(fault)
    delays = Delays(rank, size)
    memory = open_memory(path, rank, size)
    (path.parent / f"{path.name}-{rank}").touch()
    while not all((path.parent / f"{path.name}-{each}").exists() for each in range(size)):
        time.sleep(0.001)
    ways: tuple[layout.Way, ...] = ("words", "one shot", "two shots")
    if fault != "none":
        ways = ways[:1] if fault.startswith("words") else ways[1:]
    sums = Rounds(rank, size, ways)
    for number in range(rounds):
        try:
            found = sums.run(memory)
        except interpreter.InterpreterError as error:
            if not isinstance(error.__cause__, WrittenOverError):
                raise
            found = "waits for what was written over"
        if found is not None:
            wrong.put(f"{number}: {found}")
        delays.sums += 1
        delays.wait()
    wrong.put(None)


def run_case(path: Path, size: int, rounds: int, fault: str) -> str | None:
    """The first fault that a rank finds; None if none does."""
    path.touch()
    os.truncate(path, size * region_bytes(size, CAPACITY))
    forks = multiprocessing.get_context("fork")
    wrong: Queue[str | None] = forks.Queue()
    ranks = [
        forks.Process(target=run_rank, args=(path, rank, size, rounds, fault, wrong))
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    try:
        for _ in ranks:
            found = wrong.get(timeout=120)
            if found is not None:
                return found
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    return None


def main(folder: Path, cases: list[str]) -> None:
    """Run the cases, one after another."""
    quicken()
    for case in cases:
        size, rounds, fault = case.split(":")
        wrong = run_case(folder / case.replace(":", "-"), int(size), int(rounds), fault)
        sys.stdout.write(f"{case} {wrong or ''}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
