"""Panels of blocks by the compiled kernel and by torch, of all types.

That products with panels are those with the numbers of the gguf package is in
``test_block_linear.py``.
"""

from __future__ import annotations

import pytest
import torch
from gguf_blocks import random_blocks

from engine_core.kernels import compiled
from engine_core.kernels.block_linear import FORMS, pack_blocks

pytestmark = pytest.mark.skipif(not compiled.available(), reason="needs numba")


@pytest.mark.parametrize("type_name", FORMS)
@pytest.mark.parametrize(("rows", "columns"), [(16, 256), (37, 768), (1, 512), (1040, 512)])
def test_panels_are_the_same_by_both(
    rows: int, columns: int, type_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = torch.from_numpy(random_blocks(type_name, rows, columns)[0])
    packed = pack_blocks(blocks, type_name)
    monkeypatch.setattr(compiled, "available", lambda: False)
    assert torch.equal(packed, pack_blocks(blocks, type_name))


def test_blocks_need_not_be_contiguous() -> None:
    blocks = torch.from_numpy(random_blocks("Q4_K", 64, 512)[0])
    apart = blocks.repeat_interleave(2, dim=0)[::2]
    assert torch.equal(pack_blocks(apart, "Q4_K"), pack_blocks(blocks, "Q4_K"))
