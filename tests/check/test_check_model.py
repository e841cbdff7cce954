"""Reports of check-model for valid models, as text and JSON."""

from __future__ import annotations

import copy
import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import torch
from check_models import Model
from checkpoint_files import write_llama_gguf
from golden_fixtures import GOLDEN
from packed_checkpoints import FORMATS
from safetensors.numpy import load_file
from typer.testing import CliRunner

from engine_core import LLM, EngineConfig
from engine_core.check import CheckReport, Problem, check_model
from engine_core.check.gpus import find_gpu, gpu_names
from engine_core.check.report import HINTS, Code
from engine_core.cli import app
from engine_core.errors import CacheMemoryError, ConfigError, OptionError
from engine_core.nn.packing import onednn_multiplies
from engine_core.nn.quantization import Int4Scheme
from engine_core.nn.quantization.facts import facts_of
from engine_core.registry import build_registry

DOCUMENT = Path(__file__).parents[2] / "docs" / "check-model.md"
runner = CliRunner(env={"COLUMNS": "100"})
GIB = 2**30


def found(report: CheckReport) -> list[tuple[str, str]]:
    return [(problem.severity, problem.code) for problem in report.problems]


def test_a_good_model(model: Model) -> None:
    report = check_model(str(model))
    assert report.problems == ()
    assert (report.exit_code, report.will_run) == (0, True)
    assert report.model_info is not None
    assert report.model_info.architecture == "LlamaForCausalLM"
    assert report.model_info.plugin == "llama"
    assert report.model_info.model_class == "engine_core_llama.model.LlamaForCausalLM"
    values = json.loads((model.folder / "config.json").read_text())
    config = report.model_info.config
    assert config["num_layers"] == values["num_hidden_layers"]
    assert config["hf_config"]["hidden_size"] == values["hidden_size"]
    tensors = load_file(model.weights)
    assert report.weights is not None
    assert report.weights.num_tensors == len(tensors)
    assert report.weights.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert report.weights.num_parameters == sum(tensor.size for tensor in tensors.values())
    assert report.weights.dtypes == {"float32": len(tensors)}
    assert report.tokenizer is not None
    assert report.tokenizer.vocab_size == 259
    assert report.tokenizer.eos_token_id == 2
    assert report.tokenizer.chat_template == "checkpoint"


@pytest.mark.parametrize(
    "name", sorted(path.parent.name for path in GOLDEN.glob("*/model.safetensors"))
)
def test_every_golden_model_runs(name: str) -> None:
    report = check_model(GOLDEN / name, EngineConfig(skip_tokenizer_init=True))
    assert report.errors == ()
    assert report.tokenizer is None


def test_it_is_the_engines_own_plan(model: Model) -> None:
    settings: dict[str, Any] = {"kv_cache_memory": 2**20, "block_size": 8, "max_num_seqs": 4}
    report = check_model(str(model), EngineConfig(**settings))
    assert report.memory is not None
    with LLM(str(model), **settings) as llm:
        assert report.memory.max_model_len == llm.engine.max_model_len
        assert report.memory.cache_bytes == 2**20
        plan = llm.engine.cache_plan
        assert report.memory.kv_bytes_per_token * 8 == plan.bytes_per_block


def test_memory_given(model: Model) -> None:
    weights = sum(tensor.nbytes for tensor in load_file(model.weights).values())
    # 3 layers, 2 key-value heads, keys and values of 8 numbers of 4 bytes.
    per_token = 3 * 2 * (8 + 8) * 4
    config = EngineConfig(block_size=16, max_model_len=100)
    # 23 blocks of 16 tokens, one of which is never handed out; a sequence takes 7.
    memory = check_model(str(model), config, memory=weights + 23 * 16 * per_token).memory
    assert memory is not None
    assert memory.source == "memory"
    assert memory.weights_bytes == weights
    assert memory.kv_bytes_per_token == per_token
    assert memory.max_tokens == 22 * 16
    assert memory.full_sequences == 3
    assert memory.max_model_len == 100
    [group] = memory.groups
    assert (group.num_layers, group.num_kv_heads, group.window) == (3, 2, None)


def test_layers_of_two_kinds() -> None:
    report = check_model(GOLDEN / "qwen2-swa", EngineConfig(skip_tokenizer_init=True))
    assert report.memory is not None
    assert [(group.num_layers, group.window) for group in report.memory.groups] == [
        (1, None),
        (2, 16),
    ]


