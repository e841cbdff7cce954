"""``custom_module_map`` end to end: files, several of them, from Python and from the commands."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from golden_fixtures import GOLDEN, golden_prompts
from typer.main import get_command
from typer.testing import CliRunner

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.cli import app
from engine_core.errors import DuplicateArchitectureError, UnknownArchitectureError

runner = CliRunner(env={"COLUMNS": "300"})
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

# A llama under a name, and with a config, that nobody but this file knows.
MODEL = """
from engine_core_llama.config import LlamaConfigBuilder
from engine_core_llama.model import LlamaForCausalLM

class {name}(LlamaForCausalLM):
    pass

class {name}Builder(LlamaConfigBuilder):
    architecture = "{name}"

    @classmethod
    def build(cls, hf_config, model_path=None, **kwargs):
        width = hf_config.get("width")
        return super().build(hf_config.replace(hidden_size=width), model_path, **kwargs)

MODULE_MAP = {{"{name}": "{name}"}}
CONFIG_BUILDERS = [{name}Builder]
"""


def module_map(folder: Path, name: str) -> str:
    path = folder / f"{name.lower()}.py"
    path.write_text(MODEL.format(name=name))
    return str(path)


def checkpoint(folder: Path, name: str) -> str:
    """Its config says ``width`` where every builder but the file's wants ``hidden_size``."""
    model = folder / f"checkpoint-{name}"
    model.mkdir()
    config = json.loads((GOLDEN / "llama-gqa" / "config.json").read_text())
    config |= {"architectures": [name], "width": config.pop("hidden_size")}
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").symlink_to(GOLDEN / "llama-gqa" / "model.safetensors")
    return str(model)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from the environment, and nothing is written to it."""
    for name in [name for name in os.environ if name.startswith("ENGINE_CORE")]:
        monkeypatch.delenv(name)


def test_a_file_brings_model_and_config_from_python(tmp_path: Path) -> None:
    prompt = golden_prompts("llama-gqa")[0]
    before = dict(os.environ)
    config = EngineConfig(
        custom_module_map=module_map(tmp_path, "Heather"), skip_tokenizer_init=True
    )
    with LLM(checkpoint(tmp_path, "Heather"), config) as llm:
        [output] = llm.generate(prompt.input_ids, PARAMS)
    assert output.outputs[0].token_ids == prompt.new_tokens[:8]
    assert dict(os.environ) == before


def test_several_files_serve_side_by_side(tmp_path: Path) -> None:
    files = [module_map(tmp_path, name) for name in ("Heather", "Juniper")]
    prompt = golden_prompts("llama-gqa")[0]
    for name in ("Heather", "Juniper"):
        folder = checkpoint(tmp_path, name)
        with LLM(folder, custom_module_map=files, skip_tokenizer_init=True) as llm:
            [output] = llm.generate(prompt.input_ids, PARAMS)
        assert output.outputs[0].token_ids == prompt.new_tokens[:8]


def test_without_the_file_the_error_says_where_to_go_on(tmp_path: Path) -> None:
    """The package by convention, and how to write one; no name that is only spelt alike."""
    with pytest.raises(UnknownArchitectureError) as caught:
        LLM(checkpoint(tmp_path, "HeatherForCausalLM"), skip_tokenizer_init=True)
    message = str(caught.value)
    assert "Nearest" not in message
    assert "no installed plugin knows the architecture 'HeatherForCausalLM'" in message
    # Its model_type is that of a package which is installed and does not know it.
    assert "would by convention be named engine-core-heather" in message
    assert "docs/write-a-plugin.md" in message


def test_two_files_that_claim_one_architecture_are_named(tmp_path: Path) -> None:
    one = module_map(tmp_path, "Heather")
    other = tmp_path / "other.py"
    other.write_text(MODEL.format(name="Heather").replace("CONFIG_BUILDERS", "UNUSED"))
    with pytest.raises(DuplicateArchitectureError) as caught:
        LLM(
            checkpoint(tmp_path, "Heather"),
            custom_module_map=[one, str(other)],
            skip_tokenizer_init=True,
        )
    assert one in str(caught.value)
    assert str(other) in str(caught.value)


def test_the_commands_take_one_or_several_files(tmp_path: Path) -> None:
    files = [module_map(tmp_path, name) for name in ("Heather", "Juniper")]
    options = [item for file in files for item in ("--custom-module-map", file)]
    prompt = golden_prompts("llama-gqa")[0]
    ids = ",".join(map(str, prompt.input_ids))
    arguments = ["--token-ids", ids, "--skip-tokenizer-init", "--temperature", "0"]
    arguments += ["--max-tokens", "8", "--ignore-eos", *options]
    done = runner.invoke(app, ["generate", checkpoint(tmp_path, "Juniper"), *arguments])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.split() == [str(token) for token in prompt.new_tokens[:8]]

    heather = checkpoint(tmp_path, "Heather")
    done = runner.invoke(app, ["check-model", heather, "--skip-tokenizer-init", *options])
    assert done.exit_code == 0, done.stdout + done.stderr

    for name in ("plugins", "env"):
        done = runner.invoke(app, [name, "--json", *options])
        assert done.exit_code == 0, done.stderr
        assert all(Path(file).name in done.stdout for file in files)


def test_every_command_that_reads_a_model_or_plugins_takes_the_option() -> None:
    commands: Any = get_command(app)
    without = [
        name
        for name in commands.commands
        if "--custom-module-map" not in runner.invoke(app, [name, "--help"]).stdout
    ]
    assert len(commands.commands) > len(without)
    # One makes no model, the other copies an installed package.
    assert sorted(without) == ["import", "new-plugin"]


@pytest.mark.slow
def test_spawned_workers_read_the_file_themselves(tmp_path: Path) -> None:
    prompt = golden_prompts("llama-gqa")[0]
    with LLM(
        checkpoint(tmp_path, "Heather"),
        custom_module_map=module_map(tmp_path, "Heather"),
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        kv_cache_memory="4MiB",
    ) as llm:
        [output] = llm.generate(prompt.input_ids, PARAMS)
    assert output.outputs[0].token_ids == prompt.new_tokens[:8]
