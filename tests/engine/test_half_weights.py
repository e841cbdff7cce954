"""Whole models whose 16-bit weights are multiplied in float32, as on a CPU without bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import packed_checkpoints as made_of
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
from packed_checkpoints import Tensors
from torch import Tensor

from engine_core import LLM, EngineConfig
from engine_core.check import check_model
from engine_core.checkpoint import open_checkpoint
from engine_core.kernels.half_linear import panel_width
from engine_core.nn import build_embedding, build_lm_head, packing
from engine_core.nn.module import Module
from engine_core.registry import build_registry
from engine_core.runtime.loader import build_on_meta, load_weights, match_weights
from engine_core.runtime.packing import Packer, weight_bytes
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


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            settings,
            id=name,
            # The others are the engine's business, which has no part in how weights are computed.
            marks=() if name in ("default", "chunks-of-8") else pytest.mark.long,
        )
        for name, settings in SETTINGS.items()
    ],
)
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


def half(tensors: Tensors) -> None:
    tensors.update({name: tensor.half() for name, tensor in tensors.items()})


def bfloat16(tensors: Tensors) -> None:
    tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})


def parts_of_two_types(tensors: Tensors) -> None:
    bfloat16(tensors)
    for name in [name for name in tensors if "k_proj" in name]:
        tensors[name] = tensors[name].float() * 1.001


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("stored", [half, bfloat16, parts_of_two_types])
def test_the_bytes_that_are_planned_are_those_that_are_taken(
    tmp_path: Path, stored: Callable[[Tensors], None], tied: bool
) -> None:
    tensors, changes = made_of.mixtral(), dict(made_of.MIXTRAL, tie_word_embeddings=tied)
    stored(tensors)
    if tied:
        del tensors["lm_head.weight"]
    folder = made_of.write(tmp_path / "model", tensors, **changes)
    checkpoint, registry = open_checkpoint(folder), build_registry(())
    config = registry.model_config(checkpoint.hf_config, folder)
    context = BuildContext(dtype=torch.float32)
    model = build_on_meta(registry.model_class(config.architecture), config, context)
    matched, account = match_weights(model, checkpoint, "it", None)
    planned = weight_bytes(model, account)
    unpacked = weight_bytes(model)
    load_weights(model, matched, "it", torch.device("cpu"), pack=True)
    packed = {id(m.packed): m.packed.nbytes for m in model.modules() if getattr(m, "packed", None)}
    held = sum(param.nbytes for param in model.parameters()) + sum(packed.values())
    assert planned == held < 0.65 * unpacked
    settings = EngineConfig(device="cpu", skip_tokenizer_init=True, dtype="float32")
    report = check_model(str(folder), settings)
    assert report.memory is not None
    assert report.memory.weights_bytes == planned
