"""A whole model in one safetensors file: its weights, and its other files in the metadata.

Any reader of safetensors opens such a file. Beside ``format`` its metadata hold ``file:NAME``, the
text of a file of the checkpoint's folder, or ``base64:NAME`` where that is no text;
``engine_core.scheme``, how the weights were quantised when the file was written;
``engine_core.sha256``, a JSON object of the hash of each tensor's bytes; and
``engine_core.header_sha256``, the hash of all that and of the tensors' names, types and shapes in
their order. The first hashes are compared when asked for, the last whenever the file is opened.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.checkpoint.disk_cache import DiskCache
from engine_core.checkpoint.safetensors_file import (
    MAX_HEADER_BYTES,
    SafetensorsFile,
    SafetensorsWriter,
    tensor_bytes,
)
from engine_core.checkpoint.tokenizer_json import with_short_merges
from engine_core.configs.hf_config import parse_json
from engine_core.errors import CheckpointError, CorruptCheckpointError, OptionError

if TYPE_CHECKING:
    from torch import Tensor

_VERSION = "1"
_VERSION_KEY = "engine_core.version"
_SCHEME_KEY = "engine_core.scheme"
_TENSORS_KEY = "engine_core.sha256"
_HEADER_KEY = "engine_core.header_sha256"
_TEXT, _BYTES = "file:", "base64:"
_NO_HASH = "0" * 64
_TOKENIZER = "tokenizer.json"
# A name, or one in a folder; nothing that leads anywhere else.
_NAME = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*", re.ASCII)
_PIECE_BYTES = 16 * 2**20
_TEMPORARY = ".tmp"

# The files of a checkpoint's folder that its config, tokenizer and processors are read from.
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "tekken.json"),
    *("*.model", "tokenizer.model.*", "*.tiktoken"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
    *("modules.json", "sentence_*_config.json", "config_sentence_transformers.json"),
    *("[0-9]*_*/config.json", "[0-9]*_*/model.safetensors", "[0-9]*_*/pytorch_model.bin"),
)

Spec = tuple[str, str, tuple[int, ...]]
"""Name, dtype by torch's name and shape of a tensor."""


class OneFile:
    """An opened file of a whole model.

    Attributes:
        weights: its tensors.
        files: the bytes of its other files, by name.
        scheme: how it was quantised when it was written; None if it was not then.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: the header is damaged, or the file is no whole model.
    """

    def __init__(self, path: Path) -> None:
        self.weights = SafetensorsFile(path)
        metadata = self.weights.metadata
        version = metadata.get(_VERSION_KEY)
        if version is None:
            raise CorruptCheckpointError(
                f"{path} holds tensors alone; give the folder it lies in, a .gguf file, or a file "
                "that 'engine-core export' wrote"
            )
        if version != _VERSION:
            raise CorruptCheckpointError(
                f"{path} is of version {version!r} of files of whole models, and this engine-core "
                f"reads version {_VERSION}; export the model again"
            )
        self.scheme = metadata.get(_SCHEME_KEY)
        specs = [(name, each.dtype, each.shape) for name, each in self.weights.headers.items()]
        self._digest = _header_hash(metadata, specs)
        if metadata.get(_HEADER_KEY) != self._digest:
            raise CorruptCheckpointError(
                f"{path}: the header is not the one that was written (its hash is another); copy "
                "the file again, or export the model again"
            )
        self._hashes = _read_hashes(path, metadata.get(_TENSORS_KEY))
        if self._hashes.keys() != self.weights.headers.keys():
            name = min(self._hashes.keys() ^ self.weights.headers.keys())
            raise CorruptCheckpointError(f"{path}: {_TENSORS_KEY} and the tensors differ in {name}")
        self.files = dict(_read_files(path, metadata))
        if "config.json" not in self.files:
            raise CorruptCheckpointError(f"{path}: there is no config.json in its metadata")

    def folder(self, cache: DiskCache | None = None) -> Path:
        """A folder of the disk cache with :attr:`files`; its tokenizer may be written shorter.

        Raises:
            CheckpointError: the cache cannot be written.
        """
        return (cache or DiskCache()).get(f"one-file-2-{self._digest[:40]}", self._write_kept)

    def _write_kept(self, folder: Path) -> None:
        self.write_files(folder)
        if _TOKENIZER in self.files:
            (folder / _TOKENIZER).write_bytes(with_short_merges(self.files[_TOKENIZER]))

    def write_files(self, folder: Path) -> None:
        """Write :attr:`files` into ``folder``."""
        for name, data in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)

    def changed(self) -> tuple[str, ...]:
        """Names of the tensors whose bytes are not those that were written; reads all of them.

        Raises:
            CorruptCheckpointError: they cannot be read.
        """
        return tuple(
            name for name in self.weights.headers if self._hash(name) != self._hashes[name]
        )

    def _hash(self, name: str) -> str:
        total, hashed = self.weights.headers[name].nbytes, hashlib.sha256()
        buffer = memoryview(bytearray(min(total, _PIECE_BYTES)))
        for start in range(0, total, _PIECE_BYTES):
            piece = buffer[: min(_PIECE_BYTES, total - start)]
            self.weights.read_into(piece, name, start)
            hashed.update(piece)
        return hashed.hexdigest()


