"""``engine-core new-plugin``: what it writes passes the conformance kit as it is."""

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import forkserver
import pytest
from random_examples import FULL
from typer.testing import CliRunner

from engine_core.cli import app

ROOT = Path(__file__).parents[2]
runner = CliRunner(env={"COLUMNS": "300"})

PUBLISHED = {
    "architectures": ["MarigoldForCausalLM"],
    "attention_bias": True,
    "auto_map": {"AutoModelForCausalLM": "modeling_marigold.MarigoldForCausalLM"},
    "bos_token_id": 1,
    "eos_token_id": [2, 50000],
    "head_dim": 128,
    "hidden_act": "gelu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 131072,
    "model_type": "marigold",
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


def make(*arguments: str | Path) -> str:
    """Run the command; it must succeed."""
    done = runner.invoke(app, ["new-plugin", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


def installed(project: Path, target: Path) -> dict[str, str]:
    """Install ``project`` into ``target`` as pip does, and the environment that sees it."""
    command = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(
        [sys.executable, *command, "--target", str(target), str(project)], check=True, cwd=target
    )
    return {**os.environ, "PYTHONPATH": f"{target}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


def in_place(project: Path) -> dict[str, str]:
    """Describe ``project`` where it is, without pip, and the environment that sees it."""
    command = [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "egg_info"]
    subprocess.run(command, check=True, cwd=project, capture_output=True)
    return {**os.environ, "PYTHONPATH": f"{project}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("like", ["llama", "qwen2", "internlm2", "gemma"])
def test_nothing_of_the_patterns_own_texts_is_copied(like: str, tmp_path: Path) -> None:
    make("marigold", "--like", like, "--out", tmp_path)
    text = "".join(path.read_text() for path in tmp_path.rglob("engine_core_marigold/*.py"))
    for part in ("conventions", "parser", "SentencePiece", "<s>", "_EOM", "llama3", "hermes"):
        assert part not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("like", "suffix"),
    [
        ("llama", "ForCausalLM"),
        ("qwen2_vl", "ForConditionalGeneration"),
        ("chatglm", "ForConditionalGeneration"),
    ],
)
def test_the_package_passes_the_conformance_kit_unchanged(
    tmp_path: Path, like: str, suffix: str
) -> None:
    """A family that reads, with a checkpoint's config, one that sees, and one with a reference.

    The checks that read all of what was written, and of the first those that run it once. The
    others are left to ``make soak``: of a copy they show what the pattern's own tests do.
    """
    checks = "not tensor_parallel"  # two ranks are a matter of the pattern's own tests
    if FULL not in os.environ:
        checks = "discovery or import_rules or config_builder or weights or logits or items"
        if like == "llama":
            checks += " or config or architecture or switches or synchronisation or test_engine"
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    given = ["--hf-config", tmp_path / "config.json"] if like == "llama" else []
    assert "engine-core-marigold" in make("marigold", "--like", like, "--out", tmp_path, *given)
    project = tmp_path / "engine-core-marigold"
    environment = in_place(project)

    done = forkserver.run(
        [sys.executable, "-m", "pytest", "-qk", checks, "-p", "no:cacheprovider"],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preloaded=forkserver.TRANSFORMERS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout

    command = [sys.executable, "-m", "engine_core.cli", "plugins", "--json"]
    listed = forkserver.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        preloaded=forkserver.TRANSFORMERS,
    )
    reports = {report["name"]: report for report in json.loads(listed.stdout)}
    assert reports["marigold"]["distribution"] == "engine-core-marigold"
    assert reports["marigold"]["architectures"] == [f"Marigold{suffix}"]
    assert all(report["error"] is None for report in reports.values())


@pytest.mark.slow
def test_the_wheel_pins_no_torch_and_holds_the_package(tmp_path: Path) -> None:
    make("marigold", "--like", "llama", "--out", tmp_path)
    target = tmp_path / "target"
    target.mkdir()
    installed(tmp_path / "engine-core-marigold", target)
    [info] = target.glob("engine_core_marigold-0.1.0.dist-info")
    requires = [
        line
        for line in (info / "METADATA").read_text().splitlines()
        if line.startswith("Requires-D")
    ]
    assert [line for line in requires if "extra" not in line] == [
        "Requires-Dist: engine-core-llm<0.2,>=0.1"
    ]
    assert not any("torch" in line for line in requires)
    assert (target / "engine_core_marigold" / "py.typed").is_file()


def test_the_copy_asks_for_this_core_and_for_the_api_of_its_pattern(tmp_path: Path) -> None:
    make("marigold", "--like", "llama", "--out", tmp_path)
    folder = tmp_path / "engine-core-marigold"
    assert '"engine-core-llm>=0.1,<0.2"' in (folder / "pyproject.toml").read_text()
    plugin = (folder / "engine_core_marigold" / "plugin.py").read_text()
    assert 'requires_api = "0.3"' in plugin


def test_names_and_settings_come_from_the_checkpoints_config(tmp_path: Path) -> None:
    """Sizes stay tiny, and ids beyond the vocabulary are left out."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    make("marigold", "--like", "llama", "--hf-config", tmp_path, "--out", tmp_path)
    package = tmp_path / "engine-core-marigold" / "engine_core_marigold"
    text = (package / "conformance.py").read_text()
    literal = text[text.index("config=") + len("config=") : text.index(",\n    ),\n]")]
    values = ast.literal_eval(literal)
    assert values["architectures"] == ["MarigoldForCausalLM"]
    assert values["hidden_act"] == "gelu"
    assert values["attention_bias"] is True
    assert values["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert values["hidden_size"] <= 128
    assert values["vocab_size"] <= 1000
    assert "head_dim" not in values
    assert not {"eos_token_id", "auto_map", "torch_dtype"}.intersection(values)
    assert "class MarigoldForCausalLM(" in (package / "model.py").read_text()


def test_nothing_of_the_pattern_is_left_but_its_name(tmp_path: Path) -> None:
    make("my-marigold-2", "--like", "llama", "--out", tmp_path)
    project = tmp_path / "engine-core-my-marigold-2"
    for file in project.rglob("*.py"):
        source = file.read_text()
        assert "engine_core_llama" not in source
        assert "Mistral" not in source
        assert "class Llama" not in source
    about = tomllib.loads((project / "pyproject.toml").read_text())
    assert about["project"]["name"] == "engine-core-my-marigold-2"
    points = about["project"]["entry-points"]["engine_core"]
    assert points == {"my-marigold-2": "engine_core_my_marigold_2.plugin"}
    model = (project / "engine_core_my_marigold_2" / "model.py").read_text()
    assert "class MyMarigold2ForCausalLM(" in model


@pytest.mark.parametrize(
    ("like", "stem", "model_types"),
    [("qwen2_vl", "qwen", ["qwen2_vl"]), ("internvl", "intern", ["internvl", "internvl_vision"])],
)
def test_nothing_of_a_pattern_that_sees_is_left_but_its_name(
    tmp_path: Path, like: str, stem: str, model_types: list[str]
) -> None:
    make("marigold", "--like", like, "--out", tmp_path)
    project = tmp_path / "engine-core-marigold"
    origin = f"engine-core-{like.replace('_', '-')}"
    # The text models of others inside, and transformers' class, until the author names another.
    known = (f"Copied from {origin}", f"differs from {origin}", "ForCausalLM")
    left = [
        line.strip()
        for file in sorted(project.rglob("*.py"))
        for line in file.read_text().splitlines()
        if stem in line.lower() and not any(each in line for each in known)
    ]
    assert left == [f'"model_type": "{name}",' for name in model_types]
    package = project / "engine_core_marigold"
    assert "class MarigoldProcessor:" in (package / "inputs.py").read_text()
    assert "media=" in (package / "conformance.py").read_text()
    about = tomllib.loads((project / "pyproject.toml").read_text())
    assert about["project"]["dependencies"] == ["engine-core-llm[media]>=0.1,<0.2"]
    assert "| `pixels.py` | from pictures to " in (project / "README.md").read_text()


@pytest.mark.parametrize(
    ("like", "names"),
    [
        ("gpt2", ("GPT", "gpt2")),
        ("bert", ("BERT was", "class Bert")),
        ("bloom", ("BLOOM",)),
        ("qwen2", ("Qwen",)),
        ("qwen_vl", ("Qwen ", "Qwen'", "Qwen-VL", "QWen", "_qwen(")),
        ("mamba2", ("engine-core-mamba2",)),
    ],
)
def test_texts_and_messages_do_not_name_the_pattern(
    tmp_path: Path, like: str, names: tuple[str, ...]
) -> None:
    make("marigold", "--like", like, "--out", tmp_path)
    known = ("Copied from ", "differs from ", "model_type")
    lines = [
        line
        for file in (*tmp_path.rglob("engine_core_marigold/*.py"),)
        for line in file.read_text().splitlines()
        if not any(each in line for each in known)
    ]
    assert [line for line in lines for name in names if name in line] == []


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "bloom",
        "qwen2",
        "gpt2",
        "qwen2_vl",
        "internvl",
        "chatglm",
        "qwen_vl",
        "qwen2_audio",
    ],
)
def test_any_family_with_cases_can_be_the_pattern(tmp_path: Path, family: str) -> None:
    """The written package is formatted, and every name in it is defined."""
    make("marigold", "--like", family, "--out", tmp_path)
    for file in (tmp_path / "engine-core-marigold").rglob("*.py"):
        assert f"engine_core_{family}" not in file.read_text()
    settings = ["--no-cache", "--config", str(ROOT / "pyproject.toml"), str(tmp_path)]
    for command in (["format", "--check"], ["check", "--ignore", "D1"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *settings],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_pattern_that_goes_by_other_keys_becomes_one_that_goes_by_its_name(
    tmp_path: Path,
) -> None:
    make("rose", "--like", "chatglm", "--out", tmp_path)
    config = (tmp_path / "engine-core-rose/engine_core_rose/config.py").read_text()
    assert '== ["RoseForConditionalGeneration"])' in config
    assert "_is_chatglm" not in config
    assert "ChatGLM" not in config


REFUSED = {
    "upper case": (["My_Model"], 2, "try 'my-model'"),
    "digit first": (["3b"], 2, "a letter first"),
    "path": (["../escape"], 2, "PEP 503"),
    "prefix": (["engine-core-rose"], 2, "leave out engine-core"),
    "a family": (["llama"], 2, "taken by the installed engine-core-llama"),
    "no such pattern": (["rose", "--like", "tulip"], 2, "no installed family is named 'tulip'"),
    "no config": (["rose", "--hf-config", "nowhere"], 2, "no file named config.json"),
    "no cases": (["rose", "--like", "transformers"], 1, "by --from-transformers ARCHITECTURE"),
}


@pytest.mark.parametrize(("arguments", "code", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_wrong_argument_is_refused_and_nothing_is_written(
    tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    like = [] if "--like" in arguments else ["--like", "llama"]
    done = runner.invoke(app, ["new-plugin", *arguments, *like, "--out", str(tmp_path)])
    assert done.exit_code == code
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


def test_a_config_of_another_name_is_to_be_copied(tmp_path: Path) -> None:
    (tmp_path / "marigold.json").write_text("{}")
    given = ["rose", "--like", "llama", "--hf-config", str(tmp_path / "marigold.json")]
    done = runner.invoke(app, ["new-plugin", *given])
    assert done.exit_code == 2
    said = " ".join(done.stderr.replace("│", " ").split())
    assert "copy it to a folder under that name" in said


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, 2, "already known, by plugin 'llama'"),
        ({"architectures": []}, 1, "'architectures' must be a list that names the model"),
        ({"architectures": ["No Name"]}, 1, "cannot be the name of a class"),
        ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, 1, "'su' is not one of"),
        ({"partial_rotary_factor": 0.5}, 1, "--from-transformers MarigoldForCausalLM --hf-config"),
    ],
)
def test_a_config_that_cannot_serve_is_refused_by_name(
    tmp_path: Path, change: dict[str, object], code: int, message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED, **change}))
    arguments = ["rose", "--like", "llama", "--hf-config", str(tmp_path), "--out", str(tmp_path)]
    done = runner.invoke(app, ["new-plugin", *arguments])
    assert done.exit_code == code
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert not (tmp_path / "engine-core-rose").exists()


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "engine-core-rose"
    folder.mkdir()
    (folder / "mine").write_text("work")
    done = runner.invoke(app, ["new-plugin", "rose", "--like", "llama", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "exists already; nothing was written" in " ".join(done.stderr.split())
    assert [path.name for path in folder.iterdir()] == ["mine"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    done = runner.invoke(app, ["new-plugin", "rose", "--like", "llama", "--out", str(file)])
    assert done.exit_code == 2
    said = " ".join(done.stderr.replace("│", " ").split())
    assert "engine-core-rose" in said
    assert "cannot be written: Not a directory" in said
