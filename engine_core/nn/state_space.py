"""State-space layers: a causal convolution and a selective scan in the place of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine_core.configs import CacheSpec, CacheTensor
from engine_core.configs.dtypes import DType, dtype_name
from engine_core.errors import OptionError
from engine_core.kernels import StateCache, StateRows, StateSpaceWeights, run_state_space
from engine_core.nn.attention import CachedLayer
from engine_core.nn.distributed import IndivisibleError, all_reduce, divide, split_heads
from engine_core.nn.linear import Linear, build_rowwise_linear
from engine_core.nn.loading import (
    ShapeMismatchError,
    copy_checked,
    empty_parameter,
    set_weight_loader,
)
from engine_core.nn.module import Module
from engine_core.step_context import AttentionMetadata, current_build_context


class StateSpec(CacheSpec):
    """Two states for each block, whatever its number of tokens; see :class:`StateCache`.

    A full block has the state at its end. So a hit of the prefix cache needs the block before it,
    and a sequence the one that it is in.

    Attributes:
        taps: inputs of the convolution that are kept, its kernel's size less 1.
        channels: of the convolution, on this rank.
        dtype: element type of these inputs.
        num_heads: heads on this rank.
        head_dim: numbers of a head, P.
        state_size: numbers of each of those, N. States are in float32.
    """

    taps: int
    channels: int
    dtype: DType
    num_heads: int
    head_dim: int
    state_size: int

    def tensors(self, block_size: int) -> tuple[CacheTensor, ...]:
        """Lengths, inputs of the convolution, states."""
        state = (2, self.num_heads, self.head_dim, self.state_size)
        return (
            CacheTensor(name="lengths", shape=(2,), dtype="int32"),
            CacheTensor(name="inputs", shape=(2, self.taps, self.channels), dtype=self.dtype),
            CacheTensor(name="states", shape=state, dtype="float32"),
        )

    def first_needed(self, position: int) -> int:
        """The token before: its block has the state."""
        return max(0, position - 1)


class StateSpace(CachedLayer):
    """Convolution and scan of this rank's heads, over states in the cache (Mamba-2).

    Parameters are named as in checkpoints, but for ``conv_weight`` and ``conv_bias``.

    Attributes:
        num_heads: heads on this rank.
        num_groups: groups of heads with one B and C, on this rank.
        split_sizes: this rank's gates, convolution's channels and heads: the output of the linear
            before it.
        parts: of that linear, as :class:`Linear` takes them.
    """

    A_log: nn.Parameter
    D: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        state_size: int,
        *,
        num_groups: int = 1,
        conv_kernel: int = 4,
        conv_bias: bool = True,
        time_step_limit: tuple[float, float] = (0.0, float("inf")),
    ) -> None:
        """Head and group counts are the whole model's.

        Args:
            num_heads: heads.
            head_dim: numbers of a head.
            state_size: numbers that are kept of each of those.
            num_groups: groups of neighbouring heads that share B and C.
            conv_kernel: tokens that the convolution sees.
            conv_bias: whether it has a bias.
            time_step_limit: the least and the greatest time step.

        Raises:
            OptionError: the mode is deterministic, of which the kernels were not examined.
            IndivisibleError: the heads or groups do not split evenly over the ranks.
        """
        super().__init__()
        context = current_build_context()
        if context.deterministic:
            raise OptionError(
                "deterministic: the kernels of state spaces were not examined for it; leave it out"
            )
        divide(num_heads, num_groups, "number of state-space heads")
        self.num_heads = divide(num_heads, context.tp_size, "number of state-space heads")
        self.num_groups, first_group = split_heads(num_groups, context, "B and C")
        self.head_dim = head_dim
        self.state_size = state_size
        self.taps = conv_kernel - 1
        self.limit = time_step_limit
        self.dtype = context.dtype or torch.get_default_dtype()

        own, first = self.num_heads, context.tp_rank * self.num_heads
        inner, grouped = num_heads * head_dim, num_groups * state_size
        here = (inner, first * head_dim, own * head_dim)
        of_group = (grouped, first_group * state_size, self.num_groups * state_size)
        self.parts = [
            ("gate", *here),
            ("x", *here),
            ("B", *of_group),
            ("C", *of_group),
            ("dt", num_heads, first, own),
        ]
        channels = here[2] + 2 * of_group[2]
        self.split_sizes = (here[2], channels, own)
        rows, total = [], 0
        for whole, start, size in (here, of_group, of_group):
            rows.append((total + start, size))
            total += whole
        self.conv_weight = _rows_parameter(rows, total, conv_kernel)
        self.conv_bias = _rows_parameter(rows, total) if conv_bias else None
        for name in ("A_log", "D", "dt_bias"):
            param = _rows_parameter([(first, own)], num_heads, dtype=torch.float32)
            self.register_parameter(name, param)

    def cache_spec(self) -> StateSpec:
        """The cache spec of this layer."""
        return StateSpec(
            taps=self.taps,
            channels=self.split_sizes[1],
            dtype=dtype_name(str(self.dtype).removeprefix("torch.")),
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            state_size=self.state_size,
        )

    def forward(
        self, xbc: Tensor, dt: Tensor, cache: Any, attn_metadata: AttentionMetadata
    ) -> Tensor:
        """``xbc [T, channels]`` and ``dt [T, heads]`` to ``[T, heads * P]``."""
        weights = StateSpaceWeights(
            self.conv_weight, self.conv_bias, self.A_log, self.D, self.dt_bias, *self.limit
        )
        rows = StateRows(
            query_start=attn_metadata.query_start,
            kv_lens=attn_metadata.kv_lens,
            max_query_len=attn_metadata.max_query_len,
            num_decode_rows=attn_metadata.num_decode_rows,
            block_tables=attn_metadata.groups[self.group_id].block_tables,
            block_size=self.block_size,
        )
        return run_state_space(xbc, dt, weights, StateCache(*cache), rows).flatten(1)


def _rows_parameter(
    rows: list[tuple[int, int]], total: int, *others: int, dtype: torch.dtype | None = None
) -> nn.Parameter:
    """A parameter of these rows ``(first, how many)`` of a checkpoint's ``total``."""

    def load(param: nn.Parameter, tensor: Tensor, shard_id: Any = None) -> None:
        # A convolution's weight has a dimension of its one input channel.
        if tensor.shape not in ((total, *others), (total, 1, *others)):
            shape = list(tensor.shape)
            raise ShapeMismatchError(f"has shape {shape}, the model wants {[total, *others]}")
        mine = [tensor.narrow(0, first, count) for first, count in rows]
        copy_checked(param, torch.cat(mine).view(param.shape))

    param = empty_parameter(sum(count for _, count in rows), *others, dtype=dtype)
    set_weight_loader(param, load)
    return param