def test_too_little_memory_for_the_weights(model: Model) -> None:
    report = check_model(str(model), memory=100_000)
    assert found(report) == [("error", "memory-weights-too-large")]
    assert "the memory given has 100000" in report.problems[0].message
    assert report.memory is not None
    assert (report.memory.max_tokens, report.memory.full_sequences) == (0, 0)
    assert report.exit_code == 1


def test_too_little_memory_for_the_cache(model: Model) -> None:
    config = EngineConfig(max_model_len=1000, kv_cache_memory=100_000)
    report = check_model(str(model), config)
    assert found(report) == [("error", "memory-cache-too-small")]
    with pytest.raises(CacheMemoryError) as caught:
        LLM(str(model), config)
    assert report.errors[0].message == str(caught.value)


def test_a_cache_for_no_length_at_all(model: Model) -> None:
    config = EngineConfig(kv_cache_memory=1024)
    [problem] = check_model(str(model), config).errors
    assert problem.code == "memory-cache-too-small"
    assert problem.message.endswith("kv_cache_memory is 1024: raise it")
    with pytest.raises(CacheMemoryError) as caught:
        LLM(str(model), config)
    assert problem.message == str(caught.value)


def check_refused_option(model: Model, config: EngineConfig) -> None:
    """An option is all that is wrong, and the engine says the same of it."""
    [problem] = check_model(str(model), config).errors
    assert problem.code == "option-invalid"
    with pytest.raises(OptionError) as caught:
        LLM(str(model), config)
    assert problem.message == str(caught.value)


@pytest.mark.parametrize("settings", [{}, {"kv_cache_memory": 10**16}])
@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
def test_too_much_at_once_for_the_memory(model: Model, name: str, settings: dict[str, Any]) -> None:
    check_refused_option(model, EngineConfig(**{name: 10**12}, **settings))


def test_a_revision_of_a_folder(model: Model) -> None:
    check_refused_option(model, EngineConfig(revision="main"))


def test_an_option_that_does_not_fit_is_not_the_configs_fault(model: Model) -> None:
    wrong: dict[str, tuple[dict[str, Any], str | None]] = {
        "of this size cannot be split over 3 ranks": ({"tensor_parallel_size": 3}, None),
        "'gguf' keeps the blocks": ({"quantization": "gguf"}, "H100"),
        "above the 2048 tokens": ({"max_model_len": 4096}, None),
        "two names of one object": (
            {"hf_overrides": {"rope_scaling": {"factor": 2}, "rope_parameters": {"factor": 4}}},
            None,
        ),
    }
    for message, (settings, gpu) in wrong.items():
        [problem] = check_model(str(model), EngineConfig(**settings), gpu=gpu).errors
        assert (problem.code, problem.hint) == (
            "option-invalid",
            "Change the option that is named.",
        )
        assert message in problem.message


def test_a_quantization_that_a_gpu_has_not_hides_no_other_fault(model: Model) -> None:
    model.json("config.json", num_key_value_heads=3)
    report = check_model(str(model), EngineConfig(quantization="gguf"), gpu="H100")
    assert {problem.code for problem in report.errors} == {"option-invalid", "config-invalid"}


def test_what_is_known_of_a_quantisation_is_said(model: Model) -> None:
    """By the device that is planned for, and the model's width."""

    def said(quantization: str, gpu: str | None) -> set[tuple[str, str, bool]]:
        report = check_model(str(model), EngineConfig(quantization=quantization), gpu=gpu)
        found = [each for each in report.problems if each.code.startswith("quantization")]
        return {(each.code, each.severity, "as small as" in each.message) for each in found}

    loses, slower = ("quantization-loses", "warning", True), "quantization-slower"
    assert said("int4", None) == {loses, (slower, "info", False)}
    assert said("int8", None) == {(slower, "info", False)}
    assert said("int4", "H100") == {loses, (slower, "info", False)}
    assert said("int8", "T4") == {(slower, "warning", False)}
    assert said("int8", "H100") == {(slower, "warning", False)}
    assert said("fp8", None) == {loses, (slower, "warning", False)}
    assert said("fp8", "H100") == {loses}
    assert said("fp8", "L40S") == {loses, (slower, "warning", False)}
    wide = facts_of(Int4Scheme("int4"), torch.device("cpu"), 4096)
    assert not any(fact.loses for fact in wide)


_INTEGERS = "compressed-tensors-int"


def _settings(kind: str, **more: Any) -> dict[str, Any]:
    """Those of one of the packers' checkpoints, its weights changed."""
    settings: dict[str, Any] = copy.deepcopy(FORMATS[kind].settings)
    if "config_groups" in settings:
        settings["config_groups"]["group_0"]["weights"] |= more
        return settings
    return settings | more


