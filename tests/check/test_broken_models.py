"""However a model is broken, check-model names it, and start-up refuses it with the same words."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from check_models import Model
from checkpoint_files import GGUFBytes, safetensors_bytes, write_index, write_llama_gguf
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file, save_file

from engine_core import LLM, EngineConfig
from engine_core.check import CheckReport, check_model
from engine_core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    DuplicateArchitectureError,
    EngineError,
    PluginLoadError,
    RequestError,
    TokenizerError,
    UnknownArchitectureError,
    WeightsMismatchError,
)

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
GATE = "model.layers.1.mlp.gate_proj.weight"


def cut(model: Model) -> None:
    model.weights.write_bytes(model.weights.read_bytes()[:-1000])


def rename(model: Model) -> None:
    model.tensors(lambda tensors: tensors.update({"gate.weight": tensors.pop(GATE)}))


def transpose(model: Model) -> None:
    model.tensors(lambda tensors: tensors.update({GATE: tensors[GATE].T}))


def to_integers(model: Model) -> None:
    model.tensors(lambda tensors: tensors.update({GATE: tensors[GATE].to(torch.int8)}))


def to_bytes_of_float(model: Model) -> None:
    model.tensors(lambda tensors: tensors.update({GATE: tensors[GATE].to(torch.float8_e4m3fn)}))


def pack(model: Model) -> None:
    """As tools that quantise do: packed integers and scales in place of the weight."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors.pop(GATE)
        stem = GATE.removesuffix("weight")
        tensors[f"{stem}qweight"] = torch.zeros(weight.shape[1] // 8, weight.shape[0]).int()
        tensors[f"{stem}scales"] = torch.ones(1, weight.shape[0])

    model.tensors(change)


def drop_layer(model: Model) -> None:
    model.tensors(
        lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.2." in name]
    )


def drop_head(model: Model) -> None:
    model.tensors(lambda tensors: tensors.pop("lm_head.weight"))


def add_tensor(model: Model) -> None:
    model.tensors(lambda tensors: tensors.update({"visual.weight": torch.ones(4, 4)}))


def shard(model: Model, lost: bool = False) -> dict[str, str]:
    tensors = load_file(model.weights)
    names = sorted(tensors)
    halves = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, model.folder / file)
    model.weights.unlink()
    places = {name: file for file, part in halves.items() for name in part}
    write_index(model.folder, places)
    return places


def lose_shard(model: Model) -> None:
    shard(model)
    (model.folder / "b.safetensors").unlink()


def index_outside(model: Model) -> None:
    write_index(model.folder, dict.fromkeys(shard(model), "../../b.safetensors"))


def index_of_itself(model: Model) -> None:
    shard(model)
    write_index(model.folder, {"w": "model.safetensors.index.json"})


def twice(model: Model) -> None:
    places = shard(model)
    (model.folder / "b.safetensors").unlink()
    (model.folder / "b.safetensors").hardlink_to(model.folder / "a.safetensors")
    write_index(
        model.folder,
        {name: file for name, file in places.items() if file[0] == "a"} | {"x": "b.safetensors"},
    )


def loop(model: Model) -> None:
    model.weights.unlink()
    model.weights.symlink_to("other")
    (model.folder / "other").symlink_to("model.safetensors")


def pipe(model: Model) -> None:
    model.weights.unlink()
    os.mkfifo(model.weights)


class Code:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def bin_with_code(model: Model) -> None:
    model.weights.unlink()
    with zipfile.ZipFile(model.folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("m/data.pkl", pickle.dumps({"w": Code()}, 2))
        archive.writestr("m/version", b"3\n")


def bin_cut(model: Model) -> None:
    torch.save(load_file(model.weights), model.folder / "pytorch_model.bin")
    model.weights.unlink()
    file = model.folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-2000])


def raw_weights(raw: bytes) -> Callable[[Model], None]:
    return lambda model: model.weights.write_bytes(raw) and None


