"""A model as one file: what it gives, what other readers see in it, and what is refused."""

from __future__ import annotations

import json
import resource
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import packed_checkpoints
import pytest
import torch
from checkpoint_files import write_llama_gguf
from damaged_checkpoints import sign, write_good
from golden_fixtures import GOLDEN, golden_prompts, greedy_params
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stories15m import write_stories15m

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.check import check_model
from engine_core.checkpoint import open_checkpoint
from engine_core.checkpoint.one_file import write_whole
from engine_core.engine.export import export_model, import_model
from engine_core.errors import CheckpointError, ConfigError, CorruptCheckpointError, OptionError
from engine_core.kernels import GroupWeight
from engine_core.nn.linear import Linear
from engine_core.nn.packing import MatrixModule
from engine_core.registry import build_registry
from engine_core.runtime.loader import build_on_meta, load_weights, match_weights
from engine_core.runtime.source import open_model
from engine_core.step_context import BuildContext

IDS = {"skip_tokenizer_init": True, "max_model_len": 160}
NAME = "llama-gqa"


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def exported(folder: Path, name: str = NAME, quantization: str | None = None) -> Path:
    out = folder / f"{name}-{quantization}.safetensors"
    export_model(str(GOLDEN / name), out, EngineConfig(quantization=quantization))
    return out


def tokens_and_logits(model: Path, **settings: Any) -> list[tuple[list[int], list[float]]]:
    prompts = [prompt.input_ids for prompt in golden_prompts(NAME)]
    with LLM(str(model), **IDS, **settings) as llm:
        outputs = llm.generate(prompts, greedy_params(NAME))
    found = []
    for output in outputs:
        first = output.outputs[0].logprobs[0]
        found.append((output.outputs[0].token_ids, [first[i].logprob for i in sorted(first)]))
    return found


@pytest.mark.parametrize(
    "name",
    ["llama-gqa", "llama-tied-llama3", "bloom-6heads", "chatglm2-tiny", "gemma3-ropes",
     "qwen2vl-tiny"],
)  # fmt: skip
def test_an_exported_model_gives_the_golden_tokens(name: str, tmp_path: Path) -> None:
    prompts = [
        each for each in golden_prompts(name) if 304 not in each.input_ids or "vl" not in name
    ]
    with LLM(str(exported(tmp_path, name)), **IDS) as llm:
        outputs = llm.generate([prompt.input_ids for prompt in prompts], greedy_params(name))
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.outputs[0].token_ids == prompt.new_tokens


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_codes_of_the_file_are_those_made_at_load(quantization: str, tmp_path: Path) -> None:
    at_load = tokens_and_logits(GOLDEN / NAME, quantization=quantization)
    assert tokens_and_logits(exported(tmp_path, NAME, quantization)) == at_load


def numbers_of(file: Path) -> dict[str, np.ndarray]:
    """The linears of a file of 4 bits, by the published format of pack-quantized."""
    tensors = load_file(file)
    found = {}
    for name, packed in tensors.items():
        stem, _, leaf = name.rpartition(".")
        if leaf != "weight_packed":
            continue
        rows, columns = tensors[f"{stem}.weight_shape"].tolist()
        words = packed.numpy().view(np.uint32)
        codes = np.stack([words >> 4 * i & 15 for i in range(8)], -1).reshape(rows, columns)
        words = tensors[f"{stem}.weight_zero_point"].numpy().view(np.uint32)
        zeros = np.stack([words >> 4 * i & 15 for i in range(8)], 1).reshape(rows, -1)
        scales = tensors[f"{stem}.weight_scale"].float().numpy()
        apart = codes.astype(np.int64) - zeros.astype(np.int64).repeat(32, 1)
        found[stem] = (apart * scales.repeat(32, 1)).astype(np.float32)
    return found


def test_a_tied_head_is_named_once(tmp_path: Path) -> None:
    file = exported(tmp_path, "qwen2-tied-nowindow", "int8")
    with safe_open(file, "pt") as opened:
        config = json.loads(opened.metadata()["file:config.json"])
    groups = config["quantization_config"]["config_groups"]
    assert groups["vocabulary"]["targets"] == ["model.embed_tokens"]


