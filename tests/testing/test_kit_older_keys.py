"""The kit finds what a family does not read of the rotary keys that older GPT-NeoX configs have."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from planted import run_kit

from engine_core.testing.reference import prepare
from engine_core.testing.subject import find_family

PACKAGE = "engine_core_older"
ALIASES = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
# A family's config builder; its model is not looked at.
PLUGIN = """
from engine_core import hookimpl
from engine_core.configs import RotaryConfigBuilder

requires_api = "0.3"


class Builder(RotaryConfigBuilder):
    architecture = "GPTNeoXForCausalLM"
    defaults = {
        "attention_bias": True,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "partial_rotary_factor": %(factor)r,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    aliases = %(aliases)r


@hookimpl
def module_map():
    return {"GPTNeoXForCausalLM": "engine_core_older.model.GPTNeoXForCausalLM"}


@hookimpl
def config_builders():
    return [Builder]
"""
CONFORMANCE = """
from engine_core.testing import ConformanceCase

CASES = [
    ConformanceCase(
        name="older",
        architecture="GPTNeoXForCausalLM",
        prompts=[[5, 6, 7]],
        config={
            "architectures": ["GPTNeoXForCausalLM"],
            "model_type": "gpt_neox",
            "vocab_size": 160,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
        },
    ),
]
"""


@pytest.mark.parametrize(
    ("aliases", "factor", "says"),
    [
        (ALIASES, 0.25, None),
        ({"rotary_emb_base": "rope_theta"}, 0.25, "with rotary_pct 0.5 in config.json"),
        ({"rotary_pct": "partial_rotary_factor"}, 0.25, "with rotary_emb_base 3000.0 in config"),
        (ALIASES, 0.5, "without rope_parameters in config.json hf_config.partial_rotary_factor"),
    ],
    ids=["sound", "no share", "no base", "another default"],
)
def test_rotary_keys_beside_the_object(
    aliases: dict[str, str],
    factor: float,
    says: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, metadata = tmp_path / PACKAGE, tmp_path / f"{PACKAGE}-1.0.dist-info"
    for made in (folder, metadata, tmp_path / "checkpoint"):
        made.mkdir()
    (folder / "__init__.py").touch()
    (folder / "plugin.py").write_text(PLUGIN % {"aliases": aliases, "factor": factor})
    (folder / "conformance.py").write_text(CONFORMANCE)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: engine-core-older\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(f"[engine_core]\nolder = {PACKAGE}.plugin\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    (case,) = find_family(PACKAGE).cases
    made_of = {case.name: prepare(case, tmp_path / "checkpoint", count=1)}
    failed, _ = run_kit(made_of, PACKAGE, only={"test_config_values"})
    assert bool(failed) == bool(says)
    assert says is None or says in failed["test_config_values", case.name]
