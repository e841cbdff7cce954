import os
import shutil
import subprocess
import sys
import tracemalloc

import gguf
import numpy as np
import pytest
import torch
from checkpoint_files import llama_cpp_order, write_llama_gguf
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine_core.checkpoint import GGUFFile, open_checkpoint
from engine_core.errors import CheckpointError, ConfigError
from engine_core_llama.gguf import LlamaGGUFAdapter

ADAPTERS = {"llama": LlamaGGUFAdapter}
CONFIG = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def random_llama(config=CONFIG, *, tied=False, biases=(), seed=0):
    """Random tensors under their names in an ordinary checkpoint."""
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        linears = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in linears.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if any(part in name for part in biases):
                shapes[f"{prefix}{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def opened(path, dtype="float32", **options):
    return open_checkpoint(path, gguf_adapters=ADAPTERS, dtype=dtype, **options)


def assert_same(checkpoint, tensors):
    read = dict(checkpoint.weights())
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], torch.from_numpy(tensor)), name


def inverse_frequencies(config):
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if kind == "default":
        dim = config.head_dim or config.hidden_size // config.num_attention_heads
        powers = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** powers), 1.0
    return ROPE_INIT_FUNCTIONS[kind](config, "cpu")


@pytest.mark.parametrize("name", ["llama-gqa", "llama-bias-linear", "llama-yarn"])
def test_a_golden_checkpoint_comes_back_as_it_was(tmp_path, golden_llama, name):
    folder, config, tensors = golden_llama(name)
    scaling = config["rope_scaling"] or {}
    keys = {}
    if scaling:
        keys["llama.rope.scaling.type"] = scaling.get("rope_type", scaling.get("type"))
        keys["llama.rope.scaling.factor"] = scaling["factor"]
    if name == "llama-yarn":
        keys["llama.rope.scaling.original_context_length"] = 64
    checkpoint = opened(write_llama_gguf(tmp_path / "x.gguf", tensors, config, keys=keys))
    assert_same(checkpoint, tensors)
    ours, theirs = AutoConfig.from_pretrained(checkpoint.folder), AutoConfig.from_pretrained(folder)
    for key in (*CONFIG, "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias", "dtype"):
        assert getattr(ours, key, None) == getattr(theirs, key, None), key
    (ours, our_factor), (theirs, their_factor) = map(inverse_frequencies, (ours, theirs))
    assert torch.equal(ours, theirs)
    assert our_factor == their_factor


@pytest.mark.parametrize(
    ("theta", "head_dim", "scaling"),
    [
        (500000.0, 128, (8.0, 1.0, 4.0, 8192)),
        (500000.0, 64, (32.0, 1.0, 4.0, 8192)),
        (500000.0, 128, (16.0, 1.0, 4.0, 4096)),
        (500000.0, 16, (8.0, 1.0, 4.0, 64)),
        (10000.0, 64, (2.5, 2.0, 6.0, 1000)),
        (10000.0, 128, (8.0, 1.0, 32.0, 8192)),
        (10000.0, 128, (3.0, 1.0, 1.5, 2048)),
    ],
)
def test_rope_freqs_become_the_llama3_scaling_they_came_from(tmp_path, theta, head_dim, scaling):
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    rope = {"rope_type": "llama3", **dict(zip(names, scaling, strict=True))}
    config = {**CONFIG, "head_dim": head_dim, "rope_theta": theta}
    reference = AutoConfig.for_model("llama", **config, rope_scaling={**rope, "rope_theta": theta})
    wanted, _ = inverse_frequencies(reference)
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    checkpoint = opened(
        write_llama_gguf(
            tmp_path / "x.gguf",
            random_llama(config, tied=True),
            config,
            extra_tensors={"rope_freqs.weight": (plain / wanted).numpy()},
        )
    )
    found, _ = inverse_frequencies(AutoConfig.from_pretrained(checkpoint.folder))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    assert checkpoint.hf_config.tie_word_embeddings
    assert "rope_freqs.weight" not in checkpoint.headers
    if scaling[1] == 1.0:
        assert checkpoint.hf_config.rope_scaling == rope


