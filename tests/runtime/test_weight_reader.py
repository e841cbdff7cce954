"""Pieces of files read by several threads; what they make of them is compared with the bytes."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import entry, safetensors_bytes, write_config, write_index
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine_core.checkpoint import TensorHeader, open_checkpoint
from engine_core.errors import CorruptCheckpointError
from engine_core.runtime.weight_reader import read_weights

CPU = torch.device("cpu")
CODES = {"bool": "BOOL", "uint8": "U8", "bfloat16": "BF16", "float32": "F32", "int64": "I64"}
SIZES = {"bool": 1, "uint8": 1, "bfloat16": 2, "float32": 4, "int64": 8}


def names_of(threads: list[threading.Thread]) -> list[str]:
    return [thread.name for thread in threads if thread.name.startswith("weights")]


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    yield
    assert names_of(threading.enumerate()) == []


def write_shards(
    folder: Path, shards: list[list[tuple[str, tuple[int, ...]]]]
) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Write a checkpoint whose tensors stand one after another, aligned or not."""
    write_config(folder)
    random = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    expected = {}
    for number, tensors in enumerate(shards):
        header, data = {}, b""
        for index, (dtype, shape) in enumerate(tensors):
            name = f"shard{number}.tensor{index}"
            raw = random.integers(0, 256, int(np.prod(shape)) * SIZES[dtype], dtype=np.uint8)
            raw = raw % 2 if dtype == "bool" else raw
            header[name] = entry(CODES[dtype], list(shape), len(data), len(data) + raw.size)
            data += raw.tobytes()
            expected[name] = (dtype, shape, raw.tobytes())
            weight_map[name] = f"{number}.safetensors"
        (folder / f"{number}.safetensors").write_bytes(safetensors_bytes(header, data))
    write_index(folder, weight_map)
    return expected


def files_in(folder: Path) -> Any:
    files = open_checkpoint(folder).safetensors_files()
    assert files is not None
    return files


