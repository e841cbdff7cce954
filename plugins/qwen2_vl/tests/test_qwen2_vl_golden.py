"""The tower, the positions and the text model by themselves, against the original's outputs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_fixtures import GOLDEN
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_core.checkpoint import open_checkpoint
from engine_core.configs import HFConfig
from engine_core.inputs import ProcessedPrompt
from engine_core.registry import build_registry
from engine_core.runtime.loader import build_on_meta, load_weights
from engine_core.step_context import BuildContext
from engine_core.testing.tiny_model import PagedCache, TinyModel, TokenSequence

NAME = "qwen2vl-tiny"
CPU = torch.device("cpu")


def load(folder: Path) -> TinyModel:
    registry = build_registry()
    config = registry.model_config(HFConfig.from_folder(folder), folder)
    context = BuildContext(dtype=torch.float32)
    network = build_on_meta(registry.model_class(config.architecture), config, context)
    load_weights(network, open_checkpoint(folder), str(folder), CPU)
    return TinyModel(network, registry.input_processor(config))


def prompts() -> list[dict[str, Any]]:
    """The fixture's prompts, with tensors in the place of their names."""
    folder = GOLDEN / NAME
    tensors = load_file(folder / "expected.safetensors")
    expected = json.loads((folder / "expected.json").read_text())
    return [
        {
            key: tensors.get(value, value) if isinstance(value, str) else value
            for key, value in prompt.items()
        }
        for prompt in expected["prompts"]
    ]


def images(prompt: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The features of each of a prompt's images."""
    if "pixel_values" not in prompt:
        return []
    grids = prompt["image_grid_thw"]
    pixels = prompt["pixel_values"].split(grids.prod(-1).tolist())
    return [
        {"pixel_values": values, "image_grid_thw": grid}
        for values, grid in zip(pixels, grids, strict=True)
    ]


def process(model: TinyModel, prompt: dict[str, Any]) -> ProcessedPrompt:
    processor: Any = model.processor
    return processor.process_media(prompt["input_ids"], {"image": images(prompt)}, {})


def embeddings(model: TinyModel, processed: ProcessedPrompt) -> list[Tensor]:
    network: Any = model.network
    items = [
        {name: torch.as_tensor(value) for name, value in item.features.items()}
        for item in processed.media
    ]
    return network.embed_media("image", items) if items else []


@torch.inference_mode()
def run(model: TinyModel, prompt: dict[str, Any], chunk: int) -> Tensor:
    """Logits of a prompt and its answer, in chunks, with the embeddings put in by the test."""
    network: Any = model.network
    processed = process(model, prompt)
    ids = (*processed.token_ids, *prompt["new_tokens"][:-1])
    embeds = network.get_input_embeddings()(torch.tensor(ids))
    for item, values in zip(processed.media, embeddings(model, processed), strict=True):
        embeds[slice(*item.span)] = values
    sequence = TokenSequence(tuple(ids), processed)
    cache = PagedCache(model, [sequence], 16)
    logits = []
    for start, count in sequence.chunks(chunk):
        context = cache.context([(0, start, count)])
        context = replace(context, inputs_embeds=embeds[None, start : start + count])
        logits.append(model.logits(cache, context))
    return torch.cat(logits)


def check(folder: Path) -> None:
    model = load(folder)
    for prompt in prompts():
        expected = torch.cat([prompt["prefill_logits"], prompt["step_logits"][1:]])
        logits = run(model, prompt, 1000)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0, msg=prompt["name"])


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return load(GOLDEN / NAME)


def test_tower(model: TinyModel) -> None:
    seen = 0
    for prompt in prompts():
        with torch.inference_mode():
            out = embeddings(model, process(model, prompt))
        if out:
            seen += len(out)
            expected = prompt["image_features"]
            torch.testing.assert_close(torch.cat(out), expected, atol=1e-4, rtol=0)
    assert seen == 4


def test_an_item_has_the_same_embeddings_beside_others(model: TinyModel) -> None:
    network: Any = model.network
    items = [
        {"pixel_values": item["pixel_values"], "grid_thw": item["image_grid_thw"]}
        for prompt in prompts()
        for item in images(prompt)
    ]
    with torch.inference_mode():
        together = network.embed_media("image", items)
        for item, values in zip(items, together, strict=True):
            (alone,) = network.embed_media("image", [item])
            torch.testing.assert_close(values, alone, atol=1e-5, rtol=0)


def test_usual_pictures_are_as_the_processor_makes_them(model: TinyModel) -> None:
    """So that they have the keys of graphs that pictures of these sizes are looked up by."""
    network: Any = model.network
    processor: Any = model.processor
    for (kind, (usual,)), side in zip(network.usual_media(), (448, 1024), strict=True):
        picture = np.zeros((side, side, 3), dtype=np.uint8)
        (item,) = processor.process_media([304], {kind: [picture]}, {"max_pixels": 2**21}).media
        assert usual.keys() == item.features.keys()
        for name, value in item.features.items():
            made = torch.as_tensor(np.array(value))
            assert (made.dtype, made.shape) == (usual[name].dtype, usual[name].shape)
        assert usual["grid_thw"].tolist() == item.features["grid_thw"].tolist()


def test_positions(model: TinyModel) -> None:
    for prompt in prompts():
        processed = process(model, prompt)
        positions = torch.as_tensor(processed.token_state["mrope_positions"])
        assert torch.equal(positions, prompt["position_ids"]), prompt["name"]
        assert processed.row_state["mrope_delta"] == prompt["rope_delta"], prompt["name"]


@pytest.mark.parametrize("chunk", [5, 1])
def test_chunks_may_end_inside_a_picture(model: TinyModel, chunk: int) -> None:
    for prompt in prompts():
        expected = torch.cat([prompt["prefill_logits"], prompt["step_logits"][1:]])
        logits = run(model, prompt, chunk)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0, msg=prompt["name"])


def test_the_published_layout() -> None:
    check(GOLDEN / NAME)


def test_the_layout_of_transformers_5(tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / NAME / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.").replace("visual.", "model.visual."): tensor
        for name, tensor in tensors.items()
    }
    assert "model.visual.patch_embed.proj.weight" in renamed
    save_file(renamed, tmp_path / "model.safetensors")
    config = json.loads((GOLDEN / NAME / "config.json").read_text())
    outer = ("architectures", "model_type", "vision_config", "image_token_id", "video_token_id")
    text = {key: value for key, value in config.items() if key not in outer}
    rope = {**text.pop("rope_scaling"), "rope_theta": text.pop("rope_theta")}
    text["rope_parameters"] = {**rope, "rope_type": "default"}
    nested = {key: config[key] for key in outer} | {"text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    check(tmp_path)
