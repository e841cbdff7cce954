"""GGUF files: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

The header is parsed here and not by ``gguf.GGUFReader``, which takes 1.9 seconds for a vocabulary
of 49 152 tokens (0.1 here) and does not check a length before it follows it. Dequantisation is left
to the ``gguf`` package.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from engine_core.checkpoint.files import check_regular_file
from engine_core.errors import CheckpointError, CorruptCheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
# Value type -> its struct code.
_SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
# By its code the name of a type that is met most, and the numbers and bytes of its blocks. The gguf
# package has all of them, and takes 35 ms to import; the start of a file with others does.
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_ALIGNMENT = 32  # of the data, where a file does not say
# Elements per call of gguf.dequantize. It processes a whole tensor 16 rows at a time, so that the
# short rows of a small model cost 2.1 s instead of 0.2 s (135 million elements).
_CHUNK_ELEMENTS = 65536


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of a GGUF file.

    Attributes:
        name: its name in the file.
        shape: sizes in numpy's order, slowest first, as they are after dequantisation.
        type_name: GGML's name of its type, such as ``Q4_K`` or ``F16``.
        offset: first byte of its data in the file.
        nbytes: bytes of its data.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int


class GGUFFile:
    """A validated and mapped GGUF file, of version 2 or 3 and little-endian.

    Attributes:
        path: the file.
        metadata: its key-value pairs; arrays of strings are lists, other arrays numpy arrays.
        tensors: its tensors by name, in file order.

    Raises:
        CheckpointNotFoundError: the file does not exist.
        CorruptCheckpointError: it is truncated, malformed, or has a type that ``gguf`` cannot read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        reader = _Reader(path)
        self._map = reader.map
        tensor_count, pair_count = reader.counts()
        self.metadata: Mapping[str, Any] = dict(reader.pairs(pair_count))
        self.tensors: Mapping[str, GGUFTensor] = {
            tensor.name: tensor for tensor in reader.tensors(tensor_count, self.metadata)
        }

    def release(self) -> None:
        """Leave the pages that were read to the system; they are read again when they are used."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def read(self, name: str) -> NDArray[np.float32]:
        """The numbers of tensor ``name`` in float32, exactly as ``gguf.dequantize`` gives them.

        Raises:
            CheckpointError: the ``gguf`` package does not know how to dequantise the type.
        """
        import numpy as np

        tensor = self.tensors[name]
        raw = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)
        match tensor.type_name:
            case "F32":
                return raw.view("<f4").astype(np.float32).reshape(tensor.shape)
            case "F16":
                return raw.view("<f2").astype(np.float32).reshape(tensor.shape)
            case "BF16":
                words = raw.view("<u2").astype(np.uint32)
                words <<= 16  # here, since a vocabulary may take gigabytes
                return words.view(np.float32).reshape(tensor.shape)
        import gguf

        type_ = gguf.GGMLQuantizationType[tensor.type_name]
        block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
        blocks = raw.reshape(-1, block_bytes)
        out = np.empty((len(blocks), block), np.float32)
        step = max(_CHUNK_ELEMENTS // block, 1)
        self.check_type(tensor)
        for start in range(0, len(blocks), step):
            row = blocks[start : start + step].reshape(1, -1)
            out[start : start + step] = gguf.dequantize(row, type_).reshape(-1, block)
        return out.reshape(tensor.shape)

    def check_type(self, tensor: GGUFTensor) -> None:
        """Refuse a tensor that cannot be turned into numbers.

        Raises:
            CheckpointError: the ``gguf`` package does not know how to dequantise its type.
        """
        if not _is_readable(tensor.type_name):
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name!r} is of type {tensor.type_name}, which the "
                "installed gguf package cannot dequantise; upgrade it or take another quantisation"
            )

    def read_bytes(self, name: str) -> NDArray[np.uint8]:
        """A copy of a tensor as it is in the file."""
        import numpy as np

        tensor = self.tensors[name]
        return np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset).copy()


class GGUFAdapter(Protocol):
    """A family's translation of its GGUF files; a plugin offers one class per architecture.

    The constructor refuses a file that it cannot translate exactly. An adapter may have a method
    ``tensor_shape(name, shape)`` too: the shape of GGUF tensor ``name`` in an ordinary checkpoint,
    of as many numbers in the same order, where that is not always the file's.

    Attributes:
        version: raised by the plugin whenever it translates differently, so that what was
            converted before is converted again.
    """

    version: ClassVar[int]

    def __init__(self, gguf: GGUFFile) -> None:
        """Look at the file.

        Raises:
            CheckpointError: it has a key, value or tensor that cannot be translated.
        """

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``; ids of special tokens and dtype are added by the core."""

    def tensor_name(self, name: str) -> str | None:
        """The tensor's name in an ordinary checkpoint, or None if it is not part of one.

        Raises:
            CheckpointError: it is not known.
        """

    def transform(self, name: str, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """The numbers of GGUF tensor ``name`` in an ordinary checkpoint's order, of equal shape."""


def read_architecture(path: Path) -> str:
    """``general.architecture`` of a GGUF file; reads no further than that.

    Raises:
        CorruptCheckpointError: it is damaged or does not say.
    """
    reader = _Reader(path)
    _, pair_count = reader.counts()
    for key, value in reader.pairs(pair_count):
        if key == "general.architecture" and isinstance(value, str):
            return value
    raise CorruptCheckpointError(f"{path} does not say its general.architecture")


def _type_of_package(code: int) -> tuple[str, int, int]:
    import gguf

    type_ = gguf.GGMLQuantizationType(code)
    return type_.name, *gguf.GGML_QUANT_SIZES[type_]


@cache
def _is_readable(type_name: str) -> bool:
    if any(type_name == known for known, _, _ in _TYPES.values()):
        return True
    import gguf
    import numpy as np

    type_ = gguf.GGMLQuantizationType[type_name]
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[type_][1]), np.uint8), type_)
    except NotImplementedError:
        return False
    return True


