"""The blocks that most decoders are made of. They ask their linears for epilogues.

See :mod:`engine_core.nn.epilogue`. A linear's method decides which of them it fuses.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, TypeGuard
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from engine_core.kernels import GPU, CodedRows, DeferredRMSNorm, chains_run_on, gpu_of
from engine_core.nn.activation import build_activation, build_gated_activation
from engine_core.nn.attention import Attention, KVCacheLayer
from engine_core.nn.epilogue import (
    Activated,
    AddNorm,
    Call,
    Chained,
    Coding,
    CosSin,
    Declines,
    Deferral,
    Divide,
    Epilogue,
    RotateStore,
)
from engine_core.nn.linear import (
    Linear,
    build_colwise_linear,
    build_down_linear,
    build_gateup_linear,
    build_o_proj,
    build_qkv_proj,
    chain_bits,
)
from engine_core.nn.module import Module
from engine_core.nn.norm import RMSNorm
from engine_core.nn.rotary import ApplyRotaryEmb
from engine_core.step_context import AttentionMetadata, current_build_context


class Branch(Module):
    """An attention or feed-forward block between a first and a last linear.

    Its ``forward`` takes, after its own arguments, ``*then``: an epilogue of the last linear and
    the epilogue's operands, whose result it then returns. A subclass whose ``forward`` has no
    ``*then`` is run without, and gets numbers: never a norm without its division, or codes.
    """

    # Of the first linear; made when it is first asked for: a subclass may have parts of its own.
    _epilogue: Any = None
    # Whether the first linear may fuse it, as far as is known.
    _asks = True

    def ends(self) -> tuple[Declines, Epilogue, Declines]:
        """The first linear, its epilogue, and the last linear."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its linears are")

    def settle(self, gpu: GPU | None) -> None:
        """Ask once, for the device that the loaded weights are on, whether anything is fused."""
        first, epilogue, _ = self.ends()
        self._asks = _ever_fuses(first, epilogue, gpu)


class SelfAttention(Branch):
    """Project to q, k, v; normalise q and k if wanted; rotate; store; attend; project back.

    Its linears are ``qkv_proj`` and ``o_proj``; its norms, if wanted, ``q_norm`` and ``k_norm``.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm_eps: float | None = None,
        qk_norm_offset: float = 0.0,
        interleaved_rope: bool = False,
        alibi: bool = False,
        sliding_window: int | None = None,
        scale: float | None = None,
        logit_softcapping: float | None = None,
    ) -> None:
        """Head counts are the whole model's.

        ``qk_norm_eps`` adds an RMSNorm to q and k heads, with ``qk_norm_offset`` as its offset;
        ``scale`` and ``logit_softcapping`` are as :class:`Attention` takes them.
        """
        super().__init__()
        self.qkv_proj = build_qkv_proj(
            hidden_size, num_heads, num_kv_heads, head_dim, bias=qkv_bias
        )
        self.o_proj = build_o_proj(num_heads * head_dim, hidden_size, bias=o_bias)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm_eps, offset=qk_norm_offset)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps, offset=qk_norm_offset)
        self.rotate = ApplyRotaryEmb(interleaved_rope)
        self.attend = Attention(
            self.qkv_proj.num_q_heads,
            head_dim,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            scale=scale,
            alibi=alibi,
            sliding_window=sliding_window,
            logit_softcapping=logit_softcapping,
        )

    def ends(self) -> tuple[Linear, RotateStore, Linear]:
        """q, k and v's projection, which rotates and stores, and the one back."""
        if self._epilogue is None:
            self._epilogue = RotateStore(
                self.rotate, self.rotate.interleaved, self.q_norm, self.k_norm, self.attend
            )
        return self.qkv_proj, self._epilogue, self.o_proj

    def forward(
        self,
        x: Tensor | DeferredRMSNorm | CodedRows,
        cos_sin: CosSin | None,
        cache: KVCacheLayer,
        attn_metadata: AttentionMetadata,
        *then: Any,
    ) -> Any:
        """``x [1, T, H]`` to ``[1, T, H]``; ``cos_sin`` None for no rotation."""
        first, epilogue, last = self.ends()
        if self.watched:
            q, k, v = epilogue.watched(first, x, cos_sin)
            heads = self.attend(q, k, v, *cache[:2], attn_metadata)
        else:
            q = self.queries(x, cos_sin, cache, attn_metadata)
            heads = self.attend.attend(q, *cache[:2], attn_metadata)
        return last(heads.flatten(1).unsqueeze(0), *then)

    def queries(
        self,
        x: Tensor | DeferredRMSNorm | CodedRows,
        cos_sin: CosSin | None,
        cache: KVCacheLayer,
        attn_metadata: AttentionMetadata,
    ) -> Tensor:
        """``x [1, T, H]`` to ``[T, heads, D]``; keys and values are stored. Without hooks."""
        first, epilogue, _ = self.ends()
        slots = attn_metadata.groups[self.attend.group_id].slot_mapping
        q: Tensor
        if self._asks:
            q = first(x, epilogue, cos_sin, cache, slots)
        else:
            q = epilogue.plain(first, x, cos_sin, cache, slots)
        return q

    def queries_of(
        self,
        product: Tensor,
        cos_sin: CosSin | None,
        cache: KVCacheLayer,
        attn_metadata: AttentionMetadata,
    ) -> Tensor:
        """As :meth:`queries`, of what the first linear gave, ``[1, T, N]``."""
        first, epilogue, _ = self.ends()
        slots = attn_metadata.groups[self.attend.group_id].slot_mapping
        return epilogue.of_product(first, product, cos_sin, cache, slots)


