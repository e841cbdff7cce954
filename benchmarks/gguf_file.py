"""A GGUF file of random blocks, in a model's shape."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

VOCABULARY = "Q6_K"
# Where a block has its float16 factors, by its type: small ones make finite numbers of all blocks.
_FACTORS = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
}
_DRAWN = 1 << 22


def random_blocks(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Bytes ``[rows, bytes of a row]`` whose numbers are about 0.02 in size; some repeat.

    Raises:
        ValueError: the type is none of those that are known here.
    """
    if kind not in _FACTORS:
        raise ValueError(f"{kind!r} is none of {', '.join(_FACTORS)}")
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    count = rows * columns // numbers
    drawn = min(count, _DRAWN // size)
    blocks = np.random.default_rng(seed).integers(0, 256, (drawn, size), dtype=np.uint8)
    small = np.frombuffer(np.float16(1e-4 if numbers == 256 else 3e-3).tobytes(), np.uint8)
    for place in _FACTORS[kind]:
        blocks[:, place : place + 2] = small
    # Another run of the same blocks for each row, so that no two rows are the same.
    return np.resize(blocks, (count, size)).reshape(rows, -1)


def begin(config: Mapping[str, Any], path: Path) -> gguf.GGUFWriter:
    """A file of a Llama of this config, which tensors may be added to."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    return writer


def end(writer: gguf.GGUFWriter) -> None:
    """Write it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(config: dict[str, Any], kind: str, path: Path) -> Path:
    """Write a Llama of this config whose linears are of a type and whose vocabulary is Q6_K."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_size = hidden // heads * config["num_key_value_heads"]
    shapes = {
        "attn_q": (hidden, hidden), "attn_k": (kv_size, hidden), "attn_v": (kv_size, hidden),
        "attn_output": (hidden, hidden), "ffn_gate": (config["intermediate_size"], hidden),
        "ffn_up": (config["intermediate_size"], hidden),
        "ffn_down": (hidden, config["intermediate_size"]),
    }  # fmt: skip
    writer = begin(config, path)

    def add(name: str, of: str, rows: int, columns: int) -> None:
        blocks = random_blocks(of, rows, columns, seed=len(name))
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[of])

    ones = np.ones(hidden, np.float32)
    for name in ("token_embd", "output"):
        add(f"{name}.weight", VOCABULARY, config["vocab_size"], hidden)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(config["num_hidden_layers"]):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", ones)
        for name, shape in shapes.items():
            add(f"blk.{layer}.{name}.weight", kind, *shape)
    end(writer)
    return path
