"""Golden checkpoints written as llama.cpp's converter writes them, and read back; K-quants too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from golden_fixtures import GOLDEN, check_output, golden_prompts, greedy_params
from safetensors.numpy import load_file, save_file

from engine_core import LLM, SamplingParams
from engine_core.checkpoint import GGUFFile
from engine_core.errors import CheckpointError
from engine_core_gemma.gguf import Gemma2GGUFAdapter, Gemma3GGUFAdapter

ADAPTERS = {"gemma2": Gemma2GGUFAdapter, "gemma3": Gemma3GGUFAdapter}
FIXTURES = {"gemma2-caps": "gemma2", "gemma3-ropes": "gemma3"}
# The files do not say it: llama.cpp knows the sizes that were published.
SCALAR = {"query_pre_attn_scalar": 10}


@pytest.fixture(autouse=True)
def _own_disk_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def golden_config(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text())
    return config


def write(
    path: Path,
    architecture: str,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    keys: dict[str, Any] | None = None,
    blocks: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """As ``conversion/gemma.py`` does: norms have 1 added; ``blocks`` are written as they are."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base(config["rope_theta"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    else:
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])
        writer.add_float32("gemma3.rope.freq_base_swa", config["rope_local_base_freq"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    for key, value in (keys or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{architecture}.{key}", value)
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"]
    )
    for tensor, array in tensors.items():
        name = names.get_name(tensor, (".weight", ".bias"))
        writer.add_tensor(name, array + 1 if tensor.endswith("norm.weight") else array)
    for tensor, (raw, kind) in (blocks or {}).items():
        name = names.get_name(tensor, (".weight",))
        writer.add_tensor(name, raw, raw_shape=raw.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_golden(path: Path, name: str, **more: Any) -> Path:
    tensors = load_file(GOLDEN / name / "model.safetensors")
    return write(path, FIXTURES[name], golden_config(name), tensors, **more)


def adapter(path: Path, name: str) -> Any:
    return ADAPTERS[FIXTURES[name]](GGUFFile(path))


@pytest.mark.parametrize("name", FIXTURES)
def test_a_golden_checkpoint_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    path = write_golden(tmp_path / "x.gguf", name)
    stated = {**golden_config(name), "query_pre_attn_scalar": 16}
    translated = adapter(path, name)
    config = translated.config()
    assert stated.keys() - config.keys() <= {
        *("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "hidden_act"),
        *("sliding_window_pattern", "attn_logit_softcapping"),
    }
    for key in config.keys() & stated.keys():
        assert config[key] == stated[key], key
    every = stated.get("sliding_window_pattern", 2)
    kinds = [(i + 1) % every == 0 for i in range(4)]
    assert [kind == "full_attention" for kind in config["layer_types"]] == kinds
    tensors = load_file(GOLDEN / name / "model.safetensors")
    file = GGUFFile(path)
    assert {translated.tensor_name(tensor) for tensor in file.tensors} == tensors.keys()
    for tensor in file.tensors:
        array = translated.transform(tensor, file.read(tensor))
        wanted = tensors[translated.tensor_name(tensor)]
        np.testing.assert_allclose(array, wanted, rtol=0, atol=2e-7 * ("norm" in tensor))


@pytest.mark.parametrize("name", FIXTURES)
def test_a_gguf_file_gives_the_golden_tokens_and_logits(tmp_path: Path, name: str) -> None:
    prompts = golden_prompts(name)
    path = write_golden(tmp_path / "x.gguf", name)
    settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True}
    with LLM(str(path), hf_overrides=SCALAR, max_model_len=160, **settings) as llm:
        outputs = llm.generate([prompt.input_ids for prompt in prompts], greedy_params(name))
    for output, prompt in zip(outputs, prompts, strict=True):
        check_output(output, prompt)


def k_blocks(
    draw: np.random.Generator, kind: gguf.GGMLQuantizationType, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of one block of 256 with random codes, ``[rows, bytes]``, and their numbers."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    raw = draw.integers(0, 256, (rows, size), dtype=np.uint8)
    # The 16-bit scales of a whole block: first in Q4_K and Q5_K (with the minima's), last in Q6_K.
    scales = [slice(size - 2, size)] if kind.name == "Q6_K" else [slice(0, 2), slice(2, 4)]
    for where, scale in zip(scales, (3e-5, 5e-4), strict=False):
        scale = scale if kind.name == "Q6_K" else scale * 4
        values = (scale * draw.uniform(0.5, 1.5, rows)).astype(np.float16)
        raw[:, where] = values.view(np.uint8).reshape(rows, 2)
    numbers: np.ndarray = gguf.dequantize(raw, kind)
    return raw, numbers


@pytest.mark.parametrize("architecture", ADAPTERS)
def test_k_quants_are_the_numbers_that_gguf_makes_of_them(
    tmp_path: Path, architecture: str
) -> None:
    """As Q4_K_M files mix them; the same model as a checkpoint of the dequantised numbers."""
    draw = np.random.default_rng(0)
    base = "gemma2-caps" if architecture == "gemma2" else "gemma3-ropes"
    config = {
        **golden_config(base),
        "hidden_size": 256,
        "intermediate_size": 256,
        "head_dim": 64,
        "num_hidden_layers": 2,
        "query_pre_attn_scalar": 64,
        "vocab_size": 64,
    }
    kinds = gguf.GGMLQuantizationType
    matrices = {
        "self_attn.q_proj": (256, kinds.Q4_K),
        "self_attn.k_proj": (128, kinds.Q4_K),
        "self_attn.v_proj": (128, kinds.Q6_K),
        "self_attn.o_proj": (256, kinds.Q5_K),
        "mlp.gate_proj": (256, kinds.Q4_K),
        "mlp.up_proj": (256, kinds.Q4_K),
        "mlp.down_proj": (256, kinds.Q6_K),
    }
    norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
    tensors = {"model.norm.weight": 0.3 * draw.standard_normal(256, dtype=np.float32)}
    blocks, numbers = {}, {}
    wanted = {"model.embed_tokens.weight": (64, kinds.Q6_K)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        wanted |= {f"{at}.{name}.weight": how for name, how in matrices.items()}
        sizes = {f"{norm}_layernorm": 256 for norm in norms}
        if architecture == "gemma3":
            sizes |= {"self_attn.q_norm": 64, "self_attn.k_norm": 64}
        for norm, size in sizes.items():
            tensors[f"{at}.{norm}.weight"] = 0.3 * draw.standard_normal(size, dtype=np.float32)
    for name, (rows, kind) in wanted.items():
        raw, values = k_blocks(draw, kind, rows)
        blocks[name], numbers[name] = (raw, kind), values
    path = write(tmp_path / "x.gguf", architecture, config, tensors, blocks=blocks)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    save_file({**tensors, **numbers}, plain / "model.safetensors")

    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=64)
    prompts = [[5], list(range(3, 23))]
    settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True}
    found = []
    for model, more in (
        (plain, {}),
        (path, {"quantization": "unpacked"}),
        (path, {}),
    ):
        with LLM(str(model), max_model_len=64, **settings, **more) as llm:
            found.append([output.outputs[0] for output in llm.generate(prompts, params)])
    for expected, whole, kept in zip(*found, strict=True):
        assert whole.token_ids == expected.token_ids
        spread = np.std([each.logprob for each in expected.logprobs[0].values()])
        assert spread > 0.1
        for result, tolerance in ((whole, 1e-4), (kept, 0.1 * spread)):
            for index, value in expected.logprobs[0].items():
                assert abs(result.logprobs[0][index].logprob - value.logprob) < tolerance


def test_what_a_file_leaves_out_is_what_llama_cpp_takes() -> None:
    """Kinds of layers, bases and scalars of the published sizes."""

    class File:
        path = "gemma-3-27b.gguf"

        class Embedding:
            shape = (262144, 5376)

        tensors = dict.fromkeys(["token_embd.weight"] * 99, Embedding)

        def __init__(self, architecture: str, **keys: Any) -> None:
            self.metadata = {
                f"{architecture}.{key.replace('__', '.')}": value for key, value in keys.items()
            }

    sizes = {
        "context_length": 8192,
        "embedding_length": 4608,
        "block_count": 46,
        "feed_forward_length": 36864,
        "attention__head_count": 32,
        "attention__head_count_kv": 16,
        "attention__key_length": 128,
        "attention__value_length": 128,
        "attention__layer_norm_rms_epsilon": 1e-6,
    }
    old: Any = Gemma2GGUFAdapter(File("gemma2", **sizes)).config()
    assert old["query_pre_attn_scalar"] == 144
    assert (old["sliding_window"], old["rope_theta"]) == (4096, 10000)
    assert (old["attn_logit_softcapping"], old["final_logit_softcapping"]) == (50, 30)
    assert old["layer_types"] == ["sliding_attention", "full_attention"] * 23
    sizes |= {"embedding_length": 5376, "block_count": 62, "attention__sliding_window": 1024}
    new: Any = Gemma3GGUFAdapter(File("gemma3", **sizes)).config()
    assert new["query_pre_attn_scalar"] == 168
    assert (new["rope_theta"], new["rope_local_base_freq"]) == (1e6, 1e4)
    assert [i for i, kind in enumerate(new["layer_types"]) if kind == "full_attention"] == [
        *range(5, 62, 6)
    ]
    del sizes["attention__sliding_window"]
    whole: Any = Gemma3GGUFAdapter(File("gemma3", **sizes)).config()
    assert whole["sliding_window"] is None
    assert set(whole["layer_types"]) == {"full_attention"}


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"expert_count": 8}, r"gemma2\.expert_count"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, "'yarn' is not one of"),
        ({"rope.dimension_count": 4}, r"rope\.dimension_count"),
        ({"rope.freq_base_swa": 7.0}, r"rope\.freq_base_swa"),
        ({"attention.sliding_window_pattern": "x"}, "must be an integer or 4 booleans, got 'x'"),
    ],
)
def test_a_key_that_cannot_be_translated_is_refused(
    tmp_path: Path, keys: dict[str, Any], names: str
) -> None:
    path = write_golden(tmp_path / "x.gguf", "gemma2-caps", keys=keys)
    with pytest.raises(CheckpointError, match=names):
        adapter(path, "gemma2-caps")


def test_a_tensor_of_another_architecture_is_refused(tmp_path: Path) -> None:
    path = write_golden(tmp_path / "x.gguf", "gemma2-caps")
    with pytest.raises(CheckpointError, match="attn_q_norm"):
        adapter(path, "gemma2-caps").tensor_name("blk.0.attn_q_norm.weight")
