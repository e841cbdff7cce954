"""Settings that every test folder shares.

Tests marked ``gpu`` are skipped on a machine without one. There Triton is to interpret its kernels,
and it decides at its import, which any test may cause.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


with suppress(ImportError):  # a machine with a GPU may run its tests without hypothesis
    from hypothesis import settings

    # How long an example takes says more about what else runs than about the code.
    settings.register_profile("engine-core", deadline=None)
    settings.load_profile("engine-core")


def pytest_configure() -> None:
    """Let interrupts through to the commands that tests start.

    A shell without job control has what it starts in the background ignore them, and its children.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA GPU if there is none."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
