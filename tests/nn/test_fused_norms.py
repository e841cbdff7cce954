"""Decoder layers whose norms are part of the linears around them, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine_core.kernels import Undivided
from engine_core.nn import DecoderLayer, GatedMLP, RMSNorm, SelfAttention
from engine_core.nn.blocks import link_layers
from engine_core.step_context import (
    AttentionMetadata,
    BuildContext,
    GroupMetadata,
    building,
)

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 896, 14, 2, 64, 4864


def layers(device: str, dtype: torch.dtype) -> list[DecoderLayer]:
    """Two layers with the same random numbers on every device."""
    with building(BuildContext(dtype=dtype, device=torch.device(device))):
        made = [
            DecoderLayer(
                SelfAttention(HIDDEN, HEADS, KV_HEADS, HEAD_DIM, qkv_bias=True),
                GatedMLP(HIDDEN, INTERMEDIATE),
                lambda: RMSNorm(HIDDEN, 1e-5),
            )
            for _ in range(2)
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
        (residual if isinstance(x, Undivided) else x + residual).float().cpu()
        for x, residual in forward(made, rows, device, dtype)
    ]


def forward(
    made: list[DecoderLayer], rows: int, device: str, dtype: torch.dtype
) -> list[tuple[Tensor | Undivided, Tensor]]:
    """What each layer gives."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(1, rows, HIDDEN, generator=generator).to(torch.bfloat16).to(device, dtype)
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
    given, residual = [], None
    for layer in made:
        cache = torch.zeros(2, rows, 16, KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
        inputs = (angles.cos(), angles.sin()), (cache[0], cache[1]), metadata
        x, residual = layer(x, residual, *inputs)
        given.append((x, residual))
    return given


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("rows", [1, 5, 32, 64])
def test_is_as_close_to_float32_as_without(rows: int) -> None:
    exact = run(layers("cpu", torch.float32), rows, "cpu", torch.float32)
    apart = layers("cuda", torch.bfloat16)
    fused = layers("cuda", torch.bfloat16)
    link_layers(fused)
    for layer in apart:
        # A watched layer gives what it says that it gives.
        layer.register_forward_hook(lambda module, args, output: None)
    errors = []
    for made in (apart, fused):
        streams = run(made, rows, "cuda", torch.bfloat16)
        errors.append(
            [
                float((stream - expected).norm() / expected.norm())
                for stream, expected in zip(streams, exact, strict=True)
            ]
        )
    for unfused_error, fused_error in zip(*errors, strict=True):
        assert fused_error < 1.1 * unfused_error < 0.02


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_only_a_layer_that_is_followed_leaves_the_division_to_the_next() -> None:
    first, second = layers("cuda", torch.bfloat16)
    link_layers([first, second])
    assert [name for name, _ in first.named_parameters() if name.startswith("_next")] == []
    given = forward([first, second], 3, "cuda", torch.bfloat16)
    assert [type(x) for x, _ in given] == [Undivided, Tensor]
    # Who watches a layer is shown what it says that it takes.
    seen = []
    second.register_forward_pre_hook(lambda module, args: seen.append(type(args[0])))
    run([first, second], 3, "cuda", torch.bfloat16)
    assert seen == [Tensor]


def test_linked_layers_are_the_same_on_a_cpu() -> None:
    apart, linked = layers("cpu", torch.float32), layers("cpu", torch.float32)
    link_layers(linked)
    for one, other in zip(
        run(apart, 3, "cpu", torch.float32), run(linked, 3, "cpu", torch.float32), strict=True
    ):
        assert torch.equal(one, other)