def _floats(inputs: bool, **weights: Any) -> dict[str, Any]:
    given = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", **weights}
    tokens = given | {"strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": given,
        "input_activations": tokens if inputs else None,
    }
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def _exported(method: str) -> dict[str, Any]:
    settings = _settings("compressed, zeros") | {"quant_method": method}
    eight = _settings("compressed, 8 bits")["config_groups"]["group_0"]
    settings["config_groups"]["vocabulary"] = eight | {"targets": ["lm_head"]}
    return settings


@pytest.mark.parametrize(
    ("name", "settings", "on_cpu", "on_gpu", "slower"),
    [
        ("awq", _settings("awq"), "0.52", "0.52", "groups other than 128"),
        ("awq", _settings("awq", group_size=128), "not measured", "not measured", "1.3 with 192"),
        ("awq", _settings("awq of whole rows"), "0.81", "0.81", "groups other than 128"),
        ("gptq", _settings("gptq"), "0.52", "0.52", "groups other than 128"),
        ("gptq", _settings("gptq", group_size=128, desc_act=True), "not measured", "not measured",
         "groups whose inputs are no neighbours, as act-order"),
        ("gptq", _settings("gptq", group_size=128, desc_act=True, static_groups=True),
         "not measured", "not measured", "1.3 with 192"),
        ("gptq", _settings("gptq", group_size=-1, desc_act=True), "0.81", "0.81",
         "groups other than 128"),
        ("gptq", _settings("gptq of 8 bits"), None, None, "not measured with 8 bits in"),
        (_INTEGERS, _settings("compressed"), "0.52", "0.52", "groups other than 128"),
        (_INTEGERS, _settings("compressed", group_size=128), "not measured", "not measured",
         "1.3 with 192"),
        (_INTEGERS, _settings("compressed", group_size=128, actorder="group"), "not measured",
         "not measured", "groups whose inputs are no neighbours, as act-order"),
        (_INTEGERS, _settings("compressed", group_size=128, actorder="static"), "not measured",
         "not measured", "1.3 with 192"),
        (_INTEGERS, _settings("compressed by rows"), "0.81", "0.81", "groups other than 128"),
        (_INTEGERS, _settings("compressed, 8 bits"), None, None, "1.1 with 160 to 256"),
        (_INTEGERS, _settings("int8 and activations"), None, "0.045", "activations are quantised"),
        (_INTEGERS, _exported("compressed-tensors"), "0.060", "0.060", "groups other than 128"),
        (_INTEGERS, _exported("engine-core"), None, None, "groups other than 128"),
        ("fp8", {"quant_method": "fp8"}, "0.019, and 0.005", "0.031", None),
        ("fp8", {"quant_method": "fp8", "weight_block_size": [128, 128]}, "0.019, and 0.005",
         "0.019, and 0.004", None),
        ("compressed-tensors", _floats(True), "0.019, and 0.005", "0.031", None),
        ("compressed-tensors", _floats(False), "0.019, and 0.005", "0.019, and 0.004", None),
    ],
)  # fmt: skip
def test_each_form_has_measurements_of_its_own(
    name: str, settings: dict[str, Any], on_cpu: str | None, on_gpu: str | None, slower: str | None
) -> None:
    """Losses on a CPU and on an H200, and the time that the latter takes."""
    scheme = build_registry().quantization_scheme(name, settings)
    for device, loses in (("cpu", on_cpu), ("cuda", on_gpu)):
        facts = list(facts_of(scheme, torch.device(device), 576, (9, 0)))
        texts = [fact.text for fact in facts if fact.loses]
        assert len(texts) == (loses is not None), texts
        assert loses is None or loses in texts[0]
        timed = [fact.text for fact in facts if not fact.loses and device == "cuda"]
        assert len(timed) == (device == "cuda" and slower is not None), timed
        assert not timed or (slower or "") in timed[0]
        assert not any(f.loses for f in facts_of(scheme, torch.device(device), 4096, (9, 0)))


def test_int4_at_load_has_the_times_of_its_groups() -> None:
    """Those of 128 are of wide models alone."""
    gpu = torch.device("cuda")
    wide, narrow = ([f.text for f in facts_of(Int4Scheme("int4"), gpu, size, (9, 0)) if not f.loses]
                    for size in (4096, 576))  # fmt: skip
    assert "1.3 with 192" in wide[0]
    assert "not measured" in narrow[0]
    for capability in ((8, 9), (10, 0)):
        [other] = [
            fact.text
            for fact in facts_of(Int4Scheme("int4"), gpu, 4096, capability)
            if not fact.loses
        ]
        assert "2.0 with 256 by the kernels that this GPU has" in other