def test_rope_freqs_of_another_origin_are_refused(tmp_path):
    factors = np.linspace(1.0, 4.0, 8, dtype=np.float32)
    path = write_llama_gguf(
        tmp_path / "x.gguf", random_llama(), CONFIG, extra_tensors={"rope_freqs.weight": factors}
    )
    with pytest.raises(CheckpointError, match=r"x\.gguf: the numbers in rope_freqs\.weight"):
        opened(path)


def test_rope_freqs_of_one_scale_nothing(tmp_path):
    factors = np.ones(8, np.float32)
    path = write_llama_gguf(
        tmp_path / "x.gguf", random_llama(), CONFIG, extra_tensors={"rope_freqs.weight": factors}
    )
    assert opened(path).hf_config.rope_scaling is None


@pytest.mark.parametrize("type_name", [type_.name for type_ in gguf.GGMLQuantizationType])
def test_every_type_is_read_as_gguf_reads_it(tmp_path, type_name):
    type_ = gguf.GGMLQuantizationType[type_name]
    block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    rng = np.random.default_rng(3)
    # More elements than are turned back at once, in rows that do not divide that number.
    raw = rng.integers(0, 256, (301, 256 // block * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "any")
    writer.add_tensor("w", raw, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "x.gguf")
    assert file.tensors["w"].shape == (301, 256)
    with np.errstate(all="ignore"):
        try:
            wanted = gguf.dequantize(raw, type_)
        except NotImplementedError:
            with pytest.raises(CheckpointError, match=rf"x\.gguf: tensor 'w'.*{type_name}"):
                file.read("w")
            return
        found = file.read("w")
    assert found.dtype == np.float32
    # Bit for bit, because random scales are sometimes not a number.
    assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))


