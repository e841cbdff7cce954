"""Where the servers are; see ``run.py``."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def scripted() -> str:
    """The base URL of a server whose model "scripted" says what ``scripted.py`` has."""
    return os.environ["ENGINE_CORE_SCRIPTED"]


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The base URL of a server with the model "smollm2"."""
    return os.environ["ENGINE_CORE_SMOLLM2"]
