"""Import rules that the contract cannot check: each ``__init__``, and names in the source."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "engine_core").rglob("*.py"))
FAMILIES = sorted(path.parent for path in ROOT.glob("plugins/*/engine_core_*/__init__.py"))
COMPAT = sorted(path.parent for path in ROOT.glob("compat/*/engine_core_*/__init__.py"))
HEAVY = {"torch", "transformers", "triton"}

LIGHT = [
    "import engine_core",
    "from engine_core import hookimpl",
    "from engine_core import EngineConfig, SamplingParams, RequestOutput",
    "import engine_core.cache",
    "import engine_core.checkpoint",
    "import engine_core.cli",
    "import engine_core.configs",
    "import engine_core.inputs",
    "import engine_core.parsers",
    "import engine_core.registry",
    "from engine_core.registry import build_registry; build_registry(plugin_errors='strict')",
    "import engine_core.scheduler",
    "import engine_core.text",
    "import engine_core.workers",
    *(f"import {family.name}.plugin" for family in FAMILIES),
    *(f"import {family.name}.config" for family in FAMILIES),
]


IMPORT_EACH = """
import sys
for statement in {statements!r}:
    exec(statement)
    for name in sorted(sys.modules.keys() & {heavy!r}):
        print(f"{{statement!r}} brings {{name}}")
"""


def test_nothing_light_brings_a_heavy_module() -> None:
    """Import all in one process: what one brings is there after it."""
    script = IMPORT_EACH.format(statements=LIGHT, heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == []


def test_discovery_is_light() -> None:
    # Of its time, pydantic's import would be more than the half.
    script = (
        "import sys; from engine_core.registry import build_registry; "
        "registry = build_registry(plugin_errors='strict'); "
        "print(*registry.architectures, *sys.modules.keys() & {'pydantic', 'jinja2', 'numpy'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    words = set(done.stdout.split())
    assert {"LlamaForCausalLM", "BloomForCausalLM"} <= words
    assert not words & {"pydantic", "jinja2", "numpy"}


def test_an_engine_in_this_process_brings_no_parts_of_others() -> None:
    others = {"engine_core.engine.async_engine", "rich", "numba", "llvmlite", "transformers"}
    others.add("jinja2")  # which templates take
    script = f"import sys; from engine_core import LLM; print(*sys.modules.keys() & {others!r})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


# Families that the core must not know. "llama3" is also a kind of rope scaling, written so in the
# configs of several families, llama-gguf-split a tool that a message sends people to, ExLlama the
# kernels that packed checkpoints name, and fix_mistral_regex a key of tokenizer_config.json.
FAMILY_NAMES = re.compile(
    r"(?<!ex)llama(?!3\b|-gguf-split)|qwen|bloom|chatglm|glm\d|(?<!fix_)mistral|mixtral|internvl|internlm|deepseek|gemma|falcon"
    r"|baichuan|starcoder|smollm|gpt_?neox|gpt_?2|minicpm",
    re.IGNORECASE,
)

# GGUF files name a tokenizer's kind after the family that had it first; many families share one.
NAMES_TOKENIZERS = ROOT / "engine_core" / "checkpoint" / "gguf_tokenizer.py"


def _docstrings(tree: ast.AST) -> set[int]:
    """Ids of every string that stands alone as a statement."""
    return {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def _words(tree: ast.AST) -> list[tuple[int, str]]:
    """Line and text of every identifier and string literal that is no docstring."""
    documentation = _docstrings(tree)
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for field in ("id", "name", "attr", "arg", "module", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                found.append((line, value))
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documentation
        ):
            found.append((line, node.value))
    return found


def test_core_names_no_family() -> None:
    sources = [path for path in SOURCES if path != NAMES_TOKENIZERS]
    assert [path for path in sources if FAMILY_NAMES.search(path.name)] == []
    named = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in sources
        for line, word in _words(ast.parse(path.read_text(encoding="utf-8")))
        if FAMILY_NAMES.search(word)
    ]
    assert named == []


def test_family_names_are_found() -> None:
    tree = ast.parse(
        '"""Speaks of Llama."""\nif architecture == "LlamaForCausalLM":\n    load_qwen()\n'
        'scaling = "llama3"\n'
    )
    named = [word for _, word in _words(tree) if FAMILY_NAMES.search(word)]
    assert sorted(named) == ["LlamaForCausalLM", "load_qwen"]


def test_import_contract_covers_every_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    covered = settings["tool"]["importlinter"]["root_packages"]
    assert sorted(covered) == sorted(
        ["engine_core", *(package.name for package in FAMILIES + COMPAT)]
    )
