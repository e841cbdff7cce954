"""References of a case: transformers, a function of the author's, golden files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_fixtures import GOLDEN
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from engine_core.testing import ConformanceCase, ConformanceError, checks, media
from engine_core.testing.case import load_cases
from engine_core.testing.reference import MEDIA_TOKENS, NEW_TOKENS, TinyCheckpoint, prepare
from engine_core.testing.subject import NotApplicableError, Subject, find_family

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 40,
    "tie_word_embeddings": True,
    "attention_bias": True,
}


def case(**changes: Any) -> ConformanceCase:
    values = {"name": "case", "architecture": "LlamaForCausalLM", "config": CONFIG, **changes}
    return ConformanceCase(**values)


def subject(case: ConformanceCase, checkpoint: TinyCheckpoint) -> Subject:
    return Subject(find_family("engine_core_llama"), case, checkpoint)


def test_expectations_are_those_of_transformers(tmp_path: Path) -> None:
    checkpoint = prepare(case(), tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert [len(prompt.token_ids) for prompt in checkpoint.prompts] == [1, 6, 21, 32]
    for prompt in checkpoint.prompts:
        ids = torch.tensor([prompt.token_ids])
        with torch.inference_mode():
            out = model.generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
            logits = model(out[:, :-1]).logits[0]
        assert tuple(out[0, ids.shape[1] :].tolist()) == prompt.new_tokens
        torch.testing.assert_close(logits, prompt.logits, atol=1e-4, rtol=0)


def test_every_weight_of_the_checkpoint_matters(tmp_path: Path) -> None:
    """None is so small, or zero as a new model's biases, that a fault would not show."""
    prompt = prepare(case(), tmp_path).prompts[2]
    ids = torch.tensor([prompt.token_ids])
    for name in load_file(tmp_path / "model.safetensors"):
        model = LlamaForCausalLM.from_pretrained(tmp_path).eval()
        tensor = model.state_dict()[name]
        # Keys' biases add the same to all scores of a query, but for the rotation.
        tensor.mul_(0.9)
        with torch.inference_mode():
            changed = model(ids).logits[0]
        assert (changed - prompt.prompt_logits).abs().max() > 100 * checks.TOLERANCE, name


def test_the_config_is_written_as_given(tmp_path: Path) -> None:
    prepare(case(), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG


class Uncached(nn.Module):
    """A reference as an author may write it: ids in, logits out."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        inner = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager"))
        self.model, self.lm_head = inner.model, inner.lm_head

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm_head(self.model(input_ids, use_cache=False).last_hidden_state)


def test_a_function_makes_the_reference(tmp_path: Path) -> None:
    config = {**CONFIG, "tie_word_embeddings": False}
    own = case(config=config, reference=Uncached)
    checkpoint = prepare(own, tmp_path)
    assert checkpoint.source == "Uncached"
    checks.logits(subject(own, checkpoint))


def golden_copy(folder: Path, change: float) -> TinyCheckpoint:
    for file in (GOLDEN / "llama-gqa").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "expected.safetensors")
    name = json.loads((folder / "expected.json").read_text())["prompts"][1]["step_logits"]
    tensors[name][3, 5] += change
    save_file(tensors, folder / "expected.safetensors")
    golden = ConformanceCase(name="g", architecture="LlamaForCausalLM", reference=folder)
    return prepare(golden, folder)


def test_golden_files_are_a_reference(tmp_path: Path) -> None:
    checkpoint = golden_copy(tmp_path, 0.0)
    assert {len(prompt.new_tokens) for prompt in checkpoint.prompts} == {NEW_TOKENS}
    checks.logits(subject(case(), checkpoint))


def test_a_difference_from_golden_files_is_placed(tmp_path: Path) -> None:
    checkpoint = golden_copy(tmp_path, 0.01)
    with pytest.raises(ConformanceError) as caught:
        checks.logits(subject(case(), checkpoint))
    message = str(caught.value)
    assert f"prompt {checkpoint.prompts[1].name!r}: logits differ from the golden" in message
    assert "by 0.01 (1e-04 is allowed)" in message
    assert "which is decode step 3" in message
    assert "the layer cannot be named" in message


def test_absent_golden_files_are_named(tmp_path: Path) -> None:
    golden = ConformanceCase(name="g", architecture="A", reference=tmp_path)
    with pytest.raises(ConformanceError, match=r"no config\.json, model\.safetensors, expected"):
        prepare(golden, tmp_path)


def golden_with_pictures(folder: Path, change: float = 0.0) -> TinyCheckpoint:
    """Outputs of transformers' own code for Qwen2-VL, with the items of each prompt by name."""
    for file in (GOLDEN / "qwen2vl-tiny").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "expected.safetensors")
    expected = json.loads((folder / "expected.json").read_text())
    for prompt in expected["prompts"]:
        if "pixel_values" not in prompt:
            continue
        grids = tensors[prompt.pop("image_grid_thw")]
        pixels = tensors[prompt.pop("pixel_values")].split(grids.prod(-1).tolist())
        prompt["media"] = {"image": []}
        for index, each in enumerate(zip(pixels, grids, strict=True)):
            names = [f"{prompt['name']}.{index}.{name}" for name in ("pixels", "grid")]
            tensors.update((n, t.clone()) for n, t in zip(names, each, strict=True))
            keys = ("pixel_values", "image_grid_thw")
            prompt["media"]["image"].append(dict(zip(keys, names, strict=True)))
        tensors[prompt["prefill_logits"]][-1, 5] += change
    (folder / "expected.json").write_text(json.dumps(expected))
    save_file(tensors, folder / "expected.safetensors")
    return prepare(seeing(folder), folder)


