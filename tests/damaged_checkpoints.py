"""Damaged checkpoints: a good one of each kind, and seeded changes to one of its files."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoint_files import GGUFBytes, safetensors_bytes, write_llama_gguf
from golden_fixtures import GOLDEN
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine_core.configs import EngineConfig
from engine_core.engine.export import export_model

# Another type, another size, or what JSON and UTF-8 can say and little else can.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 10**30, -(10**18), 0.0, -0.5, 1e-300, 1e308),
    *(
        float("inf"),
        float("-inf"),
        float("nan"),
        "",
        "a",
        "\0",
        "\ud800",
        "é" * 400,
        "../x",
        "/etc",
    ),
    *("{{ x", "##", "a b", [], {}, [[]], [None], [1, "a"], {"type": "x"}, {"": {}}, [[[[[[1]]]]]]),
)
TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "I8": "int8", "I32": "int32", "I64": "int64"}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def alphabet() -> list[str]:
    return ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc"]


def write_good(folder: Path) -> None:
    """One good checkpoint of each kind, under the names of ``KINDS``'s readers."""
    plain = folder / "folder"
    plain.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "llama-gqa" / file, plain / file)
    vocabulary = {token: index for index, token in enumerate(alphabet())}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("ab", "c")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(plain / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False, "special": True},
        "added_tokens_decoder": {"1": {"content": "<s>", "special": True}},
        "extra_special_tokens": ["<unk>"],
        "chat_template": TEMPLATE,
        "model_max_length": 128,
    }
    write_json(plain / "tokenizer_config.json", settings)
    generation = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
        "eos_token_id": [2],
        "bos_token_id": 1,
        "suppress_tokens": [5],
        "bad_words_ids": [[6, 7]],
        "max_new_tokens": 8,
    }
    write_json(plain / "generation_config.json", generation)

    tensors = load_file(plain / "model.safetensors")
    sharded = Path(shutil.copytree(plain, folder / "sharded"))
    shutil.move(sharded / "model.safetensors", sharded / "a.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "a.safetensors")}
    write_json(sharded / "model.safetensors.index.json", index)

    binary = Path(shutil.copytree(plain, folder / "bin"))
    (binary / "model.safetensors").unlink()
    state = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    torch.save(state, binary / "pytorch_model.bin")

    write_gguf(folder / "good.gguf")
    export_model(str(plain), folder / "good.safetensors", EngineConfig(quantization="int4"))


def write_gguf(path: Path) -> None:
    config = {
        "vocab_size": len(alphabet()),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    rng = np.random.default_rng(0)
    rows = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 64}
    shapes = {"model.embed_tokens.weight": (len(alphabet()), 64), "model.norm.weight": (64,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, size in rows.items():
            shapes[f"{prefix}self_attn.{name}.weight"] = (size, 64)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{prefix}mlp.{name}.weight"] = (96, 64)
        shapes[f"{prefix}mlp.down_proj.weight"] = (64, 96)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (64,)
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}

    def tokenizer(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(alphabet())
        writer.add_token_types([2, 3, 3] + [1] * (len(alphabet()) - 3))
        writer.add_token_merges(["a b", "ab c"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(True)
        writer.add_chat_template(TEMPLATE)

    write_llama_gguf(path, tensors, config, quantise="Q4_0", tokenizer=tokenizer)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to every node of a JSON value but the root; of long lists to a few."""
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    else:
        keys = list(range(len(value))) if isinstance(value, list) else []
    found = []
    for key in keys if len(keys) <= 40 else [*keys[:6], *keys[-3:]]:
        found += [(*at, key), *places(value[key], (*at, key))]
    return found


def change_json(value: Any, rng: random.Random) -> Any:
    """A copy with one to three nodes replaced, removed, renamed or doubled."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        ways = places(value)
        if not ways:
            return rng.choice(VALUES)
        *way, last = rng.choice(ways)
        parent = value
        for key in way:
            parent = parent[key]
        match rng.randrange(8):
            case 0:
                del parent[last]
            case 1 if isinstance(parent, dict):
                parent[rng.choice(("", "x", "\ud800", "type", last * 40))] = parent.pop(last)
            case 2:
                parent[last] = [parent[last]] * rng.choice((1, 3, 500))
            case 3:
                parent[last] = copy.deepcopy(value) if rng.random() < 0.3 else {"x": parent[last]}
            case 4 if isinstance(parent[last], int):
                parent[last] *= rng.choice((-1, 2, 3, 10**9, 10**400))
            case 4 if isinstance(parent[last], float):
                parent[last] *= rng.choice((-1, 0.5, 1e-9, 1e200))
            case _:
                parent[last] = rng.choice(VALUES)
    return value


def change_bytes(data: bytes, rng: random.Random, first: int | None = None) -> bytes:
    """``data`` cut, longer, or with a few bytes changed, most of them among the ``first``."""
    changed = bytearray(data)
    end = min(first or len(data), len(data))
    match rng.randrange(6):
        case 0:
            del changed[rng.randrange(len(changed)) :]
        case 1:
            at = rng.randrange(end)
            changed[at:at] = rng.randbytes(rng.choice((1, 4, 8, 100)))
        case 2:
            at = rng.randrange(end)
            del changed[at : at + rng.choice((1, 4, 8))]
        case 3:
            at = rng.randrange(max(end - 8, 1))
            number = rng.choice((0, 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1))
            changed[at : at + 8] = struct.pack("<Q", number)
        case _:
            for _ in range(rng.choice((1, 2, 8))):
                changed[rng.randrange(end)] = rng.randrange(256)
    return bytes(changed)


def json_file(name: str) -> Callable[[Path, random.Random], None]:
    """A change to a file of JSON."""

    def change(folder: Path, rng: random.Random) -> None:
        file = folder / name
        if rng.random() < 0.15:
            file.write_bytes(change_bytes(file.read_bytes(), rng))
        else:
            text = dump(change_json(json.loads(file.read_text()), rng))
            # Written as an escape, or as bytes that are not UTF-8.
            file.write_text(text, encoding="utf-8", errors="surrogatepass")

    return change


def dump(value: Any) -> str:
    return json.dumps(value)


def change_safetensors(folder: Path, rng: random.Random) -> None:
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    if rng.random() < 0.4:
        file.write_bytes(change_bytes(raw, rng, 8 + length))
        return
    header = change_json(json.loads(raw[8 : 8 + length]), rng)
    file.write_bytes(safetensors_bytes(header, raw[8 + length :]))


def change_bin(folder: Path, rng: random.Random) -> None:
    file = folder / "pytorch_model.bin"
    if rng.random() < 0.2:
        file.write_bytes(change_bytes(file.read_bytes(), rng))
        return
    made = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as new:
        for entry in old.infolist():
            data = old.read(entry)
            if entry.filename.endswith("data.pkl"):
                data = change_pickle(data, rng)
            elif rng.random() < 0.02:
                data = change_bytes(data, rng) if data else b"x"
            new.writestr(entry.filename, data)
    file.write_bytes(made.getvalue())


def change_pickle(data: bytes, rng: random.Random) -> bytes:
    """A pickle with other opcodes: of great lengths, of other types, of code."""
    huge = rng.choice((2**20, 2**31 - 1, 2**62))
    long = struct.pack("<I", huge & 0x7FFFFFFF)
    inserted = (
        b"B" + long,
        b"X" + long,
        b"\x8a\xff" + b"\xff" * 255,
        b"\x8b" + long,
        b"\x8e" + struct.pack("<Q", huge),
        b"\x96" + struct.pack("<Q", huge),
        b"r" + long,  # a place far along in the memo
        b"j" + long,
        b"cos\nsystem\n",
        b"cbuiltins\nbytearray\nJ" + long + b"\x85R0",
        b"ctorch\nempty\nJ" + long + b"\x85R0",
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ccollections\nOrderedDict\n)R0",
        *(b"(" * 5000, b"N", b"]", b"}", b"0", b"R", b"b", b"u", b"Q", b"t", b"\x80\x05", b"."),
        pickle.dumps([[1.5, None]])[2:-1],
    )
    if rng.random() < 0.5:
        at = rng.randrange(2, min(len(data), 400))
        return data[:at] + rng.choice(inserted) + data[at:]
    return change_bytes(data, rng)


class GGUFParts:
    """A GGUF file as its pairs and tensors, each as its bytes."""

    def __init__(self, raw: bytes) -> None:
        self._raw, self._at = raw, 4
        _version, tensors, pairs = self._take("<IQQ")
        self.pairs = [(self._string(), *self._pair()) for _ in range(pairs)]
        self.tensors = [self._info() for _ in range(tensors)]
        self.data = raw[self._at + -self._at % 32 :]

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._raw, self._at)
        self._at += struct.calcsize(form)
        return values

    def _string(self) -> str:
        (size,) = self._take("<Q")
        self._at += size
        return self._raw[self._at - size : self._at].decode()

    def _pair(self) -> tuple[int, bytes]:
        (kind,) = self._take("<I")
        start = self._at
        if kind == 8:
            self._string()
        elif kind == 9:
            inner, count = self._take("<IQ")
            for _ in range(count):
                self._string() if inner == 8 else self._take("<" + "BbHhIif?"[inner])
        else:
            self._take("<" + {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}[kind])
        return kind, self._raw[start : self._at]

    def _info(self) -> list[Any]:
        name = self._string()
        (count,) = self._take("<I")
        return [name, list(self._take(f"<{count}Q")), *self._take("<IQ")]

    def bytes(self) -> bytes:
        made = GGUFBytes()
        for key, kind, value in self.pairs:
            made.pair(key, kind, value if kind != 8 else value[8:])
        for info in self.tensors:
            made.tensor(*info)
        return made.bytes(self.data)


def gguf_value(rng: random.Random) -> tuple[int, bytes]:
    """A value of any type that a pair can have."""
    number = rng.choice((0, 1, 2, 3, 5, 2**31, 2**32 - 1))
    strings = [rng.choice(("", "a", "a b", "abc", "x" * 50)) for _ in range(rng.randrange(4))]
    match rng.randrange(9):
        case 0:
            return 8, GGUFBytes.string(rng.choice(("", "a", "gpt2", "llama", "none", "{{ x")))
        case 1:
            return 9, struct.pack("<IQ", 8, len(strings)) + b"".join(map(GGUFBytes.string, strings))
        case 2:
            return 9, struct.pack("<IQ3i", 5, 3, -1, 2, 2**31 - 1)
        case 3:
            return 9, struct.pack("<IQ2f", 6, 2, float("nan"), 1.0)
        case 4:
            return 9, struct.pack("<IQ", rng.choice((4, 8, 9, 77)), rng.choice((0, 2**40)))
        case 5:
            return 7, struct.pack("<?", rng.random() < 0.5)
        case 6:
            return 6, struct.pack("<f", rng.choice((0.0, -1.0, 1e38, float("nan"), float("inf"))))
        case 7:
            return 10, struct.pack("<Q", rng.choice((0, 10**9, 2**64 - 1)))
        case _:
            return 4, struct.pack("<I", number)


def change_gguf(file: Path, rng: random.Random) -> None:
    raw = file.read_bytes()
    if rng.random() < 0.25:
        file.write_bytes(change_bytes(raw, rng, 5000))
        return
    parts = GGUFParts(raw)
    for _ in range(rng.choice((1, 1, 1, 2))):
        pair = rng.randrange(len(parts.pairs))
        tensor = rng.choice(parts.tensors)
        match rng.randrange(8):
            case 0:
                del parts.pairs[pair]
            case 1:
                tensor[2] = rng.randrange(45)
            case 2:
                tensor[1] = rng.choice(([], [1], [2**40], [64, 2**58], tensor[1][::-1], [0, 4]))
            case 3:
                tensor[0] = rng.choice(("x", "output.weight", "blk.9999999999.attn_q.weight", ""))
            case 4:
                tensor[3] = rng.choice((0, 1, 32, 2**63))
            case _:
                parts.pairs[pair] = (parts.pairs[pair][0], *gguf_value(rng))
    file.write_bytes(parts.bytes())


def change_one_file(file: Path, rng: random.Random) -> None:
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    if rng.random() < 0.3:
        file.write_bytes(change_bytes(raw, rng, 8 + length))
        return
    header = json.loads(raw[8 : 8 + length])
    metadata = header["__metadata__"]
    if rng.random() < 0.5:
        metadata["file:config.json"] = dump(
            change_json(json.loads(metadata["file:config.json"]), rng)
        )
    elif rng.random() < 0.5:
        header["__metadata__"] = metadata = change_json(metadata, rng)
    else:
        changed = change_json(
            {name: header[name] for name in header if name != "__metadata__"}, rng
        )
        header = {"__metadata__": metadata, **(changed if isinstance(changed, dict) else {})}
    sign(header)
    file.write_bytes(safetensors_bytes(header, raw[8 + length :]))


def sign(header: dict[str, Any]) -> None:
    """Give the header of an exported file the hashes that it should have, where it can have any."""
    with contextlib.suppress(TypeError, KeyError, AttributeError, ValueError):
        metadata = header["__metadata__"]
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        metadata["engine_core.sha256"] = json.dumps(dict.fromkeys(entries, "0" * 64))
        ordered = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
        specs = [(name, TORCH_NAMES[each["dtype"]], each["shape"]) for name, each in ordered]
        texts = sorted(item for item in metadata.items() if item[0] != "engine_core.header_sha256")
        text = json.dumps([texts, specs], ensure_ascii=False)
        metadata["engine_core.header_sha256"] = hashlib.sha256(text.encode()).hexdigest()


# The reader -> the good checkpoint, the change to a copy of it.
KINDS: dict[str, tuple[str, Callable[[Path, random.Random], None]]] = {
    "safetensors": ("folder", change_safetensors),
    "config": ("folder", json_file("config.json")),
    "generation-config": ("folder", json_file("generation_config.json")),
    "index": ("sharded", json_file("model.safetensors.index.json")),
    "tokenizer": ("folder", json_file("tokenizer.json")),
    "tokenizer-config": ("folder", json_file("tokenizer_config.json")),
    "pickle": ("bin", change_bin),
    "gguf": ("good.gguf", change_gguf),
    "one-file": ("good.safetensors", change_one_file),
}


def write_case(good: Path, kind: str, case: int, path: Path) -> Path:
    """The damaged checkpoint number ``case`` of ``kind``, always the same, at ``path``."""
    name, change = KINDS[kind]
    source = good / name
    if source.is_dir():
        shutil.copytree(source, path)
    else:
        path = Path(shutil.copy(source, path.with_suffix(source.suffix)))
    change(path, random.Random(f"{kind} {case}"))
    return path
