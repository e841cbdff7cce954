"""How fast a model runs here, and where the time goes.

``measure`` takes the time and ``report`` holds what was found; ``workloads`` is what every engine
is compared by, and imports nothing of the others. Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.lazy import lazy_names

if TYPE_CHECKING:
    from engine_core.bench.measure import (
        make_report,
        measure_latency,
        measure_shared,
        measure_throughput,
    )
    from engine_core.bench.report import BenchReport, Measurement

_HOMES = {
    "engine_core.bench.measure": "make_report measure_latency measure_shared measure_throughput",
    "engine_core.bench.report": "BenchReport Measurement",
}

__all__ = [
    "BenchReport",
    "Measurement",
    "make_report",
    "measure_latency",
    "measure_shared",
    "measure_throughput",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
