"""Processor seconds of each test file: ``PYTHONPATH=tests pytest -p cpu_seconds -n0 tests/nn``.

User and system time of the process and of those that it has waited for, whatever else runs on the
machine. A process that a later test ends, such as a shared server, counts for that test's file.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest

_seconds: Counter[str] = Counter()


def _now() -> float:
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Count a test with what it sets up and puts away."""
    before = _now()
    try:
        return (yield)
    finally:
        _seconds[item.nodeid.partition("::")[0]] += _now() - before


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the files, the longest first; imports and collection are the rest of the total."""
    terminalreporter.section("processor seconds")
    for name, seconds in _seconds.most_common():
        terminalreporter.write_line(f"{seconds:8.1f} {name}")
    terminalreporter.write_line(f"{_now():8.1f} in all")
