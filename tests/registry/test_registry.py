"""Discovery: what is found, what is refused, and what the refusal says."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from installed_plugins import install

from engine_core import hookimpl
from engine_core.configs import DefaultConfigBuilder, HFConfig
from engine_core.errors import (
    ConfigError,
    DuplicateArchitectureError,
    OptionError,
    PluginLoadError,
    UnknownArchitectureError,
)
from engine_core.inputs import PromptState
from engine_core.registry import build_registry
from engine_core.registry import registry as registry_module

CONFIG = {
    "architectures": ["ToyForCausalLM"],
    "model_type": "toy",
    "vocab_size": 8,
    "hidden_size": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 16,
}


class ToyForCausalLM:
    """Stands for a model class: the registry only finds it."""


@dataclass
class Point:
    """An entry point as importlib.metadata gives it."""

    name: str
    target: object
    value: str = "toy.plugin"
    dist: object = None

    def load(self) -> object:
        if isinstance(self.target, BaseException):
            raise self.target
        return self.target


def constant(value: object) -> Callable[[], object]:
    return lambda: value


def plugin(requires_api: str | None = "0.1", **hooks: object) -> ModuleType:
    module = ModuleType("toy_plugin")
    if requires_api is not None:
        module.requires_api = requires_api
    for name, value in hooks.items():
        setattr(module, name, hookimpl(constant(value)))
    return module


TOY = {"ToyForCausalLM": f"{__name__}.ToyForCausalLM"}


@pytest.fixture(autouse=True)
def _importable() -> None:
    # Under importlib mode this module is not importable by its name.
    sys.modules.setdefault(__name__, sys.modules[ToyForCausalLM.__module__])


def test_a_plugin_is_found_with_its_distribution() -> None:
    metadata = "Metadata-Version: 2.1\nName: engine-core-toy\nVersion: 1.2\n\nName: of the text\n"
    dist = SimpleNamespace(read_text={"METADATA": metadata}.get)
    registry = build_registry(entry_points=[Point("toy", plugin(module_map=TOY), dist=dist)])
    (report,) = registry.reports
    assert (report.name, report.distribution, report.version) == ("toy", "engine-core-toy", "1.2")
    assert report.architectures == ("ToyForCausalLM",)
    assert report.error is None
    assert registry.model_class("ToyForCausalLM") is ToyForCausalLM


BROKEN = {
    "import": (Point("bad", ImportError("No module named 'lost'")), "No module named 'lost'"),
    "syntax": (Point("bad", SyntaxError("invalid syntax")), "SyntaxError"),
    "exit": (Point("bad", SystemExit(3)), "SystemExit: 3"),
    "no api": (Point("bad", plugin(None, module_map={})), "states no requires_api"),
    "newer api": (Point("bad", plugin("0.4")), "asks for plugin API 0.4, this core offers 0.3 and"),
    "other major": (Point("bad", plugin("1.0")), "asks for plugin API 1.0, this core offers 0.3"),
    "no version": (Point("bad", plugin("0.x")), "asks for plugin API 0.x, this core offers 0.3"),
    "unknown hook": (Point("bad", plugin(modul_map={})), "unknown hook modul_map"),
    "hook's value": (Point("bad", plugin(module_map=["a.B"])), "module_map() must map"),
    "not a path": (Point("bad", plugin(module_map={"A": "B"})), "module_map() must map"),
    "builder": (Point("bad", plugin(config_builders=[int])), "not a class with condition, build"),
    "not a list": (Point("bad", plugin(config_builders=7)), "must return a list of classes"),
}


@pytest.mark.parametrize(("point", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_plugin_is_reported_and_the_others_work_on(point: Point, message: str) -> None:
    good = Point("toy", plugin(module_map=TOY))
    registry = build_registry(entry_points=[point, good])
    by_name = {report.name: report for report in registry.reports}
    assert "'bad'" in by_name["bad"].error
    assert message in by_name["bad"].error
    assert by_name["toy"].error is None
    assert registry.model_class("ToyForCausalLM") is ToyForCausalLM
    # Who asks for what the broken one might have brought learns of it.
    with pytest.raises(UnknownArchitectureError, match="could not be used: bad"):
        registry.model_class("BadForCausalLM")
    with pytest.raises(PluginLoadError) as caught:
        build_registry(entry_points=[point, good], plugin_errors="strict")
    assert message in str(caught.value)


def test_a_hook_that_fails_names_the_plugin_and_the_hook() -> None:
    module = plugin()
    module.module_map = hookimpl(lambda: 1 / 0)
    registry = build_registry(entry_points=[Point("bad", module)])
    assert "plugin 'bad': module_map() failed: ZeroDivisionError" in registry.reports[0].error


class Failing:
    """A config builder, and an input processor, whose condition fails on every model."""

    @classmethod
    def condition(cls, model: object) -> bool:
        return 1 // 0 > 0

    @classmethod
    def build(cls, hf_config: HFConfig, model_path: object = None, **kwargs: object) -> None:
        """Never asked."""

    def process(self, token_ids: object) -> None:
        """Never asked."""


FAILED = "plugin 'bad': Failing.condition() failed: ZeroDivisionError"
BAD = {"BadForCausalLM": f"{__name__}.ToyForCausalLM"}


@pytest.mark.parametrize("hook", ["config_builders", "input_processors"])
def test_a_condition_that_fails_breaks_its_own_plugin_only(hook: str) -> None:
    points = [
        Point("bad", plugin(module_map=BAD, **{hook: [Failing]})),
        Point("toy", plugin(module_map=TOY)),
    ]
    registry = build_registry(entry_points=points)
    config = registry.model_config(HFConfig(CONFIG))
    assert config.architecture == "ToyForCausalLM"
    assert registry.input_processor(config) is None
    by_name = {report.name: report for report in registry.reports}
    assert FAILED in by_name["bad"].error
    assert by_name["toy"].error is None
    with pytest.raises(UnknownArchitectureError) as caught:
        registry.model_config(HFConfig(CONFIG, architectures=["BadForCausalLM"]))
    assert FAILED in str(caught.value)

    strict = build_registry(entry_points=points, plugin_errors="strict")
    with pytest.raises(PluginLoadError, match="ZeroDivisionError"):
        strict.input_processor(strict.model_config(HFConfig(CONFIG)))


@pytest.mark.parametrize("hook", ["config_builders", "input_processors"])
def test_a_probe_finds_a_condition_that_fails(hook: str) -> None:
    points = [Point("bad", plugin(**{hook: [Failing]})), Point("toy", plugin(module_map=TOY))]
    registry = build_registry(entry_points=points)
    registry.probe()
    assert [bool(report.error) for report in registry.reports] == [True, False]
    assert FAILED in registry.reports[0].error


def test_a_model_does_not_run_without_the_processor_that_its_plugin_fails_at() -> None:
    module = plugin(module_map=BAD, input_processors=[Failing])
    registry = build_registry(entry_points=[Point("bad", module)])
    config = registry.model_config(HFConfig(CONFIG, architectures=["BadForCausalLM"]))
    with pytest.raises(PluginLoadError) as caught:
        registry.input_processor(config)
    assert FAILED in str(caught.value)


def test_a_processor_that_cannot_be_made_names_the_plugin_and_the_class() -> None:
    class Toy(Failing):
        @classmethod
        def condition(cls, model: object) -> bool:
            return True

        def __init__(self, model_config: object) -> None:
            raise KeyError("petals")

    module = plugin(module_map=TOY, input_processors=[Toy])
    registry = build_registry(entry_points=[Point("toy", module)])
    with pytest.raises(PluginLoadError, match=r"plugin 'toy': Toy cannot be made .* 'petals'"):
        registry.input_processor(registry.model_config(HFConfig(CONFIG)))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"mark": ("int64", ())}, "must be a PromptState with"),
        (PromptState({"prompt_len": ("int64", ())}), "'prompt_len' is built in"),
        (PromptState({"mark": ("wood", ())}), "a dtype and a shape"),
        (PromptState({"mark": ("str", ())}), "a dtype and a shape"),
        (PromptState({"mark": "int64"}), "a dtype and a shape"),
        (PromptState(token_state={"kind": 0}), "a positive integer"),
        (PromptState({"mark": ("int32", (2,))}, {"kind": 3}), None),
        (None, None),
    ],
    ids=str,
)
def test_a_declaration_of_state_is_checked(declared: object, message: str | None) -> None:
    class Toy(Failing):
        prompt_state = declared

        @classmethod
        def condition(cls, model: object) -> bool:
            return True

        def __init__(self, model_config: object) -> None:
            """Nothing to keep."""

    module = plugin(module_map=TOY, input_processors=[Toy])
    registry = build_registry(entry_points=[Point("toy", module)])
    config = registry.model_config(HFConfig(CONFIG))
    if message is None:
        assert isinstance(registry.input_processor(config), Toy)
        return
    with pytest.raises(PluginLoadError, match=rf"plugin 'toy': Toy\.prompt_state .*{message}"):
        registry.input_processor(config)


def test_a_module_map_file_whose_condition_fails_is_refused_by_name(tmp_path: Path) -> None:
    text = """
