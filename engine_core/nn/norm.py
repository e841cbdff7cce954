"""Normalisation layers, with the residual addition fused in."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor, nn

from engine_core.kernels import layer_norm, rms_norm
from engine_core.nn.module import Module
from engine_core.step_context import current_build_context


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
        context = current_build_context()
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(
            torch.empty(hidden_size, dtype=dtype or context.dtype, device=device or context.device),
            requires_grad=False,
        )

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
        context = current_build_context()
        self.eps = eps

        def parameter() -> nn.Parameter:
            return nn.Parameter(
                torch.empty(
                    hidden_size, dtype=dtype or context.dtype, device=device or context.device
                ),
                requires_grad=False,
            )

        self.weight = parameter()
        self.bias = parameter() if bias else None

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """``norm(x)``; with ``residual``, ``(norm(x + residual), x + residual)``."""
        return layer_norm(x, self.weight, self.bias, self.eps, residual=residual)
