"""Linear layers, split over ranks, whose arithmetic is a :class:`LinearMethod`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, TypedDict, Unpack

import torch
from torch import Tensor, nn

from engine_core.kernels import (
    Chain,
    ChainForm,
    ChainNorm,
    CodedRows,
    CodedWeight,
    DeferredRMSNorm,
    RowForm,
    adds_residual,
    chain_declined,
    fits_fused_sum,
    fits_head_norms,
    has_activated_kernel,
    has_kernel,
    linear,
    linear_add,
    linear_add_norm,
    linear_chain,
    linear_rotary_store,
)
from engine_core.kernels.linear import chain as chains
from engine_core.nn.distributed import (
    IndivisibleError,
    all_reduce,
    all_reduce_add_norm,
    divide,
    split_heads,
)
from engine_core.nn.epilogue import (
    Activated,
    AddNorm,
    Call,
    Chained,
    Divide,
    Epilogue,
    Quantized,
    RotateStore,
)
from engine_core.nn.loading import ShapeMismatchError, copy_checked, set_weight_loader
from engine_core.nn.norm import LayerNorm, RMSNorm
from engine_core.nn.packing import MatrixModule, OneDNNMatrix, PackedMatrix, pack_matrix
from engine_core.step_context import current_build_context


class LinearMethod(Protocol):
    """How a linear keeps its weight and multiplies by it; quantisation schemes are methods.

    To be inherited: the defaults fuse nothing.
    """

    def create_weights(
        self,
        layer: Linear,
        in_features: int,
        out_features: int,
        dtype: torch.dtype | None,
        device: torch.device | None,
    ) -> None:
        """Make the layer's weight parameters for this rank, with their loaders."""

    def packed_sizes(self, layer: MatrixModule) -> Mapping[str, int]:
        """Bytes of what :meth:`process_after_load` puts in the place of each parameter, by name.

        A parameter that is left out keeps its size.
        """
        return {}

    def prepare_load(self, layer: Linear) -> None:
        """Make ready for weights that will be loaded, and then processed by the next method."""
        del layer

    def process_after_load(self, layer: Linear) -> None:
        """Repack the loaded weights for :meth:`apply`, if that is worth it."""

    def apply(
        self, layer: Linear, x: Tensor | DeferredRMSNorm | CodedRows, bias: Tensor | None
    ) -> Tensor:
        """``x [..., in_features] @ weight.T + bias``.

        x lacks a norm's division, or is quantised, only after :meth:`declined` agreed to that.
        """

    def declined(self, layer: Linear, epilogue: Epilogue, call: Call) -> str | None:
        """The reason why an epilogue is not fused in such a call; None if it is.

        The answer may depend on the layer's parameters but not on their values: it is asked of
        models on meta too.
        """
        del layer, epilogue, call
        return f"{type(self).__name__} fuses nothing"

    def chain_form(self, layer: Linear) -> ChainForm | None:
        """The form that a chain of linears asks of the weight; None where it can be none of one.

        A chain's kernel reads the weight and the bias: what else a method adds to a product is not
        in it.
        """
        return None

    def row_form(self, layer: Linear) -> RowForm:
        """The form of rows that are quantised for the loaded layer where they are made."""
        del layer
        raise NotImplementedError(f"{type(self).__name__} says that it takes rows in codes")

    def apply_with(
        self,
        layer: Linear,
        x: Tensor | DeferredRMSNorm | CodedRows,
        epilogue: Epilogue,
        *operands: Any,
    ) -> Any:
        """The product, the layer's bias and an epilogue that was not declined.

        The result and the operands are those of :meth:`Epilogue.plain`.
        """
        del layer, x, operands
        raise NotImplementedError(f"{type(self).__name__} says that it fuses {epilogue}")


# oneDNN's names for the activations that it computes where a product leaves its registers.
_GELU_FORMS = {"gelu": "none", "gelu_tanh": "tanh"}


def _onednn_gelu(layer: Linear, epilogue: Epilogue) -> str | None:
    """The form of GELU that a CPU's product may end with; None if the epilogue is no GELU."""
    if not isinstance(epilogue, Activated) or not isinstance(layer.packed, OneDNNMatrix):
        return None
    if getattr(epilogue.module, "gated", True):
        return None
    return _GELU_FORMS.get(getattr(epilogue.module, "activation", ""))


_NEEDS_CUBLAS = "for so many rows cuBLAS and operations of their own are faster"
_RESIDUAL_ALONE = "for so many rows the norm adds the residual at no cost"
_NEEDS_ALONE = "a batch-invariant norm rounds as a kernel of its own, which more rows have"