def test_four_bits_are_pack_quantized(tmp_path: Path) -> None:
    file = exported(tmp_path, NAME, "int4")
    numbers, source = numbers_of(file), load_file(GOLDEN / NAME / "model.safetensors")
    with safe_open(file, "pt") as opened:
        config = json.loads(opened.metadata()["file:config.json"])
    settings = config["quantization_config"]
    assert settings["quant_method"] == "compressed-tensors"
    assert settings["format"] == "pack-quantized"
    stated = settings["config_groups"]["group_0"]["weights"]
    assert (stated["num_bits"], stated["strategy"], stated["group_size"]) == (4, "group", 32)
    assert stated["symmetric"] is False
    # The inputs of down_proj are no groups of 32.
    assert len(numbers) == 6 * config["num_hidden_layers"]
    assert "model.layers.0.mlp.down_proj" in settings["ignore"]
    for stem, made in numbers.items():
        weight = source[f"{stem}.weight"].float().numpy()
        steps = (weight.reshape(len(weight), -1, 32).max(-1).clip(0) - weight.reshape(
            len(weight), -1, 32).min(-1).clip(max=0)) / 15  # fmt: skip
        # At worst a step, where a scale is smaller so that most numbers come nearer.
        assert (np.abs(made - weight) <= 2.2 * steps.repeat(32, 1)).all()
        assert np.square(made - weight).mean() < np.square(steps).mean() / 10

    def compare(model: torch.nn.Module) -> None:
        merged = {
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "gate_up_proj": ("gate_proj", "up_proj"),
        }
        compared = 0
        for name, layer in model.named_modules():
            if isinstance(layer, Linear):
                path, _, last = name.rpartition(".")
                parts = [numbers[f"{path}.{part}"] for part in merged.get(last, (last,))
                         if f"{path}.{part}" in numbers]  # fmt: skip
                if not parts:
                    continue
                # The kernel's zeros are rounded to bfloat16.
                expected = torch.from_numpy(np.concatenate(parts))
                torch.testing.assert_close(layer.weight, expected, atol=4e-3, rtol=8e-3)
                compared += len(parts)
        assert compared == len(numbers)

    with LLM(str(file), **IDS, dtype="float32") as llm:
        llm.apply_model(compare)


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_a_gpu_gets_the_codes_of_linears(quantization: str, tmp_path: Path) -> None:
    """With the methods of a GPU, on a CPU; the kernels are tested elsewhere."""
    file = exported(tmp_path, NAME, quantization)
    registry, checkpoint = build_registry(()), open_checkpoint(file)
    settings = checkpoint.hf_config.get("quantization_config")
    scheme = registry.quantization_scheme(
        registry.recognise_quantization(settings) or "none", settings
    )
    scheme.check_device(torch.device("cuda"))
    config = registry.model_config(checkpoint.hf_config, file)
    context = BuildContext(dtype=torch.float32)
    model = build_on_meta(registry.model_class(config.architecture), config, context, scheme)
    matched, _ = match_weights(model, checkpoint, "it", scheme)
    load_weights(model, matched, "it", torch.device("cpu"), pack=True)
    import_model(file, tmp_path / "folder", dequantize=True)
    numbers = load_file(tmp_path / "folder" / "model.safetensors")
    compared = 0
    for name, layer in model.named_modules():
        if isinstance(layer, Linear) and isinstance(layer.packed, GroupWeight):
            path, _, last = name.rpartition(".")
            leaves = {"qkv_proj": "qkv", "gate_up_proj": ("gate", "up")}
            parts = [f"{path}.{leaf}_proj" for leaf in leaves.get(last, (last[:-5],))]
            expected = torch.cat([numbers[f"{part}.weight"] for part in parts])
            assert torch.equal(layer.weight, expected.float())
            compared += len(parts)
    assert compared == 6 * config.num_layers  # The inputs of down_proj are no groups of 32.
    assert torch.equal(model.lm_head.weight, numbers["lm_head.weight"])


