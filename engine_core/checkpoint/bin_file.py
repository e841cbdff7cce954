"""``pytorch_model.bin``: a pickle in a zip archive, read without running any code of its own."""

from __future__ import annotations

import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from engine_core.checkpoint.files import TensorHeader, check_regular_file
from engine_core.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from torch import Tensor

# The names in a pickle of tensors: of classes, of functions that build them, of dtypes.
_TENSOR_PARTS = re.compile(
    r"collections\.OrderedDict|torch\._utils\._rebuild_\w+"
    r"|torch\.serialization\._get_layout|torch\.nn\.parameter\.Parameter"
    r"|torch\.(storage\.)?\w*Storage|torch\.Size|torch\.device|torch\.(b?float|u?int|complex|bool)\w*"
)


class BinFile:
    """A file of ``torch.save``: checked as an archive at once, read by torch on first use.

    Raises:
        CheckpointNotFoundError: the file does not exist.
        CorruptCheckpointError: it is no whole archive, is compressed, needs code to be read, or
            holds anything but tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = check_regular_file(path)
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"PK\x03\x04":
            raise CorruptCheckpointError(
                f"{path} is not an archive of torch.save (files older than torch 1.6 are not read; "
                "load and save it again, best as safetensors)"
            )
        try:
            with zipfile.ZipFile(path) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise CorruptCheckpointError(
                f"{path} is truncated or damaged: {error}; download it again"
            ) from error
        # torch stores entries as they are; anything else could unpack to any size.
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or size < sum(
            entry.file_size for entry in entries
        ):
            raise CorruptCheckpointError(f"{path} has compressed entries, which torch never writes")

    @cached_property
    def headers(self) -> Mapping[str, TensorHeader]:
        """The tensors in the order in which they stand in the file."""
        return {
            name: TensorHeader(
                name,
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                self.path,
                tensor.numel() * tensor.itemsize,
            )
            for name, tensor in self._state_dict.items()
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors in that order, mapped from the file."""
        yield from self._state_dict.items()

    def _check_globals(self) -> None:
        """Refuse a pickle that names more than tensors are made of.

        torch allows more, of which some take any amount of memory, such as ``bytearray``.
        """
        with zipfile.ZipFile(self.path) as archive:
            for name in archive.namelist():
                if name.endswith("/data.pkl"):
                    strings: list[str] = []
                    for opcode, argument, _ in pickletools.genops(archive.read(name)):
                        if opcode.name in ("GLOBAL", "INST"):
                            self._check_global(str(argument).replace(" ", "."))
                        elif opcode.name == "STACK_GLOBAL":
                            self._check_global(".".join(strings[-2:]))
                        elif isinstance(argument, str):
                            strings.append(argument)

    def _check_global(self, name: str) -> None:
        if not _TENSOR_PARTS.fullmatch(name):
            raise pickle.UnpicklingError(f"{name} is no part of a tensor")

    @cached_property
    def _state_dict(self) -> dict[str, Tensor]:
        import torch

        try:
            self._check_globals()
            values = torch.load(self.path, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError as error:
            # Only the first line: the rest advises to switch the protection off.
            raise CorruptCheckpointError(
                f"{self.path} is refused: it is damaged or needs code of its own to be read "
                f"({str(error).splitlines()[0]}); ask for a safetensors file"
            ) from error
        except Exception as error:  # Damaged pickles raise nearly anything.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CorruptCheckpointError(
                f"{self.path} is truncated or damaged: {reason}; download it again"
            ) from error
        if not isinstance(values, dict):
            raise CorruptCheckpointError(
                f"{self.path} holds a {type(values).__name__}, not a dictionary of tensors"
            )
        for name, value in values.items():
            if not isinstance(name, str) or not isinstance(value, torch.Tensor):
                raise CorruptCheckpointError(
                    f"{self.path}: entry {name!r} is a {type(value).__name__}, not a tensor"
                )
            if value.layout is not torch.strided or value.is_quantized or value.is_meta:
                raise CorruptCheckpointError(f"{self.path}: tensor {name!r} is not a dense one")
        return values
