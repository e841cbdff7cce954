"""Scales of keys and values that a checkpoint was calibrated with, in a cache of e4m3."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import packed_checkpoints
import pytest
import torch
from golden_fixtures import GOLDEN, golden_prompts
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.check import check_model
from engine_core.engine.export import export_model
from engine_core.errors import EngineError
from engine_core.testing.reference import cache_argument

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
NAME = "llama-gqa"


def k_scale(layer: int) -> float:
    """Such that some keys and values are beyond 448 times it."""
    return 0.002 + layer * 0.0005


def v_scale(layer: int) -> float:
    return 0.0006 + layer * 0.0002


def own(attention: str, layer: int) -> dict[str, Tensor]:
    return {
        f"{attention}.k_scale": torch.tensor([k_scale(layer)]),
        f"{attention}.v_scale": torch.tensor(v_scale(layer)),
        f"{attention}.q_scale": torch.tensor(1.0),
    }


def of_projections(attention: str, layer: int) -> dict[str, Tensor]:
    return {
        f"{attention}.k_proj.k_scale": torch.tensor(k_scale(layer)),
        f"{attention}.v_proj.v_scale": torch.tensor(v_scale(layer)),
    }


def of_outputs(attention: str, layer: int) -> dict[str, Tensor]:
    return {
        f"{attention}.k_proj.output_scale": torch.tensor(k_scale(layer)),
        f"{attention}.v_proj.output_scale": torch.tensor(v_scale(layer)),
    }


def calibrated(
    folder: Path,
    name: str = NAME,
    form: Callable[[str, int], dict[str, Tensor]] = own,
    scheme: Any = SCHEME,
    **more: Any,
) -> Path:
    """A golden model whose cache alone is quantised, or what ``more`` says."""
    tensors = load_file(GOLDEN / name / "model.safetensors")
    found = {key.rpartition("attn.")[0] + "attn" for key in tensors if "attn." in key}
    found |= {
        key.partition("attention.")[0] + "attention" for key in tensors if "attention." in key
    }
    for attention in found:
        layer = next(int(part) for part in attention.split(".") if part.isdigit())
        tensors |= form(attention, layer)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    for file in GOLDEN.joinpath(name).glob("*.json"):
        shutil.copy(file, folder)
    settings = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "kv_cache_scheme": scheme,
        "ignore": [],
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = more.pop("settings", settings)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class CalibratedCache(DynamicCache):
    """Keys and values as codes of e4m3 by a layer's two scales."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *more: Any, **named: Any) -> Any:
        """Keep ``[B, heads, T, D]``."""
        scales = torch.tensor([k_scale(layer_idx), v_scale(layer_idx)])
        kept = [
            (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
            for x, scale in zip((keys, values), scales, strict=True)
        ]
        return super().update(*kept, layer_idx, *more, **named)


def expected(name: str, cache: type[DynamicCache] = CalibratedCache) -> list[Tensor]:
    """Log-probabilities ``[tokens, vocab]`` of the original code over such a cache."""
    model = AutoModelForCausalLM.from_pretrained(
        GOLDEN / name, dtype=torch.float32, attn_implementation="eager"
    )
    found = []
    for prompt in golden_prompts(name):
        ids = torch.tensor([prompt.input_ids + prompt.new_tokens])
        with torch.inference_mode():
            out = model(ids, **{cache_argument(model): cache(config=model.config)})
        found.append(out.logits[0].float().log_softmax(-1))
    return found


def computed(
    folder: Path,
    name: str = NAME,
    *,
    prompts: list[list[int]] | None = None,
    vocab: int | None = None,
    **settings: Any,
) -> list[Tensor]:
    """The same of the engine, but for the last token."""
    vocab = vocab or golden_prompts(name)[0].step_logits.shape[-1]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=vocab)
    if prompts is None:
        prompts = [prompt.input_ids + prompt.new_tokens for prompt in golden_prompts(name)]
    settings = {"max_model_len": 160, "dtype": "float32", **settings}
    config = EngineConfig(skip_tokenizer_init=True, **settings)
    with LLM(str(folder), config) as llm:
        outputs = llm.generate(prompts, params)
    found = []
    for output in outputs:
        entries = output.prompt_logprobs
        assert entries is not None
        found.append(
            torch.tensor([[each[i].logprob for i in range(len(each))] for each in entries[1:]])
        )
    return found


def distance(got: list[Tensor], wanted: list[Tensor]) -> float:
    pairs = zip(got, wanted, strict=True)
    return torch.cat([(a[: len(b)] - b[: len(a)]).abs().flatten() for a, b in pairs]).mean().item()


