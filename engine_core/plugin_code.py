"""The surroundings of plugins' code: its output, its exits, and the place where it fails."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb
from types import CodeType
from typing import Any, NoReturn

from engine_core import own_process
from engine_core.errors import EngineError

# Packages whose code is no model author's.
_OTHERS = frozenset({"builtins", "engine_core", "torch"})

_lock = threading.Lock()
# The threads that run a plugin's code now, and what undoes the first one's entry.
_inside: list[int] = []
_undo = contextlib.ExitStack()
# What standard output was at each entry of a thread that is silent now.
_outputs: list[Any] = []


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Run a plugin's code in the ``with`` block: a hook of its, or its import.

    What it prints goes to standard error; in a process of the engine's alone so does what C code
    and children write. ``os._exit`` raises SystemExit; C code can still end the process.
    """
    with _lock:
        if not _inside:
            _undo.enter_context(_contain())
        _inside.append(threading.get_ident())
    try:
        yield
    finally:
        with _lock:
            _inside.remove(threading.get_ident())
            if not _inside:
                _undo.close()


@contextlib.contextmanager
def _contain() -> Iterator[None]:
    end_process, process = os._exit, os.getpid()

    def leave(status: int) -> NoReturn:
        # A fork, and a thread that runs other code, end as they want.
        if os.getpid() != process or threading.get_ident() not in _inside:
            end_process(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = leave
    try:
        with contextlib.redirect_stdout(sys.stderr), _output_to_stderr():
            yield
    finally:
        os._exit = end_process


@contextlib.contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Let file 1 be standard error, in a process of the engine's alone."""
    kept = None
    if own_process.is_claimed():
        with contextlib.suppress(OSError):  # one of them is closed
            _flush()
            kept = os.dup(1)
            os.dup2(2, 1)
    try:
        yield
    finally:
        if kept is not None:
            _flush()
            os.dup2(kept, 1)
            os.close(kept)


def _flush() -> None:
    if sys.__stdout__ is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.__stdout__.flush()
    ctypes.CDLL(None).fflush(None)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Let what Python prints go to standard error, in a process of the engine's alone.

    For code that runs in every step; :func:`contained` takes several system calls.
    """
    if not own_process.is_claimed():
        yield
        return
    with _lock:
        _outputs.append(sys.stdout)
        sys.stdout = sys.stderr
    try:
        yield
    finally:
        with _lock:
            first, _ = _outputs[0], _outputs.pop()
            sys.stdout = sys.stdout if _outputs else first


def package_of(item: Any) -> str:
    """The top-level package of a class, a function, a module or a dotted path."""
    name = item if isinstance(item, str) else getattr(item, "__module__", None)
    return str(name or getattr(item, "__name__", "")).partition(".")[0]


def is_own(item: type) -> bool:
    """Whether a class is a model author's, not ours or torch's."""
    return package_of(item) not in _OTHERS


def failed_at(error: BaseException, *packages: str) -> str:
    """``" (package/module.py:31, in Class.method)"``, the deepest place in ``packages``; or ""."""
    place = ""
    for frame, line in walk_tb(error.__traceback__):
        if package_of(frame.f_globals.get("__name__", "")) in packages:
            place = _place(frame.f_code, frame.f_globals["__name__"], line)
    return f" ({place})" if place else ""


def defined_at(function: Any) -> str:
    """``"package/module.py:20, Class.method"`` of a function or method written in Python, or ""."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return _place(code, function.__module__ or "", code.co_firstlineno).replace(", in ", ", ")


def _place(code: CodeType, module: str, line: int) -> str:
    # Without the folders above the package: a server's clients read it too.
    file = Path(code.co_filename)
    depth = len(module.split(".")) + (file.stem == "__init__")
    return f"{'/'.join(file.parts[-depth:])}:{line}, in {code.co_qualname}"


def label(name: str, module: Any) -> str:
    """A part of a model in words: ``layers.3.mlp (MyMLP)``."""
    return f"{name or 'the model'} ({type(module).__name__})"


def described(error: BaseException) -> str:
    """``error`` in a line, with the part of a model in which it was raised, file and line.

    Told from its traceback, or from those of its causes: the methods of a model's parts are the
    frames whose ``self`` is a module.
    """
    text = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
    text = "; ".join([text, *getattr(error, "__notes__", ())])
    cause: BaseException | None = error
    # A part that is half built, or that answers for itself, must not hide the error.
    with contextlib.suppress(Exception):
        while cause is not None:
            place = _part_at(cause, text)
            if place:
                return text if place in text else f"{place}: {text}"
            cause = cause.__cause__
    return text


def _part_at(error: BaseException, text: str) -> str:
    names: dict[int, str] = {}
    own: set[str] = set()
    # The part entered last, the one in which the last line of the author's is, and that line.
    inner: Any = None
    part, place = None, ""
    for frame, line in walk_tb(error.__traceback__):
        module: Any = frame.f_locals.get("self")
        if not names and _is_module(module):
            parts = dict(module.named_modules())
            names = {id(each): name for name, each in parts.items()}
            own = {package_of(kind) for each in parts.values() for kind in type(each).__mro__}
            own -= _OTHERS
        if id(module) in names:
            inner = module
        if inner is not None and package_of(frame.f_globals.get("__name__", "")) in own:
            part, place = inner, _place(frame.f_code, frame.f_globals["__name__"], line)
    if inner is None:
        return ""
    called = label(names[id(inner)], inner)
    if part is None:
        where = defined_at(type(inner).forward) if is_own(type(inner)) else ""
        return f"{called}, {where}" if where else called
    calling = "" if part is inner or text.startswith(called) else f", calling {called}"
    return f"{label(names[id(part)], part)}, {place}{calling}"


def _is_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


__all__ = [
    "contained",
    "defined_at",
    "described",
    "failed_at",
    "is_own",
    "label",
    "package_of",
    "silent",
]
