"""The conformance kit, with which an author proves a model family.

In the family's own tests::

    from engine_core.testing import ConformanceTests

    class TestConformance(ConformanceTests):
        package = "engine_core_myfamily"

or, for an installed package, ``pytest --pyargs engine_core.testing --model-package
engine_core_myfamily``. Both check the :class:`ConformanceCase` list ``CASES`` in the package's
module ``conformance``. Names are loaded on first use: a package's ``conformance`` brings no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_core.testing.case import ConformanceCase, ConformanceError
    from engine_core.testing.suite import ConformanceTests

_HOMES = {
    "ConformanceCase": "engine_core.testing.case",
    "ConformanceError": "engine_core.testing.case",
    "ConformanceTests": "engine_core.testing.suite",
}

__all__ = ["ConformanceCase", "ConformanceError", "ConformanceTests"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'engine_core.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
