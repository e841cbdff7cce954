"""From a GGUF file to an ordinary checkpoint: at once, or as a folder in the disk cache."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core import own_process
from engine_core.checkpoint.disk_cache import DiskCache, file_key
from engine_core.checkpoint.files import TensorHeader, check_regular_file
from engine_core.checkpoint.gguf import GGUFAdapter, GGUFFile, GGUFTensor, read_architecture
from engine_core.checkpoint.safetensors_file import SafetensorsWriter
from engine_core.configs.dtypes import DTYPES, itemsize
from engine_core.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    EngineError,
    UnknownArchitectureError,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

logger = logging.getLogger(__name__)

# Raised whenever the files written here change, so that old entries of the cache are left alone.
FORMAT_VERSION = 3
TOKENIZER_VERSION = 4
_MAX_THREADS = 8
#: Numbers of a block, by the types that may be kept as they are.
BLOCK_TYPES = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), 32),
    **dict.fromkeys(("Q4_K", "Q5_K", "Q6_K"), 256),
}
_UNQUANTISED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GGUFWeights:
    """A GGUF file's tensors, named and ordered as in an ordinary checkpoint.

    Each is converted to numbers when it is asked for, but for those that :meth:`keeping_blocks`
    names.

    Attributes:
        path: the file.
        headers: the tensors in file order, as they are after the conversion.

    Raises:
        CheckpointError: a tensor is not known, or two become one.
    """

    def __init__(self, gguf: GGUFFile, adapter: GGUFAdapter, dtype: str) -> None:
        self.path = gguf.path
        self._gguf = gguf
        self._adapter = adapter
        self._dtype = dtype
        self._kept: frozenset[str] = frozenset()
        self._orders: dict[str, NDArray[np.int64] | None] = {}
        self._sources: dict[str, GGUFTensor] = {}
        for tensor in gguf.tensors.values():
            name = adapter.tensor_name(tensor.name)
            if name in self._sources:
                raise CorruptCheckpointError(
                    f"{gguf.path}: {tensor.name!r} and {self._sources[name].name!r} are both "
                    f"{name!r}"
                )
            if name is not None:
                gguf.check_type(tensor)
                self._sources[name] = tensor
        reshape = getattr(adapter, "tensor_shape", lambda name, shape: shape)
        self.headers: Mapping[str, TensorHeader] = {
            name: TensorHeader(
                name,
                dtype,
                reshape(source.name, source.shape),
                gguf.path,
                math.prod(source.shape) * itemsize(dtype),
            )
            for name, source in self._sources.items()
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors in file order, each converted when it is asked for."""
        import torch

        for name in self._sources:
            if name not in self._kept:
                yield name, self.convert(name)
                continue
            source = self._sources[name].name
            order = self._row_order(source)
            blocks = self._gguf.read_bytes(source).reshape(self.headers[name].shape)
            yield name, torch.from_numpy(blocks if order is None else blocks[order])

    def release(self) -> None:
        """See :meth:`GGUFFile.release`."""
        self._gguf.release()

    @property
    def kept(self) -> dict[str, int]:
        """Types of the tensors that are kept as they are quantised, and how many have each."""
        return dict(Counter(self._sources[name].type_name for name in sorted(self._kept)))

    @property
    def unpacked(self) -> dict[str, list[str]]:
        """Types of quantised tensors that become numbers, and the tensors' names."""
        found: dict[str, list[str]] = {}
        for name, source in self._sources.items():
            if name not in self._kept and source.type_name not in _UNQUANTISED:
                found.setdefault(source.type_name, []).append(name)
        return found

    @cached_property
    def block_types(self) -> Mapping[str, str]:
        """The types of the matrices that :meth:`keeping_blocks` can keep."""
        found = {}
        for name, source in self._sources.items():
            if source.type_name in BLOCK_TYPES and len(source.shape) == 2:
                try:
                    self._row_order(source.name)
                except _NoRowOrderError:
                    continue
                found[name] = source.type_name
        return found

    def keeping_blocks(self, names: Collection[str]) -> GGUFWeights:
        """The same tensors, with some of :attr:`block_types` as they are quantised.

        Instead of numbers ``[N, K]`` they are uint8 ``[N, blocks of a row, bytes of a block]``.
        """
        unknown = set(names) - set(self.block_types)
        assert not unknown, f"not in blocks: {sorted(unknown)}"
        kept = GGUFWeights(self._gguf, self._adapter, self._dtype)
        kept._kept, kept._orders = frozenset(names), self._orders
        headers: dict[str, TensorHeader] = {}
        for name, header in self.headers.items():
            if name not in kept._kept:
                headers[name] = header
                continue
            source = self._sources[name]
            rows, columns = source.shape
            count = columns // BLOCK_TYPES[source.type_name]
            shape = (rows, count, source.nbytes // rows // count)
            headers[name] = TensorHeader(name, "uint8", shape, self.path, source.nbytes)
        kept.headers = headers
        return kept

    def _row_order(self, name: str) -> NDArray[np.int64] | None:
        """The adapter's order of the matrix's rows, or None if it keeps them as they are.

        Raises:
            _NoRowOrderError: it does more than reorder rows.
        """
        # Some ms for a matrix of a large model, and asked for twice.
        if name not in self._orders:
            self._orders[name] = self._find_row_order(name)
        return self._orders[name]

    def _find_row_order(self, name: str) -> NDArray[np.int64] | None:
        import numpy as np

        shape = self._gguf.tensors[name].shape
        rows = np.broadcast_to(np.arange(shape[0], dtype=np.float32)[:, None], shape)
        moved = self._adapter.transform(name, rows)
        if moved is rows:
            return None
        columns = np.broadcast_to(np.arange(shape[1], dtype=np.float32), shape)
        order = moved[:, 0]
        if (
            moved.shape != shape
            or not np.array_equal(moved, np.broadcast_to(order[:, None], shape))
            or not np.array_equal(np.sort(order), rows[:, 0])
            or not np.array_equal(self._adapter.transform(name, columns), columns)
        ):
            raise _NoRowOrderError
        return order.astype(np.int64)

    def convert(self, name: str) -> Tensor:
        """The tensor ``name``, turned back into numbers and brought to the usual order.

        Raises:
            CheckpointError: its type or its shape is not what can be translated.
        """
        import torch

        source, header = self._sources[name], self.headers[name]
        array = self._adapter.transform(source.name, self._gguf.read(source.name))
        if array.shape != source.shape:
            raise CheckpointError(
                f"{type(self._adapter).__name__}.transform made {array.shape} of {source.name!r}, "
                f"which has the shape {source.shape}; a shape must stay as it is"
            )
        numbers = torch.from_numpy(array).to(getattr(torch, header.dtype))
        return numbers.reshape(header.shape).contiguous()

    def write(self, path: Path) -> None:
        """Write all tensors to a safetensors file, several at a time."""
        import torch

        headers = [(name, header.dtype, header.shape) for name, header in self.headers.items()]
        with SafetensorsWriter(path, headers) as writer:

            def write(name: str) -> None:
                writer.write(name, self.convert(name).view(-1).view(torch.uint8).numpy().data)

            # The largest first, so that no thread is left alone with the embedding at the end.
            by_size = sorted(self.headers.values(), key=lambda header: -header.nbytes)
            with ThreadPoolExecutor(min(own_process.count_cores(), _MAX_THREADS)) as pool:
                futures = [pool.submit(write, header.name) for header in by_size]
                try:
                    for future in futures:
                        future.result()
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise


class _NoRowOrderError(Exception):
    """An adapter's transform is more than another order of the rows."""


@dataclass(frozen=True, slots=True)
class TranslatedGGUF:
    """A GGUF file described as an ordinary checkpoint; no tensor is converted yet.

    Attributes:
        config: the content of ``config.json``.
        generation_config: the content of ``generation_config.json``; empty for no such file.
        weights: its tensors.
    """

    config: dict[str, Any]
    generation_config: dict[str, Any]
    weights: GGUFWeights


def translate_gguf(
    path: Path, adapters: Mapping[str, type[GGUFAdapter]], dtype: str = "auto"
) -> TranslatedGGUF:
    """Read the header of the GGUF file at ``path``; its numbers are left alone.

    Arguments and errors are those of :func:`convert_gguf`.
    """
    from engine_core.checkpoint.gguf_tokenizer import special_ids

    _check_dtype(dtype)
    adapter_class = _adapter(path, adapters)
    gguf = GGUFFile(path)
    parts = gguf.metadata.get("split.count", 1)
    if parts != 1:
        raise CheckpointError(
            f"{gguf.path} is one of {parts} parts; join them with 'llama-gguf-split --merge'"
        )
    adapter = _adapt(gguf, adapter_class)
    if dtype == "auto":
        dtype = dtype_of_matrices(gguf) or "bfloat16"
    ids = special_ids(gguf)
    return TranslatedGGUF(
        config={**adapter.config(), **ids, "dtype": dtype},
        generation_config=ids,
        weights=GGUFWeights(gguf, adapter, dtype),
    )


def convert_gguf(
    path: Path,
    adapters: Mapping[str, type[GGUFAdapter]],
    dtype: str = "auto",
    cache: DiskCache | None = None,
) -> Path:
    """The folder that the GGUF file at ``path`` was converted to, now or earlier.

    It holds ``config.json``, ``generation_config.json`` and ``model.safetensors``.

    Args:
        path: the ``.gguf`` file.
        adapters: from ``general.architecture`` to the class that knows its tensors.
        dtype: element type of the weights; ``auto`` is that of the file's matrices if they are not
            quantised, else bfloat16.
        cache: where the folder is kept; the default cache if not given.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: it is damaged.
        CheckpointError: something in it cannot be translated, or the cache cannot be written.
        ConfigError: ``dtype`` is unknown.
        TokenizerError: the id of a special token is no index into its vocabulary.
        UnknownArchitectureError: there is no adapter for its architecture.
    """
    _check_dtype(dtype)
    adapter = _adapter(path, adapters)
    name = f"{adapter.__module__}.{adapter.__qualname__}"
    key = file_key(path, f"gguf-{FORMAT_VERSION}", name, str(adapter.version), dtype)

    def write(folder: Path) -> None:
        start = time.perf_counter()
        translated = translate_gguf(path, adapters, dtype)
        _write_json(folder / "config.json", translated.config)
        if translated.generation_config:
            _write_json(folder / "generation_config.json", translated.generation_config)
        translated.weights.write(folder / "model.safetensors")
        logger.info("converted %s in %.1f s", path, time.perf_counter() - start)

    return (cache or DiskCache()).get(key, write)


def convert_tokenizer(path: Path, cache: DiskCache | None = None) -> Path:
    """The folder with the tokenizer of the GGUF file at ``path``; it may be without one.

    It holds ``tokenizer.json`` and ``tokenizer_config.json``.

    Raises:
        CorruptCheckpointError: the file is damaged.
        CheckpointError: the cache cannot be written.
        TokenizerError: the tokenizer is of an unknown kind, or its tables contradict each other.
    """
    from engine_core.checkpoint.gguf_tokenizer import write_tokenizer

    def write(folder: Path) -> None:
        write_tokenizer(GGUFFile(path), folder)

    return (cache or DiskCache()).get(file_key(path, f"gguf-tokenizer-{TOKENIZER_VERSION}"), write)


def _check_dtype(dtype: str) -> None:
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")


def _adapter(path: Path, adapters: Mapping[str, type[GGUFAdapter]]) -> type[GGUFAdapter]:
    check_regular_file(path)
    architecture = read_architecture(path)
    adapter = adapters.get(architecture)
    if adapter is None:
        raise UnknownArchitectureError(
            f"{path} has the GGUF architecture {architecture!r}, which no installed plugin "
            f"translates; those that can be are: {', '.join(sorted(adapters)) or 'none'}"
        )
    return adapter


def _adapt(gguf: GGUFFile, adapter: type[GGUFAdapter]) -> GGUFAdapter:
    architecture = gguf.metadata["general.architecture"]
    layers = gguf.metadata.get(f"{architecture}.block_count")
    # Each has a tensor at least; an adapter may make a list of their names.
    if isinstance(layers, int) and layers > len(gguf.tensors):
        raise CorruptCheckpointError(
            f"{gguf.path}: {architecture}.block_count is {layers}, but the file holds "
            f"{len(gguf.tensors)} tensors"
        )
    try:
        return adapter(gguf)
    except EngineError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{gguf.path}: {adapter.__qualname__} cannot translate its keys: "
            f"{type(error).__name__}: {error}"
        ) from error


def dtype_of_matrices(gguf: GGUFFile) -> str | None:
    """Element type of a file's matrices; None if they are quantised, or of several types."""
    # Norms and biases are float32 in every GGUF file; the matrices say what it is.
    types = {tensor.type_name for tensor in gguf.tensors.values() if len(tensor.shape) > 1}
    return _UNQUANTISED.get(types.pop()) if len(types) == 1 else None


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
