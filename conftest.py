"""Settings that every test folder shares.

Tests marked ``gpu`` are not collected on a machine without one, and those marked ``long`` only if
ENGINE_CORE_TEST_FULL is set, as in ``make soak``; the head of the report says so.
There Triton is to interpret its kernels, and it decides at its import, which any test may cause.
"""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The kit in engine_core/testing may be run from another folder, whose settings know no pythonpath.
sys.path.append(str(Path(__file__).parent / "tests"))
import forkserver
import quick_numba

with suppress(ImportError):  # a machine with a GPU may run its tests without hypothesis
    from hypothesis import HealthCheck, settings
    from random_examples import FULL

    # How long an example takes says more about what else runs than about the code. The same change
    # gets the same examples each time; "make soak" draws new ones.
    settings.register_profile(
        "engine-core",
        deadline=None,
        derandomize=FULL not in os.environ,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("engine-core")


_LEFT_OUT = pytest.StashKey[set[str]]()
_LONG = pytest.StashKey[set[str]]()
_PROCESSOR = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    """Let interrupts through to the commands that tests start.

    A shell without job control has what it starts in the background ignore them, and its children.
    """
    config.stash[_LEFT_OUT], config.stash[_LONG] = set(), set()
    config.stash[_PROCESSOR] = 0.0
    # The engine's own process, and each rank's, and that of which workers are forks.
    forkserver.spawn_from_here()
    forkserver.templates_from_here()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Count the cores and up to two more: a fifth of the time tests wait for other processes."""
    if given := os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return int(given)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (cores or 1) + min(2, ((cores or 1) + 3) // 4)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that shows the report what this worker's tests took and started."""
    if hasattr(session.config, "workeroutput"):
        told = {"processor": sum(os.times()[:4]), "afresh": dict(forkserver.afresh)}
        session.config.workeroutput |= told


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a worker told at its end. One that died told nothing."""
    told = getattr(node, "workeroutput", {})
    forkserver.afresh.update(told.get("afresh", {}))
    node.config.stash[_PROCESSOR] += told.get("processor", 0.0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Show how busy workers were, and why processes were no forks.

    What one test leaves in the environment may forbid all forks after it.
    """
    if config.stash[_PROCESSOR]:
        seconds = f"{config.stash[_PROCESSOR]:.0f} processor seconds of workers and what they ran"
        terminalreporter.write_line(seconds)
    for names, number in forkserver.afresh.most_common():
        terminalreporter.write_line(f"{number} processes imported all anew, because of {names}")


@cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _needs_gpu(marked: object) -> bool:
    marks = getattr(marked, "pytestmark", [])
    return any(mark.name == "gpu" for mark in (marks if isinstance(marks, list) else [marks]))


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> object:
    """Make no cases of a function, class or module that needs a CUDA GPU if there is none."""
    if not name.startswith(("test", "Test")):
        return None
    module = getattr(collector.getparent(pytest.Module), "obj", None)
    if (_needs_gpu(obj) or _needs_gpu(module)) and not _has_gpu():
        collector.config.stash[_LEFT_OUT].add(f"{collector.nodeid}::{name}")
        return []
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the single cases that need a CUDA GPU if there is none, and those of ``make soak``.

    Processes that share the tests begin with the slow ones: the others would wait for a last one.

    In CI a slow one that fails is run once more, and the first failure is shown. They talk to
    processes by a clock that other work shares, and one that comes and goes has cost a whole change
    twice. Elsewhere none is, so that whoever works on it sees it fail.
    """
    if "CI" in os.environ:
        for item in items:
            if item.get_closest_marker("slow") and not item.get_closest_marker("flaky"):
                item.add_marker(pytest.mark.flaky(reruns=1))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if "ENGINE_CORE_TEST_FULL" not in os.environ:
        long = [item for item in items if item.get_closest_marker("long")]
        config.stash[_LONG].update(item.nodeid for item in long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _has_gpu():
        config.stash[_LEFT_OUT].update(item.nodeid for item in gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_report_collectionfinish(config: pytest.Config) -> str | None:
    """Say how many tests were left out."""
    left_out = {
        "tests that need a CUDA GPU": len(config.stash[_LEFT_OUT]),
        "long ones, which make soak runs": len(config.stash[_LONG]),
    }
    told = ", ".join(f"{number} {what}" for what, number in left_out.items() if number)
    return f"left out: {told}" if told else None


_HAS_DEVICES = Path("/dev/nvidiactl").exists()
_known_modules = 0
# Libraries report leaks of what Python does not take apart at its end.
atexit.register(gc.unfreeze)


def _keep_imports() -> None:
    """Let no collection of garbage look again at what was imported: that is most of what there is.

    Python and the engines that end collect often, and 300,000 objects of torch and transformers
    take 0.2 s each time. An engine that a module's tests share is kept with them, so on a machine
    with a GPU, whose memory it would hold, nothing is.
    """
    global _known_modules
    if not _HAS_DEVICES and len(sys.modules) > _known_modules + 100:
        _known_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Collect no garbage while the test modules are imported: nearly all of it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        _keep_imports()
        _quicken_numba()


def pytest_runtest_logfinish() -> None:
    """Keep what a test was the first to import. Its own objects are gone."""
    _keep_imports()
    _quicken_numba()


def _quicken_numba() -> None:
    """Let it compile in three quarters of its time, where a test has imported it."""
    if "numba.core.dispatcher" in sys.modules:
        quick_numba.quicken()
