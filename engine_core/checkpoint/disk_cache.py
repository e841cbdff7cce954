"""The disk cache of converted checkpoints."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from engine_core.errors import CheckpointError

logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 20_000_000_000
_MANIFEST = "manifest.json"
_TRASH_PREFIX = "tmp-"
_ABANDONED_SECONDS = 24 * 3600


def default_root() -> Path:
    """``$XDG_CACHE_HOME/engine-core``, and ``~/.cache/engine-core`` where that is not set."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    home = Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()
    return home / "engine-core"


def file_key(path: Path, *parts: str) -> str:
    """A key that changes with the file's place, size, time and inode, and with ``parts``."""
    status = path.stat()
    identity = [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino, *parts]
    return hashlib.blake2b(json.dumps(identity).encode(), digest_size=20).hexdigest()


class DiskCache:
    """Folders by key, each written once and then only read.

    An entry appears whole or not at all: it is written beside its place and then renamed. It may be
    deleted at any moment, wholly or in part; then what is left of it is thrown away and the entry
    is written again. Of several processes that want the same entry one writes and the others wait
    for it. When all entries together exceed ``max_bytes``, those that were used longest ago go. If
    the folder cannot be written, a temporary one takes its place for as long as the process lives,
    and a warning is logged.

    Args:
        root: folder of the entries; :func:`default_root` if not given.
        max_bytes: bytes that all entries may have together.
    """

    def __init__(self, root: Path | None = None, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.root = default_root() if root is None else root
        self.max_bytes = max_bytes

    def get(self, key: str, write: Callable[[Path], None]) -> Path:
        """The folder of ``key``, filled by ``write(folder)`` if it is not there yet.

        Raises:
            CheckpointError: the disk is full or fails; what ``write`` raises goes through.
        """
        entry = self.root / key
        if _is_whole(entry):
            with contextlib.suppress(OSError):
                os.utime(entry)
            return entry
        root = self._writable_root()
        entry = root / key
        with _lock(root / f"{key}.lock"):
            if not _is_whole(entry):
                _write(entry, write)
        self._evict(keep=entry)
        return entry

    def _writable_root(self) -> Path:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            _new_folder(self.root).rmdir()
        except OSError as error:
            return _temporary_root(self.root, error.strerror or str(error))
        return self.root

    def _evict(self, keep: Path) -> None:
        root = keep.parent
        entries: list[tuple[float, int, Path]] = []
        for folder in root.glob("*/"):
            with contextlib.suppress(OSError):
                used = folder.stat().st_mtime
                if not folder.name.startswith(_TRASH_PREFIX):
                    size = sum(file.stat().st_size for file in folder.iterdir())
                    entries.append((used, size, folder))
                elif time.time() - used > _ABANDONED_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)
        total = sum(size for _, size, _ in entries)
        for _, size, folder in sorted(entries):
            if total <= self.max_bytes:
                break
            if folder != keep:
                _discard(folder)
                total -= size


def _write(entry: Path, write: Callable[[Path], None]) -> None:
    try:
        folder = _new_folder(entry.parent)
        try:
            write(folder)
            sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
            (folder / _MANIFEST).write_text(json.dumps(sizes))
            _discard(entry)
            try:
                folder.rename(entry)
            except OSError:
                # Where locks do not work another process may have been first.
                if not _is_whole(entry):
                    raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"the cache {entry.parent} cannot be written: {error}; make room there, or set "
            "XDG_CACHE_HOME to a folder that has more"
        ) from error


def _discard(entry: Path) -> None:
    # Renamed first, so that no other process sees an entry that is half deleted.
    trash = entry.parent / f"{_TRASH_PREFIX}{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):
        entry.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    if sys.platform == "win32":
        yield
        return
    import fcntl

    # The lock is the open file's, so it ends with the process however that ends. The file stays:
    # deleting it would let a third process lock another file of the same name.
    with path.open("w") as file:
        with contextlib.suppress(OSError):  # Some network file systems have no locks.
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _new_folder(root: Path) -> Path:
    folder = root / f"{_TRASH_PREFIX}{secrets.token_hex(8)}"
    folder.mkdir()
    return folder


def _is_whole(entry: Path) -> bool:
    try:
        sizes = json.loads((entry / _MANIFEST).read_bytes())
        return all((entry / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


@functools.cache
def _temporary_root(wanted: Path, reason: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="engine-core-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    logger.warning(
        "the cache %s cannot be written (%s); %s is used until this process ends, and what is "
        "converted now will be converted again; set XDG_CACHE_HOME to a folder that can be written",
        wanted,
        reason,
        folder,
    )
    return folder