def _header_hash(metadata: Mapping[str, str], specs: Iterable[Spec]) -> str:
    # Tensors follow one another without gaps, so that their order and sizes give their offsets.
    texts = sorted((key, text) for key, text in metadata.items() if key != _HEADER_KEY)
    text = json.dumps([texts, list(specs)], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_hashes(path: Path, text: str | None) -> dict[str, str]:
    try:
        hashes: Any = parse_json(text or "")
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: {_TENSORS_KEY} is not JSON: {error}") from error
    if not isinstance(hashes, dict):
        raise CorruptCheckpointError(f"{path}: {_TENSORS_KEY} is not an object")
    return hashes


def _read_files(path: Path, metadata: Mapping[str, str]) -> Iterable[tuple[str, bytes]]:
    for key, text in metadata.items():
        kind, _, name = key.partition(":")
        if f"{kind}:" not in (_TEXT, _BYTES):
            continue
        if _NAME.fullmatch(name) is None:
            raise CorruptCheckpointError(f"{path}: {key!r} in its metadata is no name of a file")
        try:
            yield name, text.encode() if kind == "file" else base64.b64decode(text, validate=True)
        except (UnicodeEncodeError, binascii.Error) as error:
            raise CorruptCheckpointError(f"{path}: {key!r} cannot be read: {error}") from error


def collect_files(*folders: Path) -> dict[str, bytes]:
    """The files of checkpoint folders that :data:`FILES` names; the first folder that has one.

    Raises:
        CheckpointError: one cannot be read.
    """
    found: dict[str, bytes] = {}
    for folder in dict.fromkeys(folders):
        for pattern in FILES:
            for file in sorted(folder.glob(pattern)):
                name = file.relative_to(folder).as_posix()
                if name in found or not file.is_file():
                    continue
                try:
                    found[name] = file.read_bytes()
                except OSError as error:
                    raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    return found


def write_one_file(
    path: Path,
    files: Mapping[str, bytes],
    specs: Sequence[Spec],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    scheme: str | None = None,
    force: bool = False,
) -> int:
    """Write a whole model; it appears at ``path`` when it is complete. Returns its bytes.

    Args:
        path: the file.
        files: by name, as :func:`collect_files` gives them, and ``config.json``.
        specs: the tensors in the order that they shall have in the file.
        tensors: each of them once, in any order, on the CPU.
        scheme: how the tensors were quantised.
        force: whether ``path`` may be there already.

    Raises:
        OptionError: it is there already.
        CheckpointError: it cannot be written, such as to a full disk, or the files together are
            larger than a header may be.
    """
    check_target(path, force)
    metadata = {"format": "pt", _VERSION_KEY: _VERSION}
    metadata |= {} if scheme is None else {_SCHEME_KEY: scheme}
    for name, data in files.items():
        try:
            metadata[_TEXT + name] = data.decode()
        except UnicodeDecodeError:
            metadata[_BYTES + name] = base64.b64encode(data).decode()
    hashes = {name: _NO_HASH for name, _, _ in specs}
    metadata |= {_TENSORS_KEY: json.dumps(hashes, ensure_ascii=False), _HEADER_KEY: _NO_HASH}
    size = sum(len(text.encode()) for text in metadata.values())
    if size > MAX_HEADER_BYTES // 2:  # escapes may take as much again
        largest = max(files, key=lambda name: len(files[name]))
        raise CheckpointError(
            f"the files of the model have {size} bytes ({largest} alone {len(files[largest])}), "
            f"too many for the header of a safetensors file"
        )

    def write(temporary: Path) -> None:
        with SafetensorsWriter(temporary, list(specs), metadata) as writer:
            written = set[str]()
            for name, tensor in tensors:
                data = tensor_bytes(tensor)
                writer.write(name, data)
                hashes[name] = hashlib.sha256(data).hexdigest()
                written.add(name)
            assert written == hashes.keys(), f"not written: {sorted(hashes.keys() - written)[:3]}"
            metadata[_TENSORS_KEY] = json.dumps(hashes, ensure_ascii=False)
            metadata[_HEADER_KEY] = _header_hash(metadata, specs)
            writer.set_metadata(metadata)
            writer.sync()

    write_whole(path, write)
    return path.stat().st_size


def check_target(path: Path, force: bool) -> None:
    """Refuse a name that no command would open, and to overwrite unless ``force`` says so.

    Raises:
        OptionError: ``path`` does not end with .safetensors, is there already, is a folder, or
            cannot be looked for; or it is not in a folder.
    """
    try:
        is_folder, is_there = path.is_dir(), path.exists()
    except OSError as error:
        raise OptionError(
            f"{path} cannot be a file: {error.strerror}; take another name"
        ) from error
    if is_folder:
        raise OptionError(f"{path} is a folder; name a file in it")
    if path.suffix.lower() != ".safetensors":
        raise OptionError(
            f"{path} does not end with .safetensors, by which such a file is known as a model; "
            f"name it {path.name}.safetensors"
        )
    if is_there and not force:
        raise OptionError(f"{path} is there already; take another name, or give --force")
    if not path.absolute().parent.is_dir():
        raise OptionError(f"{path.absolute().parent} is no folder; make it first")


def write_whole(path: Path, write: Callable[[Path], None], *, folder: bool = False) -> None:
    """Have a file or folder filled beside its place, and move it there when it is complete.

    What killed processes left of the same name goes first.

    Args:
        path: its place.
        write: fills it where it is told, an empty file or folder.
        folder: whether it is a folder.

    Raises:
        CheckpointError: it cannot be written; nothing of it is left.
    """
    stem = f".{path.name}.{_boot()}-{secrets.token_hex(4)}"
    made, temporary = (path.with_name(stem + suffix) for suffix in (".new", _TEMPORARY))
    held = None
    try:
        _remove_left(path)
        if folder:
            made.mkdir()
        else:
            made.touch()
        # Others take what has its name without a lock for a dead process's.
        held = os.open(made, os.O_RDONLY)
        _lock(held)
        made.replace(temporary)
        write(temporary)
        temporary.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror or error}; nothing of it was left"
        ) from error
    finally:
        _remove(made)
        _remove(temporary)
        if held is not None:
            os.close(held)


def _remove_left(path: Path) -> None:
    """Remove what processes that were killed left of ``path``, of this start of the machine.

    Locks of another machine, or of a program that makes none, are not seen: theirs stay.
    """
    if not _boot():
        return
    name = re.compile(rf"\.{re.escape(path.name)}\.{_boot()}-[0-9a-f]{{8}}{re.escape(_TEMPORARY)}")
    found: list[Path] = []
    with suppress(OSError):
        found += path.absolute().parent.iterdir()
    for left in found:
        if name.fullmatch(left.name) is None:
            continue
        with suppress(OSError):
            held = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if _lock(held):
                    _remove(left)
            finally:
                os.close(held)


def _lock(descriptor: int) -> bool:
    """Lock a file or folder until it is closed; whether it was free."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # Somebody has it, or the file system has no locks.
        return False
    return True


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@cache
def _boot() -> str:
    """A name of this start of this machine; "" if the system gives none."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return ""
    return hashlib.sha256(text).hexdigest()[:12]
