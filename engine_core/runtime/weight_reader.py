"""Reads safetensors files into the memory of a GPU, several pieces at a time.

A copy out of a mapped file is made by one thread, page by page, from pageable memory: 3 GB/s on an
H200. Here threads read pieces of the files into pinned memory, and each begins the copy of its
piece to the device before it reads the next. Pieces are taken in the order of the files, so that a
disk is read from their beginning to their end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine_core.checkpoint import TensorHeader
from engine_core.runtime import platform

_NUM_THREADS = 8
_PIECE_BYTES = 16 * 2**20
AHEAD_BYTES = 2**30


class PieceFile(Protocol):
    """A weight file whose tensors can be read in pieces; see ``SafetensorsFile``."""

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """The tensors in the order in which they stand in the file."""

    def read_into(self, buffer: memoryview, name: str, start: int) -> None:
        """Fill ``buffer`` with bytes of tensor ``name``, from its byte ``start``; from any thread.

        Raises:
            CorruptCheckpointError: they cannot be read.
        """


def read_weights(
    files: Sequence[PieceFile],
    device: torch.device,
    *,
    num_threads: int = _NUM_THREADS,
    piece_bytes: int = _PIECE_BYTES,
    ahead_bytes: int = AHEAD_BYTES,
) -> Generator[tuple[str, Tensor]]:
    """Names and tensors in file order, each in memory of its own on ``device``.

    On a GPU a tensor may still be on its way: the stream that is current where the iterator is
    advanced waits for it, so it has to be used there. Close the iterator if it is not exhausted:
    that ends the threads.

    Args:
        files: read one after another, each from its beginning to its end.
        device: where the tensors are to be.
        num_threads: pieces that are read at once.
        piece_bytes: most bytes of a tensor that are read at once; a thread has pinned memory for
            two pieces.
        ahead_bytes: most bytes of tensors on the device: those read ahead, and the one handed out
            last, which a ``for`` loop keeps until it has the next. A tensor for which that leaves
            no room waits until no other is read ahead. What the consumer keeps besides is not
            counted.

    Raises:
        CorruptCheckpointError: bytes cannot be read; raised in place of the tensor.
    """
    tensors = [(file, header) for file in files for header in file.headers.values()]
    # Memory takes a while to pin, which a small model would wait for in vain.
    largest = max((header.nbytes for _, header in tensors), default=0)
    reader = _Reader(device, num_threads, max(1, min(piece_bytes, largest)))
    todo = iter(tensors)
    following = next(todo, None)
    ahead: deque[_Reading] = deque()
    taken = handed_out = 0
    try:
        while following is not None or ahead:
            while following is not None:
                file, header = following
                if ahead and taken + header.nbytes > ahead_bytes:
                    break
                ahead.append(reader.begin(file, header))
                taken += header.nbytes
                following = next(todo, None)
            reading = ahead.popleft()
            name, nbytes = reading.header.name, reading.header.nbytes
            # Nothing here may keep the tensor while the consumer works with it and drops it.
            yield name, reader.finish(reading)
            taken -= handed_out
            handed_out = nbytes
    finally:
        reader.close()


@dataclass(slots=True)
class _Reading:
    """A tensor that is being read.

    Attributes:
        header: of the tensor.
        tensor: its memory; None once it was handed out.
        pieces: give the events after which each piece is there, None on a CPU.
    """

    header: TensorHeader
    tensor: Tensor | None
    pieces: list[Future[torch.cuda.Event | None]]


class _Reader:
    """Threads that fill tensors."""

    def __init__(self, device: torch.device, num_threads: int, piece_bytes: int) -> None:
        self._device = device
        self._piece_bytes = piece_bytes
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="weights")
        self._own = threading.local()
        self._lanes: list[_Lane] = []

    def begin(self, file: PieceFile, header: TensorHeader) -> _Reading:
        """Have ``header``'s tensor read."""
        tensor = torch.empty(header.shape, dtype=getattr(torch, header.dtype), device=self._device)
        reading = _Reading(header, tensor, [])
        if header.nbytes:
            # The memory belongs to this stream, where its last user may not be done with it.
            free = (
                torch.cuda.current_stream(self._device).record_event()
                if self._device.type == "cuda"
                else None
            )
            for start in range(0, header.nbytes, self._piece_bytes):
                reading.pieces.append(self._pool.submit(self._read, file, reading, start, free))
        return reading

    def finish(self, reading: _Reading) -> Tensor:
        """The tensor, which the current stream will have when it comes to use it."""
        for piece in reading.pieces:
            event = piece.result()
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)
        tensor, reading.tensor = reading.tensor, None
        assert tensor is not None, "a tensor is handed out once"
        return tensor

    def close(self) -> None:
        """End the threads and wait for copies that nobody has waited for."""
        self._pool.shutdown(cancel_futures=True)
        for lane in self._lanes:
            lane.close()
        # Else torch would keep the pinned memory for later allocations, as torch 2.11 must.
        if self._device.type == "cuda" and hasattr(torch.accelerator, "empty_host_cache"):
            torch.accelerator.empty_host_cache()

    def _read(
        self, file: PieceFile, reading: _Reading, start: int, free: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Fill a piece of a tensor; returns the event after which it is there."""
        with platform.on(self._device):
            lane: _Lane | None = getattr(self._own, "lane", None)
            if lane is None:
                lane = self._own.lane = _Lane(self._device, self._piece_bytes)
                self._lanes.append(lane)
            count = min(self._piece_bytes, reading.header.nbytes - start)
            buffer = lane.buffer(count)
            file.read_into(buffer.numpy().data, reading.header.name, start)
            assert reading.tensor is not None, "it is handed out when all its pieces are read"
            # Scalars have no last dimension to view in another size.
            target = reading.tensor.view(-1).view(torch.uint8)[start : start + count]
            return lane.copy(buffer, target, free)


class _Lane:
    """One thread's buffers and stream: it reads into two buffers in turn and copies from them."""

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._buffers = [
            torch.empty(piece_bytes, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
            for _ in range(2)
        ]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def buffer(self, count: int) -> Tensor:
        """Host memory ``[count]`` for the next piece, once its last copy is done."""
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        return self._buffers[self._turn][:count]

    def copy(
        self, buffer: Tensor, target: Tensor, free: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Copy what :meth:`buffer` gave, on a GPU after ``free``; returns the event of its end."""
        if self._stream is None or free is None:
            target.copy_(buffer)
            return None
        # Threads that wait for the device leave the processor to those that read.
        copied = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(free)
            target.copy_(buffer, non_blocking=True)
            copied.record(self._stream)
        self._copied[self._turn] = copied
        return copied

    def close(self) -> None:
        """Wait until all copies are done, and free the buffers."""
        if self._stream is not None:
            self._stream.synchronize()
        self._buffers.clear()
        if self._stream is not None:
            # A pinned buffer that is freed records an event, and is in use until that is over.
            self._stream.synchronize()
