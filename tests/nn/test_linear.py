"""Linears over ranks: what each rank keeps, computed without processes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine_core.errors import WeightsMismatchError
from engine_core.nn import (
    build_colwise_linear,
    build_embedding,
    build_lm_head,
    build_merged_colwise_linear,
    build_qkv_proj,
    build_rowwise_linear,
    load_stacked_weights,
    load_weight,
)
from engine_core.nn.distributed import rehearsing
from engine_core.nn.loading import ShapeMismatchError, load_account, materialize
from engine_core.step_context import BuildContext, building


def ranks(size: int) -> list[BuildContext]:
    return [BuildContext(tp_rank=rank, tp_size=size) for rank in range(size)]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) * 7 + shape[0]))


def test_the_parts_of_a_colwise_linear_join_to_the_whole() -> None:
    weight, bias, x = random(6, 4), random(6), random(3, 4)
    parts = []
    for context in ranks(2):
        with building(context):
            linear = build_colwise_linear(4, 6, bias=True)
        load_weight(linear.weight, weight)
        load_weight(linear.bias, bias)
        parts.append(linear(x))
    torch.testing.assert_close(torch.cat(parts, -1), F.linear(x, weight, bias))


def test_the_parts_of_a_merged_linear_keep_their_order() -> None:
    gate, up, x = random(6, 4), random(4, 4), random(3, 4)
    gates, ups = [], []
    for context in ranks(2):
        with building(context):
            linear = build_merged_colwise_linear(4, [6, 4])
        # In either order, and as one tensor.
        load_weight(linear.weight, up, shard_id=1)
        load_weight(linear.weight, gate, shard_id=0)
        separate = linear.weight.clone()
        load_weight(linear.weight, torch.cat([gate, up]))
        assert torch.equal(linear.weight, separate)
        first, second = linear(x).split([3, 2], dim=-1)
        gates.append(first)
        ups.append(second)
    torch.testing.assert_close(torch.cat(gates, -1), F.linear(x, gate))
    torch.testing.assert_close(torch.cat(ups, -1), F.linear(x, up))


def test_the_parts_of_a_rowwise_linear_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, x = random(5, 6), random(5), random(3, 6)
    # Without processes there is nobody to sum with: the sum is done here.
    monkeypatch.setattr("engine_core.nn.linear.all_reduce", lambda y, context: y)
    total = torch.zeros(3, 5)
    for context in ranks(3):
        with building(context):
            linear = build_rowwise_linear(6, 5, bias=True)
        load_weight(linear.weight, weight)
        load_weight(linear.bias, bias)
        mine = x[:, context.tp_rank * 2 : context.tp_rank * 2 + 2]
        total += linear(mine) - linear.bias
    torch.testing.assert_close(total + bias, F.linear(x, weight, bias))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_query_heads_are_shared_and_few_kv_heads_repeated(size: int) -> None:
    heads, kv_heads, dim = 8, 2, 3
    q, k, v = random(heads * dim, 5), random(kv_heads * dim, 5), random(kv_heads * dim, 5)
    x = random(2, 5)
    for context in ranks(size):
        with building(context):
            proj = build_qkv_proj(5, heads, kv_heads, dim)
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            load_weight(proj.weight, tensor, shard_id=name)
        ours = proj.split_qkv(proj(x))
        own_q = slice(context.tp_rank * heads // size, (context.tp_rank + 1) * heads // size)
        # The kv heads that these query heads belong to.
        own_kv = slice(own_q.start // 4, (own_q.stop - 1) // 4 + 1)
        for got, weight, own in zip(ours, (q, k, v), (own_q, own_kv, own_kv), strict=True):
            whole = F.linear(x, weight).unflatten(-1, (-1, dim))
            torch.testing.assert_close(got, whole[:, own])


def test_a_vocabulary_that_does_not_divide_is_padded() -> None:
    table, hidden = random(7, 4), random(3, 4)
    logits = []
    for context in ranks(2):
        with building(context):
            embedding = build_embedding(7, 4)
            head = build_lm_head(4, 7, tied_to=embedding)
        assert head.weight is embedding.weight
        load_weight(embedding.weight, table)
        logits.append(F.linear(hidden, head.weight))
    torch.testing.assert_close(torch.cat(logits, -1)[:, :7], hidden @ table.T)


def test_each_rank_looks_up_the_tokens_that_it_has() -> None:
    """And gives zeros for others, so that the sum is that of all; 7 tokens are 4 and 3."""
    table, ids = random(7, 4), torch.tensor([[0, 3, 4, 6, 3]])
    parts = []
    for context in ranks(2):
        with building(context):
            embedding = build_embedding(7, 4)
        load_weight(embedding.weight, table)
        with rehearsing():
            parts.append(embedding(ids))
    assert torch.equal(parts[0] + parts[1], table[ids])
    assert not parts[0][:, 2:4].any()


def test_a_tied_head_stays_tied_when_it_gets_memory() -> None:
    with torch.device("meta"):
        model = torch.nn.ModuleDict()
        model["embedding"] = build_embedding(7, 4)
        model["head"] = build_lm_head(4, 7, tied_to=model["embedding"])
    materialize(model, torch.device("cpu"))
    assert model["head"].weight is model["embedding"].weight
    assert not model["head"].weight.is_meta


WRONG_SHAPES = {
    "rows": ("q", (9, 5), r"has shape \[9, 5\], the model wants \[8, 5\]"),
    "columns": ("q", (8, 6), r"has shape \[8, 6\], the model wants \[8, 5\]"),
    "transposed": ("k", (5, 4), r"has shape \[5, 4\]"),
    "flat": ("v", (20,), r"has shape \[20\]"),
    "whole": (None, (17, 5), "the model wants 16 rows"),
}


@pytest.mark.parametrize(
    ("shard", "shape", "message"), WRONG_SHAPES.values(), ids=WRONG_SHAPES.keys()
)
def test_a_wrong_shape_is_refused(shard: str | None, shape: tuple, message: str) -> None:
    proj = build_qkv_proj(5, 4, 2, 2)
    with pytest.raises(ShapeMismatchError, match=message):
        load_weight(proj.weight, torch.zeros(shape), shard_id=shard)


def test_the_account_names_what_is_missing_unexpected_and_wrong() -> None:
    model = torch.nn.ModuleDict()
    with torch.device("meta"):
        model["one"] = build_qkv_proj(4, 2, 2, 2, bias=True)
        model["two"] = build_colwise_linear(4, 4)
    stacked = {"q_proj": ("one", "q"), "k_proj": ("one", "k"), "v_proj": ("one", "v")}
    offered = {
        "q_proj.weight": (4, 4),
        "k_proj.weight": (4, 4),
        "v_proj.weight": (4, 3),
        "two.weight": (4, 4),
        "two.scale": (1,),
        "ignored.inv_freq": (2,),
    }
    with load_account(model) as account:
        tensors = ((name, torch.empty(shape, device="meta")) for name, shape in offered.items())
        load_stacked_weights(model, account.watch(tensors), stacked, ignore=("inv_freq",))
    with pytest.raises(WeightsMismatchError) as caught:
        account.raise_mismatch("here")
    error = caught.value
    # What was offered in a wrong shape is not missing besides.
    assert error.missing == ("one.bias",)
    assert error.unexpected == ("two.scale",)
    assert len(error.wrong) == 1
    assert "v_proj.weight" in error.wrong[0]
    assert "in here" in str(error)


@pytest.mark.parametrize("ignored", ["attention.bias", "self_attn.bias", "layers.0.self_attn.b"])
def test_a_tensor_is_ignored_by_either_name(ignored: str) -> None:
    """By the end that a checkpoint has or the model would, and by the beginning."""
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleDict()})
    offered = [("layers.0.attention.bias", torch.zeros(2))]

    def load(ignore: tuple[str, ...]) -> None:
        rename = {"layers.0.attention.bias": "layers.0.self_attn.bias"}.__getitem__
        load_stacked_weights(model, offered, {}, rename=rename, ignore=ignore)

    load((ignored,))
    with pytest.raises(WeightsMismatchError, match=r"layers\.0\.attention\.bias"):
        load(("other.bias",))


def test_heads_that_do_not_divide_are_refused() -> None:
    with building(BuildContext(tp_size=2)), pytest.raises(ValueError, match="query heads \\(3\\)"):
        build_qkv_proj(4, 3, 3, 2)
