"""Eight bits a weight, one scale a row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_core.kernels.codes import INT8_TOP
from engine_core.nn.linear import UnquantizedLinearMethod
from engine_core.nn.packing import MatrixModule

# torch's kernel takes 40 us for 4 rows of 960 x 576 on one Zen 5 core, 125 for 16 and 914 for 64.
# To widen the codes and multiply them as bfloat16 takes 200 to 235 for any of these.
_MOST_KERNEL_ROWS = 24
# The kernel reads whole vectors: with other row lengths it reads beyond the row, or crashes.
_ROW_MULTIPLE = 32
# Rows that are quantised at once, so that temporaries stay small.
_CHUNK = 2**20


class Int8Matrix:
    """A matrix as ``codes * scale``, symmetric, one scale for each row of outputs.

    Products of few rows are computed in bfloat16, whatever the dtype of the activations: torch's
    kernel is vectorised for that only.

    Attributes:
        codes: ``[out_features, in_features]`` int8.
        scales: ``[out_features]`` bfloat16.
        dtype: of the weight that was quantised.
        nbytes: bytes of codes and scales.
    """

    def __init__(self, weight: Tensor) -> None:
        """Quantise ``weight``, whose rows have a multiple of 32 columns."""
        assert self.fits(weight.shape), f"rows of {weight.shape[1]} cannot be multiplied in int8"
        self.dtype = weight.dtype
        self.codes = torch.empty(weight.shape, dtype=torch.int8)
        self.scales = torch.empty(weight.shape[0], dtype=torch.bfloat16)
        step = max(_CHUNK // weight.shape[1], 1)
        for start in range(0, weight.shape[0], step):
            rows = weight[start : start + step].float()
            scales = (rows.abs().amax(dim=1) / INT8_TOP).to(torch.bfloat16)
            self.scales[start : start + step] = scales
            divisor = torch.where(scales == 0, 1, scales).float().unsqueeze(1)
            self.codes[start : start + step] = (rows / divisor).round_().clamp_(-INT8_TOP, INT8_TOP)
        self.nbytes = self.codes.nbytes + self.scales.nbytes

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Int8Matrix:
        """The matrix of ``codes [N, K]`` int8 and ``scales [N]``, rounded to bfloat16."""
        self = cls.__new__(cls)
        self.codes, self.scales = codes.contiguous(), scales.to(torch.bfloat16)
        self.dtype, self.nbytes = dtype, self.codes.nbytes + self.scales.nbytes
        return self

    @staticmethod
    def fits(shape: torch.Size) -> bool:
        """Whether torch's kernel can multiply a matrix of this shape."""
        return shape[1] % _ROW_MULTIPLE == 0

    @staticmethod
    def size(shape: torch.Size) -> int:
        """Bytes of the codes and scales of a matrix of this shape."""
        return shape[0] * (shape[1] + 2)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ matrix.T + bias``."""
        if x.numel() <= _MOST_KERNEL_ROWS * x.shape[-1]:
            # torch's kernel takes nothing else than contiguous rows.
            flat = x.reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()
            out = torch._weight_int8pack_mm(flat, self.codes, self.scales).to(x.dtype)
            out = out.view(*x.shape[:-1], -1)
        else:
            out = F.linear(x, self.codes.to(x.dtype)).mul_(self.scales)
        return out if bias is None else out.add_(bias)

    def take(self, ids: Tensor) -> Tensor:
        """Rows of the matrix: ids ``[...]`` int64 to ``[..., in_features]``."""
        return F.embedding(ids, self.codes).to(self.dtype).mul_(self.scales[ids].unsqueeze(-1))

    def dense(self) -> Tensor:
        """The numbers that the codes stand for."""
        return (self.codes.float() * self.scales.float().unsqueeze(1)).to(self.dtype)


class Int8LinearMethod(UnquantizedLinearMethod):
    """Weights that are quantised to :class:`Int8Matrix` once they are loaded."""

    def pack(self, weight: Tensor) -> Int8Matrix:
        """The quantised weight."""
        return Int8Matrix(weight)

    def packed_sizes(self, layer: MatrixModule) -> Mapping[str, int]:
        """Codes and scales instead of the weight."""
        return {"weight": Int8Matrix.size(layer.weight.shape)}
