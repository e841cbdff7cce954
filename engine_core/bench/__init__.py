"""How fast a model runs here, and where the time goes.

``measure`` takes the time and ``report`` holds what was found; ``workloads`` is what every engine
is compared by, and imports nothing of the others. Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_core.bench.measure import (
        make_report,
        measure_latency,
        measure_shared,
        measure_throughput,
    )
    from engine_core.bench.report import BenchReport, Measurement

_HOMES = {
    "BenchReport": "engine_core.bench.report",
    "Measurement": "engine_core.bench.report",
    "make_report": "engine_core.bench.measure",
    "measure_latency": "engine_core.bench.measure",
    "measure_shared": "engine_core.bench.measure",
    "measure_throughput": "engine_core.bench.measure",
}

__all__ = [
    "BenchReport",
    "Measurement",
    "make_report",
    "measure_latency",
    "measure_shared",
    "measure_throughput",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'engine_core.bench' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
