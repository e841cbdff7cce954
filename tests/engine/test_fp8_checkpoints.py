"""Checkpoints of e4m3 weights in the three formats that tools write, and broken ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import packed_checkpoints
import pytest
import torch
from golden_fixtures import GOLDEN
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.check import check_model
from engine_core.checkpoint import open_checkpoint
from engine_core.engine.export import export_model
from engine_core.errors import ConfigError, EngineError, OptionError
from engine_core.nn.linear import Linear
from engine_core.nn.quantization import QuantizationScheme
from engine_core.nn.quantization.fp8_checkpoint import Fp8Method, Fp8PartsMethod
from engine_core.registry import build_registry
from engine_core.runtime.loader import build_on_meta, load_weights, match_weights
from engine_core.runtime.packing import weight_bytes
from engine_core.step_context import BuildContext
from engine_core.testing.tiny_model import TinyModel

CPU = torch.device("cpu")
BASE: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu"}
FP8 = torch.float8_e4m3fn
Pair = tuple[Tensor, Tensor]


def by_tensor(weight: Tensor) -> Pair:
    scale = weight.abs().amax().reshape(1) / 448
    return (weight / scale).to(FP8), scale


def by_row(weight: Tensor) -> Pair:
    scales = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scales).to(FP8), scales.bfloat16()


def by_block(weight: Tensor) -> Pair:
    """Hugging Face's: the last blocks may be smaller than 128 x 128."""
    n, k = weight.shape
    scales = torch.empty(-(-n // 128), -(-k // 128))
    codes = torch.empty(n, k, dtype=FP8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = weight[place].abs().amax() / 448
            codes[place] = (weight[place] / scales[i, j]).to(FP8)
    return codes, scales


def numbers(codes: Tensor, scales: Tensor) -> Tensor:
    """The reference dequantisation."""
    n, k = codes.shape
    if scales.shape not in ((1,), (n, 1)):
        scales = scales[torch.arange(n) // 128][:, torch.arange(k) // 128]
    return (codes.double() * scales.double()).float()


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", **weights}}
    group["input_activations"] = {"num_bits": 8, "type": "float", "strategy": "token"}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FORMATS: dict[str, tuple[dict[str, Any], str, Callable[[Tensor], Pair]]] = {
    "blocks": (
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"],
        },
        "weight_scale_inv",
        by_block,
    ),
    "tensor": (compressed(strategy="tensor"), "weight_scale", by_tensor),
    "channel": (compressed(strategy="channel"), "weight_scale", by_row),
    "static": ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", by_tensor),
}


class Made:
    """A tiny Llama in a format, and the same with the numbers that the codes stand for."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        source: str = "llama-gqa",
        left_out: str = ".1.mlp.",
        also: Sequence[str] = (),
    ) -> None:
        """``also`` names layers that are no linears and are quantised, too."""
        settings, leaf, quantise = FORMATS[kind]
        self.plain, self.quantised, self.leaf = folder / "plain", folder / "quantised", leaf
        tensors = load_file(GOLDEN / source / "model.safetensors")
        plain, quantised = dict(tensors), dict(tensors)
        for name, weight in tensors.items():
            # Some are left out, as a skip list has it.
            linear = name.endswith("_proj.weight") and left_out not in name
            if not linear and name.removesuffix(".weight") not in also:
                continue
            codes, scales = quantise(weight.float())
            stem = name.removesuffix("weight")
            quantised |= {name: codes, stem + leaf: scales}
            if kind == "static":
                quantised[stem + "input_scale"] = torch.tensor(0.02)
            plain[name] = numbers(codes, scales)
        for path, held in ((self.plain, plain), (self.quantised, quantised)):
            path.mkdir()
            shutil.copy(GOLDEN / source / "config.json", path)
            save_file({n: t.contiguous() for n, t in held.items()}, path / "model.safetensors")
        self.config(lambda config: config.update(quantization_config=settings))

    def config(self, change: Callable[[dict[str, Any]], Any]) -> None:
        path = self.quantised / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))

    def tensors(self, change: Callable[[dict[str, Tensor]], Any]) -> None:
        path = self.quantised / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    def model(self, folder: Path, *, pack: bool = True, **context: Any) -> torch.nn.Module:
        registry = build_registry(())
        checkpoint = open_checkpoint(folder)
        config = registry.model_config(checkpoint.hf_config, folder)
        settings = checkpoint.hf_config.get("quantization_config")
        scheme: QuantizationScheme | None = None
        if settings is not None:
            name = registry.recognise_quantization(settings)
            assert name is not None
            scheme = registry.quantization_scheme(name, settings)
            scheme.check_device(CPU)
        model_class = registry.model_class(config.architecture)
        built = BuildContext(dtype=torch.float32, **context)
        model = build_on_meta(model_class, config, built, scheme)
        checkpoint, _ = match_weights(model, checkpoint, "it", scheme)
        self.bytes = weight_bytes(model)
        load_weights(model, checkpoint, "it", CPU, pack=pack)
        return model


def logits(model: torch.nn.Module) -> Tensor:
    tiny = TinyModel(model, None)
    sequences = [tiny.sequence([1, 5, 9, 200, 7, 7, 3], 7)]
    return torch.cat(tiny.run(sequences, [[(0, 0, 7)]]).logits)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("source", ["llama-gqa", "qwen2-gqa"])
def test_weights_are_those_of_the_reference(tmp_path: Path, kind: str, source: str) -> None:
    made = Made(tmp_path, kind, source)
    plain, quantised = made.model(made.plain), made.model(made.quantised)
    others = dict(plain.named_modules())
    compared = 0
    for name, layer in quantised.named_modules():
        if isinstance(layer, Linear):
            assert torch.equal(layer.weight, others[name].weight)
            compared += isinstance(layer.method, Fp8Method)
    assert compared > 4
    assert torch.equal(logits(quantised), logits(plain))
    assert made.bytes == sum(p.nbytes for p in made.model(made.plain, pack=False).parameters())


@pytest.mark.parametrize("kind", FORMATS)
def test_ranks_keep_their_part(tmp_path: Path, kind: str) -> None:
    made = Made(tmp_path, kind)
    if kind == "blocks":
        with pytest.raises(OptionError, match=r"down_proj: .* 128, which share an element"):
            made.model(made.quantised, tp_size=2)
        # Blocks may be cut between rows, not between columns.
        made = Made(made.plain, kind, left_out="down_proj")
    for rank in range(2):
        context = {"tp_size": 2, "tp_rank": rank}
        plain = dict(made.model(made.plain, **context).named_modules())
        for name, layer in made.model(made.quantised, **context).named_modules():
            if isinstance(layer, Linear):
                assert torch.equal(layer.weight, plain[name].weight)


def test_it_generates_and_says_that_a_cpu_gains_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Made(tmp_path, "channel")
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    out = []
    for folder in (made.plain, made.quantised):
        assert not check_model(folder, EngineConfig(**BASE)).errors
        with LLM(str(folder), EngineConfig(dtype="float32", **BASE)) as llm:
            out.append(llm.generate([[1, 5, 9]], greedy)[0].outputs[0].token_ids)
    assert out[0] == out[1]
    assert "saves no memory" in caplog.text
    loses, slower = check_model(made.quantised, EngineConfig(**BASE)).warnings
    assert (loses.code, slower.code) == ("quantization-loses", "quantization-slower")
    assert "saves no memory" in slower.message


@pytest.mark.parametrize("kind", ["blocks", "channel", "static"])
def test_the_deep_check_compares_their_numbers(tmp_path: Path, kind: str) -> None:
    """With transformers' model of the numbers; a CPU runs nothing else."""
    made = Made(tmp_path, kind)
    report = check_model(made.quantised, EngineConfig(**BASE), deep=True)
    assert report.exit_code == 0, report.problems
    assert report.comparison is not None
    assert report.comparison.same
    cost = report.quantization_cost
    assert cost is not None
    assert cost.mean_kl == pytest.approx(0, abs=1e-6)
    assert cost.equal_tokens == 1


HEAD, EMBEDDING = "lm_head", "model.embed_tokens"


def tie(folder: Path, *, drop: bool) -> None:
    """Have the head be the embedding, whose tensors it keeps, or has none."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.startswith(HEAD)]:
        del tensors[name]
    if not drop:
        for name in [name for name in tensors if name.startswith(EMBEDDING)]:
            tensors[name.replace(EMBEDDING, HEAD)] = tensors[name].clone()
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("codes", [(HEAD,), (EMBEDDING,), (HEAD, EMBEDDING)], ids="+".join)
def test_codes_of_a_vocabulary_become_numbers(
    tmp_path: Path, kind: str, codes: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Each rank takes its part of them."""
    made = Made(tmp_path, kind, also=codes)
    assert not check_model(made.quantised, EngineConfig(**BASE)).errors
    plain, quantised = made.model(made.plain), made.model(made.quantised)
    assert (
        f"{len(codes)} of {18 + len(codes)} weights of codes are turned into numbers, such as "
        f"{codes[0]}: it is no linear of a layer" in caplog.text
    )
    assert torch.equal(logits(quantised), logits(plain))
    assert made.bytes == sum(p.nbytes for p in made.model(made.plain, pack=False).parameters())
    context = {"tp_size": 2, "tp_rank": 1}
    if kind == "blocks":
        return
    plain, quantised = (made.model(at, **context) for at in (made.plain, made.quantised))
    assert torch.equal(quantised.lm_head.weight, plain.lm_head.weight)
    assert torch.equal(quantised.model.embed_tokens.weight, plain.model.embed_tokens.weight)


@pytest.mark.parametrize("kind", ["blocks", "channel"])
@pytest.mark.parametrize("drop", [True, False], ids=["one", "both"])
def test_codes_of_a_tied_vocabulary_become_numbers(tmp_path: Path, kind: str, drop: bool) -> None:
    """Where the checkpoint has both, they are compared as numbers."""
    made = Made(tmp_path, kind, also=(HEAD, EMBEDDING))
    tie(made.plain, drop=drop)
    tie(made.quantised, drop=drop)
    assert not check_model(made.quantised, EngineConfig(**BASE)).errors
    plain, quantised = made.model(made.plain), made.model(made.quantised)
    assert quantised.lm_head.weight is quantised.model.embed_tokens.weight
    assert torch.equal(logits(quantised), logits(plain))
    if not drop:
        made.tensors(lambda tensors: tensors[f"{HEAD}.{made.leaf}"].mul_(2))
        with pytest.raises(ConfigError, match=r"tie_word_embeddings.*but in the checkpoint they"):
            made.model(made.quantised)


def test_a_routers_codes_become_numbers(tmp_path: Path) -> None:
    """It chooses experts by numbers."""
    quantised = packed_checkpoints.mixtral()
    plain = dict(quantised)
    for name in [name for name in plain if name.endswith("moe.gate.weight")]:
        codes, scale = by_tensor(plain[name])
        plain[name] = numbers(codes, scale)
        quantised |= {name: codes, f"{name}_scale": scale}
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    outputs = []
    for folder, tensors, given in (("q", quantised, settings), ("p", plain, None)):
        path = packed_checkpoints.write(
            tmp_path / folder, tensors, given, **packed_checkpoints.MIXTRAL
        )
        assert not check_model(path, EngineConfig(**BASE), deep=True).errors
        with LLM(str(path), EngineConfig(dtype="float32", **BASE)) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True)
            [output] = llm.generate([[5, 9, 33, 7]], params)
            outputs.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kind", ["blocks", "static"])
def test_broken_codes_of_a_head_are_named(tmp_path: Path, kind: str) -> None:
    """As those of a linear are; an activation's scale is looked at, too, though not used."""
    made = Made(tmp_path, kind, also=(HEAD,))
    whole = load_file(made.quantised / "model.safetensors")
    scale = whole[f"{HEAD}.{made.leaf}"]
    changes: dict[str, tuple[Tensor | None, str]] = {
        made.leaf: (scale.clone().fill_(torch.nan), "has nan, which is no scale"),
        "weight": (whole[f"{HEAD}.weight"].float().to(torch.float8_e5m2), "is of float8_e5m2"),
    }
    if kind == "static":
        changes["input_scale"] = (torch.tensor(0.0), "has 0, which is no scale")
    for leaf, (value, words) in changes.items():
        made.tensors(lambda held, at=f"{HEAD}.{leaf}", to=value: held.update({at: to}))
        with pytest.raises(ConfigError, match=f"{HEAD}.{leaf} {words}"):
            LLM(str(made.quantised), EngineConfig(**BASE))
        made.tensors(lambda held: held.update(whole))
    for changed, words in (
        ({made.leaf: torch.ones(7, 5)}, rf"{HEAD}.{made.leaf} has shape \[7, 5\], scales of"),
        ({}, rf"{HEAD}.weight is float8_e4m3fn but has no scale: there is no {HEAD}.weight_scale"),
    ):
        made.tensors(
            lambda held, to=changed: (
                held.pop(f"{HEAD}.{made.leaf}"),
                held.update({f"{HEAD}.{leaf}": tensor for leaf, tensor in to.items()}),
            )
        )
        [problem] = check_model(made.quantised, EngineConfig(**BASE)).errors
        assert problem.code == "quantization-unsupported"
        with pytest.raises(ConfigError, match=words):
            LLM(str(made.quantised), EngineConfig(**BASE))
        made.tensors(lambda held: held.update(whole))


@pytest.mark.parametrize("kind", ["blocks", "channel"])
def test_codes_without_a_scale_that_fits_give_no_numbers(tmp_path: Path, kind: str) -> None:
    """Of a linear as of a vocabulary: no layer has looked at them then."""
    made = Made(tmp_path, kind)
    settings = json.loads((made.quantised / "config.json").read_text())["quantization_config"]
    registry = build_registry()
    scheme = registry.quantization_scheme(registry.recognise_quantization(settings), settings)
    linear = "model.layers.0.mlp.down_proj"
    made.tensors(lambda held: held.update({f"{linear}.{made.leaf}": torch.ones(7, 5)}))
    with pytest.raises(ConfigError, match=rf"{linear}.{made.leaf} has shape \[7, 5\], scales of"):
        scheme.numbers(open_checkpoint(made.quantised))
    made.tensors(lambda held: held.pop(f"{linear}.{made.leaf}"))
    with pytest.raises(ConfigError, match=rf"{linear}.weight is float8_e4m3fn but has no scale"):
        scheme.numbers(open_checkpoint(made.quantised))


@pytest.mark.parametrize("kind", ["blocks", "tensor", "channel"])
@pytest.mark.parametrize("size", [1, 2])
def test_parts_of_a_merged_linear_may_be_skipped(tmp_path: Path, kind: str, size: int) -> None:
    """By a name or a pattern, and only then."""
    part, left_out = {1: ("k_proj", "k_proj"), 2: ("re:.*down_proj", "down_proj")}[size]
    made = Made(tmp_path, kind, left_out=left_out)
    if size == 2:
        made.tensors(lambda held: restore(held, made.plain, "up_proj"))
        part = r"re:.*\.up_proj"
    else:
        report = check_model(made.quantised, EngineConfig(**BASE))
        assert any("though no skip list names" in problem.message for problem in report.errors)
    key = "ignore" if kind != "blocks" else "modules_to_not_convert"
    setting(**{key: [part]})(made)
    context = {"tp_size": size, "tp_rank": size - 1}
    plain = dict(made.model(made.plain, **context).named_modules())
    mixed = 0
    for name, layer in made.model(made.quantised, **context).named_modules():
        if isinstance(layer, Linear):
            assert torch.equal(layer.weight, plain[name].weight)
            mixed += isinstance(layer.method, Fp8PartsMethod)
    assert mixed == 3
    assert made.bytes == sum(
        p.nbytes for p in made.model(made.plain, pack=False, **context).parameters()
    )


def restore(held: dict[str, Tensor], plain: Path, part: str) -> None:
    """Put the numbers of some layers in the place of their codes."""
    for name, weight in load_file(plain / "model.safetensors").items():
        if f".{part}." in name:
            held[name] = weight
            for leaf in ("weight_scale", "weight_scale_inv"):
                held.pop(name.removesuffix("weight") + leaf, None)


GATE = "model.layers.0.mlp.gate_proj."


def drop_scale(made: Made) -> None:
    made.tensors(lambda tensors: tensors.pop(GATE + made.leaf))


def wrong_scale(made: Made) -> None:
    made.tensors(lambda tensors: tensors.update({GATE + made.leaf: torch.ones(3, 5)}))


@pytest.mark.parametrize("kind", FORMATS)
def test_scales_that_are_none_are_named(tmp_path: Path, kind: str) -> None:
    made = Made(tmp_path, kind)

    def said(leaf: str, value: float) -> set[tuple[str, tuple[str, ...]]]:
        def change(tensors: dict[str, Tensor]) -> None:
            scales = tensors[GATE + leaf].clone()
            scales.view(-1)[-1] = value
            tensors[GATE + leaf] = scales

        made.tensors(change)
        problems = check_model(made.quantised, EngineConfig(**BASE)).problems
        return {(p.severity, p.names) for p in problems if p.code == "scales-wrong"}

    for value in (torch.nan, torch.inf):
        assert said(made.leaf, value) == {("error", (GATE + made.leaf,))}
        with pytest.raises(ConfigError, match=f"{GATE}{made.leaf} has {value}, which is no scale"):
            LLM(str(made.quantised), EngineConfig(**BASE))
    assert said(made.leaf, -1.0) == {("warning", (GATE + made.leaf,))}
    assert said(made.leaf, 1.0) == set()
    if kind == "static":
        for value in (torch.nan, 0.0, -1.0):
            assert said("input_scale", value) == {("error", (f"{GATE}input_scale",))}
            with pytest.raises(ConfigError, match=f"{GATE}input_scale has .*, which is no scale"):
                LLM(str(made.quantised), EngineConfig(**BASE))


def other_scale(made: Made) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[GATE + "weight_scale"] = tensors.pop(GATE + made.leaf)

    made.tensors(change)


def half(made: Made) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[GATE + "weight"] = tensors[GATE + "weight"].float()
        del tensors[GATE + made.leaf]

    made.tensors(change)


def lone_scale(made: Made) -> None:
    made.tensors(lambda tensors: tensors.update({GATE + "weight": torch.zeros(96, 48)}))


def no_codes(made: Made) -> None:
    plain = load_file(made.plain / "model.safetensors")
    made.tensors(lambda tensors: (tensors.clear(), tensors.update(plain)))


def codes_of(dtype: torch.dtype) -> Callable[[Made], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[GATE + "weight"] = tensors[GATE + "weight"].float().to(dtype)

    return lambda made: made.tensors(change)


def setting(**changes: Any) -> Callable[[Made], None]:
    def change(made: Made) -> None:
        made.config(lambda config: config["quantization_config"].update(changes))

    return change


def of_group(part: str, **changes: Any) -> Callable[[Made], None]:
    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"][part].update(changes)

    return lambda made: made.config(change)


def weights(**changes: Any) -> Callable[[Made], None]:
    return of_group("weights", **changes)


def inputs(**changes: Any) -> Callable[[Made], None]:
    return of_group("input_activations", **changes)


BROKEN: Mapping[str, tuple[str, Callable[[Made], None], str]] = {
    "no scale": ("blocks", drop_scale, "there is no " + GATE + "weight_scale_inv"),
    "no scale of rows": ("channel", drop_scale, "there is no " + GATE + "weight_scale"),
    "a scale of another name": (
        "blocks",
        other_scale,
        f"there is no {GATE}weight_scale_inv, but a weight_scale, as no part beside it has",
    ),
    "scales of another shape": ("channel", wrong_scale, GATE + "weight_scale: has shape [3, 5]"),
    "blocks of another shape": ("blocks", wrong_scale, "weight_scale_inv: has shape [3, 5]"),
    "half of the parts": ("tensor", half, "mlp.gate_up_proj is merged of tensors of which some"),
    "a scale without codes": ("tensor", no_codes, "no tensor of the checkpoint is float8_e4m3fn"),
    "codes of e5m2": (
        "channel",
        codes_of(torch.float8_e5m2),
        f"{GATE}weight is of float8_e5m2, not float8_e4m3fn",
    ),
    "codes that are integers": (
        "blocks",
        codes_of(torch.int8),
        f"{GATE}weight is of int8, not float8_e4m3fn, and {GATE}weight_scale_inv says that",
    ),
    "another block": ("blocks", setting(weight_block_size=[64, 64]), "weight_block_size is [64"),
    "another type": ("blocks", setting(fmt="e5m2"), "fmt is 'e5m2', not 'e4m3'"),
    "an unknown key": ("blocks", setting(rotation="r1"), "rotation is 'r1'"),
    "4 bits": ("channel", weights(num_bits=4), "num_bits is 4, not 8"),
    "integers": ("channel", weights(type="int"), "format is 'float-quantized', not 'pack-qu"),
    "weights of tokens": ("channel", weights(strategy="token"), "is 'token', not 'tensor' or 'cha"),
    "inputs in groups": (
        "channel",
        inputs(strategy="group", group_size=128),
        "config_groups.group_0.input_activations.strategy is 'group', not 'tensor' or 'token'",
    ),
    "static tokens": ("channel", inputs(dynamic=False), "input_activations.dynamic is False, not"),
    "an activation scheme": (
        "blocks",
        setting(activation_scheme="banana"),
        "activation_scheme is 'banana', not 'dynamic' or 'static'",
    ),
    "a form of scales": (
        "blocks",
        setting(scale_fmt="banana"),
        "scale_fmt is 'banana', not 'float' or 'ue8m0'",
    ),
    "another structure": ("channel", weights(block_structure=[1, 128]), "block_structure is [1"),
    "a cache": (
        "channel",
        setting(kv_cache_scheme={"num_bits": 8}),
        "kv_cache_scheme.type is None",
    ),
    "no groups": ("channel", setting(config_groups=None), "config_groups is None"),
    "an unknown method": ("channel", setting(quant_method="hqq"), "says 'hqq'"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_ones_are_named(tmp_path: Path, broken: str) -> None:
    kind, breaks, words = BROKEN[broken]
    made = Made(tmp_path, kind)
    breaks(made)
    report = check_model(made.quantised, EngineConfig(**BASE))
    assert any(words in problem.message for problem in report.errors), report
    with pytest.raises(EngineError) as refused:
        LLM(str(made.quantised), EngineConfig(**BASE))
    assert words in str(refused.value)
    with pytest.raises(EngineError) as refused:
        export_model(str(made.quantised), tmp_path / "out.safetensors")
    assert words in str(refused.value)
    assert not (tmp_path / "out.safetensors").exists()


def test_skip_lists_that_name_codes_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Made(tmp_path, "blocks")
    setting(modules_to_not_convert=["model.layers.0.mlp", "model.layers.1.mlp"])(made)
    words = "modules_to_not_convert names model.layers.0.mlp.down_proj and 2 more, stored as codes"
    report = check_model(made.quantised, EngineConfig(**BASE))
    assert not report.errors
    [said] = [each for each in report.warnings if each.code == "quantization-settings"]
    assert words in said.message
    LLM(str(made.quantised), EngineConfig(**BASE))
    assert words in caplog.text


FP8_BLOCK = {
    "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128},
}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("blocks", setting(scale_fmt="float")),
        ("blocks", setting(scale_fmt="ue8m0")),
        # As MiniMax-M2 writes it, and others.
        ("blocks", setting(fmt="float8_e4m3fn")),
        ("static", setting(activation_scheme="static", scale_fmt=None)),
        ("channel", inputs(strategy="token", dynamic=True)),
        ("tensor", inputs(strategy="tensor", dynamic=False)),
        # As compressed-tensors' preset FP8_BLOCK has them.
        ("channel", setting(config_groups={"group_0": {"targets": ["Linear"], **FP8_BLOCK}})),
    ],
)
def test_settings_that_are_taken(tmp_path: Path, kind: str, change: Callable[[Made], None]) -> None:
    made = Made(tmp_path, kind)
    change(made)
    assert not check_model(made.quantised, EngineConfig(**BASE)).errors


def test_scales_of_one_byte_are_powers_of_2(tmp_path: Path) -> None:
    """As FineGrainedFP8Config of transformers documents them."""
    made = Made(tmp_path, "blocks")
    outputs = []
    for dtype in (torch.float32, torch.float8_e8m0fnu):

        def change(tensors: dict[str, Tensor], dtype: torch.dtype = dtype) -> None:
            for name in [name for name in tensors if name.endswith(made.leaf)]:
                powers = torch.exp2(tensors[name].float().log2().round())
                tensors[name] = powers.to(dtype)

        made.tensors(change)
        assert not check_model(made.quantised, EngineConfig(**BASE)).errors
        with LLM(str(made.quantised), EngineConfig(dtype="float32", **BASE)) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True)
            [output] = llm.generate([[5, 9, 33, 7]], params)
            outputs.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert outputs[0] == outputs[1]


def test_static_activations_without_scales_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of linears: nothing quantises the activations of a head whose codes become numbers."""
    made = Made(tmp_path, "static", also=(HEAD,))
    made.tensors(lambda tensors: tensors.pop(f"{HEAD}.input_scale"))
    problems = check_model(made.quantised, EngineConfig(**BASE)).problems
    assert not any(each.code == "quantization-settings" for each in problems)
    made.tensors(lambda tensors: [tensors.pop(n) for n in list(tensors) if "input_scale" in n])
    problems = check_model(made.quantised, EngineConfig(**BASE)).problems
    [problem] = [each for each in problems if each.code == "quantization-settings"]
    words = "input_scale (18 of 18 linears); they are scaled as they come"
    assert words in problem.message
    caplog.clear()
    LLM(str(made.quantised), EngineConfig(**BASE))
    assert sum(words in line for line in caplog.messages) == 1


def test_static_activations_that_nothing_quantises_need_no_scales(tmp_path: Path) -> None:
    """As beside weights in several blocks, and in a merged linear with plain parts."""

    def remarks(made: Made) -> list[str]:
        problems = check_model(made.quantised, EngineConfig(**BASE)).problems
        assert not any(each.severity == "error" for each in problems), problems
        return [each.message for each in problems if each.code == "quantization-settings"]

    made = Made(tmp_path, "blocks", "qwen2-gqa")
    made.config(lambda it: it["quantization_config"].update(activation_scheme="static"))
    [remark] = remarks(made)
    # But for two down_proj, which have two blocks a row.
    assert "mlp.gate_proj.input_scale (16 of 16 linears)" in remark
    (tmp_path / "parts").mkdir()
    made = Made(tmp_path / "parts", "static", left_out="k_proj")
    setting(modules_to_not_convert=["k_proj"])(made)
    names = [name for name in load_file(made.quantised / "model.safetensors") if "attn" in name]
    beside = [name for name in names if name.endswith(("q_proj.input_scale", "v_proj.input_scale"))]
    made.tensors(lambda tensors: [tensors.pop(name) for name in beside])
    assert remarks(made) == []


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    made = Made(tmp_path, "channel")
    with pytest.raises(OptionError, match="quantised by 'compressed-tensors'"):
        LLM(str(made.quantised), EngineConfig(quantization="fp8", **BASE))
    with pytest.raises(OptionError, match="or take 'fp8', which quantises any"):
        LLM(str(made.plain), EngineConfig(quantization="compressed-tensors", **BASE))
    named = EngineConfig(quantization="compressed-tensors", **BASE)
    assert not check_model(made.quantised, named).errors
    with pytest.raises(OptionError, match="load_format 'dummy' has no tensors"):
        LLM(str(made.quantised), EngineConfig(load_format="dummy", **BASE))
