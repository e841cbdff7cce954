"""Detection, on a CPU, of calls that would make a GPU's host wait."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import engine_core.kernels
from engine_core.testing.case import ConformanceError

# Python calls that read a tensor's values or move them: some dispatch nothing on a CPU, others an
# operator that says less.
_READS = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__array__",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__complex__",
)
# Calls that copy host values to the device.
_UPLOADS = ("tensor", "as_tensor", "asarray")
# Operators whose result, or its shape, the host must know.
_OPERATORS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::equal",
    "aten::bincount",
)
_TORCH = Path(torch.__file__).parent
# The reference kernels run only on a CPU, where nothing is to be waited for.
_KERNELS = Path(engine_core.kernels.__file__).parent


def _culprit() -> str | None:
    """File and line that made the call; None inside the CPU's reference kernels."""
    frame = sys._getframe(2)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(_KERNELS):
            return None
        if not file.is_relative_to(_TORCH) and file != Path(__file__):
            return f"{file}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "an unknown place"


def _refuse(what: str, why: str) -> None:
    place = _culprit()
    if place is not None:
        raise ConformanceError(
            f"{place} calls {what} in a decode step: {why}. A step must be a pure function of its "
            "context's tensors, because a captured graph replays it without the host"
        )


class _Calls(TorchFunctionMode):
    """Refuses Python calls that read or upload values."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READS:
            _refuse(f"{name}()", "the host would wait for the device")
        elif name in _UPLOADS and not (args and isinstance(args[0], Tensor)):
            _refuse(f"torch.{name}()", "the host would copy values to the device")
        elif name == "to" and "cpu" in (*args[1:], kwargs.get("device")):
            _refuse('to("cpu")', "the host would wait for the device")
        elif name == "where" and len(args) == 1:
            _refuse("where() with one argument", "its shape depends on the data")
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    """Refuses operators that hide a wait, such as an index by a boolean mask."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        name = func._schema.name
        if name in _OPERATORS:
            _refuse(name.removeprefix("aten::"), "the host would wait for its result")
        elif name in ("aten::index", "aten::index_put", "aten::index_put_"):
            if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
                _refuse("an index by a mask", "its shape depends on the data")
        elif name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
            _refuse("repeat_interleave() without output_size", "its shape depends on the data")
        return func(*args, **kwargs)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Raise inside the ``with`` block where a GPU's host would have to wait.

    Raises:
        ConformanceError: names the call and its file and line.
    """
    with _Calls(), _Operators():  # type: ignore[no-untyped-call]
        yield
