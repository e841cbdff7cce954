"""Whole models whose 16-bit weights are multiplied in float32, as on a CPU without bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from golden_fixtures import (
    GOLDEN,
    SETTINGS,
    check_output,
    golden_llm,
    golden_prompts,
    greedy_params,
)
from torch import Tensor

from engine_core import LLM
from engine_core.kernels.half_linear import panel_width
from engine_core.nn import build_embedding, build_lm_head, packing
from engine_core.nn.module import Module
from engine_core.runtime.packing import Packer
from engine_core.step_context import BuildContext, building

pytestmark = pytest.mark.skipif(panel_width() == 0, reason="needs numba and AVX2")
# Its checkpoint is in float16.
FIXTURE = "qwenvl1-ntk-logn"


@pytest.fixture(autouse=True)
def avx2_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_onednn_dtypes", lambda: (torch.float32,))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The types of the matrices that are kept in 16 bits."""
    dtypes: list[torch.dtype] = []
    pack: Callable[[Tensor], Tensor] = packing.pack_halves

    def spy(weight: Tensor) -> Tensor:
        dtypes.append(weight.dtype)
        return pack(weight)

    monkeypatch.setattr(packing, "pack_halves", spy)
    return dtypes


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_checkpoint_in_float16_is_computed_as_in_float32(
    settings: dict[str, Any], made: list[torch.dtype]
) -> None:
    prompts = [prompt for prompt in golden_prompts(FIXTURE) if prompt.name != "image"]
    with LLM(str(GOLDEN / FIXTURE), skip_tokenizer_init=True, max_model_len=512, **settings) as llm:
        params = greedy_params(FIXTURE, with_prompt=True)
        outputs = llm.generate([prompt.input_ids for prompt in prompts], params)
    for output, prompt in zip(outputs, prompts, strict=True):
        check_output(output, prompt)
    assert made
    assert set(made) == {torch.float16}


def test_a_checkpoint_in_float32_is_kept_in_float32(made: list[torch.dtype]) -> None:
    with golden_llm("llama-gqa"):
        assert not made


def test_an_embedding_and_its_head_share_one_matrix() -> None:
    """And what it holds are the numbers that were loaded."""
    with building(BuildContext(dtype=torch.float32)):
        embedding = build_embedding(40, 24)
        head = build_lm_head(24, 40, tied_to=embedding)
    numbers = torch.randn(40, 24).bfloat16().float()
    embedding.weight.data.copy_(numbers)

    class Model(Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = embedding, head

    model = Model()
    Packer(model).finish()
    assert embedding.packed is head.packed
    assert isinstance(head.packed, packing.HalfMatrix)
    assert not list(model.parameters())
    ids = torch.tensor([[3, 39], [0, 3]])
    assert torch.equal(embedding(ids), numbers[ids])
    assert torch.equal(head.packed.dense(), numbers)
    x = torch.randn(5, 24)
    torch.testing.assert_close(head(x), x @ numbers.T, rtol=1e-6, atol=1e-6)
    # Half of the float32 weight's; the last panel is filled up.
    assert head.packed.nbytes == 48 * 24 * 2
