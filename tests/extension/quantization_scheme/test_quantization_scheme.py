"""A quantisation scheme in a package, end to end: the core knows nothing of it."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from extension_imports import check_imports
from golden_fixtures import GOLDEN
from safetensors.torch import load_file, save_file

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.check import check_model
from engine_core.errors import ConfigError, ErrorCode, OptionError, WeightsMismatchError
from engine_core.testing.imports import check_discovery

HERE = Path(__file__).parent
PACKAGE = HERE / "engine_core_int8_groups"
GROUP = 4
BASE: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu"}
PROMPTS = [[1, 5, 9, 200], [7] * 20]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=4)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, as pip would install it."""
    info = tmp_path / "installed" / "engine_core_int8_groups-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: engine-core-int8-groups\nVersion: 0.1.0\n"
    )
    (info / "entry_points.txt").write_text(
        "[engine_core]\nint8_groups = engine_core_int8_groups.plugin\n"
    )
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.syspath_prepend(info.parent)
    yield
    for name in [name for name in sys.modules if name.startswith(PACKAGE.name)]:
        del sys.modules[name]


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[out, in]`` to codes ``[in, out]`` and scales ``[in / GROUP, out]``."""
    groups = weight.float().T.unflatten(0, (-1, GROUP))
    scales = groups.abs().amax(dim=1) / 127
    codes = (groups / scales.unsqueeze(1)).round().to(torch.int8)
    return codes.flatten(0, 1).contiguous(), scales


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """A tiny llama with codes and scales, and the same one with the numbers they stand for."""
    source = GOLDEN / "llama-gqa"
    config = json.loads((source / "config.json").read_text())
    packed: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight") or name.endswith("layers.1.mlp.down_proj.weight"):
            packed[name] = plain[name] = tensor
            continue
        codes, scales = quantize(tensor)
        packed[name.replace(".weight", ".qweight")] = codes
        packed[name.replace(".weight", ".scales")] = scales
        plain[name] = (codes * scales.repeat_interleave(GROUP, dim=0)).T.contiguous()
    ignore = ["layers.1.mlp.down_proj"]
    settings = {"quant_method": "int8_groups", "group_size": GROUP, "ignore": ignore}
    folders = tmp_path / "packed", tmp_path / "plain"
    for folder, tensors, more in (
        (folders[0], packed, {"quantization_config": settings}),
        (folders[1], plain, {}),
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, **more}))
        save_file(tensors, folder / "model.safetensors")
    return folders


def run(model: Path, **options: Any) -> tuple[list[list[int]], list[dict[int, float]]]:
    config = EngineConfig(**BASE, kv_cache_memory="8MiB", **options)
    with LLM(str(model), config) as llm:
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
    return (
        [output.token_ids for output in outputs],
        [
            {token: entry.logprob for token, entry in step.items()}
            for output in outputs
            for step in output.logprobs
        ],
    )


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("size", [1, 2], ids=["one-rank", "two-ranks"])
def test_it_is_dequantising_and_multiplying(models: tuple[Path, Path], size: int) -> None:
    packed, plain = models
    tokens, logprobs = run(packed, tensor_parallel_size=size)
    expected_tokens, expected = run(plain)
    assert tokens == expected_tokens
    for ours, theirs in zip(logprobs, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.usefixtures("installed")
def test_its_epilogue_is_asked_for(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every gate and up of each layer, and with the same results."""
    method = importlib.import_module(f"{PACKAGE.name}.scheme").Int8GroupsMethod
    fused, asked = method.apply_with, []

    def counted(self: Any, layer: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        asked.append(layer)
        return fused(self, layer, x, *rest)

    packed, plain = models
    monkeypatch.setattr(method, "apply_with", counted)
    assert run(packed)[0] == run(plain)[0]
    assert len({id(layer) for layer in asked}) == 3


@pytest.mark.usefixtures("installed")
def test_the_check_plans_what_is_stored(models: tuple[Path, Path]) -> None:
    packed, _ = models
    report = check_model(packed, EngineConfig(**BASE))
    assert report.exit_code == 0
    assert "dtype-converted" not in {problem.code for problem in report.problems}
    assert report.memory is not None
    stored = load_file(packed / "model.safetensors").values()
    assert report.memory.weights_bytes == sum(tensor.nbytes for tensor in stored)


@pytest.mark.usefixtures("installed")
def test_random_weights_need_no_file(models: tuple[Path, Path]) -> None:
    packed, _ = models
    (packed / "model.safetensors").unlink()
    tokens, _ = run(packed, load_format="dummy")
    assert all(len(row) == GREEDY.max_tokens for row in tokens)


@pytest.mark.usefixtures("installed")
def test_what_does_not_fit_is_refused(models: tuple[Path, Path]) -> None:
    packed, plain = models
    for model, option, message in (
        (packed, "int8", "'int8' is asked for, but .* quantised by 'int8_groups'"),
        (plain, "int8_groups", "is for checkpoints that are quantised so"),
        (plain, "fp6", r"'gguf' \(engine-core-llm\),.* 'int8_groups' \(int8_groups\)"),
    ):
        with pytest.raises(OptionError, match=message):
            run(model, quantization=option)
        config = EngineConfig(**BASE, quantization=option)
        said = [p.message for p in check_model(model, config).errors if p.code == "option-invalid"]
        assert len(said) == 1
        assert re.search(message, said[0])
    assert run(packed, quantization="int8_groups")[0] == run(packed)[0]
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["group_size"] = 12
    (packed / "config.json").write_text(json.dumps(config))
    wrong = r"k_proj.scales: has shape \[16, 16\], the model wants \[6, 16\]"
    with pytest.raises(WeightsMismatchError, match=wrong):
        run(packed)
    with pytest.raises(OptionError, match=r"o_proj: in_features .*\(32 .* divisible by 12"):
        run(packed, tensor_parallel_size=2)


def test_without_the_package_the_checkpoint_is_refused(models: tuple[Path, Path]) -> None:
    packed, _ = models
    with pytest.raises(ConfigError, match=r"says 'int8_groups'.* cannot be read") as caught:
        run(packed)
    assert caught.value.code is ErrorCode.QUANTIZATION


@pytest.mark.usefixtures("installed")
def test_discovery_brings_no_torch() -> None:
    check_discovery(PACKAGE.name, f"{PACKAGE.name}.plugin")


@pytest.mark.parametrize("file", ["plugin.py", "scheme.py"])
def test_it_imports_public_names_only(file: str) -> None:
    check_imports(PACKAGE / file)
