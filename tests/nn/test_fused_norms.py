"""Decoder layers whose norms are fused with the linears around them, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from engine_core.kernels import DeferredRMSNorm
from engine_core.nn import DecoderLayer, GatedMLP, PreNormed, RMSNorm, SelfAttention, SparseMoE
from engine_core.nn.blocks import agree, link_layers
from engine_core.step_context import (
    AttentionMetadata,
    BuildContext,
    GroupMetadata,
    building,
)

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 896, 14, 2, 64, 4864


def layers(
    device: str, dtype: torch.dtype, activations: tuple[str, ...] = ("silu", "silu")
) -> list[DecoderLayer]:
    """A layer for each activation, with the same random numbers on every device.

    "experts" is one of experts, of which each token takes all: no rounding changes a choice.
    """
    with building(BuildContext(dtype=dtype, device=torch.device(device))):
        made = [
            DecoderLayer(
                SelfAttention(HIDDEN, HEADS, KV_HEADS, HEAD_DIM, qkv_bias=True),
                SparseMoE(HIDDEN, 256, 8, 8)
                if activation == "experts"
                else GatedMLP(HIDDEN, INTERMEDIATE, activation),
                lambda: RMSNorm(HIDDEN, 1e-5),
            )
            for activation in activations
        ]
    generator = torch.Generator().manual_seed(0)
    for layer in made:
        for name, param in layer.named_parameters():
            values = torch.randn(param.shape, generator=generator)
            scaled = 1 + 0.2 * values if "norm" in name else values / param.shape[-1] ** 0.5
            param.data.copy_(scaled.to(torch.bfloat16))
    return made


def run(made: list[DecoderLayer], rows: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """The residual stream after each layer, in float32 on the CPU; every row's first token."""
    return [
        (x + residual if isinstance(x, Tensor) else residual).float().cpu()
        for x, residual in forward(made, embedded(rows, device, dtype))
    ]


def settle(*stacks: list[DecoderLayer]) -> None:
    """Do the work that follows loading."""
    for made in stacks:
        agree(nn.ModuleList(made), made[0].input_layernorm.weight.device)


def embedded(rows: int, device: str, dtype: torch.dtype) -> Tensor:
    """The input of the first layer, ``[1, rows, HIDDEN]``."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(1, rows, HIDDEN, generator=generator)
    return x.to(torch.bfloat16).to(device, dtype)


def forward(made: list[DecoderLayer], x: Tensor) -> Iterator[tuple[Tensor | PreNormed, Tensor]]:
    """Yield the output of each layer before the next one runs, which may overwrite it."""
    rows, device, dtype = x.shape[1], x.device, x.dtype
    generator = torch.Generator().manual_seed(rows + 1)
    angles = torch.rand(rows, HEAD_DIM // 2, generator=generator).to(device)
    tables = torch.arange(rows, dtype=torch.int32, device=device)[:, None]
    metadata = AttentionMetadata(
        query_start=torch.arange(rows + 1, dtype=torch.int32, device=device),
        kv_lens=torch.ones(rows, dtype=torch.int32, device=device),
        max_query_len=1,
        max_kv_len=16,
        num_decode_rows=rows,
        groups=(GroupMetadata(tables, 16 * torch.arange(rows, device=device)),),
    )
    given: Tensor | PreNormed = x
    residual = None
    for layer in made:
        cache = torch.zeros(2, rows, 16, KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
        inputs = (angles.cos(), angles.sin()), (cache[0], cache[1]), metadata
        given, residual = layer(given, residual, *inputs)
        yield given, residual


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("rows", "activations"),
    [
        *((rows, ("silu", "silu")) for rows in (1, 5, 32, 64, 65, 96, 128, 192, 256, 300, 1024)),
        # The gate and up of only the first, or only the second, makes up for a norm's division.
        *((rows, ("silu", "gelu")) for rows in (32, 96, 300)),
        *((rows, ("gelu", "silu")) for rows in (32, 96, 300)),
        # Of one token experts make up for a division, and leave one.
        *((rows, ("experts", "experts", "silu")) for rows in (1, 5, 32, 300)),
    ],
)
def test_is_as_close_to_float32_as_without(rows: int, activations: tuple[str, ...]) -> None:
    exact = run(layers("cpu", torch.float32, activations), rows, "cpu", torch.float32)
    apart, unlinked, linked = (layers("cuda", torch.bfloat16, activations) for _ in range(3))
    link_layers(linked)
    settle(unlinked, linked)
    for layer in apart:
        # A watched layer gives what it says that it gives.
        layer.register_forward_hook(lambda module, args, output: None)
    errors = []
    for made in (apart, unlinked, linked):
        streams = run(made, rows, "cuda", torch.bfloat16)
        errors.append(
            [
                float((stream - expected).norm() / expected.norm())
                for stream, expected in zip(streams, exact, strict=True)
            ]
        )
    for unfused_error, *fused_errors in zip(*errors, strict=True):
        assert max(fused_errors) < 1.1 * unfused_error < 0.02


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("rows", "activations", "kind"),
    [
        (3, ("silu", "silu"), DeferredRMSNorm),
        *[(rows, ("silu", "silu"), Tensor) for rows in (65, 256, 300)],
        # The activation is beside the norm between down and q, k, v.
        (3, ("silu", "gelu"), DeferredRMSNorm),
        (3, ("gelu", "silu"), DeferredRMSNorm),
        (1, ("experts", "silu"), DeferredRMSNorm),
        (3, ("experts", "silu"), Tensor),
    ],
)
def test_only_a_layer_that_is_followed_takes_in_the_next_ones_norm(
    rows: int, activations: tuple[str, ...], kind: type
) -> None:
    first, second = layers("cuda", torch.bfloat16, activations)
    link_layers([first, second])
    settle([first, second])
    assert [name for name, _ in first.named_parameters() if name.startswith("_next")] == []
    x = embedded(rows, "cuda", torch.bfloat16)
    given, last = (given for given, _ in forward([first, second], x))
    assert isinstance(given, PreNormed)
    assert isinstance(given.values, kind)
    assert isinstance(last, Tensor)
    # Who watches a layer is shown what it says that it takes.
    seen = []
    second.register_forward_pre_hook(lambda module, args: seen.append(type(args[0])))
    run([first, second], rows, "cuda", torch.bfloat16)
    assert seen == [Tensor]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("rows", [3, 96, 300])
def test_what_a_caller_may_keep_is_not_overwritten(rows: int, linked: bool) -> None:
    made = layers("cuda", torch.bfloat16, ("silu",) * 3)
    if linked:
        link_layers(made)
        settle(made)
    x = embedded(rows, "cuda", torch.bfloat16)
    kept = [(x, x.clone())]
    for given, residual in forward(made, x):
        if not linked:
            assert isinstance(given, Tensor)
            kept += [(given, given.clone()), (residual, residual.clone())]
    for tensor, before in kept:
        assert torch.equal(tensor, before)


def test_linked_layers_are_the_same_on_a_cpu() -> None:
    apart, linked = layers("cpu", torch.float32), layers("cpu", torch.float32)
    link_layers(linked)
    settle(linked)
    for one, other in zip(
        run(apart, 3, "cpu", torch.float32), run(linked, 3, "cpu", torch.float32), strict=True
    ):
        assert torch.equal(one, other)
