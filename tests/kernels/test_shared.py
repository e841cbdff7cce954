"""Kernels that prefer some of a multiprocessor's first cache as shared memory."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from triton import knobs

from engine_core.kernels.launch import shared


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the preferences of other tests' kernels as they are."""
    monkeypatch.setattr(shared, "_percents", dict(shared._percents))
    monkeypatch.setattr(shared, "_functions", defaultdict(list))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Calls of the driver: the function, the attribute and its value."""
    calls: list[tuple[int, int, int]] = []

    def tell(function: ctypes.c_void_p, attribute: int, value: int) -> int:
        assert function.value is not None
        calls.append((function.value, attribute, value))
        return 0

    driver = SimpleNamespace(cuFuncSetAttribute=tell)
    monkeypatch.setattr(shared, "_driver", lambda: driver)
    return calls


def load(name: str, function: int) -> None:
    """Say that a kernel is loaded, as Triton does."""
    hook: Any = knobs.runtime.kernel_load_end_hook
    hook(None, function, name, {}, "")


def unload(name: str, function: int) -> None:
    """Say that a kernel is unloaded, as Triton does."""
    hook: Any = knobs.runtime.kernel_unload_hook
    hook(None, function, name, {}, "")


def test_the_driver_is_told_of_these_kernels_alone(told: list[tuple[int, int, int]]) -> None:
    assert shared.prefer("_a_kernel", shared.HALF) == "_a_kernel"
    shared.prefer("_another_kernel", 100)
    shared.prefer("_as_before", shared.AS_IT_CHOOSES)
    load("_a_kernel", 1 << 40)
    load("_of_somebody_else", 2)
    load("_another_kernel", 3)
    load("_as_before", 4)
    assert told == [(1 << 40, 9, 57), (3, 9, 100)]


def test_what_loaded_kernels_prefer_changes(told: list[tuple[int, int, int]]) -> None:
    """The driver is told where it does, and not with each launch."""
    load("_a_kernel", 1)
    load("_a_kernel", 2)
    load("_another_kernel", 3)
    for percent in (57, 57, 43, shared.AS_IT_CHOOSES, shared.AS_IT_CHOOSES):
        shared.prefer("_a_kernel", percent)
    assert told == [(1, 9, 57), (2, 9, 57), (1, 9, 43), (2, 9, 43), (1, 9, -1), (2, 9, -1)]


@pytest.mark.skipif(not hasattr(knobs.runtime, "kernel_unload_hook"), reason="unloads none")
def test_the_driver_is_not_told_of_a_kernel_that_it_has_no_more(
    told: list[tuple[int, int, int]],
) -> None:
    load("_a_kernel", 1)
    load("_a_kernel", 2)
    unload("_a_kernel", 1)
    unload("_of_somebody_else", 3)
    shared.prefer("_a_kernel", 57)
    assert told == [(2, 9, 57)]


@pytest.mark.skipif(not hasattr(knobs.runtime, "kernel_unload_hook"), reason="unloads none")
def test_a_kernel_may_outlive_what_is_known_of_it(
    told: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its end Python takes a module's names away while Triton still unloads kernels."""
    load("_a_kernel", 1)
    monkeypatch.setattr(shared, "_functions", None)
    unload("_a_kernel", 1)
    assert not told


def test_a_driver_of_other_gpus_functions_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> Any:
        raise AssertionError(name)

    monkeypatch.setattr(shared.torch.version, "hip", "6.4")
    monkeypatch.setattr(shared.ctypes, "CDLL", found)
    monkeypatch.setattr(shared, "_driver", shared._driver.__wrapped__)
    load(shared.prefer("_a_kernel", shared.HALF), 1)


def test_without_cuda_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_driver", lambda: None)
    load(shared.prefer("_a_kernel", shared.HALF), 1)
