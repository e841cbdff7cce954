"""``engine-core generate --trace-layers`` on a real checkpoint, and on one with a planted NaN."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import forkserver
import pytest
import torch
from golden_fixtures import GOLDEN, GoldenPrompt, golden_llm, golden_prompts, greedy_params
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from engine_core.cli import app

NAME = "llama-gqa"
CHECKPOINT = GOLDEN / NAME
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LAYERS = ["model.layers.0", "model.layers.1", "model.layers.2"]

FAILING_LAYER = """
from engine_core_llama.model import LlamaForCausalLM


class Failing(LlamaForCausalLM):
    def build_layer(self, config, index):
        layer = super().build_layer(config, index)
        if index == 1:
            layer.register_forward_pre_hook(self.fail)
        return layer

    @staticmethod
    def fail(module, args):
        raise ValueError("no good")


MODULE_MAP = {"LlamaForCausalLM": "Failing"}
"""


def _prompt(name: str) -> GoldenPrompt:
    return next(prompt for prompt in golden_prompts(NAME) if prompt.name == name)


def _trace(
    prompt: GoldenPrompt, *arguments: str, model: Path = CHECKPOINT, code: int = 0
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine_core.cli", "generate", str(model), "--trace-layers"]
    ids = ",".join(map(str, prompt.input_ids))
    options = ["--skip-tokenizer-init", "--kv-cache-memory", "64MiB", "--dtype", "float32"]
    sampling = ["--temperature", "0", "--ignore-eos", "--max-tokens", "4"]
    done = forkserver.run(
        [*command, "--token-ids", ids, *options, *sampling, *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def _steps(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, list[str]]]:
    """Title of each step -> name of each layer -> the other cells of its line."""
    steps: dict[str, dict[str, list[str]]] = {}
    for block in re.findall(r"^first \w+ step, .*?\n\n", done.stderr + "\n", re.S | re.M):
        title, titles, *lines = block.strip().splitlines()
        assert re.split(r"\s{2,}", titles) == [
            *("layer", "shape", "dtype", "mean", "max abs", "not finite")
        ]
        rows = [line.split() for line in lines if not line.startswith("first that")]
        steps[title] = {name: cells for name, *cells in rows}
    return steps


def _check_numbers(cells: list[str], values: torch.Tensor) -> None:
    """A line's mean and largest magnitude are those of ``values``, to the digits it shows."""
    assert float(cells[2]) == pytest.approx(float(values.mean()), rel=2e-3, abs=1e-4)
    assert float(cells[3]) == pytest.approx(float(values.abs().max()), rel=2e-3)
    assert cells[4] == "-"


def test_layers_of_the_first_prefill_and_decode_step() -> None:
    prompt = _prompt("short")
    done = _trace(prompt)
    # It changes nothing in what is generated.
    assert list(map(int, done.stdout.split())) == prompt.new_tokens[:4]
    steps = _steps(done)
    count = len(prompt.input_ids)
    assert list(steps) == [f"first prefill step, {count} tokens", "first decode step, 1 token"]
    prefill, decode = steps.values()
    embedding = load_file(CHECKPOINT / "model.safetensors")["model.embed_tokens.weight"]
    for layers, tokens, logits in (
        (prefill, prompt.input_ids, prompt.prefill_logits[-1]),
        (decode, prompt.new_tokens[:1], prompt.step_logits[1]),
    ):
        assert [name for name in layers if name.startswith("model.layers.")] == LAYERS
        assert next(iter(layers)) == "model.embed_tokens"
        assert list(layers)[-1] == "lm_head"
        for name in LAYERS:
            assert layers[name][:2] == [f"1x{len(tokens)}x64", "float32"]
        assert layers["lm_head"][:2] == ["1x320", "float32"]
        _check_numbers(layers["model.embed_tokens"], embedding[tokens])
        _check_numbers(layers["lm_head"], logits)
    assert "first that is not finite" not in done.stderr


def test_prompt_of_one_token_is_a_prefill() -> None:
    done = _trace(_prompt("one-token"))
    assert list(_steps(done)) == ["first prefill step, 1 token", "first decode step, 1 token"]


@pytest.mark.parametrize(
    ("tensor", "value", "place"),
    [
        ("model.layers.1.mlp.down_proj.weight", torch.nan, "model.layers.1, in mlp.down_proj"),
        ("model.layers.2.self_attn.k_proj.weight", torch.inf, "model.layers.2, in self_attn."),
        ("model.norm.weight", torch.nan, "model.norm"),
    ],
)
def test_planted_value_is_named(tmp_path: Path, tensor: str, value: float, place: str) -> None:
    folder = tmp_path / "planted"
    shutil.copytree(CHECKPOINT, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor].view(-1)[7] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    done = _trace(_prompt("short"), model=folder, code=1)
    assert "not finite" in done.stderr.splitlines()[-1]
    (layers,) = _steps(done).values()
    bad = [name for name, cells in layers.items() if cells[4] != "-"]
    names = list(layers)
    # The culprit, and everything after it.
    assert bad == names[names.index(re.split(",", place)[0]) :]
    (named,) = re.findall(r"^first that is not finite: (.*)$", done.stderr, re.M)
    assert named.startswith(place)


def test_layers_before_a_failure_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "failing.py"
    file.write_text(FAILING_LAYER, encoding="utf-8")
    done = _trace(_prompt("short"), "--custom-module-map", str(file), code=1)
    (layers,) = _steps(done).values()
    assert list(layers)[-1] == "model.layers.0"
    assert "ValueError: no good" in done.stderr.splitlines()[-1]


def test_json_stays_on_stdout() -> None:
    prompt = _prompt("short")
    done = _trace(prompt, "--json")
    assert json.loads(done.stdout)["outputs"][0]["token_ids"] == prompt.new_tokens[:4]
    assert len(_steps(done)) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["one", "two"], "--trace-layers takes one prompt, got 2"),
        (["one", "--tensor-parallel-size", "2"], "leave --tensor-parallel-size out"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["generate", "model", "--trace-layers", *arguments])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


def test_only_the_steps_inside_are_traced() -> None:
    prompt = _prompt("short")
    params = greedy_params(NAME).replace(max_tokens=3)
    with golden_llm(NAME, device="cpu") as llm:
        llm.generate(prompt.input_ids, params)
        with llm.engine.trace_layers() as trace:
            pass
        llm.generate(prompt.input_ids, params)
        assert trace.steps == []
        with llm.engine.trace_layers() as trace:
            llm.generate([prompt.input_ids] * 2, params)
    assert [step.phase for step in trace.steps] == ["prefill", "decode"]
    assert trace.steps[1].num_tokens == 2
    assert trace.steps[1].layers[-1].shape == (2, 320)


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True])
def test_layers_on_a_gpu(eager: bool) -> None:
    prompt = _prompt("short")
    with golden_llm(NAME, eager=eager) as llm:
        # Plans are repeated from then on.
        llm.generate(prompt.input_ids, greedy_params(NAME).replace(max_tokens=60))
        with llm.engine.trace_layers() as trace:
            llm.generate(prompt.input_ids, greedy_params(NAME))
    for step, logits in zip(
        trace.steps, (prompt.prefill_logits[-1], prompt.step_logits[1]), strict=True
    ):
        assert [layer.name for layer in step.layers if layer.name in LAYERS] == LAYERS
        assert step.layers[-1].max_abs == pytest.approx(float(logits.abs().max()), rel=1e-3)
