"""Processes that multiprocessing spawns below a command; see test_forkserver.py."""

import multiprocessing
import os
import sys

from engine_core import own_process


def child(name: str, parent: int) -> None:
    """Say who it is, and whether it was forked by who holds torch and belongs to its parent."""
    sys.stdout.write(f"{name} {os.getppid() == parent and 'torch' in sys.modules}\n")
    sys.stdout.flush()
    if name == "child":
        start("grandchild")


def start(name: str) -> None:
    """Spawn one and wait for it."""
    process = multiprocessing.get_context("spawn").Process(target=child, args=(name, os.getpid()))
    process.start()
    process.join()


if __name__ == "__main__":
    own_process.claim()  # as an engine's does, which sets variables for those that it spawns
    start("child")
