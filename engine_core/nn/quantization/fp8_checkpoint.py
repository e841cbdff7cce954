"""Checkpoints whose linears are e4m3 codes and scales, as tools write them.

The tensors say which linears are quantised, and how their scales lie; the config says which of the
formats there are they may be. A layer's tensors are ``weight`` in e4m3, ``weight_scale`` (of the
whole tensor or of each row) or ``weight_scale_inv`` (of 128 x 128 blocks), which multiply the codes
for all their names, and of calibrated activations ``input_scale`` or ``activation_scale``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from engine_core.errors import ConfigError, ErrorCode, OptionError
from engine_core.kernels import (
    ChainForm,
    Fp8Weight,
    RowForm,
)
from engine_core.kernels.linear import fp8
from engine_core.nn.epilogue import Call
from engine_core.nn.linear import Linear, LinearMethod, UnquantizedLinearMethod
from engine_core.nn.loading import (
    ShapeMismatchError,
    WeightLoader,
    load_weight,
    set_weight_loader,
)
from engine_core.nn.packing import MatrixModule
from engine_core.nn.quantization.scale_values import check_scale
from engine_core.nn.quantization.scheme import QUANTIZATION_KEYS, QuantizationScheme, ScaleKind

if TYPE_CHECKING:
    from engine_core.checkpoint import Checkpoint
    from engine_core.nn.loading import LoadAccount

_E4M3, _E8M0 = "float8_e4m3fn", "float8_e8m0fnu"
_NUMBERS = ("float16", "bfloat16", "float32", "float64")
_BLOCK = 128
_SCALES = ("weight_scale", "weight_scale_inv")
_SKIP_LISTS = ("ignore", "modules_to_not_convert", "ignored_layers")
_INPUT_SCALES = ("input_scale", "activation_scale")


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """The tensors of a quantised linear besides its codes.

    Attributes:
        scale: the name of its scales.
        blocks: whether 128 columns of a row have a scale of their own.
        input_scale: the name of the activations' scale; None if they are measured.
        quantizes_rows: whether activations are quantised at all, where that is faster.
        mixed: whether some parts of a merged linear are plain, as a skip list has it.
    """

    scale: str
    blocks: bool
    input_scale: str | None
    quantizes_rows: bool
    mixed: bool = False


class Fp8Method(UnquantizedLinearMethod):
    """A weight that is an :class:`Fp8Weight` on a GPU.

    Attributes:
        quantizes_rows: whether many rows are quantised too, to be multiplied by the codes.
    """

    quantizes_rows = True

    def fits(
        self, layer: Linear, call: Call, *, gated: bool = False, deterministic: bool = False
    ) -> bool:
        """By the tiles of 8-bit floats; deterministic mode multiplies by numbers."""
        if deterministic:
            return super().fits(layer, call, gated=gated, deterministic=True)
        shape = (call.rows, layer.out_features, layer.in_features, call.dtype, call.gpu)
        return fp8.has_kernel(*shape, gated=gated, quantizes_rows=self.quantizes_rows)

    def activates(self, layer: Linear, call: Call, gated: bool, activation: str) -> bool:
        """None of many rows does."""
        return False

    def adds_residual(self, layer: Linear, call: Call) -> bool:
        """Where the norm applies the scales."""
        shape = (call.rows, layer.out_features, layer.in_features, call.dtype, call.gpu)
        return self.quantizes_rows and fp8.adds_residual(*shape)

    def scales_later(self, layer: Linear, call: Call) -> bool:
        """As where a norm applies them."""
        return self.adds_residual(layer, call)

    def keeps_numbers(self, layer: Linear, call: Call, gated: bool) -> str | None:
        """For few rows, and where no matrix units multiply codes."""
        n, k = layer.out_features, layer.in_features
        if not self.quantizes_rows:
            return "blocks of the weight have scales, or the checkpoint quantises no activations"
        if self.fits(layer, call, gated=gated):
            return "so few rows keep their 16 bits"
        if not fp8.multiplies_in_fp8(n, k, call.dtype, call.gpu):
            return "no matrix units multiply such codes"
        return None

    def chain_form(self, layer: Linear) -> ChainForm | None:
        """That of codes with a scale a row."""
        kept = self.has_row_scales and isinstance(layer.packed, Fp8Weight | None)
        return ChainForm(8) if kept else None

    @property
    def has_row_scales(self) -> bool:
        """Whether each row of a weight has one scale."""
        return True

    def row_form(self, layer: Linear) -> RowForm:
        """That of the weight."""
        packed = layer.packed
        assert isinstance(packed, Fp8Weight), "a GPU has the codes"
        return packed.row_form


class Fp8CheckpointMethod(Fp8Method):
    """Codes and scales as the checkpoint has them.

    Ranks and merged layers may cut blocks at any row: each row gets the scales of its block. Merged
    parts that were calibrated apart share the greatest scale of their activations.
    """

    def __init__(self, layout: Fp8Layout, on_cpu: bool) -> None:
        self._layout = layout
        self._on_cpu = on_cpu
        self.quantizes_rows = layout.quantizes_rows and not layout.blocks

    @property
    def has_row_scales(self) -> bool:
        """Not where blocks have them, or some parts are plain."""
        return not self._layout.blocks and not self._layout.mixed

    @property
    def _names(self) -> tuple[str, ...]:
        names = ("weight", self._layout.scale, self._layout.input_scale)
        return tuple(name for name in names if name is not None)

    def create_weights(
        self,
        layer: Linear,
        in_features: int,
        out_features: int,
        dtype: torch.dtype | None,
        device: torch.device | None,
    ) -> None:
        """Make the codes ``[out, in]``, and scales ``[out]`` or ``[out, in / 128]``."""
        layout = self._layout
        empty = torch.empty(out_features, in_features, dtype=torch.float8_e4m3fn, device=device)
        layer.add_parameter("weight", empty, input_dim=1)
        _add_scales(layer, layout, device)
        if layout.input_scale is not None:
            one = torch.empty(layer.num_parts, dtype=torch.float32, device=device)
            layer.add_parameter(layout.input_scale, one, output_dim=None)

    def packed_sizes(self, layer: MatrixModule) -> Mapping[str, int]:
        """On a CPU the numbers that the codes stand for."""
        if not self._on_cpu:
            return {}
        numel = layer.get_parameter("weight").numel()
        return dict.fromkeys(self._names, 0) | {"weight": numel * layer.dtype.itemsize}

    def process_after_load(self, layer: Linear) -> None:
        """Order the codes for a GPU's kernels; a CPU, which has none, gets the numbers."""
        codes, scales, *inputs = (layer.get_parameter(name).data for name in self._names)
        matrix = Fp8Weight.of(
            codes,
            scales.T.contiguous() if self._layout.blocks else scales,
            layer.dtype,
            input_scale=inputs[0].max() if inputs else None,
            quantizes_rows=self._layout.quantizes_rows,
        )
        if codes.is_cuda:
            layer.set_packed(matrix, *self._names)
            return
        for name in self._names:
            delattr(layer, name)
        layer.weight = nn.Parameter(matrix.dense(), requires_grad=False)
        super().process_after_load(layer)


