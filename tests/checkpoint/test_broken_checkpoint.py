"""However a checkpoint is broken, the error names the file at fault and costs no memory."""

import io
import os
import pickle
import struct
import tracemalloc
import zipfile

import pytest
import torch
from checkpoint_files import GGUFBytes, entry, safetensors_bytes, write_config, write_index
from safetensors.torch import save, save_file

from engine_core.checkpoint import open_checkpoint
from engine_core.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError

GOOD = save({"w": torch.arange(64.0), "v": torch.ones(3)})
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"


def two(first, second, data=b"\0" * 64):
    return safetensors_bytes({"v": first, "w": second}, data)


def one(value, data=b"\0" * 8):
    return safetensors_bytes({"w": value}, data)


SAFETENSORS = {
    "empty": (b"", "is empty"),
    "git-lfs pointer": (LFS, "Git-LFS pointer.*git lfs pull"),
    "shorter than its length": (b"\x10\0\0", "has 3 bytes, too few"),
    "length of a terabyte": (struct.pack("<Q", 1 << 40), "above the format's limit of 100000000"),
    "length beyond the file": (struct.pack("<Q", 5000) + b"{}", "truncated.*5000 bytes"),
    "cut in the header": (GOOD[:40], "truncated"),
    "cut in the data": (GOOD[:-20], "truncated: tensor"),
    "cut by one byte": (GOOD[:-1], "truncated: tensor"),
    "bytes at the end": (GOOD + b"\0", "last 1 bytes belong to no tensor"),
    "no JSON": (safetensors_bytes(b'{"w": '), "not valid JSON"),
    "no UTF-8": (safetensors_bytes(b'{"\xff": 1}'), "not valid JSON"),
    "deep JSON": (safetensors_bytes(b"[" * 200_000), "not valid JSON"),
    "JSON of another kind": (safetensors_bytes([1, 2]), "a JSON list, not an object"),
    "a name twice": (
        safetensors_bytes(b'{"w":{"a":1},"w":{"a":1}}'),
        "'w' is given twice",
    ),
    "entry of another kind": (one(3), "'w' must have exactly dtype, shape and data_offsets, got 3"),
    "entry without offsets": (one({"dtype": "F32", "shape": [2]}), "'w' must have exactly"),
    "unknown dtype": (one(entry("F31", [2], 0, 8)), "'w' has the unknown dtype 'F31'"),
    "dtype of another kind": (one(entry(["F32"], [2], 0, 8)), "'w' has the unknown dtype"),
    "negative size": (one(entry("F32", [-2], 0, 8)), r"'w' has a senseless shape: \[-2\]"),
    "size that is no number": (one(entry("F32", ["2"], 0, 8)), "'w' has a senseless shape"),
    "size that is true": (one(entry("F32", [True, 2], 0, 8)), "'w' has a senseless shape"),
    "huge shape": (one(entry("F32", [1 << 62, 1 << 62], 0, 8)), "'w': F32 of shape.*needs"),
    "shape against bytes": (one(entry("F32", [3], 0, 8)), "needs 12 bytes.* give it 8"),
    "offsets backwards": (one(entry("F32", [2], 8, 0)), "'w' has senseless data_offsets"),
    "three offsets": (
        one({"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}),
        "'w' has senseless data_offsets",
    ),
    "offsets beyond the data": (one(entry("F32", [4], 0, 16)), "'w' ends at byte 16"),
    "overlap": (
        two(entry("F32", [8], 0, 32), entry("F32", [8], 16, 48)),
        "'w' begins at byte 16 .*inside the tensor before it",
    ),
    "hole": (
        two(entry("F32", [4], 0, 16), entry("F32", [8], 32, 64)),
        "bytes 16 to 32 .*before tensor 'w'",
    ),
}


@pytest.mark.parametrize(("raw", "message"), SAFETENSORS.values(), ids=SAFETENSORS.keys())
def test_safetensors(tmp_path, raw, message):
    write_config(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    tracemalloc.start()
    with pytest.raises(CorruptCheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert peak < 20_000_000


class Code:
    def __reduce__(self):
        return os.system, ("echo pwned > pwned",)


def zipped(compression=zipfile.ZIP_STORED, pickled=b"", version=b"3\n"):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr("m/data.pkl", pickled)
        archive.writestr("m/version", version)
    return buffer.getvalue()


def saved(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


BIN = {
    "empty": (b"", "is empty"),
    "git-lfs pointer": (LFS, "Git-LFS pointer"),
    "no archive": (b"hello world", "not an archive of torch.save"),
    "older than torch 1.6": (
        saved({"w": torch.ones(2)}, _use_new_zipfile_serialization=False),
        "older than torch 1.6",
    ),
    "cut in half": (saved({"w": torch.ones(500)})[:1500], "truncated or damaged"),
    "cut at the end": (saved({"w": torch.ones(500)})[:-5], "truncated or damaged"),
    "compressed": (zipped(zipfile.ZIP_DEFLATED, b"\0" * 10_000_000), "compressed entries"),
    "code": (zipped(pickled=pickle.dumps({"w": Code()}, 2)), "needs code of its own"),
    "code after torch.save": (saved({"w": Code()}), "needs code of its own"),
    "no pickle": (zipped(pickled=b"\xff\xff"), "refused|damaged"),
    "a list": (saved([torch.ones(2)]), "holds a list"),
    "an entry that is no tensor": (saved({"w": {"x": torch.ones(2)}}), "entry 'w' is a dict"),
    "a name that is no string": (saved({3: torch.ones(2)}), "entry 3 is a Tensor"),
    "a sparse tensor": (saved({"w": torch.eye(2).to_sparse()}), "'w' is not a dense one"),
}


@pytest.mark.filterwarnings("ignore:.*sparse.*:UserWarning")
@pytest.mark.parametrize(("raw", "message"), BIN.values(), ids=BIN.keys())
def test_bin(tmp_path, raw, message, monkeypatch):
    monkeypatch.chdir(write_config(tmp_path))
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match=message) as caught:
        list(open_checkpoint(tmp_path).weights())
    assert str(path) in str(caught.value)
    assert not (tmp_path / "pwned").exists()


INDEX = {
    "no JSON": (b"{", CorruptCheckpointError, "not JSON"),
    "another kind of JSON": (b"[]", CorruptCheckpointError, "a JSON list"),
    "no weight_map": (b"{}", CorruptCheckpointError, "'weight_map' must be an object.*NoneType"),
    "empty weight_map": ({}, CorruptCheckpointError, "an empty one"),
    "weight_map of another kind": ([1], CorruptCheckpointError, "got list"),
    "file of another kind": ({"w": 3}, CorruptCheckpointError, "tensor 'w' must be a string"),
    "parent folder": ({"w": "../a.safetensors"}, CorruptCheckpointError, "'../a.safetensors'"),
    "parent folder inside": ({"w": "x/../../a"}, CorruptCheckpointError, "no file inside"),
    "absolute path": ({"w": "/etc/passwd"}, CorruptCheckpointError, "'/etc/passwd'"),
    "backslashes": ({"w": "..\\a"}, CorruptCheckpointError, "no file inside"),
    "empty name": ({"w": ""}, CorruptCheckpointError, "no file inside"),
    "missing shard": (
        {"w": "a.safetensors", "v": "b.safetensors"},
        CheckpointNotFoundError,
        r"names 2 files, of which 1 are missing: b\.safetensors",
    ),
    "tensor in another shard": (
        {"w": "a.safetensors", "x": "a.safetensors"},
        CorruptCheckpointError,
        r"tensor 'x' is in .*a\.safetensors, where it is not",
    ),
    "tensor in two shards": (
        {"w": "a.safetensors", "v": "c.safetensors"},
        CorruptCheckpointError,
        r"'w' is both in .*a\.safetensors and in .*c\.safetensors",
    ),
}


@pytest.mark.parametrize(("weight_map", "error", "message"), INDEX.values(), ids=INDEX.keys())
def test_index(tmp_path, weight_map, error, message):
    write_config(tmp_path)
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"w": torch.ones(2), "v": torch.ones(2)}, tmp_path / "c.safetensors")
    if isinstance(weight_map, bytes):
        (tmp_path / "model.safetensors.index.json").write_bytes(weight_map)
    else:
        write_index(tmp_path, weight_map)
    with pytest.raises(error, match=message):
        open_checkpoint(tmp_path)


def test_bin_shards_must_keep_what_the_index_promises(tmp_path):
    write_config(tmp_path)
    torch.save({"w": torch.ones(2)}, tmp_path / "a.bin")
    write_index(tmp_path, {"w": "a.bin", "x": "a.bin"}, "pytorch_model.bin")
    with pytest.raises(CorruptCheckpointError, match=r"'x' is in .*a\.bin, where it is not"):
        next(open_checkpoint(tmp_path).weights())


def test_shards_without_an_index(tmp_path):
    write_config(tmp_path)
    save_file({"w": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointNotFoundError, match=r"no model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


def test_a_loop_of_links(tmp_path):
    write_config(tmp_path)
    (tmp_path / "model.safetensors").symlink_to("other")
    (tmp_path / "other").symlink_to("model.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors cannot be read"):
        open_checkpoint(tmp_path)


def test_a_broken_link(tmp_path):
    write_config(tmp_path)
    (tmp_path / "model.safetensors").symlink_to("gone")
    with pytest.raises(CheckpointNotFoundError, match=r"model\.safetensors does not exist"):
        open_checkpoint(tmp_path)


def test_a_pipe_does_not_hang(tmp_path):
    write_config(tmp_path)
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    os.mkfifo(tmp_path / "b.safetensors")
    write_index(tmp_path, {"w": "a.safetensors", "v": "b.safetensors"})
    with pytest.raises(CorruptCheckpointError, match=r"b\.safetensors is not a regular file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "[" * 100_000])
def test_config(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CorruptCheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def arch():
    return GGUFBytes().pair("general.architecture", 8, "llama")


def array(type_, count, raw=b""):
    return struct.pack("<IQ", type_, count) + raw


GGUF = {
    "empty": (b"", "is empty"),
    "git-lfs pointer": (LFS, "Git-LFS pointer"),
    "another magic": (GGUFBytes(magic=b"GGML").bytes(), "does not begin with GGUF"),
    "version 1": (GGUFBytes(version=1).bytes(), "version 1, not 2 or 3"),
    "big-endian": (GGUFBytes(version=3 << 24).bytes(), "may be big-endian"),
    "cut after the magic": (b"GGUF", "truncated"),
    "too many keys": (arch().bytes(pairs=1 << 60), "truncated or damaged: .* keys"),
    "too many tensors": (arch().bytes(tensors=1 << 60), "truncated or damaged: .* tensors"),
    "no architecture": (GGUFBytes().pair("x", 4, 1).bytes(), "general.architecture"),
    "cut in a key": (arch().bytes()[:40], "truncated or damaged"),
    "a long string": (arch().pair("x", 8, b"").bytes()[:-20] + b"\xff" * 20, "damaged"),
    "a key twice": (arch().pair("x", 4, 1).pair("x", 4, 1).bytes(), "'x' is given twice"),
    "a key that is no UTF-8": (
        GGUFBytes().pair("general.architecture", 8, b"\xff\xfe").bytes(),
        "not valid UTF-8",
    ),
    "unknown type of value": (arch().pair("x", 77, b"").bytes(), "x is of the unknown type 77"),
    "long array": (arch().pair("x", 9, array(4, 1 << 50)).bytes(), "damaged: x should take"),
    "long array of strings": (arch().pair("x", 9, array(8, 1 << 50)).bytes(), "strings of x"),
    "nested array": (arch().pair("x", 9, array(9, 1, array(4, 0))).bytes(), "nested type 9"),
    "alignment of three": (
        arch().pair("general.alignment", 4, 3).bytes(),
        "power of two, got 3",
    ),
    "unknown type of tensor": (arch().tensor("w", [32], 200).bytes(), "'w' is of the unknown type"),
    "five dimensions": (arch().tensor("w", [1] * 5).bytes(), "'w' has 5 dimensions"),
    "no dimensions": (arch().tensor("w", []).bytes(), "'w' has 0 dimensions"),
    "size of nothing": (arch().tensor("w", [4, 0]).bytes(), "'w' has no elements"),
    "rows that are no whole blocks": (
        arch().tensor("w", [33], 2).bytes(b"\0" * 64),
        "'w': rows of 33 are no whole blocks of Q4_0",
    ),
    "tensor beyond the file": (
        arch().tensor("w", [1 << 40, 1 << 20]).bytes(b"\0" * 64),
        "truncated: tensor 'w'",
    ),
    "cut in the data": (arch().tensor("w", [32]).bytes(b"\0" * 127), "truncated: tensor 'w'"),
    "offset off the alignment": (
        arch().tensor("w", [4], 0, 7).bytes(b"\0" * 64),
        "'w' begins at 7, which is no multiple of the alignment 32",
    ),
    "overlapping tensors": (
        arch().tensor("v", [16]).tensor("w", [16], 0, 32).bytes(b"\0" * 128),
        "'w' overlaps the one before it",
    ),
    "a tensor twice": (
        arch().tensor("w", [4]).tensor("w", [4], 0, 32).bytes(b"\0" * 64),
        "'w' is given twice",
    ),
}


@pytest.mark.parametrize(("raw", "message"), GGUF.values(), ids=GGUF.keys())
def test_gguf(tmp_path, raw, message, llama_adapters, cache_home):
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    with pytest.raises(CorruptCheckpointError, match=message) as caught:
        open_checkpoint(path, gguf_adapters=llama_adapters)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert peak < 30_000_000
    assert not list(cache_home.glob("[!.]*/*")), "a failed conversion leaves nothing behind"


def test_every_cut_of_a_gguf_header_is_seen(tmp_path, llama_adapters):
    from engine_core.checkpoint import GGUFFile

    file = arch().pair("a.b", 6, 1.5).pair("t", 9, array(8, 2, GGUFBytes.string("xy") * 2))
    whole = file.tensor("w", [8]).bytes(b"\1" * 32)
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    assert GGUFFile(path).metadata == {"general.architecture": "llama", "a.b": 1.5, "t": ["xy"] * 2}
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptCheckpointError):
            GGUFFile(path)


def test_a_string_longer_than_a_gguf_file_is_not_copied(tmp_path):
    from engine_core.checkpoint import GGUFFile

    path = tmp_path / "x.gguf"
    strings = GGUFBytes.string("xy") + struct.pack("<Q", 1 << 62)
    path.write_bytes(arch().pair("t", 9, array(8, 3, strings)).bytes())
    os.truncate(path, 1 << 26)  # the rest is a hole
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match=r"t should take 4611686018427387904 byt"):
            GGUFFile(path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 1 << 20


def test_a_part_of_a_split_gguf(tmp_path, llama_adapters):
    path = tmp_path / "model-00001-of-00002.gguf"
    path.write_bytes(arch().pair("split.count", 4, 2).bytes())
    with pytest.raises(CheckpointError, match=r"one of 2 parts.*llama-gguf-split --merge"):
        open_checkpoint(path, gguf_adapters=llama_adapters)


@pytest.mark.parametrize("damage", range(40))
def test_a_changed_byte_never_escapes_the_error_tree(tmp_path, damage):
    write_config(tmp_path)
    raw = bytearray(GOOD)
    raw[(damage * 7) % (len(GOOD) - 268)] ^= 1 << damage % 8
    (tmp_path / "model.safetensors").write_bytes(bytes(raw))
    try:
        checkpoint = open_checkpoint(tmp_path)
    except CorruptCheckpointError as error:
        outcome = str(error)
    else:
        # Only a name changed, or a dtype to another of its size.
        outcome = sorted(header.nbytes for header in checkpoint.headers.values())
    assert outcome == [12, 256] or "model.safetensors" in outcome