def test_deterministic_is_judged_by_the_gpu_that_is_named(model: Model) -> None:
    config = EngineConfig(deterministic=True)
    assert check_model(str(model), config, gpu="H100").exit_code == 0
    for gpu, capability in (("T4", "7.5"), ("B200", "10.0")):
        [problem] = check_model(str(model), config, gpu=gpu).errors
        assert problem.code == "option-invalid"
        assert f"that GPU has {capability}" in problem.message


def test_deterministic_without_a_gpu_hides_no_other_fault(model: Model) -> None:
    model.json("config.json", num_key_value_heads=3)
    report = check_model(str(model), EngineConfig(deterministic=True, device="cpu"))
    assert {problem.code for problem in report.errors} == {"option-invalid", "config-invalid"}


def test_cache_and_weights_together_too_large(model: Model) -> None:
    report = check_model(str(model), EngineConfig(kv_cache_memory=2**30), memory=2**29)
    assert found(report) == [("error", "memory-cache-too-small")]


def test_length_is_cut(model: Model) -> None:
    report = check_model(str(model), EngineConfig(kv_cache_memory=200_000))
    assert found(report) == [("warning", "length-cut")]
    assert report.exit_code == 0


def test_a_named_gpu(model: Model) -> None:
    report = check_model(str(model), gpu="rtx 4090")
    assert report.device == "cuda"
    assert report.memory is not None
    assert report.memory.gpu == "RTX-4090"
    assert report.memory.total_bytes == 24564 * 2**20
    assert report.memory.block_size == 64
    # The engine takes 88% of the GPU, less the weights.
    assert report.memory.cache_bytes == pytest.approx(0.88 * 24564 * 2**20 - 638_720, abs=2)


def test_ranks_share_the_weights(model: Model) -> None:
    alone = check_model(str(model), gpu="H100").memory
    shared = check_model(str(model), EngineConfig(tensor_parallel_size=2), gpu="H100").memory
    assert alone is not None
    assert shared is not None
    assert shared.num_ranks == 2
    # Two flags of 128 bytes for each program and rank, and two buffers of 8 MiB each for terms and
    # sums, and of 4096 words for each of 64 programs and rank.
    sums = 2 * 256 * 2 * 128 + 4 * 8 * 2**20 + 2 * 64 * 2 * 4096 * 8
    assert (alone.rank_sums_bytes, shared.rank_sums_bytes) == (0, sums)
    taken = shared.cache_bytes + shared.weights_bytes + sums
    assert taken == pytest.approx(alone.cache_bytes + alone.weights_bytes, abs=2)
    nccl = EngineConfig(tensor_parallel_size=2, rank_sums="nccl")
    unshared = check_model(str(model), nccl, gpu="H100").memory
    assert unshared is not None
    assert unshared.cache_bytes == pytest.approx(shared.cache_bytes + sums, abs=2)
    assert shared.kv_bytes_per_token * 2 == alone.kv_bytes_per_token
    assert alone.weights_bytes / 2 <= shared.weights_bytes < alone.weights_bytes * 0.6


def test_what_ranks_keep_beyond_their_share_is_listed() -> None:
    """By hand: width 64, 3 layers, 8 heads and 2 key-value heads of 8, in float32."""
    config = EngineConfig(tensor_parallel_size=4, skip_tokenizer_init=True)
    report = check_model(str(GOLDEN / "llama-gqa"), config, gpu="H200")
    assert report.exit_code == 0
    assert report.memory is not None
    # 8 rows each of keys and of values, where 4 would be even; and all of each norm.
    qkv, norms, last = 3 * (8 + 8 - 4 - 4) * 64 * 4, 3 * 64 * 4 * 3 // 4, 64 * 4 * 3 // 4
    assert [tuple(each.model_dump().values()) for each in report.memory.replicated] == [
        ("model.layers.*.self_attn.qkv_proj.weight", False, 3, qkv),
        ("model.layers.*.input_layernorm.weight", True, 3, norms),
        ("model.layers.*.post_attention_layernorm.weight", True, 3, norms),
        ("model.norm.weight", True, 1, last),
    ]
    even = check_model(str(GOLDEN / "llama-gqa"), config.replace(tensor_parallel_size=1)).memory
    assert even is not None
    assert even.replicated == ()
    assert report.memory.weights_bytes == even.weights_bytes // 4 + qkv + 2 * norms + last