class Fp8PartsMethod(UnquantizedLinearMethod):
    """A merged linear of which some parts are codes: all become numbers once they are loaded."""

    def __init__(self, layout: Fp8Layout) -> None:
        self._layout = layout

    def create_weights(
        self,
        layer: Linear,
        in_features: int,
        out_features: int,
        dtype: torch.dtype | None,
        device: torch.device | None,
    ) -> None:
        """Make the weight of numbers, which holds codes too, and scales, which are 1 elsewhere."""
        _add_scales(layer, self._layout, device)
        super().create_weights(layer, in_features, out_features, dtype, device)
        fill: WeightLoader = vars(layer.weight)["weight_loader"]

        def load(param: nn.Parameter, tensor: Tensor, shard_id: Any = None) -> None:
            if tensor.dtype == torch.float8_e4m3fn:
                # Every code is a number of any of the engine's dtypes.
                tensor = tensor.to(param.dtype)
            else:
                one = torch.ones(1, dtype=torch.float32, device=tensor.device)
                load_weight(layer.get_parameter(self._layout.scale), one, shard_id)
            fill(param, tensor, shard_id)

        set_weight_loader(layer.weight, load)

    def packed_sizes(self, layer: MatrixModule) -> Mapping[str, int]:
        """The scales are not kept."""
        return {self._layout.scale: 0}

    def process_after_load(self, layer: Linear) -> None:
        """Multiply by the scales."""
        scales = layer.get_parameter(self._layout.scale).data
        scales = scales.view(len(scales), -1)
        if self._layout.blocks:
            scales = scales.repeat_interleave(_BLOCK, dim=1)[:, : layer.weight.shape[1]]
        layer.weight.copy_(layer.weight * scales)
        delattr(layer, self._layout.scale)
        super().process_after_load(layer)


