import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from engine_core.checkpoint import DiskCache
from engine_core.checkpoint.disk_cache import file_key
from engine_core.errors import CheckpointError


class Writer:
    """Writes an entry with one file and counts how often it had to."""

    def __init__(self, text="content", size=0):
        self.text = text + "." * size
        self.calls = 0

    def __call__(self, folder):
        self.calls += 1
        (folder / "file").write_text(self.text)


def entries(root):
    return sorted(path.name for path in root.iterdir() if path.is_dir())


@pytest.fixture
def cache(tmp_path):
    return DiskCache(tmp_path / "cache")


def test_an_entry_is_written_once(cache):
    write = Writer()
    first = cache.get("key", write)
    assert first == cache.root / "key"
    assert (first / "file").read_text() == "content"
    assert cache.get("key", write) == first
    assert write.calls == 1


def test_the_default_place(cache_home, monkeypatch, tmp_path):
    assert DiskCache().root == cache_home
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert DiskCache().root == tmp_path / ".cache" / "engine-core"


def test_an_entry_is_invisible_until_it_is_whole(cache):
    def write(folder):
        (folder / "file").write_text("half")
        assert folder.parent == cache.root, "a rename needs the same file system"
        assert not (cache.root / "key").exists()

    cache.get("key", write)
    assert entries(cache.root) == ["key"]


def test_a_failed_write_leaves_nothing(cache):
    def fail(folder):
        (folder / "file").write_text("half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.get("key", fail)
    assert entries(cache.root) == []
    assert cache.get("key", Writer()).is_dir()


def test_a_full_disk_is_said_in_words(cache):
    def fail(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match=r"No space left on device.*XDG_CACHE_HOME"):
        cache.get("key", fail)


@pytest.mark.parametrize("damage", ["no file", "short file", "no manifest", "bad manifest", "all"])
def test_a_damaged_entry_is_written_again(cache, damage):
    write = Writer()
    entry = cache.get("key", write)
    if damage == "no file":
        (entry / "file").unlink()
    elif damage == "short file":
        (entry / "file").write_text("cont")
    elif damage == "no manifest":
        (entry / "manifest.json").unlink()
    elif damage == "bad manifest":
        (entry / "manifest.json").write_text("[1]")
    else:
        (entry / "file").unlink()
        (entry / "manifest.json").unlink()
        entry.rmdir()
    assert (cache.get("key", write) / "file").read_text() == "content"
    assert write.calls == 2
    assert entries(cache.root) == ["key"]


def test_what_was_used_longest_ago_goes_first(tmp_path):
    cache = DiskCache(tmp_path, max_bytes=35_000)
    write = Writer(size=10_000)
    for age, key in enumerate(("c", "b", "a")):
        os.utime(cache.get(key, write), (1000 + age, 1000 + age))
    assert entries(tmp_path) == ["a", "b", "c"]
    cache.get("c", write)  # used again, so b is now the oldest
    cache.get("d", write)
    assert entries(tmp_path) == ["a", "c", "d"]


def test_an_entry_above_the_bound_is_kept_while_it_is_the_newest(tmp_path):
    cache = DiskCache(tmp_path, max_bytes=100)
    cache.get("a", Writer(size=1000))
    assert entries(tmp_path) == ["a"]
    cache.get("b", Writer(size=1000))
    assert entries(tmp_path) == ["b"]


def test_what_dead_processes_left_is_removed_after_a_day(cache):
    cache.get("a", Writer())
    for name, age in (("tmp-old", 2 * 86400), ("tmp-new", 60)):
        (cache.root / name).mkdir()
        os.utime(cache.root / name, (time.time() - age,) * 2)
    cache.get("b", Writer())
    assert entries(cache.root) == ["a", "b", "tmp-new"]


def test_without_a_writable_folder_a_temporary_one_serves(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    caplog.set_level(logging.WARNING)
    write = Writer()
    root = tmp_path / "file" / "cache"
    first = DiskCache(root).get("key", write)
    second = DiskCache(root).get("key", write)
    DiskCache(root).get("other", write)
    assert first == second
    assert (first / "file").read_text() == "content"
    assert write.calls == 2
    (record,) = caplog.records
    assert str(root) in record.getMessage()
    assert "Not a directory" in record.getMessage()


def test_threads_share_one_write(cache):
    write = Writer()

    def slow(folder):
        time.sleep(0.1)
        write(folder)

    threads = [threading.Thread(target=cache.get, args=("key", slow)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert write.calls == 1


PROCESS = """
import sys, time
from pathlib import Path
from engine_core.checkpoint import DiskCache

def write(folder):
    with open(sys.argv[2], "a") as log:
        log.write("x")
    (folder / "half").write_text("x")
    print("writing", flush=True)
    time.sleep(float(sys.argv[3]))
    (folder / "file").write_text("content")

entry = DiskCache(Path(sys.argv[1])).get("key", write)
assert (entry / "file").read_text() == "content"
"""


def start(root, log, seconds):
    command = [sys.executable, "-c", PROCESS, str(root), str(log), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_share_one_write(tmp_path):
    log = tmp_path / "log"
    processes = [start(tmp_path / "cache", log, 0.5) for _ in range(3)]
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert log.read_text() == "x"


def test_a_killed_writer_neither_blocks_nor_shows_its_half(tmp_path):
    root = tmp_path / "cache"
    process = start(root, tmp_path / "log", 600)
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert not (root / "key").exists()
    entry = DiskCache(root).get("key", Writer())
    assert sorted(path.name for path in entry.iterdir()) == ["file", "manifest.json"]


def test_the_key_follows_the_file(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    os.utime(path, ns=(10**18, 10**18))
    key = file_key(path, "1", "bfloat16")
    assert key == file_key(path, "1", "bfloat16")
    assert key != file_key(path, "1", "float32")
    assert key != file_key(path, "2", "bfloat16")
    link = tmp_path / "link.gguf"
    link.symlink_to(path)
    assert key == file_key(link, "1", "bfloat16")
    os.utime(path, ns=(10**18, 10**18 + 1))
    touched = file_key(path, "1", "bfloat16")
    assert key != touched
    path.write_bytes(b"three")
    os.utime(path, ns=(10**18, 10**18))
    assert file_key(path, "1", "bfloat16") not in (key, touched)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(b"one")
    os.utime(copy, ns=(10**18, 10**18))
    assert file_key(copy, "1", "bfloat16") != key
