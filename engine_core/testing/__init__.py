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

from typing import TYPE_CHECKING

from engine_core.lazy import lazy_names

if TYPE_CHECKING:
    from engine_core.testing.case import ConformanceCase, ConformanceError, MediaPrompt
    from engine_core.testing.suite import ConformanceTests

_HOMES = {
    "engine_core.testing.case": "ConformanceCase ConformanceError MediaPrompt",
    "engine_core.testing.suite": "ConformanceTests",
}

__all__ = ["ConformanceCase", "ConformanceError", "ConformanceTests", "MediaPrompt"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
