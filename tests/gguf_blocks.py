"""Random matrices in the block types of GGUF files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

# Where a block has float16 numbers, by type.
_HALVES = {**dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL"), (0,)), "Q6_K": (208,)}


def random_blocks(
    type_name: str, rows: int, columns: int, seed: int = 0, scale: float = 1 / 16
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Valid blocks ``[rows, blocks of a row, bytes]``, and the gguf package's numbers of them.

    ``scale`` is the standard deviation of the numbers that all of a block are multiples of.
    """
    kind = gguf.GGMLQuantizationType[type_name]
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(seed)
    raw = draw.integers(0, 256, (rows, columns // size, nbytes), dtype=np.uint8)
    for at in _HALVES.get(type_name, (0, 2)):
        halves = draw.standard_normal((rows, columns // size, 1)) * scale
        raw[..., at : at + 2] = halves.astype(np.float16).view(np.uint8)
    return raw, gguf.dequantize(raw.reshape(rows, -1), kind).reshape(rows, columns)


HIDDEN, VOCABULARY, LAYERS = 256, 96, 2
# As llama.cpp mixes them, and one type that is unpacked.
TYPES = {
    "attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q5_K",
    "ffn_gate": "Q4_0", "ffn_up": "Q4_0", "ffn_down": "Q8_0",
}  # fmt: skip


def write_mixed(path: Path) -> Path:
    """A GGUF file of a small Llama, of random blocks of many types."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)

    def add(name: str, type_name: str, rows: int) -> None:
        raw, numbers = random_blocks(type_name, rows, HIDDEN, seed=len(name))
        kind = gguf.GGMLQuantizationType[type_name]
        # Numbers of the usual size, so that the model's results depend on all of them.
        raw, _ = random_blocks(
            type_name, rows, HIDDEN, seed=len(name), scale=1 / (16 * numbers.std() * HIDDEN**0.5)
        )
        writer.add_tensor(name, raw.reshape(rows, -1), raw_dtype=kind)

    ones = np.ones(HIDDEN, np.float32)
    add("token_embd.weight", "Q6_K", VOCABULARY)
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", ones)
        for name, type_name in TYPES.items():
            chosen = "IQ4_NL" if (layer, name) == (1, "attn_output") else type_name
            rows = HIDDEN // 2 if name in ("attn_k", "attn_v") else HIDDEN
            add(f"blk.{layer}.{name}.weight", chosen, rows)
    writer.add_tensor("output_norm.weight", ones)
    add("output.weight", "Q5_0", VOCABULARY)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