def test_a_file_of_usual_types_is_read_without_the_gguf_package(tmp_path):
    """Its import takes as long as the rest of the header."""
    path = write_llama_gguf(tmp_path / "x.gguf", random_llama(), CONFIG, quantise="Q4_1")
    script = (
        "import sys; from pathlib import Path; from engine_core.checkpoint.gguf import GGUFFile; "
        "file = GGUFFile(Path(sys.argv[1])); file.read('output_norm.weight'); "
        "print(sorted({each.type_name for each in file.tensors.values()}), 'gguf' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "['F32', 'Q4_1'] False\n"


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q8_0"])
def test_a_tensor_is_read_without_a_second_copy_of_its_numbers(tmp_path, type_name):
    kind = gguf.GGMLQuantizationType[type_name]
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    raw = gguf.quantize(np.ones((256, 4096), np.float32), kind)
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    tracemalloc.start()
    try:
        assert file.read("w").all()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 1.6 * 256 * 4096 * 4


@pytest.mark.parametrize("quantise", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16", "F32"])
def test_quantised_weights_are_those_of_transformers(tmp_path, quantise):
    path = write_llama_gguf(tmp_path / "x.gguf", random_llama(), CONFIG, quantise=quantise)
    reference = load_gguf_checkpoint(
        path,
        return_tensors=True,
        model_to_load=AutoModelForCausalLM.from_config(
            AutoConfig.for_model("llama", **CONFIG, tie_word_embeddings=False)
        ),
    )["tensors"]
    checkpoint = opened(path)
    read = dict(checkpoint.weights())
    assert read.keys() == reference.keys()
    for name, tensor in read.items():
        assert torch.equal(tensor, reference[name].float()), name
    for dtype in ("bfloat16", "float16"):
        for name, tensor in opened(path, dtype).weights():
            assert torch.equal(tensor, read[name].to(getattr(torch, dtype))), name
    auto = opened(path, "auto")
    own = {"F16": "float16", "F32": "float32"}.get(quantise, "bfloat16")
    assert {header.dtype for header in auto.headers.values()} == {own}
    assert auto.hf_config.dtype == own


def test_smollm2(smollm2_gguf):
    checkpoint = opened(smollm2_gguf, "bfloat16")
    read = dict(checkpoint.weights())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    ours = {names.get_name(name, (".weight",)): tensor for name, tensor in read.items()}
    theirs = gguf.GGUFReader(smollm2_gguf).tensors
    assert ours.keys() == {tensor.name for tensor in theirs}
    for tensor in theirs:
        if tensor.name.startswith("blk.") and tensor.name.split(".")[1] not in ("0", "13", "29"):
            continue
        wanted = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        found = ours[tensor.name].float().numpy()
        if "attn_q" in tensor.name or "attn_k" in tensor.name:
            found = llama_cpp_order(found, found.shape[0] // 64)
        assert torch.equal(torch.from_numpy(found), wanted.bfloat16().float()), tensor.name
    assert checkpoint.hf_config.to_dict() == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "bfloat16",
    }
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_a_gguf_file_in_a_folder_of_its_own(tmp_path):
    tensors = random_llama()
    write_llama_gguf(tmp_path / "x.gguf", tensors, CONFIG)
    assert_same(opened(tmp_path), tensors)
    assert_same(opened(tmp_path, load_format="gguf"), tensors)


def test_overrides_reach_a_converted_config(tmp_path):
    path = write_llama_gguf(tmp_path / "x.gguf", random_llama(), CONFIG)
    config = opened(path, hf_overrides={"rope_theta": 5.0}).hf_config
    assert config.rope_theta == 5.0
    assert opened(path).hf_config.rope_theta == 10000.0


def test_conversions_are_kept_by_file_dtype_and_adapter(tmp_path, cache_home):
    class Newer(LlamaGGUFAdapter):
        version = LlamaGGUFAdapter.version + 1

    # As if another version of the package were installed: the class keeps its name.
    Newer.__module__, Newer.__qualname__ = LlamaGGUFAdapter.__module__, "LlamaGGUFAdapter"
    path = write_llama_gguf(tmp_path / "x.gguf", random_llama(), CONFIG)
    first = opened(path).folder
    assert first.parent == cache_home
    assert opened(path).folder == first
    folders = {first, opened(path, "bfloat16").folder}
    folders.add(open_checkpoint(path, gguf_adapters={"llama": Newer}, dtype="float32").folder)
    os.utime(path, (1, 1))
    folders.add(opened(path).folder)
    assert len(folders) == 4


def test_the_cache_may_vanish_at_any_moment(tmp_path, cache_home):
    tensors = random_llama()
    path = write_llama_gguf(tmp_path / "x.gguf", tensors, CONFIG)
    checkpoint = opened(path)
    shutil.rmtree(cache_home)
    assert_same(checkpoint, tensors)
    checkpoint = opened(path)
    (checkpoint.folder / "config.json").unlink()
    assert_same(opened(path), tensors)


def test_an_unknown_dtype(tmp_path):
    path = write_llama_gguf(tmp_path / "x.gguf", random_llama(), CONFIG)
    with pytest.raises(ConfigError, match="'int4' is not one of auto, float32"):
        opened(path, "int4")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"llama.expert_count": 8, "llama.expert_used_count": 2},
            r"no tensor 'blk\.0\.ffn_gate_inp\.weight'",
        ),
        ({"llama.logit_scale": 0.5}, r"llama\.logit_scale have no meaning in a Llama config"),
        ({"llama.attention.sliding_window": 64}, r"llama\.attention\.sliding_window"),
        ({"llama.attention.key_length": 32}, "keys have 32, values 32, and 16 of a key"),
        (
            {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0},
            "'longrope' is not one of none, linear, yarn",
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.attn_factor": 0.5,
            },
            r"llama\.rope\.scaling\.attn_factor",
        ),
        ({"llama.rope.scaling.factor": "x"}, r"llama\.rope\.scaling\.factor must be a number"),
    ],
)
def test_what_no_llama_config_says_is_refused(tmp_path, keys, message, cache_home):
    path = write_llama_gguf(tmp_path / "x.gguf", random_llama(), CONFIG, keys=keys)
    with pytest.raises(CheckpointError, match=rf"x\.gguf.*{message}"):
        opened(path)
    assert not [entry for entry in cache_home.iterdir() if entry.is_dir()]