def content(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    raw = tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw


def collect(weights: Iterator[tuple[str, Tensor]], into: list[Any]) -> None:
    for name, tensor in weights:
        into.append((name, content(tensor)))


tensors = st.tuples(
    st.sampled_from(sorted(CODES)), st.lists(st.integers(0, 9), max_size=3).map(tuple)
)
sizes = st.fixed_dictionaries(
    {
        "num_threads": st.integers(1, 5),
        "piece_bytes": st.integers(1, 200) | st.just(10_000),
        "ahead_bytes": st.integers(0, 2000),
    }
)


@given(
    shards=st.lists(st.lists(tensors, min_size=1, max_size=6), min_size=1, max_size=3),
    sizes=sizes,
    stop=st.none() | st.integers(0, 5),
)
def test_whatever_the_sizes(
    shards: list[list[tuple[str, tuple[int, ...]]]],
    sizes: dict[str, int],
    stop: int | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("model")
    expected = write_shards(folder, shards)
    with closing(read_weights(files_in(folder), CPU, **sizes)) as weights:
        read = [(name, content(tensor)) for name, tensor in itertools.islice(weights, stop)]
    assert read == list(expected.items())[:stop]


def test_every_tensor_has_memory_of_its_own(tmp_path: Path) -> None:
    write_shards(tmp_path, [[("float32", (5,)), ("uint8", (3,))]])
    read = [tensor for _, tensor in read_weights(files_in(tmp_path), CPU)]
    for tensor in read:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@given(shards=st.lists(tensors, min_size=2, max_size=8), keep=st.integers(0, 10_000), sizes=sizes)
def test_a_file_cut_short_after_it_was_opened(
    shards: list[tuple[str, tuple[int, ...]]],
    keep: int,
    sizes: dict[str, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Tensors before the cut are handed out, the first behind it is named."""
    folder = tmp_path_factory.mktemp("model")
    expected = write_shards(folder, [shards, [("uint8", (3,))]])
    files = files_in(folder)
    path = folder / "0.safetensors"
    whole = [(name, value) for name, value in expected.items() if name.startswith("shard0")]
    data_start = path.stat().st_size - sum(len(raw) for _, (_, _, raw) in whole)
    keep = min(keep, path.stat().st_size)
    os.truncate(path, keep)
    position, good, cut = data_start, [], None
    for name, value in whole:
        position += len(value[2])
        if value[2] and position > keep:
            cut = name
            break
        good.append((name, value))
    read: list[Any] = []
    weights = read_weights(files, CPU, **sizes)
    if cut is None:
        collect(weights, read)
        assert read == list(expected.items())
        return
    with pytest.raises(CorruptCheckpointError, match=f"truncated .*'{cut}'") as caught:
        collect(weights, read)
    assert str(path) in str(caught.value)
    assert read == good


def test_an_error_of_the_disk_names_file_and_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path, [[("uint8", (100,)), ("float32", (100,)), ("uint8", (100,))]])
    files = files_in(tmp_path)
    begin = (tmp_path / "0.safetensors").stat().st_size - 600 + 100
    read = os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if begin + 200 <= offset < begin + 300:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    weights = read_weights(files, CPU, piece_bytes=10)
    assert next(weights)[0] == "shard0.tensor0"
    with pytest.raises(
        CorruptCheckpointError,
        match=r"0\.safetensors: tensor 'shard0\.tensor1' cannot be read: Input/output error",
    ):
        next(weights)


def test_reads_may_give_less_than_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = write_shards(tmp_path, [[("float32", (50,)), ("uint8", (7,))]])
    files = files_in(tmp_path)
    read = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:3]], offset)
    )
    weights = read_weights(files, CPU, piece_bytes=40)
    assert {name: content(tensor) for name, tensor in weights} == expected


def test_a_consumer_that_fails_ends_the_threads(tmp_path: Path) -> None:
    write_shards(tmp_path, [[("float32", (50,))] * 20])
    files = files_in(tmp_path)

    def consume() -> None:
        with closing(read_weights(files, CPU, piece_bytes=8)) as weights:
            for _ in weights:
                assert names_of(threading.enumerate())
                raise ValueError("the consumer")

    # The traceback keeps the frame of the loop, and with it the iterator.
    with pytest.raises(ValueError, match="the consumer"):
        consume()
    assert names_of(threading.enumerate()) == []


class SlowFile:
    """A file of tensors of 100 bytes whose reading is waited for and counted."""

    def __init__(self, nbytes: list[int]) -> None:
        self.headers: Mapping[str, TensorHeader] = {
            str(index): TensorHeader(str(index), "uint8", (size,), Path("slow"), size)
            for index, size in enumerate(nbytes)
        }
        self.begun: list[tuple[str, int]] = []
        self.go_on = threading.Event()

    def read_into(self, buffer: memoryview, name: str, start: int) -> None:
        self.begun.append((name, start))
        assert self.go_on.wait(60)
        buffer[:] = bytes([int(name) + start // 10 % 10] * buffer.nbytes)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_threads_read_at_once() -> None:
    file = SlowFile([40, 30, 20])
    weights = read_weights([file], CPU, num_threads=3, piece_bytes=10)
    got: list[tuple[str, Tensor]] = []
    consumer = threading.Thread(target=lambda: got.extend(weights))
    consumer.start()
    until(lambda: len(file.begun) == 3)
    assert sorted(file.begun) == [("0", 0), ("0", 10), ("0", 20)]
    file.go_on.set()
    consumer.join()
    assert [name for name, _ in got] == ["0", "1", "2"]
    assert got[1][1].tolist() == [1] * 10 + [2] * 10 + [3] * 10


def test_pieces_are_taken_in_the_order_of_the_files() -> None:
    files = [SlowFile([40, 30]), SlowFile([5, 0, 25])]
    for file in files:
        file.go_on.set()
    for _ in read_weights(files, CPU, num_threads=1, piece_bytes=10):
        pass
    assert files[0].begun == [
        *(("0", start) for start in (0, 10, 20, 30)),
        *(("1", start) for start in (0, 10, 20)),
    ]
    assert files[1].begun == [("0", 0), *(("2", start) for start in (0, 10, 20))]


@pytest.mark.parametrize("ahead", [0, 100, 250, 1000])
def test_no_more_is_read_ahead_than_there_may_be(ahead: int) -> None:
    nbytes = [100, 50, 300, 10, 100, 100, 100, 5000, 20, 20]
    file = SlowFile(nbytes)
    file.go_on.set()
    for handed_out, (name, _) in enumerate(
        read_weights([file], CPU, ahead_bytes=ahead, piece_bytes=5000)
    ):
        assert name == str(handed_out)
        begun = {int(name) for name, _ in file.begun}
        waiting = [nbytes[index] for index in begun if index > handed_out]
        before = nbytes[handed_out - 1] if handed_out else 0
        alone = before + nbytes[handed_out]
        assert before + nbytes[handed_out] + sum(waiting) <= max(ahead, alone)
    assert len(file.begun) == len(nbytes)


@pytest.mark.usefixtures("quick_collections")
def test_only_the_consumer_keeps_a_tensor(tmp_path: Path) -> None:
    write_shards(tmp_path, [[("float32", (50,))] * 20])
    count = 0
    for _, tensor in read_weights(files_in(tmp_path), CPU, piece_bytes=16):
        alive = weakref.ref(tensor)
        del tensor
        gc.collect()
        assert alive() is None
        count += 1
    assert count == 20


def test_a_checkpoint_of_another_format_has_no_such_files(tmp_path: Path) -> None:
    write_config(tmp_path)
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert open_checkpoint(tmp_path).safetensors_files() is None