class Builder:
    @classmethod
    def condition(cls, hf_config): return hf_config.petals > 0
    @classmethod
    def build(cls, hf_config, model_path=None, **kwargs): ...

MODULE_MAP = {}
CONFIG_BUILDERS = [Builder]
"""
    path = module_map_file(tmp_path, text)
    registry = build_registry([path], entry_points=[Point("toy", plugin(module_map=TOY))])
    with pytest.raises(PluginLoadError, match=r"Builder\.condition\(\) failed: AttributeError"):
        registry.model_config(HFConfig(CONFIG))


def test_a_builder_that_fails_or_gives_no_config_names_itself_and_its_plugin() -> None:
    class Nothing(Failing):
        @classmethod
        def condition(cls, model: object) -> bool:
            return True

    class Stumbling(Nothing):
        @classmethod
        def build(cls, hf_config: HFConfig, model_path: object = None, **kwargs: object) -> None:
            raise KeyError("petals")

    registry = build_registry(entry_points=[Point("toy", plugin(config_builders=[Nothing]))])
    with pytest.raises(PluginLoadError, match=r"'toy': Nothing\.build\(\) returned None"):
        registry.model_config(HFConfig(CONFIG))
    # It may be the checkpoint's fault: nobody can tell.
    registry = build_registry(entry_points=[Point("toy", plugin(config_builders=[Stumbling]))])
    with pytest.raises(ConfigError) as caught:
        registry.model_config(HFConfig(CONFIG), Path("somewhere"))
    message = str(caught.value)
    assert f"{Path('somewhere', 'config.json')} cannot be understood" in message
    assert "Stumbling of plugin 'toy' failed: KeyError: 'petals'" in message


def test_two_claims_of_one_architecture_name_both() -> None:
    points = [Point("one", plugin(module_map=TOY)), Point("two", plugin(module_map=TOY))]
    registry = build_registry(entry_points=points)
    with pytest.raises(DuplicateArchitectureError, match="'one' and 'two'"):
        registry.model_class("ToyForCausalLM")


def test_two_matching_builders_name_both() -> None:
    points = [
        Point("one", plugin(config_builders=[DefaultConfigBuilder])),
        Point("two", plugin(config_builders=[DefaultConfigBuilder])),
    ]
    registry = build_registry(entry_points=points)
    with pytest.raises(DuplicateArchitectureError, match=r"of 'one' and Default.* of 'two'"):
        registry.model_config(HFConfig(CONFIG))


def test_the_default_builder_serves_a_plugin_without_one() -> None:
    registry = build_registry(entry_points=[Point("toy", plugin(module_map=TOY))])
    config = registry.model_config(HFConfig(CONFIG))
    assert (config.architecture, config.head_dim, config.num_key_value_heads) == (
        "ToyForCausalLM",
        2,
        2,
    )


def test_of_several_architectures_none_is_chosen() -> None:
    registry = build_registry(entry_points=[Point("toy", plugin(module_map=TOY))])
    config = HFConfig(CONFIG, architectures=["ToyForCausalLM", "FooForCausalLM"])
    with pytest.raises(ConfigError, match=r"several model classes, .*'ToyForCausalLM', 'FooFor"):
        registry.model_config(config)


def test_an_unknown_architecture_lists_near_ones_and_the_package_to_look_for() -> None:
    registry = build_registry(entry_points=[Point("toy", plugin(module_map=TOY))])
    config = HFConfig(CONFIG, architectures=["ToyForCausalML"])
    with pytest.raises(UnknownArchitectureError) as caught:
        registry.model_config(config)
    message = str(caught.value)
    assert "'ToyForCausalML'" in message
    assert "Nearest: ToyForCausalLM (toy)" in message
    assert "engine-core-toy" in message
    assert "custom_module_map" in message


def test_a_class_that_cannot_be_imported_names_the_plugin() -> None:
    point = Point("toy", plugin(module_map={"A": "no_such_module_anywhere.B"}))
    registry = build_registry(entry_points=[point])
    with pytest.raises(PluginLoadError, match=r"'toy': no_such_module_anywhere\.B"):
        registry.model_class("A")


def module_map_file(folder: Path, text: str, name: str = "map.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


FILE = """
MODULE_MAP = {"ToyForCausalLM": "Mine", "OtherForCausalLM": "collections.OrderedDict"}

