"""Real models for every test folder, which ``make models`` fetches, and quick collections."""

import gc
import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
# They need clients that are not installed here: make test-clients.
collect_ignore = ["clients"]


@pytest.fixture
def quick_collections() -> None:
    """Collections look at what the test has made alone, for a test that needs many of them.

    What is there already stays frozen: to thaw it would thaw all that ``conftest.py`` keeps.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct in Q4_1."""
    named = os.environ.get("ENGINE_CORE_TEST_SMOLLM2")
    path = Path(named or REPOSITORY / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    if not path.is_file():
        pytest.fail(f"{path} is not there; run 'make models' or set ENGINE_CORE_TEST_SMOLLM2")
    return path
