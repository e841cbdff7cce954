"""A model as one file, and such a file as a folder again."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_core.checkpoint import Checkpoint, TensorHeader, resolve_model
from engine_core.checkpoint.gguf import GGUFFile
from engine_core.checkpoint.gguf_convert import dtype_of_matrices
from engine_core.checkpoint.one_file import (
    FILES,
    OneFile,
    Spec,
    check_target,
    collect_files,
    write_one_file,
    write_whole,
)
from engine_core.checkpoint.safetensors_file import SafetensorsWriter, tensor_bytes
from engine_core.configs import EngineConfig, ModelConfig
from engine_core.configs.engine import UNPACKED
from engine_core.errors import (
    CheckpointError,
    ConfigError,
    OptionError,
    TokenizerError,
    WeightsMismatchError,
)
from engine_core.kernels.linear.groups import MIDDLE, unpack_codes
from engine_core.kernels.row_codes import reference_quantize_rows
from engine_core.nn.embedding import VocabularySplit
from engine_core.nn.linear import Linear, UnquantizedLinearMethod
from engine_core.nn.quantization import kv_scales
from engine_core.nn.quantization.exported import form_shapes, pack_form, squared_error
from engine_core.nn.quantization.packed import (
    CompressedIntegersScheme,
    Integers,
    PackedCheckpoint,
)
from engine_core.nn.quantization.scale_values import refused, wrong_scales
from engine_core.nn.quantization.scheme import QUANTIZATION_KEYS
from engine_core.registry import build_registry
from engine_core.runtime.loader import build_on_meta, check_weights, match_weights
from engine_core.runtime.source import ModelSource, check_unpacked, open_model
from engine_core.runtime.task import Body, with_task, without_head
from engine_core.step_context import BuildContext

_SETTINGS = "quantization_config"
# Of a checkpoint whose cache was calibrated, in the settings.
_CACHE = "kv_cache_scheme"
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32,
         "dynamic": False}  # fmt: skip
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
_FP8_ROWS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token",
             "dynamic": True}  # fmt: skip
# What compressed-tensors calls the linears of each scheme: format, weights, activations.
_GROUPS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "int8": ("int-quantized", _INT8, None),
    "int4": ("pack-quantized", _INT4, None),
    "fp8": ("float-quantized", _FP8, _FP8_ROWS),
}
# The tensors of a linear of integers that are codes; its bias and its scales are not.
_INTEGERS = ("weight", "weight_zero_point")
# Rows that are quantised at once, and linears that are looked at before.
_ROWS = 1024
_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class Exported:
    """A file or folder that was written.

    Attributes:
        path: where it is.
        nbytes: its size.
        num_tensors: tensors in it.
        quantized: whether linears are codes in it.
        left: linears that stayed as they are, of those that are quantised otherwise.
        needs_compressed_tensors: whether transformers needs that package to load a folder; it does
            for scales of a cache, though there are no codes.
    """

    path: Path
    nbytes: int
    num_tensors: int
    quantized: bool
    left: tuple[str, ...]
    needs_compressed_tensors: bool = False


def export_model(
    model: str, path: Path, config: EngineConfig | None = None, *, force: bool = False
) -> Exported:
    """Write ``model`` to one safetensors file at ``path``.

    Its weights are quantised as ``config.quantization`` says, else they stay as they are; the
    blocks of a GGUF file are unpacked first. Nothing is left where it fails.

    Raises:
        OptionError: ``path`` exists and ``force`` is not given, or is a file of ``model``; the
            quantisation has no such form, or the weights are quantised already.
        CheckpointError: ``path`` cannot be written.
        EngineError: the model cannot be opened, or its tensors are not those of its layers.
    """
    config = config or EngineConfig()
    check_target(path, force)
    wanted = None if config.quantization == UNPACKED else config.quantization
    if wanted is not None and wanted not in _GROUPS:
        raise OptionError(f"quantization {wanted!r} has no form in a file; those that have one are "
                          f"{', '.join(_GROUPS)}")  # fmt: skip
    registry = build_registry(config.custom_module_map, plugin_errors=config.plugin_errors)
    source_path = resolve_model(model, config.revision)
    is_gguf = source_path.suffix.lower() == ".gguf"
    if config.quantization == UNPACKED:
        check_unpacked(model, is_gguf=is_gguf)
    opened = config.replace(quantization=UNPACKED if is_gguf else None, device="cpu")
    if is_gguf and config.dtype == "auto":
        # Not the type that this CPU would run them in.
        opened = opened.replace(dtype=dtype_of_matrices(GGUFFile(source_path)) or "auto")
    source = open_model(model, opened, registry, convert=False, quiet=True)
    checkpoint = source.checkpoint
    _refuse_own_file(path, checkpoint)
    if not checkpoint.has_weights:
        raise OptionError("load_format 'dummy' has no weights to export; leave it out")
    if source.scheme is not None:
        kinds = dict(source.scheme.scales(checkpoint.headers))
        if source.scheme.cache_settings:
            kinds |= dict.fromkeys(kv_scales.of_cache(checkpoint.headers), "divided")
        for wrong in wrong_scales(kinds, checkpoint.weights()):
            if not wrong.usable:
                raise refused(wrong)
    hf_config = checkpoint.hf_config.to_dict()
    if checkpoint.headless is not None:
        # The name says that it has no head.
        hf_config["architectures"] = [checkpoint.headless]
    plan = _Plan({})
    if wanted is not None:
        if source.scheme is not None and source.scheme.takes_weights:
            raise OptionError(
                f"the weights of {model} are quantised already, by {source.scheme.name!r}; leave "
                "quantization out"
            )
        plan = _plan(source, wanted)
        cache = source.scheme and (source.scheme.cache_settings or {}).get(_CACHE)
        hf_config[_SETTINGS] = _settings(plan, wanted) | ({_CACHE: cache} if cache else {})
    left_out = _spare_if_it_loads(source, config) if wanted is None else frozenset()
    headers = [each for name, each in checkpoint.headers.items() if name not in left_out]
    specs = [spec for header in headers for spec in plan.specs(header)]
    if wanted is not None:
        _check_loads(source, hf_config, specs, wanted)
    weights = (each for each in checkpoint.weights() if each[0] not in left_out)
    tensors = (item for each in weights for item in plan.made(*each))
    with torch.inference_mode():
        files = _files(checkpoint, hf_config)
        # One that was a file with codes remains one.
        kept = checkpoint.one_file.scheme if checkpoint.one_file else None
        nbytes = write_one_file(path, files, specs, tensors, scheme=wanted or kept, force=force)
    return Exported(path, nbytes, len(specs), bool(plan.forms), tuple(plan.left))


def _refuse_own_file(path: Path, checkpoint: Checkpoint) -> None:
    """Refuse to replace a file that the model is read from, by whatever name."""
    own = {header.file for header in checkpoint.headers.values()}
    own |= {file for pattern in FILES for file in checkpoint.folder.glob(pattern)}
    for file in sorted(own):
        with suppress(OSError):  # One of them is not there.
            if path.samefile(file):
                raise OptionError(
                    f"{path} is {file}, a file of the model that is exported; take another name"
                )


def _spare_if_it_loads(source: ModelSource, config: EngineConfig) -> frozenset[str]:
    """Match the tensors with the model's layers, as a load does; those that a file goes without.

    These say nothing, and the model has no place for them: numbers would be refused so.

    Raises:
        EngineError: the model loads neither as it is nor to embed, and nor would the file.
    """
    given = source.model_config
    try:
        return _spare(source, given)
    except WeightsMismatchError as error:
        # A decoder may lack its head, which does not choose tokens where it is to embed.
        try:
            embeds = with_task(
                given, source.model_class, source.checkpoint, config.replace(task="embed")
            )
            return _spare(source, embeds)
        except (ConfigError, OptionError, WeightsMismatchError):
            raise error from None


def _spare(source: ModelSource, model_config: ModelConfig) -> frozenset[str]:
    model = build_on_meta(source.model_class, model_config, _context(source), source.scheme)
    weights = without_head(model, source.checkpoint, model_config)
    matched, account = match_weights(model, weights, source.name, source.scheme)
    spare = matched.spare if isinstance(matched, PackedCheckpoint) else frozenset()
    spare -= account.fills().keys()
    return frozenset(map(weights.stored_name, spare)) if isinstance(weights, Body) else spare


def _context(source: ModelSource) -> BuildContext:
    return BuildContext(
        dtype=source.dtype,
        model_class=source.registry.model_class,
        kv_cache_dtype=source.kv_cache_dtype,
    )


@dataclass(slots=True)
class _Plan:
    """The form that each tensor gets.

    Attributes:
        forms: of the tensors that become codes, by name.
        vocabulary: those of them that are no linears'.
        left: linears that stay as they are.
    """

    forms: dict[str, str]
    vocabulary: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def specs(self, header: TensorHeader) -> list[Spec]:
        """The tensors that take a tensor's place in the file."""
        form = self.forms.get(header.name)
        if form is None:
            return [(header.name, header.dtype, header.shape)]
        (rows, columns), stem = header.shape, header.name.removesuffix("weight")
        if form == "fp8":
            codes = (header.name, "float8_e4m3fn", header.shape)
            return [codes, (f"{stem}weight_scale", "float32", (rows, 1))]
        shapes = form_shapes(form, rows, columns)
        return [(stem + part, dtype, shape) for part, (dtype, shape) in shapes.items()]

    def made(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The same with their numbers."""
        form, stem = self.forms.get(name), name.removesuffix("weight")
        if form is None:
            yield name, tensor
        elif form == "fp8":
            pairs = [reference_quantize_rows(rows) for rows in tensor.split(_ROWS)]
            yield name, torch.cat([codes for codes, _ in pairs])
            yield f"{stem}weight_scale", torch.cat([scales for _, scales in pairs]).unsqueeze(1)
        else:
            for part, value in pack_form(form, tensor).items():
                yield stem + part, value


def _plan(source: ModelSource, wanted: str) -> _Plan:
    """The form of each tensor if the linears are quantised."""
    scheme = source.registry.quantization_scheme(wanted)
    model = build_on_meta(source.model_class, source.model_config, _context(source), scheme)
    if without_head(model, source.checkpoint, source.model_config) is not source.checkpoint:
        raise OptionError(f"quantization {wanted!r} of a decoder without its head cannot be "
                          "exported; leave it out")  # fmt: skip
    headers = source.checkpoint.headers
    kv_scales.set_aside(model, headers, source.scheme)
    account = check_weights(model, source.checkpoint, source.name)
    plan, linears = _Plan({}), list[str]()
    for module in model.modules():
        if not isinstance(module, Linear | VocabularySplit):
            continue
        is_linear = isinstance(module, Linear)
        plain = type(module.method) in (UnquantizedLinearMethod, type(None))
        sources = sorted(account.sources(module.weight))
        # Codes lie by rows, under names that follow from the tensor's own.
        fits = (
            module.weight.dim() == 2
            and not account.altered.intersection(sources)
            and all(name.endswith(".weight") and len(headers[name].shape) == 2 for name in sources)
        )
        if is_linear and wanted == "int4":
            fits = fits and all(headers[name].shape[0] % 8 == 0 for name in sources)
        if plain or not fits:
            plan.left += [name.removesuffix(".weight") for name in sources if is_linear]
        elif is_linear:
            linears += sources
        else:
            plan.vocabulary += sources
    if not linears:
        raise OptionError(
            f"quantization {wanted!r}: the tensors of {source.name} are not those of its linears "
            "one by one, so they cannot be quantised in a file; leave it out"
        )
    form = "int4-zeros" if wanted == "int4" and _needs_zeros(source, linears) else wanted
    plan.forms = dict.fromkeys(linears, form) | dict.fromkeys(plan.vocabulary, "int8")
    return plan


@torch.inference_mode()
def _needs_zeros(source: ModelSource, linears: Collection[str]) -> bool:
    """Whether zeros of bfloat16 come much nearer to the weights than codes for zero do.

    They do where the weights had 4 bits before. The error of others is less with codes.
    """
    errors, seen = {"int4": 0.0, "int4-zeros": 0.0}, 0
    for name, tensor in source.checkpoint.weights():
        if name in linears:
            seen += 1
            for form in errors:
                errors[form] += squared_error(form, tensor[:_ROWS].float())
        if seen == _SAMPLES:
            break
    return errors["int4-zeros"] < errors["int4"] / 2


def _settings(plan: _Plan, wanted: str) -> dict[str, Any]:
    """``quantization_config`` as compressed-tensors has it, as far as it does."""
    form, weights, inputs = _GROUPS[wanted]
    zeros = "int4-zeros" in plan.forms.values()
    # A tied head has the embedding's.
    names = [*dict.fromkeys(name.removesuffix(".weight") for name in plan.vocabulary)]
    groups = {"group_0": (["Linear"], form, weights, inputs)}
    if names:
        groups["vocabulary"] = (names, "int-quantized", _INT8, None)
    return {
        "quant_method": "engine-core" if zeros else "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {
            group: {"targets": targets, "weights": each, "input_activations": inputs,
                    "output_activations": None, "format": form}
            for group, (targets, form, each, inputs) in groups.items()
        },
        "ignore": plan.left,
    }  # fmt: skip


class _Planned:
    """The headers of a file that is not written yet."""

    def __init__(self, specs: list[Spec], path: Path) -> None:
        self.headers = {name: TensorHeader(name, dtype, shape, path, 0)
                        for name, dtype, shape in specs}  # fmt: skip

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """None: only headers are asked for."""
        return iter(())


def _check_loads(
    source: ModelSource, hf_config: dict[str, Any], specs: list[Spec], wanted: str
) -> None:
    """Refuse what the family's own loading would not take, before anything is written."""
    settings = hf_config[_SETTINGS]
    name = source.registry.recognise_quantization(settings)
    assert name is not None, "a scheme of the core reads what is exported"
    scheme = source.registry.quantization_scheme(name, settings)
    scheme.quiet = True
    if wanted != "fp8":
        scheme.check_device(source.device)
    model = build_on_meta(source.model_class, source.model_config, _context(source), scheme)
    try:
        match_weights(model, _Planned(specs, Path(source.name)), source.name, scheme)
    except (CheckpointError, OptionError) as error:
        raise OptionError(
            f"quantization {wanted!r}: {source.model_class.__name__} does not load tensors that "
            f"are quantised in a file; leave it out ({error})"
        ) from error


def _files(checkpoint: Checkpoint, hf_config: dict[str, Any]) -> dict[str, bytes]:
    files = {"config.json": _json(hf_config)}
    if checkpoint.generation_config:
        files["generation_config.json"] = _json(checkpoint.generation_config)
    try:
        folders = [checkpoint.tokenizer_folder]
    except TokenizerError:  # the model runs on token ids
        folders = []
    # A GGUF file that was not converted has no folder of its own.
    folders += [checkpoint.folder] if checkpoint.gguf is None else []
    return files | collect_files(*folders)


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def import_model(path: Path, folder: Path, *, dequantize: bool = False) -> Exported:
    """Write a file of :func:`export_model` as a folder that transformers loads.

    Codes stay codes, which transformers reads with compressed-tensors installed; those of the
    vocabulary, which it does not, become numbers. Codes of 4 bits take a byte each there: for
    packed ones with zero points compressed-tensors 0.20 makes zero points of the wrong shape.

    Args:
        path: the file.
        folder: made anew; may be there if it is empty.
        dequantize: whether all codes become numbers, of the dtype that the config states.

    Raises:
        OptionError: ``path`` is no such file, ``folder`` is not empty, or codes cannot be made
            numbers.
        CheckpointError: the file is damaged, or the folder cannot be written.
    """
    _refuse_other_models(path)
    opened = OneFile(path)
    changed = opened.changed()
    if changed:
        raise CheckpointError(f"{path}: {changed[0]} is not what was written ({len(changed)} such "
                              "tensors); copy the file again")  # fmt: skip
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(f"{folder} is there already and not empty; name another folder")
    hf_config: dict[str, Any] = json.loads(opened.files["config.json"])
    key = next((key for key in QUANTIZATION_KEYS if hf_config.get(key)), _SETTINGS)
    settings: dict[str, Any] = hf_config.get(key) or {}
    if settings.get("quant_method") == "engine-core" and not dequantize:
        raise OptionError(f"{path}: its zeros of bfloat16 are known to this engine alone, because "
                          "its weights had 4 bits before; give --dequantize")  # fmt: skip
    dtype = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16")
    if dequantize and settings:
        specs, tensors = _numbers(opened, settings, dtype)
        del hf_config[key]
        if settings.get(_CACHE):
            hf_config[_SETTINGS] = {
                "quant_method": "compressed-tensors",
                "format": "dense",
                "config_groups": {},
                _CACHE: settings[_CACHE],
                "ignore": [],
            }
    else:
        specs, tensors = _imported(opened, settings, dtype)
    if not dequantize and opened.scheme is not None:
        vocabulary = settings["config_groups"].pop("vocabulary", {"targets": []})["targets"]
        # A head that shares the embedding's numbers is a linear to others.
        settings["format"] = settings["config_groups"]["group_0"]["format"] = (
            _GROUPS[opened.scheme][0] if opened.scheme != "int4" else "int-quantized"
        )
        settings["ignore"] = [*dict.fromkeys((*settings["ignore"], *vocabulary, "lm_head"))]

    def write(temporary: Path) -> None:
        opened.write_files(temporary)
        (temporary / "config.json").write_bytes(_json(hf_config))
        with SafetensorsWriter(temporary / "model.safetensors", specs) as writer:
            for name, tensor in tensors:
                writer.write(name, tensor_bytes(tensor))

    with torch.inference_mode():
        write_whole(folder, write, folder=True)
    left = [hf_config[each] for each in QUANTIZATION_KEYS if hf_config.get(each)]
    return Exported(
        *(folder, (folder / "model.safetensors").stat().st_size, len(specs)),
        *(opened.scheme is not None and not dequantize, ()),
        needs_compressed_tensors=any(s.get("quant_method") == "compressed-tensors" for s in left),
    )


def _refuse_other_models(path: Path) -> None:
    what = "a folder" if path.is_dir() else None
    if path.is_file():
        with suppress(OSError), path.open("rb") as file:
            what = "a GGUF file" if file.read(4) == b"GGUF" else None
    if what is not None:
        raise OptionError(
            f"{path} is {what}, and 'engine-core import' takes a file that 'engine-core export' "
            f"wrote; run 'engine-core export {path} OUT.safetensors' first"
        )


class _Codes:
    """The tensors of a file, as those of a checkpoint."""

    def __init__(self, opened: OneFile) -> None:
        self.headers = opened.weights.headers
        self.weights = opened.weights.tensors


def _numbers(
    opened: OneFile, settings: Mapping[str, Any], dtype: str
) -> tuple[list[Spec], Iterator[tuple[str, Tensor]]]:
    """The tensors of a folder without codes, which are made one by one.

    Raises:
        OptionError: no scheme gives the numbers.
    """
    registry, source = build_registry(), _Codes(opened)
    name = registry.recognise_quantization(settings)
    scheme = None if name is None else registry.quantization_scheme(name, settings)
    found: Any = source
    if scheme is None or scheme.takes_weights:
        found = None if scheme is None else scheme.numbers(source)
    if found is None:
        raise OptionError(
            f"{opened.weights.path}: quantization {name or settings.get('quant_method')!r} does "
            "not give the numbers that its codes stand for; leave --dequantize out"
        )
    # Without a config that says so, nobody takes scales of a cache.
    left = [each for each in found.headers if kv_scales.is_scale(each) and not settings.get(_CACHE)]
    headers = {each: header for each, header in found.headers.items() if each not in left}
    kinds = {
        each: header.dtype
        if each in source.headers and source.headers[each].dtype == header.dtype
        else dtype
        for each, header in headers.items()
    }
    return [(each, kinds[each], header.shape) for each, header in headers.items()], (
        (each, tensor.to(getattr(torch, kinds[each]), copy=True))
        for each, tensor in found.weights()
        if each in kinds
    )


def _imported(
    opened: OneFile, settings: Mapping[str, Any], dtype: str
) -> tuple[list[Spec], Iterator[tuple[str, Tensor]]]:
    """The tensors of a folder of codes, likewise."""
    source, linears = opened.weights, dict[str, Integers]()
    if opened.scheme in ("int4", "int8"):
        scheme = CompressedIntegersScheme(opened.scheme, settings)
        linears = {linear.name: linear for linear in scheme.linears(source.headers)}
    vocabulary = settings.get("config_groups", {}).get("vocabulary", {"targets": []})["targets"]
    kept = frozenset(linears).difference(vocabulary)

    def spec(name: str, header: Any) -> Spec:
        stem, _, leaf = name.rpartition(".")
        if stem in linears and leaf in _INTEGERS:
            shape = linears[stem].shape if leaf == "weight" else header.shape
            return name, "int8" if stem in kept else dtype, shape
        return name, header.dtype, header.shape

    def made(name: str, tensor: Tensor) -> Tensor:
        stem, _, leaf = name.rpartition(".")
        if stem not in linears or leaf not in _INTEGERS:
            return tensor.clone()
        if stem not in kept:
            return tensor.to(getattr(torch, dtype))
        bits = linears[stem].layout.bits
        codes = unpack_codes(tensor, bits) if leaf == "weight" else tensor
        return codes.view(torch.int8) - MIDDLE[bits]

    packed = PackedCheckpoint(source, linears, scheme.read if linears else None, kept)
    tensors = packed.convert(source.tensors())
    return [spec(*each) for each in packed.headers.items()], (
        (name, made(name, tensor)) for name, tensor in tensors
    )