class Mine: ...

class Builder:
    @classmethod
    def condition(cls, hf_config): return hf_config.get("model_type") == "toy"
    @classmethod
    def build(cls, hf_config, model_path=None, **kwargs):
        from engine_core.configs import DefaultConfigBuilder
        return DefaultConfigBuilder.build(hf_config, model_path, max_position_embeddings=3)

CONFIG_BUILDERS = [Builder]
"""


def test_a_module_map_file_wins_over_a_plugin_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = module_map_file(tmp_path, FILE)
    registry = build_registry([path], entry_points=[Point("toy", plugin(module_map=TOY))])
    assert registry.model_class("ToyForCausalLM").__name__ == "Mine"
    assert registry.model_class("OtherForCausalLM").__name__ == "OrderedDict"
    assert registry.model_config(HFConfig(CONFIG)).max_position_embeddings == 3
    assert "takes ToyForCausalLM over from plugin 'toy'" in caplog.text
    assert path in registry.architectures.values()


def test_several_module_map_files_are_read(tmp_path: Path) -> None:
    one = module_map_file(tmp_path, 'MODULE_MAP = {"A": "One"}\nclass One: ...', "one.py")
    two = module_map_file(tmp_path, 'MODULE_MAP = {"B": "Two"}\nclass Two: ...', "two.py")
    registry = build_registry([one, two], entry_points=[])
    assert [registry.model_class(name).__name__ for name in "AB"] == ["One", "Two"]


BROKEN_FILES = {
    "syntax": ("MODULE_MAP = {", "SyntaxError"),
    "no map": ("X = 1", "needs MODULE_MAP"),
    "missing class": ('MODULE_MAP = {"A": "Nowhere"}', "neither a class in this file"),
    "raises": ("raise RuntimeError('boom')", "RuntimeError: boom"),
    "builders": ("MODULE_MAP = {}\nCONFIG_BUILDERS = [1]", "not a class with condition, build"),
}


@pytest.mark.parametrize(("text", "message"), BROKEN_FILES.values(), ids=BROKEN_FILES.keys())
def test_a_broken_module_map_file_is_refused_by_name(
    tmp_path: Path, text: str, message: str
) -> None:
    path = module_map_file(tmp_path, text)
    with pytest.raises(PluginLoadError) as caught:
        build_registry([path], entry_points=[])
    assert path in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_module_map_file_is_refused_by_name() -> None:
    with pytest.raises(PluginLoadError, match=r"'nowhere\.py': no such file"):
        build_registry(["nowhere.py"], entry_points=[])


BAD_CONFIGS = {
    "no architectures": ({"architectures": None}, "'architectures' must be a list"),
    "vocabulary": ({"vocab_size": -1}, "'vocab_size' must be a positive integer, got -1"),
    "text": ({"hidden_size": "4"}, "'hidden_size' must be a positive integer, got '4'"),
    "heads": ({"num_attention_heads": 3}, "not divisible by num_attention_heads"),
    "kv heads": ({"num_key_value_heads": 3}, "not divisible by num_key_value_heads"),
    "no kv heads": ({"num_key_value_heads": 0}, "'num_key_value_heads' must be .*, got 0"),
    "kv heads' text": ({"num_key_value_heads": "2"}, "'num_key_value_heads' must be .*, got '2'"),
    "head size": ({"head_dim": 0}, "'head_dim' must be a positive integer, got 0"),
    "head size's kind": ({"head_dim": 16.0}, "'head_dim' must be .*, got 16.0"),
    "head size's text": ({"head_dim": "16"}, "'head_dim' must be .*, got '16'"),
    "dtype": ({"torch_dtype": "int4"}, "'int4' is not one of"),
    "eos": ({"eos_token_id": "end"}, "eos_token_id must be a token id"),
}


@pytest.mark.parametrize(("change", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS.keys())
def test_the_default_builder_names_the_key_that_is_wrong(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DefaultConfigBuilder.build(HFConfig({**CONFIG, **change}))


class _Recognising:
    """Stands for a scheme class."""

    def __init__(self, name: str, settings: Mapping[str, object] | None) -> None:
        self.name = name
        self.bits = None if settings is None else settings["bits"]

    @classmethod
    def condition(cls, settings: Mapping[str, object]) -> bool:
        return settings["quant_method"] == "toy"


SCHEMES = {"toy4": f"{__name__}._Recognising"}


def test_schemes_are_the_cores_and_the_packages() -> None:
    registry = build_registry(entry_points=[Point("toy", plugin(quantization_schemes=SCHEMES))])
    assert registry.quantization_scheme("toy4").name == "toy4"
    assert registry.quantization_scheme("toy4", {"bits": 3}).bits == 3
    with pytest.raises(PluginLoadError, match=r"'toy': _Recognising cannot be made .* KeyError"):
        registry.quantization_scheme("toy4", {})
    assert registry.recognise_quantization({"quant_method": "toy"}) == "toy4"
    assert registry.recognise_quantization({"quant_method": "aqlm"}) is None
    known = r"'int8' \(engine-core-llm\), 'int4' .*, 'gguf' .*, 'toy4' \(toy\); .*'unpacked'"
    with pytest.raises(OptionError, match=f"'toy3' is none .* installed: {known}"):
        registry.quantization_scheme("toy3")


def test_a_scheme_that_two_claim_is_refused_when_asked_for() -> None:
    again = {"int8": SCHEMES["toy4"], **SCHEMES}
    registry = build_registry(
        entry_points=[
            Point("toy", plugin(quantization_schemes=SCHEMES)),
            Point("copy", plugin(quantization_schemes=again)),
        ]
    )
    for name, who in (("int8", "'engine-core-llm' and 'copy'"), ("toy4", "'toy' and 'copy'")):
        with pytest.raises(DuplicateArchitectureError, match=f"{name!r} is claimed by {who}"):
            registry.quantization_scheme(name)
    assert type(registry.quantization_scheme("int4")).__name__ == "Int4Scheme"
    with pytest.raises(DuplicateArchitectureError, match="'toy4' of 'toy' and 'int8' of 'copy'"):
        registry.recognise_quantization({"quant_method": "toy"})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (SCHEMES["toy4"], r"'bad': _Recognising.condition\(\) failed: KeyError"),
        ("nowhere.Scheme", "'bad': nowhere.Scheme cannot be imported"),
        (f"{__name__}.ToyForCausalLM", r"'bad': .*condition\(\) failed: AttributeError"),
    ],
)
def test_a_scheme_that_cannot_be_asked_is_reported(path: str, message: str) -> None:
    points = [
        Point("bad", plugin(quantization_schemes={"broken": path})),
        Point("good", plugin(module_map=TOY)),
    ]
    registry = build_registry(entry_points=points)
    assert registry.recognise_quantization({}) is None
    assert re.search(message, str(registry.reports[0].error))
    assert registry.model_class("ToyForCausalLM") is ToyForCausalLM
    strict = build_registry(entry_points=points, plugin_errors="strict")
    with pytest.raises(PluginLoadError, match=message):
        strict.recognise_quantization({})


def test_schemes_are_named_by_paths() -> None:
    module = plugin(quantization_schemes=[_Recognising])
    registry = build_registry(entry_points=[Point("bad", module)])
    assert "quantization_schemes() must map names" in str(registry.reports[0].error)


def test_packages_are_read_once_and_again_when_one_comes_or_goes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def found(name: str) -> list[tuple[str | None, str | None]]:
        reports = build_registry().reports
        return [(each.distribution, each.version) for each in reports if each.name == name]

    looks: list[dict[str, Any]] = []
    look = registry_module.metadata.entry_points

    def count(**options: Any) -> Any:
        looks.append(options)
        return look(**options)

    monkeypatch.setattr(registry_module.metadata, "entry_points", count)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would be a change of the folder
    monkeypatch.syspath_prepend(tmp_path)
    assert found("heather") == []
    looks.clear()
    assert found("heather") == []
    assert looks == []
    install(tmp_path, "heather", "requires_api = '0.3'\n")
    assert found("heather") == [("heather", "1.2")]
    assert found("heather") == [("heather", "1.2")]
    assert len(looks) == 1
    shutil.rmtree(tmp_path / "heather-1.2.dist-info")
    assert found("heather") == []
    del sys.modules["heather"]
