"""The server's process, without a server."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from engine_core.server import run


def test_a_server_whose_grammars_cannot_be_tried_says_so_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def start_workers() -> None:
        raise ImportError("a library of the family's is missing")

    engine: Any = SimpleNamespace(frontend=SimpleNamespace(start_workers=start_workers))
    with caplog.at_level(logging.WARNING):
        asyncio.run(run._start_workers(engine))
    assert "ImportError: a library of the family's is missing" in caplog.text
