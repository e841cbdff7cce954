"""Messages about an architecture that no installed package knows."""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from registry.test_registry import CONFIG, TOY, Point, plugin

from engine_core.configs import HFConfig
from engine_core.errors import UnknownArchitectureError
from engine_core.registry import build_registry

ROOT = Path(__file__).parents[2]
LISTED = json.loads((ROOT / "engine_core" / "registry" / "packages.json").read_text())


def said(architecture: str, impl: Any = "auto", **keys: Any) -> str:
    registry = build_registry(entry_points=[Point("toy", plugin(module_map=TOY))])
    config = HFConfig({**CONFIG, **keys}, architectures=[architecture])
    with pytest.raises(UnknownArchitectureError) as caught:
        registry.model_config(config, impl=impl)
    return str(caught.value)


REGISTRY = ROOT / "engine_core" / "registry"


def test_every_package_of_ours_is_listed_with_what_it_claims() -> None:
    seen = set()
    for project in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        settings = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        [module] = settings["entry-points"]["engine_core"].values()
        offered: ModuleType = importlib.import_module(module)
        if hasattr(offered, "fallback_builders"):
            continue
        seen.add(settings["name"])
        listed = LISTED[settings["name"]]
        assert set(offered.module_map()) <= set(listed["architectures"]), settings["name"]
        adapters: Callable[[], dict[str, str]] = getattr(offered, "gguf_adapters", dict)
        assert sorted(adapters()) == sorted(listed.get("gguf", [])), settings["name"]
    assert seen == set(LISTED)


def test_a_package_of_ours_that_is_not_installed_is_named() -> None:
    message = said("BloomForCausalLM")
    advice = (
        "engine-core-bloom does: pip install engine-core-bloom, or ./plugins/bloom from a clone."
    )
    assert advice in message
    assert "by convention" not in message


def test_a_package_of_ours_is_not_proposed_for_what_it_does_not_have() -> None:
    message = said("GemmaForCausalLM", model_type="gemma")
    assert "engine-core-gemma knows " in message
    assert ", but not this one. A package for it needs another name; or pass a file" in message
    assert "by convention" not in message


def test_no_name_is_suggested_that_is_only_spelt_alike() -> None:
    assert "Nearest" not in said("TheyForCausalLM")
    assert "Nearest" not in said("Toy2ForCausalLM")
    assert "Nearest" not in said("ToMLForCausalLM")
    assert "Nearest: ToyForCausalLM (toy)" in said("toyForCausalLM")
    assert "Nearest: ToyForCausalLM (toy)" in said("TopForCausalLM")
    assert "Nearest" not in said("BoyForCausalLM")
    assert "Nearest" not in said("ToysForCausalLM")
    assert "Nearest: ToyForCausalLM (toy)" in said("ToyForCausalM")


def test_a_package_that_knows_others_of_the_family_is_not_said_to_be_missing() -> None:
    message = said("LlamaForSequenceClassification", model_type="llama")
    assert "engine-core-llama knows LlamaForCausalLM, " in message
    assert "A package for it needs another name" in message


def test_names_of_packages_are_normal() -> None:
    message = said("RWForCausalLM", model_type="RefinedWeb_Model")
    assert "named engine-core-refinedweb-model;" in message


def test_files_that_the_repository_has_are_named() -> None:
    assert "examples/module_maps/phi3.py" in said("Phi3ForCausalLM")
    listed = json.loads((REGISTRY / "module_maps.json").read_text(encoding="utf-8"))
    files = list((ROOT / "examples" / "module_maps").glob("*.py"))
    assert sorted(listed.values()) == sorted(file.name for file in files)
    for architecture, name in listed.items():
        source = (ROOT / "examples" / "module_maps" / name).read_text(encoding="utf-8")
        assert f'architecture = "{architecture}"' in source


def test_a_model_of_an_encoder_and_a_decoder_is_not_said_to_run() -> None:
    message = said("T5ForConditionalGeneration", is_encoder_decoder=True)
    assert "has an encoder beside its decoder" in message
    assert "engine-core-transformers" not in message


def test_the_fallback_is_offered_where_it_may_be() -> None:
    assert "pip install engine-core-transformers" in said("FooForCausalLM")
    assert "engine-core-transformers" not in said("FooForCausalLM", impl="native")


def test_a_model_that_takes_pictures_says_so() -> None:
    message = said("FooForConditionalGeneration", vision_config={"depth": 2})
    assert "takes pictures or sounds (vision_config), and no package has it" in message
    assert "engine-core-transformers" not in message


class Fallback:
    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        return hf_config.get("architectures") != ["NobodysForCausalLM"]

    @classmethod
    def build(cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any) -> Any:
        from engine_core.configs import DefaultConfigBuilder

        if hf_config.architectures[0] == "FooForCausalLM":
            raise UnknownArchitectureError("Foo keeps a state")
        return DefaultConfigBuilder.build(hf_config, architecture="Any", caveat="slow")


@pytest.mark.parametrize(
    ("architecture", "impl", "runs"),
    [
        ("ToyForCausalLM", "auto", "ToyForCausalLM"),
        ("ToyForCausalLM", "native", "ToyForCausalLM"),
        ("ToyForCausalLM", "transformers", "Any"),
        ("BarForCausalLM", "auto", "Any"),
        ("BarForCausalLM", "transformers", "Any"),
    ],
)
def test_who_runs_a_model(architecture: str, impl: Any, runs: str) -> None:
    points = [
        Point("toy", plugin(module_map=TOY)),
        Point("any", plugin("0.3", module_map={"Any": "a.B"}, fallback_builders=[Fallback])),
    ]
    registry = build_registry(entry_points=points)
    config = HFConfig({**CONFIG, "architectures": [architecture]})
    assert registry.model_config(config, impl=impl).architecture == runs


def test_a_fallback_that_refuses_says_why() -> None:
    point = Point("any", plugin("0.3", fallback_builders=[Fallback]))
    registry = build_registry(entry_points=[point])
    config = HFConfig({**CONFIG, "architectures": ["FooForCausalLM"]})
    with pytest.raises(UnknownArchitectureError, match=r"'FooForCausalLM'\. Foo keeps a state\."):
        registry.model_config(config, impl="auto")
    with pytest.raises(UnknownArchitectureError, match="With model_impl 'auto'"):
        registry.model_config(config, impl="native")


def test_a_gguf_architecture_names_the_package_that_runs_the_same_model() -> None:
    registry = build_registry(entry_points=[])
    assert "engine-core-gemma does: pip install" in registry.gguf_advice("gemma2")
    assert "safetensors, which engine-core-qwen2-vl runs;" in registry.gguf_advice("qwen2vl")
    for name in ("gemma", "lama", "falcon"):
        assert "another package or engine-core-transformers may run" in registry.gguf_advice(name)