class FeedForward(Branch):
    """A linear, an activation, and a linear back; see :class:`GatedMLP` and :class:`MLP`.

    Attributes:
        act: the activation.
        coding: how it quantises its rows for the last linear; None if it never does.
    """

    act: nn.Module
    coding: Coding | None = None

    def ends(self) -> tuple[Linear, Activated, Linear]:
        """The first linear, its activation, and the last linear."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its linears are")

    def settle(self, gpu: GPU | None) -> None:
        """Ask once whether the activation is fused with the linear before or the one after."""
        super().settle(gpu)
        _, epilogue, last = self.ends()
        coding = Coding.between(epilogue, last, None)
        refusal = _first_refusal(coding.declined, last.dtype, gpu)
        self.coding = None if refusal else coding

    def forward(self, x: Tensor | DeferredRMSNorm | CodedRows, *then: Any) -> Any:
        """``[1, T, H]`` to ``[1, T, H]``."""
        if self.watched:
            first, epilogue, last = self.ends()
            return last(epilogue.plain(first, x), *then)
        return self.ends()[2](self._activated(x), *then)

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of the result, ``[..., H]``, for a caller that adds up the ranks'.

        Without forward hooks, and without the last linear's bias.
        """
        return self.ends()[2].partial(self._activated(x))

    def _activated(self, x: Tensor | DeferredRMSNorm | CodedRows) -> Any:
        """The first linear's activated product, perhaps quantised for the last one."""
        first, epilogue, _ = self.ends()
        coding = self.coding
        if coding is not None and coding.declined(Call.of(x)) is None:
            epilogue = coding.making
        return first(x, epilogue) if self._asks else epilogue.plain(first, x)

    def _between(self, first: Linear, last: Linear) -> tuple[Linear, Activated, Linear]:
        if self._epilogue is None:
            self._epilogue = Activated(self.act)
        return first, self._epilogue, last