# Grouped heads; ALiBi and fused projections; soft caps and windows.
@pytest.mark.parametrize("name", [NAME, "bloom-6heads", "gemma2-caps"])
def test_logits_are_those_of_a_cache_by_these_scales(name: str, tmp_path: Path) -> None:
    folder = calibrated(tmp_path / "it", name)
    wanted, exact = expected(name), expected(name, DynamicCache)
    for settings in ({}, {"max_num_seqs": 4, "max_num_batched_tokens": 8}):
        got = computed(folder, name, **settings)
        assert distance(got, wanted) < distance(got, exact) / 50
    # Scales of each token and head are another thing.
    other = computed(GOLDEN / name, name, kv_cache_dtype="fp8")
    assert distance(other, wanted) > distance(other, exact)


@pytest.mark.parametrize(
    "kind", ["awq", "gptq, act-order", "compressed", "compressed, 8 bits", "int8 and activations"]
)
def test_beside_weights_of_integers(kind: str, tmp_path: Path) -> None:
    form = packed_checkpoints.FORMATS[kind]
    made = packed_checkpoints.packed(packed_checkpoints.llama(), form, lambda name: "head" in name)
    held, plain = (dict(tensors) for tensors in made)
    for layer in range(2):
        held |= own(f"model.layers.{layer}.self_attn", layer)
    # Where the config says nothing of the cache, the option asks for it.
    states = form.settings["quant_method"] == "compressed-tensors"
    settings = form.settings | ({"kv_cache_scheme": SCHEME} if states else {})
    folder = packed_checkpoints.write(tmp_path / "packed", held, settings)
    source = packed_checkpoints.write(tmp_path / "plain", plain)
    ids = [1, 5, 9, 80, 7, 7, 3, 44, 60, 12]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    found = []
    for cache in (CalibratedCache, DynamicCache):
        with torch.inference_mode():
            given = {cache_argument(model): cache(config=model.config)}
            found.append([model(torch.tensor([ids]), **given).logits[0].log_softmax(-1)])
    wanted, exact = found
    asked: dict[str, Any] = {} if states else {"kv_cache_dtype": "fp8"}
    config = EngineConfig(skip_tokenizer_init=True, max_model_len=64, **asked)
    report = check_model(str(folder), config)
    assert report.exit_code == 0, report.problems
    got = computed(folder, prompts=[ids], vocab=wanted[0].shape[-1], max_model_len=64, **asked)
    assert distance(got, wanted) < distance(got, exact) / 10


@pytest.mark.parametrize("form", [of_projections, of_outputs])
def test_other_names(form: Any, tmp_path: Path) -> None:
    got = computed(calibrated(tmp_path / "it", form=form))
    assert distance(got, expected(NAME)) < 1e-4


def test_one_scale_for_both(tmp_path: Path) -> None:
    both = lambda attention, layer: {f"{attention}.kv_scale": torch.tensor(0.002)}  # noqa: E731
    apart = lambda attention, layer: {  # noqa: E731
        f"{attention}.{leaf}": torch.tensor(0.002) for leaf in ("k_scale", "v_scale")
    }
    one, two = (
        computed(calibrated(tmp_path / str(i), form=form)) for i, form in enumerate((both, apart))
    )
    assert distance(one, two) == 0


@pytest.mark.slow
def test_ranks_stages_and_one_file_keep_them(tmp_path: Path) -> None:
    folder = calibrated(tmp_path / "it")
    alone = computed(folder)
    for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        assert distance(computed(folder, **sizes), alone) < 1e-4
    export_model(str(folder), tmp_path / "it.safetensors")
    assert distance(computed(tmp_path / "it.safetensors"), alone) == 0


def test_older_checkpoints_of_fp8(tmp_path: Path) -> None:
    """Their scales are used where the config or the option asks for it."""
    folders = []
    for name, more in (("silent", {}), ("static", {"kv_cache_scheme": "static"})):
        settings = {"quant_method": "fp8", "activation_scheme": "dynamic", **more}
        settings["modules_to_not_convert"] = ["lm_head"]
        folders.append(calibrated(tmp_path / name, settings=settings))
        tensors = load_file(folders[-1] / "model.safetensors")
        weight = tensors["model.layers.0.mlp.down_proj.weight"]
        tensors["model.layers.0.mlp.down_proj.weight"] = weight.to(torch.float8_e4m3fn)
        tensors["model.layers.0.mlp.down_proj.weight_scale"] = torch.ones(1)
        save_file(tensors, folders[-1] / "model.safetensors")
    silent, static = folders
    asked = computed(static)
    assert distance(computed(silent, kv_cache_dtype="fp8"), asked) == 0
    assert distance(computed(silent), asked) > 1e-3


def test_weights_may_be_quantised_beside_them(tmp_path: Path) -> None:
    """At load and in a file: the tool quantised the cache alone."""
    made = calibrated(tmp_path / "model")
    base = {"skip_tokenizer_init": True, "max_model_len": 160}
    for quantization in ("int4", "int8", "fp8"):
        report = check_model(made, EngineConfig(quantization=quantization, **base))
        assert not report.errors, report
        assert report.memory is not None
        assert report.memory.groups[0].dtype == "float8_e4m3fn"
    eight = computed(made, quantization="int8")
    assert distance(computed(made), eight) < 0.05
    # Of a cache with scales of tokens; these cut some numbers.
    other = computed(GOLDEN / NAME, quantization="int8", kv_cache_dtype="fp8")
    assert distance(eight, other) > 1e-3
    out = tmp_path / "out.safetensors"
    export_model(str(made), out, EngineConfig(quantization="fp8"))
    assert distance(computed(out), computed(made, quantization="fp8")) == 0


