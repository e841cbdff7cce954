"""Makes checkpoint files by hand, good and broken, without the code under test."""

import json
import struct
from pathlib import Path

import gguf
import numpy as np

CONFIG = {"architectures": ["TinyForCausalLM"], "hidden_size": 4, "rope": {"type": "a", "base": 1}}


def write_config(folder: Path, **values) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | values))
    return folder


def safetensors_bytes(header, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str, shape, begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_index(folder: Path, weight_map, single: str = "model.safetensors") -> None:
    (folder / f"{single}.index.json").write_text(json.dumps({"weight_map": weight_map}))


VALUE_CODES = {0: "B", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q"}


class GGUFBytes:
    """The bytes of a GGUF file, piece by piece: https://github.com/ggml-org/ggml/docs/gguf.md."""

    def __init__(self, version: int = 3, magic: bytes = b"GGUF"):
        self.start = magic + struct.pack("<I", version)
        self.pairs: list[bytes] = []
        self.infos: list[bytes] = []
        self.data = b""

    @staticmethod
    def string(text: str | bytes) -> bytes:
        raw = text.encode() if isinstance(text, str) else text
        return struct.pack("<Q", len(raw)) + raw

    def pair(self, key: str, type_: int, value) -> "GGUFBytes":
        if type_ == 8:
            raw = self.string(value)
        elif isinstance(value, bytes):
            raw = value
        else:
            raw = struct.pack("<" + VALUE_CODES[type_], value)
        self.pairs.append(self.string(key) + struct.pack("<I", type_) + raw)
        return self

    def tensor(self, name: str, dims, type_: int = 0, offset: int = 0) -> "GGUFBytes":
        self.infos.append(
            self.string(name)
            + struct.pack("<I", len(dims))
            + b"".join(struct.pack("<Q", dim) for dim in dims)
            + struct.pack("<IQ", type_, offset)
        )
        return self

    def bytes(self, data: bytes = b"", tensors: int | None = None, pairs: int | None = None):
        counts = struct.pack(
            "<QQ",
            len(self.infos) if tensors is None else tensors,
            len(self.pairs) if pairs is None else pairs,
        )
        head = self.start + counts + b"".join(self.pairs) + b"".join(self.infos)
        return head + b"\0" * (-len(head) % 32) + data


def llama_cpp_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp wants them: the halves of each head interleaved."""
    out = np.empty_like(rows)
    head_dim = rows.shape[0] // heads
    for head in range(heads):
        for i in range(head_dim):
            half, place = divmod(i, head_dim // 2)
            out[head * head_dim + 2 * place + half] = rows[head * head_dim + i]
    return out


def write_llama_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    config: dict,
    *,
    quantise: str = "F32",
    keys: dict | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    tokenizer=None,
) -> Path:
    """An ordinary Llama checkpoint as llama.cpp's converter writes it."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    )
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    for key, value in (keys or {}).items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }[type(value)]
        add(key, value)
    if tokenizer is not None:
        tokenizer(writer)
    for name, array in tensors.items():
        if "q_proj" in name:
            array = llama_cpp_order(array, config["num_attention_heads"])
        elif "k_proj" in name:
            array = llama_cpp_order(array, config["num_key_value_heads"])
        type_ = gguf.GGMLQuantizationType["F32" if array.ndim == 1 else quantise]
        data = gguf.quantize(np.ascontiguousarray(array), type_)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=type_)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