def raw_config(text: str) -> Callable[[Model], None]:
    return lambda model: (model.folder / "config.json").write_text(text) and None


def config(**changes: Any) -> Callable[[Model], None]:
    return lambda model: model.json("config.json", **changes)


def without(*files: str) -> Callable[[Model], None]:
    def remove(model: Model) -> None:
        for file in files:
            (model.folder / file).unlink()

    return remove


def bad_tokenizer(model: Model) -> None:
    (model.folder / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')


def two_layers_too_many(model: Model) -> None:
    model.json("config.json", num_hidden_layers=5)


def gguf(raw: bytes) -> Callable[[Model], str]:
    def write(model: Model) -> str:
        path = model.folder / "model.gguf"
        path.write_bytes(raw)
        return str(path)

    return write


def llama_gguf(model: Model, tokenizer: Any = None) -> Path:
    values = json.loads((model.folder / "config.json").read_text())
    path = model.folder / "model.gguf"
    return write_llama_gguf(path, load_numpy(model.weights), values, tokenizer=tokenizer)


def gguf_cut(model: Model) -> str:
    path = llama_gguf(model)
    path.write_bytes(path.read_bytes()[:-5000])
    return str(path)


def broken_tables(writer: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "a"])


def gguf_tokenizer(model: Model) -> str:
    return str(llama_gguf(model, broken_tables))


def architecture(name: str) -> GGUFBytes:
    return GGUFBytes().pair("general.architecture", 8, name)


