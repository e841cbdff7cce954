"""The report of check-model on a model that sees, and that the engine plans its memory alike."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from seeing_model import character, write_seeing_model
from typer.testing import CliRunner

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.check import check_model
from engine_core.cli import app
from engine_core.errors import OptionError, RequestError

runner = CliRunner(env={"COLUMNS": "100"})
GIB = 2**30
PICTURE = np.zeros((56, 56, 3), np.uint8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("check") / "m")


def test_what_it_takes_and_the_memory_of_its_encoder(model: Path) -> None:
    config = EngineConfig(max_model_len=4096, encoder_cache_tokens=2048, dtype="float32")
    report = check_model(model, config, memory=8 * GIB)
    assert report.problems == ()
    # 1280 x 28 x 28 pixels are what transformers' processor allows if the checkpoint says nothing.
    assert [each.model_dump() for each in report.media] == [
        {"kind": "image", "max_tokens": 1280, "largest": "1003520 pixels", "max_items": None},
        {
            "kind": "video",
            "max_tokens": None,
            "largest": "602112 pixels a frame",
            "max_items": None,
        },
    ]
    memory = report.memory
    assert memory is not None
    tensors = load_file(model / "model.safetensors")
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    seeing = sum(size for name, size in sizes.items() if name.startswith("visual."))
    assert 0 < seeing < sum(sizes.values()) == memory.weights_bytes
    assert memory.encoder_weights_bytes == seeing
    assert memory.encoder_cache_bytes == 2048 * 64 * 4
    # At least four patches of 1176 float32 values and their 64 hidden ones.
    assert memory.encoder_activation_bytes > 2048 * 4 * (1176 + 64) * 4
    encoder = memory.encoder_cache_bytes + memory.encoder_activation_bytes
    assert memory.cache_bytes == 8 * GIB - memory.weights_bytes - encoder

    half = check_model(model, config.replace(encoder_cache_tokens=1024), memory=8 * GIB)
    assert half.memory is not None
    assert half.memory.encoder_activation_bytes * 2 == memory.encoder_activation_bytes
    assert "1024: the largest are refused" in half.problems[0].message
    options = ["--memory", "8GiB", "--max-model-len", "4096", "--encoder-cache-tokens", "2048"]
    shown = runner.invoke(app, ["check-model", str(model), *options])
    assert shown.exit_code == 0
    assert (
        "text; image of up to 1003520 pixels (1280 tokens); video of up to 602112" in shown.output
    )
    assert "encoder" in shown.output


def test_what_it_takes_by_the_options(model: Path) -> None:
    options = ["--memory", "8GiB", "--max-model-len", "4096", "--limit-mm-per-prompt"]
    limits = '{"image": 2, "video": 0}'
    options += [limits, "--mm-processor-kwargs", '{"max_pixels": 78400}']
    shown = runner.invoke(app, ["check-model", str(model), *options])
    assert shown.exit_code == 0
    assert "text; image of up to 78400 pixels (100 tokens), 2 in a prompt\n" in re.sub(
        " +\n", "\n", shown.output
    )
    # As many fit: 2048 would be too few without the option.
    assert "media-too-large" not in shown.output

    none = EngineConfig(max_model_len=256, limit_mm_per_prompt={"image": 0, "video": 0})
    report = check_model(model, none, memory=8 * GIB)
    assert report.media == report.problems == ()
    memory = report.memory
    assert memory is not None
    assert memory.encoder_weights_bytes > 0  # these are loaded with the others
    assert memory.encoder_cache_bytes == memory.encoder_activation_bytes == 0
    assert memory.cache_bytes == 8 * GIB - memory.weights_bytes
    prompt = "".join(map(character, (5, 80, 7)))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    answers = []
    for config in (none, none.replace(limit_mm_per_prompt={})):
        with LLM(str(model), config.replace(kv_cache_memory=2**24)) as llm:
            answers.append(llm.generate(prompt, params)[0].outputs[0].token_ids)
            kinds = llm.engine.frontend.media.kinds
            assert kinds == (() if config is none else ("image", "video"))
            if config is none:
                shown_picture = {"prompt": prompt, "multi_modal_data": {"image": PICTURE}}
                with pytest.raises(RequestError, match=r"'image', and 0 are taken at most"):
                    llm.generate(shown_picture, params)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_pixels": 0}, "mm_processor_kwargs: max_pixels must be a positive integer, got 0"),
        ({"min_pixels": 2_000_000}, "min_pixels (2000000) is more than max_pixels (1003520)"),
        ({"colour": 1}, "mm_processor_kwargs: 'colour' is not one of min_pixels, max_pixels"),
    ],
)
def test_options_that_every_picture_would_be_refused_for(
    model: Path, given: dict[str, int], said: str
) -> None:
    config = EngineConfig(kv_cache_memory=2**24, mm_processor_kwargs=given)
    report = check_model(model, config)
    assert not report.will_run
    (problem,) = report.errors
    assert problem.code == "option-invalid"
    assert said in problem.message
    with pytest.raises(OptionError, match=re.escape(said)):
        LLM(str(model), config)


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"encoder_cache_tokens": 1000}, "encoder_cache_tokens is 1000"),
        ({"max_model_len": 900}, "max_model_len is 900"),
    ],
)
def test_pictures_that_are_refused(model: Path, options: dict[str, int], culprit: str) -> None:
    report = check_model(model, EngineConfig(**{"max_model_len": 4096, **options}), memory=8 * GIB)
    (problem,) = report.problems
    assert (problem.severity, problem.code) == ("warning", "media-too-large")
    assert problem.message.startswith("an image of 1003520 pixels takes 1280 tokens, and ")
    assert culprit in problem.message


def test_an_encoder_cache_that_cannot_be_is_refused_before_and_at_start_up(model: Path) -> None:
    config = EngineConfig(encoder_cache_tokens=10**12, max_model_len=64, kv_cache_memory=2**24)
    report = check_model(model, config)
    messages = [problem.message for problem in report.errors]
    assert any(message.startswith("encoder_cache_tokens makes the") for message in messages)
    with pytest.raises(OptionError, match="set encoder_cache_tokens lower"):
        LLM(str(model), config)


def test_a_text_model_has_no_encoder(tmp_path: Path) -> None:
    from serving import write_tiny_model

    config = EngineConfig(max_model_len=64)
    report = check_model(write_tiny_model(tmp_path / "text"), config, memory=GIB)
    assert report.media == ()
    assert report.memory is not None
    assert report.memory.cache_bytes == GIB - report.memory.weights_bytes
    assert report.memory.encoder_cache_bytes == report.memory.encoder_activation_bytes == 0
