"""The main module of an engine process on a machine of a Ray cluster; see ``ray_host``."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys

from engine_core.engine import process
from engine_core.engine.ray_host import CoreTask


def main(fd: int) -> None:
    """Read the :class:`CoreTask` from stdin, and be that engine process, on the socket ``fd``."""
    parent = os.getppid()
    with contextlib.suppress(OSError):
        # Ray gives its workers what others leave. Steps are short, and somebody waits for each.
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    task: CoreTask = pickle.load(sys.stdin.buffer)
    process.main(
        socket.socket(fileno=fd),
        parent,
        task.log_level,
        task.model,
        task.config,
        task.max_step_time,
        task.warm_up,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