BROKEN: dict[str, tuple[Callable[[Model], Any], set[str], type[EngineError], str]] = {
    "no such path": (
        lambda model: f"{model}/nowhere/at/all",
        {"checkpoint-not-found"},
        CheckpointNotFoundError,
        "does not exist",
    ),
    "empty folder": (
        without("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        {"checkpoint-not-found"},
        CheckpointNotFoundError,
        r"has no config\.json",
    ),
    "truncated": (cut, {"checkpoint-corrupt"}, CorruptCheckpointError, "is truncated: tensor"),
    "empty weights": (raw_weights(b""), {"checkpoint-corrupt"}, CorruptCheckpointError, "is empty"),
    "Git-LFS pointer": (
        raw_weights(LFS),
        {"checkpoint-corrupt"},
        CorruptCheckpointError,
        "Git-LFS pointer",
    ),
    "huge header": (
        raw_weights(struct.pack("<Q", 1 << 40)),
        {"checkpoint-corrupt"},
        CorruptCheckpointError,
        "above the format's limit",
    ),
    "header of deep JSON": (
        raw_weights(safetensors_bytes(b"[" * 200_000)),
        {"checkpoint-corrupt"},
        CorruptCheckpointError,
        "not valid JSON",
    ),
    "no weights": (
        without("model.safetensors"),
        {"checkpoint-not-found"},
        CheckpointNotFoundError,
        "has no weight files",
    ),
    "missing shard": (
        lose_shard,
        {"checkpoint-not-found"},
        CheckpointNotFoundError,
        r"names 2 files, of which 1 are missing: b\.safetensors",
    ),
    "index that leads outside": (
        index_outside,
        {"checkpoint-corrupt"},
        CorruptCheckpointError,
        "no file inside the checkpoint's folder",
    ),
    "index that names itself": (
        index_of_itself,
        {"checkpoint-corrupt"},
        CorruptCheckpointError,
        r"model\.safetensors\.index\.json",
    ),
    "a tensor in two shards": (
        twice,
        {"checkpoint-corrupt"},
        CorruptCheckpointError,
        r"is both in .*a\.safetensors and in .*b\.safetensors",
    ),
    "loop of links": (loop, {"checkpoint-corrupt"}, CorruptCheckpointError, "cannot be read"),
    "pipe": (pipe, {"checkpoint-corrupt"}, CorruptCheckpointError, "not a regular file"),
    "pickle with code": (
        bin_with_code,
        {"checkpoint-corrupt"},
        CorruptCheckpointError,
        "needs code of its own",
    ),
    "truncated pickle": (bin_cut, {"checkpoint-corrupt"}, CorruptCheckpointError, "truncated"),
    "renamed tensor": (
        rename,
        {"weights-missing", "weights-unexpected"},
        WeightsMismatchError,
        r"gate\.weight",
    ),
    "transposed tensor": (transpose, {"weights-wrong"}, WeightsMismatchError, "model wants"),
    "integers": (to_integers, {"weights-wrong"}, WeightsMismatchError, r"torch\.int8"),
    "floats of one byte": (
        to_bytes_of_float,
        {"weights-wrong"},
        WeightsMismatchError,
        "float8_e4m3fn",
    ),
    "packed integers": (
        pack,
        {"weights-missing", "weights-unexpected"},
        WeightsMismatchError,
        "qweight",
    ),
    "layers missing": (drop_layer, {"weights-missing"}, WeightsMismatchError, r"layers\.2\."),
    "layers that the config has not": (
        config(num_hidden_layers=2),
        {"weights-unexpected"},
        WeightsMismatchError,
        r"layers\.2\.",
    ),
    "layers that the files have not": (
        two_layers_too_many,
        {"weights-missing"},
        WeightsMismatchError,
        r"layers\.4\.",
    ),
    "untied without a head": (drop_head, {"weights-missing"}, WeightsMismatchError, "lm_head"),
    "a tensor of something else": (
        add_tensor,
        {"weights-unexpected"},
        WeightsMismatchError,
        r"visual\.weight",
    ),
    "wrong vocabulary": (
        config(vocab_size=400),
        {"weights-wrong"},
        WeightsMismatchError,
        "model wants",
    ),
    "wrong hidden size": (
        config(hidden_size=128),
        {"weights-wrong"},
        WeightsMismatchError,
        "model wants",
    ),
    "a billion layers": (
        config(num_hidden_layers=10**9),
        {"checkpoint-corrupt"},
        CorruptCheckpointError,
        r"num_hidden_layers is 1000000000, but .* tensors",
    ),
    "a billion layers in a family that lists them": (
        config(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, n_layer=10**9),
        {"checkpoint-corrupt"},
        CorruptCheckpointError,
        "n_layer is 1000000000",
    ),
    "no key-value heads": (
        config(num_key_value_heads=0),
        {"config-invalid"},
        ConfigError,
        "'num_key_value_heads' must be a positive integer, got 0",
    ),
    "a model type that is a number": (
        config(architectures=["ChatGLMModel"], model_type=7),
        {"config-invalid"},
        ConfigError,
        "model_type must be a string, got 7",
    ),
    "a hidden size of a trillion": (
        config(hidden_size=10**12),
        {"checkpoint-corrupt"},
        CorruptCheckpointError,
        "hidden_size is 1000000000000",
    ),
    "a vocabulary of a trillion": (
        config(vocab_size=10**12),
        {"checkpoint-corrupt"},
        CorruptCheckpointError,
        "vocab_size is 1000000000000",
    ),
    "config that is no JSON": (
        raw_config("{"),
        {"checkpoint-corrupt"},
        CorruptCheckpointError,
        r"config\.json is not JSON",
    ),
    "config that is a list": (
        raw_config("[]"),
        {"checkpoint-corrupt"},
        CorruptCheckpointError,
        "a JSON list",
    ),
    "Git-LFS pointer as config": (
        raw_config(LFS.decode()),
        {"checkpoint-corrupt"},
        CorruptCheckpointError,
        r"config\.json",
    ),
    "no layers": (
        config(num_hidden_layers=-1),
        {"config-invalid"},
        ConfigError,
        "'num_hidden_layers' must be a positive integer, got -1",
    ),
    "text for a number": (
        config(hidden_size="64"),
        {"config-invalid"},
        ConfigError,
        "'hidden_size' must be a positive integer, got '64'",
    ),
    "heads that do not divide": (
        config(num_key_value_heads=3),
        {"config-invalid"},
        ConfigError,
        "not divisible",
    ),
    "unknown rope": (
        config(rope_scaling={"rope_type": "magic"}),
        {"config-invalid"},
        ConfigError,
        "'magic' is not one of",
    ),
    "unknown activation": (
        config(hidden_act="swoosh"),
        {"config-invalid"},
        ConfigError,
        "swoosh",
    ),
    "no architectures": (
        config(architectures=None),
        {"config-invalid"},
        ConfigError,
        "'architectures' must be a list",
    ),
    "unknown architecture": (
        config(architectures=["LlamoForCausalLM"]),
        {"architecture-unknown"},
        UnknownArchitectureError,
        "'LlamoForCausalLM'.* Nearest: LlamaForCausalLM",
    ),
    "quantised by a tool": (
        config(quantization_config={"quant_method": "aqlm", "bits": 4}),
        {"quantization-unsupported"},
        ConfigError,
        "'aqlm'",
    ),
    "no tokenizer": (
        without("tokenizer.json"),
        {"tokenizer-unusable"},
        TokenizerError,
        "has no tokenizer",
    ),
    "broken tokenizer": (
        bad_tokenizer,
        {"tokenizer-unusable"},
        TokenizerError,
        r"tokenizer\.json cannot be read",
    ),
    "GGUF of another family": (
        gguf(architecture("mamba9").bytes()),
        {"architecture-unknown"},
        UnknownArchitectureError,
        "'mamba9'",
    ),
    "GGUF of too many keys": (
        gguf(architecture("llama").bytes(pairs=1 << 60)),
        {"checkpoint-corrupt"},
        CorruptCheckpointError,
        "truncated or damaged",
    ),
    "GGUF truncated": (gguf_cut, {"checkpoint-corrupt"}, CorruptCheckpointError, "is truncated"),
    "GGUF that is none": (
        gguf(b"GGML" + b"\0" * 60),
        {"checkpoint-corrupt"},
        CorruptCheckpointError,
        "does not begin with GGUF",
    ),
    "GGUF part": (
        gguf(architecture("llama").pair("split.count", 4, 3).bytes()),
        {"checkpoint-unsupported"},
        CheckpointError,
        "one of 3 parts",
    ),
    "GGUF with a broken tokenizer": (
        gguf_tokenizer,
        {"tokenizer-unusable"},
        TokenizerError,
        "'a' has two ids",
    ),
}


def codes(report: CheckReport) -> set[str]:
    return {problem.code for problem in report.errors}


def assert_same_refusal(path: str, report: CheckReport, kind: type[EngineError], text: str) -> None:
    """Start-up raises the first of the report's errors, or all that it says of the weights."""
    with pytest.raises(kind, match=text) as caught:
        LLM(path)
    if isinstance(caught.value, WeightsMismatchError):
        said = {problem.code: problem.names for problem in report.errors}
        error = caught.value
        expected = {
            "weights-wrong": error.wrong,
            "weights-missing": error.missing,
            "weights-unexpected": error.unexpected,
        }
        assert said == {code: names for code, names in expected.items() if names}
    else:
        assert report.errors[0].message == str(caught.value)


@pytest.mark.parametrize(
    ("break_it", "expected", "kind", "text"), BROKEN.values(), ids=BROKEN.keys()
)
def test_broken_model(
    model: Model,
    break_it: Callable[[Model], Any],
    expected: set[str],
    kind: type[EngineError],
    text: str,
) -> None:
    made = break_it(model)
    path = made if isinstance(made, str) else str(model)
    report = check_model(path)
    assert codes(report) == expected
    assert report.exit_code == 1
    assert not report.will_run
    assert all(problem.hint for problem in report.problems)
    assert_same_refusal(path, report, kind, text)


def test_every_problem_is_collected(model: Model) -> None:
    """Where start-up stops at the first, the check goes on."""
    rename(model)
    transpose_of = "model.layers.0.mlp.up_proj.weight"
    model.tensors(lambda tensors: tensors.update({transpose_of: tensors[transpose_of].T}))
    bad_tokenizer(model)
    model.json("config.json", quantization_config={"quant_method": "aqlm"})
    model.json("generation_config.json", eos_token_id=[2, 9999])
    report = check_model(str(model), EngineConfig(max_model_len=10**6))
    assert codes(report) == {
        "quantization-unsupported",
        "tokenizer-unusable",
        "weights-missing",
        "weights-unexpected",
        "weights-wrong",
        "option-invalid",
    }
    assert "special-id-out-of-range" in {problem.code for problem in report.warnings}
    [wrong] = [problem for problem in report.errors if problem.code == "weights-wrong"]
    assert [name.split(":")[0] for name in wrong.names] == [transpose_of]


def test_broken_weights_do_not_hide_config_and_tokenizer(model: Model) -> None:
    cut(model)
    model.json("config.json", architectures=["NobodysForCausalLM"])
    bad_tokenizer(model)
    model.json("config.json", num_hidden_layers=10)
    assert codes(check_model(str(model))) == {
        "checkpoint-corrupt",
        "architecture-unknown",
        "tokenizer-unusable",
    }


def test_broken_weights_and_a_billion_layers(model: Model) -> None:
    """The config is still looked at, but not believed."""
    cut(model)
    model.json("config.json", num_hidden_layers=10**9)
    report = check_model(str(model))
    messages = [problem.message for problem in report.errors]
    assert "is truncated" in messages[0]
    assert "no model has more than 10000" in messages[1]


def test_broken_chat_template(model: Model) -> None:
    model.json("tokenizer_config.json", chat_template="{% for m in messages %}{{ m.content")
    report = check_model(str(model))
    assert codes(report) == {"chat-template-invalid"}
    with LLM(str(model)) as llm, pytest.raises(RequestError) as caught:
        llm.chat([{"role": "user", "content": "Hello"}])
    assert report.errors[0].message == str(caught.value)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "stopped",
        ),
        ("{{ 'a' * 10**9 }}", "stopped"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nests too deeply"),
        ("{{a}}" * 20_000, "too long"),
    ],
)
def test_chat_template_without_end(model: Model, template: str, says: str) -> None:
    model.json("tokenizer_config.json", chat_template=template)
    [problem] = check_model(str(model)).errors
    assert problem.code == "chat-template-invalid"
    assert says in problem.message