def test_ranks_read_their_parts_of_the_codes(tmp_path: Path) -> None:
    """Of a model whose parts for two ranks begin and end at groups of 32 and rows of 8."""
    folder = tmp_path / "folder"
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320,
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "torch_dtype": "float32",
    }  # fmt: skip
    shapes = {"model.embed_tokens": (320, 64), "model.norm": (64,), "lm_head": (320, 64)}
    rows = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 64}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}": (size, 64) for name, size in rows.items()}
        shapes |= {f"{prefix}mlp.{name}_proj": (128, 64) for name in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj": (64, 128)}
        shapes |= {f"{prefix}{name}_layernorm": (64,) for name in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) / 8
               for name, shape in shapes.items()}  # fmt: skip
    save_file(tensors, folder / "model.safetensors")
    file = tmp_path / "out.safetensors"
    export_model(str(folder), file, EngineConfig(quantization="int4"))
    alone, shared = tokens_and_logits(file), tokens_and_logits(file, tensor_parallel_size=2)
    plain = tokens_and_logits(folder)
    for (_, one), (_, two), (_, other) in zip(alone, shared, plain, strict=True):
        # Sums of bfloat16 products in another order; the plain numbers are further away.
        apart = np.abs(np.subtract(one, two)).max()
        assert 8 * apart < np.abs(np.subtract(one, other)).max()


