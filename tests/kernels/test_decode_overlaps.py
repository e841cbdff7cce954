"""How the kernels of a decode step overlap, as ``benchmarks/decode.py`` prints it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import decode


def test_kernels_in_the_middle_of_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "REPLAYS", 2)
    monkeypatch.setattr(decode, "KERNELS", 2)

    class Trace:
        """Two steps of six kernels, each of 10 us; in the second, each begins 4 us early."""

        def export_chrome_trace(self, path: str) -> None:
            args = {"grid": [8, 1, 1], "registers per thread": 96, "shared memory": 512}
            kernel = {"cat": "kernel", "dur": 10.0, "args": args}
            begins = [*(10.0 * i for i in range(6)), *(100 + 6.0 * i for i in range(6))]
            events = [kernel | {"ts": ts, "name": f"kernel {i}"} for i, ts in enumerate(begins)]
            events.append({"cat": "gpu_memcpy", "ts": 1e6, "dur": 1.0, "name": "copy"})
            Path(path).write_text(json.dumps({"traceEvents": events[::-1]}))

    trace: Any = Trace()
    head, *lines = decode.overlaps(trace).splitlines()
    assert head.startswith("start (us), time")
    assert [line.split() for line in lines] == [
        f"-4.00 10.00 [[8, 1, 1], 96, 512] kernel {place}".split() for place in (9, 10)
    ]
