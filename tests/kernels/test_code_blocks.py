"""Blocks of 4-bit codes against their definition, and against what torch packs on this CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine_core.kernels import compiled
from engine_core.kernels.code_blocks import pack_blocks, unpack_blocks
from engine_core.nn.quantization.int4 import block_rows

SHAPES = [(64, 8), (64, 24), (192, 16), (576, 288), (3072, 288), (128, 20), (64, 4)]


@pytest.fixture(params=["compiled", "torch"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(compiled, "available", lambda: False)
    elif not compiled.available():
        pytest.skip("needs numba")


def codes_of(pairs: Tensor) -> Tensor:
    """Each code by itself, ``[N, K]``."""
    return torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)


def random_pairs(rows: int, width: int) -> Tensor:
    return torch.randint(0, 256, (rows, width), dtype=torch.uint8)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("block", [16, 32, 64])
def test_each_byte_has_the_codes_of_two_rows(rows: int, width: int, block: int) -> None:
    pairs = random_pairs(rows, width)
    out = torch.empty_like(pairs)
    pack_blocks(pairs, block, out)
    codes = codes_of(pairs).view(-1, 2, block // 2, 2 * width)
    expected = codes[:, 0] + 16 * codes[:, 1]
    assert torch.equal(out.view(-1, 2 * width, block // 2), expected.transpose(1, 2))
    assert torch.equal(unpack_blocks(out, block), pairs)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("rows", "width"), [shape for shape in SHAPES if shape[1] % 16 == 0])
def test_blocks_are_those_of_torch(rows: int, width: int) -> None:
    block = block_rows()
    if not block:
        pytest.skip("torch packs otherwise on this CPU")
    pairs = random_pairs(rows, width)
    out = torch.empty_like(pairs)
    pack_blocks(pairs, block, out)
    packed = torch._convert_weight_to_int4pack_for_cpu(codes_of(pairs).int(), 1)
    assert torch.equal(out.flatten(), packed.flatten())


@pytest.mark.usefixtures("kernel")
def test_rows_may_lie_anywhere() -> None:
    wide = random_pairs(64, 64)
    shifted = wide.flatten()[3 : 3 + 64 * 32].view(64, 32)
    for pairs in (wide[:, 5:37], wide.T[:, :32], shifted):
        out, expected = (
            torch.zeros(66, 32, dtype=torch.uint8),
            torch.empty(64, 32, dtype=torch.uint8),
        )
        pack_blocks(pairs, 32, out[1:65])
        pack_blocks(pairs.clone(memory_format=torch.contiguous_format), 32, expected)
        assert torch.equal(out[1:65], expected)
        assert not out[[0, 65]].any()
