import json
import shutil
import subprocess
import sys

import pytest
import torch
from checkpoint_files import CONFIG, entry, safetensors_bytes, write_config, write_index
from safetensors.torch import save_file

from engine_core.checkpoint import open_checkpoint, read_generation_config
from engine_core.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    UnknownArchitectureError,
)

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b.weight": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "scalar": torch.tensor(2.5),
    "nothing": torch.empty(0, 7),
}


def same(checkpoint, tensors) -> bool:
    read = dict(checkpoint.weights())
    assert list(read) == list(checkpoint.headers)
    return read.keys() == tensors.keys() and all(
        read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
        for name, tensor in tensors.items()
    )


@pytest.fixture
def folder(tmp_path):
    return write_config(tmp_path / "model")


def test_single_safetensors(folder):
    save_file(TENSORS, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.folder == folder
    assert checkpoint.hf_config.to_dict() == CONFIG
    assert checkpoint.generation_config == {}
    assert checkpoint.has_weights
    header = checkpoint.headers["b.weight"]
    assert (header.name, header.dtype, header.shape) == ("b.weight", "bfloat16", (2, 3))
    assert (header.file, header.nbytes) == (folder / "model.safetensors", 12)
    assert checkpoint.total_bytes == 48 + 12 + 4
    assert same(checkpoint, TENSORS)


@pytest.mark.parametrize(
    "dtype",
    [
        "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
        "float16", "bfloat16", "float32", "float64",
        "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
    ],
)  # fmt: skip
def test_every_dtype_keeps_its_bytes(folder, dtype):
    tensor = torch.arange(48, dtype=torch.uint8).view(getattr(torch, dtype))
    if dtype == "bool":
        tensor = tensor.view(torch.uint8).remainder(2).bool()
    save_file({"x": tensor}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    ((_, read),) = checkpoint.weights()
    assert checkpoint.headers["x"].dtype == dtype
    assert read.dtype == tensor.dtype
    assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))


def test_data_off_the_alignment_of_its_type(folder):
    value = torch.tensor([1.5, -2.0])
    header = {"x": entry("F32", [2], 1, 9), "pad": entry("U8", [1], 0, 1)}
    raw = safetensors_bytes(header, b"\7" + value.view(torch.uint8).numpy().tobytes())
    (folder / "model.safetensors").write_bytes(raw)
    read = dict(open_checkpoint(folder).weights())
    assert torch.equal(read["x"], value)
    assert read["x"].data_ptr() % 4 == 0


