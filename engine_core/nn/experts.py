"""Mixtures of experts: a router, stacked experts, and perhaps an expert that all tokens share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine_core.errors import OptionError
from engine_core.kernels import (
    DeferredRMSNorm,
    Routing,
    are_few_tokens,
    choose_experts,
    fits_route,
    route,
    run_experts,
    run_experts_add,
    run_experts_add_norm,
)
from engine_core.nn.activation import build_gated_activation
from engine_core.nn.blocks import Branch, GatedMLP
from engine_core.nn.distributed import IndivisibleError, all_reduce, divide
from engine_core.nn.epilogue import AddNorm, Call, Divide, Epilogue
from engine_core.nn.linear import (
    Linear,
    LinearMethod,
    UnquantizedLinearMethod,
    build_replicated_linear,
)
from engine_core.nn.loading import ShapeMismatchError, empty_parameter
from engine_core.nn.module import Module
from engine_core.nn.norm import LayerNorm
from engine_core.nn.packing import PackedMatrix
from engine_core.step_context import AttentionMetadata, current_build_context


class StackedMatrix(list[PackedMatrix]):
    """The packed matrices of this rank's experts."""

    @property
    def nbytes(self) -> int:
        """Bytes that they take."""
        return sum(matrix.nbytes for matrix in self)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Refused: one matrix is multiplied by at a time."""
        raise TypeError("experts are multiplied by one at a time")

    def dense(self) -> Tensor:
        """The numbers again, one expert below the other."""
        return torch.cat([matrix.dense() for matrix in self])


class StackedLinear(Linear):
    """Linears of one shape, one for each expert, as one matrix with an expert below the other.

    So a linear's parameters, loaders and methods are an expert's too. Shard ids are
    ``(expert, part)``; ``(expert, None)`` for all parts of an expert, a part for a tensor of all
    experts ``[experts, rows, inputs]``, and None for one of all parts of all experts. It is
    :func:`engine_core.kernels.run_experts` that multiplies by them.

    Attributes:
        first_expert: the number of this rank's first expert.
        num_local: experts of this rank.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        rows: Sequence[int],
        *,
        rowwise: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        """``rows``: of each part of an expert. Ranks split them, or the inputs if ``rowwise``.

        If the build context splits by experts, each rank has some experts whole.
        """
        context = current_build_context()
        self.num_experts, self.part_ids = num_experts, range(len(rows))
        size, rank = context.tp_size, context.tp_rank
        by_experts = context.expert_parallel
        self.num_local = num_experts
        if by_experts:
            self.num_local = divide(num_experts, size, "number of experts")
        self.first_expert = rank * self.num_local if by_experts else 0
        odd = next((total for total in rows if total % size), None)
        if odd is not None and not (by_experts or rowwise or num_experts % size):
            raise IndivisibleError(
                f"intermediate size of an expert ({odd}) is not divisible by tensor_parallel_size "
                f"({size}); set enable_expert_parallel, with which each rank has whole experts"
            )
        parts: list[tuple[Hashable, int, int, int]] = []
        for expert in range(num_experts):
            here = self.first_expert <= expert < self.first_expert + self.num_local
            for part, total in enumerate(rows):
                split = not (by_experts or rowwise)
                share = divide(total, size, "intermediate size of an expert") if split else total
                first = rank * share if split else 0
                parts.append(((expert, part), total, first, share if here else 0))
        super().__init__(
            in_features,
            parts,
            bias=False,
            rowwise=rowwise and not by_experts,
            dtype=dtype,
            device=device,
        )
        self.input_width = None

    @property
    def matrix_shape(self) -> torch.Size:
        """Of one expert's matrix on this rank."""
        return torch.Size((self.out_features // self.num_local, self.in_features))

    def set_method(self, method: LinearMethod) -> None:
        """Take another arithmetic, of a kind that packs a matrix by itself."""
        if not isinstance(method, UnquantizedLinearMethod):
            raise OptionError(
                f"{type(method).__name__} does not pack matrices one by one, as experts are; leave "
                "the quantization out, or take a method that derives from UnquantizedLinearMethod"
            )
        super().set_method(method)

    def pack_by(
        self, pack: Callable[..., PackedMatrix | None], weight: Tensor, *others: Tensor | None
    ) -> PackedMatrix | None:
        """Each expert's matrix by itself; on a GPU all in one, by whose rows kernels find them."""
        if weight.is_cuda:
            return pack(weight, *others)
        experts = range(self.num_local)
        shares = [
            [None for _ in experts] if each is None else each.chunk(self.num_local)
            for each in (weight, *others)
        ]
        matrices = [pack(*share) for share in zip(*shares, strict=True)]
        packed = StackedMatrix(matrix for matrix in matrices if matrix is not None)
        return packed if len(packed) == len(matrices) else None

    @property
    def operand(self) -> Any:
        """The matrices as :func:`engine_core.kernels.run_experts` takes them."""
        if self.packed is None:
            return self.weight.view(self.num_local, *self.matrix_shape)
        return self.packed

    def add_parameter(self, name: str, data: Tensor, **kwargs: Any) -> None:
        """See :meth:`Linear.add_parameter`; the shard ids of several parts are added."""
        super().add_parameter(name, data, **kwargs)
        param: Any = self.get_parameter(name)
        sizes = dict(param.shard_sizes)
        for (expert, part), size in param.shard_sizes.items():
            for shared in (part, (expert, None)):
                sizes[shared] = sizes.get(shared, 0) + size
        param.shard_sizes = sizes
        param.stacks = True

    def _load(self, param: nn.Parameter, tensor: Tensor, shard_id: Any = None) -> None:
        if isinstance(shard_id, tuple) and self._is_elsewhere(shard_id[0]):
            # The rank that has it checks it; here the parameter may be packed by now.
            return
        if isinstance(shard_id, tuple) and shard_id[1] is not None:
            super()._load(param, tensor, shard_id)
        elif isinstance(shard_id, tuple):
            parts = len(self.part_ids)
            if tensor.dim() and tensor.shape[0] % parts:
                raise ShapeMismatchError(
                    f"has shape {list(tensor.shape)}, which is not {parts} equal parts"
                )
            pieces = tensor.chunk(parts) if tensor.dim() else [tensor] * parts
            for part, piece in enumerate(pieces):
                super()._load(param, piece, (shard_id[0], part))
        elif tensor.dim() == 0 or tensor.shape[0] != self.num_experts:
            raise ShapeMismatchError(
                f"has shape {list(tensor.shape)}, the model wants {self.num_experts} experts"
            )
        else:
            for expert, piece in enumerate(tensor.unbind()):
                self._load(param, piece, (expert, shard_id))

    def _is_elsewhere(self, expert: int) -> bool:
        here = self.first_expert <= expert < self.first_expert + self.num_local
        return not here and 0 <= expert < self.num_experts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: the experts that tokens chose are run together."""
        raise TypeError("experts are multiplied by where run_experts finds which tokens chose them")


class Experts(Module):
    """Gated MLPs of one shape, of which each token takes a few.

    A checkpoint's ``experts.3.gate_proj.weight`` is a shard of ``experts.gate_up_proj.weight``.
    """

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, activation: str = "silu"
    ) -> None:
        super().__init__()
        rows = (intermediate_size, intermediate_size)
        self.gate_up_proj = StackedLinear(num_experts, hidden_size, rows)
        self.down_proj = StackedLinear(num_experts, intermediate_size, (hidden_size,), rowwise=True)
        self.act = build_gated_activation(activation)
        self.deterministic = current_build_context().deterministic

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """``x [T, H]`` to this rank's part of the weighted sum, ``[T, H]``.

        ``ids`` and ``weights`` are those of :class:`Router`.
        """
        out: Tensor = self.run(x, ids, weights)
        return out

    def run(
        self,
        x: Tensor | DeferredRMSNorm,
        ids: Tensor,
        weights: Tensor,
        add: AddNorm | None = None,
        residual: Tensor | None = None,
    ) -> Any:
        """As :meth:`forward`, for a caller who knows that kernels take more, without hooks.

        x may lack a norm's division. With an epilogue the result is the epilogue's, of the sum and
        ``residual [T, H]``.
        """
        first = self.gate_up_proj.first_expert
        given: Any = (
            x,
            ids - first if first else ids,
            weights,
            self.gate_up_proj.operand,
            self.down_proj.operand,
            self.act.activation,
        )
        if add is None:
            return run_experts(*given, deterministic=self.deterministic)
        norm: Any = add.norm
        given += (residual, norm.weight, norm.eps)
        if add.deferred:
            return run_experts_add(*given, norm_offset=norm.offset)
        if isinstance(norm, LayerNorm):
            return run_experts_add_norm(*given, norm_bias=norm.bias, centred=True)
        return run_experts_add_norm(*given, norm_offset=norm.offset)


class Router(Linear):
    """The choice of experts by a linear, which every rank computes and nothing quantises.

    Attributes:
        routing: the rule.
        e_score_correction_bias: ``[experts]`` float32, added to the scores for the choice alone;
            None for none.
    """

    quantizable = takes_codes = False
    e_score_correction_bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        routing: Routing,
        *,
        bias: bool = False,
        correction_bias: bool = False,
        wide: bool = False,
    ) -> None:
        """``bias`` is the linear's; ``correction_bias`` is for the choice.

        With ``wide`` the linear computes in float32, whatever the model's dtype.

        Raises:
            ValueError: there are not so many experts, or no equal groups of them.
        """
        groups = routing.groups
        if num_experts % groups or not 1 <= routing.top_groups <= groups:
            raise ValueError(
                f"{num_experts} experts are not {groups} groups of which {routing.top_groups} can "
                "be chosen"
            )
        most = num_experts // groups * routing.top_groups
        if not 1 <= routing.top_k <= most:
            raise ValueError(f"a token cannot choose {routing.top_k} of {most} experts")
        if not 1 <= routing.group_scores <= num_experts // groups:
            raise ValueError(
                f"a group of {num_experts // groups} experts has no {routing.group_scores} scores"
            )
        dtype = torch.float32 if wide else None
        super().__init__(hidden_size, [(None, num_experts, 0, num_experts)], bias=bias, dtype=dtype)
        self.routing, self.wide = routing, wide
        self.register_parameter("e_score_correction_bias", None)
        if correction_bias:
            self.e_score_correction_bias = empty_parameter(num_experts, dtype=torch.float32)

    @property
    def is_plain(self) -> bool:
        """Whether :func:`engine_core.kernels.route` is what it computes."""
        # A linear of more rows, or of another arithmetic, may have another order of sums.
        plain = self.packed is None and type(self.method) is UnquantizedLinearMethod
        return plain and not self.context.deterministic

    def forward(  # type: ignore[override]
        self, x: Tensor | DeferredRMSNorm, slots: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``x [T, H]`` to ids ``[T, top_k]`` int32 and weights ``[T, top_k]`` float32.

        ``slots [T]``: where it is negative, a token is padding and its ids are -1. x lacks a norm's
        division only where :attr:`is_plain` holds.
        """
        if self.is_plain:
            bias = self.e_score_correction_bias
            return route(x, self.weight, self.bias, self.routing, bias, slots)
        assert isinstance(x, Tensor), "a router of another arithmetic takes a divided norm"
        logits = super().forward(x.float() if self.wide else x)
        return choose_experts(logits, self.routing, self.e_score_correction_bias, slots)


@dataclass(frozen=True, slots=True, eq=False)
class Chosen(Epilogue):
    """The choice of experts, which follows a router's product; asked of a :class:`SparseMoE`."""

    def plain(self, layer: Any, x: Tensor, *operands: Any) -> tuple[Tensor, Tensor]:
        """Ids and weights, by the router."""
        chosen: tuple[Tensor, Tensor] = layer.gate(x, *operands)
        return chosen

    def __str__(self) -> str:
        return "choice of experts"


class SparseMoE(Branch):
    """A feed-forward block of experts: a router's choice of them, and perhaps a shared one.

    Ranks split each expert or, if the build context says so, have whole experts. Either way one sum
    over the ranks follows.

    It answers for its linears itself (:meth:`declined`): for few tokens on a GPU its kernels take a
    norm without its division, and end with the residual and the next one.

    Attributes:
        takes_metadata: that ``forward`` wants the step's metadata too.
        dtype: of the activations.
    """

    takes_metadata = True

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        activation: str = "silu",
        *,
        scoring: Literal["softmax", "sigmoid"] = "softmax",
        renormalize: bool = False,
        groups: int = 1,
        top_groups: int = 1,
        group_scores: int = 1,
        scale: float = 1.0,
        router_bias: bool = False,
        correction_bias: bool = False,
        wide_router: bool = False,
        shared_size: int | None = None,
        shared_gate: bool = False,
    ) -> None:
        """Sizes are the whole model's.

        Args:
            hidden_size: of the input.
            intermediate_size: of one expert.
            num_experts: of which each token takes ``top_k``.
            top_k: see ``num_experts``.
            activation: of the gates.
            scoring: as of :class:`~engine_core.kernels.Routing`, and so the next five.
            renormalize: whether a token's weights are made to sum up to 1.
            groups: groups of experts.
            top_groups: groups that are chosen from.
            group_scores: best scores that make up a group's.
            scale: of the weights.
            router_bias: whether the router's linear has a bias.
            correction_bias: whether a bias ``gate.e_score_correction_bias`` is added to the scores
                for the choice.
            wide_router: whether the router's linear computes in float32, whatever the model's
                dtype, as DeepSeek's models do. In bfloat16 some 4% of their tokens would take
                another expert.
            shared_size: intermediate size of the expert that all tokens take; None for none.
            shared_gate: whether the sigmoid of a linear multiplies that one's result.
        """
        super().__init__()
        self.context = current_build_context()
        self.input_width = hidden_size
        self._num_experts, self._top_k = num_experts, top_k
        routing = Routing(top_k, scoring, renormalize, groups, top_groups, group_scores, scale)
        self.gate = Router(
            hidden_size,
            num_experts,
            routing,
            bias=router_bias,
            correction_bias=correction_bias,
            wide=wide_router,
        )
        self.experts = Experts(num_experts, hidden_size, intermediate_size, activation)
        self.dtype = self.experts.gate_up_proj.dtype
        self.shared_expert = self.shared_expert_gate = None
        if shared_size is not None:
            self.shared_expert = GatedMLP(hidden_size, shared_size, activation)
            if shared_gate:
                self.shared_expert_gate = build_replicated_linear(hidden_size, 1)

    def ends(self) -> tuple[SparseMoE, Chosen, SparseMoE]:
        """The block itself, which answers for the router, and for the experts."""
        if self._epilogue is None:
            self._epilogue = Chosen()
        return self, self._epilogue, self

    def declined(self, epilogue: Epilogue, call: Call) -> str | None:
        """The reason why an epilogue is not fused in such a call; None if it is."""
        if call.gpu is None:
            return "no kernel on this device fuses it"
        if self.context.deterministic:
            return "in batch-invariant mode every number of rows has the same kernels"
        if not isinstance(epilogue, Chosen | Divide | AddNorm):
            return f"no kernel does {epilogue}"
        if isinstance(epilogue, Chosen | Divide):
            router = self.gate
            if not router.is_plain:
                return "the router has an arithmetic of its own"
            if not fits_route(call.rows, router.weight, router.routing, call.gpu):
                return "for so many rows the router is a linear, and the choice a kernel"
            if isinstance(epilogue, Chosen):
                return None
        if self.shared_expert is not None:
            return "a shared expert has linears of its own"
        projections = (self.experts.gate_up_proj, self.experts.down_proj)
        plain = UnquantizedLinearMethod
        numbers = all(each.packed is None and type(each.method) is plain for each in projections)
        # An expert is split by rows or columns; by experts a rank has some.
        few = are_few_tokens(call.rows, self._top_k, projections[0].num_local, call.gpu)
        if isinstance(epilogue, AddNorm):
            return self._declined_norm(epilogue, numbers and few)
        if call.dtype is not torch.bfloat16:
            return "without the division float16 could overflow"
        return None if numbers and few else "the experts of so many rows, or of codes, are grouped"

    def _declined_norm(self, epilogue: AddNorm, few: bool) -> str | None:
        if self.context.tp_size > 1:
            return "the sum over the ranks comes before it"
        if epilogue.before is not None:
            return "the sum of experts has a norm of its own"
        if (reason := epilogue.norm_declined()) is not None:
            return reason
        if epilogue.deferred:
            return None if few else "grouped experts end with the whole norm"
        return "for so few rows the norm is left to divide, or alone" if few else None

    def forward(
        self,
        x: Tensor | DeferredRMSNorm,
        attn_metadata: AttentionMetadata | None = None,
        *then: Any,
    ) -> Any:
        """``[..., H]`` to ``[..., H]``; with the step's metadata, padding takes no experts."""
        values = x if isinstance(x, Tensor) else x.values
        rows = values.flatten(0, -2)
        flat = rows if isinstance(x, Tensor) else replace(x, values=rows)
        groups = () if attn_metadata is None else attn_metadata.groups
        ids, weights = self.gate(flat, groups[0].slot_mapping if groups else None)
        if then:
            add, residual, _ = then
            if self.declined(add, Call.of(values)) is None:
                given = (flat, ids, weights, add, residual.flatten(0, -2))
                normed, total = self.experts.run(*given)
                return _like(normed, values), total.view(values.shape)
        experts = self.experts if isinstance(flat, Tensor) else self.experts.run
        out = experts(flat, ids, weights)
        if self.shared_expert is None:
            out = all_reduce(out, self.context)
        else:
            out = self._with_shared(flat, out)
        out = out.view(values.shape)
        return then[0].follow(out, then[1]) if then else out

    def _with_shared(self, flat: Any, out: Tensor) -> Any:
        """The sum of experts, over the ranks, with the shared expert's result."""
        shared_expert: Any = self.shared_expert
        watched = self.watched
        # One sum over the ranks for both; a watched part gives its whole result.
        shared = shared_expert(flat) if watched else shared_expert.partial(flat)
        if self.shared_expert_gate is not None:
            shared = shared * self.shared_expert_gate(flat).sigmoid()
        if watched:
            return all_reduce(out, self.context) + shared
        return all_reduce(out + shared, self.context)


def _like(x: Tensor | DeferredRMSNorm, values: Tensor) -> Tensor | DeferredRMSNorm:
    """x in the shape of ``values``."""
    if isinstance(x, Tensor):
        return x.view(values.shape)
    return replace(x, values=x.values.view(values.shape))
