"""``--deep`` and ``--against``: the first part that differs is named."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from check_models import Model
from checkpoint_files import write_llama_gguf
from golden_fixtures import GOLDEN
from safetensors.numpy import load_file
from typer.testing import CliRunner

from engine_core import LLM, EngineConfig
from engine_core.check import check_model
from engine_core.cli import app
from engine_core.errors import ConfigError

IDS = EngineConfig(skip_tokenizer_init=True)

# The second of three layers has another scale than the checkpoint's family.
WRONG = """
from engine_core_llama.model import LlamaForCausalLM

class Wrong(LlamaForCausalLM):
    def build_layer(self, config, index):
        layer = super().build_layer(config, index)
        if index == 1:
            layer.self_attn.attend.scale *= 1.5
        return layer

MODULE_MAP = {"LlamaForCausalLM": "Wrong"}
"""


@pytest.fixture
def wrong(tmp_path: Path) -> EngineConfig:
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    return IDS.replace(custom_module_map=str(file))


SAME = ["llama-gqa", "llama-yarn", "bloom-6heads", "qwen2-swa", "gemma2-caps", "gemma3-ropes"]


@pytest.mark.parametrize("name", SAME)
def test_the_same_as_transformers(name: str) -> None:
    report = check_model(GOLDEN / name, IDS, deep=True)
    assert report.exit_code == 0
    comparison = report.comparison
    assert comparison is not None
    assert comparison.same
    assert comparison.reference.startswith("transformers ")
    assert [prompt.num_tokens for prompt in comparison.prompts] == [1, 7, 33]
    layers = json.loads((GOLDEN / name / "config.json").read_text())
    count = layers.get("num_hidden_layers") or layers["n_layer"]
    for prompt in comparison.prompts:
        expected = ["embedding", *(f"layer {index}" for index in range(count)), "logits"]
        assert [part.part for part in prompt.parts] == expected
        for part in prompt.parts:
            assert part.relative is not None
            assert part.relative < 1e-5


def test_the_first_layer_that_differs_is_named(wrong: EngineConfig) -> None:
    report = check_model(GOLDEN / "llama-gqa", wrong, deep=True)
    assert report.exit_code == 3
    assert report.will_run
    assert report.comparison is not None
    assert not report.comparison.same
    one, *longer = report.comparison.prompts
    # One token attends to itself, whatever the scale.
    assert one.first_difference is None
    for prompt in longer:
        assert prompt.first_difference == "layer 1"
        differs = {part.part: part.differs for part in prompt.parts}
        assert differs == {
            "embedding": False,
            "layer 0": False,
            "layer 1": True,
            "layer 2": True,
            "logits": True,
        }
    assert {problem.code for problem in report.errors} == {"comparison-differs"}
    assert "layer 1 is the first part that differs" in report.errors[0].message


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """To int8 with a scale in bfloat16 for each row."""
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16().float()
    return (weight / scales).round().clamp(-127, 127) * scales


def test_what_int8_costs_is_what_rounded_weights_cost_transformers() -> None:
    from transformers import AutoModelForCausalLM

    folder = GOLDEN / "llama-gqa"
    config = IDS.replace(quantization="int8", dtype="bfloat16")
    report = check_model(folder, config, deep=True)
    assert report.exit_code == 0
    cost = report.quantization_cost
    assert cost is not None
    draw, vocabulary = random.Random(0), json.loads((folder / "config.json").read_text())
    prompts = [[draw.randrange(vocabulary["vocab_size"]) for _ in range(n)] for n in (64, 32)]
    distributions = []
    for change in (lambda weight: weight, rounded):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for name, param in model.named_parameters():
            # The inputs of down_proj are no multiple of 32, which keep their numbers.
            if param.dim() == 2 and param.shape[1] % 32 == 0 and name.endswith(".weight"):
                param.data = change(param.data)
        with torch.inference_mode():
            logits = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
        distributions.append(torch.cat(logits).log_softmax(-1))
    exact, other = distributions
    divergence = (exact.exp() * (exact - other)).sum(-1).mean().item()
    equal = (exact.argmax(-1) == other.argmax(-1)).float().mean().item()
    # Products of few rows are in bfloat16.
    assert cost.mean_kl == pytest.approx(divergence, rel=0.3)
    assert cost.equal_tokens == pytest.approx(equal, abs=0.04)
    done = CliRunner().invoke(
        app,
        ["check-model", str(folder), "--skip-tokenizer-init", "--deep", "--quantization", "int8"],
    )
    share = f"the same after {cost.equal_tokens:.1%} of 96 random tokens, mean KL "
    assert share in done.stdout


def test_overrides_go_to_both(model: Model) -> None:
    config = IDS.replace(hf_overrides={"rope_theta": 77.0})
    report = check_model(str(model), config, deep=True)
    assert report.comparison is not None
    assert report.comparison.same


def test_a_tied_head_that_is_another_is_refused_and_runs_untied(model: Model) -> None:
    model.json("config.json", tie_word_embeddings=True)
    pair = {"lm_head.weight", "model.embed_tokens.weight"}
    unread = check_model(str(model), IDS)
    assert unread.exit_code == 0
    [warning] = [p for p in unread.warnings if p.code == "tied-head-unread"]
    assert set(warning.names) == pair

    message = (
        r"(?s)ties (?=.*lm_head\.weight)(?=.*model\.embed_tokens\.weight).* they differ; set tie"
    )
    with pytest.raises(ConfigError, match=message):
        LLM(str(model), IDS)
    read = check_model(str(model), IDS, deep=True)
    assert read.exit_code == 1
    assert not read.will_run
    [problem] = read.errors
    assert problem.code == "config-invalid"
    assert re.search(message, problem.message)

    untied = IDS.replace(hf_overrides={"tie_word_embeddings": False})
    report = check_model(str(model), untied, deep=True)
    assert report.exit_code == 0
    assert report.comparison is not None
    assert report.comparison.same


def test_a_tied_head_that_is_stored_again_is_read(model: Model) -> None:
    model.json("config.json", tie_word_embeddings=True)
    model.tensors(
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        )
    )
    report = check_model(str(model), IDS, deep=True)
    assert report.exit_code == 0
    assert "tied-head-unread" not in {problem.code for problem in report.problems}
    assert report.comparison is not None
    assert report.comparison.same


def test_a_tied_head_that_stands_alone_is_the_embedding(model: Model) -> None:
    model.json("config.json", tie_word_embeddings=True)
    model.tensors(lambda tensors: tensors.pop("model.embed_tokens.weight"))
    report = check_model(str(model), IDS, deep=True)
    assert report.exit_code == 0
    assert report.comparison is not None
    assert report.comparison.same


def test_gguf_against_transformers(model: Model) -> None:
    config = json.loads((model.folder / "config.json").read_text())
    path = write_llama_gguf(
        model.folder / "m.gguf", load_file(model.weights), config, quantise="F16"
    )
    report = check_model(path, IDS, deep=True)
    assert report.comparison is not None
    assert report.comparison.same


def test_a_family_that_transformers_does_not_know() -> None:
    report = check_model(GOLDEN / "chatglm1-tiny", IDS, deep=True)
    assert report.exit_code == 4
    assert report.comparison is None
    [problem] = report.warnings
    assert problem.code == "comparison-unavailable"
    assert "'chatglm'" in problem.message


def test_a_model_that_cannot_be_loaded_is_not_compared(model: Model) -> None:
    model.tensors(lambda tensors: tensors.pop("lm_head.weight"))
    report = check_model(str(model), deep=True)
    assert report.exit_code == 1
    assert report.comparison is None


def test_a_missing_tokenizer_does_not_matter() -> None:
    report = check_model(GOLDEN / "llama-gqa", deep=True)
    assert report.exit_code == 1
    assert report.comparison is not None
    assert report.comparison.same


@pytest.mark.parametrize(
    "name", ["llama-gqa", "llama-dynamic", "chatglm1-realids", "chatglm2-tiny"]
)
def test_the_same_as_golden_outputs(name: str) -> None:
    file = GOLDEN / name / "expected.json"
    report = check_model(GOLDEN / name, IDS, against=file)
    assert report.exit_code == 0
    assert report.comparison is not None
    assert report.comparison.same
    assert report.comparison.reference == str(file)
    names = [prompt["name"] for prompt in json.loads(file.read_text())["prompts"]]
    assert [prompt.name for prompt in report.comparison.prompts] == names


def test_not_the_golden_outputs(wrong: EngineConfig) -> None:
    arguments = ["check-model", str(GOLDEN / "llama-gqa"), "--skip-tokenizer-init"]
    arguments += ["--against", str(GOLDEN / "llama-gqa" / "expected.json")]
    arguments += ["--custom-module-map", wrong.custom_module_map[0]]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 3
    assert "differs first at logits" in result.stdout
    assert "It runs, but its outputs are not those of the reference." in result.stdout


def test_another_continuation(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "llama-gqa" / "expected.safetensors", tmp_path)
    expected = json.loads((GOLDEN / "llama-gqa" / "expected.json").read_text())
    expected["prompts"] = expected["prompts"][:2]
    right = expected["prompts"][1]["new_tokens"][5]
    expected["prompts"][1]["new_tokens"][5] = (right + 1) % 320
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    report = check_model(GOLDEN / "llama-gqa", IDS, against=tmp_path / "expected.json")
    assert report.exit_code == 3
    assert report.comparison is not None
    first, second = report.comparison.prompts
    assert first.first_wrong_token is None
    assert (second.first_difference, second.first_wrong_token) == (None, 5)


def test_golden_outputs_of_another_vocabulary() -> None:
    other = GOLDEN / "chatglm1-realids" / "expected.json"
    report = check_model(GOLDEN / "llama-gqa", IDS, against=other)
    assert report.exit_code == 4
    [problem] = report.warnings
    assert "outside the vocabulary of 320" in problem.message
    assert problem.hint == "Check that the FILE of --against is of this model."