def test_writing_to_a_tensor_leaves_the_file_alone(folder):
    save_file(TENSORS, folder / "model.safetensors")
    before = (folder / "model.safetensors").read_bytes()
    dict(open_checkpoint(folder).weights())["a.weight"].zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def test_it_outlives_its_files(folder):
    save_file(TENSORS, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    shutil.rmtree(folder)
    assert same(checkpoint, TENSORS)


def test_sharded_safetensors_of_save_pretrained(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.hf_config.hidden_size == 32
    assert checkpoint.generation_config["eos_token_id"] == config.eos_token_id
    assert same(checkpoint, model.state_dict())


def test_single_bin(folder):
    torch.save(TENSORS, folder / "pytorch_model.bin")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.headers["b.weight"].shape == (2, 3)
    assert checkpoint.headers["b.weight"].dtype == "bfloat16"
    assert checkpoint.total_bytes == 48 + 12 + 4
    assert same(checkpoint, TENSORS)


def test_sharded_bin(folder):
    names = list(TENSORS)
    weight_map = {}
    for part in range(2):
        shard = {name: TENSORS[name] for name in names[part::2]}
        torch.save(shard, folder / f"pytorch_model-{part}.bin")
        weight_map |= dict.fromkeys(shard, f"pytorch_model-{part}.bin")
    write_index(folder, weight_map, "pytorch_model.bin")
    assert same(open_checkpoint(folder), TENSORS)


def test_tied_tensors_in_a_bin_file(folder):
    weight = torch.arange(6.0).view(2, 3)
    torch.save({"a": weight, "b": weight, "c": weight.T}, folder / "pytorch_model.bin")
    assert same(open_checkpoint(folder), {"a": weight, "b": weight, "c": weight.T})


def test_safetensors_come_before_bin(folder):
    save_file({"x": torch.ones(1)}, folder / "model.safetensors")
    torch.save({"x": torch.zeros(1)}, folder / "pytorch_model.bin")
    assert same(open_checkpoint(folder), {"x": torch.ones(1)})
    assert same(open_checkpoint(folder, load_format="bin"), {"x": torch.zeros(1)})


def test_dummy_needs_only_a_config(folder):
    checkpoint = open_checkpoint(folder, load_format="dummy")
    assert not checkpoint.has_weights
    assert dict(checkpoint.headers) == {}
    assert checkpoint.total_bytes == 0
    assert list(checkpoint.weights()) == []


def test_overrides_merge_key_by_key(folder):
    overrides = {"hidden_size": 8, "rope": {"base": 2}, "new": {"x": 1}, "architectures": ["B"]}
    config = open_checkpoint(folder, load_format="dummy", hf_overrides=overrides).hf_config
    assert config.to_dict() == {
        "architectures": ["B"],
        "hidden_size": 8,
        "rope": {"type": "a", "base": 2},
        "new": {"x": 1},
    }


def test_an_override_may_replace_an_object_or_a_number(folder):
    overrides = {"rope": None, "hidden_size": {"x": 1}}
    config = open_checkpoint(folder, load_format="dummy", hf_overrides=overrides).hf_config
    assert config.rope is None
    assert config.hidden_size == {"x": 1}


def test_an_override_needs_a_name(folder):
    with pytest.raises(ConfigError, match="hf_overrides: 3"):
        open_checkpoint(folder, load_format="dummy", hf_overrides={"rope": {3: 1}})


def test_generation_config(folder):
    assert read_generation_config(folder) == {}
    (folder / "generation_config.json").write_text('{"top_p": 0.9}')
    assert read_generation_config(folder) == {"top_p": 0.9}
    (folder / "generation_config.json").write_text("[1]")
    with pytest.raises(CorruptCheckpointError, match=r"generation_config\.json holds a JSON list"):
        open_checkpoint(folder, load_format="dummy")


def test_formats_that_do_not_fit(folder, tmp_path):
    save_file(TENSORS, folder / "model.safetensors")
    with pytest.raises(CheckpointNotFoundError, match=r"no weight files of format bin.*config\.j"):
        open_checkpoint(folder, load_format="bin")
    with pytest.raises(CheckpointNotFoundError, match=r"has no \.gguf file"):
        open_checkpoint(folder, load_format="gguf")
    with pytest.raises(ConfigError, match="'onnx' is not one of"):
        open_checkpoint(folder, load_format="onnx")
    with pytest.raises(CheckpointNotFoundError, match="neither a folder"):
        open_checkpoint(tmp_path / "absent")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"'dummy' does not fit the GGUF file .*x\.gguf"):
        open_checkpoint(tmp_path / "x.gguf", load_format="dummy")


def test_a_folder_with_several_gguf_files_needs_a_choice(tmp_path):
    for name in ("q4.gguf", "q8.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointNotFoundError, match=r"name one: q4\.gguf, q8\.gguf"):
        open_checkpoint(tmp_path)


def test_a_gguf_file_needs_an_adapter(tmp_path):
    from checkpoint_files import GGUFBytes

    path = tmp_path / "x.gguf"
    path.write_bytes(GGUFBytes().pair("general.architecture", 8, "mamba").bytes())
    with pytest.raises(UnknownArchitectureError, match=r"x\.gguf has the GGUF .*'mamba'.*are: lla"):
        open_checkpoint(path, gguf_adapters={"llama": object})


def test_opening_brings_no_torch(folder):
    save_file(TENSORS, folder / "model.safetensors")
    code = (
        "import sys; from pathlib import Path; from engine_core.checkpoint import open_checkpoint;"
        "c = open_checkpoint(Path(sys.argv[1])); print(len(c.headers), "
        "[m for m in ('torch', 'numpy', 'transformers', 'gguf') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "4 []"


def test_the_config_is_read_as_it_stands(folder):
    (folder / "config.json").write_text(json.dumps({"a": None, "b": [1, {"c": 2}]}))
    config = open_checkpoint(folder, load_format="dummy").hf_config
    assert config.to_dict() == {"a": None, "b": [1, {"c": 2}]}
