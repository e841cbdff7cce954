"""Options made from config models, and the exit codes of a command."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from engine_core.cli import app
from engine_core.cli.command import OptionGroup, command
from engine_core.configs import EngineConfig, SamplingParams
from engine_core.configs.base import describe
from engine_core.errors import CheckpointNotFoundError

runner = CliRunner(env={"COLUMNS": "100", "TERMINAL_WIDTH": "100"})


def _parse(model: type, *arguments: str, **kwargs: Any) -> Any:
    """Parse ``arguments`` as a command line and return its ``model``."""
    group = OptionGroup(model, **kwargs)
    built: list[Any] = []

    @command(group)
    def collect(**options: Any) -> None:
        built.append((group.build(options), group.given(options)))

    tiny = typer.Typer(rich_markup_mode=None)
    tiny.command()(collect)
    result = runner.invoke(tiny, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return built[0]


def test_engine_options() -> None:
    built, given = _parse(
        EngineConfig,
        *("--kv-cache-memory", "4GiB", "--no-enable-prefix-caching", "--skip-tokenizer-init"),
        *("--custom-module-map", "a.py", "--custom-module-map", "b.py"),
        *("--hf-overrides", '{"rope_scaling": {"factor": 2.0}}', "--max-num-seqs", "7"),
        *("--dtype", "float32", "--revision", "none", "--tensor-parallel", "2"),
    )
    assert built == EngineConfig(
        tensor_parallel_size=2,
        kv_cache_memory=4 * 2**30,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        custom_module_map=("a.py", "b.py"),
        hf_overrides={"rope_scaling": {"factor": 2.0}},
        max_num_seqs=7,
        dtype="float32",
        revision="none",
    )
    assert "device" not in given


def test_sampling_options() -> None:
    built, given = _parse(
        SamplingParams,
        *("--temperature", "0.5", "--top-k", "-1", "--max-tokens", "none", "--stop", "END"),
        *("--stop-token-ids", "3", "--stop-token-ids", "4", "--ignore-eos"),
        *("--allowed-token-ids", "5", "--allowed-token-ids", "6", "--bad-words", "7"),
        *("--logit-bias", '{"8": 1.5}'),
    )
    assert built == SamplingParams(
        temperature=0.5,
        top_k=-1,
        max_tokens=None,
        stop=("END",),
        stop_token_ids=(3, 4),
        ignore_eos=True,
        allowed_token_ids=(5, 6),
        bad_words=("7",),
        logit_bias={8: 1.5},
    )
    assert set(given) == {
        "allowed_token_ids",
        "bad_words",
        "logit_bias",
        "temperature",
        "top_k",
        "max_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
    }


@pytest.mark.parametrize("model", [EngineConfig, SamplingParams])
def test_nothing_given_is_the_default(model: type) -> None:
    assert _parse(model) == (model(), {})


def test_only_and_skip_choose_the_fields() -> None:
    group = OptionGroup(EngineConfig, only=("dtype", "seed"), skip=("seed",))
    assert [parameter.name for parameter in group.parameters()] == ["dtype"]


@pytest.mark.parametrize("model", [EngineConfig, SamplingParams])
def test_help_shows_every_field(model: type) -> None:
    text = " ".join(runner.invoke(app, ["generate", "--help"]).output.split())
    for name, field in model.model_fields.items():
        if field.exclude:
            continue
        assert f"--{name.replace('_', '-')}" in text
        if (model, name) != (SamplingParams, "seed"):  # one --seed, the engine's
            assert " ".join(describe(model)[name].split()) in text
    assert "(default: 256)" in text  # max_num_seqs
    assert "(default: 1.0)" in text  # temperature


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--top-p", "3"], "--top-p: Input should be less than or equal to 1, got 3"),
        (["--max-num-seqs", "many"], "--max-num-seqs: Input should be a valid integer"),
        (["--dtype", "int9"], "got 'int9'"),
        (["--kv-cache-memory", "4 bananas"], "a size is a number of bytes"),
        (["--hf-overrides", "{"], "--hf-overrides: not JSON"),
        (["--hf-overrides", "[1]"], "--hf-overrides: Input should be a valid dictionary"),
        (["--token-ids", "1,x"], "--token-ids: wants numbers like 1,2,3, got '1,x'"),
        (["--system", "Be brief."], "--system needs --chat"),
        (["--chat", "--token-ids", "1"], "--chat applies a template to text"),
        (["--prompt-file", "no-such-file"], "--prompt-file: no-such-file cannot be read"),
        (["--stop", ""], "an empty stop string would end every text at once"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_usage_exits_with_2(arguments: list[str], said: str) -> None:
    result = runner.invoke(app, ["generate", "model", "prompt", *arguments])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


def test_no_prompt_is_wrong_usage() -> None:
    result = runner.invoke(app, ["generate", "model"])
    assert result.exit_code == 2
    assert "no prompt; give a PROMPT, --prompt-file or --token-ids" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (CheckpointNotFoundError("no such folder: x"), 1, "engine-core: error: no such folder: x"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_exit_codes(error: BaseException, code: int, said: str) -> None:
    @command()
    def fail() -> None:
        raise error

    tiny = typer.Typer()
    tiny.command()(fail)
    result = runner.invoke(tiny)
    assert result.exit_code == code
    assert result.stderr.strip() == said
    assert result.stdout == ""


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", result.stdout)


def test_help_imports_no_torch() -> None:
    script = (
        "import json, sys\n"
        "from engine_core.cli import app\n"
        "try:\n"
        "    app(['generate', '--help'])\n"
        "finally:\n"
        "    print(json.dumps(sorted(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "--max-num-seqs" in done.stdout
    modules = set(json.loads(done.stderr))
    assert not modules & {"torch", "transformers", "engine_core.engine", "engine_core.runtime"}
    assert not modules & {f"engine_core.cli.{name}" for name in ("bench", "chat", "env", "serve")}
