"""Kernels that prefer half of the first cache as shared memory."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from triton import knobs

from engine_core.kernels.launch import shared


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
    monkeypatch.setattr(shared, "_names", set(shared._names))
    return calls


def load(name: str, function: int) -> None:
    """Say that a kernel is loaded, as Triton does."""
    hook: Any = knobs.runtime.kernel_load_end_hook
    hook(None, function, name, {}, "")


def test_the_driver_is_told_of_these_kernels_alone(told: list[tuple[int, int, int]]) -> None:
    assert shared.half_shared("_a_kernel") == "_a_kernel"
    shared.half_shared("_another_kernel")
    load("_a_kernel", 1 << 40)
    load("_of_somebody_else", 2)
    load("_another_kernel", 3)
    assert told == [(1 << 40, 9, 57), (3, 9, 57)]


def test_a_driver_of_other_gpus_functions_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> Any:
        raise AssertionError(name)

    monkeypatch.setattr(shared.torch.version, "hip", "6.4")
    monkeypatch.setattr(shared.ctypes, "CDLL", found)
    monkeypatch.setattr(shared, "_driver", shared._driver.__wrapped__)
    monkeypatch.setattr(shared, "_names", set(shared._names))
    load(shared.half_shared("_a_kernel"), 1)


def test_without_cuda_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_driver", lambda: None)
    monkeypatch.setattr(shared, "_names", set(shared._names))
    load(shared.half_shared("_a_kernel"), 1)
