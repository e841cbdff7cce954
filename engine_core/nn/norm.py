"""Normalisation layers, with the residual addition fused in."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor, nn

from engine_core.errors import OptionError
from engine_core.kernels import (
    CodedRows,
    RowForm,
    layer_norm,
    layer_norm_codes,
    rms_norm,
    rms_norm_codes,
)
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

    def codes(self, x: Tensor, residual: Tensor, form: RowForm) -> tuple[CodedRows, Tensor]:
        """``(norm(x + residual), x + residual)``, the norm's rows quantised."""
        given = (x, self.weight, self.eps, form)
        return rms_norm_codes(*given, residual=residual, offset=self.offset)


def build_heads_parameter(num_heads: int, head_dim: int) -> nn.Parameter:
    """A parameter ``[heads of this rank, D]`` with a row for each query, or key and value head.

    Each rank has the rows of the heads that :class:`QKVLinear` gives it. A checkpoint's tensor is
    ``[heads, D]`` or ``[heads * D]``, or ``[D]`` with the head's number as its shard id.

    Args:
        num_heads: the whole model's.
        head_dim: the size of a row.
    """
    count, first = split_heads(num_heads, current_build_context(), "query, or key and value")
    mine = range(first, first + count)

    def load(param: nn.Parameter, tensor: Tensor, shard_id: Any = None) -> None:
        shapes = [[num_heads, head_dim], [num_heads * head_dim]]
        shapes = shapes if shard_id is None else [[head_dim]]
        if list(tensor.shape) not in shapes:
            wanted = " or ".join(map(str, shapes))
            raise ShapeMismatchError(f"has shape {list(tensor.shape)}, the model wants {wanted}")
        if shard_id is None:
            copy_checked(param, tensor.reshape(num_heads, head_dim)[mine.start : mine.stop])
        elif shard_id in mine:
            copy_checked(param[shard_id - first], tensor)

    param = empty_parameter(count, head_dim)
    vars(param)["shard_sizes"] = {i: head_dim * (i in mine) for i in range(num_heads)}
    set_weight_loader(param, load)
    return param


class HeadsRMSNorm(Module):
    """Root mean square norm over all heads of the queries or keys at once, as in OLMo 2.

    Each rank has its own heads, and the mean is over those of all ranks.
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float = 1e-6) -> None:
        """``num_heads`` is the whole model's."""
        super().__init__()
        self.context = current_build_context()
        if self.context.deterministic and self.context.tp_size > 1:
            raise OptionError(
                "deterministic: torch adds up a norm over the heads of several ranks, in an order "
                "that depends on the number of tokens; leave it out, or run the model on one rank"
            )
        self.eps = eps
        self.weight = build_heads_parameter(num_heads, head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, heads, D]``, normalised."""
        if self.context.tp_size == 1:
            return rms_norm(x.flatten(1), self.weight.view(-1), self.eps).view_as(x)
        wide = x.float()
        # Ranks have equally many heads, and where they repeat some, all as often.
        mean = all_reduce(wide.square().mean((1, 2), keepdim=True), self.context)
        scale = (mean / self.context.tp_size + self.eps).rsqrt()
        out: Tensor = (wide * scale).to(x.dtype) * self.weight
        return out


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

    def codes(self, x: Tensor, residual: Tensor, form: RowForm) -> tuple[CodedRows, Tensor]:
        """``(norm(x + residual), x + residual)``, the norm's rows quantised."""
        given = (x, self.weight, self.bias, self.eps, form)
        return layer_norm_codes(*given, residual=residual)
