"""A GPU that is not there: code meant for it runs, on tensors with shapes and no numbers.

What a model's steps would launch is found out so, without the GPU. Tensors on the CPU stay what
they are.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine_core.kernels.gpu import GPU, gpu_of
from engine_core.kernels.launch import gluon
from engine_core.kernels.launch.triton import num_multiprocessors, pdl_options

# What follows from the device and is kept: forgotten where another begins to be there.
_KEPT: tuple[Any, ...] = (gpu_of, num_multiprocessors, pdl_options, gluon.runs_gluon)
# Operations in place that change more than numbers.
_RESHAPING = {
    f"aten::{name}_"
    for name in ("as_strided", "resize", "resize_as", "set", "squeeze", "t", "transpose")
} | {"aten::unsqueeze_", "aten::swapaxes_", "aten::swapdims_"}
_COMPARING = {f"aten::{name}" for name in ("eq", "ge", "gt", "le", "lt", "ne")}
_META, _CUDA = torch.device("meta"), torch.device("cuda", 0)


class AbsentTensor(Tensor):
    """A tensor of the GPU that is not there. ``meta`` has its shape, strides and type."""

    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor) -> AbsentTensor:
        """A tensor of the shape of one on the meta device."""
        # To PyTorch's own code it is on the meta device: that of a GPU may not be built in.
        made: AbsentTensor = Tensor._make_subclass(cls, meta, False)
        made.meta = meta
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The GPU."""
        return _CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """True."""
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """False."""
        return False

    def data_ptr(self) -> int:
        """The address if every allocation began at 0: alignment is all that counts."""
        return int(self.meta.storage_offset()) * self.meta.element_size()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Work out the result's shape."""
        del types
        return _apart(func, args, kwargs or {})


