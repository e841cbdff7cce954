"""A rank's side of Ray: its actor, and the first words to its executor. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import socket
import struct
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from engine_core import own_process
from engine_core.configs import EngineConfig
from engine_core.runtime.rank import Seat, live
from engine_core.runtime.ring import attach
from engine_core.runtime.transport import RingTransport, StreamTransport, Transport

HELLO = struct.Struct("<32sI?d")
"""A rank's first words: its token, its number, whether it has the ring, and its clock."""

_CONNECT_SECONDS = 60.0
# A machine that is gone without a word is noticed after about 20 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}


@dataclass(frozen=True, slots=True)
class Task:
    """All that a rank is told, besides by messages.

    Attributes:
        model: the model's name.
        config: the engine's settings.
        seat: its place among the ranks.
        parent: host and port of the executor.
        token: the word by which that knows it.
        ring: the ring of a rank on the executor's machine, and None elsewhere.
    """

    model: str
    config: EngineConfig
    seat: Seat
    parent: tuple[str, int]
    token: bytes
    ring: tuple[int, ...] | None


def run_rank(packed: bytes, address: str, ranks: int) -> None:
    """Live as a rank, in an actor's process.

    Args:
        packed: a pickled task.
        address: that of this node.
        ranks: how many ranks the node has.
    """
    task: Task = pickle.loads(packed)
    os.environ["OMP_NUM_THREADS"] = str(task.seat.threads)
    os.environ[own_process.HOST_RANKS] = str(ranks)
    interface = _interface(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    transport: Transport = StreamTransport()
    if task.ring is not None:
        # Another container of the same machine may see neither process nor file.
        with contextlib.suppress(OSError):
            transport = RingTransport(attach(task.ring), task.seat.rank)
    peer = socket.create_connection(task.parent, timeout=_CONNECT_SECONDS)
    keep_alive(peer)
    near = transport.same_machine
    peer.sendall(HELLO.pack(task.token, task.seat.rank, near, time.monotonic()))
    with Connection(peer.detach()) as connection:
        live(connection, transport, task.model, task.config, task.seat)


def actor_class() -> type:
    """The actor of a rank.

    A class inside a function travels with its code, so that a node without engine-core can say so.
    """

    class Rank:
        def inspect(self, packages: list[str], files: list[str]) -> dict[str, Any]:
            """Versions of packages, and what is in files and folders; None for what is missing."""
            import hashlib
            import importlib.metadata
            import importlib.util
            import pathlib

            versions: dict[str, str | None] = {}
            for name in packages:
                try:
                    versions[name] = importlib.metadata.version(name)
                except importlib.metadata.PackageNotFoundError:
                    versions[name] = None
            found: dict[str, dict[str, Any] | None] = {}
            for name in files:
                path = pathlib.Path(name)
                found[name] = None
                if path.is_dir():
                    found[name] = {
                        each.name: each.stat().st_size
                        for each in path.iterdir()
                        if each.suffix in (".json", ".safetensors", ".bin", ".gguf")
                        and each.is_file()  # and no link that leads nowhere
                    }
                elif path.exists():
                    found[name] = {path.name: path.stat().st_size}
                    if path.suffix == ".py":
                        digest = hashlib.sha256(path.read_bytes()).hexdigest()
                        found[name] = {path.name: digest}
            return {
                "versions": versions,
                "files": found,
                "installed": importlib.util.find_spec("engine_core") is not None,
            }

        def run(self, task: bytes, address: str, ranks: int) -> None:
            """Live as a rank."""
            from engine_core.runtime.ray_rank import run_rank

            run_rank(task, address, ranks)

    return Rank


def keep_alive(peer: socket.socket) -> None:
    """Have a connection send at once, wait for ever, and end with the machine at its other end."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _interface(address: str) -> str | None:
    """The network interface that has this IPv4 address; None if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
