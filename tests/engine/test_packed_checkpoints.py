"""Checkpoints of integers in the formats of three tools, and broken ones."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import packed_checkpoints as made
import pytest
import torch
from packed_checkpoints import FORMATS
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AwqConfig, GPTQConfig

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.check import check_model
from engine_core.checkpoint import open_checkpoint
from engine_core.engine.export import export_model, import_model
from engine_core.errors import ConfigError, EngineError, OptionError
from engine_core.kernels import GroupWeight
from engine_core.nn.linear import Linear
from engine_core.nn.quantization import Int4Matrix, Int8Matrix
from engine_core.nn.quantization.groups import GroupLinearMethod, OrderedMatrix
from engine_core.nn.quantization.scale_values import check_scale
from engine_core.registry import build_registry
from engine_core.runtime.loader import build_on_meta, load_weights, match_weights
from engine_core.runtime.packing import weight_bytes
from engine_core.step_context import BuildContext
from engine_core.testing.tiny_model import TinyModel

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
BASE: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu"}


@functools.cache
def tensors_of(
    kind: str, skips: Callable[[str], bool], experts: bool
) -> tuple[made.Tensors, made.Tensors]:
    return made.packed(made.mixtral() if experts else made.llama(), FORMATS[kind], skips)


class Made:
    """A tiny Llama in a format, and the same with the numbers that its integers stand for."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        skips: Callable[[str], bool] = lambda name: "lm_head" in name,
        *,
        experts: bool = False,
    ) -> None:
        self.form = FORMATS[kind]
        held, plain = (dict(tensors) for tensors in tensors_of(kind, skips, experts))
        changes = made.MIXTRAL if experts else {}
        self.plain = made.write(folder / "plain", plain, **changes)
        self.packed = made.write(folder / "packed", held, self.form.settings, **changes)

    def settings(self, change: Callable[[dict[str, Any]], Any]) -> None:
        path = self.packed / "config.json"
        config = json.loads(path.read_text())
        change(config["quantization_config"])
        path.write_text(json.dumps(config))

    def model(
        self, folder: Path, device: torch.device = CPU, *, pack: bool = True, **context: Any
    ) -> torch.nn.Module:
        """Loaded on the CPU, with the methods of ``device``."""
        registry = build_registry(())
        checkpoint = open_checkpoint(folder)
        config = registry.model_config(checkpoint.hf_config, folder)
        settings = checkpoint.hf_config.get("quantization_config")
        scheme = None
        if settings is not None:
            scheme = registry.quantization_scheme(
                registry.recognise_quantization(settings) or "none", settings
            )
            scheme.check_device(device)
        model_class = registry.model_class(config.architecture)
        built = BuildContext(dtype=torch.float32, **context)
        model = build_on_meta(model_class, config, built, scheme)
        matched, _ = match_weights(model, checkpoint, "it", scheme)
        self.bytes = weight_bytes(model)
        load_weights(model, matched, "it", CPU, pack=pack)
        return model


def in_groups(kind: str, size: int) -> made.Format:
    """One of the formats with a scale for so many inputs."""
    settings = json.loads(json.dumps(FORMATS[kind].settings))
    groups = settings.get("config_groups")
    (groups["group_0"]["weights"] if groups else settings)["group_size"] = size
    return FORMATS[kind]._replace(group=size, settings=settings)


def linears(model: torch.nn.Module) -> dict[str, Linear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}


def logits(model: torch.nn.Module) -> Tensor:
    tiny = TinyModel(model, None)
    sequences = [tiny.sequence([1, 5, 9, 80, 7, 7, 3], 7)]
    return torch.cat(tiny.run(sequences, [[(0, 0, 7)]]).logits)


def held_bytes(model: torch.nn.Module) -> int:
    packed = {id(m.packed): m.packed.nbytes for m in model.modules() if getattr(m, "packed", None)}
    return sum(param.nbytes for param in model.parameters()) + sum(packed.values())


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_are_those_of_the_reference(tmp_path: Path, kind: str) -> None:
    """In the form that a GPU gets; its kernels are tested elsewhere."""
    it = Made(tmp_path, kind)
    plain = it.model(it.plain)
    packed = it.model(it.packed, CUDA)
    for name, layer in linears(packed).items():
        assert isinstance(layer.packed, OrderedMatrix if it.form.ordered else GroupWeight)
        assert torch.equal(layer.weight, linears(plain)[name].weight)
    assert (logits(packed) - logits(plain)).abs().max() < 1e-4
    assert it.bytes == held_bytes(packed)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_cpu_multiplies_them_by_torchs_kernels(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Or by their numbers; torch's kernels take scales of bfloat16."""
    it = Made(tmp_path, kind)
    plain, packed = it.model(it.plain), it.model(it.packed)
    as_numbers = "turned into numbers" in caplog.text
    # 8 bits have a scale a row there, and no zeros.
    plain_rows = it.form.group == -1 and it.form.symmetric
    assert as_numbers == (it.form.bits == 8 and not plain_rows)
    for name, layer in linears(packed).items():
        expected = linears(plain)[name].weight
        if as_numbers:
            assert torch.equal(layer.weight, expected)
            continue
        inner = layer.packed._matrix if it.form.ordered else layer.packed
        assert isinstance(inner, Int8Matrix if it.form.bits == 8 else Int4Matrix)
        assert (layer.weight - expected).abs().max() <= 2**-7 * expected.abs().max()
    off = logits(packed) - logits(plain)
    assert off.norm() < 0.03 * logits(plain).norm()
    if not as_numbers:
        assert it.bytes == held_bytes(packed)


@pytest.mark.parametrize(
    ("kind", "form", "kept"),
    [
        *(
            (kind, form, form.bits == 4 or (form.group == -1 and form.symmetric))
            for kind, form in FORMATS.items()
        ),
        ("gptq of 16", in_groups("gptq", 16), False),
        ("gptq of rows of 8 bits", in_groups("gptq of 8 bits", -1), False),
        ("compressed of 96", in_groups("compressed", 96), True),
    ],
)
def test_codes_that_stay_on_a_cpu_are_said_to_take_longer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    form: made.Format,
    kept: bool,
) -> None:
    """Wherever torch's kernels multiply them, and not where they become numbers."""
    caplog.set_level("INFO")
    monkeypatch.setitem(FORMATS, kind, form)
    it = Made(tmp_path, kind)
    report = check_model(it.packed, EngineConfig(**BASE))
    assert not report.errors
    said = [each for each in report.problems if each.code == "quantization-slower"]
    assert [each.severity for each in said] == ["info"] * kept
    LLM(str(it.packed), EngineConfig(**BASE))
    longer = "prompts and batches may take longer than with bfloat16 weights, which was not measur"
    assert all(longer in each.message for each in said)
    assert (longer in caplog.text) == kept
    kinds = {type(layer.packed) for layer in linears(it.model(it.packed)).values()}
    assert kinds.isdisjoint({Int4Matrix, Int8Matrix, OrderedMatrix}) != kept


@pytest.mark.parametrize("kind", FORMATS)
def test_ranks_keep_their_part(tmp_path: Path, kind: str) -> None:
    it = Made(tmp_path, kind)
    if it.form.ordered:
        with pytest.raises(OptionError, match=r"o_proj lie in groups all over it \(g_idx\)"):
            it.model(it.packed, CUDA, tp_size=2)
        return
    for rank in range(2):
        context = {"tp_size": 2, "tp_rank": rank}
        plain = linears(it.model(it.plain, **context))
        for name, layer in linears(it.model(it.packed, CUDA, **context)).items():
            assert torch.equal(layer.weight, plain[name].weight)


