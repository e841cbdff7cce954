"""Integer codes as compressed-tensors has them, of files that ``engine-core export`` wrote.

Of 4 bits (its pack-quantized) a linear has ``weight_packed``, eight codes in an int32, a
``weight_scale`` for each group of 32, a ``weight_zero_point``, eight rows in an int32, and
``weight_shape``. A number is ``(code - zero point) * scale``. Of 8 bits (its int-quantized) it has
a ``weight`` of int8 and a ``weight_scale`` for each row; so may the vocabulary.

Weights that had 4 bits before, as those of a Q4_1 file, are on grids whose zero is no code. They
have a ``weight_zero`` in bfloat16 in place of the zero point, which compressed-tensors does not
know: a number is ``(code - 8) * scale + zero``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine_core.errors import OptionError
from engine_core.nn.embedding import VocabularyMethod, VocabularySplit
from engine_core.nn.linear import Linear, LinearMethod, UnquantizedLinearMethod
from engine_core.nn.loading import set_weight_loader
from engine_core.nn.packing import MatrixModule, OneDNNMatrix, onednn_packs
from engine_core.nn.quantization.fp8_checkpoint import unsupported
from engine_core.nn.quantization.int4 import GROUP_SIZE, Int4Matrix, quantize_int4
from engine_core.nn.quantization.int8 import Int8Matrix
from engine_core.nn.quantization.scheme import QuantizationScheme

if TYPE_CHECKING:
    from engine_core.checkpoint import Checkpoint
    from engine_core.nn.loading import LoadAccount

# Codes of 4 bits in an int32.
_CODES = 8
# Numbers that are quantised at once, so that temporaries stay small.
_CHUNK = 2**20
PARTS = {
    "int4": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape"),
    "int4-zeros": ("weight_packed", "weight_scale", "weight_zero", "weight_shape"),
    "int8": ("weight", "weight_scale"),
    "fp8": ("weight", "weight_scale"),
}
"""The last part of the names of a linear's tensors, by form; the first is that of the codes."""


def pack_int4(codes: Tensor) -> Tensor:
    """``[N, K]`` uint8 below 16 to ``[N, K / 8]`` int32; the first is in the lowest bits."""
    halves = codes.unflatten(1, (-1, 2))
    packed: Tensor = halves[..., 0] | halves[..., 1] << 4
    return packed.contiguous().view(torch.int32)


def unpack_int4(packed: Tensor) -> Tensor:
    """``[N, K / 8]`` int32 to ``[N, K]`` uint8; undoes :func:`pack_int4`."""
    halves = packed.view(torch.uint8)
    return torch.stack((halves & 15, halves >> 4), dim=-1).flatten(1)


def pack_rows(codes: Tensor) -> Tensor:
    """``[N, G]`` uint8 below 16 to ``[N / 8, G]`` int32, as zero points are packed."""
    return pack_int4(codes.T.contiguous()).T.contiguous()


def unpack_rows(packed: Tensor) -> Tensor:
    """``[N / 8, G]`` int32 to ``[N, G]`` uint8; undoes :func:`pack_rows`."""
    return unpack_int4(packed.T.contiguous()).T.contiguous()


