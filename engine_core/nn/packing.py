"""Weight matrices in the form in which a CPU multiplies by them fastest."""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine_core.kernels.half_linear import (
    as_halves,
    half_linear,
    pack_halves,
    panel_width,
    unpack_halves,
)
from engine_core.nn.module import Module

# Looking the overload up takes a microsecond a call.
_linear_pointwise = torch.ops.mkldnn._linear_pointwise.default


class PackedMatrix(Protocol):
    """A matrix ``[out_features, in_features]``, repacked once the weights are loaded."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x [..., in_features]`` to ``x @ matrix.T + bias``, in x's dtype."""

    def dense(self) -> Tensor:
        """The numbers again, ``[out_features, in_features]``; slow."""


class MatrixModule(Module):
    """A layer around one matrix ``weight``, which may be packed once it is loaded.

    Attributes:
        weight: ``[out_features, in_features]`` of this rank. Once its memory is given up it is no
            parameter any more: each access turns the packed matrix back, which is slow.
        packed: what is used instead of the weight, if anything is.
    """

    weight: nn.Parameter
    packed: PackedMatrix | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and name not in self._parameters and self.packed is not None:
            return self.packed.dense()
        return super().__getattr__(name)

    def set_packed(self, packed: PackedMatrix, *parameters: str) -> None:
        """Use ``packed`` from now on; the memory of the named parameters is given up."""
        for name in parameters:
            param = self._parameters.pop(name)
            assert param is not None, f"there is no parameter {name!r}"
            # Whoever still holds the parameter does not hold its memory.
            param.data = param.data.new_empty(0)
        self.packed = packed


class OneDNNMatrix:
    """An unquantised matrix in oneDNN's blocked layout.

    Where torch's ``linear`` reorders the weight in each call, or leaves it to a BLAS made for large
    matrices, this reads it once: on one Zen 5 core a row times ``3072 x 576`` takes 0.13 ms instead
    of 0.41 in bfloat16, and 0.4 instead of 0.85 in float32. From 128 rows on they are equal.
    """

    def __init__(self, weight: Tensor) -> None:
        """``weight`` is not kept; see :func:`onednn_packs` for what it may be."""
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.nbytes = weight.nbytes

    def multiply(
        self, x: Tensor, bias: Tensor | None, activation: str = "none", form: str = ""
    ) -> Tensor:
        """``x @ matrix.T + bias``, and an activation of oneDNN's, such as "gelu" in a form."""
        out: Tensor = _linear_pointwise(x, self._weight, bias, activation, [], form)
        return out

    def dense(self) -> Tensor:
        """The numbers again."""
        return self._weight.to_dense()


class HalfMatrix:
    """A float32 matrix whose numbers are bfloat16 or float16, kept as such.

    One row takes half the time that it takes with :class:`OneDNNMatrix`, because half as many bytes
    are read; many rows take the same.
    """

    def __init__(self, weight: Tensor) -> None:
        """``weight`` is not kept; it has 16 bits."""
        self.shape = weight.shape
        self._panels = pack_halves(weight)
        self.nbytes = self._panels.nbytes

    @staticmethod
    def size(shape: torch.Size) -> int:
        """Bytes of a matrix of this shape."""
        width = panel_width()
        return -(-shape[0] // width) * width * shape[1] * 2

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ matrix.T + bias``."""
        flat = x.reshape(-1, self.shape[1])
        out = flat.new_empty(len(flat), self.shape[0])
        half_linear(flat, self._panels, bias, out)
        return out.view(*x.shape[:-1], self.shape[0])

    def take(self, ids: Tensor) -> Tensor:
        """Rows of the matrix: ids ``[...]`` int64 to ``[..., in_features]`` float32."""
        rows = unpack_halves(self._panels, ids.reshape(-1)).float()
        return rows.view(*ids.shape, self.shape[1])

    def dense(self) -> Tensor:
        """The numbers again."""
        return self.take(torch.arange(self.shape[0]))


def pack_matrix(weight: Tensor) -> PackedMatrix | None:
    """The form in which this CPU multiplies fastest by a plain weight; None for the weight itself.

    Where the CPU multiplies bfloat16 a model of such numbers is not computed in float32, unless a
    user wants that.
    """
    if packs_halves(weight):
        halves = as_halves(weight.detach())
        if halves is not None:
            return HalfMatrix(halves)
    return OneDNNMatrix(weight) if onednn_packs(weight) else None


def packs_halves(weight: Tensor) -> bool:
    """Whether a matrix becomes a :class:`HalfMatrix` if its numbers are of 16 bits."""
    return weight.device.type == "cpu" and weight.dim() == 2 and keeps_halves(weight.dtype)


def keeps_halves(dtype: torch.dtype) -> bool:
    """Whether numbers of 16 bits stay such in matrices that this CPU multiplies in ``dtype``."""
    wanted = dtype is torch.float32 and torch.bfloat16 not in _onednn_dtypes()
    return wanted and panel_width() > 0


@cache
def _onednn_dtypes() -> tuple[torch.dtype, ...]:
    if not torch.backends.mkldnn.is_available():
        return ()
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return (torch.float32, torch.bfloat16)
    return (torch.float32,)


def onednn_packs(weight: Tensor) -> bool:
    """Whether :class:`OneDNNMatrix` takes this weight: on a CPU, of a type that it can multiply."""
    return weight.device.type == "cpu" and onednn_multiplies(weight.dtype)


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU's :class:`OneDNNMatrix` is for numbers of this type."""
    return dtype in _onednn_dtypes()
