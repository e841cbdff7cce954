"""A GGUF file of many types whose blocks a GPU multiplies as they are."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf_blocks import write_mixed
from torch import Tensor

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.checkpoint import open_checkpoint
from engine_core.engine import kept_kernels
from engine_core.kernels import GPU, GroupWeight
from engine_core.nn.quantization import BlockMatrix
from engine_core.registry import build_registry
from engine_core.runtime import source
from engine_core.runtime.loader import build_on_meta, load_weights, match_weights
from engine_core.runtime.packing import weight_bytes
from engine_core.step_context import BuildContext
from engine_core.testing.tiny_model import TinyModel
from engine_core_llama.gguf import LlamaGGUFAdapter

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed(tmp_path_factory.mktemp("mixed") / "mixed.gguf")


def model_of(path: Path, device: torch.device | None) -> tuple[torch.nn.Module, int]:
    """Loaded on the CPU, in the layout of ``device`` or as numbers, and its planned bytes."""
    registry = build_registry(())
    adapters = {"llama": LlamaGGUFAdapter}
    checkpoint = open_checkpoint(path, gguf_adapters=adapters, dtype="float32", convert=False)
    scheme = None
    if device is not None:
        scheme = registry.quantization_scheme("gguf")
        scheme.check_device(device)
    config = registry.model_config(checkpoint.hf_config, path)
    model_class = registry.model_class(config.architecture)
    model = build_on_meta(model_class, config, BuildContext(dtype=torch.float32), scheme)
    matched, _ = match_weights(model, checkpoint, "it", scheme)
    planned = weight_bytes(model)
    load_weights(model, matched, "it", CPU, pack=True)
    return model, planned


def logits(model: torch.nn.Module) -> Tensor:
    tiny = TinyModel(model, None)
    sequences = [tiny.sequence([1, 5, 9, 80, 7, 7, 3], 7)]
    return torch.cat(tiny.run(sequences, [[(0, 0, 7)]]).logits)


def test_a_gpus_start_says_what_keeps_blocks(
    mixed: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, and the file is unpacked."""
    monkeypatch.setattr(source, "gpu_of", lambda device: GPU.of_capability((9, 0)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    registry, config = build_registry(), EngineConfig(dtype="bfloat16")
    with caplog.at_level(logging.INFO, "engine_core.runtime.source"):
        checkpoint = source.open_files(str(mixed), config, registry, CUDA)
        assert checkpoint.gguf is None
        [line] = [each.message for each in caplog.records if "unpacked" in each.message]
        assert "quantization='gguf' would keep them" in line
        caplog.clear()
        unpacked = config.replace(quantization="unpacked")
        source.open_files(str(mixed), unpacked, registry, CUDA)
    assert not [each for each in caplog.records if "quantization" in each.message]


def test_blocks_in_a_gpus_layout_are_the_numbers(
    mixed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = model_of(mixed, None)
    with caplog.at_level(logging.WARNING):
        model, planned = model_of(mixed, CUDA)
    (line,) = [record.message for record in caplog.records if "unpacked" in record.message]
    assert line.startswith("1 tensors in IQ4_NL blocks are unpacked")
    layer = model.model.layers[0]
    for linear in (layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
        assert isinstance(linear.packed, GroupWeight)
    assert not isinstance(layer.self_attn.qkv_proj.packed, GroupWeight | BlockMatrix)
    for vocabulary in (model.model.embed_tokens, model.lm_head):
        assert isinstance(vocabulary.packed, GroupWeight)
    numbers = dict(plain.named_modules())
    for name, module in model.named_modules():
        if getattr(module, "packed", None) is not None:
            assert torch.equal(module.weight, numbers[name].weight), name
    expected = logits(plain)
    assert (logits(model) - expected).abs().max() < 1e-4 * expected.abs().max()
    packed = {id(m.packed): m.packed.nbytes for m in model.modules() if getattr(m, "packed", None)}
    assert planned == sum(param.nbytes for param in model.parameters()) + sum(packed.values())


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_the_engine_on_a_gpu(mixed: Path, eager: bool) -> None:
    """Blocks are kept for whoever asks; bfloat16 rounds both, at other places."""
    found = []
    for quantization in ("gguf", None):
        config = EngineConfig(
            device="cuda", quantization=quantization, skip_tokenizer_init=True, eager=eager,
            kv_cache_memory="64MiB",
        )  # fmt: skip
        greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=5)
        with LLM(str(mixed), config) as llm:
            (model,) = llm.apply_model(lambda model: model)
            kept = isinstance(model.lm_head.packed, GroupWeight)
            assert kept == (quantization is not None)
            outputs = llm.generate([[1, 5, 9], list(range(90))], greedy)
        found.append([output.outputs[0] for output in outputs])
    for ours, theirs in zip(*found, strict=True):
        first, second = ours.logprobs[0], theirs.logprobs[0]
        assert first.keys() & second.keys()
        for token in first.keys() & second.keys():
            off = math.exp(first[token].logprob) - math.exp(second[token].logprob)
            assert abs(off) < 0.03


@pytest.mark.parametrize(("scheme", "noted"), [("int8", False), ("gguf", True)])
def test_notes_of_kept_kernels_know_blocks_only_where_they_are_kept(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, noted: bool
) -> None:
    """A process that converts nothing notes what the engine, which converts, finds."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source: Any = SimpleNamespace(
        model_config=SimpleNamespace(model_dump_json=lambda: "{}"),
        model_class=torch.nn.Module,
        dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        scheme=build_registry(()).quantization_scheme(scheme),
    )
    adapters = {"llama": LlamaGGUFAdapter}
    opened = [
        open_checkpoint(mixed, gguf_adapters=adapters, convert=each) for each in (False, True)
    ]
    config, gpu = EngineConfig(quantization=scheme), GPU.of_capability((9, 0))
    source.checkpoint = opened[0]
    pytest.importorskip("triton", reason="triton is not installed")
    kept_kernels.keep(kept_kernels.made_for(source, config, gpu), [])
    assert kept_kernels.may_be_kept(source, config, gpu)
    source.checkpoint = opened[1]
    assert kept_kernels.may_be_kept(source, config, gpu) is not noted