def test_keys_that_change_nothing_are_accepted(tmp_path):
    keys = {
        "llama.expert_count": 0,
        "llama.rope.scaling.finetuned": True,
        "llama.tensor_data_layout": "Meta",
    }
    path = write_llama_gguf(tmp_path / "x.gguf", random_llama(), CONFIG, keys=keys)
    assert opened(path).hf_config.rope_scaling is None


@pytest.mark.parametrize("old", ["llama.rope.scale_linear", "llama.rope.scaling.factor"])
def test_a_factor_without_a_type_is_linear(tmp_path, old):
    path = write_llama_gguf(tmp_path / "x.gguf", random_llama(), CONFIG, keys={old: 4.0})
    assert opened(path).hf_config.rope_scaling == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("biases", "config"),
    [
        ((), (False, False)),
        (("self_attn",), (True, False)),
        (("mlp",), (False, True)),
        (("self_attn", "mlp"), (True, True)),
    ],
)
def test_biases(tmp_path, biases, config):
    tensors = random_llama(biases=biases)
    checkpoint = opened(write_llama_gguf(tmp_path / "x.gguf", tensors, CONFIG))
    assert_same(checkpoint, tensors)
    assert (checkpoint.hf_config.attention_bias, checkpoint.hf_config.mlp_bias) == config


def test_biases_on_some_linears_only(tmp_path):
    tensors = random_llama(biases=("q_proj", "k_proj", "v_proj"))
    path = write_llama_gguf(tmp_path / "x.gguf", tensors, CONFIG)
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_q\.bias' but not 'blk\.0\.attn_out"):
        opened(path)


def test_tensors_that_are_missing_or_no_part_of_a_llama(tmp_path):
    tensors = random_llama()
    short = {name: t for name, t in tensors.items() if "layers.1.mlp.up_proj" not in name}
    with pytest.raises(CheckpointError, match=r"no tensor 'blk\.1\.ffn_up\.weight' \(1 missing\)"):
        opened(write_llama_gguf(tmp_path / "short.gguf", short, CONFIG))
    extra = {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}
    path = write_llama_gguf(tmp_path / "extra.gguf", tensors, CONFIG, extra_tensors=extra)
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_q_norm\.weight' is no part"):
        opened(path)


def test_a_type_that_cannot_be_turned_back(tmp_path, cache_home):
    extra = {"blk.0.attn_rot_embd.weight": np.ones(16, np.int8)}
    path = write_llama_gguf(tmp_path / "ok.gguf", random_llama(), CONFIG, extra_tensors=extra)
    assert opened(path).has_weights, "it is not read"
    tensors = {**random_llama(), "model.norm.weight": np.ones(64, np.float32)}
    del tensors["model.norm.weight"]
    extra = {"output_norm.weight": np.ones(64, np.int8)}
    path = write_llama_gguf(tmp_path / "x.gguf", tensors, CONFIG, extra_tensors=extra)
    with pytest.raises(CheckpointError, match=r"x\.gguf: tensor 'output_norm.weight'.* I8"):
        opened(path)


def test_an_adapter_that_changes_shapes_is_found_out(tmp_path):
    class Bad(LlamaGGUFAdapter):
        def transform(self, name, array):
            return array[:1]

    path = write_llama_gguf(tmp_path / "x.gguf", random_llama(), CONFIG)
    with pytest.raises(CheckpointError, match=r"Bad\.transform made"):
        open_checkpoint(path, gguf_adapters={"llama": Bad})


def test_an_adapter_that_names_two_tensors_alike_is_found_out(tmp_path):
    class Bad(LlamaGGUFAdapter):
        def tensor_name(self, name):
            return "same"

    path = write_llama_gguf(tmp_path / "x.gguf", random_llama(), CONFIG)
    with pytest.raises(CheckpointError, match="are both 'same'"):
        open_checkpoint(path, gguf_adapters={"llama": Bad})