class GatedMLP(FeedForward):
    """``down(act(gate(x)) * up(x))``; its linears are ``gate_up_proj`` and ``down_proj``."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.gate_up_proj = build_gateup_linear(
            hidden_size, [intermediate_size, intermediate_size], bias=bias
        )
        self.down_proj = build_down_linear(intermediate_size, hidden_size, bias=bias)
        self.act = build_gated_activation(activation)

    def ends(self) -> tuple[Linear, Activated, Linear]:
        """The gate's and up's linear, which is activated, and down's."""
        return self._between(self.gate_up_proj, self.down_proj)


class MLP(FeedForward):
    """``down(act(up(x)))``; its linears are ``up_proj`` and ``down_proj``."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.up_proj = build_colwise_linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = build_down_linear(intermediate_size, hidden_size, bias=bias)
        self.act = build_activation(activation)

    def ends(self) -> tuple[Linear, Activated, Linear]:
        """The linear up, which is activated, and the one down."""
        return self._between(self.up_proj, self.down_proj)


@dataclass(frozen=True, slots=True)
class Attended:
    """The output of a :class:`DecoderLayer` whose successor computes the rest of it.

    One operation is that, and the successor's queries, keys and values. A last layer itself does
    the rest, with the final norm.

    Attributes:
        heads: the attention's, ``[1, T, heads]``.
        project: the layer's projection back.
        chained: what follows it, up to the successor's projection, or the final norm.
    """

    heads: Tensor
    project: Linear
    chained: Chained

    def finish(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The product of the successor's first linear, or the norm, and the residual beside it."""
        out, total = self.project(self.heads, self.chained, residual)
        return out, total


@dataclass(frozen=True, slots=True)
class PreNormed:
    """The output of a :class:`DecoderLayer` whose successor's input norm is applied already.

    Of a last layer the final norm is, with its division.

    Attributes:
        values: ``[1, T, H]``, perhaps without the norm's division, or quantised.
    """

    values: Tensor | DeferredRMSNorm | CodedRows