def test_stages_share_the_layers_and_the_cache() -> None:
    """By hand as above: two layers and the embedding on the first stage, one and the head after."""
    config = EngineConfig(
        pipeline_parallel_size=2,
        skip_tokenizer_init=True,
        max_model_len=256,
        kv_cache_memory=16 * 2**20,
    )
    folder = str(GOLDEN / "llama-gqa")
    alone = check_model(folder, config.replace(pipeline_parallel_size=1), gpu="H200").memory
    report = check_model(folder, config, gpu="H200").memory
    assert alone is not None
    assert report is not None
    vocabulary, norm = 320 * 64 * 4, 64 * 4
    layer = (alone.weights_bytes - 2 * vocabulary - norm) // 3
    assert (report.num_ranks, report.weights_bytes) == (2, 2 * layer + vocabulary)
    assert report.kv_bytes_per_token == alone.kv_bytes_per_token
    # A block of 64 tokens; the first stage has two of three layers, and one block is for padding.
    per_layer = 64 * alone.kv_bytes_per_token // 3
    for memory, layers in ((alone, 3), (report, 2)):
        blocks = 16 * 2**20 // (layers * per_layer)
        assert memory.max_tokens == (blocks - 1) * 64
    [problem] = check_model(str(GOLDEN / "bloom-pow2"), config, gpu="H200").errors
    assert problem.message.startswith("BloomForCausalLM cannot be cut into 2 stages: ")


def test_a_model_whose_sums_take_longer_than_its_weights_is_warned_of(tmp_path: Path) -> None:
    """Shapes of Qwen2 0.5B, which one H200 ran faster than two, and of Llama 3 8B."""
    shapes = {
        "small": ("Qwen2ForCausalLM", 896, 24, 14, 2, 4864, 151936),
        "large": ("LlamaForCausalLM", 4096, 32, 32, 8, 14336, 128256),
    }
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    keys += ("intermediate_size", "vocab_size")

    def warned(name: str, **more: object) -> bool:
        architecture, *sizes = shapes[name]
        values = dict(zip(keys, sizes, strict=True)) | {"rms_norm_eps": 1e-6}
        values |= {"architectures": [architecture], "tie_word_embeddings": name == "small"}
        values |= {"model_type": architecture[:5].lower(), "torch_dtype": "bfloat16"}
        (tmp_path / "config.json").write_text(json.dumps(values))
        config = EngineConfig(load_format="dummy", skip_tokenizer_init=True)
        report = check_model(str(tmp_path), config.replace(**more), gpu="H200")
        return any(each.code == "ranks-slower" for each in report.problems)

    assert warned("small", tensor_parallel_size=2)
    assert not warned("small")
    assert not warned("small", pipeline_parallel_size=2)
    assert not warned("large", tensor_parallel_size=2)
    assert not warned("large", tensor_parallel_size=8)


def test_numbers_of_ranks_that_divide_the_model_are_named() -> None:
    config = EngineConfig(tensor_parallel_size=3, skip_tokenizer_init=True)
    [problem] = check_model(str(GOLDEN / "llama-gqa"), config, gpu="H200").errors
    assert problem.message.endswith("tensor_parallel_size (3); set it to 1 or 2 or 4 or 8")


@pytest.mark.parametrize(
    ("name", "expected", "gib"),
    [
        ("H100", "H100", 80),
        ("NVIDIA H100 PCIe", "H100-PCIE", 80),
        ("h200", "H200", 141),
        ("NVIDIA A100 80GB", "A100-80GB", 80),
        ("a100-40gb", "A100-40GB", 40),
        ("L40S", "L40S", 45),
        ("L40", "L40", 45),
        ("NVIDIA GeForce RTX 4090", "RTX-4090", 24),
        ("4090", "RTX-4090", 24),
    ],
)
def test_gpu_names(name: str, expected: str, gib: int) -> None:
    found = find_gpu(name)
    assert found.name == expected
    assert found.memory / GIB == pytest.approx(gib, rel=0.03)


def test_every_gpu_finds_itself() -> None:
    assert [find_gpu(name).name for name in gpu_names()] == list(gpu_names())


