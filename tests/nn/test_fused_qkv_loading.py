"""A checkpoint's fused query, key and value tensor, in both of the orders that there are."""

import pytest
import torch

from engine_core.nn import build_qkv_proj, load_weight
from engine_core.nn.loading import ShapeMismatchError
from engine_core.step_context import BuildContext, building

HIDDEN, KV_HEADS, GROUP, HEAD = 24, 4, 3, 8


def checkpoint() -> dict[str, torch.Tensor]:
    """``[kv head, rows of its heads, hidden]`` for q, k and v."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(KV_HEADS, heads * HEAD, HIDDEN, generator=generator)
        for name, heads in (("q", GROUP), ("k", 1), ("v", 1))
    }


@pytest.mark.parametrize("layout", ["by parts", "by heads"])
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_each_rank_gets_its_heads(layout: str, size: int, rank: int) -> None:
    parts = checkpoint()
    if layout == "by heads":
        fused, shard_id = torch.cat([parts[name] for name in "qkv"], dim=1).flatten(0, 1), "hgd"
    else:
        fused, shard_id = torch.cat([parts[name].flatten(0, 1) for name in "qkv"]), None
    with building(BuildContext(tp_size=size, tp_rank=rank)):
        layer = build_qkv_proj(HIDDEN, KV_HEADS * GROUP, KV_HEADS, HEAD)
    layer.weight.fill_(torch.nan)
    load_weight(layer.weight, fused, shard_id)
    mine = slice(rank * KV_HEADS // size, (rank + 1) * KV_HEADS // size)
    wanted = torch.cat([parts[name][mine].flatten(0, 1) for name in "qkv"])
    assert torch.equal(layer.weight, wanted)


def test_a_fused_tensor_of_the_wrong_size_is_refused() -> None:
    layer = build_qkv_proj(HIDDEN, KV_HEADS, KV_HEADS, HEAD)
    with pytest.raises(ShapeMismatchError, match="wants 96 rows"):
        load_weight(layer.weight, torch.zeros(95, HIDDEN), "hgd")
