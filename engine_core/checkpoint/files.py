"""Parts shared by all kinds of weight files: tensor headers, and checks of a file's beginning."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol

from engine_core.configs.hf_config import read_object
from engine_core.errors import CheckpointNotFoundError, CorruptCheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Name, dtype and shape of one tensor, known without reading its data.

    Attributes:
        name: its name in the checkpoint.
        dtype: element type by torch's name, such as ``bfloat16`` or ``float8_e4m3fn``.
        shape: sizes of its dimensions; empty for a scalar.
        file: the file that holds it.
        nbytes: bytes of its data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    nbytes: int


class WeightFile(Protocol):
    """An open and validated weight file."""

    path: Path

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """The tensors in the order in which they stand in the file."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors in that order, mapped from the file."""


def check_regular_file(path: Path) -> int:
    """The size in bytes of ``path``, which must be a file that can hold weights.

    Raises:
        CheckpointNotFoundError: it does not exist.
        CorruptCheckpointError: it is empty, no regular file (a pipe would never end), a loop of
            links, unreadable, or a Git-LFS pointer left by a clone without ``git lfs pull``.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CorruptCheckpointError(f"{path} is not a regular file")
        if status.st_size == 0:
            raise CorruptCheckpointError(f"{path} is empty; download it again")
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{path} does not exist") from None
    except OSError as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if start == _LFS_POINTER:
        raise CorruptCheckpointError(
            f"{path} is a Git-LFS pointer, not the file itself; run 'git lfs pull' in its folder"
        )
    return status.st_size


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        CheckpointNotFoundError: the file does not exist.
        CorruptCheckpointError: it holds anything but a JSON object.
    """
    check_regular_file(path)
    return read_object(path, CorruptCheckpointError)


def read_index(path: Path) -> dict[Path, set[str]]:
    """The shards that a ``*.index.json`` names, in its order, with the tensors of each.

    Raises:
        CorruptCheckpointError: the index is malformed or names a file outside its folder.
        CheckpointNotFoundError: a shard is missing.
    """
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptCheckpointError(
            f"{path}: 'weight_map' must be an object from tensor names to files, got "
            f"{type(weight_map).__name__ if not isinstance(weight_map, dict) else 'an empty one'}"
        )
    shards: dict[Path, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CorruptCheckpointError(
                f"{path}: the file of tensor {tensor!r} must be a string, got {shard!r}"
            )
        parts = PurePosixPath(shard).parts
        if not parts or parts[0] == "/" or ".." in parts or "\\" in shard or "\0" in shard:
            raise CorruptCheckpointError(
                f"{path}: tensor {tensor!r} is said to be in {shard!r}, which is no file inside "
                "the checkpoint's folder"
            )
        shards.setdefault(path.parent / shard, set()).add(tensor)
    missing = sorted(str(shard.relative_to(path.parent)) for shard in shards if not is_there(shard))
    if missing:
        raise CheckpointNotFoundError(
            f"{path} names {len(shards)} files, of which {len(missing)} are missing: "
            f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}; download them"
        )
    return shards


def is_there(path: Path) -> bool:
    """Whether ``path`` exists, even as a broken link, which the reader then reports."""
    return os.path.lexists(path)  # False for a name that no file can have