def seeing(folder: Path) -> ConformanceCase:
    architecture = "Qwen2VLForConditionalGeneration"
    return ConformanceCase(name="golden", architecture=architecture, reference=folder)


def test_golden_files_may_show_pictures(tmp_path: Path) -> None:
    checkpoint = golden_with_pictures(tmp_path)
    shown = [prompt for prompt in checkpoint.prompts if prompt.shown]
    assert {len(prompt.new_tokens) for prompt in shown} == {MEDIA_TOKENS}
    family = replace(find_family("engine_core_qwen2_vl"), cases=(seeing(tmp_path),))
    subject = Subject(family, seeing(tmp_path), checkpoint)
    checks.logits(subject)
    media.media_chunks(subject)
    media.media_caches(subject)
    with pytest.raises(ConformanceError, match=r"takes the kinds image, video, .* shows video;"):
        media.media_items(subject)


def test_a_difference_from_golden_files_with_pictures_is_placed(tmp_path: Path) -> None:
    checkpoint = golden_with_pictures(tmp_path, 0.01)
    family = find_family("engine_core_qwen2_vl")
    with pytest.raises(ConformanceError, match=r"'image-first': logits differ .* position 23 of"):
        checks.logits(Subject(family, seeing(tmp_path), checkpoint))


def test_a_model_that_transformers_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(
        ConformanceError, match=r"model_type 'nobodys'.*give golden files or a func"
    ):
        prepare(case(config={**CONFIG, "model_type": "nobodys"}), tmp_path)


def test_a_window_that_no_prompt_reaches_is_refused(tmp_path: Path) -> None:
    config = {**CONFIG, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    del config["attention_bias"]
    wide = case(config={**config, "sliding_window": 39}, architecture="MistralForCausalLM")
    with pytest.raises(ConformanceError, match=r"window of 39 is longer than every prompt \(39"):
        checks.logits(subject(wide, prepare(wide, tmp_path)))


def test_a_prompt_as_long_as_the_model_allows_is_checked(tmp_path: Path) -> None:
    own = case()
    full = subject(own, prepare(own, tmp_path))
    assert full.max_model_len == CONFIG["max_position_embeddings"]
    checks.engine(full)
    checks.prefix_caching(full)


def test_what_cannot_be_split_is_not_pretended(tmp_path: Path) -> None:
    heads = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}
    odd = case(config={**CONFIG, **heads})
    with pytest.raises(NotApplicableError, match=r"does not split over two ranks: .*heads \(3\)"):
        checks.tensor_parallel(subject(odd, prepare(odd, tmp_path)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"config": None}, "needs a config"),
        ({"reference": Path("golden")}, "leave out both"),
    ],
)
def test_a_case_that_contradicts_itself(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        case(**changes)


@pytest.mark.parametrize(
    ("package", "says"),
    [
        ("engine_core_nowhere", "the package cannot be found; the kit needs engine_core_nowhere."),
        ("json", "a module json.conformance cannot be found; the kit needs json.conformance with"),
    ],
)
def test_a_package_without_cases_is_named(package: str, says: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        load_cases(package)
    assert says in str(caught.value)


def test_a_package_without_an_entry_point_is_named() -> None:
    with pytest.raises(ConformanceError, match=r"no entry point.* names a module of 'json'.*insta"):
        find_family("json")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "at least one ConformanceCase, has ()"),
        ("CASES = [1]", "at least one ConformanceCase, has (1,)"),
        (
            "from engine_core.testing import ConformanceCase\n"
            "CASES = [ConformanceCase(name='a', architecture='A', config={})] * 2",
            "two of the CASES have one name",
        ),
    ],
    ids=["none", "no-case", "same-name"],
)
def test_wrong_cases(
    source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"family_with_wrong_cases_{len(source)}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / package / "conformance.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConformanceError) as caught:
        load_cases(package)
    assert says in str(caught.value)