def test_a_second_chat_template_without_end(model: Model) -> None:
    templates = {"default": "{{ messages[0].content }}", "tool_use": "{{ 'a' * 10**9 }}"}
    named = [{"name": name, "template": template} for name, template in templates.items()]
    model.json("tokenizer_config.json", chat_template=named)
    assert codes(check_model(str(model))) == {"chat-template-invalid"}


def test_chat_template_that_fails(model: Model) -> None:
    model.json("tokenizer_config.json", chat_template="{{ raise_exception('no system message') }}")
    report = check_model(str(model))
    assert report.exit_code == 0
    [problem] = report.warnings
    assert problem.code == "chat-template-failed"
    assert "no system message" in problem.message


def test_nan_in_the_weights(model: Model) -> None:
    model.tensors(lambda tensors: tensors[GATE][3].fill_(torch.nan))
    model.tensors(lambda tensors: tensors["lm_head.weight"][0].fill_(torch.inf))
    assert check_model(str(model)).exit_code == 0
    report = check_model(str(model), deep=True)
    assert codes(report) == {"weights-not-finite"}
    assert set(report.errors[0].names) == {GATE, "lm_head.weight"}
    assert report.exit_code == 1
    with LLM(str(model)) as llm:
        (output,) = llm.generate([1, 2, 3])
    assert output.outputs[0].finish_reason == "error"
    assert "not finite" in str(output.outputs[0].error)