class UnquantizedLinearMethod(LinearMethod):
    """A plain weight ``[out_features, in_features]``; on a CPU in oneDNN's layout.

    A subclass whose weight is a :class:`~engine_core.kernels.CodedWeight` on a GPU answers
    :meth:`fits`, :meth:`activates` and :meth:`adds_residual` for it.
    """

    def create_weights(
        self,
        layer: Linear,
        in_features: int,
        out_features: int,
        dtype: torch.dtype | None,
        device: torch.device | None,
    ) -> None:
        """Make ``layer.weight``."""
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        layer.add_parameter("weight", weight, input_dim=1)

    def pack(self, weight: Tensor) -> PackedMatrix | None:
        """A packed weight in place of the loaded ``weight``, or None to leave it as it is."""
        return pack_matrix(weight)

    def process_after_load(self, layer: Linear) -> None:
        """Put what :meth:`pack` makes in the weight's place."""
        packed = layer.pack_by(self.pack, layer.weight)
        if packed is not None:
            layer.set_packed(packed, "weight")

    def apply(
        self, layer: Linear, x: Tensor | DeferredRMSNorm | CodedRows, bias: Tensor | None
    ) -> Tensor:
        """``x @ weight.T + bias``."""
        packed = layer.packed
        if packed is None or isinstance(packed, CodedWeight):
            weight = layer.weight if packed is None else packed
            return linear(x, weight, bias, deterministic=layer.context.deterministic)
        assert isinstance(x, Tensor), "a packed weight takes no norm without its division"
        return packed.multiply(x, bias)

    def fits(
        self, layer: Linear, call: Call, *, gated: bool = False, deterministic: bool = False
    ) -> bool:
        """Whether a kernel that can fuse any epilogue takes such a call."""
        shape = (call.rows, layer.out_features, layer.in_features, call.dtype, call.gpu)
        return has_kernel(*shape, gated=gated, deterministic=deterministic)

    def activates(self, layer: Linear, call: Call, gated: bool, activation: str) -> bool:
        """Whether a kernel of many rows ends with this activation."""
        if call.dtype.itemsize != 2:
            return False
        if not gated and activation == "gelu_tanh":
            return layer.bias is not None  # cuBLAS has it
        shape = (call.rows, layer.out_features, layer.in_features, call.gpu)
        name = "silu" if gated else "quick_gelu"
        return activation == name and has_activated_kernel(*shape, gated=gated)

    def adds_residual(self, layer: Linear, call: Call) -> bool:
        """Whether the residual's addition, before a norm by itself, is part of the product."""
        shape = (call.rows, layer.out_features, layer.in_features, call.dtype, call.gpu)
        return adds_residual(*shape, with_bias=layer.bias is not None)

    def scales_later(self, layer: Linear, call: Call) -> bool:
        """Whether rotation and storing apply the scales of a product, which needs no kernel."""
        return False

    def keeps_numbers(self, layer: Linear, call: Call, gated: bool) -> str | None:
        """The reason why rows are not quantised before the product; None if they are."""
        return "its rows keep their bits"

    def declined(self, layer: Linear, epilogue: Epilogue, call: Call) -> str | None:
        """The reason against fusing: mostly that no kernel takes so many rows of this weight.

        Deterministic mode takes an activation, and norms of heads, rotation and storing: of a row
        their kernels make the same, bit for bit, as the operations one by one do for more rows.
        """
        if _onednn_gelu(layer, epilogue) is not None:
            return None
        if isinstance(epilogue, Chained):
            return _declined_chain(layer, epilogue, call)
        if call.gpu is None or not isinstance(layer.packed, CodedWeight | None):
            return "no kernel on this device fuses it"
        deterministic = layer.context.deterministic
        fits = partial(self.fits, layer, call)
        if isinstance(epilogue, Activated):
            activation = getattr(epilogue.module, "activation", None)
            if activation is None:
                return f"{type(epilogue.module).__name__} is not an activation of a kernel"
            gated = bool(epilogue.module.gated)
            if fits(gated=gated, deterministic=deterministic):
                return None
            if not deterministic and self.activates(layer, call, gated, activation):
                return None
            return _NEEDS_CUBLAS
        if isinstance(epilogue, RotateStore):
            head_dim = getattr(layer, "head_dim", None)
            if head_dim != getattr(layer, "v_head_dim", None):
                return "heads of values have another size"
            if not deterministic and self.scales_later(layer, call):
                return None
            if epilogue.q_norm is not None or layer.context.kv_cache_dtype != "auto":
                if not fits_head_norms(1, head_dim or 0):
                    return "tiles do not make up a head, which norms and scales of heads need whole"
                if not fits_head_norms(call.rows, head_dim or 0):
                    return "for so many rows the norms or scales of heads are faster alone"
            return None if fits(deterministic=deterministic) else _NEEDS_CUBLAS
        if isinstance(epilogue, Quantized):
            if deterministic:
                return "a batch-invariant product is one of numbers"
            return self.keeps_numbers(layer, call, _is_gated(epilogue.then))
        if deterministic:
            return _NEEDS_ALONE
        if isinstance(epilogue, Divide):
            then = epilogue.then
            gated = _is_gated(then) and self.declined(layer, then, call) is None
            if call.dtype is not torch.bfloat16:
                return "without the division float16 could overflow"
            return None if fits(gated=gated) else _NEEDS_CUBLAS
        if isinstance(epilogue, AddNorm):
            return self._declined_norm(layer, epilogue, call)
        return f"no kernel does {epilogue}"

    def _declined_norm(self, layer: Linear, epilogue: AddNorm, call: Call) -> str | None:
        if epilogue.before is not None:
            return "the product has a norm of its own"
        if (reason := epilogue.norm_declined()) is not None:
            return reason
        if epilogue.deferred:
            return None if self.fits(layer, call) else _NEEDS_CUBLAS
        if self.adds_residual(layer, call):
            return None
        return _RESIDUAL_ALONE

    def apply_with(
        self,
        layer: Linear,
        x: Tensor | DeferredRMSNorm | CodedRows,
        epilogue: Epilogue,
        *operands: Any,
    ) -> Any:
        """One launch, or one with the norm after it."""
        if isinstance(epilogue, Chained):
            assert isinstance(x, Tensor), "an attention gives numbers"
            (residual,) = operands
            return linear_chain(x, residual, _chain_of(layer, epilogue))
        form = _onednn_gelu(layer, epilogue)
        if form is not None:
            packed: Any = layer.packed
            return packed.multiply(x, layer.bias, "gelu", form)
        weight: Any = layer.weight if layer.packed is None else layer.packed
        product = (x, weight, layer.bias)
        deterministic = layer.context.deterministic
        if isinstance(epilogue, Activated):
            act: Any = epilogue.module
            return linear(
                *product, gated=act.gated, activation=act.activation, deterministic=deterministic
            )
        if isinstance(epilogue, RotateStore):
            cos_sin, cache, slot_mapping = operands
            return linear_rotary_store(
                *product,
                cos_sin and cos_sin[0],
                cos_sin and cos_sin[1],
                cache[0],
                cache[1],
                slot_mapping,
                **epilogue.norms,
                interleaved=epilogue.interleaved,
                kv_scales=epilogue.kv_scales,
                deterministic=deterministic,
            )
        assert isinstance(epilogue, AddNorm), f"{epilogue} was declined"
        assert not isinstance(x, DeferredRMSNorm), "no norm stands before a linear that adds"
        residual, may_overwrite = operands
        norm: Any = epilogue.norm
        if epilogue.deferred:
            assert isinstance(x, Tensor), "a division is left out for few rows"
            given = (x, *product[1:], residual, norm.weight, norm.eps)
            return linear_add(*given, norm_offset=norm.offset)
        centred = isinstance(norm, LayerNorm)
        return linear_add_norm(
            *(x, *product[1:], residual, norm.weight, norm.eps),
            norm_bias=norm.bias if centred else None,
            norm_offset=0.0 if centred else norm.offset,
            centred=centred,
            may_overwrite=may_overwrite,
            form=epilogue.form,
        )


