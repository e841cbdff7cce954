"""The pytest plugin that knows ``--model-package``.

It is an entry point of pytest, because the ``conftest.py`` of a package named with ``--pyargs`` is
read too late to add an option. So every pytest run of a user loads it: it does nothing else, and
imports nothing of engine-core's but two lazy packages.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--model-package``."""
    parser.getgroup("engine-core").addoption(
        "--model-package",
        metavar="PACKAGE",
        help="import name of the model family that engine_core.testing checks",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of the checks that need a GPU."""
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")