def plugin(folder: Path, name: str, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package ``name`` with one entry point into ``folder``, as pip would."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(body)
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[engine_core]\n{name} = {name}\n")
    monkeypatch.syspath_prepend(folder)


def test_two_plugins(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = (
        "from engine_core import hookimpl\nrequires_api = '0.1'\n@hookimpl\n"
        "def module_map():\n    return {'LlamaForCausalLM': 'engine_core_llama.model.X'}\n"
    )
    plugin(tmp_path / "site", "secondfamily", body, monkeypatch)
    report = check_model(str(model))
    assert codes(report) == {"architecture-ambiguous"}
    assert_same_refusal(str(model), report, DuplicateArchitectureError, "'secondfamily'")


def test_broken_plugin(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin(tmp_path / "site", "brokenfamily", "raise RuntimeError('out of order')\n", monkeypatch)
    report = check_model(str(model))
    assert report.exit_code == 0
    [problem] = report.warnings
    assert problem.code == "plugin-broken"
    assert "RuntimeError: out of order" in problem.message
    strict = check_model(str(model), EngineConfig(plugin_errors="strict"))
    assert codes(strict) == {"plugin-broken"}
    with pytest.raises(PluginLoadError) as caught:
        LLM(str(model), plugin_errors="strict")
    assert strict.errors[0].message == str(caught.value)


def test_model_class_that_cannot_be_built(model: Model, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class Mine:\n    def __init__(self, config, ctx_mgr, dtype=None, device=None):\n"
        "        config.no_such_key\nMODULE_MAP = {'LlamaForCausalLM': 'Mine'}\n"
    )
    report = check_model(str(model), EngineConfig(custom_module_map=str(file)))
    assert codes(report) == {"config-invalid"}
    with pytest.raises(ConfigError, match=r"Mine cannot be built.*no_such_key") as caught:
        LLM(str(model), custom_module_map=str(file))
    assert report.errors[0].message == str(caught.value)


def test_model_class_whose_loading_fails(model: Model, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from engine_core_llama.model import LlamaForCausalLM\nclass Mine(LlamaForCausalLM):\n"
        "    def load_weights(self, weights):\n"
        "        for name, tensor in weights:\n            tensor.reshape(7, -1)\n"
        "MODULE_MAP = {'LlamaForCausalLM': 'Mine'}\n"
    )
    report = check_model(str(model), EngineConfig(custom_module_map=str(file)))
    assert codes(report) == {"checkpoint-unsupported"}
    with pytest.raises(CheckpointError, match=r"load_weights failed on tensor '\w") as caught:
        LLM(str(model), custom_module_map=str(file))
    assert report.errors[0].message == str(caught.value)


def test_gguf_with_a_broken_tokenizer_runs_without_it(model: Model) -> None:
    path = gguf_tokenizer(model)
    assert check_model(path, EngineConfig(skip_tokenizer_init=True)).exit_code == 0
    with LLM(path, skip_tokenizer_init=True) as llm:
        (output,) = llm.generate([1, 2, 3])
    assert len(output.outputs[0].token_ids) > 0


NASTY = (
    "huge header",
    "header of deep JSON",
    "a billion layers",
    "a hidden size of a trillion",
    "a vocabulary of a trillion",
    "loop of links",
    "pipe",
    "GGUF of too many keys",
)
SCRIPT = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
from engine_core import LLM
from engine_core.check import check_model
from engine_core.errors import EngineError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = {}
for path in sys.argv[1:]:
    refused = None
    try:
        LLM(path)
    except EngineError as error:
        refused = str(error)
    found[path] = [refused, check_model(path).errors[0].message]
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"found": found, "grown": grown}))
"""


def test_the_nastiest_take_no_memory(good_folder: Path, tmp_path: Path) -> None:
    paths = []
    for index, name in enumerate(NASTY):
        model = Model(Path(shutil.copytree(good_folder, tmp_path / str(index))))
        made = BROKEN[name][0](model)
        paths.append(made if isinstance(made, str) else str(model))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result["found"]) == paths
    for refused, checked in result["found"].values():
        assert refused == checked
    # Kilobytes on Linux.
    assert result["grown"] < 150_000, result["grown"]