def _declined_chain(layer: Linear, chain: Chained, call: Call) -> str | None:
    """The reason why the linears of a chain stay apart; None if they are one operation."""
    if call.rows > chains.MOST_ROWS:
        # Prompts are asked too, layer by layer.
        return chain_declined(call.rows, [], call.dtype, call.gpu)
    linears = (layer, *chain.linears)
    form = ChainForm.shared(_chain_form(each) for each in linears)
    if form is None:
        return "its linears are not all of 8-bit floats or of 4-bit codes that a chain has"
    context, act = layer.context, chain.activated.module
    if context.tp_size > 1 or context.deterministic:
        return "ranks add up between its linears, or a product is batch-invariant"
    if getattr(act, "activation", None) != "silu" or not getattr(act, "gated", False):
        return "the activation is not a SiLU of a gate"
    for add in (chain.middle, chain.end):
        if add.before is not None:
            return "the product has a norm of its own"
        if type(add.norm).forward is not RMSNorm.forward:
            return f"{type(add.norm).__name__} is not a norm of a chain"
    shapes = [(each.out_features, each.in_features) for each in linears]
    return chain_declined(call.rows, shapes, call.dtype, call.gpu, form.bits)


def _chain_form(layer: Linear) -> ChainForm | None:
    """That of a weight which is packed, or will be; one that was loaded may have stayed plain."""
    # Asked first: where a method has no form there may be no weight.
    form = layer.method.chain_form(layer)
    if form is not None and layer.packed is None and not layer.weight.is_meta:
        return None
    return form


