"""A start with few kernels: of greedy choices alone, without penalties, biases and bans.

Give it as a ``custom_module_map``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine_core.runtime.graphs import DecodeGraphs, _Graphs
from engine_core.runtime.step_batch import Choice, GraphKey

_begin = _Graphs.__init__


def _begin_greedy(self: _Graphs, state: Any, *, later: Iterable[GraphKey], **more: Any) -> None:
    _begin(self, state, later=[key for key in later if key.choice is Choice.GREEDY], **more)


_Graphs.__init__ = _begin_greedy  # type: ignore[method-assign]
DecodeGraphs._compile_others = lambda self: iter(())  # type: ignore[method-assign]

MODULE_MAP: dict[str, str] = {}
