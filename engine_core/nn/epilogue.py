"""The operations that may follow a linear's product, as data.

A block asks a linear for its product and an epilogue at once: ``layer(x, epilogue, *operands)``. If
the linear's method fuses it, it does; otherwise :meth:`Epilogue.plain` composes it of the linear
and of the modules that the epilogue names, which is right for every method, norm, rank count and
device. The order is always: product, sum over the ranks, bias, residual, norm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from engine_core.kernels import (
    GPU,
    CodedRows,
    DeferredRMSNorm,
    RowForm,
    gpu_of,
    rotary_store,
    rotary_store_is_fused,
    store_kv,
)
from engine_core.nn.attention import KVCacheLayer
from engine_core.nn.norm import LayerNorm, RMSNorm

if TYPE_CHECKING:
    from engine_core.nn.linear import Linear

CosSin = tuple[Tensor, Tensor]


class Call(NamedTuple):
    """The part of a linear's call that may decide what is fused.

    Attributes:
        rows: tokens.
        dtype: of x.
        gpu: where it runs; None on a CPU and on other vendors' GPUs.
    """

    rows: int
    dtype: torch.dtype
    gpu: GPU | None

    @classmethod
    def of(cls, x: Tensor | DeferredRMSNorm | CodedRows) -> Call:
        """The call with ``x [..., K]``."""
        if isinstance(x, DeferredRMSNorm):
            x = x.values
        return cls(x.numel() // x.shape[-1], x.dtype, gpu_of(x.device))


class Declines(Protocol):
    """A linear, or a block of several, which epilogues may be part of."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations."""

    def declined(self, epilogue: Epilogue, call: Call) -> str | None:
        """The reason why an epilogue is not fused in such a call; None if it is."""


class Epilogue(ABC):
    """Something that follows a linear's product. Made once for a linear, not in every step."""

    @abstractmethod
    def plain(self, layer: Linear, x: Any, *operands: Any) -> Any:
        """The result of ``layer(x)`` and the epilogue, composed of plain operations."""

    def __str__(self) -> str:
        return type(self).__name__


@dataclass(frozen=True, slots=True, eq=False)
class Activated(Epilogue):
    """An activation; no operands.

    Attributes:
        module: computes it from the product. Methods fuse it by its attributes ``activation`` and
            ``gated``, where it has them.
        taker: the linear in whose form the rows are quantised; None for numbers. A method that
            fuses the activation may give numbers too.
    """

    module: nn.Module
    taker: Linear | None = None

    def plain(self, layer: Linear, x: Tensor | DeferredRMSNorm | CodedRows) -> Tensor | CodedRows:
        """``[..., K]`` to the activation of ``[..., N]``."""
        product, module = layer(x), cast("Any", self.module)
        out: Tensor | CodedRows
        out = module(product) if self.taker is None else module.codes(product, self.taker.row_form)
        return out

    @property
    def makes_codes(self) -> bool:
        """Whether one launch can quantise the rows, too."""
        return hasattr(self.module, "codes")

    def __str__(self) -> str:
        return f"activation {type(self.module).__name__}"


@dataclass(frozen=True, slots=True, eq=False)
class AddNorm(Epilogue):
    """The residual's addition, and the norm of the sum.

    Operands: the residual ``[..., N]``, and whether the sum may take its place. The result is the
    normalised sum and the sum.

    Attributes:
        norm: takes ``(x, residual)`` as :class:`RMSNorm` does.
        before: normalises the product before it is added; None for no such norm.
        deferred: whether the norm's division is left to the next linear: the first result is a
            :class:`DeferredRMSNorm`. Asked for only where two linears agreed on it.
        taker: the linear in whose form the normalised rows are quantised; None for numbers. A
            method that fuses the norm may give numbers too.
    """

    norm: nn.Module
    before: nn.Module | None = None
    deferred: bool = False
    taker: Linear | None = None

    @property
    def form(self) -> RowForm | None:
        """The form of the normalised rows; None for numbers."""
        return None if self.taker is None else self.taker.row_form

    @property
    def makes_codes(self) -> bool:
        """Whether one launch can quantise the rows, too."""
        return type(self.norm).forward in (RMSNorm.forward, LayerNorm.forward)

    def norm_declined(self) -> str | None:
        """The reason why no kernel of a product ends with this norm; None if some may."""
        if not self.makes_codes:
            return f"{type(self.norm).__name__} is not a norm of a kernel"
        if self.deferred and type(self.norm).forward is not RMSNorm.forward:
            return "LayerNorm takes the mean away, which no later linear makes up for"
        return None

    def plain(
        self, layer: Linear, x: Tensor | CodedRows, residual: Tensor, may_overwrite: bool
    ) -> tuple[Tensor | CodedRows, Tensor]:
        """The norm of ``residual + layer(x)``, and that sum."""
        del may_overwrite
        return self.follow(layer(x), residual)

    def follow(self, product: Tensor, residual: Tensor) -> tuple[Tensor | CodedRows, Tensor]:
        """The norm of ``residual + product``, and that sum."""
        if self.before is not None:
            product = self.before(product)
        form, norm = self.form, cast("Any", self.norm)
        coded = form is not None
        normed, total = norm.codes(product, residual, form) if coded else norm(product, residual)
        return normed, total

    def __str__(self) -> str:
        before = "norm, " if self.before is not None else ""
        return f"{before}residual and {type(self.norm).__name__}"


