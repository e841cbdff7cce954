"""Ranks that share one GPU, and captures that fail on one of them.

Give it as a ``custom_module_map``. With the variable :data:`SHARED` set, all ranks take GPU 0. NCCL
takes no two ranks on one device, so that their group is gloo's, which copies by way of the host and
cannot be captured: a step that is captured sums and gathers through the ranks' memory alone. With
:data:`FAILS` "RANK NUMBER", that rank's capture of this number fails when all of it is captured.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch.distributed

from engine_core.runtime import capture, executor, rank
from engine_core.runtime.capture import Graph

T = TypeVar("T")

SHARED, FAILS = "ENGINE_CORE_TEST_ONE_CARD", "ENGINE_CORE_TEST_FAILING_CAPTURE"

if os.environ.get(SHARED):
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    check_devices = executor.check_devices
    # The process of the tests goes on to others.
    executor.check_devices = lambda *given: (
        None if os.environ.get(SHARED) else check_devices(*given)
    )
    rank._gpu_of = lambda _: 0
    rank._backend_of = lambda _: "gloo"

_whole, _captures = capture.CudaCapturer.capture, [0]


def _capture(self: capture.CudaCapturer, function: Callable[[], T]) -> tuple[Graph, T]:
    _captures[0] += 1
    failing = os.environ.get(FAILS)
    if failing is not None and failing == f"{torch.distributed.get_rank()} {_captures[0]}":
        step = function

        def function() -> T:
            step()
            raise RuntimeError("no capture here")

    return _whole(self, function)


# The tests import this too, and their process captures for others.
if os.environ.get(FAILS):
    capture.CudaCapturer.capture = _capture  # type: ignore[method-assign]

MODULE_MAP: dict[str, str] = {}