def test_ranks_say_once_what_becomes_of_codes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And the engine alone how they run."""
    it = Made(tmp_path, "gptq", lambda name: False)
    with LLM(str(it.packed), EngineConfig(tensor_parallel_size=2, dtype="float32", **BASE)):
        said = capfd.readouterr().err
    assert said.count("1 of 15 packed weights are turned into numbers, such as lm_head") == 1
    assert "as small as this one" not in said


def test_ranks_do_not_cut_groups(tmp_path: Path) -> None:
    it = Made(tmp_path, "gptq")
    with pytest.raises(OptionError, match=r"o_proj: .* 64, which share an element of weight_scale"):
        it.model(it.packed, CUDA, tp_size=4)


def test_it_generates(tmp_path: Path) -> None:
    it = Made(tmp_path, "gptq, act-order")
    report = check_model(it.packed, EngineConfig(**BASE))
    assert not report.errors
    assert report.weights.scheme == "gptq, 8 of 8 linears"
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(it.packed), EngineConfig(dtype="float32", **BASE)) as llm:
        assert len(llm.generate([[1, 5, 9]], greedy)[0].outputs[0].token_ids) == 8


@pytest.mark.parametrize("kind", ["awq", "gptq", "compressed"])
def test_parts_of_several_forms_become_numbers(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Parts that a skip list names, other groups, and a vocabulary that is quantised."""
    it = Made(tmp_path, kind, lambda name: "k_proj" in name)
    key = "ignore" if kind == "compressed" else "modules_to_not_convert"
    assert any("no skip list names these" in each.message for each in check(it))
    it.settings(lambda settings: settings.update({key: ["k_proj"]}))
    plain, packed = it.model(it.plain), it.model(it.packed, CUDA)
    assert "5 of 13 packed weights are turned into numbers" in caplog.text
    for name, layer in linears(packed).items():
        assert isinstance(layer.method, GroupLinearMethod) != ("qkv" in name)
        assert torch.equal(layer.weight, linears(plain)[name].weight)
    assert torch.equal(packed.lm_head.weight, plain.lm_head.weight)
    assert (logits(packed) - logits(plain)).abs().max() < 1e-4


@pytest.mark.parametrize("rule", [r"-:.*\.v_proj", r"-:model\.layers\.\d+\.self_attn\.v_proj$"])
def test_a_rule_may_skip_parts(tmp_path: Path, rule: str) -> None:
    """One of GPTQModel's, which has regular expressions by which names begin."""
    it = Made(tmp_path, "gptq", lambda name: "lm_head" in name or "v_proj" in name)
    for other in (r"-:v_proj", r"-:.*\.o_proj"):
        setting(dynamic={other: {}})(it)
        assert any("no skip list names these" in each.message for each in check(it))
    setting(dynamic={r"-:.*lm_head": {}, rule: {}})(it)
    report = check_model(it.packed, EngineConfig(**BASE))
    assert not report.errors
    assert "quantization-settings" not in {each.code for each in report.problems}
    plain, packed = it.model(it.plain), it.model(it.packed, CUDA)
    for name, layer in linears(packed).items():
        assert isinstance(layer.method, GroupLinearMethod) != ("qkv" in name)
        assert torch.equal(layer.weight, linears(plain)[name].weight)
    with LLM(str(it.packed), EngineConfig(dtype="float32", **BASE)) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        assert len(llm.generate([[1, 5, 9]], greedy)[0].outputs[0].token_ids) == 2


def claims_symmetry(it: Made, edit: Callable[[Tensor], Tensor] = lambda zeros: zeros) -> None:
    """Leave, or change, zero points beside settings that know of none."""
    weights(symmetric=True)(it)

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("zero_point")]:
            tensors[name] = edit(tensors[name])

    made.change(it.packed, change)