class DecoderLayer(Module):
    """A pre-norm decoder layer: attention, then feed-forward, each added to the residual.

    The additions and norms are epilogues of the linears before them. Where two neighbouring linears
    agreed on it, a norm's division is left to the second: see :func:`agree`.

    Attributes:
        chained: all that follows the attention until the next layer's, or to the final norm, where
            the linears do that in one operation for some numbers of rows; None where they never do.
        may_chain: whether that is wanted: its programs wait for one another, so that they need all
            multiprocessors of a GPU to themselves.
    """

    def __init__(
        self,
        self_attn: nn.Module,
        mlp: nn.Module,
        norm: Callable[[], nn.Module],
        *,
        sandwich: bool = False,
        residual_after_norm: bool = False,
    ) -> None:
        """``norm`` makes each norm; those before a branch take ``(x, residual)`` as RMSNorm does.

        Args:
            self_attn: takes ``(x, cos_sin, cache, attn_metadata)``.
            mlp: takes ``x``; if its ``takes_metadata`` is true, ``(x, attn_metadata)``.
            norm: makes a norm.
            sandwich: whether a branch is normalised after it too, before it is added (Gemma 2).
                Then ``post_attention_layernorm`` and ``post_feedforward_layernorm`` do that, and
                ``pre_feedforward_layernorm`` stands before the feed-forward.
            residual_after_norm: whether a branch is added to the output of the norm before it, not
                to that norm's input (BLOOM has both).
        """
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self._mlp_takes_metadata: bool = getattr(mlp, "takes_metadata", False)
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        if sandwich:
            self.pre_feedforward_layernorm = norm()
            self.post_feedforward_layernorm = norm()
        self.sandwich = sandwich
        self.residual_after_norm = residual_after_norm
        self.deterministic = current_build_context().deterministic
        # The layer after this one, in a tuple, which keeps it from being a part of this one.
        self._next: tuple[DecoderLayer, ...] = ()
        # Of a last layer the final norm, likewise.
        self._final: tuple[RMSNorm, ...] = ()
        self._joints: tuple[_Joint, _Joint | None] | None = None
        self.chained: Chained | None = None
        self.may_chain = True
        # Bits of the chain's codes, if the attention is told: a family's own may not know the word.
        self._tells = 0

    def forward(
        self,
        x: Tensor | PreNormed | Attended,
        residual: Tensor | None,
        cos_sin: CosSin | None,
        cache: KVCacheLayer,
        attn_metadata: AttentionMetadata,
    ) -> tuple[Tensor | PreNormed | Attended, Tensor]:
        """``(x, residual)`` to the next layer's.

        Their sum is the residual stream; where x comes from a linked layer and the input norm has
        been applied to it, the residual alone is, and it may be overwritten. Where x is that
        layer's :class:`Attended`, the residual is still the one beside its attention. A last layer
        that was told of the final norm may return its result as :class:`PreNormed`.
        """
        # Below, the residual came with such an x, or is the sum from the input norm. In the first
        # layer it is the caller's x.
        owned = residual is not None or self.residual_after_norm
        attention: Any = self.self_attn
        branch, watched = attention, self.watched
        inputs: tuple[Any, ...]
        asked = residual if isinstance(x, Attended) else x
        assert asked is not None, "the layer before gives the residual too"
        chained = self.chained if self._chains(asked) else None
        if isinstance(x, Attended) or chained is not None:
            queries, residual = self._queries(x, residual, cos_sin, cache, attn_metadata)
            options = {} if chained is None or not self._tells else {"chained": self._tells}
            heads = attention.attend.attend(queries, *cache[:2], attn_metadata, **options)
            heads = heads.flatten(1).unsqueeze(0)
            branch, inputs = attention.ends()[2], (heads,)
            if chained is not None:
                rest = Attended(heads, branch, chained)
                if chained.following is not None:
                    return rest, residual
                normed, residual = rest.finish(residual)
                return PreNormed(normed), residual
        else:
            normed, residual = self._entered(x, residual)
            inputs = (normed, cos_sin, cache, attn_metadata)
        middle, end = self._joints or self.join()
        normed, residual = middle.run(branch, inputs, residual, owned, watched)
        if self.residual_after_norm:
            residual = normed
        given: tuple[Any, ...] = (normed,)
        if self._mlp_takes_metadata:
            given = (normed, attn_metadata)
        if end is None or watched or self._next[0].watched:
            out = self.mlp(*given)
            return self.post_feedforward_layernorm(out) if self.sandwich else out, residual
        normed, residual = end.run(self.mlp, given, residual, True, False)
        return PreNormed(normed), residual

    def _chains(self, x: Tensor | PreNormed) -> bool:
        """Whether the rest of this layer is one operation, of what it was given."""
        chain = self.chained
        if chain is None or self.watched or any(each.watched for each in self._next or self._final):
            return False
        attention: Any = self.self_attn
        call = Call.of(x.values if isinstance(x, PreNormed) else x)
        declined: str | None = attention.ends()[2].declined(chain, call)
        return declined is None

    def _queries(
        self,
        x: Tensor | PreNormed | Attended,
        residual: Tensor | None,
        cos_sin: CosSin | None,
        cache: KVCacheLayer,
        attn_metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """The attention's queries, and the residual beside it; keys and values are stored."""
        attention = self.self_attn
        assert isinstance(attention, SelfAttention), "others are not asked for them alone"
        inputs = (cos_sin, cache, attn_metadata)
        if isinstance(x, Attended):
            assert residual is not None, "the layer before gives the residual too"
            product, residual = x.finish(residual)
            return attention.queries_of(product, *inputs), residual
        normed, residual = self._entered(x, residual)
        return attention.queries(normed, *inputs), residual

    def ending(
        self,
        x: Tensor | PreNormed | Attended,
        residual: Tensor | None,
        cos_sin: CosSin | None,
        cache: KVCacheLayer,
        attn_metadata: AttentionMetadata,
        wanted: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The last layer's ``(x, residual)`` of the tokens at ``wanted [S]``, ``[1, S, H]`` each.

        Keys and values of all tokens are stored, and the others are spared the projection back and
        the feed-forward. Only where :func:`may_end` holds.
        """
        attention, mlp = self.self_attn, self.mlp
        assert isinstance(attention, SelfAttention), "it is one of those that may end early"
        queries, residual = self._queries(x, residual, cos_sin, cache, attn_metadata)
        residual = residual[:, wanted]
        if not len(wanted):
            return residual, residual
        heads = attention.attend.attend(queries, *cache[:2], attn_metadata)
        inputs = (heads.flatten(1)[wanted].unsqueeze(0),)
        middle, _ = self._joints or self.join()
        normed, residual = middle.run(attention.ends()[2], inputs, residual, True, False)
        if self.residual_after_norm:
            residual = normed
        out = mlp(normed)
        return self.post_feedforward_layernorm(out) if self.sandwich else out, residual

    def _entered(self, x: Tensor | PreNormed, residual: Tensor | None) -> tuple[Any, Tensor]:
        """The input of the attention, and the residual beside it."""
        normed: Any
        if isinstance(x, PreNormed):
            normed = x.values
        elif residual is None:
            residual, normed = x, self.input_layernorm(x)
        else:
            normed, residual = self.input_layernorm(x, residual)
        if self.residual_after_norm:
            residual = normed
        assert residual is not None, "the layer before gives the residual too"
        return normed, residual

    def join(
        self, gpu: GPU | None = None, *, settled: bool = False
    ) -> tuple[_Joint, _Joint | None]:
        """Ask, once the layer is whole, how its branches meet the residual and the norms.

        ``gpu`` is the one that it will run on if that is ``settled``. Before, no division is left
        to a later linear, and everything is asked in every step.
        """
        middle_add, end_norm = AddNorm(self.post_attention_layernorm), None
        if self.sandwich:
            middle_add = AddNorm(self.pre_feedforward_layernorm, self.post_attention_layernorm)
            end_norm = self.post_feedforward_layernorm
        after_norm = self.residual_after_norm
        middle = _Joint.between(self.self_attn, middle_add, self.mlp, gpu, after_norm, settled)
        end = None
        for layer in self._next:
            add, after_norm = AddNorm(layer.input_layernorm, end_norm), layer.residual_after_norm
            end = _Joint.between(self.mlp, add, layer.self_attn, gpu, after_norm, settled)
        self._joints = (middle, end)
        chain = self._chain() if settled else None
        if chain is not None:
            attention: Any = self.self_attn
            project = attention.ends()[2]
            if not _ever_fuses(project, chain, gpu):
                chain = None
            words = inspect.signature(attention.attend.attend).parameters
            self._tells = chain_bits(project) if chain is not None and "chained" in words else 0
        self.chained = chain
        return self._joints

    def _chain(self) -> Chained | None:
        """All that may follow the projection back in one operation; None for a family's own parts.

        Up to the next layer's queries, keys and values, or to the final norm.
        """
        attention: Any = self.self_attn
        mlp: Any = self.mlp
        if self.sandwich or self.residual_after_norm or self.deterministic or not self.may_chain:
            return None
        if not _runs_as(attention, SelfAttention) or not _runs_as(mlp, FeedForward):
            return None
        norm: nn.Module
        following: Linear | None = None
        if self._next:
            (layer,) = self._next
            then: Any = layer.self_attn
            if not _runs_as(then, SelfAttention) or layer.residual_after_norm:
                return None
            norm, following = layer.input_layernorm, then.ends()[0]
        elif self._final:
            (norm,) = self._final
        else:
            return None
        middle, end = AddNorm(self.post_attention_layernorm), AddNorm(norm)
        first, activated, last = mlp.ends()
        chain = Chained(middle, first, activated, last, end, following)
        # What stands in for a linear, as an adapter does, has a product of its own.
        linears = (attention.ends()[2], *chain.linears)
        return chain if all(_runs_as(each, Linear) for each in linears) else None


@dataclass(frozen=True, slots=True)
class _Joint:
    """A branch's end, the residual and the norm before the next branch.

    Attributes:
        add: the epilogue of the branch's last linear.
        asks: whether the branch takes it, and may fuse it; it follows the branch otherwise.
        deferral: what the linears on both sides of the norm agreed on; None for nothing.
        refusal: why they did not; None if they did.
        coding: what quantises the norm's rows for the linear after it; None for nothing.
        uncoded: why nothing does; None if something does.
    """

    add: AddNorm
    asks: bool
    deferral: Deferral | None
    refusal: str | None
    coding: Coding | None = None
    uncoded: str | None = None

    @classmethod
    def between(
        cls,
        branch: nn.Module,
        add: AddNorm,
        following: nn.Module,
        gpu: GPU | None,
        needs_norm: bool,
        settled: bool,
    ) -> _Joint:
        """The joint of two branches; ``needs_norm`` if more than the second reads the norm."""
        asks = _takes_then(branch)
        joint = cls(add, asks, None, None)
        if not settled:
            return joint._without("it is not settled where the layer runs")
        before = None
        if asks and isinstance(branch, Branch):
            before = branch.ends()[2]
            joint = replace(joint, asks=_ever_fuses(before, add, gpu))
        if not isinstance(following, Branch):
            return joint._without("the next branch does not say what its linears are")
        if not _takes_then(following):
            return joint._without("the next branch has a forward of its own")
        if needs_norm:
            return joint._without("the residual is what the norm gives")
        first, epilogue, _ = following.ends()
        coding = Coding.between(add, first, epilogue)
        uncoded = _first_refusal(coding.declined, first.dtype, gpu)
        joint = replace(joint, coding=None if uncoded else coding, uncoded=uncoded)
        if before is None:
            return replace(joint, refusal="the branch does not say what its linears are")
        deferral = Deferral(before, replace(add, deferred=True), first, Divide(epilogue))
        refusal = _first_refusal(deferral.declined, before.dtype, gpu)
        if refusal is None:
            return replace(joint, asks=True, deferral=deferral)
        return replace(joint, refusal=refusal)

    def _without(self, refusal: str) -> _Joint:
        """The joint at which the norm makes numbers, of the whole."""
        return replace(self, refusal=refusal, uncoded=refusal)

    def run(
        self,
        branch: nn.Module,
        inputs: tuple[Any, ...],
        residual: Tensor,
        owned: bool,
        watched: bool,
    ) -> tuple[Any, Tensor]:
        """The norm of ``residual + branch(*inputs)`` in the form agreed on, and that sum.

        The sum may take the place of an ``owned`` residual. With forward hooks on the layer's
        parts, each part returns its documented result.
        """
        if watched:
            return self.add.follow(branch(*inputs), residual)
        add = self.add
        if self.deferral is not None and self.deferral.declined(Call.of(residual)) is None:
            add = self.deferral.leaving
        elif self.coding is not None and self.coding.declined(Call.of(residual)) is None:
            add = self.coding.making
        if not self.asks:
            return add.follow(branch(*inputs), residual)
        normed, total = branch(*inputs, add, residual, owned)
        return normed, total


def _takes_then(branch: nn.Module) -> bool:
    """Whether a branch's ``forward`` is one as :class:`Branch` describes."""
    if "forward" in vars(branch):
        return "then" in inspect.signature(branch.forward).parameters
    return _function_takes_then(type(branch).forward)


@cache
def _function_takes_then(forward: Callable[..., Any]) -> bool:
    return "then" in inspect.signature(forward).parameters


# What fuses nothing for any of these rows is not asked in a step.
_PROBED_ROWS = (1, 2, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 4096)


def _first_refusal(
    declined: Callable[[Call], str | None], dtype: torch.dtype, gpu: GPU | None
) -> str | None:
    """None if it is not declined for some of the rows."""
    # A CPU's methods do not choose kernels by rows. All questions took 0.05 s of a small start.
    probed = _PROBED_ROWS if gpu is not None else (_PROBED_ROWS[0], _PROBED_ROWS[-1])
    refusals = [declined(Call(rows, dtype, gpu)) for rows in probed]
    return None if None in refusals else refusals[0]


def _ever_fuses(linear: Declines, epilogue: Epilogue, gpu: GPU | None) -> bool:
    return _first_refusal(partial(linear.declined, epilogue), linear.dtype, gpu) is None


def link_layers(layers: Iterable[nn.Module], final: nn.Module | None = None) -> None:
    """Let each :class:`DecoderLayer` know the one after it, whose norm it may fuse.

    To be called where ``(x, residual)`` of one layer goes to the next and nowhere else.

    Args:
        layers: in their order.
        final: the norm to which those of the last layer go, and nowhere else, unless that layer
            returns :class:`PreNormed`; None for a caller that does not look.
    """
    linked = list(layers)
    for layer, following in pairwise(linked):
        if _runs_as_decoder_layer(layer) and _runs_as_decoder_layer(following):
            layer._next = (following,)
            layer._joints = layer.chained = None
    for layer in linked[-1:]:
        if _runs_as_decoder_layer(layer):
            layer._final = (final,) if isinstance(final, RMSNorm) else ()
            layer._joints = layer.chained = None


def unlink_layer(layer: nn.Module) -> None:
    """Let a layer end with its own feed-forward: the next one is in another process."""
    if isinstance(layer, DecoderLayer):
        layer._next, layer._joints, layer.chained = (), None, None


def may_end(layer: nn.Module) -> TypeGuard[DecoderLayer]:
    """Whether a last layer's :meth:`DecoderLayer.ending` gives what its ``forward`` does.

    It does where the parts take tokens one by one, and those whose ``forward`` is a family's own
    may do otherwise. A deterministic model's tokens are computed alike whoever asks for them, and a
    part that a forward hook watches sees all of them.
    """
    return (
        _runs_as_decoder_layer(layer)
        and not layer.deterministic
        and _runs_as(layer.self_attn, SelfAttention)
        and _runs_as(layer.mlp, FeedForward)
        and not layer.watched
    )


def _runs_as_decoder_layer(layer: nn.Module) -> TypeGuard[DecoderLayer]:
    return _runs_as(layer, DecoderLayer)


def _runs_as(part: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether its ``forward`` is that of ``kind``, not a subclass's own."""
    return getattr(part.forward, "__func__", None) is kind.forward


def agree(model: nn.Module, device: torch.device) -> None:
    """Let the neighbouring linears of a loaded model agree on the norms between them.

    A norm's division by the root mean square commutes with the linear after it. Where a linear can
    leave sums of squares beside its result, and the next one can make up for the division, the norm
    needs no launch of its own. Of the models of a process one at a time has chains on a device.
    """
    gpu = gpu_of(device)
    parts = set(model.modules())
    for module in model.modules():
        if isinstance(module, DecoderLayer):
            # Another may have taken the place of the final norm since the layer was told of it.
            module._final = tuple(norm for norm in module._final if norm in parts)
            module.join(gpu, settled=True)
        elif isinstance(module, Branch):
            module.settle(gpu)
    layers = [layer for layer in model.modules() if isinstance(layer, DecoderLayer)]
    if not any(layer.chained is not None for layer in layers):
        return
    if _CHAINING.get(str(device), model) is not model:
        gc.collect()  # one that was closed may be left in a cycle
    if not chains_run_on(device) or _CHAINING.setdefault(str(device), model) is not model:
        for layer in layers:
            layer.chained = None


# The model of this process whose steps may have chains, of each device. Programs of a chain wait
# for one another: those of two, on streams of their own, could each have half of a device's room.
_CHAINING: WeakValueDictionary[str, nn.Module] = WeakValueDictionary()
