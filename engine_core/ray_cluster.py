"""The connection to a Ray cluster. Ray is imported here, when it is first needed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from engine_core.errors import OptionError

INSTALL = "pip install 'engine-core-llm[ray]'"
"""The command that brings Ray."""

# Ray itself tries for minutes.
_ANSWER_SECONDS = 5.0

# The address by which this process joined a cluster, and what Ray then calls the cluster. The two
# differ where the address is a name or 127.0.0.1.
_joined: tuple[str, str] | None = None


def import_ray() -> Any:
    """The module ``ray``.

    Raises:
        OptionError: it is not installed, or cannot be imported.
    """
    try:
        import ray
    except ImportError as error:
        raise OptionError(f"Ray is asked for and cannot be imported ({error}): {INSTALL}") from None
    return ray


def connect(address: str | None = None) -> Any:
    """Connect this process to a cluster, unless it is connected to it; the module ``ray``.

    No cluster is started. The process's handler of SIGTERM stays as it is, and what remote
    processes print stays in Ray's logs.

    Args:
        address: ``host:port`` of the cluster's head; None for the one that ``RAY_ADDRESS`` names,
            or that runs on this machine.

    Raises:
        OptionError: Ray is not installed, no cluster answers there, or this process is connected
            to another one.
    """
    global _joined
    ray = import_ray()
    if ray.is_initialized():
        current = ray.get_runtime_context().gcs_address
        known = address in (None, "auto", current) or (address, current) == _joined
        if not known:
            raise OptionError(
                f"the Ray cluster at {address} is asked for, but this process is connected to "
                f"{current}; leave the address out, or call ray.shutdown() first"
            )
        return ray
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        _check_answer(where)
        with _own_signals():
            ray.init(where, log_to_driver=False, logging_level=logging.WARNING)
        _joined = (where, ray.get_runtime_context().gcs_address)
    except (OSError, ValueError, RuntimeError) as error:
        named = "on this machine" if where == "auto" else f"at {where}"
        told = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise OptionError(
            f"no Ray cluster can be reached {named} ({told}); start one with 'ray start --head', "
            "have other machines join it with 'ray start --address=HOST:6379', and give "
            "HOST:6379 as the address; if it asks for a token, set RAY_AUTH_MODE=token"
        ) from None
    return ray


def _check_answer(where: str) -> None:
    """Refuse an address at which nothing answers, or through which no process joins a cluster."""
    if where == "auto":
        return
    host, _, port = where.rpartition(":")
    if "//" in host or not host or not port.isdecimal():
        raise ValueError("an address is like 10.0.0.1:6379")
    with socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS):
        pass


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handler of SIGTERM, which Ray replaces in a process that connects."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # Another thread cannot set one, and Ray did not either.
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)