@pytest.mark.parametrize(
    ("name", "message"),
    [("A100", "A100-40GB, A100-80GB"), ("H1000", "known are T4, .*H100"), ("", "not in the table")],
)
def test_gpu_that_is_not_known(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_gpu(name)


def test_special_ids(model: Model) -> None:
    model.json("config.json", bos_token_id=5000, eos_token_id=None)
    model.json("generation_config.json", eos_token_id=[320])
    report = check_model(str(model))
    assert sorted(found(report)) == [
        ("warning", "eos-missing"),
        ("warning", "special-id-out-of-range"),
        ("warning", "special-id-out-of-range"),
    ]
    text = " ".join(problem.message for problem in report.problems)
    assert "config.json bos_token_id 5000" in text
    assert "generation_config.json eos_token_id 320" in text
    # The engine runs, and min_tokens forbids only tokens that there are.
    with LLM(str(model)) as llm:
        params = llm.default_sampling_params().replace(max_tokens=3, min_tokens=3)
        (output,) = llm.generate([1, 2, 3], params)
    assert len(output.outputs[0].token_ids) == 3


def test_tokenizer_larger_than_the_vocabulary(model: Model) -> None:
    values = json.loads((model.folder / "tokenizer.json").read_text())
    vocab = values["model"]["vocab"]
    vocab.update({f"word{index}": index for index in range(259, 330)})
    (model.folder / "tokenizer.json").write_text(json.dumps(values))
    report = check_model(str(model))
    assert found(report) == [("warning", "tokenizer-larger-than-vocabulary")]
    assert "has 330 tokens, the model's vocabulary 320" in report.problems[0].message


def test_no_chat_template(model: Model) -> None:
    model.json("tokenizer_config.json", chat_template=None)
    report = check_model(str(model))
    assert found(report) == [("info", "chat-template-missing")]
    assert report.tokenizer is not None
    assert report.tokenizer.chat_template == "none"


def test_stored_in_another_dtype(model: Model) -> None:
    report = check_model(str(model), EngineConfig(dtype="bfloat16"))
    assert found(report) == [("info", "dtype-converted")]
    assert report.memory is not None
    assert report.memory.weights_bytes * 2 == 638_720


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu(model: Model) -> None:
    config = EngineConfig(device="cuda")
    report = check_model(str(model), config)
    assert found(report) == [("error", "device-unavailable")]
    assert report.model_info is not None
    with pytest.raises(ConfigError) as caught:
        LLM(str(model), config)
    assert report.errors[0].message == str(caught.value)
    assert check_model(str(model), config, gpu="H100").exit_code == 0


def test_gguf_is_read_but_not_converted(model: Model, cache_home: Path) -> None:
    config = json.loads((model.folder / "config.json").read_text())
    path = write_llama_gguf(model.folder / "m.gguf", load_file(model.weights), config)
    report = check_model(path, EngineConfig(skip_tokenizer_init=True))
    assert found(report) == [("warning", "eos-missing")]
    assert report.weights is not None
    assert report.weights.num_parameters == 638_720 // 4
    assert not list(cache_home.glob("**/*.safetensors"))
    with LLM(str(path), skip_tokenizer_init=True):
        assert list(cache_home.glob("**/*.safetensors"))


def test_real_gguf(smollm2_gguf: Path, cache_home: Path) -> None:
    report = check_model(smollm2_gguf)
    assert report.errors == ()
    assert report.weights is not None
    # Published as 134,515,008 parameters, tied.
    assert report.weights.num_parameters == 134_515_008
    assert report.tokenizer is not None
    assert report.tokenizer.vocab_size == 49152
    assert not list(cache_home.glob("**/*.safetensors"))


def test_blocks_are_planned_as_they_are(smollm2_gguf: Path, cache_home: Path) -> None:
    report = check_model(smollm2_gguf, EngineConfig(dtype="bfloat16"))
    layers, hidden, vocabulary = 30, 576, 49152
    linears = layers * (2 * hidden * hidden + 2 * hidden * 192 + 3 * hidden * 1536)
    norms = (2 * layers + 1) * hidden
    # A block of Q4_1 is 32 weights of 4 bits, a scale and a minimum of 2 bytes each, and one of
    # Q8_0 32 bytes and a scale.
    assert report.memory is not None
    blocks = linears // 32 * 20 + vocabulary * hidden // 32 * 34
    assert report.memory.weights_bytes == blocks + 2 * norms
    assert report.memory.weights_bytes < smollm2_gguf.stat().st_size
    assert report.weights is not None
    assert report.weights.kept == {"Q8_0": 1, "Q4_1": 7 * layers}
    assert report.weights.unpacked == {}

    # A GPU's rows have whole blocks of 128 columns.
    report = check_model(smollm2_gguf, EngineConfig(quantization="gguf"), gpu="H100")
    assert report.memory is not None
    rows = (2 * hidden + 2 * 192 + 2 * 1536) * layers
    padding = rows * (640 - 576) // 2 + vocabulary * (640 - 576)
    assert report.memory.weights_bytes == blocks + padding + 2 * norms
    assert report.weights is not None
    assert report.weights.kept == {"Q8_0": 1, "Q4_1": 7 * layers}
    assert "blocks-unpacked" not in {problem.code for problem in report.problems}
    report = check_model(smollm2_gguf, gpu="H100")
    assert report.weights is not None
    assert report.weights.kept == {}
    [could] = [each for each in report.problems if each.code == "blocks-unpacked"]
    assert could.severity == "info"
    assert "blocks (Q4_1, Q8_0) are unpacked on a GPU; quantization='gguf' would" in could.message
    for config, gpu in ((EngineConfig(), "T4"), (EngineConfig(quantization="unpacked"), "H100")):
        report = check_model(smollm2_gguf, config, gpu=gpu)
        assert "blocks-unpacked" not in {problem.code for problem in report.problems}

    report = check_model(smollm2_gguf, EngineConfig(quantization="unpacked", dtype="bfloat16"))
    assert report.memory is not None
    # Where a CPU multiplies in bfloat16 the head has a matrix of its own beside the embedding.
    vocabularies = 1 + onednn_multiplies(torch.bfloat16)
    numbers = linears + vocabularies * vocabulary * hidden + norms
    assert report.memory.weights_bytes == 2 * numbers
    assert report.weights is not None
    assert report.weights.kept == {}
    unpacked = report.weights.unpacked or {}
    assert {name: len(names) for name, names in unpacked.items()} == {"Q8_0": 1, "Q4_1": 210}


# Llama 3 8B in bfloat16: https://huggingface.co/meta-llama/Meta-Llama-3-8B
CONFIG_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def write_8b(folder: Path) -> None:
    """Four shards of headers; the rest of each file is a hole."""
    shapes = {"model.embed_tokens.weight": [128256, 4096], "lm_head.weight": [128256, 4096]}
    shapes["model.norm.weight"] = [4096]
    for layer in range(32):
        stem = f"model.layers.{layer}"
        for name, shape in {
            "self_attn.q_proj": [4096, 4096],
            "self_attn.k_proj": [1024, 4096],
            "self_attn.v_proj": [1024, 4096],
            "self_attn.o_proj": [4096, 4096],
            "mlp.gate_proj": [14336, 4096],
            "mlp.up_proj": [14336, 4096],
            "mlp.down_proj": [4096, 14336],
            "input_layernorm": [4096],
            "post_attention_layernorm": [4096],
        }.items():
            shapes[f"{stem}.{name}.weight"] = shape
    weight_map = {}
    for index in range(4):
        file = f"model-{index + 1:05}-of-00004.safetensors"
        header, position = {}, 0
        for name in sorted(shapes)[index::4]:
            size = 2
            for dimension in shapes[name]:
                size *= dimension
            offsets = [position, position + size]
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": offsets}
            weight_map[name] = file
            position += size
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + position)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG_8B))