def _add_scales(layer: Linear, layout: Fp8Layout, device: torch.device | None) -> None:
    """Scales ``[out]`` or ``[out, in / 128]``, which load from any form."""
    n, blocks = layer.out_features, -(-layer.in_features // _BLOCK)
    layer.add_parameter(
        layout.scale,
        torch.empty((n, blocks) if layout.blocks else (n,), dtype=torch.float32, device=device),
        input_dim=1 if layout.blocks else None,
        group_size=_BLOCK if layout.blocks else 1,
        spread=_spread_over_rows,
    )


def _spread_over_rows(scales: Tensor, rows: int, width: int) -> Tensor:
    """Scales of a tensor, of its rows or of its blocks as those of each row, ``[rows, width]``."""
    blocks = (-(-rows // _BLOCK), width)
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(rows, width)
    if scales.shape in ((rows,), (rows, 1)):
        return scales.reshape(rows, 1).expand(rows, width)
    if scales.shape == blocks:
        return scales.repeat_interleave(_BLOCK, dim=0)[:rows]
    raise ShapeMismatchError(
        f"has shape {list(scales.shape)}, scales of this layer have one number, shape {[rows, 1]} "
        f"or, of 128 x 128 blocks, {list(blocks)}"
    )


class _Plain:
    """The headers of a checkpoint as plain layers would have it: numbers, and no scales."""

    gguf = None

    def __init__(self, source: Any) -> None:
        stems = {name.removesuffix("weight") for name in _quantised(source.headers)}
        scales = {stem + leaf for stem in stems for leaf in (*_SCALES, *_INPUT_SCALES)}
        self.headers = {
            name: replace(header, dtype="bfloat16") if header.dtype == _E4M3 else header
            for name, header in source.headers.items()
            if name not in scales
        }


def _numbers(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers ``[N, K]`` float32 that codes stand for; scales have any form of these."""
    width = scales.shape[1] if scales.dim() == 2 else 1
    spread = _spread_over_rows(scales, len(codes), width)
    numbers = codes.float()
    if width == 1:
        return numbers.mul_(spread)
    for columns, scale in zip(numbers.split(_BLOCK, dim=1), spread.split(1, dim=1), strict=True):
        columns.mul_(scale)
    return numbers


class Fp8Checkpoint:
    """A checkpoint whose codes come as layers take them.

    Scales of one byte, powers of 2, come as float32. Codes that no layer multiplies by, or all
    codes, come as numbers, without their scales.

    Attributes:
        source: the checkpoint.
        headers: as :meth:`weights` gives the tensors.
        gguf: None, as of no GGUF file.
    """

    gguf = None

    def __init__(self, source: Any, unpacked: Mapping[str, str]) -> None:
        """``unpacked`` names the codes that become numbers, and the scales of each."""
        self.source = source
        self._unpacked = unpacked
        self._weights = {scale: name for name, scale in unpacked.items()}
        # Nothing quantises the activations of these.
        self._unused = {
            name.removesuffix("weight") + leaf for name in unpacked for leaf in _INPUT_SCALES
        }
        left_out = self._unused | self._weights.keys()
        wide = {_E8M0: "float32"}
        self.headers = {
            name: replace(
                header,
                dtype="float32" if name in unpacked else wide.get(header.dtype, header.dtype),
            )
            for name, header in source.headers.items()
            if name not in left_out
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, one after another."""
        return self.convert(self.source.weights())

    def convert(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same of the source's own tensors, wherever they were read to.

        Raises:
            ConfigError: scales of codes that become numbers cannot be used.
        """
        # Codes whose scales were not read yet, and scales whose codes were not.
        held: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if tensor.dtype == torch.float8_e8m0fnu:
                tensor = tensor.float()
            if name in self._unpacked or name in self._weights:
                if name in self._weights:
                    check_scale(name, tensor, "multiplied")
                weight = self._weights.get(name, name)
                scale = self._unpacked[weight]
                held[name] = tensor
                if weight in held and scale in held:
                    yield weight, _numbers(held.pop(weight), held.pop(scale).float())
            elif name in self._unused:
                check_scale(name, tensor, "divided")
            else:
                yield name, tensor


def _quantised(headers: Mapping[str, Any]) -> set[str]:
    return {name for name, header in headers.items() if header.dtype == _E4M3}


def _scale_of(name: str, headers: Mapping[str, Any]) -> str:
    """The name of the scales of codes that become numbers.

    Raises:
        ConfigError: there are none, or they or the codes have a shape that says nothing.
    """
    stem, shape = name.removesuffix("weight"), headers[name].shape
    if len(shape) != 2:
        raise unsupported(f"{name} is {_E4M3} of shape {list(shape)}, no matrix of a linear")
    scale = next((stem + leaf for leaf in _SCALES if stem + leaf in headers), None)
    if scale is None:
        raise unsupported(f"{name} is {_E4M3} but has no scale: there is no {stem}{_SCALES[0]}")
    given = torch.empty(headers[scale].shape, device="meta")
    try:
        _spread_over_rows(given, shape[0], -(-shape[1] // _BLOCK))
    except ShapeMismatchError as error:
        raise unsupported(f"{scale} {error}") from error
    return scale


def refuse_codes(headers: Mapping[str, Any], wanted: str) -> None:
    """Raise a :class:`ConfigError` for weights that are codes of another type than ``wanted``."""
    for name, header in headers.items():
        stem, _, leaf = name.rpartition(".")
        if leaf != "weight" or header.dtype == wanted or header.dtype in _NUMBERS:
            continue
        # Without scales they may be something of the model's own.
        scale = next((each for each in _SCALES if f"{stem}.{each}" in headers), None)
        if scale is not None or header.dtype.startswith("float8"):
            beside = "" if scale is None else f", and {stem}.{scale} says that it is codes"
            raise unsupported(f"{name} is of {header.dtype}, not {wanted}{beside}")


class Fp8CheckpointScheme(QuantizationScheme):
    """Takes the linears whose tensors are e4m3; a subclass reads the settings of a tool.

    Attributes:
        keys: of the settings that are known.
        quantizes_rows: whether activations are quantised, where that is faster.
    """

    quantizes_rows = True
    keys: ClassVar[tuple[str, ...]] = ()
    _on_cpu = False

    def __init__(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, settings)
        self._layouts: dict[int, Fp8Layout] = {}
        self._unscaled: str | None = None
        if settings is not None:
            refuse_settings(settings, self.keys)

    def check_device(self, device: torch.device) -> None:
        """Take note of the device; all will do."""
        self._on_cpu = device.type == "cpu"

    def check_checkpoint(self, checkpoint: Checkpoint, model: str) -> None:
        """The option alone quantises nothing."""
        if any(checkpoint.hf_config.get(key) for key in QUANTIZATION_KEYS):
            return
        raise OptionError(
            f"quantization {self.name!r} is for checkpoints that are quantised so, and {model} is "
            "not; leave it out, or take 'fp8', which quantises any checkpoint"
        )

    def plain(self, checkpoint: Any) -> Any:
        """Its headers as they would be without quantisation."""
        refuse_codes(checkpoint.headers, _E4M3)
        return _Plain(checkpoint)

    def numbers(self, checkpoint: Any) -> Any:
        """Its codes times their scales.

        Raises:
            ConfigError: some have none, or of a shape that says nothing.
        """
        headers = checkpoint.headers
        return Fp8Checkpoint(
            checkpoint, {name: _scale_of(name, headers) for name in sorted(_quantised(headers))}
        )

    def scales(self, headers: Mapping[str, Any]) -> Mapping[str, ScaleKind]:
        """Those of codes, and of activations that were calibrated."""
        stems = [name.removesuffix("weight") for name in _quantised(headers)]
        kinds: dict[str, ScaleKind] = dict.fromkeys(_SCALES, "multiplied")
        kinds |= dict.fromkeys(_INPUT_SCALES, "divided")
        return {
            stem + leaf: kind
            for stem in stems
            for leaf, kind in kinds.items()
            if stem + leaf in headers
        }

    def remarks(self, headers: Mapping[str, Any]) -> Iterator[str]:
        """Skip lists that name layers of codes; once matched, activations that lack their scales.

        Only then is it known which codes are those of linears.
        """
        names = sorted(name.removesuffix(".weight") for name in _quantised(headers))
        yield from wrongly_skipped(self.settings or {}, names)
        if self._unscaled is not None:
            yield self._unscaled

    def _unscaled_linears(
        self, fillers: Mapping[Linear, frozenset[str]], headers: Mapping[str, Any]
    ) -> str | None:
        """A line on linears that lack scales of activations, of those that quantise these."""
        stems = sorted(
            name.removesuffix("weight")
            for layer, names in fillers.items()
            if isinstance(layer.method, Fp8CheckpointMethod) and layer.method.quantizes_rows
            for name in names
        )
        lacking = [
            stem for stem in stems if not any(stem + leaf in headers for leaf in _INPUT_SCALES)
        ]
        if not lacking or not self._is_static:
            return None
        return (
            "activations are to have scales of their own, and there is no "
            f"{lacking[0]}{_INPUT_SCALES[0]} ({len(lacking)} of {len(stems)} linears); they are "
            "scaled as they come"
        )

    @property
    def _is_static(self) -> bool:
        """Whether the settings say that activations of all linears were calibrated."""
        return (self.settings or {}).get("activation_scheme") == "static"

    def prepare(self, model: nn.Module) -> None:
        """Leave the layers plain: the types of the tensors that fill them say who is taken."""

    def match(self, model: nn.Module, checkpoint: Checkpoint, account: LoadAccount) -> Any:
        """Give each linear whose tensors are e4m3 its method; other codes become numbers.

        Raises:
            ConfigError: scales are missing, or only some parts of a merged linear are quantised.
        """
        headers = checkpoint.headers
        quantised = _quantised(headers)
        if not quantised and self.takes_weights:
            raise unsupported(f"no tensor of the checkpoint is {_E4M3}")
        self._layouts = {}
        fillers: dict[Linear, frozenset[str]] = {}
        numbers: set[str] = set()
        leaves = Counter(name.rpartition(".")[2] for name in headers)
        for name, layer in model.named_modules():
            if not isinstance(layer, Linear):
                continue
            sources = account.sources(layer.weight)
            if not layer.takes_codes:
                numbers |= sources
            elif sources & quantised:
                layout = self._layout(name, sources, quantised, headers, leaves)
                self._layouts[id(layer)] = layout
                fillers[layer] = sources
        taken = {name for layer in self.give_methods(model) for name in fillers[layer]}
        self._unscaled = self._unscaled_linears(fillers, headers)
        if self._unscaled is not None:
            self.warn(self._unscaled)
        unpacked = self._left(quantised - taken, numbers, account, headers)
        if unpacked or any(header.dtype == _E8M0 for header in headers.values()):
            return Fp8Checkpoint(checkpoint, unpacked)
        return checkpoint

    def _left(
        self,
        codes: set[str],
        numbers: set[str],
        account: LoadAccount,
        headers: Mapping[str, Any],
    ) -> dict[str, str]:
        """Codes of no linear with a method that are to become numbers, and the scales of each.

        They are those of the vocabulary, of modules of torch, of linears that share a weight, and
        of such as take ``numbers`` alone.
        """
        # What fills nothing is not wanted, but for what is compared with what fills something.
        wanted = account.fills().keys() | {second for _, second in account.uncompared}
        left = sorted(codes & wanted)
        unpacked = {name: _scale_of(name, headers) for name in left}
        if left:
            why = "it takes numbers alone" if left[0] in numbers else "it is no linear of a layer"
            self.warn(
                f"{len(left)} of {len(_quantised(headers))} weights of codes are turned into "
                f"numbers, such as {left[0].removesuffix('.weight')}: {why}"
            )
        return unpacked

    @property
    def takes_weights(self) -> bool:
        """Whether the config quantises linears, and not keys and values alone."""
        settings = self.settings or {}
        return settings.get("config_groups") != {} or not settings.get("kv_cache_scheme")

    def match_dummy(self) -> None:
        """Refuse, as without tensors nothing says which linears are quantised."""
        if self.settings is not None and self.takes_weights:
            raise OptionError(
                "load_format 'dummy' has no tensors that say which layers are quantised; take "
                "quantization_config out of config.json, and set quantization='fp8' for e4m3"
            )

    def _layout(
        self, name: str, sources: frozenset[str], quantised: set[str], headers: Mapping[str, Any],
        leaves: Mapping[str, int],
    ) -> Fp8Layout:  # fmt: skip
        plain = sorted(source for source in sources - quantised if not self._skips(source))
        if plain:
            raise unsupported(
                f"{name} is merged of tensors of which some are quantised "
                f"({min(sources & quantised)}) and some are not ({plain[0]}), though no skip list "
                "names these"
            )
        mixed, sources = not sources <= quantised, sources & quantised
        found: dict[str, list[Any]] = {leaf: [] for leaf in (*_SCALES, *_INPUT_SCALES)}
        for source in sources:
            stem = source.removesuffix("weight")
            for leaf, held in found.items():
                held += [headers[stem + leaf]] if stem + leaf in headers else []
        # Of two parts with scales of different names the checkpoint's other layers say who is odd.
        scale = max(_SCALES, key=lambda leaf: (len(found[leaf]), leaves[leaf]))
        missing = [s for s in sorted(sources) if s.removesuffix("weight") + scale not in headers]
        if missing:
            stem = missing[0].removesuffix("weight")
            named = [leaf for leaf in _SCALES if stem + leaf in headers]
            beside = f", but a {named[0]}, as no part beside it has" if named else ""
            raise unsupported(
                f"{missing[0]} is {_E4M3} but has no scale: there is no {stem}{scale}{beside}"
            )
        # A single column of blocks has a scale of each row, too.
        blocks = any(len(held.shape) == 2 and held.shape[1] > 1 for held in found[scale])
        static = [leaf for leaf in _INPUT_SCALES if found[leaf]]
        if mixed and static:
            raise unsupported(f"{name} has parts that are not quantised, and {static[0]} of others")
        given = static[0] if static else None
        return Fp8Layout(scale, blocks, given, self.quantizes_rows, mixed)

    def _skips(self, tensor: str) -> bool:
        """Whether a skip list of the config names the layer of a tensor, or a module around it."""
        return names_layer(self.settings or {}, tensor.removesuffix(".weight"))

    def linear_method(self, name: str, layer: Linear) -> LinearMethod | None:
        """Codes and scales, for a linear that has them."""
        layout = self._layouts.get(id(layer))
        if layout is None:
            return None
        return Fp8PartsMethod(layout) if layout.mixed else Fp8CheckpointMethod(layout, self._on_cpu)


def refuse_settings(settings: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise a :class:`ConfigError` for settings that are not known, or not supported by any."""
    for key in _SKIP_LISTS:
        names = settings.get(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise unsupported(f"{key} is {names!r}, no list of names")
        for name in names:
            check_pattern(key, name)
    # What is unknown changes nothing as long as it says nothing.
    said = {
        key
        for key, value in settings.items()
        if not (value is None or value is False or value in ({}, []))
    }
    unknown = sorted(said - set(keys))
    if unknown:
        raise unsupported(f"{unknown[0]} is {settings[unknown[0]]!r}, which is not known")
    for key in ("sparsity_config", "transform_config"):
        value = settings.get(key)
        # A dense one's other keys say how it came to be.
        dense = isinstance(value, dict) and value.get("format") == "dense"
        if value and not dense and value != {"config_groups": {}}:
            raise unsupported(f"{key} is {value!r}")


def check_values(where: str, given: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise a :class:`ConfigError` if settings are not of the values that are wanted of each."""
    for key, values in wanted.items():
        check_value(f"{where}.{key}", given.get(key), values)


def check_value(where: str, given: Any, known: tuple[Any, ...]) -> None:
    """Raise a :class:`ConfigError` if a setting is none of the known values."""
    if not any(type(given) is type(value) and given == value for value in known):
        shown = " or ".join(repr(value) for value in known if value is not None)
        raise unsupported(f"{where} is {given!r}, not {shown}")


def check_pattern(where: str, name: str) -> None:
    """Raise a :class:`ConfigError` for a regular expression that is none."""
    try:
        re.compile(name.removeprefix("re:"))
    except (re.error, OverflowError, RecursionError) as error:
        if name.startswith("re:"):
            raise unsupported(f"{where} has {name!r}, no regular expression ({error})") from error


def skip_lists(settings: Mapping[str, Any]) -> dict[str, list[str]]:
    """The skip lists among settings, and what GPTQModel's rules skip ("-:") as expressions."""
    rules = settings.get("dynamic")
    skips = [rule[2:] for rule in rules or () if rule.startswith("-:")]
    # GPTQModel matches them from the name's beginning, as expressions are here.
    dynamic = {"dynamic": [f"re:{rule}" for rule in skips]}
    return {key: settings.get(key) or [] for key in _SKIP_LISTS} | dynamic


def names_layer(settings: Mapping[str, Any], name: str) -> bool:
    """Whether a skip list among the settings names a layer, or a module around it."""
    for skipped in (each for names in skip_lists(settings).values() for each in names):
        if skipped.startswith("re:") and re.match(skipped[3:], name):
            return True
        if f".{skipped}." in f".{name}.":
            return True
    return False


def wrongly_skipped(settings: Mapping[str, Any], coded: Sequence[str]) -> Iterator[str]:
    """A line for each skip list that names layers of codes: the tensors say what they are."""
    for key, entries in skip_lists(settings).items():
        patterns = [re.compile(each[3:]) for each in entries if each.startswith("re:")]
        literal = {each for each in entries if not each.startswith("re:")}
        # Of thousands of layers and of names not every pair is compared.
        named = [
            name
            for name in coded
            if not literal.isdisjoint(_places(name)) or any(p.match(name) for p in patterns)
        ]
        if named:
            more = f" and {len(named) - 1} more" if len(named) > 1 else ""
            yield f"{key} names {named[0]}{more}, stored as codes all the same; codes are read"


def _places(name: str) -> Iterator[str]:
    """The names of a layer, in part or whole, by which a skip list may call it."""
    parts = name.split(".")
    for start in range(len(parts)):
        for end in range(start + 1, len(parts) + 1):
            yield ".".join(parts[start:end])


def unsupported(what: str) -> ConfigError:
    """The error for a checkpoint that is quantised in a way that cannot be read."""
    return ConfigError(
        f"the weights are quantised in a way that cannot be read: {what}; take another "
        "checkpoint of the model",
        code=ErrorCode.QUANTIZATION,
    )


class CompressedTensorsScheme(Fp8CheckpointScheme):
    """The format float-quantized of compressed-tensors, of 8 bits."""

    keys = (
        *("config_groups", "dequantize", "format", "global_compression_ratio", "ignore"),
        *("kv_cache_scheme", "quant_method", "quantization_status", "run_compressed"),
        *("sparsity_config", "transform_config", "use_optimized_inference", "version"),
    )

    def __init__(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, settings)
        groups = (settings or {}).get("config_groups")
        if settings is None:
            return
        if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
            raise unsupported(f"config_groups is {groups!r}, no object of groups")
        for group, given in groups.items():
            weights, inputs = given.get("weights"), given.get("input_activations")
            of_weights = ("tensor", "channel", "block")
            _check_numbers(f"config_groups.{group}.weights", weights, of_weights)
            if inputs is None:
                self.quantizes_rows = False
            else:
                _check_inputs(f"config_groups.{group}.input_activations", inputs, weights)
            if given.get("output_activations") is not None:
                raise unsupported(f"config_groups.{group} quantises output_activations")

    @property
    def _is_static(self) -> bool:
        groups = (self.settings or {}).get("config_groups") or {}
        inputs = [given.get("input_activations") or {} for given in groups.values()]
        # Of several groups it would have to be known which one names this linear.
        return bool(inputs) and all(given.get("dynamic") is False for given in inputs)

    @classmethod
    def condition(cls, settings: Mapping[str, Any]) -> bool:
        """By the method's name; integers have a scheme of their own."""
        groups = settings.get("config_groups")
        weights = [
            group.get("weights") if isinstance(group, dict) else None
            for group in (groups.values() if isinstance(groups, dict) else ())
        ]
        kinds = {each.get("type") if isinstance(each, dict) else None for each in weights}
        return settings.get("quant_method") == "compressed-tensors" and kinds != {"int"}


def _check_numbers(where: str, given: Any, strategies: tuple[str, ...]) -> None:
    """Refuse what are not symmetric 8-bit floats."""
    if not isinstance(given, dict):
        raise unsupported(f"{where} is {given!r}, no object")
    wanted: dict[str, tuple[Any, ...]] = {
        "type": ("float",),
        "num_bits": (8,),
        "symmetric": (True, None),
        "strategy": strategies,
        "block_structure": (None, [_BLOCK, _BLOCK]),
        "group_size": (None, _BLOCK),
    }
    check_values(where, given, wanted)


def _check_inputs(where: str, given: Any, weights: Mapping[str, Any]) -> None:
    """Refuse activations that are quantised in another way than here, which has other results."""
    # Beside blocks they keep their 16 bits; else a row has one scale, or all rows have.
    groups = ("group",) if weights["strategy"] == "block" else ()
    _check_numbers(where, given, ("tensor", "token", *groups))
    static = (False,) if given["strategy"] == "tensor" else ()
    check_value(f"{where}.dynamic", given.get("dynamic"), (True, None, *static))
