"""Kernels run natively where there is a GPU, through Triton's interpreter where there is none.

Triton decides at its import, so the variable is set here, before any test module of this folder is
imported; no other test may import triton.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

# kernel_cases is shared with benchmarks/kernels.py; pytest may run without folders on the path.
sys.path.insert(0, str(Path(__file__).parent))

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def launch_device() -> str:
    """Where a kernel's launcher can be called: "cuda", or "cpu" in the interpreter."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        return "cuda"
    interpreted = type(triton.language.max).__name__ == "InterpretedFunction"
    assert interpreted, (
        "triton was imported before tests/kernels/conftest.py set TRITON_INTERPRET=1; "
        "find the test that imports it, or run with TRITON_INTERPRET=1 set"
    )
    return "cpu"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