SCRIPT = """
import resource, sys
from engine_core.check import check_model
from engine_core.configs import EngineConfig
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = check_model(sys.argv[1], EngineConfig(skip_tokenizer_init=True), gpu="H100")
print(report.to_json())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, file=sys.stderr)
"""


def test_8b_of_headers_only(tmp_path: Path) -> None:
    write_8b(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True
    )
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert report["weights"]["num_files"] == 4
    assert report["weights"]["num_parameters"] == 8_030_261_248
    assert report["memory"]["weights_bytes"] == 16_060_522_496
    # 32 layers, 8 heads of 128, keys and values, 2 bytes.
    assert report["memory"]["kv_bytes_per_token"] == 131_072
    # 16 GB of tensors were not read: kilobytes on Linux, mapped pages included.
    assert int(done.stderr.splitlines()[-1]) < 200_000


def reports(model: Model) -> list[CheckReport]:
    good = check_model(str(model), deep=True)
    no_weights = Path(str(model)) / "nothing"
    model.tensors(lambda tensors: tensors.pop("lm_head.weight"))
    model.json("config.json", rope_scaling={"rope_type": "linear", "factor": float("inf")})
    return [
        good,
        check_model(no_weights),
        check_model(str(model)),
        check_model(str(model), gpu="L4"),
    ]


