"""Properties that all launches of kernels have in common."""

from __future__ import annotations

import ctypes
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch


def test_kernels_that_are_loaded_prefer_shared_memory(
    launch_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del launch_device  # where Triton may be imported
    launch: Any = importlib.import_module("engine_core.kernels.launch.triton")
    knobs: Any = importlib.import_module("triton").knobs
    given: list[tuple[Any, ...]] = []

    def attribute(function: ctypes.c_void_p, *values: int) -> int:
        given.append((function.value, *values))
        return 0

    driver = SimpleNamespace(cuFuncSetAttribute=attribute)
    monkeypatch.setattr(launch, "_driver", lambda: driver)
    knobs.runtime.kernel_load_end_hook(None, 12345, "kernel", None, "hash")
    assert given == [(12345, 9, 100)]


@pytest.mark.gpu
def test_a_kernel_with_little_shared_memory_has_the_carveout_of_those_with_much() -> None:
    greedy: Any = importlib.import_module("engine_core.kernels.greedy.triton")
    greedy.choose_greedy(torch.randn(2, 300, device="cuda"))
    caches = greedy._choose_greedy_kernel.device_caches.values()
    functions = [kernel.function for cache in caches for kernel in cache[0].values()]
    assert functions
    driver = ctypes.CDLL("libcuda.so.1")
    for function in functions:
        carveout = ctypes.c_int()
        given = (ctypes.byref(carveout), 9, ctypes.c_void_p(function))
        assert driver.cuFuncGetAttribute(*given) == 0
        assert carveout.value == 100
