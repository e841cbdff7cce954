"""Helpers of tests with several replicas behind an ``AsyncEngine``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from engine_core.engine import RequestStream


async def tokens_of(stream: RequestStream) -> list[int]:
    return [token async for output in stream for token in output.outputs[0].token_ids]


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.01)
