"""Checkpoints of integers with scales of groups: AWQ, GPTQ and compressed-tensors.

Each tool packs codes, scales and zero points in its own way. :class:`PackedCheckpoint` brings them
into one form as they are read, the tensors of :class:`GroupLinearMethod`, or into numbers where no
kernel takes them: merged linears whose parts differ, modules of torch, and but for 8 bits on a CPU
the vocabulary. Before that the model is matched with headers as plain layers have them, which says
what is what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from engine_core.errors import ConfigError, OptionError
from engine_core.kernels.linear.groups import MIDDLE, pack_codes, unpack_codes
from engine_core.nn.embedding import LMHead, VocabularySplit
from engine_core.nn.linear import Linear, LinearMethod
from engine_core.nn.quantization.auto_round import WHOLE_ACTIVATIONS, as_layout, method_of
from engine_core.nn.quantization.fp8_checkpoint import (
    check_pattern,
    check_value,
    check_values,
    names_layer,
    refuse_codes,
    refuse_settings,
    unsupported,
    wrongly_skipped,
)
from engine_core.nn.quantization.groups import (
    GroupLayout,
    GroupLinearMethod,
    Int8VocabularyMethod,
)
from engine_core.nn.quantization.scale_values import check_scale
from engine_core.nn.quantization.scheme import QUANTIZATION_KEYS, QuantizationScheme, ScaleKind

if TYPE_CHECKING:
    from engine_core.checkpoint import Checkpoint
    from engine_core.nn.loading import LoadAccount

_FLOATS = ("float16", "bfloat16", "float32")
_ROWS = 1024
_SCALE_KINDS: dict[str, ScaleKind] = {"scales": "multiplied", "zeros": "added"}
# How codes were found, in what memory, and by which kernels they ran, as GPTQModel's
# quantization/config.py, transformers and AutoRound have it: nothing of what the tensors mean.
_OF_CALIBRATION = (
    *("act_group_aware", "auto_forward_data_parallel", "autoround_version", "backend"),
    "batch_size",
    *("block_name_to_quantize", "cache_block_outputs", "calibrationless"),
    *("damp_auto_increment", "damp_percent", "dataset", "dense_vram_strategy", "dynamic"),
    *("dense_vram_strategy_devices", "device", "disable_exllama", "exllama_config"),
    *("failsafe", "fallback", "foem", "gc_mode", "gptaq", "hessian", "hyb_act"),
    *("max_input_length", "meta", "mock_quantization", "model_file_base_name"),
    *("model_name_or_path", "model_seqlen", "modules_in_block_to_quantize"),
    *("module_name_preceding_first_block", "modules_to_not_convert", "moe"),
    *("moe_vram_strategy", "moe_vram_strategy_devices", "mse", "offload_to_disk"),
    *("offload_to_disk_path", "pack_impl", "pad_token_id", "tokenizer"),
    *("true_sequential", "uri", "use_cuda_fp16", "use_exllama", "vram_strategy"),
    "wait_for_submodule_finalizers",
    # AutoRound's, which it leaves in its exports for AutoGPTQ and AutoAWQ, too.
    *("act_data_type", "act_dynamic", "act_group_size", "act_sym", "amp"),
    *("enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input"),
    *("gradient_accumulate_steps", "iters", "low_gpu_mem_usage", "lr", "minmax_lr", "nsamples"),
    *("provider", "quant_block_list", "scale_dtype", "seqlen", "static_attention_granularity"),
    *("static_kv_granularity", "supported_types", "to_quant_block_names"),
)
# Of AWQ and GPTQ alike.
_OF_BOTH: dict[str, tuple[Any, ...]] = {
    "act_bits": WHOLE_ACTIVATIONS,
    # A LoRA that is added to the products.
    "adapter": (None, {}),
    "data_type": ("int", None),
    "desc_act": (True, False, None),
    "group_size": (),
    "lm_head": (True, False, None),
    "pack_dtype": ("int32", None),
    "rotation": (None, False, ""),
    "static_groups": (True, False, None),
    "sym": (True, False, None),
}
# AWQ's places of neighbouring columns in an int32.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True, slots=True)
class _Header:
    dtype: str
    shape: tuple[int, ...]
    nbytes: int = 0


@dataclass(slots=True)
class Integers:
    """A checkpoint's linear of integers.

    Attributes:
        name: of the layer, without the leaf.
        leaves: its tensors' last names, and what each holds: codes, scales, zeros, groups, shape;
            others are passed over.
        shape: ``(N, K)``.
        layout: the form that they are brought into.
        order: the group of each input, if the checkpoint names other groups than neighbours.
        even: whether these groups are of equal size.
        unfilled: what all inputs have for a group, if nobody filled that in.
        held: tensors that were read, until all of them were.
        zero_forms: the shape that zero points have, by the types that they may be of.
    """

    name: str
    leaves: dict[str, str]
    shape: tuple[int, int]
    layout: GroupLayout
    order: Tensor | None = None
    even: bool = True
    unfilled: int | None = None
    held: dict[str, Tensor] = field(default_factory=dict)
    zero_forms: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def groups(self) -> int:
        """Scales of a row."""
        size = self.layout.group_size
        return -(-self.shape[1] // size) if size else 1

    def input_groups(self, device: torch.device) -> Tensor:
        """The group ``[K]`` of each input, int64."""
        if self.order is not None:
            return self.order.to(device).long()
        k = self.shape[1]
        return torch.arange(k, device=device) // (self.layout.group_size or k)

    def headers(self, kept: bool) -> Iterator[tuple[str, _Header]]:
        """Those of the tensors that it becomes."""
        (n, k), layout = self.shape, self.layout
        if not kept:
            yield f"{self.name}.weight", _Header("float32", (n, k))
            return
        yield f"{self.name}.weight", _Header("uint8", (n, k * layout.bits // 8))
        scale_dtype = str(layout.scale_dtype).removeprefix("torch.")
        yield f"{self.name}.weight_scale", _Header(scale_dtype, (n, self.groups))
        if layout.zeros is not None:
            zeros = str(layout.zeros).removeprefix("torch.")
            yield f"{self.name}.weight_zero_point", _Header(zeros, (n, self.groups))
        if layout.ordered:
            yield f"{self.name}.weight_g_idx", _Header("int32", (k,))


def _check_rules(settings: Mapping[str, Any]) -> None:
    """Refuse rules by names (GPTQModel's ``dynamic``) but such as skip layers or change nothing."""
    rules = settings.get("dynamic") or {}
    if not isinstance(rules, dict):
        raise unsupported(f"dynamic is {rules!r}, no object of rules")
    for rule, given in rules.items():
        check_pattern("dynamic", f"re:{rule.removeprefix('-:').removeprefix('+:')}")
        if rule.startswith("-:"):
            continue
        if not isinstance(given, dict):
            raise unsupported(f"dynamic has {given!r} for {rule!r}, no object of settings")
        # AutoRound has a rule for a head with codes, which says once more what these are.
        for key, value in given.items():
            if key not in _OF_CALIBRATION and settings.get(key) != value:
                raise unsupported(
                    f"dynamic has {key} {value!r} for {rule!r}, and all others have "
                    f"{settings.get(key)!r}: layers that differ so are not known"
                )


# Zero points of codes that the settings call symmetric.
_UNSAID_ZEROS = "unsaid zeros"
_Take = Callable[[str, Tensor, Integers], None]


def _expand(packed: Tensor, bits: int) -> Tensor:
    """int32 ``[rows, n]`` as uint8 ``[rows, n * 32 / bits]``, the lowest bits first."""
    return unpack_codes(packed.contiguous().view(torch.uint8), bits)


class PackedCheckpoint:
    """A checkpoint whose integers come in one form, or as numbers.

    Attributes:
        headers: as :meth:`weights` gives the tensors.
        gguf: None, as of no GGUF file.
        spare: tensors that say nothing, which the model may have no place for.
    """

    gguf = None

    def __init__(
        self, source: Any, linears: Mapping[str, Integers], read: Any, kept: frozenset[str],
        spare: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """``read`` makes codes, scales and zeros of held tensors; ``kept`` stay integers."""
        self.source, self.spare = source, spare
        self._linears, self._read, self._kept = linears, read, kept
        self._leaves = {
            f"{linear.name}.{leaf}": (linear, kind)
            for linear in linears.values()
            for leaf, kind in linear.leaves.items()
        }
        self.headers: dict[str, Any] = {
            name: header for name, header in source.headers.items() if name not in self._leaves
        }
        for linear in linears.values():
            self.headers |= linear.headers(linear.name in kept)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, one after another."""
        return self.convert(self.source.weights())

    def convert(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same of the source's own tensors, wherever they were read to."""
        for name, tensor in tensors:
            if name not in self._leaves:
                yield name, tensor
                continue
            linear, kind = self._leaves[name]
            if kind in _SCALE_KINDS and tensor.is_floating_point():
                check_scale(name, tensor, _SCALE_KINDS[kind])
            linear.held[kind or name] = tensor
            if len(linear.held) == len(linear.leaves):
                held, linear.held = linear.held, {}
                yield from self._converted(linear, held)

    def _converted(self, linear: Integers, held: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        packed, scales, zeros = self._read(linear, held)
        if linear.name not in self._kept:
            group = linear.input_groups(packed.device)
            yield (
                f"{linear.name}.weight",
                unpack_numbers(packed, linear.layout.bits, group, scales, zeros),
            )
            return
        yield f"{linear.name}.weight", packed
        yield f"{linear.name}.weight_scale", scales
        if zeros is not None:
            yield f"{linear.name}.weight_zero_point", zeros
        if linear.layout.ordered:
            yield f"{linear.name}.weight_g_idx", held["groups"].int()


def unpack_numbers(
    packed: Tensor, bits: int, group: Tensor, scales: Tensor, zeros: Tensor | None
) -> Tensor:
    """The numbers ``[N, K]`` float32 that integers stand for.

    Args:
        packed: ``[N, K * bits / 8]`` uint8, as of :class:`GroupLinearMethod`; rounded up.
        bits: 4 or 8.
        group: ``[K]`` int64, that of each input.
        scales: ``[N, groups]``.
        zeros: of that shape: uint8 codes that stand for zero, or bfloat16 numbers that are added;
            None for the middle.
    """
    out = torch.empty(len(packed), len(group), dtype=torch.float32, device=packed.device)
    for start in range(0, len(packed), _ROWS):
        rows = slice(start, start + _ROWS)
        are_codes = zeros is not None and zeros.dtype == torch.uint8
        spread = None
        if zeros is not None:
            signed = zeros[rows].view(torch.int8) if are_codes else zeros[rows]
            spread = signed.float()[:, group]
        codes = unpack_codes(packed[rows], bits)[:, : len(group)].view(torch.int8).float()
        codes -= spread if spread is not None and are_codes else MIDDLE[bits]
        out[rows] = codes.mul_(scales[rows].float()[:, group])
        if spread is not None and not are_codes:
            out[rows] += spread
    return out


class PackedScheme(QuantizationScheme):
    """Takes the linears that a tool packed; a subclass knows its settings and its tensors.

    Attributes:
        codes_leaf: the last name of the tensor of codes.
        known: settings that matter, and the values of each that are supported.
        passed: settings that say nothing about the tensors.
        unfilled: what a ``g_idx`` of several groups has everywhere if nobody filled it in.
    """

    codes_leaf: ClassVar[str]
    known: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    passed: ClassVar[tuple[str, ...]] = ()
    unfilled: ClassVar[tuple[int, ...]] = (-1,)
    _on_cpu = False

    def __init__(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        settings = as_layout(settings)
        super().__init__(name, settings)
        self._linears: dict[str, Integers] = {}
        self._layouts: dict[int, GroupLayout] = {}
        self._spare: frozenset[str] = frozenset()
        if settings is not None:
            refuse_settings(settings, (*self.known, *self.passed))
            for key, values in self.known.items():
                if values:
                    check_value(key, settings.get(key), values)
            _check_rules(settings)
            if "group_size" in self.known:
                _checked_group(settings)

    def linears(self, headers: Mapping[str, Any]) -> Iterator[Integers]:
        """The linears of integers that a checkpoint has.

        Raises:
            ConfigError: a tensor of one is missing, or of another shape or type than it should be.
        """
        raise NotImplementedError

    def read(
        self, linear: Integers, held: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes ``[N, K * bits / 8]``, scales and zeros ``[N, groups]`` of its tensors."""
        raise NotImplementedError

    def check_device(self, device: torch.device) -> None:
        """Take note of the device; all will do."""
        self._on_cpu = device.type == "cpu"

    def check_checkpoint(self, checkpoint: Checkpoint, model: str) -> None:
        """The option alone quantises nothing."""
        if self.settings is None and not any(
            checkpoint.hf_config.get(key) for key in QUANTIZATION_KEYS
        ):
            raise OptionError(
                f"quantization {self.name!r} is for checkpoints that are quantised so, and {model} "
                "is not; leave it out, or take 'int4', which quantises any checkpoint"
            )

    def plain(self, checkpoint: Any) -> Any:
        """Its headers as they would be without quantisation."""
        self._linears = {linear.name: linear for linear in self.linears(checkpoint.headers)}
        if not self._linears:
            raise unsupported(f"no tensor of the checkpoint is a {self.codes_leaf}")
        for linear in self._linears.values():
            if "weight" not in linear.leaves and f"{linear.name}.weight" in checkpoint.headers:
                codes = next(leaf for leaf, kind in linear.leaves.items() if kind == "codes")
                raise unsupported(
                    f"{linear.name} has a weight beside its {codes}, and nothing says which counts"
                )
        self._spare = frozenset(self.zero_biases(checkpoint))
        return PackedCheckpoint(checkpoint, self._linears, self.read, frozenset(), self._spare)

    def zero_biases(self, checkpoint: Any) -> Iterator[str]:
        """Biases that a tool gave its linears though the model may have none; none of most."""
        return iter(())

    def numbers(self, checkpoint: Any) -> Any:
        """Its integers as the numbers that they stand for."""
        self.plain(checkpoint)
        self._read_layouts(checkpoint)
        # Made anew: that has found out what some tensors are.
        return PackedCheckpoint(checkpoint, self._linears, self.read, frozenset(), self._spare)

    def scales(self, headers: Mapping[str, Any]) -> Mapping[str, ScaleKind]:
        """Those of the groups, and numbers that are added to them."""
        return {
            f"{linear.name}.{leaf}": _SCALE_KINDS[kind]
            for linear in self.linears(headers)
            for leaf, kind in linear.leaves.items()
            if kind in _SCALE_KINDS and headers[f"{linear.name}.{leaf}"].dtype in _FLOATS
        }

    def remarks(self, headers: Mapping[str, Any]) -> Iterator[str]:
        """Skip lists that name layers of codes, and what a tool's settings have besides."""
        linears = list(self.linears(headers))
        yield from wrongly_skipped(self.settings or {}, [linear.name for linear in linears])
        yield from self.remarks_on(linears)

    def remarks_on(self, linears: Sequence[Integers]) -> Iterator[str]:
        """A line on each setting of a tool that is not followed; none of most."""
        return iter(())

    def prepare(self, model: nn.Module) -> None:
        """Leave the layers plain: the tensors say who is taken."""

    def match_dummy(self) -> None:
        """Refuse, as without tensors nothing says which linears are quantised."""
        raise OptionError(
            "load_format 'dummy' has no tensors that say which layers are quantised; take "
            "quantization_config out of config.json, and set quantization='int4' or 'int8'"
        )

    def match(self, model: nn.Module, checkpoint: Checkpoint, account: LoadAccount) -> Any:
        """Give each linear of integers that a kernel takes its method; the others get numbers.

        Raises:
            ConfigError: only some parts of a merged linear are quantised, the head is not though
                the config says so, or a ``g_idx`` is wrong.
        """
        self._read_layouts(checkpoint)
        self._refuse_bare_head(model, account)
        self._layouts = {}
        kept: set[str] = set()
        left: dict[str, str] = {}
        fills = account.fills()
        for name, layer in model.named_modules():
            if not isinstance(layer, Linear):
                continue
            sources = [source.removesuffix(".weight") for source in account.sources(layer.weight)]
            integers = [self._linears[each] for each in sources if each in self._linears]
            if not integers:
                continue
            plain = [each for each in sources if each not in self._linears]
            self._refuse_half(name, integers, plain)
            layout = integers[0].layout
            alike = all(self._alike(integers[0], other) for other in integers[1:])
            if plain or not alike:
                left[name] = "its parts are of several forms"
            elif any(fills[f"{each.name}.weight"] > 1 for each in integers):
                left[name] = "another layer shares it"
            elif not layer.takes_codes:
                left[name] = "it takes numbers alone"
            elif integers[0].shape[1] * layout.bits % 32:
                left[name] = "its rows end within an int32"
            elif not integers[0].even:
                left[name] = "its g_idx has groups of several sizes"
            elif not self._on_cpu and integers[0].shape[1] % (layout.group_size or 1):
                left[name] = "its last group has fewer inputs"
            elif layer.matrix_shape != layer.weight.shape and layout.ordered:
                left[name] = "no kernel takes experts whose inputs have an order (g_idx)"
            elif not layout.runs(self._on_cpu, layer.matrix_shape):
                left[name] = "no kernel takes groups, zeros or a size like its own"
            else:
                self._layouts[id(layer)] = layout
                kept |= {each.name for each in integers}
        self.give_methods(model)
        kept |= self._give_vocabulary(model, account, fills)
        others = sorted(self._linears.keys() - kept)
        if others:
            name, why = next(iter(left.items()), (others[0], "it is no linear of a layer"))
            self.warn(
                f"{len(others)} of {len(self._linears)} packed weights are turned into numbers, "
                f"such as {name}: {why}"
            )
        return PackedCheckpoint(checkpoint, self._linears, self.read, frozenset(kept), self._spare)

    def _give_vocabulary(
        self, model: nn.Module, account: LoadAccount, fills: Counter[str]
    ) -> set[str]:
        """Let embedding and head keep 8 bits on a CPU; returns the names of these integers."""
        users: dict[int, list[nn.Module]] = {}
        for module in model.modules():
            for param in module._parameters.values():
                users.setdefault(id(param), []).append(module)
        kept = set()
        for modules in users.values():
            layers = [each for each in modules if isinstance(each, VocabularySplit)]
            sources = account.sources(layers[0].weight) if layers else ()
            if not self._on_cpu or len(layers) < len(modules) or len(sources) != 1:
                continue
            (source,) = sources
            integers = self._linears.get(source.removesuffix(".weight"))
            if integers is None or integers.layout.bits != 8 or fills[source] > 1:
                continue
            if integers.layout.runs(True, layers[0].weight.shape):
                method = Int8VocabularyMethod(layers, integers.layout.scale_dtype)
                for layer in layers:
                    layer.method = method
                kept.add(integers.name)
        return kept

    def linear_method(self, name: str, layer: Linear) -> LinearMethod | None:
        """Integers, for a linear that has them."""
        layout = self._layouts.get(id(layer))
        if layout is None:
            return None
        if layout.ordered and layer.rowwise and layer.context.tp_size > 1:
            raise OptionError(
                f"quantization {self.name!r}: the inputs of {name} lie in groups all over it "
                f"(g_idx), so that {layer.context.tp_size} ranks cannot share them; run it on one "
                "device, or take a checkpoint without act-order (desc_act)"
            )
        return GroupLinearMethod(layout, self._on_cpu)

    def _refuse_half(self, name: str, integers: list[Integers], plain: list[str]) -> None:
        stray = sorted(each for each in plain if not self._skips(each))
        if stray:
            raise unsupported(
                f"{name} is merged of tensors of which some are quantised ({integers[0].name}) and "
                f"some are not ({stray[0]}), though no skip list names these"
            )

    def _refuse_bare_head(self, model: nn.Module, account: LoadAccount) -> None:
        for name, head in model.named_modules() if (self.settings or {}).get("lm_head") else ():
            sources = sorted(account.sources(head.weight)) if isinstance(head, LMHead) else []
            stems = [source.removesuffix(".weight") for source in sources]
            if stems and not any(stem in self._linears for stem in stems):
                raise unsupported(
                    f"lm_head is True, and {name} has no codes: there is no {stems[0]}."
                    f"{self.codes_leaf}"
                )

    def _skips(self, name: str) -> bool:
        return names_layer(self.settings or {}, name)

    def _alike(self, first: Integers, other: Integers) -> bool:
        if first.layout != other.layout:
            return False
        if first.order is None or other.order is None:
            return first.order is other.order
        return torch.equal(first.order, other.order)

    def _read_layouts(self, checkpoint: Any) -> None:
        """Look at the groups that inputs are in, and at zero points, where the settings do not."""
        takes: dict[str, _Take] = {
            "groups": partial(_take_groups, unfilled=self.unfilled),
            _UNSAID_ZEROS: _take_zeros,
        }
        wanted = {
            f"{linear.name}.{leaf}": (takes[kind], linear)
            for linear in self._linears.values()
            for leaf, kind in linear.leaves.items()
            if kind in takes
        }
        for name, tensor in _tensors_named(wanted, checkpoint):
            take, linear = wanted[name]
            take(name, tensor, linear)


def _tensors_named(names: Collection[str], checkpoint: Any) -> Iterator[tuple[str, Tensor]]:
    """Those of a checkpoint with these names, whose files are not read if there are none."""
    for name, tensor in checkpoint.weights() if names else ():
        if name in names:
            yield name, tensor


def _without_order(ordered: Integers, linear: Integers, leaf: str) -> ConfigError:
    name = f"{linear.name}.{leaf}"
    lacks = f"there is no {name}" if linear.unfilled is None else _not_filled(name, linear)
    return unsupported(
        f"{ordered.name}.{leaf} puts inputs into groups that are no neighbours, and {lacks}"
    )


def _not_filled(name: str, linear: Integers) -> str:
    return (
        f"{name} has {linear.unfilled} for all {linear.shape[1]} inputs, which does not say in "
        f"which of {linear.groups} groups each is"
    )


def _take_groups(name: str, tensor: Tensor, linear: Integers, unfilled: tuple[int, ...]) -> None:
    """Note the group of each input, if these are not of neighbours.

    Raises:
        ConfigError: there is no such group, or it has more inputs than a group can.
    """
    k, size = linear.shape[1], linear.layout.group_size or linear.shape[1]
    tensor = tensor.int()
    neighbours = torch.arange(k, dtype=torch.int32) // size
    if torch.equal(tensor, neighbours):
        return
    linear.unfilled = next((each for each in unfilled if bool((tensor == each).all())), None)
    if linear.unfilled is not None:
        return
    low, high = int(tensor.min()), int(tensor.max())
    if low < 0 or high >= linear.groups:
        raise unsupported(
            f"{name} puts inputs into group {low if low < 0 else high}, and there are "
            f"groups 0 to {linear.groups - 1}"
        )
    sizes = torch.bincount(tensor.long(), minlength=linear.groups)
    if bool((sizes > size).any()):
        group = int(sizes.argmax())
        raise unsupported(
            f"{name} puts {int(sizes[group])} inputs into group {group}, and groups are of {size}"
        )
    # Some have fewer where the inputs are no multiple, and where a tool padded them.
    linear.order = tensor.clone()
    linear.even = bool((sizes == size).all())
    linear.layout = replace(linear.layout, ordered=True, quantizes_rows=False)


def _take_zeros(name: str, tensor: Tensor, linear: Integers) -> None:
    """Use zero points of codes that the settings call symmetric, if they are not the middle.

    compressed-tensors subtracts them, whatever the settings say.

    Raises:
        ConfigError: they have no form that is known.
    """
    if not bool(tensor.float().any()):
        return
    (n, _), bits, leaf = linear.shape, linear.layout.bits, name.rpartition(".")[2]
    dtype = str(tensor.dtype).removeprefix("torch.")
    if linear.zero_forms.get(dtype) != tuple(tensor.shape):
        forms = " or ".join(f"{each} {list(shape)}" for each, shape in linear.zero_forms.items())
        raise unsupported(
            f"{name} is not zero though symmetric is True, and {dtype} {list(tensor.shape)} is "
            f"none of the forms of zero points: {forms}"
        )
    middle = 2 ** (bits - 1)
    if tensor.dtype == torch.int32 and bool((_expand(tensor.T, bits)[:, :n] == middle).all()):
        return
    linear.leaves[leaf] = "zeros"
    linear.layout = replace(linear.layout, zeros=torch.uint8, quantizes_rows=False)


class _Tensors:
    """The headers of one linear's tensors, which are checked as they are asked for."""

    def __init__(self, headers: Mapping[str, Any], name: str) -> None:
        self._headers, self.name = headers, name
        self.leaves: dict[str, str] = {}

    def has(self, leaf: str) -> bool:
        return f"{self.name}.{leaf}" in self._headers

    def shape(self, leaf: str) -> tuple[int, ...]:
        """Its shape; () if it is not there."""
        header = self._headers.get(f"{self.name}.{leaf}")
        return () if header is None else tuple(header.shape)

    def ask(self, leaf: str, kind: str, dtypes: tuple[str, ...]) -> Any:
        header = self._headers.get(f"{self.name}.{leaf}")
        if header is None:
            raise unsupported(
                f"{self.name} has codes but no {kind}: there is no {self.name}.{leaf}"
            )
        if header.dtype not in dtypes:
            wanted = " or ".join(dtypes)
            raise unsupported(f"{self.name}.{leaf} is of {header.dtype}, not {wanted}")
        if kind == "codes" and (len(header.shape) != 2 or 0 in header.shape):
            raise unsupported(f"{self.name}.{leaf} has shape {list(header.shape)}, no matrix")
        self.leaves[leaf] = kind
        return header

    def ask_order(self, leaf: str, k: int, dtypes: tuple[str, ...], needed: str | None) -> None:
        """That of the group of each of ``k`` inputs, which may lack if nothing says otherwise."""
        if self.has(leaf):
            order = self.ask(leaf, "groups", dtypes)
            self.expect(leaf, order, (k,), why=f", one for each of {k} inputs")
        elif needed is not None:
            raise unsupported(
                f"{needed}, and there is no {self.name}.{leaf} that says which group each input is "
                "in"
            )

    def expect(self, leaf: str, header: Any, *shapes: tuple[int, ...], why: str = "") -> None:
        if tuple(header.shape) not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise unsupported(
                f"{self.name}.{leaf} has shape {list(header.shape)}, not {wanted}{why}"
            )


def _stems(headers: Mapping[str, Any], leaf: str) -> list[str]:
    return [name.removesuffix(f".{leaf}") for name in headers if name.endswith(f".{leaf}")]


def _checked_group(settings: Mapping[str, Any]) -> int:
    size = settings.get("group_size", -1)
    if type(size) is not int or (size < 1 and size != -1):
        raise unsupported(f"group_size is {size!r}, neither a number of inputs nor -1")
    return size


def puts_in_order(settings: Mapping[str, Any]) -> bool:
    """Whether GPTQ's inputs were put into another order, and laid out in groups after that.

    Those of static groups were laid out before, and are neighbours.
    """
    meta = settings.get("meta")
    static = any(
        isinstance(each, dict) and each.get("static_groups") is True for each in (settings, meta)
    )
    return bool(settings.get("desc_act")) and not static


def _without_aliases(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the names of newer AutoAWQ; those of llm-awq were its own first."""
    found = dict(settings)
    for alias, key in (("w_bit", "bits"), ("q_group_size", "group_size")):
        said, other = found.pop(alias, None), found.get(key)
        if said is None:
            continue
        if other is not None and other != said:
            raise unsupported(f"{key} is {other!r} and {alias} is {said!r}, which are the same")
        found[key] = said
    return found


class AWQScheme(PackedScheme):
    """AutoAWQ's layout "gemm", of 4 bits."""

    codes_leaf = "qweight"
    known: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_OF_BOTH,
        "bits": (4,),
        **dict.fromkeys(("version", "format", "checkpoint_format"), ("gemm", "GEMM", None)),
        # AutoRound says False of symmetric codes, and keeps the zeros all the same.
        "zero_point": (True, False, None),
        "quant_method": ("awq",),
        "method": ("awq", None),
    }
    passed = (
        *_OF_CALIBRATION,
        *("do_fuse", "fuse_max_seq_len", "modules_to_fuse"),
    )

    def __init__(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, None if settings is None else _without_aliases(settings))

    @classmethod
    def condition(cls, settings: Mapping[str, Any]) -> bool:
        """By the method's name, or that of AutoRound's layout."""
        return method_of(settings) == "awq"

    def linears(self, headers: Mapping[str, Any]) -> Iterator[Integers]:
        """Tensors ``qweight [K, N / 8]``, ``qzeros [groups, N / 8]``, ``scales [groups, N]``."""
        size = _checked_group(self.settings or {})
        for name in _stems(headers, "qweight"):
            tensors = _Tensors(headers, name)
            k, columns = tensors.ask("qweight", "codes", ("int32",)).shape
            n, groups = columns * 8, 1 if size == -1 else -(-k // size)
            why = f": group_size is {size}, of {k} inputs"
            scales = tensors.ask("scales", "scales", _FLOATS)
            tensors.expect("scales", scales, (groups, n), why=why)
            zeros = tensors.ask("qzeros", "zeros", ("int32",))
            tensors.expect("qzeros", zeros, (groups, columns), why=why)
            dtype = getattr(torch, scales.dtype)
            layout = GroupLayout(4, 0 if groups == 1 else size, torch.uint8, False, dtype)
            yield Integers(name, tensors.leaves, (n, k), layout)

    def read(
        self, linear: Integers, held: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Neighbouring columns lie in an int32 in an order of their own."""
        codes, zeros = (
            _expand(held[kind], 4).unflatten(1, (-1, 8))[..., _AWQ_PLACES].flatten(1).T
            for kind in ("codes", "zeros")
        )
        return pack_codes(codes.contiguous(), 4), held["scales"].T, zeros


class GPTQScheme(PackedScheme):
    """AutoGPTQ's and GPTQModel's layout, of 4 and 8 bits."""

    codes_leaf = "qweight"
    # ExLlama's kernels in these tools take zeros for groups of neighbours, the others for group 0.
    # No tool writes them with desc_act, without which vLLM does not look.
    unfilled = (-1, 0)
    known: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_OF_BOTH,
        "bits": (4, 8),
        "checkpoint_format": ("gptq", "gptq_v2", None),
        "format": ("gptq", "gptq_v2", None),
        "is_marlin_format": (False, None),
        "quant_method": ("gptq",),
        "method": ("gptq", None),
    }
    passed = _OF_CALIBRATION

    def __init__(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, settings)
        # Newer tools write both names or the second alone.
        keys = ("checkpoint_format", "format")
        given = {key: (self.settings or {}).get(key) for key in keys}
        versions = {value for value in given.values() if value is not None}
        if len(versions) > 1:
            shown = " and ".join(f"{key} is {value!r}" for key, value in given.items())
            raise unsupported(f"{shown}, which keep zeros in different ways")
        self._keeps_less_one = "gptq_v2" not in versions

    @classmethod
    def condition(cls, settings: Mapping[str, Any]) -> bool:
        """By the method's name, or that of AutoRound's layout."""
        return method_of(settings) == "gptq"

    def zero_biases(self, checkpoint: Any) -> Iterator[str]:
        """Those that are zero: AutoGPTQ 0.2 to 0.7 made every linear with a bias."""
        names = {f"{name}.bias" for name in self._linears} & checkpoint.headers.keys()
        for name, tensor in _tensors_named(names, checkpoint):
            if not bool(tensor.float().any()):
                yield name

    def _read_layouts(self, checkpoint: Any) -> None:
        # GPTQModel and AutoGPTQ save g_idx of every layer. Without it their loaders leave the
        # buffer as it was made, in groups of neighbours, only because nothing looks whether it was
        # filled: with desc_act that is how inputs were grouped if groups are static alone. Then
        # those of the other layers are of neighbours, too, or the setting is not true.
        super()._read_layouts(checkpoint)
        ordered = next((each for each in self._linears.values() if each.order is not None), None)
        needed = puts_in_order(self.settings or {})
        for linear in self._linears.values():
            if needed and linear.groups > 1 and linear.unfilled is not None:
                filled = _not_filled(f"{linear.name}.g_idx", linear)
                raise unsupported(f"desc_act is True, and {filled}")
            lacks = linear.unfilled is not None or "g_idx" not in linear.leaves
            if ordered is not None and linear.groups > 1 and lacks:
                raise _without_order(ordered, linear, "g_idx")

    def linears(self, headers: Mapping[str, Any]) -> Iterator[Integers]:
        """Tensors ``qweight [K * bits / 32, N]``, ``qzeros``, ``scales``, and ``g_idx [K]``."""
        settings = self.settings or {}
        size, bits = _checked_group(settings), settings["bits"]
        share = 32 // bits
        for name in _stems(headers, "qweight"):
            tensors = _Tensors(headers, name)
            rows, n = tensors.ask("qweight", "codes", ("int32",)).shape
            k = rows * share
            groups = 1 if size == -1 else -(-k // size)
            why = f": group_size is {size}, of {k} inputs"
            scales = tensors.ask("scales", "scales", _FLOATS)
            tensors.expect("scales", scales, (groups, n), why=why)
            zeros = tensors.ask("qzeros", "zeros", ("int32",))
            tensors.expect("qzeros", zeros, (groups, -(-n // share)), why=why)
            needed = groups > 1 and puts_in_order(settings)
            tensors.ask_order("g_idx", k, ("int32",), "desc_act is True" if needed else None)
            dtype = getattr(torch, scales.dtype)
            layout = GroupLayout(bits, 0 if groups == 1 else size, torch.uint8, False, dtype)
            yield Integers(name, tensors.leaves, (n, k), layout)

    def read(
        self, linear: Integers, held: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs lie in an int32 in their order. The first version keeps zeros less one."""
        bits = linear.layout.bits
        zeros = _expand(held["zeros"], bits)[:, : linear.shape[0]].T
        if self._keeps_less_one:
            zeros = (zeros + 1) & (2**bits - 1)
        codes = held["codes"].T.contiguous().view(torch.uint8)
        if bits == 8:
            codes, zeros = codes ^ 128, zeros ^ 128
        return codes, held["scales"].T, zeros


class CompressedIntegersScheme(PackedScheme):
    """The formats pack-quantized and int-quantized of compressed-tensors, of 4 and 8 bits.

    A file that this engine exported may have one more, which is pack-quantized but for a
    ``weight_zero`` in bfloat16 in the place of zero points. Weights that had 4 bits before, as
    those of a Q4_1 file, are on such grids, whose zero is no code.
    """

    codes_leaf = "weight_packed or int8 weight"
    known: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "format": ("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision"),
        "quant_method": ("compressed-tensors", "engine-core"),
        "quantization_status": ("compressed", "frozen", None),
    }
    passed = (
        *("config_groups", "dequantize", "global_compression_ratio", "ignore", "kv_cache_scheme"),
        *("run_compressed", "sparsity_config", "transform_config", "use_optimized_inference"),
        "version",
    )

    def __init__(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, settings)
        self._shapes: dict[str, list[int]] = {}
        for group, given in integer_groups(settings or {}).items():
            _check_integers(f"config_groups.{group}.weights", given["weights"])
            inputs = given.get("input_activations")
            if inputs is not None:
                _check_inputs(f"config_groups.{group}.input_activations", inputs)
            if given.get("output_activations") is not None:
                raise unsupported(f"config_groups.{group} quantises output_activations")
            targets = given.get("targets")
            if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
                raise unsupported(f"config_groups.{group}.targets is {targets!r}, no list of names")
            for target in targets:
                check_pattern(f"config_groups.{group}.targets", target)

    @classmethod
    def condition(cls, settings: Mapping[str, Any]) -> bool:
        """By the method's name; that of the tool has other groups, too."""
        method = settings.get("quant_method")
        if method == "engine-core":
            return True
        return method == "compressed-tensors" and bool(integer_groups(settings))

    def linears(self, headers: Mapping[str, Any]) -> Iterator[Integers]:
        """Packed ``weight_packed [N, K * bits / 32]`` or ``weight [N, K]`` int8, and scales.

        Codes of 4 bits may take a byte each, too.
        """
        refuse_codes(headers, "int8")
        for name in _stems(headers, "weight_packed"):
            yield self._linear(_Tensors(headers, name), packed=True)
        for name in _stems(headers, "weight"):
            if headers[f"{name}.weight"].dtype == "int8":
                yield self._linear(_Tensors(headers, name), packed=False)

    def plain(self, checkpoint: Any) -> Any:
        """Its headers as they would be without quantisation, once the true shapes were read."""
        leaf = ".weight_shape"
        names = {
            name
            for name, header in checkpoint.headers.items()
            if name.endswith(leaf) and tuple(header.shape) == (2,) and "int" in header.dtype
        }
        self._shapes = {
            name.removesuffix(leaf): tensor.tolist()
            for name, tensor in _tensors_named(names, checkpoint)
        }
        return super().plain(checkpoint)

    def _inputs(self, tensors: _Tensors, size: int | None, bits: int) -> int:
        """The inputs of packed codes, whose rows are padded to whole int32.

        A weight_shape says how many; until it was read, as many as fit the groups.
        """
        n, columns = tensors.shape("weight_packed")
        padded = columns * 32 // bits
        widths = range(padded, padded - 32 // bits, -1)
        said = self._shapes.get(tensors.name)
        if said is not None:
            return said[1] if said[0] == n and said[1] in widths else padded

        def fits(k: int) -> bool:
            order = tensors.shape("weight_g_idx")
            groups = tensors.shape("weight_scale")[1:] if size else ()
            return order in ((), (k,)) and groups in ((), (-(-k // (size or k)),))

        return next(filter(fits, widths), padded)

    def _linear(self, tensors: _Tensors, *, packed: bool) -> Integers:
        given = self._group_of(tensors.name)
        weights, inputs = given["weights"], given.get("input_activations")
        bits, strategy = weights["num_bits"], weights["strategy"]
        symmetric = weights.get("symmetric") is not False
        size = weights.get("group_size") if strategy == "group" else None
        if packed:
            n = tensors.ask("weight_packed", "codes", ("int32",)).shape[0]
            k = self._inputs(tensors, size, bits)
        else:
            n, k = tensors.ask("weight", "codes", ("int8",)).shape
        size = size or k
        scales = tensors.ask("weight_scale", "scales", _FLOATS)
        groups, why = -(-k // size), f": group_size is {size}, of {k} inputs in {bits} bits"
        whole = ((), (1,), (n,), (1, 1)) if groups == 1 else ()
        tensors.expect("weight_scale", scales, (n, groups), *whole, why=why)
        # Before 0.9.4 compressed-tensors did not pack them, and of a whole tensor none does.
        zero_forms = {"int32": (-(-n * bits // 32), groups)} if packed else {}
        zero_forms["int8"] = tuple(scales.shape)
        ours = (self.settings or {}).get("quant_method") == "engine-core" and not symmetric
        zero_dtype = None if symmetric else torch.uint8
        if ours and packed and tensors.has("weight_zero"):
            zeros = tensors.ask("weight_zero", "zeros", ("bfloat16",))
            tensors.expect("weight_zero", zeros, (n, groups), why=why)
            zero_dtype = torch.bfloat16
        elif not symmetric:
            zeros = tensors.ask("weight_zero_point", "zeros", tuple(zero_forms))
            tensors.expect("weight_zero_point", zeros, zero_forms[zeros.dtype], why=why)
        # By the other orders inputs were quantised, and groups are of neighbours. So are those of a
        # weight_g_idx of -1: the modifier that calibrates did not reach the layer, and the tool
        # quantises and unpacks it so (_process_group).
        actorder = weights.get("actorder")
        needed = groups > 1 and actorder in (True, "group", "dynamic")
        tensors.ask_order(
            *("weight_g_idx", k, ("int32", "int64")),
            f"actorder is {actorder!r}" if needed else None,
        )
        if packed:
            # compressed-tensors cannot unpack without it.
            shape = tensors.ask("weight_shape", "shape", ("int64", "int32"))
            tensors.expect("weight_shape", shape, (2,))
            said = self._shapes.get(tensors.name)
            if said not in (None, [n, k]):
                raise unsupported(
                    f"{tensors.name}.weight_shape says {said}, and the codes of {tensors.name} are "
                    f"{[n, k]}"
                )
        for leaf in ("weight_shape", "weight_zero_point"):
            if leaf not in tensors.leaves and tensors.has(leaf):
                unsaid = symmetric and leaf == "weight_zero_point"
                tensors.leaves[leaf] = _UNSAID_ZEROS if unsaid else ""
        layout = GroupLayout(
            *(bits, 0 if groups == 1 else size, zero_dtype, False),
            getattr(torch, scales.dtype),
            quantizes_rows=inputs is not None and groups == 1 and symmetric and bits == 8,
        )
        return Integers(tensors.name, tensors.leaves, (n, k), layout, zero_forms=zero_forms)

    def remarks_on(self, linears: Sequence[Integers]) -> Iterator[str]:
        """Activations that are not quantised, and, once they were read, zero points unspoken of."""
        unsaid = self._unsaid_zeros()
        if unsaid is not None:
            yield unsaid
        wide = [
            linear
            for linear in linears
            if not linear.layout.quantizes_rows
            and self._group_of(linear.name).get("input_activations") is not None
        ]
        if wide:
            bits = wide[0].layout.bits
            form = f"{bits} bits" + (" in groups or with zero points" if bits == 8 else "")
            yield (
                f"input_activations are to have 8 bits, but no kernel takes such beside weights of "
                f"{form} ({wide[0].name}, {len(wide)} of {len(linears)} linears); activations keep "
                "the model's dtype, which is more exact and not faster"
            )

    def _unsaid_zeros(self) -> str | None:
        names = [
            linear.name
            for linear in self._linears.values()
            if linear.leaves.get("weight_zero_point") == "zeros"
            and self._group_of(linear.name)["weights"].get("symmetric") is not False
        ]
        if not names:
            return None
        return (
            f"symmetric is True, and {names[0]}.weight_zero_point is not zero ({len(names)} of "
            f"{len(self._linears)} linears); zero points are subtracted"
        )

    def _read_layouts(self, checkpoint: Any) -> None:
        super()._read_layouts(checkpoint)
        unsaid = self._unsaid_zeros()
        if unsaid is not None:
            self.warn(unsaid)
        linears = self._linears.values()
        ordered = [linear for linear in linears if linear.order is not None]
        lacking = (
            each for each in linears if each.groups > 1 and "weight_g_idx" not in each.leaves
        )
        for linear in lacking if ordered else ():
            group = self._group_of(linear.name)
            peer = next((each for each in ordered if self._group_of(each.name) is group), None)
            if peer is not None and (group.get("weights") or {}).get("actorder") is None:
                raise _without_order(peer, linear, "weight_g_idx")

    def _group_of(self, name: str) -> Mapping[str, Any]:
        """The group whose targets name a linear, or all linears."""
        groups = integer_groups(self.settings or {})
        for group in groups.values():
            if any(names_layer({"ignore": [target]}, name) for target in group["targets"]):
                return group
        for group in groups.values():
            if "Linear" in group["targets"]:
                return group
        raise unsupported(f"{name} is quantised, and no group of config_groups targets it")

    def read(
        self, linear: Integers, held: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes and zeros are kept with an offset, or as int8."""
        (n, k), bits = linear.shape, linear.layout.bits
        signed = held["codes"].dtype == torch.int8
        offset = bits == 8 and not signed
        if signed and bits == 4:
            codes = pack_codes(_from_middle(f"{linear.name}.weight", held["codes"]), bits)
        else:
            codes = held["codes"].contiguous().view(torch.uint8)
            codes = codes[:, : -(-k * bits // 8)]
            codes = codes ^ 128 if offset else codes
        scales = held["scales"].reshape(-1, linear.groups).expand(n, linear.groups)
        zeros = held.get("zeros")
        if zeros is None or zeros.dtype == torch.bfloat16:
            return codes, scales, zeros
        if zeros.dtype == torch.int8:
            if bits == 4:
                zeros = _from_middle(f"{linear.name}.weight_zero_point", zeros)
            zeros = zeros.view(torch.uint8)
            return codes, scales, zeros.reshape(-1, linear.groups).expand(n, linear.groups)
        zeros = _expand(zeros.T, bits)[:, :n].T
        return codes, scales, zeros ^ 128 if offset else zeros


def _from_middle(name: str, signed: Tensor) -> Tensor:
    """int8 from -8 to 7 as codes of 4 bits, 0 to 15."""
    low, high = (int(each) for each in signed.aminmax())
    if low < -8 or high > 7:
        raise unsupported(f"{name} has {low if low < -8 else high}, which is no code of 4 bits")
    return (signed + 8).view(torch.uint8)


def integer_groups(settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """``config_groups`` of compressed-tensors if all are of integers; empty else."""
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return {}
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or weights.get("type") != "int":
            return {}
    return groups


def _check_integers(where: str, given: Mapping[str, Any]) -> None:
    wanted: dict[str, tuple[Any, ...]] = {
        "num_bits": (4, 8),
        "symmetric": (True, False, None),
        "strategy": ("group", "channel", "tensor"),
        "block_structure": (None,),
        "dynamic": (False, None),
        "actorder": (None, False, True, "group", "weight", "static", "dynamic"),
    }
    check_values(where, given, wanted)
    size = given.get("group_size")
    if given["strategy"] == "group" and (type(size) is not int or size < 1):
        raise unsupported(f"{where}.group_size is {size!r}, not a number of inputs")


def _check_inputs(where: str, given: Any) -> None:
    if not isinstance(given, dict):
        raise unsupported(f"{where} is {given!r}, no object")
    wanted = {"type": ("int",), "num_bits": (8,), "symmetric": (True, None)}
    check_values(where, given, {**wanted, "dynamic": (True,), "strategy": ("token",)})
