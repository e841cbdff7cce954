"""Linears, with the gated activation or the norm that may follow them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine_core.kernels.linear import cublas, reference
from engine_core.kernels.norm import rms_norm
from engine_core.kernels.rotary_store import rotary_store

if TYPE_CHECKING:
    from engine_core.kernels.linear.triton import Tile

__all__ = [
    "Undivided",
    "linear",
    "linear_add",
    "linear_add_norm",
    "linear_rotary_store",
    "takes_undivided",
]


@dataclass(frozen=True, slots=True)
class Undivided:
    """An RMSNorm's result that still lacks the division by the root mean square.

    The division commutes with a linear, which can make up for it: so the norm needs no launch.

    Attributes:
        values: ``[..., K]``, what is normalised times the norm's weight, rounded once.
        squares: ``[rows, parts]`` float32, whose sums over the parts are those of the squares of
            what is normalised.
        eps: added to the mean square.
    """

    values: Tensor
    squares: Tensor
    eps: float


def linear(
    x: Tensor | Undivided,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """``x @ weight.T + bias``, or :func:`~engine_core.kernels.silu_and_mul` of it if ``gated``.

    Rounded before silu_and_mul too. On a GPU, shapes for which a kernel was seen to beat cuBLAS
    take that kernel, which accumulates in float32: few rows of bfloat16 or float16, and on Hopper
    many rows if ``gated``.

    Args:
        x: ``[..., K]``, or what an RMSNorm gave without its division.
        weight: ``[N, K]``, x's dtype; if ``gated`` N is even, the gate's rows before those of up.
        bias: ``[N]``, or None.
        gated: whether silu_and_mul follows.
        batch_invariant: whether each row of the result must be the same, bit for bit, however many
            rows there are. Only on a GPU, with a contiguous weight and no :class:`Undivided`.

    Returns:
        ``[..., N]``, or ``[..., N / 2]`` if ``gated``, x's dtype.

    Raises:
        ValueError: weight or bias does not fit x, or batch invariance is asked for where there is
            none.
    """
    x, squares, eps = _taken_apart(x)
    _check("linear", x, weight, bias)
    if gated and weight.shape[0] % 2:
        raise ValueError(f"linear: a gated weight must have an even N, got {tuple(weight.shape)}")
    if batch_invariant:
        if squares is not None or not x.is_cuda or x.dtype != weight.dtype:
            raise ValueError(
                "linear: batch invariance takes x on a GPU in the weight's dtype and with its norm "
                f"divided, got {x.dtype} on {x.device} and a weight of {weight.dtype}"
            )
        if not weight.is_contiguous() or weight.data_ptr() % 16:
            raise ValueError(
                "linear: batch invariance takes a contiguous weight that begins at a multiple of "
                f"16 bytes, got strides {weight.stride()} at {weight.data_ptr():#x}"
            )
        from engine_core.kernels.linear.invariant import triton as invariant

        rows = x.reshape(-1, x.shape[-1])
        out = invariant.linear(
            rows if rows.stride(-1) == 1 else rows.contiguous(), weight, bias, gated=gated
        )
        return out.view(*x.shape[:-1], out.shape[-1])
    if gated and squares is None and _hopper_wins(x, weight):
        from engine_core.kernels.linear.hopper import triton as hopper

        out = hopper.gated_linear(x.view(-1, x.shape[-1]), weight, bias)
        return out.view(*x.shape[:-1], out.shape[-1])
    tile = _tile(x, weight, gated)
    if tile is not None:
        from engine_core.kernels.linear import triton

        rows = x.reshape(-1, x.shape[-1])
        out = triton.linear(rows, weight, bias, tile, gated=gated, squares=squares, eps=eps)
        return out.view(*x.shape[:-1], out.shape[-1])
    return reference.linear(x, weight, bias, gated=gated, squares=squares, eps=eps)


def linear_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Undivided, Tensor]:
    """A linear, the addition of the residual and the RMSNorm that follow it; one launch on a GPU.

    The linear and the sum are rounded as they are by ops of their own; the norm's result is rounded
    once, not twice, and again when a linear has made up for the division.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``, x's dtype.
        bias: ``[N]``, or None.
        residual: ``[..., N]``, x's dtype.
        norm_weight: ``[N]``, of the RMSNorm.
        eps: of the RMSNorm.

    Returns:
        The norm of ``residual + linear(x)`` without its division, and that sum ``[..., N]``.

    Raises:
        ValueError: shapes or dtypes are not as above.
    """
    _check_added("linear_add", x, weight, bias, residual, norm_weight)
    shape = residual.shape
    tile = _tile(x, weight, gated=False)
    if tile is None:
        values, squares, total = reference.linear_add(x, weight, bias, residual, norm_weight)
        return Undivided(values, squares, eps), total
    from engine_core.kernels.linear import triton

    rows = x.reshape(-1, x.shape[-1])
    values, squares, total = triton.linear_add(
        rows, weight, bias, tile, residual.reshape(-1, shape[-1]), norm_weight
    )
    return Undivided(values.view(shape), squares, eps), total.view(shape)


def linear_add_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    may_overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """A linear, the addition of the residual and the RMSNorm that follow it, divided.

    On a GPU, where that was seen to be faster, the norm adds up partial sums of the linear, or the
    linear adds the residual: then the sum of both is rounded once. Elsewhere the linear is rounded
    before, too, as by an op of its own. The norm rounds as :func:`~engine_core.kernels.rms_norm`.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``, x's dtype.
        bias: ``[N]``, or None.
        residual: ``[..., N]``, x's dtype, the last dimension contiguous.
        norm_weight: ``[N]``, of the RMSNorm, contiguous.
        eps: of the RMSNorm.
        may_overwrite: whether the sum may take the place of ``residual``, which is then returned.

    Returns:
        The norm of ``residual + linear(x)``, and that sum, both ``[..., N]``.

    Raises:
        ValueError: shapes or dtypes are not as above.
    """
    _check_added("linear_add_norm", x, weight, bias, residual, norm_weight)
    n, k = weight.shape
    dense = all(t is None or t.is_contiguous() for t in (x, weight, bias, norm_weight))
    if x.is_cuda and dense and _tile(x, weight, gated=False) is None:
        rows = x.view(-1, k)
        parts = _parts(rows, weight)
        if parts > 1:
            from engine_core.kernels.norm import triton as norm

            partial = cublas.partial_sums(rows, weight, parts)
            return norm.sum_add_norm(partial, bias, residual, norm_weight, eps)
        # Into another tensor cuBLAS would copy the residual first, and it adds no bias besides.
        in_place = may_overwrite and bias is None and residual.is_contiguous()
        if in_place and cublas.adds(len(rows)):
            residual.view(-1, n).addmm_(rows, weight.t())
            return rms_norm(residual, norm_weight, eps), residual
    return rms_norm(linear(x, weight, bias), norm_weight, eps, residual=residual)


def linear_rotary_store(
    x: Tensor | Undivided,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
) -> Tensor:
    """A linear to queries, keys and values, their rotation, and the storing of keys and values.

    The same as :func:`linear` and :func:`~engine_core.kernels.rotary_store`, each rounding its
    results; one launch where a kernel is used for so few rows.

    Args:
        x: ``[..., K]`` of T rows, or what an RMSNorm gave without its division.
        weight: ``[(Hq + 2 Hk) * D, K]``, x's dtype: the rows of all queries, keys, then values.
        bias: ``[(Hq + 2 Hk) * D]``, or None.
        cos: ``[T, half]``, or ``[S, T, half]`` for S sections; float32.
        sin: cos' shape; float32.
        k_cache: ``[num_blocks, block_size, Hk, D]``, written; last dimension contiguous.
        v_cache: likewise.
        slot_mapping: ``[T]`` int64; a token whose slot is negative is not stored.
        interleaved: how dimensions pair in the rotation.

    Returns:
        The rotated queries ``[T, Hq, D]``.

    Raises:
        ValueError: shapes, dtypes or strides are not as above.
    """
    values, squares, eps = _taken_apart(x)
    _check("linear_rotary_store", values, weight, bias)
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_heads = weight.shape[0] // head_dim - 2 * num_kv_heads
    if num_heads < 1 or weight.shape[0] % head_dim:
        raise ValueError(
            f"linear_rotary_store: weight {tuple(weight.shape)} does not have the rows of queries, "
            f"keys and values of {num_kv_heads} key heads of {head_dim}"
        )
    rows = values.reshape(-1, values.shape[-1])
    tile = _tile(rows, weight, gated=False)
    if tile is not None and _rotates_and_stores(rows, cos, sin, k_cache, v_cache, slot_mapping):
        from engine_core.kernels.linear import triton

        q = triton.linear(
            rows,
            weight,
            bias,
            tile,
            gated=False,
            squares=squares,
            eps=eps,
            stored=triton.Stored(
                cos.contiguous(),
                sin.contiguous(),
                k_cache,
                v_cache,
                slot_mapping.contiguous(),
                interleaved,
            ),
        )
        return q.view(-1, num_heads, head_dim)
    qkv = linear(x, weight, bias).view(-1, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = qkv.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
    rotary_store(q, k, v, cos, sin, k_cache, v_cache, slot_mapping, interleaved=interleaved)
    return q


def takes_undivided(x: Tensor, before: Tensor, after: Tensor, *, gated: bool = False) -> bool:
    """Whether the linears around a norm of ``x`` run as kernels that fuse it.

    That is so for few rows of bfloat16 on a GPU; float16 could overflow without the division.

    Args:
        x: ``[..., H]``, the residual that the norm's input is added to.
        before: ``[H, K]``, the weight of the linear whose result is normalised.
        after: ``[N, H]``, that of the linear which takes what is normalised.
        gated: whether that one is.
    """
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return False
    rows = x.numel() // x.shape[-1]
    return (
        _tile_of(rows, x, before, gated=False) is not None
        and _tile_of(rows, x, after, gated) is not None
    )


def _taken_apart(x: Tensor | Undivided) -> tuple[Tensor, Tensor | None, float]:
    """Its values, and what they lack: squares, None if there is nothing to divide by, and eps."""
    return (x.values, x.squares, x.eps) if isinstance(x, Undivided) else (x, None, 0.0)


def _check(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    out_features, in_features = weight.shape
    if x.shape[-1] != in_features or (bias is not None and bias.shape != (out_features,)):
        raise ValueError(
            f"{op}: x is {tuple(x.shape)}, weight {tuple(weight.shape)}, bias "
            f"{None if bias is None else tuple(bias.shape)}; x's last dimension must be "
            f"{in_features} and bias [{out_features}]"
        )


def _check_added(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
) -> None:
    _check(op, x, weight, bias)
    shape = (*x.shape[:-1], weight.shape[0])
    if residual.shape != shape or norm_weight.shape != shape[-1:] or residual.dtype != x.dtype:
        raise ValueError(
            f"{op}: residual is {tuple(residual.shape)} {residual.dtype} and norm_weight "
            f"{tuple(norm_weight.shape)}; they must be {shape} {x.dtype} and {shape[-1:]}"
        )


def _rotates_and_stores(
    x: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> bool:
    """Whether a linear's kernel can: whole heads, by angles of one section, into like caches.

    What nothing takes is not among them, and is left to :func:`rotary_store` to refuse.
    """
    tokens, head_dim = len(x), k_cache.shape[-1]
    return (
        cos.shape == sin.shape == (tokens, head_dim / 2)
        and cos.dtype == sin.dtype == torch.float32
        and slot_mapping.shape == (tokens,)
        and slot_mapping.dtype == torch.int64
        and k_cache.shape == v_cache.shape
        and k_cache.dtype == v_cache.dtype == x.dtype
        and k_cache.stride(-1) == v_cache.stride(-1) == 1
    )


def _parts(x: Tensor, weight: Tensor) -> int:
    """Parts of K in which ``x [M, K]``, on a GPU, is multiplied; 1 for a plain linear."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return 1
    from engine_core.kernels.linear import triton

    return cublas.choose_parts(len(x), *weight.shape) if triton.fits(x.device) else 1


def _hopper_wins(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel for Hopper takes this gated linear, and was seen to be faster."""
    if not x.is_cuda or not x.is_contiguous():
        return False
    from engine_core.kernels.launch.triton import num_multiprocessors, runs_gluon

    if not runs_gluon(x.device):
        return False
    from engine_core.kernels.linear.hopper import triton as hopper

    rows = x.view(-1, x.shape[-1])
    n, k = weight.shape
    return hopper.fits(rows, weight) and hopper.wins(len(rows), n, k, num_multiprocessors(x.device))


def _tile(x: Tensor, weight: Tensor, gated: bool) -> Tile | None:
    """How a kernel cuts this linear; None where none is used."""
    if not x.is_cuda or x.stride(-1) != 1:
        return None
    return _tile_of(x.numel() // x.shape[-1], x, weight, gated)


def _tile_of(rows: int, x: Tensor, weight: Tensor, gated: bool) -> Tile | None:
    if x.dtype not in (torch.bfloat16, torch.float16) or x.dtype != weight.dtype:
        return None
    if not weight.is_contiguous() or weight.data_ptr() % 16:
        return None
    from engine_core.kernels.linear import triton

    n, k = weight.shape
    return triton.choose_tile(rows, n, k, gated, x.device)