@pytest.mark.parametrize(
    "kind",
    [
        "compressed, zeros",
        "compressed, signed zeros",
        "compressed, 8 bits, zeros",
        "compressed, 8 bits, signed zeros",
        "int8, zeros",
    ],
)
def test_zero_points_count_whatever_the_settings_say(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """compressed-tensors subtracts those that are there."""
    it = Made(tmp_path, kind)
    claims_symmetry(it)
    report = check_model(it.packed, EngineConfig(**BASE), deep=True)
    assert report.exit_code == 0, report.problems
    [said] = [each for each in report.warnings if each.code == "quantization-settings"]
    words = f"symmetric is True, and {DOWN}.weight_zero_point is not zero (14 of 14 linears)"
    assert words in said.message
    caplog.clear()
    LLM(str(it.packed), EngineConfig(**BASE))
    assert len([line for line in caplog.messages if words in line]) == 1
    expected = linears(it.model(it.plain))
    for name, layer in linears(it.model(it.packed, CUDA)).items():
        assert torch.equal(layer.weight, expected[name].weight)


@pytest.mark.parametrize(
    ("kind", "leaf"),
    [
        ("compressed", lambda n, k: torch.zeros(n, k // 64, dtype=torch.int8)),
        ("compressed", lambda n, k: torch.zeros(n, k // 64, dtype=torch.int64)),
        ("compressed", lambda n, k: made.words(torch.full((k // 64, n), 8), 4).T),
        ("compressed, 8 bits", lambda n, k: made.words(torch.full((1, n), 128), 8).T),
        ("int8 and activations", lambda n, k: torch.zeros(n, 1, dtype=torch.int8)),
    ],
)
def test_zero_points_of_the_middle_say_nothing(
    tmp_path: Path, kind: str, leaf: Callable[[int, int], Tensor]
) -> None:
    it = Made(tmp_path, kind)

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            shape = 128 if "down" not in name else 256
            stem = name.removesuffix("weight_scale")
            tensors[f"{stem}weight_zero_point"] = leaf(len(tensors[name]), shape)

    made.change(it.packed, change)
    report = check_model(it.packed, EngineConfig(**BASE))
    assert not report.errors
    assert "quantization-settings" not in {each.code for each in report.problems}
    expected = linears(it.model(it.plain))
    for name, layer in linears(it.model(it.packed, CUDA)).items():
        assert layer.packed.zeros is None
        assert torch.equal(layer.weight, expected[name].weight)


def test_zero_points_beyond_their_bits_are_refused(tmp_path: Path) -> None:
    it = Made(tmp_path, "compressed, signed zeros")
    put("weight_zero_point", lambda zeros: zeros.fill_(9))(it)
    with pytest.raises(ConfigError, match=f"{PLACE}weight_zero_point has 9, which is no code of 4"):
        LLM(str(it.packed), EngineConfig(**BASE))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("kind", ["int8 and activations", "compressed by rows", "int8, zeros"])
def test_a_tensor_may_have_one_scale(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    it = Made(tmp_path, kind)
    weights(strategy="tensor")(it)
    has_zeros = not it.form.symmetric
    leaves = ["weight_scale", "weight_zero_point"][: 1 + has_zeros]
    for leaf in leaves:
        put(leaf, lambda values: values[:1].clone().reshape(shape))(it)
    plain = load_file(it.plain / "model.safetensors")
    packed = load_file(it.packed / "model.safetensors")
    scale = packed[PLACE + "weight_scale"].double()
    if PLACE + "weight" in packed:
        codes = packed[PLACE + "weight"].double()
    else:
        words = packed[PLACE + "weight_packed"].numpy().view("uint32").astype("int64")
        codes = torch.stack([torch.from_numpy(words) >> 4 * at & 15 for at in range(8)], -1)
        codes = codes.flatten(1).double() - 8
    zeros = packed[PLACE + "weight_zero_point"].double() if has_zeros else 0
    plain[PLACE + "weight"] = ((codes - zeros) * scale).float()
    save_file(plain, it.plain / "model.safetensors")
    report = check_model(it.packed, EngineConfig(**BASE), deep=True)
    assert report.exit_code == 0, report.problems
    expected = linears(it.model(it.plain))
    for name, layer in linears(it.model(it.packed, CUDA)).items():
        assert torch.equal(layer.weight, expected[name].weight)


def skips_of_experts(name: str) -> bool:
    return "lm_head" in name or "moe.gate" in name


def of_experts(folder: Path, kind: str) -> Made:
    return Made(folder, kind, skips_of_experts, experts=True)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("kind", ["awq", "gptq v2", "compressed", "compressed, 8 bits"])
def test_experts_stay_integers(tmp_path: Path, kind: str, device: torch.device) -> None:
    """Each expert's by itself; in the form of a GPU the numbers are the reference's."""
    it = of_experts(tmp_path, kind)
    plain, packed = it.model(it.plain), it.model(it.packed, device)
    assert it.bytes == held_bytes(packed)
    on_cpu = Int8Matrix if it.form.bits == 8 else Int4Matrix
    for name, layer in linears(packed).items():
        if "experts" not in name:
            continue
        assert {type(each) for each in layer.packed} == {on_cpu if device == CPU else GroupWeight}
        assert len(layer.packed) == 4
        if device == CUDA:
            assert torch.equal(layer.weight, linears(plain)[name].weight)
    off = logits(packed) - logits(plain)
    assert off.norm() < (1e-4 if device == CUDA else 0.03) * logits(plain).norm()


@pytest.mark.parametrize("by_experts", [False, True], ids=["within", "by-experts"])
def test_ranks_keep_their_part_of_experts(tmp_path: Path, by_experts: bool) -> None:
    it = of_experts(tmp_path, "gptq v2")
    for rank in range(2):
        context = {"tp_size": 2, "tp_rank": rank, "expert_parallel": by_experts}
        plain = linears(it.model(it.plain, **context))
        for name, layer in linears(it.model(it.packed, CUDA, **context)).items():
            assert torch.equal(layer.weight, plain[name].weight)


@pytest.mark.parametrize("kind", ["compressed", "compressed, 8 bits", "int8 and activations"])
def test_a_routers_codes_become_numbers(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    it = Made(tmp_path, kind, lambda name: "moe.gate" not in name, experts=True)
    assert not check(it)
    plain, packed = it.model(it.plain), it.model(it.packed)
    assert "2 of 2 packed weights are turned into numbers, such as model.layers.0" in caplog.text
    assert "takes numbers alone" in caplog.text
    assert torch.equal(logits(packed), logits(plain))


def test_experts_with_inputs_in_another_order_become_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    it = of_experts(tmp_path, "gptq, act-order")
    plain, packed = it.model(it.plain), it.model(it.packed, CUDA)
    assert "24 of 32 packed weights" in caplog.text
    assert "experts whose inputs have an order" in caplog.text
    assert (logits(packed) - logits(plain)).norm() < 1e-4 * logits(plain).norm()


def test_groups_of_targets(tmp_path: Path) -> None:
    """Of 4 bits and of 8, which a name or a pattern gives to some layers."""
    it = Made(tmp_path, "compressed")
    eight = FORMATS["compressed, 8 bits"]
    held, plain = (
        load_file(it.packed / "model.safetensors"),
        load_file(it.plain / "model.safetensors"),
    )
    tensors = made.llama()
    for name in [name for name in tensors if "mlp." in name]:
        quantised = made.rounded(tensors[name], eight)
        plain[name] = quantised.numbers
        stem = name.removesuffix("weight")
        held |= {stem + leaf: value for leaf, value in eight.pack(quantised).items()}
    for folder, content in ((it.packed, held), (it.plain, plain)):
        content = {name: tensor.contiguous() for name, tensor in content.items()}
        save_file(content, folder / "model.safetensors")
    group = eight.settings["config_groups"]["group_0"]

    def add(settings: dict[str, Any]) -> None:
        settings["config_groups"]["group_1"] = {**group, "targets": [r"re:.*\.mlp\..*"]}

    it.settings(add)
    expected = linears(it.model(it.plain))
    for name, layer in linears(it.model(it.packed, CUDA)).items():
        assert isinstance(layer.packed, GroupWeight)
        assert layer.packed.bits == (8 if "mlp" in name else 4)
        assert torch.equal(layer.weight, expected[name].weight)


@pytest.mark.parametrize(("name", "bits", "off"), [("int4", 4, 0.11), ("int8", 8, 0.008)])
def test_quantised_at_load_as_a_gpu_has_it(
    tmp_path: Path, name: str, bits: int, off: float
) -> None:
    folder = made.write(tmp_path / "plain", made.llama())
    registry, checkpoint = build_registry(()), open_checkpoint(folder)
    scheme = registry.quantization_scheme(name)
    scheme.check_device(CUDA)
    config = registry.model_config(checkpoint.hf_config, folder)
    model_class = registry.model_class(config.architecture)
    model = build_on_meta(model_class, config, BuildContext(dtype=torch.float32), scheme)
    planned = weight_bytes(model)
    load_weights(model, checkpoint, "it", CPU, pack=True)
    tensors = made.llama()
    for where, layer in linears(model).items():
        assert isinstance(layer.packed, GroupWeight)
        assert layer.packed.bits == bits
        if "down" in where:
            expected = tensors[f"{where}.weight"]
            assert 0 < (layer.weight - expected).norm() < off * expected.norm()
    assert planned == held_bytes(model)


def check(it: Made) -> Any:
    return check_model(it.packed, EngineConfig(**BASE)).errors


PLACE = "model.layers.1.mlp.gate_proj."


def drop(leaf: str) -> Callable[[Made], None]:
    return lambda it: made.change(it.packed, lambda tensors: tensors.pop(PLACE + leaf))


def drop_all(it: Made, leaf: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(f".{leaf}")]:
            del tensors[name]

    made.change(it.packed, change)


def put(leaf: str, edit: Callable[[Tensor], Tensor]) -> Callable[[Made], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[PLACE + leaf] = edit(tensors[PLACE + leaf])

    return lambda it: made.change(it.packed, change)


def half(it: Made) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for leaf in [name for name in tensors if name.startswith(PLACE)]:
            del tensors[leaf]
        tensors[PLACE + "weight"] = torch.zeros(256, 128)

    made.change(it.packed, change)


def setting(**changes: Any) -> Callable[[Made], None]:
    return lambda it: it.settings(lambda settings: settings.update(changes))


def weights(**changes: Any) -> Callable[[Made], None]:
    def change(settings: dict[str, Any]) -> None:
        settings["config_groups"]["group_0"]["weights"].update(changes)

    return lambda it: it.settings(change)


def inputs(**changes: Any) -> Callable[[Made], None]:
    def change(settings: dict[str, Any]) -> None:
        settings["config_groups"]["group_0"]["input_activations"].update(changes)

    return lambda it: it.settings(change)


def inputs_of(given: Mapping[str, Any]) -> Callable[[Made], None]:
    def change(settings: dict[str, Any]) -> None:
        settings["config_groups"]["group_0"]["input_activations"] = dict(given)

    return lambda it: it.settings(change)


def plain_tensors(it: Made) -> None:
    plain = load_file(it.plain / "model.safetensors")
    made.change(it.packed, lambda tensors: (tensors.clear(), tensors.update(plain)))


BROKEN: Mapping[str, tuple[str, Callable[[Made], Any], str]] = {
    "no scales": ("awq", drop("scales"), f"no scales: there is no {PLACE}scales"),
    "no zeros": ("gptq", drop("qzeros"), f"no zeros: there is no {PLACE}qzeros"),
    "no scales of rows": ("int8 and activations", drop("weight_scale"), "gate_proj.weight_scale"),
    "another group": ("awq", setting(group_size=64), "not [4, 128]: group_size is 64, of 256 in"),
    "another group of gptq": ("gptq", setting(group_size=128), "group_size is 128, of 256 inputs"),
    "no group": ("gptq", setting(group_size=0), "group_size is 0, neither a number of inputs"),
    "another group of a config": ("compressed", weights(group_size=32), "group_size is 32, of"),
    "groups out of range": (
        "gptq, act-order",
        put("g_idx", lambda groups: groups + 1),
        f"{PLACE}g_idx puts inputs into group 4, and there are groups 0 to 3",
    ),
    "negative groups": ("gptq", put("g_idx", lambda groups: -2 - groups), "into group -3"),
    "few groups": ("gptq", put("g_idx", lambda groups: groups[:9]), "g_idx has shape [9], not"),
    "no groups": (
        "gptq, act-order",
        drop("g_idx"),
        f"desc_act is True, and there is no {PLACE}g_idx that says which group each input is in",
    ),
    "no groups of any": (
        "gptq, act-order",
        lambda it: drop_all(it, "g_idx"),
        "desc_act is True, and there is no model.layers.0.mlp.down_proj.g_idx",
    ),
    "no groups beside others": (
        "gptq, act-order",
        lambda it: (drop("g_idx")(it), setting(desc_act=False)(it)),
        f"inputs into groups that are no neighbours, and there is no {PLACE}g_idx",
    ),
    "groups that nobody filled in": (
        "gptq, act-order",
        put("g_idx", lambda groups: torch.full_like(groups, -1)),
        f"desc_act is True, and {PLACE}g_idx has -1 for all 128 inputs, which does not say in which"
        " of 4 groups each is",
    ),
    "zeros for groups": (
        "gptq, act-order",
        put("g_idx", torch.zeros_like),
        f"desc_act is True, and {PLACE}g_idx has 0 for all 128 inputs, which does not say in which",
    ),
    "zeros beside groups": (
        "gptq, act-order",
        lambda it: (put("g_idx", torch.zeros_like)(it), setting(desc_act=False)(it)),
        f"into groups that are no neighbours, and {PLACE}g_idx has 0 for all 128 inputs",
    ),
    "more inputs than a group has": (
        "gptq, act-order",
        put("g_idx", lambda groups: groups.where(groups.cumsum(0) > 9, 2)),
        f"{PLACE}g_idx puts 3",
    ),
    "more inputs than a group of neighbours has": (
        "gptq",
        put("g_idx", lambda groups: groups.where(torch.arange(128) != 9, 1)),
        f"{PLACE}g_idx puts 65 inputs into group 1, and groups are of 64",
    ),
    "some that nobody filled in": (
        "compressed, act-order",
        put("weight_g_idx", lambda groups: groups.where(torch.arange(128) != 9, -1)),
        f"{PLACE}weight_g_idx puts inputs into group -1, and there are groups 0 to 3",
    ),
    "zeros for groups of a config": (
        "compressed, act-order",
        put("weight_g_idx", torch.zeros_like),
        f"{PLACE}weight_g_idx puts 128 inputs into group 0, and groups are of 32",
    ),
    "no groups beside others, which were to be static": (
        "gptq, act-order",
        lambda it: (drop("g_idx")(it), setting(static_groups=True)(it)),
        f"inputs into groups that are no neighbours, and there is no {PLACE}g_idx",
    ),
    "zeros beside others, which were to be static": (
        "gptq, act-order",
        lambda it: (put("g_idx", torch.zeros_like)(it), setting(meta={"static_groups": True})(it)),
        f"into groups that are no neighbours, and {PLACE}g_idx has 0 for all 128 inputs",
    ),
    "no groups of a config": (
        "compressed, act-order",
        drop("weight_g_idx"),
        f"actorder is 'group', and there is no {PLACE}weight_g_idx that says which group each",
    ),
    "no groups of an alias": (
        "compressed, act-order",
        lambda it: (drop("weight_g_idx")(it), weights(actorder=True)(it)),
        f"actorder is True, and there is no {PLACE}weight_g_idx",
    ),
    "an order that some lack, unsaid": (
        "compressed, act-order",
        lambda it: (drop("weight_g_idx")(it), weights(actorder=None)(it)),
        f"inputs into groups that are no neighbours, and there is no {PLACE}weight_g_idx",
    ),
    "another shape": (
        "compressed",
        put("weight_shape", lambda shape: shape // torch.tensor([1, 2])),
        f"{PLACE}weight_shape says [256, 64], and the codes of {PLACE[:-1]} are [256, 128]",
    ),
    "a negative shape": (
        "compressed",
        put("weight_shape", lambda shape: -shape),
        f"{PLACE}weight_shape says [-256, -128], and",
    ),
    "a shape of floats": (
        "compressed",
        put("weight_shape", lambda shape: shape.float()),
        f"{PLACE}weight_shape is of float32, not int64 or int32",
    ),
    "a shape of three": (
        "compressed",
        put("weight_shape", lambda shape: shape.repeat(2)[:3]),
        f"{PLACE}weight_shape has shape [3], not [2]",
    ),
    "no shape": (
        "compressed",
        drop("weight_shape"),
        f"has codes but no shape: there is no {PLACE}weight_shape",
    ),
    "half of the parts": ("gptq", half, "mlp.gate_up_proj is merged of tensors of which some"),
    "codes of another type": (
        "awq",
        put("qweight", lambda codes: codes.long()),
        f"{PLACE}qweight is of int64, not int32",
    ),
    "codes of bytes": (
        "int8 and activations",
        put("weight", lambda codes: codes.to(torch.uint8)),
        f"{PLACE}weight is of uint8, not int8, and {PLACE}weight_scale says that it is codes",
    ),
    "codes that are floats": (
        "int8 and activations",
        put("weight", lambda codes: codes.float().to(torch.float8_e4m3fn)),
        f"{PLACE}weight is of float8_e4m3fn, not int8",
    ),
    "codes of another shape": ("compressed", put("weight_packed", lambda c: c[:8]), "has shape"),
    "codes of one dimension": ("awq", put("qweight", lambda c: c[0]), "no matrix"),
    "zero points of no form": (
        "compressed, zeros",
        lambda it: claims_symmetry(it, lambda zeros: zeros.long()),
        "weight_zero_point is not zero though symmetric is True, and int64 [16, 8] is none of the "
        "forms of zero points: int32 [16, 8] or int8 [128, 8]",
    ),
    "no zero points": (
        "compressed, signed zeros",
        drop("weight_zero_point"),
        f"has codes but no zeros: there is no {PLACE}weight_zero_point",
    ),
    "zero points of another shape": (
        "compressed, signed zeros",
        put("weight_zero_point", lambda zeros: zeros[:, :1]),
        f"{PLACE}weight_zero_point has shape [256, 1], not [256, 4]",
    ),
    "no codes at all": (
        "compressed by rows",
        put("weight_packed", lambda c: c[:, :0]),
        "no matrix",
    ),
    "a pattern": ("compressed", setting(ignore=["re:(("]), "'re:((', no regular expression"),
    "bits of a float": ("gptq", setting(bits=4.0), "bits is 4.0, not 4 or 8"),
    "3 bits": ("gptq", setting(bits=3), "bits is 3, not 4 or 8"),
    "8 bits of awq": ("awq", setting(bits=8), "bits is 8, not 4"),
    "8 bits of awq by another name": ("awq", setting(bits=None, w_bit=8), "bits is 8, not 4"),
    "two groups of awq": (
        "awq",
        setting(q_group_size=64),
        "group_size is 32 and q_group_size is 64, which are the same",
    ),
    "another layout": ("awq", setting(version="gemv"), "version is 'gemv', not 'gemm'"),
    "another version": ("gptq", setting(checkpoint_format="marlin"), "is 'marlin', not 'gptq'"),
    "several forms": (
        "gptq",
        setting(dynamic={"-:.*gate": {}, "+:.*up": {"bits": 8}}),
        "dynamic has bits 8 for '+:.*up', and all others have 4: layers that differ so are not",
    ),
    "a group that is no number": ("awq", setting(group_size="32"), "group_size is '32', neither"),
    "several groups": ("gptq", setting(group_size=[64]), "group_size is [64], neither a number"),
    "rules that are none": ("gptq", setting(dynamic=["-:.*up"]), "no object of rules"),
    "a rule that says nothing": (
        "gptq",
        setting(dynamic={".*up": False}),
        "dynamic has False for '.*up', no object of settings",
    ),
    "a pattern of a rule": (
        "gptq",
        setting(dynamic={"-:((": {}}),
        "dynamic has 're:((', no regular expression",
    ),
    "an unknown key": ("gptq", setting(turn=3), "turn is 3, which is not known"),
    "a method": ("gptq", setting(method="qqq"), "method is 'qqq', not 'gptq'"),
    "a format": ("gptq", setting(format="bitblas"), "format is 'bitblas', not 'gptq' or 'gptq_v2'"),
    "two versions": (
        "gptq",
        setting(format="gptq_v2"),
        "checkpoint_format is 'gptq' and format is 'gptq_v2', which keep zeros in different ways",
    ),
    "an adapter": ("gptq", setting(adapter={"rank": 8}), "adapter is {'rank': 8}, not {}"),
    "sym of another type": ("gptq", setting(sym="maybe"), "sym is 'maybe', not True or False"),
    "order of another type": ("gptq", setting(desc_act="yes"), "desc_act is 'yes', not True or F"),
    "a head without codes": (
        "gptq",
        setting(lm_head=True),
        "lm_head is True, and lm_head has no codes: there is no lm_head.qweight",
    ),
    "a head without codes of awq": ("awq", setting(lm_head=True), "there is no lm_head.qweight"),
    "a format of awq": ("awq", setting(format="gemv"), "format is 'gemv', not 'gemm' or 'GEMM'"),
    "2 bits": ("compressed", weights(num_bits=2), "weights.num_bits is 2, not 4 or 8"),
    "another strategy": ("compressed", weights(strategy="block"), "strategy is 'block', not"),
    "static activations": ("int8 and activations", inputs(dynamic=False), "dynamic is False, not"),
    "4-bit activations": ("int8 and activations", inputs(num_bits=4), "num_bits is 4, not 8"),
    "a weight too": (
        "awq",
        lambda it: made.change(it.packed, lambda t: t.update({f"{PLACE}weight": torch.zeros(3)})),
        f"{PLACE.rstrip('.')} has a weight beside its qweight, and nothing says which counts",
    ),
    "no codes": ("gptq", plain_tensors, "no tensor of the checkpoint is a qweight"),
    "a group without weights": (
        "compressed",
        lambda it: it.settings(lambda s: s["config_groups"].update(group_1={"weights": None})),
        "config_groups.group_",
    ),
    "8 bits of four": ("compressed", weights(num_bits=8), "inputs in 8 bits"),
    "an unknown method": ("gptq", setting(quant_method="aqlm"), "says 'aqlm'"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_ones_are_named(tmp_path: Path, broken: str) -> None:
    kind, breaks, words = BROKEN[broken]
    it = Made(tmp_path, kind)
    breaks(it)
    report = check_model(it.packed, EngineConfig(**BASE))
    assert any(words in problem.message for problem in report.errors), report
    # Where the codes cannot be read, nothing is said of them as weights.
    assert len(report.errors) == 1
    with pytest.raises(EngineError) as refused:
        LLM(str(it.packed), EngineConfig(**BASE))
    assert words in str(refused.value)
    with pytest.raises(EngineError) as refused:
        export_model(str(it.packed), tmp_path / "out.safetensors")
    assert words in str(refused.value)
    assert not (tmp_path / "out.safetensors").exists()


# What newer versions of GPTQModel may write besides, by their quantization/config.py.
OF_GPTQMODEL: dict[str, Any] = {
    "method": "gptq",
    "format": "gptq",
    "adapter": None,
    "act_group_aware": True,
    "failsafe": {"strategy": "rtn", "threshold": "0.5%", "smooth": {"type": "mad", "k": 2.75}},
    "foem": {"alpha": 0.0, "beta": 0.2, "device": "auto"},
    "gptaq": {"alpha": 0.25, "device": "auto"},
    "hessian": {"chunk_size": None, "chunk_bytes": None, "staging_dtype": "float32"},
    "mock_quantization": False,
    "offload_to_disk": True,
    "offload_to_disk_path": "/tmp/offloaded",
    "pack_impl": "cpu",
}


@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed"])
@pytest.mark.parametrize("nothing", [None, False, {}, []])
def test_unknown_settings_that_say_nothing_are_passed_over(
    tmp_path: Path, kind: str, nothing: Any
) -> None:
    it = Made(tmp_path, kind)
    setting(of_tomorrow=nothing)(it)
    assert not check(it)


def test_what_gptqmodel_says_of_its_calibration_is_passed_over(tmp_path: Path) -> None:
    it = Made(tmp_path, "gptq")
    setting(**OF_GPTQMODEL)(it)
    assert not check(it)
    expected = linears(it.model(it.plain))
    for name, layer in linears(it.model(it.packed, CUDA)).items():
        assert torch.equal(layer.weight, expected[name].weight)


# What AutoRound writes besides bits, group_size and sym, by its compressors/base.py.
OF_AUTOROUND: dict[str, Any] = {
    "act_bits": 16,
    "act_data_type": "int",
    "act_dynamic": True,
    "act_group_size": 64,
    "act_sym": True,
    "amp": False,
    "autoround_version": "0.12.0",
    "batch_size": 4,
    "block_name_to_quantize": "model.layers",
    "data_type": "int",
    "enable_minmax_tuning": True,
    "enable_norm_bias_tuning": True,
    "enable_quanted_input": True,
    "iters": 1000,
    "lr": 0.001,
    "gradient_accumulate_steps": 2,
    "low_gpu_mem_usage": True,
    "minmax_lr": 0.002,
    "nsamples": 512,
    "scale_dtype": "torch.float32",
    "seqlen": 512,
    "super_bits": None,
    "static_attention_granularity": "tensor",
    "static_kv_granularity": "tensor",
    "sym": False,
}


def auto_round(packing: str | None, **changes: Any) -> Callable[[Made], None]:
    """Have AutoRound say what another tool's settings do."""

    def change(settings: dict[str, Any]) -> None:
        given = {key: settings[key] for key in ("bits", "group_size")}
        settings.clear()
        settings.update(given | OF_AUTOROUND | {"quant_method": "auto-round"} | changes)
        if packing is not None:
            settings["packing_format"] = packing

    return lambda it: it.settings(change)


@pytest.mark.parametrize(
    ("kind", "packing", "method"),
    [
        ("gptq", "auto_round:auto_gptq", "auto-round"),
        ("gptq v1, zeros", "auto_round:auto_gptq", "intel/auto-round"),
        ("gptq v1, zeros", "auto_round:gptq", "auto-round"),
        ("gptq v2", "auto_round", "auto-round"),
        ("gptq of 8 bits", "auto_round:gptqmodel", "auto-round"),
        ("awq", "auto_round:auto_awq", "auto-round"),
        ("awq", "auto_round:awq", "intel/auto-round"),
    ],
)
def test_autorounds_layouts_are_those_of_gptq_and_awq(
    tmp_path: Path, kind: str, packing: str, method: str
) -> None:
    it = Made(tmp_path, kind)
    if packing != "auto_round:gptqmodel":
        drop_all(it, "g_idx")
    auto_round(packing, quant_method=method)(it)
    assert not check(it)
    assert not check_model(it.packed, EngineConfig(quantization=method, **BASE)).errors
    expected = linears(it.model(it.plain))
    for name, layer in linears(it.model(it.packed, CUDA)).items():
        assert torch.equal(layer.weight, expected[name].weight)


QUERIES = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("gptq", auto_round("auto_round:auto_gptq", extra_config={QUERIES: {"bits": 16}})),
        ("awq", auto_round("auto_round:auto_awq", extra_config={r"0\..*\.q_proj": {"bits": 16}})),
        ("gptq", setting(dynamic={f"-:{QUERIES}": {}, "+:.*v_proj": {"bits": 4}})),
        ("gptq", setting(dynamic={f"-:{QUERIES}": {}, ".*_proj": {"damp_percent": 0.1, "mse": 2}})),
    ],
)
def test_layers_that_a_rule_leaves_are_plain(
    tmp_path: Path, kind: str, change: Callable[[Made], None]
) -> None:
    """Also where others that they are merged with have codes."""
    it = Made(tmp_path, kind, lambda name: "lm_head" in name or QUERIES in name)
    assert "no skip list names these" in check(it)[0].message
    change(it)
    assert not check(it)
    assert (logits(it.model(it.packed, CUDA)) - logits(it.model(it.plain))).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gptq", {"true_sequential": False, "damp_percent": 0.01, "lm_head": False}),
        ("awq", {"zero_point": False, "modules_to_not_convert": ["lm_head"]}),
    ],
)
def test_what_autoround_says_in_exports_for_other_tools(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    it = Made(tmp_path, kind)
    setting(**OF_AUTOROUND, provider="auto-round", **changes)(it)
    assert not check(it)
    expected = linears(it.model(it.plain))
    for name, layer in linears(it.model(it.packed, CUDA)).items():
        assert torch.equal(layer.weight, expected[name].weight)


def of_layer(**given: Any) -> Callable[[Made], None]:
    return auto_round("auto_round:auto_gptq", extra_config={QUERIES: given})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (auto_round(None), "packing_format of AutoRound is None, not 'auto_round:auto_gptq' or"),
        (auto_round("auto_round:llm_compressor"), "is 'auto_round:llm_compressor', not 'auto_r"),
        (auto_round("auto_round:auto_gptq", act_bits=8), "act_bits is 8, not 16 or 32"),
        (auto_round("auto_round", data_type="mx_int"), "data_type is 'mx_int', not 'int'"),
        (auto_round("auto_round:auto_gptq", bits=2), "bits is 2, not 4 or 8"),
        (auto_round("auto_round", super_bits=6), "super_bits is 6, which is not known"),
        (auto_round("auto_round", static_kv_dtype="fp8"), "static_kv_dtype is 'fp8', which is not"),
        (auto_round("auto_round", rotation_config={"block_size": 32}), "rotation_config is {'bloc"),
        (auto_round("auto_round", desc_act=True), "desc_act is True and packing_format 'auto_rou"),
        (of_layer(bits=8), f"extra_config gives {QUERIES} a bits of 8, and layers that differ"),
        (of_layer(bits=4, group_size=32), f"gives {QUERIES} a group_size of 32"),
        (of_layer(act_bits=8), f"gives {QUERIES} a act_bits of 8"),
        (of_layer(data_type="fp"), f"gives {QUERIES} a data_type of 'fp'"),
        (auto_round("auto_round", extra_config=["lm_head"]), "extra_config is ['lm_head'], no"),
        (auto_round("auto_round", extra_config={"((": {"bits": 16}}), "no regular expression"),
        (setting(**OF_AUTOROUND | {"act_bits": 8}), "act_bits is 8, not 16 or 32"),
        (setting(dynamic={"+:.*v_proj": {"bits": 8}}), "dynamic has bits 8 for '+:.*v_proj', and"),
        (setting(dynamic={"-:((": {}}), "dynamic has 're:((', no regular expression"),
    ],
)
def test_what_autoround_may_say_that_changes_numbers_is_refused(
    tmp_path: Path, change: Callable[[Made], None], words: str
) -> None:
    it = Made(tmp_path, "gptq")
    change(it)
    [problem] = check(it)
    assert problem.code == "quantization-unsupported"
    assert words in problem.message
    with pytest.raises(ConfigError) as refused:
        LLM(str(it.packed), EngineConfig(**BASE))
    assert words in str(refused.value)


def test_layers_that_autoround_names_without_a_difference(tmp_path: Path) -> None:
    it = Made(tmp_path, "gptq", lambda name: False)
    alike = {"bits": 4, "group_size": 64, "data_type": "int", "sym": True, "act_bits": 16}
    auto_round("auto_round:auto_gptq", extra_config={"lm_head": alike})(it)
    assert not check(it)
    assert (logits(it.model(it.packed, CUDA)) - logits(it.model(it.plain))).abs().max() < 1e-4


def test_a_head_may_have_codes(tmp_path: Path) -> None:
    it = Made(tmp_path, "gptq", lambda name: False)
    setting(lm_head=True)(it)
    assert not check(it)
    assert (logits(it.model(it.packed, CUDA)) - logits(it.model(it.plain))).abs().max() < 1e-4


def add_biases(it: Made, of: Callable[[str], float] = lambda stem: 0.0) -> None:
    """One beside each qweight, all of whose numbers are the same."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".qweight")]:
            stem = name.removesuffix(".qweight")
            n = tensors[name].shape[1]
            tensors[f"{stem}.bias"] = torch.full((n,), of(stem), dtype=torch.float16)

    made.change(it.packed, change)


def test_biases_of_zero_need_no_place(tmp_path: Path) -> None:
    """AutoGPTQ of 2023 wrote one beside each qweight, whatever the model has."""
    it = Made(tmp_path, "gptq")
    add_biases(it)
    report = check_model(it.packed, EngineConfig(**BASE), deep=True)
    assert report.exit_code == 0, report.problems
    expected = linears(it.model(it.plain))
    for name, layer in linears(it.model(it.packed, CUDA)).items():
        assert torch.equal(layer.weight, expected[name].weight)
    with LLM(str(it.packed), EngineConfig(dtype="float32", **BASE)) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        assert len(llm.generate([[1, 5, 9]], greedy)[0].outputs[0].token_ids) == 2
    # A file has none of them, so that its numbers are a model, too.
    export_model(str(it.packed), tmp_path / "out.safetensors")
    import_model(tmp_path / "out.safetensors", tmp_path / "numbers", dequantize=True)
    for written in (tmp_path / "out.safetensors", tmp_path / "numbers"):
        assert not any("bias" in name for name in open_checkpoint(written).headers)
        assert not check_model(written, EngineConfig(**BASE)).errors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_vocabulary_is_planned_as_it_is_held(tmp_path: Path, dtype: str) -> None:
    """A CPU's head has a matrix of its own beside the rows that are looked up."""
    it = Made(tmp_path, "awq")
    made.change(it.packed, lambda tensors: tensors.pop("lm_head.weight"))
    config = json.loads((it.packed / "config.json").read_text())
    (it.packed / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    settings = EngineConfig(dtype=dtype, **BASE)
    (it.plain / "config.json").write_text(
        json.dumps({**config, "quantization_config": None, "tie_word_embeddings": True})
    )
    dummy = settings.replace(load_format="dummy")
    for folder, given in ((it.packed, settings), (it.plain, dummy)):
        report = check_model(folder, given)
        assert report.memory is not None
        with LLM(str(folder), given) as llm:
            assert llm.apply_model(held_bytes) == [report.memory.weights_bytes]


def test_biases_of_zero_are_left_out_of_a_decoder_without_a_head(tmp_path: Path) -> None:
    """Whose names have no prefix, as ``AutoModel`` saves them."""
    it = Made(tmp_path, "gptq")
    add_biases(it, lambda stem: 0.0)

    def bare(tensors: dict[str, Tensor]) -> None:
        held = {name.removeprefix("model."): tensors[name] for name in tensors}
        tensors.clear()
        tensors.update({name: held[name] for name in held if not name.startswith("lm_head.")})

    made.change(it.packed, bare)
    config = json.loads((it.packed / "config.json").read_text())
    config["architectures"] = ["LlamaModel"]
    (it.packed / "config.json").write_text(json.dumps(config))
    export_model(str(it.packed), tmp_path / "out.safetensors")
    import_model(tmp_path / "out.safetensors", tmp_path / "numbers", dequantize=True)
    vectors = []
    for source in (it.packed, tmp_path / "out.safetensors", tmp_path / "numbers"):
        assert source == it.packed or not any(
            "bias" in name for name in open_checkpoint(source).headers
        )
        with LLM(str(source), EngineConfig(dtype="float32", **BASE)) as llm:
            vectors.append(torch.tensor(llm.embed([[1, 5, 9]])[0].outputs.vector))
    assert torch.equal(vectors[0], vectors[1])
    torch.testing.assert_close(vectors[0], vectors[2], atol=0.05, rtol=0)


def test_biases_that_the_model_has_are_added(tmp_path: Path) -> None:
    """Beside those of zero that it has not."""
    it = Made(tmp_path, "gptq")
    add_biases(it, lambda stem: 0.5 if "v_proj" in stem else 0.0)
    plain = load_file(it.plain / "model.safetensors")
    for stem in [name.removesuffix(".weight") for name in plain if "attn" in name]:
        value = 0.5 if "v_proj" in stem else 0.0
        plain[f"{stem}.bias"] = torch.full((len(plain[f"{stem}.weight"]),), value)
    save_file(plain, it.plain / "model.safetensors")
    for folder in (it.plain, it.packed):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    assert not check(it)
    expected = it.model(it.plain)
    assert (logits(it.model(it.packed, CUDA)) - logits(expected)).abs().max() < 1e-4
    export_model(str(it.packed), tmp_path / "out.safetensors")
    written = open_checkpoint(tmp_path / "out.safetensors").headers
    biases = {name for name in written if name.endswith("bias")}
    assert biases == {name for name in plain if name.endswith("bias")}


@pytest.mark.parametrize("value", [0.5, torch.nan])
def test_a_bias_that_is_not_zero_needs_a_place(tmp_path: Path, value: float) -> None:
    it = Made(tmp_path, "gptq")
    add_biases(it, lambda stem: value if f"{stem}." == PLACE else 0.0)
    [problem] = check(it)
    assert problem.code == "weights-unexpected"
    assert problem.names == (f"{PLACE}bias",)
    with pytest.raises(EngineError, match=rf"unexpected: {PLACE}bias; check that the config"):
        LLM(str(it.packed), EngineConfig(**BASE))


DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("awq", setting(modules_to_not_convert=["lm_head"]), None),
        ("awq", setting(modules_to_not_convert=["gate", "proj"]), None),
        (
            "awq",
            setting(modules_to_not_convert=[DOWN, "lm_head"]),
            f"modules_to_not_convert names {DOWN}, stored as codes all the same; codes are read",
        ),
        ("gptq", setting(modules_to_not_convert=["mlp"]), f"names {DOWN} and 5 more, stored as"),
        ("gptq", setting(dynamic={r"-:.*mlp": {}}), f"dynamic names {DOWN} and 5 more, stored as"),
        ("compressed", setting(ignore=["lm_head", r"re:.*\.down_proj"]), f"{DOWN} and 1 more, "),
        ("int8 and activations", setting(ignore=["model.layers.0"]), f"{DOWN} and 6 more, "),
        (
            "compressed",
            inputs_of(made.TOKENS),
            f"beside weights of 4 bits ({DOWN}, 14 of 14 linears); activations keep the model's",
        ),
        ("compressed, zeros", inputs_of(made.TOKENS), "activations keep the model's dtype"),
        ("int8 and activations", inputs_of(made.TOKENS), None),
    ],
)
def test_settings_that_are_not_followed_are_said(
    tmp_path: Path,
    kind: str,
    change: Callable[[Made], None],
    words: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    it = Made(tmp_path, kind)
    change(it)
    report = check_model(it.packed, EngineConfig(**BASE))
    assert not report.errors
    said = [each for each in report.warnings if each.code == "quantization-settings"]
    assert [words in each.message for each in said if words is not None] == [True] * len(said)
    assert len(said) == (0 if words is None else 1)
    LLM(str(it.packed), EngineConfig(**BASE))
    logged = [line for line in caplog.messages if words is not None and words in line]
    assert len(logged) == len(said)
    # The tensors say what they are.
    expected = linears(it.model(it.plain))
    for name, layer in linears(it.model(it.packed, CUDA)).items():
        assert torch.equal(layer.weight, expected[name].weight)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("gptq", setting(desc_act=False)),
        ("gptq", setting(desc_act=True, static_groups=True)),
        ("gptq", setting(desc_act=True, meta={"static_groups": True})),
        ("compressed", weights(actorder="weight")),
        ("compressed", weights(actorder="static")),
        # One group has all inputs in any order.
        ("compressed by rows", weights(actorder="dynamic")),
    ],
)
def test_groups_of_neighbours_need_no_index(
    tmp_path: Path, kind: str, change: Callable[[Made], None]
) -> None:
    it = Made(tmp_path, kind)
    change(it)
    for leaf in ("g_idx", "weight_g_idx"):
        drop_all(it, leaf)
    assert not check(it)
    expected = linears(it.model(it.plain))
    for name, layer in linears(it.model(it.packed, CUDA)).items():
        assert torch.equal(layer.weight, expected[name].weight)


def unfilled(leaf: str, value: int, most: int) -> Callable[[Made], None]:
    """The groups of at most so many linears."""

    def change(tensors: dict[str, Tensor]) -> None:
        stems = [name.rpartition(".")[0] for name in tensors if name.endswith(("_scale", "scales"))]
        for stem in sorted(stems)[:most]:
            inputs = 256 if "down" in stem else 128
            tensors[f"{stem}.{leaf}"] = torch.full((inputs,), value, dtype=torch.int32)

    return lambda it: made.change(it.packed, change)


@pytest.mark.parametrize(
    ("kind", "change", "leaf", "value", "most"),
    [
        ("gptq", setting(desc_act=False), "g_idx", 0, 99),
        ("gptq", setting(desc_act=False), "g_idx", -1, 3),
        ("gptq", setting(desc_act=True, static_groups=True), "g_idx", 0, 3),
        ("compressed", weights(actorder="group"), "weight_g_idx", -1, 99),
        ("compressed", weights(actorder="weight"), "weight_g_idx", -1, 3),
    ],
)
def test_groups_that_nobody_filled_in_are_of_neighbours(
    tmp_path: Path, kind: str, change: Callable[[Made], None], leaf: str, value: int, most: int
) -> None:
    """As those are that ask for no order, and what llm-compressor does not calibrate."""
    it = Made(tmp_path, kind)
    change(it)
    unfilled(leaf, value, most)(it)
    assert not check(it)
    expected = linears(it.model(it.plain))
    for name, layer in linears(it.model(it.packed, CUDA)).items():
        assert torch.equal(layer.weight, expected[name].weight)


@pytest.mark.parametrize("kind", ["gptq", "gptq of 8 bits"])
def test_one_group_needs_no_filling_in(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All inputs are in it, whatever their order."""
    monkeypatch.setitem(FORMATS, f"whole {kind}", in_groups(kind, -1))
    it = Made(tmp_path, f"whole {kind}")
    setting(desc_act=True)(it)
    unfilled("g_idx", -1, 99)(it)
    assert not check(it)
    expected = linears(it.model(it.plain))
    for name, layer in linears(it.model(it.packed, CUDA)).items():
        assert torch.equal(layer.weight, expected[name].weight)


def test_the_last_group_may_have_fewer_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order the inputs are."""
    monkeypatch.setitem(FORMATS, "odd", in_groups("gptq, act-order", 96))
    it = Made(tmp_path, "odd")
    assert not check(it)
    expected = linears(it.model(it.plain))
    for name, layer in linears(it.model(it.packed, CUDA)).items():
        assert torch.equal(layer.weight, expected[name].weight)


def test_a_last_group_of_fewer_inputs_becomes_numbers_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Though its kernels take groups of such a size."""
    tensors = made.llama()
    for name, weight in tensors.items():
        if "mlp" in name:
            tensors[name] = weight[:, :192] if "down" in name else weight[:192]
    monkeypatch.setattr(made, "llama", lambda: tensors)
    monkeypatch.setitem(made.CONFIG, "intermediate_size", 192)
    monkeypatch.setitem(FORMATS, "short", in_groups("gptq v2", 128))
    it = Made(tmp_path, "short")
    expected = linears(it.model(it.plain))
    for name, layer in linears(it.model(it.packed, CUDA)).items():
        assert isinstance(layer.packed, GroupWeight) != ("down" in name)
        assert torch.equal(layer.weight, expected[name].weight)
    assert "2 of 14 packed weights are turned into numbers" in caplog.text


@pytest.mark.parametrize(
    ("kind", "group"),
    [
        ("compressed", 64),
        ("compressed", 12),
        ("compressed, signed zeros", 32),
        ("compressed, act-order", 12),
        ("compressed by rows", -1),
        ("compressed, 8 bits", -1),
    ],
)
def test_rows_may_be_padded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, group: int
) -> None:
    """To whole int32, as compressed-tensors does; weight_shape has the true number of inputs."""
    width = 250
    tensors = made.llama()
    for name, weight in tensors.items():
        if "mlp" in name:
            tensors[name] = weight[:, :width] if "down" in name else weight[:width]
    monkeypatch.setattr(made, "llama", lambda: tensors)
    monkeypatch.setitem(made.CONFIG, "intermediate_size", width)
    form = FORMATS[kind]
    settings = json.loads(json.dumps(form.settings))
    if group > 0:
        settings["config_groups"]["group_0"]["weights"]["group_size"] = group
    padded = f"padded {kind} {group}"
    monkeypatch.setitem(FORMATS, padded, form._replace(group=group, settings=settings))
    it = Made(tmp_path, padded)
    report = check_model(it.packed, EngineConfig(**BASE), deep=True)
    assert report.exit_code == 0, report.problems
    expected = linears(it.model(it.plain))
    for device in (CPU, CUDA):
        for name, layer in linears(it.model(it.packed, device)).items():
            if "down" in name or device == CUDA:
                assert torch.equal(layer.weight, expected[name].weight)
    with LLM(str(it.packed), EngineConfig(dtype="float32", **BASE)) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        assert len(llm.generate([[1, 5, 9]], greedy)[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize("kind", ["gptq v2", "awq", "compressed", "compressed, zeros"])
def test_the_last_group_of_neighbours_may_have_fewer_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A CPU's kernel takes codes in groups of 32, which get the scales of the checkpoint's."""
    monkeypatch.setitem(FORMATS, f"odd {kind}", in_groups(kind, 96))
    it = Made(tmp_path, f"odd {kind}")
    expected = linears(it.model(it.plain))
    for name, layer in linears(it.model(it.packed)).items():
        assert isinstance(layer.packed, Int4Matrix)
        off = (layer.weight - expected[name].weight).abs().max()
        assert off <= 2**-7 * expected[name].weight.abs().max()


def test_static_groups_that_some_name_are_of_neighbours(tmp_path: Path) -> None:
    """AutoGPTQ's and GPTQModel's loaders have neighbours where a file names none."""
    it = Made(tmp_path, "gptq")
    setting(desc_act=True, static_groups=True)(it)
    drop("g_idx")(it)
    assert not check(it)
    expected = linears(it.model(it.plain))
    for name, layer in linears(it.model(it.packed, CUDA)).items():
        assert torch.equal(layer.weight, expected[name].weight)


@pytest.mark.parametrize(
    ("kind", "config"),
    [("gptq", GPTQConfig(4, group_size=64)), ("awq", AwqConfig(4, group_size=32))],
)
def test_what_transformers_says_is_taken(tmp_path: Path, kind: str, config: Any) -> None:
    it = Made(tmp_path, kind)
    written = json.loads(json.dumps(config.to_dict()))
    it.settings(lambda settings: (settings.clear(), settings.update(written)))
    assert not check(it)
    expected = linears(it.model(it.plain))
    for name, layer in linears(it.model(it.packed, CUDA)).items():
        assert torch.equal(layer.weight, expected[name].weight)


@pytest.mark.parametrize("drops", [True, False])
def test_older_names_of_awq_are_taken(tmp_path: Path, drops: bool) -> None:
    """Those of llm-awq, beside the newer ones or alone."""
    it = Made(tmp_path, "awq")

    def rename(settings: dict[str, Any]) -> None:
        settings.update(w_bit=settings["bits"], q_group_size=settings["group_size"])
        for key in ("bits", "group_size") if drops else ():
            del settings[key]

    it.settings(rename)
    (tmp_path / "newer").mkdir()
    newer = Made(tmp_path / "newer", "awq")
    said, expected_said = (
        [(each.code, each.message) for each in check_model(folder, EngineConfig(**BASE)).problems]
        for folder in (it.packed, newer.packed)
    )
    assert said == expected_said
    assert not check(it)
    expected = linears(it.model(it.plain))
    for name, layer in linears(it.model(it.packed, CUDA)).items():
        assert torch.equal(layer.weight, expected[name].weight)


def test_format_alone_says_the_version(tmp_path: Path) -> None:
    """As transformers writes it."""
    it = Made(tmp_path, "gptq v2")

    def rename(settings: dict[str, Any]) -> None:
        settings["format"] = settings.pop("checkpoint_format")

    it.settings(rename)
    expected = linears(it.model(it.plain))
    for name, layer in linears(it.model(it.packed, CUDA)).items():
        assert torch.equal(layer.weight, expected[name].weight)


@pytest.mark.parametrize(
    ("kind", "leaf"),
    [
        ("awq", "scales"),
        ("gptq of 8 bits", "scales"),
        ("compressed", "weight_scale"),
        ("int8 and activations", "weight_scale"),
    ],
)
def test_scales_that_are_none_are_named(tmp_path: Path, kind: str, leaf: str) -> None:
    def first(value: float) -> Callable[[Tensor], Tensor]:
        def edit(scales: Tensor) -> Tensor:
            scales.view(-1)[0] = value
            return scales

        return edit

    it = Made(tmp_path, kind)
    for value, shown in ((torch.nan, "nan"), (torch.inf, "inf"), (-torch.inf, "-inf")):
        put(leaf, first(value))(it)
        [problem] = check(it)
        assert problem.code == "scales-wrong"
        assert problem.names == (PLACE + leaf,)
        assert problem.message.endswith(f"no scales: {PLACE}{leaf} has {shown}")
        with pytest.raises(ConfigError, match=f"gate_proj.*scales? has {shown}, which is no scale"):
            LLM(str(it.packed), EngineConfig(**BASE))
        out = tmp_path / "out.safetensors"
        with pytest.raises(ConfigError, match=f"{PLACE}{leaf} has {shown}, which is no scale"):
            export_model(str(it.packed), out)
        assert not out.exists()
    put(leaf, first(-0.5))(it)
    report = check_model(it.packed, EngineConfig(**BASE))
    assert not report.errors
    [problem] = [each for each in report.warnings if each.code == "scales-wrong"]
    assert problem.message.endswith(f"{PLACE}{leaf} has -0.5")
    put(leaf, first(0.0))(it)
    assert "scales-wrong" not in {each.code for each in check_model(it.packed).problems}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("compressed", setting(quantization_status="frozen")),
        ("compressed", setting(sparsity_config={"format": "dense", "global_sparsity": 0.1})),
        ("gptq", setting(dynamic={r"-:.*lm_head.*": {}})),
    ],
)
def test_settings_that_say_nothing_of_the_codes(
    tmp_path: Path, kind: str, change: Callable[[Made], None]
) -> None:
    it = Made(tmp_path, kind)
    change(it)
    assert not check(it)
    assert (logits(it.model(it.packed, CUDA)) - logits(it.model(it.plain))).abs().max() < 1e-4


def test_zeros_that_are_no_numbers_are_named() -> None:
    """Those of an exported file may be floats."""
    check_scale("zeros", torch.tensor([-1.0, 0.0]), "added")
    with pytest.raises(ConfigError, match="zeros has nan, which is no scale"):
        check_scale("zeros", torch.tensor([0.0, torch.nan]), "added")


def test_codes_without_a_config_are_named(tmp_path: Path) -> None:
    it = Made(tmp_path, "awq")
    path = it.packed / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    report = check_model(it.packed, EngineConfig(**BASE))
    assert {each.code for each in report.errors} == {"weights-missing", "weights-unexpected"}
    [problem] = [each for each in report.warnings if each.code == "quantization-unsupported"]
    assert "belongs to quantised weights, and config.json has no quantization_config" in (
        problem.message
    )


def test_the_deep_check_says_that_probabilities_are_not_finite(tmp_path: Path) -> None:
    """Of scales that are finite, and whose codes are numbers too large for float32."""
    it = Made(tmp_path, "compressed by rows")

    def enlarge(tensors: dict[str, Tensor]) -> None:
        scales = tensors["model.layers.1.mlp.down_proj.weight_scale"]
        tensors["model.layers.1.mlp.down_proj.weight_scale"] = torch.full_like(scales.float(), 3e38)

    made.change(it.packed, enlarge)
    report = check_model(it.packed, EngineConfig(**BASE), deep=True)
    assert report.exit_code == 3
    messages = [each.message for each in report.errors if each.code == "comparison-differs"]
    assert any("the next tokens' probabilities are not finite" in text for text in messages)


@pytest.mark.parametrize(
    "kind", ["awq", "gptq, act-order", "compressed, zeros", "int8 and activations"]
)
def test_the_deep_check_compares_their_numbers(tmp_path: Path, kind: str) -> None:
    """With transformers' model of the numbers, and with the integers as a CPU runs them."""
    it = Made(tmp_path, kind)
    report = check_model(it.packed, EngineConfig(**BASE), deep=True)
    assert report.exit_code == 0, report.problems
    assert report.comparison is not None
    assert report.comparison.same
    cost = report.quantization_cost
    assert cost is not None
    assert cost.mean_kl is not None
    # A CPU rounds scales and zeros to bfloat16; those of int8 are so.
    assert 0 <= cost.mean_kl < 0.01
    assert cost.equal_tokens > 0.9
    assert (cost.num_prompts, cost.num_tokens, cost.texts) == (2, 96, False)


def test_an_option_over_quantised_weights_is_one_error(tmp_path: Path) -> None:
    """The tensors belong to the model, and are not said to be strangers."""
    it = Made(tmp_path, "awq")
    out = tmp_path / "out.safetensors"
    export_model(str(it.plain), out, EngineConfig(quantization="int4"))
    for model, option in ((it.packed, "int4"), (it.packed, "fp8"), (out, "int8")):
        [problem] = check_model(model, EngineConfig(quantization=option, **BASE)).errors
        assert problem.code == "option-invalid"
        assert f"quantization {option!r} is asked for, but" in problem.message


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("awq", "awq"),
        ("gptq", "gptq"),
        ("compressed", "compressed-tensors"),
        ("int8 and activations", "compressed-tensors"),
        ("compressed", "engine-core"),
    ],
)
def test_the_method_of_the_checkpoint_may_be_named(tmp_path: Path, kind: str, method: str) -> None:
    """As config.json calls it, which need not be the name of a scheme."""
    it = Made(tmp_path, kind)
    setting(quant_method=method)(it)
    given = EngineConfig(quantization=method, **BASE)
    report = check_model(it.packed, given)
    assert not report.errors
    assert report.weights == check_model(it.packed, EngineConfig(**BASE)).weights
    greedy = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with LLM(str(it.packed), given) as llm:
        assert len(llm.generate([[1, 5, 9]], greedy)[0].outputs[0].token_ids) == 2
    [problem] = check_model(it.plain, given).errors
    assert f"quantization {method!r} is for checkpoints that are quantised so" in problem.message


def test_the_method_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    it = Made(tmp_path, "compressed")
    for asked in ("engine-core", "awq", "fp8"):
        given = EngineConfig(quantization=asked, **BASE)
        [problem] = check_model(it.packed, given).errors
        assert problem.message.endswith("quantised by 'compressed-tensors' (quantization_config); "
                                        "leave quantization out")  # fmt: skip
        with pytest.raises(OptionError, match=f"quantization '{asked}' is asked for, but"):
            LLM(str(it.packed), given)


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    it = Made(tmp_path, "awq")
    with pytest.raises(OptionError, match="quantised by 'awq'"):
        LLM(str(it.packed), EngineConfig(quantization="int4", **BASE))
    with pytest.raises(OptionError, match="or take 'int4', which quantises any"):
        LLM(str(it.plain), EngineConfig(quantization="awq", **BASE))
    for folder in (it.plain, it.packed):
        given = EngineConfig(quantization="unpacked", **BASE)
        [problem] = check_model(folder, given).errors
        assert f"and {folder} is no GGUF file; leave it out" in problem.message
        with pytest.raises(OptionError, match="is no GGUF file"):
            LLM(str(folder), given)
        with pytest.raises(OptionError, match="is no GGUF file"):
            export_model(str(folder), tmp_path / "out.safetensors", given)
    dummy = EngineConfig(load_format="dummy", **BASE)
    [problem] = check_model(it.packed, dummy).errors
    assert "load_format 'dummy' has no tensors that say which layers" in problem.message
    with pytest.raises(OptionError, match="load_format 'dummy' has no tensors"):
        LLM(str(it.packed), dummy)
    with pytest.raises(OptionError, match="load_format 'dummy' has no tensors"):
        LLM(str(it.packed), EngineConfig(load_format="dummy", **BASE))