def test_memory_is_little_more_than_the_file(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / ".cache" / "models" / "stories15M.data"
    folder = write_stories15m(source, tmp_path)
    for quantization in ("int4", "int8"):
        out = tmp_path / f"{quantization}.safetensors"
        export_model(str(folder), out, EngineConfig(quantization=quantization))
        report = check_model(out, EngineConfig(skip_tokenizer_init=True))
        assert report.memory is not None
        assert report.memory.weights_bytes <= 1.15 * out.stat().st_size


def test_a_gguf_file_keeps_its_grid_of_four_bits(tmp_path: Path) -> None:
    write_good(tmp_path)
    out = tmp_path / "out.safetensors"
    prompt = [[3, 4, 5, 6, 7]]
    with LLM(str(tmp_path / "good.gguf"), quantization="unpacked") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        expected = llm.generate(prompt, params)[0].outputs[0].token_ids
    export_model(str(tmp_path / "good.gguf"), out)
    with LLM(str(out)) as llm:
        assert llm.generate(prompt, params)[0].outputs[0].token_ids == expected
        assert llm.tokenizer is not None
        assert llm.tokenizer.chat_template is not None


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)],
)
def test_numbers_of_a_gguf_file_keep_their_type(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    """Not the one that this CPU would run them in."""
    config = packed_checkpoints.CONFIG
    numbers = {
        name: tensor.to(dtype).float() for name, tensor in packed_checkpoints.llama().items()
    }
    arrays = {name: tensor.numpy() for name, tensor in numbers.items()}
    file = write_llama_gguf(tmp_path / "model.gguf", arrays, config, quantise=kind)
    export_model(str(file), tmp_path / "out.safetensors")
    got = load_file(tmp_path / "out.safetensors")
    assert {tensor.dtype for tensor in got.values()} == {dtype}
    assert all(torch.equal(got[name].float(), tensor) for name, tensor in numbers.items())


def test_what_is_imported_gives_transformers_the_golden_logits(tmp_path: Path) -> None:
    import_model(exported(tmp_path), tmp_path / "folder")
    assert_golden(tmp_path / "folder", 1e-4)


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_numbers_of_codes_are_imported(quantization: str, tmp_path: Path) -> None:
    file, folder = exported(tmp_path, NAME, quantization), tmp_path / "folder"
    import_model(file, folder, dequantize=True)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    numbers, source = (
        load_file(folder / "model.safetensors"),
        load_file(GOLDEN / NAME / "model.safetensors"),
    )
    assert {name: tensor.shape for name, tensor in numbers.items()} == {
        name: tensor.shape for name, tensor in source.items()
    }
    if quantization == "int4":
        for stem, expected in numbers_of(file).items():
            torch.testing.assert_close(numbers[f"{stem}.weight"], torch.from_numpy(expected))


TOOLS = ["awq", "gptq, act-order", "gptq of 8 bits", "compressed, zeros", "int8 and activations"]


@pytest.mark.parametrize("kind", [*TOOLS, "fp8"])
def test_numbers_of_a_tools_codes_are_imported(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that the packer rounded to, and no scales of a cache that nobody takes."""
    source, out, folder = tmp_path / "source", tmp_path / "out.safetensors", tmp_path / "folder"
    if kind == "fp8":
        held, wanted, settings = e4m3_rows(packed_checkpoints.llama())
    else:
        form = packed_checkpoints.FORMATS[kind]
        held, wanted = packed_checkpoints.packed(
            packed_checkpoints.llama(), form, lambda name: "lm_head" in name
        )
        settings = form.settings
    packed_checkpoints.write(
        source, held | {"model.layers.0.self_attn.k_scale": torch.tensor(0.5)}, settings
    )
    export_model(str(source), out)
    # What this CPU would make of the codes is nothing that a file has.
    assert not caplog.messages
    made = import_model(out, folder, dequantize=True)
    assert not made.quantized
    assert not made.needs_compressed_tensors
    found = load_file(folder / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, numbers in wanted.items():
        torch.testing.assert_close(found[name], numbers, rtol=1e-6, atol=0)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert not check_model(folder, EngineConfig(**IDS | {"max_model_len": 64})).errors


def e4m3_rows(
    tensors: dict[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    held, plain = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if "proj" in name:
            scale = weight.abs().amax(1, keepdim=True) / 448
            held[name] = (weight / scale).to(torch.float8_e4m3fn)
            held[f"{name}_scale"] = scale
            plain[name] = held[name].float() * scale
    given = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": given, "input_activations": None}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": []}
    return held, plain, settings | {"config_groups": {"group_0": group}}


def test_a_file_of_the_source_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whatever name, though --force is given."""
    folder = tmp_path / "source"
    packed_checkpoints.write(folder, packed_checkpoints.llama())
    shard = folder / "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(shard)
    weight_map = dict.fromkeys(packed_checkpoints.llama(), shard.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "1_Dense").mkdir()
    beside = folder / "1_Dense" / "model.safetensors"
    save_file({"linear.weight": torch.zeros(2, 2)}, beside)
    (tmp_path / "link.safetensors").symlink_to(shard)
    (tmp_path / "other").symlink_to(folder)
    monkeypatch.chdir(folder)
    names = [shard, tmp_path / "link.safetensors", tmp_path / "other" / shard.name, beside]
    names += [folder / ".." / folder.name / shard.name, Path(shard.name)]
    for name in names:
        before = name.read_bytes()
        with pytest.raises(OptionError, match="a file of the model that is exported; take another"):
            export_model(str(folder), name, force=True)
        assert name.read_bytes() == before
    assert (tmp_path / "link.safetensors").is_symlink()
    out = tmp_path / "out.safetensors"
    export_model(str(folder), out)
    with pytest.raises(OptionError, match="a file of the model that is exported"):
        export_model(str(out), out, EngineConfig(quantization="int8"), force=True)
    # Another file, even in that folder, may be.
    export_model(str(folder), out, EngineConfig(quantization="int8"), force=True)
    export_model(str(folder), folder / "mine.safetensors")
    export_model(str(folder), folder / "mine.safetensors", force=True)


def test_a_calibrated_cache_outlives_its_codes(tmp_path: Path) -> None:
    source, out, folder = tmp_path / "source", tmp_path / "out.safetensors", tmp_path / "folder"
    held, _, settings = e4m3_rows(packed_checkpoints.llama())
    scales = {
        f"model.layers.{layer}.self_attn.{leaf}": torch.tensor(0.02)
        for layer in (0, 1)
        for leaf in ("k_scale", "v_scale")
    }
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    packed_checkpoints.write(source, held | scales, settings | {"kv_cache_scheme": cache})
    export_model(str(source), out)
    made = import_model(out, folder, dequantize=True)
    # Without codes, too.
    assert (made.quantized, made.needs_compressed_tensors) == (False, True)
    report = check_model(folder, EngineConfig(**IDS | {"max_model_len": 64}))
    assert not report.errors
    assert report.memory is not None
    assert report.memory.groups[0].dtype == "float8_e4m3fn"
    assert scales.keys() <= load_file(folder / "model.safetensors").keys()


def test_what_is_no_exported_file_is_not_imported(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF" + bytes(64))
    for path, what in ((gguf, "a GGUF file"), (GOLDEN / NAME, "a folder")):
        words = f"{path} is {what}, and .*run 'engine-core export {path} OUT.safetensors' first"
        with pytest.raises(OptionError, match=words):
            import_model(path, tmp_path / "folder")


@pytest.mark.parametrize("name", [NAME, "qwen2-gqa"])
@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_transformers_loads_the_codes(name: str, quantization: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    file = exported(tmp_path, name, quantization)
    import_model(file, tmp_path / "codes")
    import_model(file, tmp_path / "numbers", dequantize=True)
    prompt = torch.tensor([golden_prompts(name)[0].input_ids])
    with torch.inference_mode():
        codes, numbers = (
            AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)(prompt)
            for name in ("codes", "numbers")
        )
    torch.testing.assert_close(codes.logits, numbers.logits, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("name", "quantization"), [("qwen2-gqa", "int4"), ("qwen2-gqa", "int8")])
def test_a_folder_of_codes_is_a_model_here_too(
    name: str, quantization: str, tmp_path: Path
) -> None:
    """Its linears, which have biases, are the numbers of the file."""
    file = exported(tmp_path, name, quantization)
    import_model(file, tmp_path / "codes")
    import_model(file, tmp_path / "numbers", dequantize=True)
    expected = load_file(tmp_path / "numbers" / "model.safetensors")
    for at in (file, tmp_path / "codes"):
        source = open_model(str(at), EngineConfig(device="cpu"), build_registry({}))
        assert source.scheme is not None
        got = dict(source.scheme.numbers(source.checkpoint).weights())
        assert got.keys() == expected.keys()
        for tensor, numbers in expected.items():
            torch.testing.assert_close(got[tensor].float(), numbers.float(), rtol=0.01, atol=1e-4)
    with LLM(str(tmp_path / "codes"), **IDS) as llm:
        assert llm.generate([golden_prompts(name)[0].input_ids], greedy_params(name))


def test_codes_of_four_bits_that_are_none(tmp_path: Path) -> None:
    folder = tmp_path / "codes"
    import_model(exported(tmp_path, NAME, "int4"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.gate_proj.weight"][3, 5] = 11
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"gate_proj\.weight has 11, which is no code of 4 bits"):
        LLM(str(folder), **IDS)


def test_codes_of_four_bits_are_those_of_their_packer(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    file = exported(tmp_path, NAME, "int4")
    args = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    tensors = load_file(file)
    for stem, expected in numbers_of(file).items():
        parts = {name.rpartition(".")[2]: tensor.float() if name.endswith("_scale") else tensor
                 for name, tensor in tensors.items() if name.startswith(f"{stem}.")}  # fmt: skip
        made = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
        torch.testing.assert_close(made.float(), torch.from_numpy(expected))


def assert_golden(folder: Path, apart: float) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt in golden_prompts(NAME):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt.input_ids])).logits[0]
        torch.testing.assert_close(logits, prompt.prefill_logits.float(), atol=apart, rtol=apart)


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    out = exported(tmp_path)
    before = out.read_bytes()
    with pytest.raises(OptionError, match=r"there already.*--force"):
        exported(tmp_path)
    out.write_bytes(b"something else")
    export_model(str(GOLDEN / NAME), out, force=True)
    assert out.read_bytes() == before


@pytest.mark.parametrize("name", ["model.gguf", "model.bin", "model", "model.safetensors.old"])
def test_a_name_that_is_no_models_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"does not end with \.safetensors.*name it model"):
        export_model(str(GOLDEN / NAME), tmp_path / name, force=True)
    assert not any(tmp_path.glob("model*"))


def test_a_name_that_no_file_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"File name too long; take another name"):
        export_model(str(GOLDEN / NAME), tmp_path / f"{'x' * 300}.safetensors")


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"out\.safetensors cannot be written: .+"):
            export_model(str(GOLDEN / NAME), out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [each for each in tmp_path.iterdir() if "out" in each.name]


DIES = """
import os, signal, sys
from pathlib import Path
from engine_core.checkpoint.one_file import write_whole

def write(temporary):
    at = temporary / "a" if sys.argv[2] else temporary
    at.write_bytes(b"half")
    print(temporary.name, flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)

write_whole(Path(sys.argv[1]), write, folder=bool(sys.argv[2]))
"""


@pytest.mark.skipif(not Path("/proc/sys/kernel/random/boot_id").exists(), reason="not Linux")
@pytest.mark.parametrize("folder", ["", "folder"])
def test_what_a_killed_process_left_is_removed_by_the_next(folder: str, tmp_path: Path) -> None:
    """Not while it runs, and nothing of other names."""
    path = tmp_path / "out[1].safetensors"
    other = tmp_path / ".out[1].safetensors.0123456789ab-01234567.tmp"
    other.touch()

    def fill(temporary: Path) -> None:
        (temporary / "a" if folder else temporary).write_bytes(b"whole")

    command = [sys.executable, "-c", DIES, str(path), folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        left = tmp_path / process.stdout.readline().decode().strip()
        write_whole(path, fill, folder=bool(folder))
        assert left.exists()
        process.communicate(b"\n")
    assert left.exists()
    if folder:
        shutil.rmtree(path)
    write_whole(path, fill, folder=bool(folder))
    assert {each.name for each in tmp_path.iterdir()} == {path.name, other.name}


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def rewrite(file: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_changed_tensor_is_named_by_the_deep_check(tmp_path: Path) -> None:
    file = exported(tmp_path)
    assert check_model(file, EngineConfig(**IDS), deep=True).exit_code == 0
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    header, _ = header_of(file)
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    last = max(entries, key=lambda name: entries[name]["data_offsets"])
    report = check_model(file, EngineConfig(**IDS), deep=True)
    (problem,) = [each for each in report.problems if each.severity == "error"]
    assert (problem.code, problem.names) == ("weights-changed", (last,))
    with pytest.raises(CheckpointError, match=last):
        import_model(file, tmp_path / "folder")


def changes(header: dict[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
    """Headers, hashed as if they had been written so, and what is said of each."""
    metadata = header["__metadata__"]
    first = next(name for name in header if name != "__metadata__")
    other = {name: header[name] for name in header if name not in ("__metadata__", first)}
    return {
        "version": (header | {"__metadata__": metadata | {"engine_core.version": "2"}}, "version"),
        "path": (header | {"__metadata__": metadata | {"file:../x": ""}}, "no name of a file"),
        "absolute": (header | {"__metadata__": metadata | {"file:/x": ""}}, "no name of a file"),
        "base64": (header | {"__metadata__": metadata | {"base64:x": "?"}}, "cannot be read"),
        "no config": (header | {"__metadata__": {key: text for key, text in metadata.items()
                                                 if key != "file:config.json"}}, "config.json"),
        "config": (header | {"__metadata__": metadata | {"file:config.json": "{"}}, "not JSON"),
        "no settings": (header | {"__metadata__": metadata | {"engine_core.scheme": "int4"}},
                        "quantization_config"),
        "gap": ({"__metadata__": metadata, **other}, "belong"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["version", "path", "absolute", "base64", "no config", "config", "no settings", "gap"]
)
def test_a_header_that_lies_is_refused(name: str, tmp_path: Path) -> None:
    file = exported(tmp_path)
    header, data = header_of(file)
    changed, said = changes(header)[name]
    sign(changed)
    rewrite(file, changed, data)
    with pytest.raises(CorruptCheckpointError, match=said):
        LLM(str(file), **IDS)


def test_any_change_of_the_header_is_refused(tmp_path: Path) -> None:
    file = exported(tmp_path)
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    at = raw.index(b'\\"hidden_size\\": 64') + 18
    file.write_bytes(raw[:at] + b"5" + raw[at + 1 :])
    with pytest.raises(CorruptCheckpointError, match="hash"):
        LLM(str(file), **IDS)
    file.write_bytes(raw[: 8 + length + 1000])
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        LLM(str(file), **IDS)


def test_other_files_of_tensors_are_no_models() -> None:
    with pytest.raises(CorruptCheckpointError, match="engine-core export"):
        LLM(str(GOLDEN / NAME / "model.safetensors"), **IDS)


def test_what_has_no_form_in_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="int8, int4, fp8"):
        exported(tmp_path, NAME, "gguf")
    quantised = exported(tmp_path, NAME, "int8")
    with pytest.raises(OptionError, match="quantised already"):
        export_model(str(quantised), tmp_path / "x.safetensors", EngineConfig(quantization="int4"))
    again = tmp_path / "again.safetensors"
    export_model(str(quantised), again)
    assert tokens_and_logits(again) == tokens_and_logits(quantised)
    folder = tmp_path / "folder"
    shutil.copytree(GOLDEN / NAME, folder)
    with pytest.raises(OptionError, match="not empty"):
        import_model(quantised, folder)


def test_a_packed_matrix_is_a_module_that_knows_its_numbers(tmp_path: Path) -> None:
    def sizes(model: torch.nn.Module) -> list[tuple[int, ...]]:
        layers = [each for each in model.modules() if isinstance(each, MatrixModule)]
        assert all(each.packed is not None for each in layers)
        return [tuple(each.weight.shape) for each in layers]

    with LLM(str(exported(tmp_path, NAME, "int8")), **IDS) as llm:
        (packed,) = llm.apply_model(sizes)
    with LLM(str(GOLDEN / NAME), **IDS, quantization="int8") as llm:
        assert llm.apply_model(sizes) == [packed]
