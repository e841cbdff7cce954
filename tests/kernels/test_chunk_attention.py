"""Prompts' attention in float32, compiled for CPUs with AVX2, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import Paged, attend, error, make_paged
from random_examples import examples
from torch import Tensor

from engine_core.kernels.attention import reference
from engine_core.kernels.attention.chunk import native as chunk

pytest.importorskip("numba", reason="numba is not installed", exc_type=ImportError)


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The queries of each row that the kernel attends, on whatever CPU."""
    attended: list[tuple[int, int]] = []
    attend_chunk = chunk.attend_chunk

    def spy(call: Any, row: int, first: int, behind: int) -> None:
        attended.append((first, behind))
        attend_chunk(call, row, first, behind)

    monkeypatch.setattr(chunk, "wanted", lambda: True)
    monkeypatch.setattr(chunk, "attend_chunk", spy)
    return attended


def expected(paged: Paged, **options: Any) -> Tensor:
    out = paged.poisoned_out()
    reference.paged_attention(
        paged.q, paged.k_cache, paged.v_cache, out, scale=0.25, **paged.metadata(), **options
    )
    return out


# Tiles have six queries and panels 16 tokens, of which 256 are multiplied at once.
ROWS = [(1, 9), (2, 2), (6, 6), (7, 31), (13, 270), (300, 300), (20, 530)]


@pytest.mark.parametrize("window", [None, 1, 5, 16, 100, 400])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_tiles_panels_and_windows(
    window: int | None, block_size: int, runs: list[tuple[int, int]]
) -> None:
    paged = make_paged(ROWS, head_dim=32, block_size=block_size, fused=True)
    assert error(attend(paged, window=window), expected(paged, window=window)) < 2e-6
    assert len(runs) == 6


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(8, 16), (60, 48), (128, 128)])
def test_heads_of_any_shape(group: int, kv_heads: int, head_dim: int, v_head_dim: int) -> None:
    paged = make_paged(
        [(40, 300)],
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
    )
    assert error(attend(paged), expected(paged)) < 2e-6


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    queries=st.integers(2, 90),
    earlier=st.integers(0, 300),
    count=st.integers(1, 8),
    window=st.none() | st.integers(1, 200),
)
def test_threads_share_heads_and_queries(
    queries: int, earlier: int, count: int, window: int | None, share_among: Callable[[int], None]
) -> None:
    paged = make_paged([(queries, queries + earlier)], heads=6, kv_heads=3, head_dim=16)
    share_among(count)
    assert error(attend(paged, window=window), expected(paged, window=window)) < 2e-6


@pytest.mark.parametrize("count", [1, 3])
def test_a_query_of_nan_gives_nan_to_its_head_alone(
    count: int, share_among: Callable[[int], None]
) -> None:
    paged = make_paged([(30, 290)], head_dim=16)
    paged.q[4, 2, 7] = torch.nan
    share_among(count)
    wrong = torch.zeros(30, 4, dtype=torch.bool)
    wrong[4, 2] = True
    got = attend(paged)
    assert torch.equal(got.isnan().all(-1), wrong)
    assert torch.equal(got.isnan().any(-1), wrong)


def test_logits_that_grow_and_shrink_along_the_context() -> None:
    paged = make_paged([(9, 900)], head_dim=16)
    for order in (False, True):
        growing = paged.k_cache.new_empty(0)
        for place in range(900):
            block, offset = int(paged.block_tables[0, place // 16]), place % 16
            growing = paged.k_cache[block, offset]
            growing.copy_(torch.sign(growing) * (900 - place if order else place) / 30)
        paged.q.copy_(paged.q.abs())
        assert error(attend(paged), expected(paged)) < 2e-5


@pytest.mark.parametrize(
    ("prefix", "window", "taken"),
    [(0, None, 1), (21, None, 1), (22, None, 0), (0, 5, 1), (3, 5, 0)],
)
def test_tokens_behind_a_query_are_left_to_others(
    prefix: int, window: int | None, taken: int, runs: list[tuple[int, int]]
) -> None:
    """The first of ten queries is the 21st token, which it sees anyway."""
    paged = make_paged([(10, 30)], head_dim=16)
    options = {"prefix_lens": torch.tensor([prefix], dtype=torch.int32), "window": window}
    assert error(attend(paged, **options), expected(paged, **options)) < 2e-6
    assert len(runs) == taken


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"dtype": torch.bfloat16}, {}),
        ({"v_head_dim": 24}, {}),
        ({}, {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])}),
        ({}, {"softcap": 2.0}),
    ],
    ids=["bfloat16", "half a panel", "alibi", "softcap"],
)
def test_what_it_does_not_compute_is_left_to_others(
    shape: dict[str, Any], options: dict[str, Any], runs: list[tuple[int, int]]
) -> None:
    paged = make_paged([(10, 30)], **{"head_dim": 32, **shape})
    got, wanted = attend(paged, **options).float(), expected(paged, **options).float()
    assert error(got, wanted) < (1.6e-2 if shape.get("dtype") else 2e-6)
    assert not runs