def test_a_scale_that_is_none_is_named_beside_an_option(tmp_path: Path) -> None:
    made = calibrated(tmp_path / "it", **with_value("k_scale", torch.tensor(-1.0)))
    settings = EngineConfig(skip_tokenizer_init=True, max_model_len=160, quantization="int4")
    assert [each.code for each in check_model(made, settings).errors] == ["scales-wrong"]


def test_where_they_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = calibrated(tmp_path / "dynamic", scheme=SCHEME | {"dynamic": True})
    dynamic = computed(GOLDEN / NAME, kv_cache_dtype="fp8")
    assert distance(computed(folder), dynamic) < 1e-6
    folder = calibrated(tmp_path / "it")
    int8 = computed(folder, kv_cache_dtype="int8")
    assert "'int8' does not use" in caplog.text
    assert distance(int8, computed(GOLDEN / NAME, kv_cache_dtype="int8")) < 1e-6
    caplog.clear()
    assert distance(computed(folder, block_size=6), computed(GOLDEN / NAME)) < 1e-4
    assert "block_size 6 is no multiple of 4: it keeps the numbers" in caplog.text
    report = check_model(folder, EngineConfig(skip_tokenizer_init=True, block_size=6))
    assert any("keeps the numbers" in problem.message for problem in report.warnings)


AT = "model.layers.1.self_attn."
TEXTLESS: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu"}


def without(leaf: str) -> dict[str, Any]:
    def form(attention: str, layer: int) -> dict[str, Tensor]:
        made = own(attention, layer)
        return {k: t for k, t in made.items() if k != AT + leaf}

    return {"form": form}


def with_value(leaf: str, value: Tensor) -> dict[str, Any]:
    def form(attention: str, layer: int) -> dict[str, Tensor]:
        made = own(attention, layer)
        return made | ({AT + leaf: value} if AT + leaf in made else {})

    return {"form": form}


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"form": lambda *_: {}}, "there is no model.layers.0.self_attn.k_scale"),
    "half": (without("v_scale"), f"there is no {AT}v_scale"),
    "heads": (with_value("k_scale", torch.ones(2)), f"{AT}k_scale has shape [2], not one number"),
    "an integer": ({"scheme": SCHEME | {"type": "int"}}, "kv_cache_scheme.type is 'int'"),
    "4 bits": ({"scheme": SCHEME | {"num_bits": 4}}, "kv_cache_scheme.num_bits is 4, not 8"),
    "groups": ({"scheme": SCHEME | {"strategy": "group"}}, "strategy is 'group', not 'tensor'"),
    "a word": ({"scheme": "auto"}, "kv_cache_scheme is 'auto', neither"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_ones_are_named(broken: str, tmp_path: Path) -> None:
    changes, words = BROKEN[broken]
    folder = calibrated(tmp_path / "it", **changes)
    report = check_model(folder, EngineConfig(skip_tokenizer_init=True))
    assert any(words in problem.message for problem in report.errors), report
    with pytest.raises(EngineError) as refused:
        LLM(str(folder), EngineConfig(skip_tokenizer_init=True))
    assert words in str(refused.value)
    for quantization in (None, "int8"):
        with pytest.raises(EngineError) as refused:
            export_model(
                str(folder), tmp_path / "out.safetensors", EngineConfig(quantization=quantization)
            )
        assert words in str(refused.value)
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none(value: float, tmp_path: Path) -> None:
    folder = calibrated(tmp_path / "it", **with_value("v_scale", torch.tensor(value)))
    with pytest.raises(EngineError, match=r"the v_scale of model\.layers\.1.* no scale of a cache"):
        LLM(str(folder), EngineConfig(skip_tokenizer_init=True))
    [problem] = check_model(folder, EngineConfig(**TEXTLESS)).errors
    assert (problem.code, problem.names) == ("scales-wrong", (f"{AT}v_scale",))
    for quantization in (None, "int8"):
        with pytest.raises(EngineError, match=f"{AT}v_scale has .*, which is no scale"):
            export_model(
                str(folder), tmp_path / "out.safetensors", EngineConfig(quantization=quantization)
            )
    # Nothing divides by them in a cache of another type.
    unread = EngineConfig(kv_cache_dtype="int8", **TEXTLESS)
    assert not check_model(folder, unread, deep=True).errors


def test_weights_that_are_not_quantised_are_not_said_to_be_slower(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = calibrated(tmp_path / "it")
    report = check_model(folder, EngineConfig(**TEXTLESS))
    assert not [each for each in report.problems if each.code.startswith("quantization")]
    with LLM(str(folder), EngineConfig(**TEXTLESS)):
        assert "e4m3" not in caplog.text