def chain_bits(layer: Linear) -> int:
    """Bits of the codes of a linear's weight in a chain; 0 if it has no form of one."""
    form = _chain_form(layer)
    return 0 if form is None else form.bits


def _chain_of(layer: Linear, chain: Chained) -> Chain:
    """The chain as the kernel is given it."""
    linears = (layer, *chain.linears)
    norms: list[Any] = [chain.middle.norm, chain.end.norm]
    weights: Any = tuple(each.packed for each in linears)
    biases = tuple(each.bias for each in linears)
    middle, end = (ChainNorm(norm.weight, norm.eps, norm.offset) for norm in norms)
    return Chain(weights, middle, end, biases)


def _is_gated(epilogue: Epilogue | None) -> bool:
    """Whether it is the activation of a gate that multiplies the other half."""
    return isinstance(epilogue, Activated) and bool(getattr(epilogue.module, "gated", False))


@dataclass(frozen=True, slots=True)
class _Part:
    """One part of a linear's output rows, of the whole model and on this rank."""

    total: int
    start: int
    size: int
    offset: int

    def in_elements(self, rows: int) -> _Part:
        """The part counted in elements of ``rows`` rows each; the last may be for fewer.

        Raises:
            IndivisibleError: the part, or this rank's share of it, begins or ends in an element.
        """
        ragged = self.size % rows and self.start + self.size != self.total
        if self.start % rows or self.offset % rows or ragged:
            raise IndivisibleError(
                f"rows {self.start} to {self.start + self.size} of a linear's {self.total} do not "
                f"begin and end at elements that hold {rows} rows each"
            )
        return _Part(-(-self.total // rows), self.start // rows, -(-self.size // rows),
                     self.offset // rows)  # fmt: skip


class Linear(MatrixModule):
    """A linear layer as this rank keeps it. Use the ``build_*`` functions.

    Its output rows are one or several parts (a merged layer); each part is split over the ranks, or
    kept whole by all. ``rowwise`` splits the input instead and sums the results over the ranks.

    Attributes:
        bias: ``[out_features]``, or None.
        dtype: of the weight as it was built, and of the activations.
        quantizable: whether the option ``quantization`` is for it too.
        takes_codes: whether codes of a checkpoint may be its weight; otherwise they are turned into
            numbers.
    """

    quantizable: ClassVar[bool] = True
    takes_codes: ClassVar[bool] = True
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        parts: Sequence[tuple[Hashable, int, int, int]],
        *,
        bias: bool,
        rowwise: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        method: LinearMethod | None = None,
    ) -> None:
        """Build for the current context.

        Args:
            in_features: size of the input, of the whole model.
            parts: ``(shard id, rows of the whole model, first row here, rows here)`` for each part.
            bias: whether there is a bias.
            rowwise: whether the input is split.
            dtype: of the parameters; the context's if None.
            device: of the parameters; the context's if None.
            method: the arithmetic; plain if None.
        """
        super().__init__()
        self.context = current_build_context()
        dtype = dtype or self.context.dtype
        device = device or self.context.device
        self._parts: dict[Hashable, _Part] = {}
        offset = 0
        for shard_id, total, start, size in parts:
            self._parts[shard_id] = _Part(total, start, size, offset)
            offset += size
        self.rowwise = rowwise
        self.in_features = in_features
        self.out_features = offset
        if rowwise:
            self.in_features = divide(in_features, self.context.tp_size, "in_features of a linear")
        self.input_width = self.in_features
        self.dtype = dtype or torch.get_default_dtype()
        self.method: LinearMethod = method or UnquantizedLinearMethod()
        self.method.create_weights(self, self.in_features, self.out_features, dtype, device)
        self._of_method = tuple(self._parameters)
        if not bias:
            self.register_parameter("bias", None)
        else:
            self.add_parameter("bias", torch.empty(self.out_features, dtype=dtype, device=device))

    def set_method(self, method: LinearMethod) -> None:
        """Take another arithmetic before anything is loaded."""
        device = self.get_parameter(self._of_method[0]).device
        for name in self._of_method:
            delattr(self, name)
        others = set(self._parameters)
        self.method = method
        method.create_weights(self, self.in_features, self.out_features, self.dtype, device)
        self._of_method = tuple(name for name in self._parameters if name not in others)

    @property
    def matrix_shape(self) -> torch.Size:
        """This rank's ``(out_features, in_features)`` of what is multiplied by at once."""
        return torch.Size((self.out_features, self.in_features))

    def pack_by(
        self, pack: Callable[..., PackedMatrix | None], weight: Tensor, *others: Tensor | None
    ) -> PackedMatrix | None:
        """Matrices that ``pack`` makes of ``weight [out_features, ...]`` and what goes with it.

        ``others`` have as many rows; ``pack`` gets some rows of each, or None for None.
        """
        return pack(weight, *others)

    def packed_sizes(self) -> Mapping[str, int]:
        """Bytes of what takes the place of each parameter, as the method says."""
        return self.method.packed_sizes(self)

    @property
    def num_parts(self) -> int:
        """Linears that this one is merged of, each of which the checkpoint has by itself."""
        return len(self._parts)

    @property
    def part_rows(self) -> Mapping[Hashable, int]:
        """This rank's rows of each part, by shard id."""
        return {shard_id: part.size for shard_id, part in self._parts.items()}

    def shard(self, tensor: Tensor, shard_id: Hashable = None) -> Mapping[Hashable, Tensor]:
        """This rank's share of a checkpoint's tensor ``[rows, inputs, ...]``, by part.

        The inputs may be counted in anything of which a rank has a whole number.

        Raises:
            ShapeMismatchError: it has another number of rows.
            ValueError: ``shard_id`` is none of this linear's.
        """
        if shard_id in self._fused:
            layout = self._fused[shard_id]
            pieces = self._split(tensor, layout, parts=self._parts, output_dim=0, own=True)
            return dict(zip(self._parts, pieces, strict=True))
        part = self._parts.get(shard_id)
        if part is None:
            raise ValueError(f"shard_id {shard_id!r} is not one of {list(self._parts)}")
        if tensor.shape[0] != part.total:
            shape = list(tensor.shape)
            raise ShapeMismatchError(f"has shape {shape}, the model wants {part.total} rows")
        tensor = tensor.narrow(0, part.start, part.size)
        if self.rowwise:
            tensor = tensor.chunk(self.context.tp_size, dim=1)[self.context.tp_rank]
        return {shard_id: tensor}

    def add_parameter(
        self,
        name: str,
        data: Tensor,
        *,
        output_dim: int | None = 0,
        input_dim: int | None = None,
        packed_dim: int | None = None,
        pack_factor: int = 1,
        group_size: int = 1,
        spread: Callable[[Tensor, int, int], Tensor] | None = None,
    ) -> None:
        """Register a parameter that loads by parts and that the ranks share out.

        A rank keeps its own output rows, or of a rowwise linear its own inputs. The arguments stay
        with the parameter as attributes of the same names.

        Args:
            name: the attribute that it becomes.
            data: of this rank's shape.
            output_dim: dimension of the output rows. None if they have no elements of their own, as
                of a scale for a whole tensor or an order of inputs: dimension 0 then counts the
                :attr:`num_parts`, and the checkpoint has a tensor of the other dimensions for each.
            input_dim: dimension of the inputs; None if every rank keeps all of them.
            packed_dim: ``output_dim`` or ``input_dim``, if elements stand for several numbers along
                it.
            pack_factor: how many, such as 8 for 4-bit numbers in int32.
            group_size: inputs that share an element, such as of scales.
            spread: called with a checkpoint's tensor and the sizes of what it stands for: output
                rows, and elements of each (1 without ``input_dim``). Returns a tensor of that.

        Raises:
            IndivisibleError: a part, or a rank's share, begins or ends inside an element.
            ValueError: ``data`` is of another size than they say.
        """
        packs = [pack_factor if dim == packed_dim else 1 for dim in (output_dim, input_dim)]
        if packed_dim is not None and packed_dim not in (output_dim, input_dim):
            raise ValueError(f"{name}: packed_dim {packed_dim} is neither output_dim nor input_dim")
        if output_dim is None:
            parts = {key: _Part(1, 0, 1, index) for index, key in enumerate(self._parts)}
        else:
            parts = {key: part.in_elements(packs[0]) for key, part in self._parts.items()}
        sizes = {output_dim or 0: sum(part.size for part in parts.values())}
        if input_dim is not None:
            inputs = group_size * packs[1]
            if self.rowwise and self.context.tp_size > 1 and self.in_features % inputs:
                raise IndivisibleError(
                    f"in_features of a linear ({self.in_features} of them on each of "
                    f"{self.context.tp_size} ranks) is not divisible by {inputs}, which share an "
                    f"element of {name}"
                )
            sizes[input_dim] = -(-self.in_features // inputs)
        for dim, size in sizes.items():
            if data.shape[dim] != size:
                raise ValueError(f"{name} has shape {list(data.shape)}; {size} in {dim} is right")
        param = nn.Parameter(data, requires_grad=False)
        row = data.numel() // max(sizes[output_dim or 0], 1)
        vars(param).update(
            output_dim=output_dim,
            input_dim=input_dim,
            packed_dim=packed_dim,
            pack_factor=pack_factor,
            group_size=group_size,
            spread=spread,
            parts=parts,
            shard_sizes={key: part.size * row for key, part in parts.items()},
        )
        if len(parts) > 1 and output_dim is not None:
            spliter = partial(self._split, parts=parts, output_dim=output_dim)
            param.weight_spliter = spliter  # type: ignore[attr-defined]
        set_weight_loader(param, self._load)
        self.register_parameter(name, param)

    def _load(self, param: nn.Parameter, tensor: Tensor, shard_id: Any = None) -> None:
        output_dim: int | None = param.output_dim  # type: ignore[attr-defined]
        parts: Mapping[Hashable, _Part] = param.parts  # type: ignore[attr-defined]
        if param.spread is not None:  # type: ignore[attr-defined]
            tensor = self._spread(param, tensor, shard_id, parts)
        if shard_id in self._fused:
            if output_dim is None:
                for key in parts:
                    self._load(param, tensor, key)
                return
            layout = self._fused[shard_id]
            pieces = self._split(tensor, layout, parts=parts, output_dim=output_dim, own=True)
            for mine, piece in zip(parts.values(), pieces, strict=True):
                self._put(param, mine, piece, own=True)
            return
        part = parts.get(shard_id)
        if part is None:
            raise ValueError(f"shard_id {shard_id!r} is not one of {list(parts)}")
        if output_dim is None:
            # A single number is stored with or without a dimension.
            tensor = tensor.reshape(1) if param.dim() == tensor.numel() == 1 else tensor[None]
        self._put(param, part, tensor)

    def _put(self, param: Any, part: _Part, tensor: Tensor, *, own: bool = False) -> None:
        """Copy a part's rows, those of the whole model or this rank's ``own``."""
        dim, shape, input_dim = param.output_dim or 0, list(param.shape), param.input_dim
        shape[dim] = part.size if own else part.total
        if not self.rowwise or self.context.tp_size == 1:
            input_dim = None
        if input_dim is not None:
            shape[input_dim] *= self.context.tp_size
        if list(tensor.shape) != shape:
            raise ShapeMismatchError(f"has shape {list(tensor.shape)}, the model wants {shape}")
        if not own:
            tensor = tensor.narrow(dim, part.start, part.size)
        if input_dim is not None:
            local = param.shape[input_dim]
            tensor = tensor.narrow(input_dim, self.context.tp_rank * local, local)
        copy = getattr(param, "copy_rows", None)
        copy_checked(param.narrow(dim, part.offset, part.size), tensor, copy)

    def _spread(
        self, param: Any, tensor: Tensor, shard_id: Any, parts: Mapping[Hashable, _Part]
    ) -> Tensor:
        among = [part for key, part in parts.items() if shard_id in self._fused or key == shard_id]
        width = 1
        if param.input_dim is not None:
            shares = self.context.tp_size if self.rowwise else 1
            width = -(-self.in_features * shares // param.group_size)
        tensor = param.spread(tensor, sum(part.total for part in among), width)
        return tensor if param.input_dim is not None else tensor.squeeze(1)

    @property
    def _fused(self) -> Mapping[Hashable, str]:
        """Shard ids of a checkpoint's fused tensor, and the layout that each stands for."""
        return {} if None in self._parts else {None: "default"}

    def _split(
        self,
        tensor: Tensor,
        layout: str = "default",
        *,
        parts: Mapping[Hashable, _Part],
        output_dim: int,
        own: bool = False,
    ) -> list[Tensor]:
        """A checkpoint's fused tensor as the parts that it was joined of.

        Each is of the whole model, or this rank's ``own`` rows, without reading the others.

        Raises:
            ShapeMismatchError: it has another number of rows.
            ValueError: a linear of this kind has no such layout.
        """
        sizes = [part.total for part in parts.values()]
        if layout != "default":
            raise ValueError(f"layout must be 'default', got {layout!r}")
        if tensor.dim() <= output_dim or tensor.shape[output_dim] != sum(sizes):
            raise ShapeMismatchError(
                f"has shape {list(tensor.shape)}, the model wants {sum(sizes)} rows"
            )
        pieces = tensor.split(sizes, output_dim)
        if not own:
            return list(pieces)
        each = zip(pieces, parts.values(), strict=True)
        return [piece.narrow(output_dim, part.start, part.size) for piece, part in each]

    @property
    def row_form(self) -> RowForm:
        """The form of rows that are quantised where they are made, if that is not declined."""
        return self.method.row_form(self)

    def partial(self, x: Tensor | CodedRows) -> Tensor:
        """This rank's part of the product, without the sum over the ranks and the bias."""
        return self.method.apply(self, x, None)

    def declined(self, epilogue: Epilogue, call: Call) -> str | None:
        """The reason why an epilogue is not fused in such a call; None if it is."""
        # What is before the product is before the sum over the ranks.
        before = isinstance(epilogue, Quantized)
        if self.rowwise and self.context.tp_size > 1 and not before:
            return self._declined_over_ranks(epilogue, call)
        return self.method.declined(self, epilogue, call)

    def _declined_over_ranks(self, epilogue: Epilogue, call: Call) -> str | None:
        """The same where the sum over the ranks comes first, whatever the method."""
        memory = self.context.rank_memory
        if memory is None or call.gpu is None or not isinstance(epilogue, AddNorm):
            return "the sum over the ranks comes before it"
        if self.context.deterministic:
            return _NEEDS_ALONE
        if epilogue.deferred:
            return "a sum over the ranks leaves no sums of squares"
        if epilogue.before is not None:
            return "the product has a norm of its own"
        if type(epilogue.norm).forward is not RMSNorm.forward:
            return f"{type(epilogue.norm).__name__} is not a norm of a sum over the ranks"
        shape = (call.rows, self.out_features, call.dtype, memory.size, memory.capacity)
        return None if fits_fused_sum(*shape) else "no kernel sums and norms rows of this size"

    def forward(
        self,
        x: Tensor | DeferredRMSNorm | CodedRows,
        epilogue: Epilogue | None = None,
        *operands: Any,
    ) -> Any:
        """``x [..., in_features of this rank]`` to ``[..., out_features of this rank]``.

        With an epilogue, its result; ``operands`` are those of :meth:`Epilogue.plain`. A caller
        with an epilogue has checked that the layer's parts have no forward hooks. x lacks a norm's
        division only where a :class:`~engine_core.nn.epilogue.Deferral` said so, and is quantised
        only where a :class:`~engine_core.nn.epilogue.Coding` did.
        """
        if epilogue is not None:
            call = Call.of(x)
            if self.declined(epilogue, call) is None:
                if self.rowwise and self.context.tp_size > 1:
                    return self._sum_add_norm(x, epilogue, *operands)
                return self.method.apply_with(self, x, epilogue, *operands)
            return epilogue.plain(self, x, *operands)
        if not self.rowwise or self.context.tp_size == 1:
            # Past Module.__getattr__, which takes half a microsecond.
            return self.method.apply(self, x, self._parameters["bias"])
        # The bias joins once, after the sum.
        out = all_reduce(self.method.apply(self, x, None), self.context)
        return out if self.bias is None else out + self.bias

    def _sum_add_norm(
        self, x: Any, epilogue: Any, residual: Tensor, may_overwrite: bool
    ) -> tuple[Tensor, Tensor]:
        """The norm of the residual and the ranks' sum, and what was normalised."""
        del may_overwrite
        norm = epilogue.norm
        given = (self.partial(x), self.context, self.bias, residual)
        return all_reduce_add_norm(*given, norm.weight, norm.eps, norm.offset)


class QKVLinear(Linear):
    """The merged projection to queries, keys and values.

    Besides "q", "k" and "v" its shard ids are those of a checkpoint's fused tensor: None for
    [all q | all k | all v], "hgd" for one that is interleaved by heads.
    """

    def __init__(
        self,
        in_features: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        **kwargs: Any,
    ) -> None:
        context = current_build_context()
        size, rank = context.tp_size, context.tp_rank
        q_heads = divide(num_q_heads, size, "number of query heads")
        kv_heads, kv_start = split_heads(num_kv_heads, context, "key and value")
        self.split_sizes = (
            q_heads * head_dim,
            kv_heads * head_dim,
            kv_heads * v_head_dim,
        )
        parts = [
            ("q", num_q_heads * head_dim, rank * self.split_sizes[0], self.split_sizes[0]),
            ("k", num_kv_heads * head_dim, kv_start * head_dim, self.split_sizes[1]),
            ("v", num_kv_heads * v_head_dim, kv_start * v_head_dim, self.split_sizes[2]),
        ]
        super().__init__(in_features, parts, **kwargs)
        self.head_dim = head_dim
        self.v_head_dim = v_head_dim
        self.num_q_heads = q_heads
        self.num_kv_heads = kv_heads
        self._group = num_q_heads // num_kv_heads

    def split_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[..., out]`` to views q ``[T, heads, D]``, k ``[T, kv, D]`` and v ``[T, kv, Dv]``."""
        if self.head_dim == self.v_head_dim:
            heads = x.view(-1, self.num_q_heads + 2 * self.num_kv_heads, self.head_dim)
            sizes = (self.num_q_heads, self.num_kv_heads, self.num_kv_heads)
            q, k, v = heads.split_with_sizes(sizes, dim=1)
            return q, k, v
        q, k, v = x.flatten(0, -2).split(self.split_sizes, dim=-1)
        return (
            q.unflatten(-1, (self.num_q_heads, self.head_dim)),
            k.unflatten(-1, (self.num_kv_heads, self.head_dim)),
            v.unflatten(-1, (self.num_kv_heads, self.v_head_dim)),
        )

    @property
    def _fused(self) -> Mapping[Hashable, str]:
        return {None: "default", "hgd": "hgd"}

    def _split(
        self,
        tensor: Tensor,
        layout: str = "default",
        *,
        parts: Mapping[Hashable, _Part],
        output_dim: int,
        own: bool = False,
    ) -> list[Tensor]:
        """A checkpoint's fused qkv tensor as q, k and v.

        Layout "default" is [all q | all k | all v]; "hgd" is, for each kv head, its query heads,
        then k, then v (GPT-NeoX, BLOOM and ChatGLM without multi-query).

        Raises:
            ShapeMismatchError: it has another number of rows, or an element rows of two heads.
        """
        pieces = super()._split(tensor, parts=parts, output_dim=output_dim, own=own)
        if layout == "default":
            return pieces
        if layout != "hgd" or self.head_dim != self.v_head_dim:
            raise ValueError(f"layout must be 'default' or 'hgd' with equal heads, got {layout!r}")
        num_heads = sum(part.total for part in self._parts.values()) // self.head_dim
        if tensor.shape[output_dim] % num_heads:
            raise ShapeMismatchError(
                f"has shape {list(tensor.shape)}, the model wants {num_heads} whole heads"
            )
        heads = tensor.unflatten(output_dim, (num_heads, -1)).unflatten(
            output_dim, (-1, self._group + 2)
        )
        pieces = list(heads.split([self._group, 1, 1], dim=output_dim + 1))
        if own:
            rows = tensor.shape[output_dim] // num_heads
            for index, part in enumerate(parts.values()):
                # Whole groups of heads, or some heads of one.
                groups, first = divmod(part.start // rows, pieces[index].shape[output_dim + 1])
                width = min(part.size // rows, pieces[index].shape[output_dim + 1])
                mine = pieces[index].narrow(output_dim, groups, part.size // rows // width)
                pieces[index] = mine.narrow(output_dim + 1, first, width)
        return [piece.flatten(output_dim, output_dim + 2) for piece in pieces]


def _colwise_part(shard_id: Hashable, rows: int) -> tuple[Hashable, int, int, int]:
    context = current_build_context()
    size = divide(rows, context.tp_size, "out_features of a linear")
    return shard_id, rows, context.tp_rank * size, size


class Placement(TypedDict, total=False):
    """The parameters' element type and device; the build context's where they are not given."""

    dtype: torch.dtype | None
    device: torch.device | None


def build_qkv_proj(
    in_features: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    bias: bool = False,
    **placement: Unpack[Placement],
) -> QKVLinear:
    """The merged query, key and value projection, split by heads; shard ids "q", "k", "v".

    Raises:
        ValueError: the heads cannot be shared evenly by the ranks.
    """
    return QKVLinear(
        in_features,
        num_q_heads,
        num_kv_heads,
        head_dim,
        v_head_dim or head_dim,
        bias=bias,
        **placement,
    )


def build_colwise_linear(
    in_features: int, out_features: int, bias: bool = False, **placement: Unpack[Placement]
) -> Linear:
    """A linear whose output is split over the ranks."""
    parts = [_colwise_part(None, out_features)]
    return Linear(in_features, parts, bias=bias, **placement)


def build_merged_colwise_linear(
    in_features: int,
    all_out_features: Sequence[int],
    bias: bool = False,
    **placement: Unpack[Placement],
) -> Linear:
    """Several linears of one input as one; each output is split. Shard ids 0, 1, ..."""
    parts = [_colwise_part(index, rows) for index, rows in enumerate(all_out_features)]
    return Linear(in_features, parts, bias=bias, **placement)


def build_rowwise_linear(
    in_features: int, out_features: int, bias: bool = False, **placement: Unpack[Placement]
) -> Linear:
    """A linear whose input is split over the ranks and whose output is summed over them."""
    parts = [(None, out_features, 0, out_features)]
    return Linear(in_features, parts, bias=bias, rowwise=True, **placement)


def build_replicated_linear(
    in_features: int, out_features: int, bias: bool = False, **placement: Unpack[Placement]
) -> Linear:
    """A linear that every rank keeps and computes as a whole, such as a router's."""
    parts = [(None, out_features, 0, out_features)]
    return Linear(in_features, parts, bias=bias, **placement)


# The merged gate and up projections of a gated MLP; shard ids 0 (gate) and 1 (up).
build_gateup_linear = build_merged_colwise_linear
build_o_proj = build_rowwise_linear
build_down_linear = build_rowwise_linear