@dataclass(frozen=True, slots=True, eq=False)
class RotateStore(Epilogue):
    """Norms, rotation and storing of queries, keys and values before attention.

    Operands: cos and sin, or None for no rotation; the cache; ``slot_mapping [T]``. The result is
    the queries ``[T, heads, D]``; keys and values are stored.

    Attributes:
        rotate: rotates q and k.
        interleaved: how dimensions pair in the rotation.
        q_norm: normalises each head of the queries; None for no norm, as for ``k_norm``.
        k_norm: the same for the keys.
        attend: the attention that is given the queries; None for one without scales of its own.
    """

    rotate: nn.Module
    interleaved: bool
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    attend: nn.Module | None = None

    @property
    def kv_scales(self) -> tuple[float, float] | None:
        """The scales of all keys and values that a checkpoint has; None for none."""
        scales: tuple[float, float] | None = getattr(self.attend, "kv_scales", None)
        return scales

    @property
    def norms(self) -> dict[str, Any]:
        """The norms as kernels take them; empty for none."""
        q, k = self.q_norm, self.k_norm
        if q is None or k is None:
            return {}
        return {"q_weight": q.weight, "k_weight": k.weight, "eps": q.eps, "offset": q.offset}

    def plain(
        self,
        layer: Any,
        x: Tensor | DeferredRMSNorm | CodedRows,
        cos_sin: CosSin | None,
        cache: KVCacheLayer,
        slot_mapping: Tensor,
    ) -> Tensor:
        """``x [1, T, K]`` to the queries, by ``layer.split_qkv``."""
        return self.of_product(layer, layer(x), cos_sin, cache, slot_mapping)

    def of_product(
        self,
        layer: Any,
        product: Tensor,
        cos_sin: CosSin | None,
        cache: KVCacheLayer,
        slot_mapping: Tensor,
    ) -> Tensor:
        """The same of what the layer gave, ``[1, T, N]``."""
        q: Tensor
        q, k, v = layer.split_qkv(product)
        if cos_sin is None or not rotary_store_is_fused(q):
            q, k = self._by_modules(q, k, cos_sin)
            store_kv(k, v, *cache[:2], slot_mapping, self.kv_scales)
            return q
        rotary_store(
            q,
            k,
            v,
            *cos_sin,
            *cache[:2],
            slot_mapping,
            **self.norms,
            interleaved=self.interleaved,
            kv_scales=self.kv_scales,
        )
        return q

    def watched(
        self, layer: Any, x: Tensor | DeferredRMSNorm | CodedRows, cos_sin: CosSin | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, not stored, by the modules alone, whose forward hooks are then run."""
        q, k, v = layer.split_qkv(layer(x))
        return *self._by_modules(q, k, cos_sin), v

    def _by_modules(self, q: Tensor, k: Tensor, cos_sin: CosSin | None) -> tuple[Tensor, Tensor]:
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos_sin is not None:
            q, k = self.rotate(q, k, *cos_sin)
        return q, k

    def __str__(self) -> str:
        return "rotation and storing" if self.q_norm is None else "norms, rotation and storing"


@dataclass(frozen=True, slots=True, eq=False)
class Chained(Epilogue):
    """All that follows an attention's projection back until the next attention's projection.

    Operands: the residual ``[1, T, H]``. The result is the product ``[1, T, N]`` of ``following``,
    which is not rotated yet, and the residual beside it. Behind the last attention it is the final
    norm's result ``[1, T, H]``, and the sum that it normalised.

    Attributes:
        middle: the residual's addition, and the norm before the feed-forward.
        first: the feed-forward's first linear.
        activated: its activation.
        last: the feed-forward's last linear.
        end: the residual's addition, and the norm of the next layer, or the final one.
        following: the next layer's linear to queries, keys and values; None behind the last.
    """

    middle: AddNorm
    first: Linear
    activated: Activated
    last: Linear
    end: AddNorm
    following: Linear | None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linears in their order."""
        linears = (self.first, self.last)
        return linears if self.following is None else (*linears, self.following)

    def plain(self, layer: Linear, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The linears one by one."""
        normed, total = self.middle.plain(layer, x, residual, False)
        given = cast("Tensor", self.activated.plain(self.first, normed))
        normed, total = self.end.plain(self.last, given, total, False)
        out = normed if self.following is None else self.following(normed)
        return cast("Tensor", out), total

    def __str__(self) -> str:
        if self.following is None:
            return "feed-forward and norms"
        return "feed-forward, norms and the next queries, keys and values"


@dataclass(frozen=True, slots=True, eq=False)
class Divide(Epilogue):
    """The division that the norm before a linear left to it; its x is a :class:`DeferredRMSNorm`.

    Attributes:
        then: the linear's own epilogue, which follows the division.
    """

    then: Epilogue

    def plain(self, layer: Linear, x: DeferredRMSNorm, *operands: Any) -> Any:
        """It has no plain form: a linear that declines it is given a divided norm."""
        raise TypeError(f"{type(layer.method).__name__} takes no norm whose division was left out")

    def __str__(self) -> str:
        return "the division of the norm before"


@dataclass(frozen=True, slots=True, eq=False)
class Quantized(Epilogue):
    """The product of rows that were quantised where they were made; x is :class:`CodedRows`.

    Attributes:
        then: the linear's own epilogue; None for none, or one that makes no difference.
    """

    then: Epilogue | None

    def plain(self, layer: Linear, x: CodedRows, *operands: Any) -> Any:
        """It has no plain form: a linear that declines it is given numbers."""
        raise TypeError(f"{type(layer.method).__name__} takes no rows that are quantised already")

    def __str__(self) -> str:
        return "rows quantised before it"


@dataclass(frozen=True, slots=True)
class Coding:
    """An operation that makes whole rows, and the linear that it may quantise them for.

    Attributes:
        making: the operation, an epilogue of the linear before, with that ``taker``.
        after: the linear, or experts, which take none.
        taking: that one's epilogue.
    """

    making: Any
    after: Declines
    taking: Quantized
    # Asked in every step of every layer: 7 us a question, and 0.5 to find the answer again.
    _answers: dict[Call, str | None] = field(default_factory=dict, repr=False)

    @classmethod
    def between(cls, making: Activated | AddNorm, after: Declines, then: Epilogue | None) -> Coding:
        """Of an operation and the linear after it, which has an epilogue of its own."""
        return cls(replace(making, taker=cast("Linear", after)), after, Quantized(then))

    def declined(self, call: Call) -> str | None:
        """The reason why the rows of such a call stay numbers; None if they are quantised."""
        if call not in self._answers:
            answer: str | None = f"no kernel of {self.making} quantises"
            if self.making.makes_codes:
                answer = self.after.declined(self.taking, call)
            self._answers[call] = answer
        return self._answers[call]


@dataclass(frozen=True, slots=True)
class Deferral:
    """Two neighbouring linears, of which the second may make up for the division between them.

    Attributes:
        before: the linear, or the experts, that add the residual.
        leaving: its epilogue without the division.
        after: the linear, or the experts, that take the norm's result.
        making_up: that one's epilogue after the division.
    """

    before: Declines
    leaving: AddNorm
    after: Declines
    making_up: Divide

    def declined(self, call: Call) -> str | None:
        """The reason why one of the two declines such a call; None if neither does."""
        return self.before.declined(self.leaving, call) or self.after.declined(self.making_up, call)
