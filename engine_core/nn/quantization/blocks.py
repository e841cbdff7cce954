"""Four-bit blocks that come quantised from the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine_core.kernels import DeferredRMSNorm
from engine_core.nn.linear import Linear, LinearMethod
from engine_core.nn.packing import MatrixModule
from engine_core.nn.quantization.int4 import GROUP_SIZE, Int4Matrix


class BlockLinearMethod(LinearMethod):
    """A weight ``scales * codes + minima`` in groups of 32, as the checkpoint stores it.

    Only the scales and minima change: they are rounded to bfloat16, as torch's kernel has them.
    """

    def create_weights(
        self,
        layer: Linear,
        in_features: int,
        out_features: int,
        dtype: torch.dtype | None,
        device: torch.device | None,
    ) -> None:
        """Make ``qweight [out, in]`` of codes 0 to 15, ``scales`` and ``minima [out, in / 32]``."""
        codes = torch.empty(out_features, in_features, dtype=torch.uint8, device=device)
        layer.add_parameter("qweight", codes, input_dim=1)
        for name in ("scales", "minima"):
            numbers = torch.empty(out_features, in_features // GROUP_SIZE, device=device)
            layer.add_parameter(name, numbers.float(), input_dim=1, group_size=GROUP_SIZE)

    def packed_sizes(self, layer: MatrixModule) -> Mapping[str, int]:
        """Codes, scales and minima become one matrix."""
        size = Int4Matrix.size(layer.get_parameter("qweight").shape)
        return {"qweight": size, "scales": 0, "minima": 0}

    def process_after_load(self, layer: Linear) -> None:
        """Pack the codes for torch's kernel."""
        codes, scales, minima = (
            layer.get_parameter(name) for name in ("qweight", "scales", "minima")
        )
        matrix = Int4Matrix(codes, scales, minima + 8 * scales, layer.dtype)
        layer.set_packed(matrix, "qweight", "scales", "minima")

    def apply(self, layer: Linear, x: Tensor | DeferredRMSNorm, bias: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``."""
        assert isinstance(x, Tensor), "it agrees to no norm without its division"
        assert layer.packed is not None, "the weights are packed after they are loaded"
        return layer.packed.multiply(x, bias)