class _Reader:
    """Walks through the header; every length is checked before it is followed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = check_regular_file(path)
        with path.open("rb") as file:
            self.map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
        self._at = 0

    def counts(self) -> tuple[int, int]:
        if self._take(4, "the magic") != b"GGUF":
            raise CorruptCheckpointError(
                f"{self.path} is no GGUF file: it does not begin with GGUF"
            )
        version = self._unpack("I", "the version")
        if version not in (2, 3):
            hint = "it may be big-endian" if version > 0xFFFF else "convert the model again"
            raise CorruptCheckpointError(
                f"{self.path} is a GGUF file of version {version}, not 2 or 3; {hint}"
            )
        tensor_count = self._unpack("Q", "the number of tensors")
        pair_count = self._unpack("Q", "the number of keys")
        # A key takes at least its length, its type and a byte; a tensor a length and three fields.
        self._room(pair_count * 13, f"{pair_count} keys")
        self._room(tensor_count * 24, f"{tensor_count} tensors")
        return tensor_count, pair_count

    def pairs(self, count: int) -> Iterator[tuple[str, Any]]:
        seen = set()
        for _ in range(count):
            key = self._string("a key")
            if key in seen:
                raise CorruptCheckpointError(f"{self.path}: the key {key!r} is given twice")
            seen.add(key)
            yield key, self._value(self._unpack("I", f"the type of {key}"), key)

    def tensors(self, count: int, metadata: Mapping[str, Any]) -> list[GGUFTensor]:
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise CorruptCheckpointError(
                f"{self.path}: general.alignment must be a power of two, got {alignment!r}"
            )
        infos = [self._tensor_info() for _ in range(count)]
        start = self._at + -self._at % alignment
        tensors: list[GGUFTensor] = []
        for name, dims, code, offset in infos:
            where = f"{self.path}: tensor {name!r}"
            try:
                type_name, block, block_bytes = _TYPES.get(code) or _type_of_package(code)
            except (ValueError, KeyError):
                raise CorruptCheckpointError(
                    f"{where} is of the unknown type {code}; upgrade the gguf package if it is new"
                ) from None
            if dims[0] % block:
                raise CorruptCheckpointError(
                    f"{where}: rows of {dims[0]} are no whole blocks of {type_name} ({block})"
                )
            if offset % alignment:
                raise CorruptCheckpointError(
                    f"{where} begins at {offset}, which is no multiple of the alignment {alignment}"
                )
            nbytes = math.prod(dims) // block * block_bytes
            if start + offset + nbytes > self.size:
                raise CorruptCheckpointError(
                    f"{self.path} is truncated: tensor {name!r} ends at byte "
                    f"{start + offset + nbytes}, the file has {self.size}; download it again"
                )
            shape = tuple(reversed(dims))
            tensors.append(GGUFTensor(name, shape, type_name, start + offset, nbytes))
        self._check_apart(tensors)
        return tensors

    def _check_apart(self, tensors: list[GGUFTensor]) -> None:
        names = set()
        end = 0
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            if tensor.name in names:
                raise CorruptCheckpointError(f"{self.path}: tensor {tensor.name!r} is given twice")
            names.add(tensor.name)
            if tensor.offset < end:
                raise CorruptCheckpointError(
                    f"{self.path}: tensor {tensor.name!r} overlaps the one before it"
                )
            end = tensor.offset + tensor.nbytes

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor's name")
        count = self._unpack("I", f"the dimensions of {name}")
        if not 1 <= count <= _MAX_DIMS:
            raise CorruptCheckpointError(
                f"{self.path}: tensor {name!r} has {count} dimensions, not 1 to {_MAX_DIMS}"
            )
        dims = tuple(self._unpack("Q", f"the dimensions of {name}") for _ in range(count))
        if 0 in dims:
            raise CorruptCheckpointError(f"{self.path}: tensor {name!r} has no elements: {dims}")
        code = self._unpack("I", f"the type of {name}")
        return name, dims, code, self._unpack("Q", f"the offset of {name}")

    def _value(self, type_: int, key: str) -> Any:
        if type_ == _STRING:
            return self._string(key)
        if type_ == _ARRAY:
            return self._array(key)
        if type_ not in _SCALARS:
            raise CorruptCheckpointError(f"{self.path}: {key} is of the unknown type {type_}")
        value = self._unpack(_SCALARS[type_], key)
        if type_ == 6:
            import numpy as np

            # The shortest decimal of a float32, as the writer was given it: not 9.9999997e-06.
            value = float(str(np.float32(value)))
        return value

    def _array(self, key: str) -> Any:
        type_ = self._unpack("I", key)
        count = self._unpack("Q", key)
        if type_ == _STRING:
            self._room(count * 8, f"{count} strings of {key}")
            return self._strings(count, key)
        if type_ not in _SCALARS:
            raise CorruptCheckpointError(
                f"{self.path}: {key} is an array of the unknown or nested type {type_}"
            )
        import numpy as np

        dtype = np.dtype(_SCALARS[type_]).newbyteorder("<")
        return np.frombuffer(self._take(count * dtype.itemsize, key), dtype)

    def _strings(self, count: int, key: str) -> list[str]:
        """As many calls of :meth:`_string`, in a third of the time; vocabularies are long."""
        strings: list[str] = []
        data, at, read = self.map, self._at, _LENGTH.unpack_from
        try:
            for _ in range(count):
                begin = at + _LENGTH.size
                end = begin + read(data, at)[0]
                if end > self.size:  # a slice would copy the rest of the file
                    break
                strings.append(str(data[begin:end], "utf-8"))
                at = end
        except (struct.error, UnicodeDecodeError):
            pass
        self._at = at
        # The first that is wrong is read once more, by what says how.
        return [*strings, *(self._string(key) for _ in range(count - len(strings)))]

    def _string(self, what: str) -> str:
        data = self._take(self._unpack("Q", what), what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptCheckpointError(
                f"{self.path}: {what} is not valid UTF-8 at byte {self._at - len(data)}"
            ) from error

    def _unpack(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code), what))[0]

    def _take(self, count: int, what: str) -> bytes:
        self._room(count, what)
        self._at += count
        return self.map[self._at - count : self._at]

    def _room(self, count: int, what: str) -> None:
        if self._at + count > self.size:
            raise CorruptCheckpointError(
                f"{self.path} is truncated or damaged: {what} should take {count} bytes from byte "
                f"{self._at} on, but the file has {self.size}"
            )