class GatedRMSNorm(Module):
    """``norm(x * silu(gate))``, a root mean square norm of each group of neighbouring numbers.

    Computed in float32. Each rank has its own numbers; of a single group the mean is over those of
    all ranks.
    """

    def __init__(self, size: int, num_groups: int = 1, eps: float = 1e-5) -> None:
        """``size`` and ``num_groups`` are the whole model's.

        Raises:
            IndivisibleError: they do not split evenly over the ranks.
        """
        super().__init__()
        self.context = context = current_build_context()
        own = divide(size, context.tp_size, "size of a gated norm")
        if num_groups > 1 and num_groups % context.tp_size:
            raise IndivisibleError(
                f"the groups of a gated norm ({num_groups}) are not divisible by "
                f"tensor_parallel_size ({context.tp_size})"
            )
        self.input_width = own
        self.num_groups = max(1, num_groups // context.tp_size)
        self.shared = num_groups == 1 and context.tp_size > 1
        self.eps = eps
        self.weight = _rows_parameter([(context.tp_rank * own, own)], size)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """``[..., size of this rank]``, both, to the same."""
        wide = (x.float() * nn.functional.silu(gate.float())).unflatten(-1, (self.num_groups, -1))
        mean = wide.square().mean(-1, keepdim=True)
        if self.shared:
            mean = all_reduce(mean, self.context) / self.context.tp_size
        wide = wide * (mean + self.eps).rsqrt()
        out: Tensor = self.weight * wide.flatten(-2).to(x.dtype)
        return out


class StateSpaceMixer(Module):
    """A linear, :class:`StateSpace`, a gated norm, and a linear back, as in Mamba-2.

    It takes what :class:`SelfAttention` takes, so that a :class:`DecoderLayer` may have either.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        state_size: int,
        *,
        num_groups: int = 1,
        bias: bool = False,
        norm_eps: float = 1e-5,
        **options: Any,
    ) -> None:
        """Counts are the whole model's; ``options`` are those of :class:`StateSpace`."""
        super().__init__()
        self.ssm = StateSpace(num_heads, head_dim, state_size, num_groups=num_groups, **options)
        inner = num_heads * head_dim
        self.in_proj = Linear(hidden_size, self.ssm.parts, bias=bias)
        self.norm = GatedRMSNorm(inner, num_groups, norm_eps)
        self.out_proj = build_rowwise_linear(inner, hidden_size, bias=bias)

    def forward(
        self, x: Tensor, cos_sin: Any, cache: Any, attn_metadata: AttentionMetadata
    ) -> Tensor:
        """``x [1, T, H]`` to ``[1, T, H]``; there are no rotary positions."""
        del cos_sin
        gate, xbc, dt = self.in_proj(x)[0].split(self.ssm.split_sizes, dim=-1)
        y = self.ssm(xbc, dt, cache, attn_metadata)
        out: Tensor = self.out_proj(self.norm(y, gate).unsqueeze(0))
        return out
