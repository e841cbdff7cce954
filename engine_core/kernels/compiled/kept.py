"""Machine code on the disk: what Numba compiled once is loaded without it.

To import Numba and fill its registries takes 0.35 s of a processor, where torch takes 1.1. So the
object code of each specialisation is kept, under a name that stands for all that it depends on:
sources, versions, the CPU and Numba's settings. llvmlite alone links it, in half a millisecond.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Hashable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from engine_core.kernels.compiled.openmp import openmp

__all__ = ["cpu_features", "keep", "link", "load", "name_of", "noted_features"]

_HERE = Path(__file__).parent
# Code calls these where an exception of Python leaves a body, or the last reference to an array
# ends. No body of ours raises one, or owns an array.
_NEVER_CALLED = (
    *("numba_gil_ensure", "numba_gil_release", "numba_unpickle", "numba_do_raise"),
    *("numba_runtime_build_excinfo_struct", "NRT_Free", "NRT_MemInfo_call_dtor"),
)
_CHECK = 32  # bytes of the hash before the code
_lock = threading.Lock()
_linked: list[Any] = []  # code lives as long as these
_numbers = itertools.count()


def name_of(module: str, make: str, special: tuple[Hashable, ...], *, exact: bool) -> str:
    """The name under which code of a specialisation is kept."""
    told = repr((_environment(), _sources(module), make, special, exact))
    operation = module.split(".")[-2] if "." in module else module
    return f"{operation}_{make.strip('_')}_{hashlib.sha256(told.encode()).hexdigest()[:24]}"


def load(module: str, name: str) -> int | None:
    """The address of kept code; None if there is none, or it cannot be linked."""
    for folder in _folders(_folder_of(module)):
        try:
            data = (folder / f"{name}.code").read_bytes()
        except OSError:
            continue
        rest = data[_CHECK:]
        if hashlib.sha256(rest).digest() == data[:_CHECK]:
            entry, _, code = rest.partition(b"\0")
            return link(entry.decode(), code)
    return None


def link(entry: str, code: bytes) -> int | None:
    """The address of a function in object code; None if that cannot be linked."""
    with _lock:
        binding, jit = _linker()
        builder = binding.JITLibraryBuilder().add_object_img(code).export_symbol(entry)
        for symbol, address in openmp().addresses.items():
            builder.import_symbol(symbol, address)
        for symbol in _NEVER_CALLED:
            builder.import_symbol(symbol, _address_of_abort())
        try:
            library = builder.add_current_process().link(jit, str(next(_numbers)))
        except RuntimeError:
            return None
        _linked.append(library)
        found: int = library[entry]
        return found


def keep(module: str, name: str, entry: str, code: bytes) -> None:
    """Keep object code and the name of its entry, where a folder can be written to."""
    rest = entry.encode() + b"\0" + code
    _write(_folder_of(module), f"{name}.code", hashlib.sha256(rest).digest() + rest)


def noted_features() -> frozenset[str] | None:
    """Features that :func:`cpu_features` found before with this Numba; None if never asked."""
    for folder in _folders(_HERE):
        try:
            return frozenset((folder / _note()).read_text().split(","))
        except OSError:
            continue
    return None


@cache
def cpu_features() -> frozenset[str]:
    """The instructions for which Numba compiles, in LLVM's words: ``"+avx2"``."""
    noted = noted_features()
    if noted is not None:
        return noted
    target: Any = import_module("numba.core.registry").cpu_target
    features: str = target.target_context.codegen()._tm_features
    _write(_HERE, _note(), features.encode())
    return frozenset(features.split(","))


def _note() -> str:
    return f"features_{_environment()[:24]}.txt"


def _folders(beside: Path) -> Iterator[Path]:
    """Where code may be, as Numba has it: beside its source, else in the user's cache folder."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    if given:
        yield Path(given)
        return
    yield beside / "__pycache__"
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    yield Path(cache_home) / "engine-core" / "code"


def _write(beside: Path, name: str, data: bytes) -> None:
    for folder in _folders(beside):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Others may write, or read, the same at once.
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                try:
                    file.write(data)
                    file.flush()
                    Path(file.name).replace(folder / name)
                except BaseException:
                    Path(file.name).unlink(missing_ok=True)
                    raise
        except OSError:
            continue
        return


@cache
def _environment() -> str:
    """A hash of what all code depends on."""
    binding, _ = _linker()
    told = hashlib.sha256()
    for part in (
        sys.implementation.cache_tag,
        platform.machine(),
        np.__version__,
        binding.get_host_cpu_name(),
        binding.get_host_cpu_features().flatten(),
        openmp().found,
        # Numba's settings.
        sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_")),
        _content(Path(".numba_config.yaml")),
        *(_content(_package(name) / "_version.py") for name in ("numba", "llvmlite")),
    ):
        told.update(repr(part).encode())
    return told.hexdigest()


@cache
def _sources(module: str) -> str:
    """A hash of the sources that a body may come from."""
    told = hashlib.sha256()
    for folder in (_folder_of(module), _HERE, _HERE.parent / "codes"):
        for path in sorted(folder.glob("*.py")):
            if path.name != "triton.py":
                told.update(path.read_bytes())
    return told.hexdigest()


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@cache
def _folder_of(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None, f"{module} is missing"
    assert spec.origin is not None, f"{module} has no source"
    return Path(spec.origin).parent


def _package(name: str) -> Path:
    spec = find_spec(name)
    return Path() if spec is None or spec.origin is None else Path(spec.origin).parent


@cache
def _linker() -> tuple[Any, Any]:
    """llvmlite's binding, and what links object code."""
    binding: Any = import_module("llvmlite.binding")
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_triple(binding.get_process_triple())
    return binding, binding.create_lljit_compiler(target.create_target_machine(jit=True))


@cache
def _address_of_abort() -> int:
    address = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value
    assert address, "libc has it"
    return address
