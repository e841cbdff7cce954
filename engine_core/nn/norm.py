"""Normalisation layers, with the residual addition fused in."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor, nn

from engine_core.kernels import layer_norm, rms_norm
from engine_core.nn.distributed import all_reduce, split_heads
from engine_core.nn.loading import (
    ShapeMismatchError,
    copy_checked,
    empty_parameter,
    set_weight_loader,
)
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


class HeadsRMSNorm(Module):
    """Root mean square norm over all heads of the queries or keys at once, as in OLMo 2.

    Each rank has its own heads, as :class:`QKVLinear` gives them out, and their part of the weight;
    the mean is over the heads of all ranks.
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float = 1e-6) -> None:
        """``num_heads`` is the whole model's."""
        super().__init__()
        self.context = current_build_context()
        count, first = split_heads(num_heads, self.context, "query, or key and value")
        self.eps = eps
        self._shape = [num_heads * head_dim]
        self._rows = slice(first * head_dim, (first + count) * head_dim)
        self.weight = empty_parameter(count * head_dim)
        set_weight_loader(self.weight, self._load)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, heads, D]``, normalised."""
        flat = x.flatten(1)
        if self.context.tp_size == 1:
            return rms_norm(flat, self.weight, self.eps).view_as(x)
        wide = flat.float()
        # Ranks have equally many heads, and where they repeat some, all as often.
        mean = all_reduce(wide.square().mean(-1, keepdim=True), self.context) / self.context.tp_size
        out: Tensor = (wide * (mean + self.eps).rsqrt()).to(x.dtype) * self.weight
        return out.view_as(x)

    def _load(self, param: nn.Parameter, tensor: Tensor, shard_id: object = None) -> None:
        if shard_id is not None or list(tensor.shape) != self._shape:
            raise ShapeMismatchError(
                f"has shape {list(tensor.shape)}, the model wants {self._shape}"
            )
        copy_checked(param, tensor[self._rows])


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