def test_json_keeps_its_schema(model: Model) -> None:
    schema = CheckReport.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["additionalProperties"] is False
    for report in reports(model):
        values = json.loads(report.to_json(), parse_constant=pytest.fail)
        jsonschema.validate(values, schema)
        assert values["schema_version"] == 1
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(values | {"problems": [{"code": "x"}]}, schema)


def test_document_names_every_field_and_code() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w-]+)`", text))
    assert set(get_args(Code)) == set(HINTS)
    assert set(get_args(Code)) <= named
    fields: set[str] = set(CheckReport.model_fields)
    for definition in CheckReport.json_schema()["$defs"].values():
        fields |= set(definition["properties"])
    assert fields - named == set()


def test_cli(model: Model) -> None:
    result = runner.invoke(app, ["check-model", str(model), "--gpu", "H100"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"model         {model}"
    assert "runs in       engine_core_llama.model.LlamaForCausalLM (plugin llama)" in lines
    assert "(H100): weights 623.75 KiB" in result.stdout
    assert lines[-1].startswith("It will run.")


def test_cli_json(model: Model) -> None:
    model.tensors(lambda tensors: tensors.pop("lm_head.weight"))
    result = runner.invoke(app, ["check-model", str(model), "--json", "--memory", "1GiB"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    jsonschema.validate(report, CheckReport.json_schema())
    assert report["memory"]["total_bytes"] == GIB
    [problem] = [Problem(**problem) for problem in report["problems"]]
    assert (problem.code, problem.names) == ("weights-missing", ("lm_head.weight",))
    text = runner.invoke(app, ["check-model", str(model)]).stdout
    assert "ERROR weights-missing: 1 tensors of the model are missing: lm_head.weight" in text
    assert "It will not run." in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "H9000"], "RTX-A6000; for any other give memory in its place (--memory SIZE)"),
        (["--gpu", "H100", "--memory", "1GiB"], "give one of them"),
        (["--memory", "much"], "--memory: a size is a number of bytes"),
        (["--deep", "--against", "x.json"], "give one of them"),
        (["--against", "nowhere.json"], "nowhere.json cannot be read"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
    ],
)
def test_wrong_usage(model: Model, arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["check-model", str(model), *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_chains_are_listed_but_for_stages_and_ranks(tmp_path: Path) -> None:
    config = json.loads((GOLDEN / "llama-gqa/config.json").read_text())
    sizes = {"hidden_size": 2048, "intermediate_size": 12288, "num_attention_heads": 16}
    more = {"num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes | more))

    def chains(**options: Any) -> list[tuple[str, str, str, str]]:
        settings = EngineConfig(
            skip_tokenizer_init=True, dtype="bfloat16", quantization="fp8", **options
        )
        report = check_model(tmp_path, settings, gpu="H200", list_fusions=True)
        assert report.fusions
        return [
            (fusion.layers, fusion.linear, fusion.epilogue, fusion.rows)
            for fusion in report.fusions
            if " to the " in fusion.linear
        ]

    all_that_follows = "feed-forward, norms and the next queries, keys and values"
    assert chains() == [
        ("model.layers.0-1", "self_attn.o_proj to the next linear", all_that_follows, "1"),
        ("model.layers.2", "self_attn.o_proj to the final norm", "feed-forward and norms", "1"),
    ]
    assert chains(tensor_parallel_size=2) == chains(pipeline_parallel_size=2) == []
    assert chains(deterministic=True) == []


def test_fusions_are_listed_for_a_named_gpu() -> None:
    settings = EngineConfig(skip_tokenizer_init=True, dtype="bfloat16")
    report = check_model(GOLDEN / "qwen3-tiny", settings, gpu="H200", list_fusions=True)
    assert report.fusions is not None
    named = {fusion.linear: fusion for fusion in report.fusions if "layers.0" in fusion.layers}
    assert named["self_attn.qkv_proj"].epilogue == "norms, rotation and storing"
    assert named["self_attn.o_proj"].epilogue == "residual and RMSNorm"
    assert check_model(GOLDEN / "qwen3-tiny", settings, gpu="H200").fusions is None
    command = ["check-model", str(GOLDEN / "qwen3-tiny"), "--fusions", "--skip-tokenizer-init"]
    result = runner.invoke(app, [*command, "--device", "cpu"])
    assert result.exit_code == 0
    assert re.search(r"self_attn.qkv_proj: norms, rotation and storing: never", result.output)
