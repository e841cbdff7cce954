"""Kernels run natively where there is a GPU, through Triton's interpreter where there is none.

Triton decides at its import, so the variable is set here, before any test module of this folder is
imported; no other test may import triton.
"""

import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from engine_core.kernels import compiled
from engine_core.kernels.compiled import kept
from engine_core.kernels.compiled.openmp import openmp

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
    from interpreter import quicken

    quicken()
    return "cpu"


_ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=_ON_GPU)])
def each_device(request: pytest.FixtureRequest) -> str:
    """The devices of an operation that the engine calls, one after another."""
    device: str = request.param
    return device


@pytest.fixture
def on_hopper() -> None:
    """The kernels in Gluon run here; else the test is skipped."""
    if torch.cuda.is_available():
        from engine_core.kernels.launch.gluon import runs_gluon

        if runs_gluon(torch.device("cuda", 0)):
            return
    pytest.skip("needs a Hopper GPU and a release of Triton that its kernels are for")


@pytest.fixture(params=["compiled", "torch"])
def cpu_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of CPU operations: compiled by Numba where possible, or made of torch's."""
    path: str = request.param
    if path == "compiled":
        pytest.importorskip("numba", reason="numba is not installed")
    else:
        monkeypatch.setattr(compiled, "available", lambda: False)
    return path


@pytest.fixture
def share_among(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Makes compiled operations, however small, the work of so many threads; empty() gives NaN."""
    pytest.importorskip("numba", reason="numba is not installed")
    if not openmp().found:
        pytest.skip("torch's OpenMP library has no GOMP_parallel here")
    for operation in (
        "activation",
        "attention",
        "attention.chunk",
        "half_linear",
        "norm",
        "rotary_store",
        "state_space",
    ):
        module = import_module(f"engine_core.kernels.{operation}.native")
        monkeypatch.setattr(module, "_LEAST", 1)
    before = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    yield torch.set_num_threads
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _all_code_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where compiled code calls what is there with Numba alone."""
    link = kept.link

    def linked(entry: str, code: bytes) -> int | None:
        address = link(entry, code)
        assert address is not None, f"{entry} cannot be linked"
        return address

    monkeypatch.setattr(kept, "link", linked)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