def _apart(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operation on tensors of the meta device in place of the GPU's."""
    given: dict[int, AbsentTensor] = {}

    def enter(value: Any) -> Any:
        if isinstance(value, AbsentTensor):
            given[id(value.meta)] = value
            return value.meta
        if isinstance(value, Tensor):  # the host's, such as indices, or a number
            return value if value.dim() == 0 and value.device.type == "cpu" else value.to(_META)
        if isinstance(value, torch.device) and value.type == "cuda":
            return _META
        if type(value) in (list, tuple):
            return type(value)(map(enter, value))
        return value

    def leave(value: Any) -> Any:
        if isinstance(value, Tensor):
            known = given.get(id(value))
            return AbsentTensor(value) if known is None else known
        if type(value) in (list, tuple):
            return type(value)(map(leave, value))
        return value

    name = func._schema.name
    # Those of Python's operators, such as __rshift__, have a result of their own.
    in_place = name.endswith("_") and not name.endswith("__") and name not in _RESHAPING
    if in_place and isinstance(args[0], AbsentTensor):
        return args[0]  # for new numbers PyTorch's Python would import its compiler, for a second
    if "generator" in kwargs:  # nothing is drawn, but some operations have one
        kwargs["generator"] = None
    if func is torch.ops.aten._local_scalar_dense.default:
        raise RuntimeError("a number of a GPU that is not there was asked for")
    to_host = kwargs.get("device")
    entered = [enter(value) for value in args], {k: enter(v) for k, v in kwargs.items()}
    chooses = func is torch.ops.aten.where.self
    if chooses or name in _COMPARING:  # for these PyTorch's Python would import sympy
        tensors = [value for value in entered[0] if isinstance(value, Tensor)]
        shape = torch.broadcast_shapes(*(value.shape for value in tensors))
        dtype = torch.result_type(*entered[0][1:]) if chooses else torch.bool
        return AbsentTensor(torch.empty(shape, dtype=dtype, device=_META))
    if to_host is not None and torch.device(to_host).type == "cpu":
        return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
    return leave(func(*entered[0], **entered[1]))


def _is_there(value: Any) -> bool:
    """Whether a tensor of the GPU is among the arguments."""
    if isinstance(value, AbsentTensor):
        return True
    return type(value) in (list, tuple) and any(map(_is_there, value))


class _Apart(TorchDispatchMode):
    """Makes an :class:`AbsentTensor` of all that is made on the GPU or copied there."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to keep torch.compile out would import all of it first."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CUDA
            made = _apart(func, args, kwargs)
            self._memory.take(made)
            return made
        if any(map(_is_there, args)) or any(map(_is_there, kwargs.values())):
            return _apart(func, args, kwargs)
        return func(*args, **kwargs)


class _Nothing:
    """A stream, an event, a generator or a graph: nothing ever waits for it."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self


class _Generator(torch.Generator):
    """A generator of the host in the place of the GPU's."""

    def __new__(cls, device: Any = None) -> _Generator:
        del device
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


class _Stub(ModuleType):
    """A module of PyTorch as long as nobody needs more of it than a few functions.

    Shapes of some operations are worked out in Python that asks for these. The import takes a
    second or two. It is made after all once another function is called, or a class is asked for.
    """

    def __init__(self, name: str, functions: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(name)
        vars(self).update(functions)
        file = Path(torch.__file__).parent.joinpath(*name.split(".")[1:])
        if file.is_dir():
            self.__path__ = [str(file)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.islower() and "__path__" not in vars(self):  # a function, or a module below
            return lambda *args, **kwargs: self._found(name)(*args, **kwargs)
        return self._found(name)

    def _found(self, name: str) -> Any:
        """The value of this name in the module itself."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def _undisturbed(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """The function itself: nobody compiles it."""
    del args, kwargs
    return function


def _equal(one: Any, other: Any) -> bool:
    """Whether two numbers, or two shapes, are equal."""
    shapes = [tuple(each) if isinstance(each, list | tuple) else each for each in (one, other)]
    return bool(shapes[0] == shapes[1])


# PyTorch's compiler, which is to be kept out of a function, and what reasons about shapes that are
# not numbers: here all are.
_SHAPES = ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious")
_STUBS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "torch._dynamo": {"disable": _undisturbed},
    "torch.fx.experimental.symbolic_shapes": {
        **dict.fromkeys(_SHAPES, bool),
        "is_nested_int": lambda value: False,
        "sym_and": lambda *values: all(values),
        "sym_eq": _equal,
        "sym_or": lambda *values: any(values),
    },
}


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Do not import PyTorch's compiler, and sympy, for no more than the functions of stubs."""
    stubs = {
        name: _Stub(name, functions)
        for name, functions in _STUBS.items()
        if name not in sys.modules
    }
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name, stub in stubs.items():
            if sys.modules.get(name) is stub:
                del sys.modules[name]


class _Memory:
    """How much of the GPU's memory is taken, without what is small."""

    _LEAST = 1 << 16

    def __init__(self, total: int, free: int) -> None:
        self.total, self._taken = total, total - free

    def info(self, device: Any = None) -> tuple[int, int]:
        """Bytes that are free, and all."""
        del device
        return max(0, self.total - self._taken), self.total

    def take(self, made: Any) -> None:
        """Count a new tensor for as long as it lives."""
        nbytes = made.meta.nbytes if isinstance(made, AbsentTensor) else 0
        if nbytes > self._LEAST:
            self._taken += nbytes
            weakref.finalize(made, self._give, nbytes)

    def _give(self, nbytes: int) -> None:
        self._taken -= nbytes


def _stand_ins(gpu: GPU, memory: _Memory) -> dict[str, Any]:
    """Functions of ``torch.cuda`` that speak of the GPU, by their names there."""
    properties = SimpleNamespace(
        multi_processor_count=gpu.num_multiprocessors,
        shared_memory_per_block_optin=gpu.shared_memory,
        total_memory=memory.total,
    )
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda device: nullcontext(),
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: gpu.capability,
        "mem_get_info": memory.info,
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "current_stream": lambda device=None: _Nothing(),
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "graph_pool_handle": lambda: None,
        "graph": lambda *args, **kwargs: nullcontext(),
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": _Nothing,
        "Event": _Nothing,
        "Stream": _Nothing,
    }


@contextmanager
def absent_gpu(gpu: GPU, memory: int, *, free: int | None = None) -> Iterator[None]:
    """Have PyTorch see one GPU with so many bytes of memory in the ``with`` block.

    ``free`` of them are not taken yet; all if None.

    For a process that does nothing else meanwhile: functions of PyTorch are replaced.
    """
    for kept in _KEPT:
        kept.cache_clear()
    taken = _Memory(memory, memory if free is None else free)
    try:
        with (
            patch.multiple(torch.cuda, **_stand_ins(gpu, taken)),
            patch.object(torch, "Generator", _Generator),
            gluon.presumed_right(),
            _without_compiler(),
            patch.object(Tensor, "pin_memory", lambda self, device=None: self),
            patch.object(torch.version, "hip", None),
            _Apart(taken),
        ):
            yield
    finally:
        for kept in _KEPT:
            kept.cache_clear()
