"""Packed parameters over parts and ranks, against cutting the full matrix and packing what is left.

A checkpoint's tensors are made of the whole model's numbers, and what each rank should hold of the
same numbers cut to its part: loading has to commute with packing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine_core.nn import (
    Linear,
    QKVLinear,
    build_colwise_linear,
    build_merged_colwise_linear,
    build_qkv_proj,
    build_rowwise_linear,
    load_weight,
)
from engine_core.nn.distributed import IndivisibleError
from engine_core.nn.loading import ShapeMismatchError, load_account
from engine_core.step_context import BuildContext, building

BITS = 4


def pack(codes: Tensor, dim: int, factor: int) -> Tensor:
    """``factor`` codes of 4 bits along ``dim`` in each int32, the first in the lowest bits."""
    groups = codes.to(torch.int32).unflatten(dim, (-1, factor)).movedim(dim + 1, -1)
    return (groups << (BITS * torch.arange(factor, dtype=torch.int32))).sum(-1, dtype=torch.int32)


def numbers(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return torch.randint(0, 16, (rows, columns), generator=generator)


class Packed:
    """A method whose tensors lie as ``layout`` says: codes, scales by group, zeros, order."""

    def __init__(self, transposed: bool, pack_outputs: bool, factor: int, group_size: int) -> None:
        self.output_dim, self.input_dim = (1, 0) if transposed else (0, 1)
        self.packed_dim = self.output_dim if pack_outputs else self.input_dim
        self.factor = factor
        self.group_size = group_size

    def of(self, codes: Tensor) -> dict[str, Tensor]:
        """The part of a matrix ``[rows, columns]`` of codes in a checkpoint, or on a rank."""
        groups = codes[:, :: self.group_size]
        lie: Callable[[Tensor], Tensor] = (
            (lambda tensor: tensor.T) if self.output_dim else (lambda tensor: tensor)
        )
        return {
            "qweight": pack(lie(codes), self.packed_dim, self.factor),
            "scales": lie(groups).float() + 1,
            "zeros": pack(lie(groups), self.output_dim, self.factor),
        }

    def create_weights(
        self,
        layer: Linear,
        in_features: int,
        out_features: int,
        dtype: torch.dtype | None,
        device: torch.device | None,
    ) -> None:
        dims: dict[str, Any] = {"output_dim": self.output_dim, "input_dim": self.input_dim}

        def zeros(pack_dim: int | None, group_size: int, dtype: torch.dtype) -> Tensor:
            shape = [0, 0]
            shape[self.output_dim] = out_features
            shape[self.input_dim] = -(-in_features // group_size)
            if pack_dim is not None:
                shape[pack_dim] = -(-shape[pack_dim] // self.factor)
            return torch.zeros(shape, dtype=dtype)

        for name, packed_dim, group_size, kind in (
            ("qweight", self.packed_dim, 1, torch.int32),
            ("scales", None, self.group_size, torch.float32),
            ("zeros", self.output_dim, self.group_size, torch.int32),
        ):
            layer.add_parameter(
                name,
                zeros(packed_dim, group_size, kind),
                packed_dim=packed_dim,
                pack_factor=1 if packed_dim is None else self.factor,
                group_size=group_size,
                **dims,
            )
        order = torch.zeros(layer.num_parts, in_features, dtype=torch.int32)
        layer.add_parameter("g_idx", order, output_dim=None, input_dim=1)
        layer.add_parameter("input_scale", torch.zeros(layer.num_parts), output_dim=None)

    def process_after_load(self, layer: Linear) -> None:
        """Nothing is repacked."""

    def packed_sizes(self, layer: Any) -> dict[str, int]:
        """As they are loaded."""
        return {}

    def apply(self, layer: Linear, x: Tensor, bias: Tensor | None) -> Tensor:
        """Not asked for here."""
        raise AssertionError("only loading is tested")


@st.composite
def methods(draw: st.DrawFn) -> Packed:
    return Packed(
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([1, 2, 8])),
        draw(st.sampled_from([8, 16])),
    )


def check(
    build: Callable[[], Linear],
    method: Packed,
    size: int,
    parts: dict[Any, tuple[Tensor, Callable[[int], Tensor]]],
    fused: Any = "separate",
) -> None:
    """Load ``parts``, name -> (whole matrix, what a rank keeps of it), and compare each rank's.

    ``fused``: with another value the parts come as one tensor under this shard id.
    """
    for rank in range(size):
        with building(BuildContext(tp_rank=rank, tp_size=size)):
            linear = build()
        linear.set_method(method)
        kept = torch.cat([cut(rank) for _, cut in parts.values()])
        columns = next(iter(parts.values()))[0].shape[1]
        first = rank * kept.shape[1] if linear.rowwise else 0
        order = torch.arange(columns, dtype=torch.int32) // method.group_size
        with load_account(linear) as account:
            for index, (shard_id, (whole, _)) in enumerate(parts.items()):
                if fused == "separate":
                    for leaf, tensor in method.of(whole).items():
                        load_weight(linear.get_parameter(leaf), tensor, shard_id)
                    load_weight(linear.g_idx, order + index, shard_id)
                    # With a dimension and without one.
                    scale = torch.tensor([index + 0.5] if index else index + 0.5)
                    load_weight(linear.input_scale, scale, shard_id)
            if fused != "separate":
                joined = fuse([whole for whole, _ in parts.values()], fused, linear)
                for leaf, tensor in method.of(joined).items():
                    load_weight(linear.get_parameter(leaf), tensor, fused)
                load_weight(linear.g_idx, order, fused)
                load_weight(linear.input_scale, torch.tensor(0.5), fused)
        account.raise_mismatch("the test")
        for leaf, tensor in method.of(kept).items():
            assert torch.equal(linear.get_parameter(leaf), tensor), leaf
        steps = torch.arange(len(parts), dtype=torch.int32) * (fused == "separate")
        own = order[first : first + kept.shape[1]]
        assert torch.equal(linear.g_idx, own + steps[:, None])
        assert torch.equal(linear.input_scale, steps + 0.5)


def fuse(wholes: list[Tensor], layout: Any, linear: Linear) -> Tensor:
    if layout is None:
        return torch.cat(wholes)
    assert isinstance(linear, QKVLinear)
    q, k, v = (whole.unflatten(0, (-1, linear.head_dim)) for whole in wholes)
    group = q.shape[0] // k.shape[0]
    heads = [
        torch.cat([q[i * group : (i + 1) * group], k[i : i + 1], v[i : i + 1]])
        for i in range(k.shape[0])
    ]
    return torch.cat(heads).flatten(0, 1)


def share(whole: Tensor, size: int, dim: int = 0) -> Callable[[int], Tensor]:
    return lambda rank: whole.chunk(size, dim)[rank]


@given(
    method=methods(),
    size=st.sampled_from([1, 2, 4]),
    rows=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    groups=st.integers(1, 3),
    fused=st.sampled_from(["separate", None]),
)
@settings(deadline=None)
def test_output_rows_are_shared_out(method, size, rows, groups, fused) -> None:
    columns = groups * method.group_size
    sizes = [8 * size * count for count in rows]
    wholes = [numbers(count, columns) for count in sizes]
    if len(rows) == 1:
        check(
            lambda: build_colwise_linear(columns, sizes[0]),
            method,
            size,
            {None: (wholes[0], share(wholes[0], size))},
        )
        return
    check(
        lambda: build_merged_colwise_linear(columns, sizes),
        method,
        size,
        {index: (whole, share(whole, size)) for index, whole in enumerate(wholes)},
        fused,
    )


@given(method=methods(), size=st.sampled_from([1, 2, 4]), groups=st.integers(1, 3))
@settings(deadline=None)
def test_inputs_are_shared_out(method, size, groups) -> None:
    columns = groups * method.group_size * size
    whole = numbers(24, columns)
    check(
        lambda: build_rowwise_linear(columns, 24),
        method,
        size,
        {None: (whole, share(whole, size, 1))},
    )


@given(
    method=methods(),
    size=st.sampled_from([1, 2, 4]),
    kv_heads=st.sampled_from([1, 2, 4]),
    group=st.integers(1, 2),
    fused=st.sampled_from(["separate", None, "hgd"]),
)
@settings(deadline=None)
def test_heads_are_shared_out(method, size, kv_heads, group, fused) -> None:
    """Ranks beyond the number of key and value heads keep the same one."""
    columns, head = 2 * method.group_size, 8
    q_heads = kv_heads * group * size
    q, k, v = (numbers(heads * head, columns) for heads in (q_heads, kv_heads, kv_heads))
    copies = max(size // kv_heads, 1)

    def of_kv(whole: Tensor) -> Callable[[int], Tensor]:
        return lambda rank: whole.chunk(min(size, kv_heads))[rank // copies]

    check(
        lambda: build_qkv_proj(columns, q_heads, kv_heads, head),
        method,
        size,
        {"q": (q, share(q, size)), "k": (k, of_kv(k)), "v": (v, of_kv(v))},
        fused,
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: build_colwise_linear(16, 24), r"rows 12 to 24 .* elements that hold 8 rows"),
        (lambda: build_colwise_linear(16, 24), r"rows 0 to 12 .* elements that hold 8 rows"),
        (lambda: build_merged_colwise_linear(16, [12, 12]), r"rows 0 to 6 .* hold 8 rows"),
        (lambda: build_rowwise_linear(24, 16), r"\(12 of them on each of 2 ranks\) .* by 16"),
    ],
)
def test_an_element_is_not_cut(build: Callable[[], Linear], message: str) -> None:
    with building(BuildContext(tp_rank=1 if "12 to" in message else 0, tp_size=2)):
        linear = build()
    with pytest.raises(IndivisibleError, match=message):
        linear.set_method(Packed(False, True, 8, 16))


def test_the_last_element_may_be_for_fewer() -> None:
    """Scales of blocks of 8 by 16 numbers, of a matrix that they do not divide."""
    linear = build_colwise_linear(40, 20)
    linear.add_parameter(
        "scales", torch.zeros(3, 3), input_dim=1, packed_dim=0, pack_factor=8, group_size=16
    )
    scales = torch.arange(9.0).view(3, 3)
    load_weight(linear.scales, scales)
    assert torch.equal(linear.scales, scales)


def test_a_parameter_says_how_it_lies() -> None:
    linear = build_colwise_linear(64, 16)
    linear.set_method(Packed(True, False, 8, 16))
    says = {
        name: [
            getattr(param, field)
            for field in ("output_dim", "input_dim", "packed_dim", "pack_factor", "group_size")
        ]
        for name, param in linear.named_parameters()
    }
    assert says == {
        "qweight": [1, 0, 0, 8, 1],
        "scales": [1, 0, None, 1, 16],
        "zeros": [1, 0, 1, 8, 16],
        "g_idx": [None, 1, None, 1, 1],
        "input_scale": [None, None, None, 1, 1],
    }
    with pytest.raises(ValueError, match=r"scales has shape \[3, 16\]; 4 in 0 is right"):
        linear.add_parameter("scales", torch.zeros(3, 16), output_dim=1, input_dim=0, group_size=16)
    with pytest.raises(ValueError, match="packed_dim 0 is neither"):
        linear.add_parameter("codes", torch.zeros(4, 16), output_dim=1, packed_dim=0)


def test_codes_load_from_codes_of_their_own_type() -> None:
    linear = build_colwise_linear(64, 16)
    linear.set_method(Packed(False, False, 8, 16))
    with pytest.raises(ShapeMismatchError, match=r"is of torch.float32, .* torch.int32"):
        load_weight(linear.qweight, torch.zeros(16, 8))
    with pytest.raises(ShapeMismatchError, match=r"\[16, 9\], the model wants \[16, 8\]"):
        load_weight(linear.qweight, torch.zeros(16, 9, dtype=torch.int32))
