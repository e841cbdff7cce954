"""Normalisation layers, with the residual addition fused in."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from engine_core.kernels import layer_norm, rms_norm
from engine_core.nn.loading import empty_parameter
from engine_core.nn.module import Module


class RMSNorm(Module):
    """Root mean square norm (Zhang and Sennrich, 2019), rounded as transformers' Llama rounds.

    With an ``offset``, which is added to the weight, it is rounded as Gemma rounds.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.input_width = hidden_size
        self.eps = eps
        self.offset = offset
        self.weight = empty_parameter(hidden_size, dtype=dtype, device=device)

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """``norm(x)``; with ``residual``, ``(norm(x + residual), x + residual)``."""
        return rms_norm(x, self.weight, self.eps, residual=residual, offset=self.offset)


class LayerNorm(Module):
    """Layer norm (Ba, Kiros and Hinton, 2016)."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.input_width = hidden_size
        self.eps = eps
        self.weight = empty_parameter(hidden_size, dtype=dtype, device=device)
        self.bias = empty_parameter(hidden_size, dtype=dtype, device=device) if bias else None

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """``norm(x)``; with ``residual``, ``(norm(x + residual), x + residual)``."""
        return layer_norm(x, self.weight, self.bias, self.eps, residual=residual)