def quantize_with_zero_points(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[N, K]`` uint8, scales ``[N, K / 32]`` bfloat16 and zero points uint8 of a weight.

    A zero point is one of the codes, so that zero is exact. Of some scales around the one at which
    the codes reach from a group's least to its greatest number, each refined by least squares, that
    with the smallest squared error is taken.
    """
    groups = weight.float().unflatten(1, (-1, GROUP_SIZE))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    low, high = low.clamp(max=0), high.clamp(min=0)
    best = [torch.full_like(low, torch.inf), low, low, groups]
    for share in (1.0, 0.93, 0.86):
        scales = (high - low) * share / 15
        for _ in range(2):
            scales = torch.where(scales == 0, 1, scales).to(torch.bfloat16).float()
            zeros = (-low * share / scales).round_().clamp_(0, 15)
            apart = (groups / scales + zeros).round_().clamp_(0, 15).sub_(zeros)
            error = (apart * scales - groups).square_().sum(dim=-1, keepdim=True)
            found = (error, scales, zeros, apart)
            better = error < best[0]
            best = [torch.where(better, new, old) for new, old in zip(found, best, strict=True)]
            squares = apart.square().sum(dim=-1, keepdim=True)
            fitted = (apart * groups).sum(dim=-1, keepdim=True) / squares
            scales = torch.where(squares > 0, fitted, scales).abs()
    _, scales, zeros, apart = best
    codes = (apart + zeros).to(torch.uint8).flatten(1)
    return codes, scales.squeeze(-1).to(torch.bfloat16), zeros.squeeze(-1).to(torch.uint8)


def pack_form(form: str, weight: Tensor) -> dict[str, Tensor]:
    """The tensors that stand for ``weight [N, K]`` in a form, by the last part of their names.

    K is a multiple of 32 and N, with 4 bits, of 8.
    """
    if form == "int8":
        matrix = Int8Matrix(weight)
        return {"weight": matrix.codes, "weight_scale": matrix.scales.unsqueeze(1)}
    kinds: list[list[Tensor]] = [[], [], []]
    quantize = quantize_with_zero_points if form == "int4" else quantize_int4
    for rows in weight.split(max(_CHUNK // weight.shape[1] // _CODES, 1) * _CODES):
        for kind, made in zip(kinds, quantize(rows), strict=True):
            kind.append(made)
    codes, scales, zeros = map(torch.cat, kinds)
    zeros = pack_rows(zeros) if form == "int4" else zeros
    values = (pack_int4(codes), scales, zeros, torch.tensor(weight.shape))
    return dict(zip(PARTS[form], values, strict=True))


def form_shapes(form: str, rows: int, columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of what :func:`pack_form` makes."""
    if form == "int8":
        return {"weight": ("int8", (rows, columns)), "weight_scale": ("bfloat16", (rows, 1))}
    groups = columns // GROUP_SIZE
    scales = ("bfloat16", (rows, groups))
    zeros = ("int32", (rows // _CODES, groups)) if form == "int4" else scales
    values = (("int32", (rows, columns // _CODES)), scales, zeros, ("int64", (2,)))
    return dict(zip(PARTS[form], values, strict=True))


def unpack_form(form: str, parts: Mapping[str, Tensor]) -> Tensor:
    """The numbers ``[N, K]`` float32 that the tensors of a form stand for."""
    scales = parts["weight_scale"].float()
    if form not in ("int4", "int4-zeros"):
        return torch.mul(parts["weight"].float(), scales)
    codes = unpack_int4(parts["weight_packed"]).unflatten(1, (-1, GROUP_SIZE)).float()
    if form == "int4":
        codes -= unpack_rows(parts["weight_zero_point"]).unsqueeze(-1)
        numbers: Tensor = codes.mul_(scales.unsqueeze(-1))
    else:
        zeros = parts["weight_zero"].float().unsqueeze(-1)
        numbers = codes.sub_(8).mul_(scales.unsqueeze(-1)).add_(zeros)
    return numbers.flatten(1)


class PackedInt4Method(UnquantizedLinearMethod):
    """Codes of 4 bits for torch's kernel; numbers where a rank's part has no shape for it."""

    def __init__(self, form: str) -> None:
        self._form = form
        self._names = PARTS[form]

    def create_weights(
        self,
        layer: Linear,
        in_features: int,
        out_features: int,
        dtype: torch.dtype | None,
        device: torch.device | None,
    ) -> None:
        """Make the parameters of the form."""
        groups: dict[str, Any] = {"input_dim": 1, "group_size": GROUP_SIZE}
        given: dict[str, dict[str, Any]] = {
            "weight_packed": {"input_dim": 1, "packed_dim": 1, "pack_factor": _CODES},
            "weight_scale": groups,
            "weight_zero_point": {**groups, "packed_dim": 0, "pack_factor": _CODES},
            "weight_zero": groups,
            "weight_shape": {"output_dim": None},
        }
        for name, (kind, shape) in form_shapes(self._form, out_features, in_features).items():
            size = (layer.num_parts, 2) if name == "weight_shape" else shape
            data = torch.empty(size, dtype=getattr(torch, kind), device=device)
            layer.add_parameter(name, data, **given[name])

    def packed_sizes(self, layer: MatrixModule) -> Mapping[str, int]:
        """Codes and scales, or numbers, in the place of all parameters."""
        shape = _shape(layer)
        fits = Int4Matrix.fits(shape)
        size = Int4Matrix.size(shape) if fits else shape.numel() * layer.dtype.itemsize
        return dict.fromkeys(self._names, 0) | {"weight_packed": size}

    def process_after_load(self, layer: Linear) -> None:
        """Order the codes for torch's kernel."""
        parts = {name: layer.get_parameter(name).data for name in self._names}
        if not Int4Matrix.fits(_shape(layer)):
            _set_numbers(layer, unpack_form(self._form, parts), self._names)
            return
        scales, zeros = parts["weight_scale"], parts.get("weight_zero")
        if zeros is None:
            zeros = (8 - unpack_rows(parts["weight_zero_point"]).to(torch.bfloat16)) * scales
        pairs = parts["weight_packed"].view(torch.uint8)
        matrix = Int4Matrix.of_pairs(pairs, scales, zeros, layer.dtype)
        layer.set_packed(matrix, *self._names)


class PackedInt8Method(UnquantizedLinearMethod):
    """Codes of 8 bits for torch's kernel; numbers where a rank's part has no shape for it."""

    def create_weights(
        self,
        layer: Linear,
        in_features: int,
        out_features: int,
        dtype: torch.dtype | None,
        device: torch.device | None,
    ) -> None:
        """Make the codes ``weight [out, in]`` and the scales ``[out, 1]``."""
        codes = torch.empty(out_features, in_features, dtype=torch.int8, device=device)
        layer.add_parameter("weight", codes, input_dim=1)
        scales = torch.empty(out_features, 1, dtype=torch.bfloat16, device=device)
        layer.add_parameter("weight_scale", scales)

    def packed_sizes(self, layer: MatrixModule) -> Mapping[str, int]:
        """Codes and scales, or numbers."""
        shape = layer.get_parameter("weight").shape
        if Int8Matrix.fits(shape):
            return {}
        return {"weight": shape.numel() * layer.dtype.itemsize, "weight_scale": 0}

    def process_after_load(self, layer: Linear) -> None:
        """Keep the codes as they are."""
        codes, scales = (layer.get_parameter(name).data for name in PARTS["int8"])
        if Int8Matrix.fits(codes.shape):
            matrix = Int8Matrix.of(codes, scales.squeeze(1), layer.dtype)
            layer.set_packed(matrix, *PARTS["int8"])
        else:
            _set_numbers(layer, codes * scales.float(), PARTS["int8"])


def _shape(layer: MatrixModule) -> torch.Size:
    rows, columns = layer.get_parameter("weight_packed").shape
    return torch.Size((rows, columns * _CODES))


def _set_numbers(layer: Linear, numbers: Tensor, names: tuple[str, ...]) -> None:
    numbers = numbers.to(layer.dtype)
    if onednn_packs(numbers):
        layer.set_packed(OneDNNMatrix(numbers), *names)
        return
    for name in names:
        delattr(layer, name)
    layer.weight = nn.Parameter(numbers, requires_grad=False)


class PackedVocabularyMethod(VocabularyMethod):
    """A vocabulary's matrix of 8-bit codes, which embedding and head may share."""

    def __init__(self, layers: list[VocabularySplit]) -> None:
        """Give each layer on meta parameters for codes and scales."""
        self._layers = layers
        shape = layers[0].weight.shape
        weight = torch.empty(shape, dtype=torch.int8, device="meta")
        scale = torch.empty(shape[0], 1, dtype=torch.bfloat16, device="meta")
        for name, data in (("weight", weight), ("weight_scale", scale)):
            param = nn.Parameter(data, requires_grad=False)
            set_weight_loader(param, layers[0]._load)
            for layer in layers:
                layer.register_parameter(name, param)

    def pack(self, weight: Tensor) -> Int8Matrix:
        """Codes and scales."""
        scales = self._layers[0].get_parameter("weight_scale").data
        for layer in self._layers:
            del layer._parameters["weight_scale"]
        return Int8Matrix.of(weight.data, scales.squeeze(1), self._layers[0].dtype)

    def packed_sizes(self, layer: MatrixModule) -> Mapping[str, int]:
        """As they are."""
        return {}


def find_codes(headers: Mapping[str, Any]) -> dict[str, str]:
    """The form of each matrix that is codes, by its name without ``weight``.

    Raises:
        ConfigError: it lacks one of its tensors, or is no matrix.
    """
    found = {}
    for name, header in headers.items():
        stem, _, leaf = name.rpartition(".")
        if leaf == "weight_packed":
            found[stem] = "int4-zeros" if f"{stem}.weight_zero" in headers else "int4"
        elif leaf == "weight" and header.dtype in ("int8", "float8_e4m3fn"):
            found[stem] = "int8" if header.dtype == "int8" else "fp8"
    for stem, form in found.items():
        names = [f"{stem}.{part}" for part in PARTS[form]]
        for name in names:
            if name not in headers:
                raise unsupported(f"{names[0]} is there, and no {name}")
        if len(headers[names[0]].shape) != 2:
            raise unsupported(f"{names[0]} is no matrix")
    return found


class _Headers:
    """A file's headers as plain layers would have them: numbers, and no scales."""

    def __init__(self, headers: Mapping[str, Any], forms: Mapping[str, str]) -> None:
        parts = {f"{stem}.{part}" for stem, form in forms.items() for part in PARTS[form]}
        self.headers = {name: header for name, header in headers.items() if name not in parts}
        for stem, form in forms.items():
            header = headers[f"{stem}.{PARTS[form][0]}"]
            rows, columns = header.shape
            shape = (rows, columns * (_CODES if form.startswith("int4") else 1))
            name = f"{stem}.weight"
            self.headers[name] = replace(header, name=name, dtype="bfloat16", shape=shape)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """None: only headers are asked for."""
        return iter(())


class ExportedScheme(QuantizationScheme):
    """Takes the linears, and the vocabulary, whose tensors are codes."""

    def __init__(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, settings)
        self._methods: dict[int, LinearMethod] = {}

    @classmethod
    def condition(cls, settings: Mapping[str, Any]) -> bool:
        """By the method's name, which an exported file gets when it is opened."""
        return settings.get("quant_method") == "engine-core"

    def check_device(self, device: torch.device) -> None:
        """Refuse what is no CPU."""
        if device.type != "cpu":
            raise OptionError(
                f"the file's codes are multiplied by kernels for CPUs and cannot run on {device}; "
                "set device='cpu', or export the model with 'fp8' or unquantised"
            )

    def check_checkpoint(self, checkpoint: Checkpoint, model: str) -> None:
        """The option alone quantises nothing."""
        raise OptionError(
            f"quantization {self.name!r} is what 'engine-core export' writes, and {model} is no "
            "such file; leave it out, or take 'int8' or 'int4', which quantise any checkpoint"
        )

    def match_dummy(self) -> None:
        """Refuse, as without tensors nothing says which layers are quantised."""
        raise OptionError("load_format 'dummy' has no tensors that say which layers are quantised")

    def plain(self, checkpoint: Any) -> Any:
        """Its headers as they would be without quantisation."""
        return _Headers(checkpoint.headers, find_codes(checkpoint.headers))

    def prepare(self, model: nn.Module) -> None:
        """Leave the layers plain: the tensors that fill them say who is taken."""

    def match(self, model: nn.Module, checkpoint: Checkpoint, account: LoadAccount) -> Checkpoint:
        """Give each layer whose tensors are codes its method.

        Raises:
            ConfigError: only some parts of a merged linear are codes, or of different bits.
        """
        forms = find_codes(checkpoint.headers)
        vocabularies: dict[int, list[VocabularySplit]] = {}
        for name, layer in model.named_modules():
            if not isinstance(layer, Linear | VocabularySplit):
                continue
            sources = account.sources(layer.weight)
            kinds = {forms.get(source.removesuffix(".weight")) for source in sources} or {None}
            form, *others = kinds
            if others:
                raise unsupported(f"{name} is made of {', '.join(sorted(sources))}, of which only "
                                  "some are quantised, or each in another way")  # fmt: skip
            if form is None:
                continue
            if isinstance(layer, VocabularySplit):
                vocabularies.setdefault(id(layer.weight), []).append(layer)
            else:
                eight = form == "int8"
                self._methods[id(layer)] = PackedInt8Method() if eight else PackedInt4Method(form)
        self.give_methods(model)
        for layers in vocabularies.values():
            method = PackedVocabularyMethod(layers)
            for layer in layers:
                layer.method = method
        return checkpoint

    def linear_method(self, name: str, layer: Linear) -> LinearMethod | None:
        """Codes, for a linear that has them."""
        return self._methods.get(id(layer))
