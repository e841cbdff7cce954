"""Linears, with the activation or the norm that may follow them."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from engine_core.kernels.codes import CODE_TOPS, cache_parts
from engine_core.kernels.gpu import GPU, gpu_of
from engine_core.kernels.kv_store import store_kv
from engine_core.kernels.launch.quick import Quick, is_quick
from engine_core.kernels.linear import cublas, fp8, reference, tiles
from engine_core.kernels.linear.coded import CodedWeight, numbers_of
from engine_core.kernels.linear.fp8 import Fp8Weight
from engine_core.kernels.linear.groups import GroupWeight
from engine_core.kernels.linear.reference import Activation, DeferredRMSNorm, taken_apart
from engine_core.kernels.norm import layer_norm, layer_norm_codes, rms_norm, rms_norm_codes
from engine_core.kernels.rotary_store import check_norms, rotary_store
from engine_core.kernels.row_codes import CodedRows, RowForm

__all__ = [
    "Activation",
    "CodedWeight",
    "DeferredRMSNorm",
    "Fp8Weight",
    "GroupWeight",
    "adds_residual",
    "fits_head_norms",
    "has_activated_kernel",
    "has_kernel",
    "linear",
    "linear_add",
    "linear_add_norm",
    "linear_rotary_store",
]

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def linear(
    x: Tensor | DeferredRMSNorm | CodedRows,
    weight: Tensor | CodedWeight,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    activation: Activation | None = None,
    deterministic: bool = False,
) -> Tensor:
    """``x @ weight.T + bias``, and its activation.

    Rounded before the activation too. On a GPU, shapes for which a kernel was seen to beat cuBLAS
    take that kernel, which accumulates in float32: few rows of bfloat16 or float16, and on Hopper
    many rows if ``gated``, or with "quick_gelu".

    Args:
        x: ``[..., K]``, or what an RMSNorm gave without its division, or rows in the form that an
            :class:`Fp8Weight` takes.
        weight: ``[N, K]``, x's dtype or codes; if ``gated`` N is even, the gate's rows
            before those of up.
        bias: ``[N]``, or None.
        gated: whether the first half of the columns is activated and multiplies the second.
        activation: of the result, or of the gate, "silu" if it is None; "gelu_tanh" is the
            approximation by tanh, "quick_gelu" that by a sigmoid, of a result alone.
        deterministic: whether each row of the result must be the same, bit for bit, however many
            rows there are. Only on a GPU, with a contiguous weight and no :class:`DeferredRMSNorm`.

    Returns:
        ``[..., N]``, or ``[..., N / 2]`` if ``gated``, x's dtype.

    Raises:
        ValueError: weight or bias does not fit x, or batch invariance is asked for where there is
            none.
    """
    if isinstance(x, CodedRows):
        return reference.activate(_of_codes(x, weight, bias), gated, activation)
    values, squares, _ = taken_apart(x)
    bias = _checked_bias("linear", values, weight, bias)
    if gated and weight.shape[0] % 2:
        raise ValueError(f"linear: a gated weight must have an even N, got {tuple(weight.shape)}")
    if gated and activation == "quick_gelu":
        raise ValueError("linear: quick_gelu is the activation of a result, not of a gate")
    if deterministic:
        weight = numbers_of(weight, values.dtype)
        _check_invariant("linear", values, weight, squares)
        from engine_core.kernels.linear.invariant import triton as invariant

        return invariant.linear(values, weight, bias, gated=gated, activation=activation)
    tile = _tile(values, weight, gated, ending="gated" if gated else "activated")
    fresh = False
    if isinstance(weight, CodedWeight) and tile is None:
        product = weight.product(values, bias) if squares is None else None
        if product is not None:
            return reference.activate(product, gated, activation)
        weight, fresh = weight.numbers(values.dtype), True
    of_hopper = activation in (None, "silu") if gated else activation == "quick_gelu"
    if (
        isinstance(weight, Tensor)
        and of_hopper
        and (gated or squares is None)
        and _hopper_wins(x, weight, bias, gated)
    ):
        from engine_core.kernels.linear.hopper import triton as hopper

        rows = _as_matrix(x)
        if gated:
            tile_of = _gated_tile(values, weight)
            out = hopper.gated_linear(rows, weight, bias, *tile_of, fresh=fresh)
        else:
            out = hopper.quick_gelu_linear(rows, weight, bias, fresh=fresh)
        return out.view(*values.shape[:-1], out.shape[-1])
    if tile is not None:
        from engine_core.kernels.linear import triton

        epilogue = triton.Activated.of(values, len(weight), gated, activation)
        return _launch(x, weight, epilogue, tile, bias)
    assert isinstance(weight, Tensor), "codes without a tile became numbers"
    gelu = activation == "gelu_tanh" and not gated
    if gelu and bias is not None and squares is None and _cublas_activates(values, weight):
        rows = values.reshape(-1, values.shape[-1])
        out = torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
        return out.view(*values.shape[:-1], out.shape[-1])
    return reference.linear(x, weight, bias, gated=gated, activation=activation)


def _of_codes(x: CodedRows, weight: Tensor | CodedWeight, bias: Tensor | None) -> Tensor:
    """The product of rows that are quantised already, in the form of the weight."""
    bias = _checked_bias("linear", x, weight, bias)
    if not isinstance(weight, Fp8Weight) or weight.row_form.pairs != x.pairs:
        raise ValueError(
            f"linear: rows in codes are multiplied by an Fp8Weight of their form, got "
            f"{type(weight).__name__} {tuple(weight.shape)} and pairs={x.pairs}"
        )
    product = weight.product(x, bias)
    if product is not None:
        return product
    return reference.linear(x.numbers(), weight.numbers(x.dtype), bias, gated=False)


def linear_add(
    x: Tensor,
    weight: Tensor | CodedWeight,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    norm_offset: float = 0.0,
) -> tuple[DeferredRMSNorm, Tensor]:
    """A linear, the addition of the residual and the RMSNorm that follow it; one launch on a GPU.

    The linear and the sum are rounded as they are by ops of their own; the norm's result is rounded
    once, not twice, and again when a linear has made up for the division.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``, x's dtype or codes.
        bias: ``[N]``, or None.
        residual: ``[..., N]``, x's dtype.
        norm_weight: ``[N]``, of the RMSNorm.
        eps: of the RMSNorm.
        norm_offset: added to its weight.

    Returns:
        The norm of ``residual + linear(x)`` without its division, and that sum ``[..., N]``.

    Raises:
        ValueError: shapes or dtypes are not as above.
    """
    bias = _checked_sum_bias("linear_add", x, weight, bias, residual, norm_weight)
    tile = _tile(x, weight, gated=False, ending="added")
    if tile is None:
        numbers = numbers_of(weight, x.dtype)
        return reference.linear_add(x, numbers, bias, residual, norm_weight, eps, norm_offset)
    from engine_core.kernels.linear import triton

    added = triton.Added.of(residual, norm_weight, tile, norm_offset)
    values = _launch(x, weight, added, tile, bias)
    return DeferredRMSNorm(values, added.squares, eps), added.total


def linear_add_norm(
    x: Tensor | CodedRows,
    weight: Tensor | CodedWeight,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    norm_bias: Tensor | None = None,
    norm_offset: float = 0.0,
    centred: bool = False,
    may_overwrite: bool = False,
    form: RowForm | None = None,
) -> tuple[Any, Tensor]:
    """A linear, the addition of the residual and the norm that follow it, divided.

    On a GPU, where that was seen to be faster, the norm adds up partial sums of the linear, or the
    linear adds the residual: then the sum of both is rounded once. Elsewhere the linear is rounded
    before, too, as by an op of its own. The norm rounds as one by itself.

    Args:
        x: ``[..., K]``, or rows in codes, as of :func:`linear`.
        weight: ``[N, K]``, x's dtype or codes.
        bias: ``[N]``, or None.
        residual: ``[..., N]``, x's dtype, the last dimension contiguous.
        norm_weight: ``[N]``, of the norm, contiguous.
        eps: of the norm.
        norm_bias: ``[N]``, of a LayerNorm, contiguous, or None.
        norm_offset: added to an RMSNorm's weight.
        centred: whether it is a LayerNorm, not an RMSNorm.
        may_overwrite: whether the sum may take the place of ``residual``, which is then returned.
        form: of the norm's rows; None for numbers.

    Returns:
        The norm of ``residual + linear(x)``, :class:`CodedRows` if they have a form, and that sum,
        both ``[..., N]``.

    Raises:
        ValueError: shapes or dtypes are not as above.
    """
    bias = _checked_sum_bias("linear_add_norm", x, weight, bias, residual, norm_weight)
    n, k = weight.shape
    rows = x.numel() // k
    dense = all(t is None or t.is_contiguous() for t in (norm_weight, norm_bias))
    if isinstance(weight, Fp8Weight):
        if dense and rows and _applies_scales_later(x, weight):
            from engine_core.kernels.norm import triton as norm

            products, scales = fp8.unscaled_parts(x, weight)
            return norm.sum_add_norm(
                *(products, bias, residual, norm_weight, eps),
                norm_bias=norm_bias,
                centred=centred,
                offset=norm_offset,
                scales=(scales, weight.scales),
                form=form,
            )
    elif (
        isinstance(weight, Tensor)
        and isinstance(x, Tensor)
        and x.is_cuda
        and x.is_contiguous()
        and dense
        and weight.is_contiguous()
        and _tile(x, weight, gated=False) is None
    ):
        partial = _partial_sums(x.view(-1, k), weight) if x.dtype in _SIXTEEN_BITS else None
        if partial is not None:
            from engine_core.kernels.norm import triton as norm

            return norm.sum_add_norm(
                *(partial, bias, residual, norm_weight, eps),
                norm_bias=norm_bias,
                centred=centred,
                offset=norm_offset,
                form=form,
            )
        # Into another tensor cuBLAS would copy the residual first, and it adds no bias besides.
        in_place = may_overwrite and bias is None and residual.is_contiguous()
        if in_place and rows >= tiles.table_of(gpu_of(x.device)).adds_from:
            residual.view(-1, n).addmm_(x.view(-1, k), weight.t())
            if centred:
                normed = layer_norm(residual, norm_weight, norm_bias, eps)
            else:
                normed = rms_norm(residual, norm_weight, eps, offset=norm_offset)
            return normed if form is None else CodedRows.of(normed, form), residual
    product = linear(x, weight, bias)
    if form is not None:
        if centred:
            return layer_norm_codes(product, norm_weight, norm_bias, eps, form, residual=residual)
        given = (product, norm_weight, eps, form)
        return rms_norm_codes(*given, residual=residual, offset=norm_offset)
    if centred:
        return layer_norm(product, norm_weight, norm_bias, eps, residual=residual)
    return rms_norm(product, norm_weight, eps, residual=residual, offset=norm_offset)


def _partial_sums(x: Tensor, weight: Tensor) -> Tensor | None:
    """``x [M, K]`` by ``weight [N, K]`` over parts of K; None where they were seen to be slower."""
    n, k = weight.shape
    shape = (len(x), n, k, gpu_of(x.device))
    tile = tiles.choose_parts_tile(*shape)
    if tile is not None:
        from engine_core.kernels.launch.gluon import runs_gluon

        if runs_gluon(x.device):
            from engine_core.kernels.linear.parts.hopper import triton as hopper

            if hopper.fits(x, weight) and hopper.is_trusted(x, tile):
                return hopper.partial_sums(x, weight, tile)
    parts = tiles.choose_parts(*shape)
    return cublas.partial_sums(x, weight, parts) if parts > 1 else None


def _applies_scales_later(x: Tensor | CodedRows, weight: Fp8Weight) -> bool:
    """Whether what follows a product of such rows applies the scales."""
    n, k = weight.shape
    rows, gpu = x.numel() // k, gpu_of(x.device)
    if not weight.multiplies_codes or not fp8.scales_apart(rows, n, k, x.dtype, gpu):
        return False
    return isinstance(x, CodedRows) or _tile(x, weight, gated=False) is None


def linear_rotary_store(
    x: Tensor | DeferredRMSNorm | CodedRows,
    weight: Tensor | CodedWeight,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    interleaved: bool = False,
    kv_scales: tuple[float, float] | None = None,
    deterministic: bool = False,
) -> Tensor:
    """A linear to queries, keys and values, their norms, rotation, and storing in a cache.

    The same as :func:`linear` and :func:`~engine_core.kernels.rotary_store`, each rounding its
    results; one launch where a kernel is used for so few rows. Where scales of a product are
    applied to its result, the rotation applies them.

    Args:
        x: ``[..., K]`` of T rows, or of the other kinds that :func:`linear` takes.
        weight: ``[(Hq + 2 Hk) * D, K]``, x's dtype or codes: the rows of all queries, keys,
            then values.
        bias: ``[(Hq + 2 Hk) * D]``, or None.
        cos: ``[T, half]``, or ``[S, T, half]`` for S sections; float32; None for no rotation.
        sin: cos' shape; float32; None with it.
        k_cache: ``[num_blocks, block_size, Hk, D]``, written; last dimension contiguous. Or of
            codes, as of :func:`~engine_core.kernels.store_kv`.
        v_cache: likewise.
        slot_mapping: ``[T]`` int64; a token whose slot is negative is not stored.
        q_weight: ``[D]``, contiguous, of the RMSNorm of each head of the queries; None if there is
            none, as for ``k_weight``.
        k_weight: ``[D]``, contiguous, of the keys'.
        eps: added to the mean squares of heads.
        offset: added to the weights of those norms.
        interleaved: how dimensions pair in the rotation.
        kv_scales: as of :func:`~engine_core.kernels.store_kv`.
        deterministic: as of :func:`linear`.

    Returns:
        The rotated queries ``[T, Hq, D]``.

    Raises:
        ValueError: shapes, dtypes or strides are not as above.
    """
    values, squares, _ = (x, None, 0.0) if isinstance(x, CodedRows) else taken_apart(x)
    bias = _checked_bias("linear_rotary_store", values, weight, bias)
    num_kv_heads, head_dim = cache_parts(k_cache)[0].shape[2:]
    num_heads = weight.shape[0] // head_dim - 2 * num_kv_heads
    if num_heads < 1 or weight.shape[0] % head_dim:
        raise ValueError(
            f"linear_rotary_store: weight {tuple(weight.shape)} does not have the rows of queries, "
            f"keys and values of {num_kv_heads} key heads of {head_dim}"
        )
    if deterministic:
        weight = numbers_of(weight, values.dtype)
        _check_invariant("linear_rotary_store", values, weight, squares)
    check_norms("linear_rotary_store", q_weight, k_weight, head_dim)
    norms: dict[str, Any] = {"q_weight": q_weight, "k_weight": k_weight}
    norms |= {"eps": eps, "offset": offset}
    tile = None
    # Without a rotation more rows have their heads normalised by rms_norm, which adds up otherwise.
    alike = cos is not None or not deterministic
    rows = values.numel() // values.shape[-1]
    whole = q_weight is not None or k_cache.dtype in CODE_TOPS
    fits = not whole or (alike and fits_head_norms(rows, head_dim))
    if (
        isinstance(values, Tensor)
        and fits
        and _rotates_and_stores(values, cos, sin, k_cache, v_cache, slot_mapping)
    ):
        plain = not whole and not interleaved and head_dim % tiles.CODES_BLOCK_N == 0
        ending = "stored" if plain else None
        tile = _tile(values, weight, False, deterministic, ending)
    if tile is not None:
        assert not isinstance(x, CodedRows), "many rows are in codes, and have no tile"
        from engine_core.kernels.attention.decode import Start, start_of
        from engine_core.kernels.launch.triton import num_multiprocessors
        from engine_core.kernels.linear import triton

        keys, values_of = cache_parts(k_cache)[0], cache_parts(v_cache)[0]
        late = Start.MULTIPLIED
        # Batch-invariant attention asks for nothing before it waits.
        if not deterministic:
            late = start_of(
                rows, num_heads // num_kv_heads, num_kv_heads, head_dim, values_of.shape[3],
                keys.element_size(), num_multiprocessors(values.device),
            )  # fmt: skip
        stored = triton.Stored.of(
            len(weight), cos, sin, k_cache, v_cache, slot_mapping, interleaved,
            dtype=values.dtype, kv_scales=kv_scales, late=late, **norms,
        )  # fmt: skip
        return _launch(x, weight, stored, tile, bias)
    apart = squares is None and cos is not None and rows > 0
    options = norms | {"interleaved": interleaved, "kv_scales": kv_scales}
    if apart and isinstance(weight, Fp8Weight) and _applies_scales_later(values, weight):
        qkv, row_scales = fp8.unscaled(values, weight)
        options |= {"scales": (row_scales, weight.scales), "bias": bias}
    else:
        qkv = linear(x, weight, bias, deterministic=deterministic)
    heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if cos is not None and sin is not None:
        given = (q, k, v, cos, sin, k_cache, v_cache, slot_mapping)
        rotary_store(*given, **options)
        return q
    if q_weight is not None and k_weight is not None:
        q = rms_norm(q, q_weight, eps, offset=offset)
        k = rms_norm(k, k_weight, eps, offset=offset)
    store_kv(k, v, k_cache, v_cache, slot_mapping, kv_scales)
    return q


def has_kernel(
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    gpu: GPU | None,
    *,
    gated: bool = False,
    deterministic: bool = False,
) -> bool:
    """Whether a kernel that can fuse what follows takes a weight ``[n, k]`` for x of this dtype.

    Deterministic mode multiplies by the numbers of any weight.
    """
    if deterministic:
        return gpu is not None and rows <= tiles.few_rows_of_invariant(n)
    if dtype not in _SIXTEEN_BITS:
        return False
    return tiles.choose_tile(rows, n, k, gated, gpu) is not None


def fits_head_norms(rows: int, head_dim: int) -> bool:
    """Whether norms and scales of heads are part of :func:`linear_rotary_store`.

    Tiles must make up a head. The last program of a head normalises all of its rows, so that
    beyond 16 rows a launch of its own is faster (by 3% of a step of 32 rows of Qwen3 8B).
    """
    return head_dim & (head_dim - 1) == 0 and rows <= 16


def has_activated_kernel(rows: int, n: int, k: int, gpu: GPU | None, *, gated: bool) -> bool:
    """Whether the kernel for Hopper takes a weight ``[n, k]`` of 16 bits for many rows.

    A gated one with "silu", any other with "quick_gelu".
    """
    return (
        gpu is not None
        and gpu.capability == (9, 0)
        and not is_quick(Quick.PRODUCTS)
        and k % 64 == 0
        and n % 16 == 0
        and tiles.hopper_wins(rows, n, k, gpu.num_multiprocessors, gated=gated)
    )


def adds_residual(
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    gpu: GPU | None,
    *,
    with_bias: bool,
) -> bool:
    """Whether :func:`linear_add_norm` does more at once than the linear and the norm alone.

    For many rows that is so if the residual may be overwritten.
    """
    if gpu is None or has_kernel(rows, n, k, dtype, gpu):
        return False
    if dtype in _SIXTEEN_BITS and tiles.choose_parts(rows, n, k, gpu) > 1:
        return True
    return not with_bias and rows >= tiles.table_of(gpu).adds_from


def _check_invariant(
    op: str, x: Tensor | CodedRows, weight: Tensor, squares: Tensor | None
) -> None:
    number = isinstance(x, Tensor) and squares is None and x.is_cuda
    if not number or x.dtype != weight.dtype:
        raise ValueError(
            f"{op}: batch invariance takes x on a GPU in the weight's dtype and with its norm "
            f"divided, got {x.dtype} on {x.device} and a weight of {weight.dtype}"
        )
    if not weight.is_contiguous() or weight.data_ptr() % 16:
        raise ValueError(
            f"{op}: batch invariance takes a contiguous weight that begins at a multiple of "
            f"16 bytes, got strides {weight.stride()} at {weight.data_ptr():#x}"
        )


def _checked_bias(
    op: str, x: Tensor | CodedRows, weight: Tensor | CodedWeight, bias: Tensor | None
) -> Tensor | None:
    """The bias as kernels read it, of shapes that fit."""
    out_features, in_features = weight.shape
    if x.shape[-1] != in_features or (bias is not None and bias.shape != (out_features,)):
        raise ValueError(
            f"{op}: x is {tuple(x.shape)}, weight {tuple(weight.shape)}, bias "
            f"{None if bias is None else tuple(bias.shape)}; x's last dimension must be "
            f"{in_features} and bias [{out_features}]"
        )
    return None if bias is None else bias.contiguous()


def _checked_sum_bias(
    op: str,
    x: Tensor | CodedRows,
    weight: Tensor | CodedWeight,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
) -> Tensor | None:
    bias = _checked_bias(op, x, weight, bias)
    shape = (*x.shape[:-1], weight.shape[0])
    if residual.shape != shape or norm_weight.shape != shape[-1:] or residual.dtype != x.dtype:
        raise ValueError(
            f"{op}: residual is {tuple(residual.shape)} {residual.dtype} and norm_weight "
            f"{tuple(norm_weight.shape)}; they must be {shape} {x.dtype} and {shape[-1:]}"
        )
    return bias


def _rotates_and_stores(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> bool:
    """Whether a linear's kernel can: whole heads, by angles of one section, into like caches.

    Unsupported inputs are not among them; :func:`rotary_store` refuses them.
    """
    coded = k_cache.dtype in CODE_TOPS
    k_cache, v_cache = cache_parts(k_cache)[0], cache_parts(v_cache)[0]
    tokens, head_dim = x.numel() // x.shape[-1], k_cache.shape[-1]
    angles = head_dim % 2 == 0
    if cos is not None and sin is not None:
        angles = (
            cos.shape == sin.shape == (tokens, head_dim / 2)
            and cos.dtype == sin.dtype == torch.float32
        )
    return (
        angles
        and slot_mapping.shape == (tokens,)
        and slot_mapping.dtype == torch.int64
        and k_cache.shape == v_cache.shape
        and k_cache.dtype == v_cache.dtype
        and (coded or k_cache.dtype == x.dtype)
        and k_cache.stride(-1) == v_cache.stride(-1) == 1
    )


def _hopper_wins(
    x: Tensor | DeferredRMSNorm, weight: Tensor, bias: Tensor | None, gated: bool
) -> bool:
    """Whether the kernel for Hopper takes this activated linear, and is faster."""
    n, k = weight.shape
    values, _, _ = taken_apart(x)
    if not values.is_cuda or not values.is_contiguous():
        return False
    if not has_activated_kernel(values.numel() // k, n, k, gpu_of(values.device), gated=gated):
        return False
    from engine_core.kernels.launch.gluon import runs_gluon

    if not runs_gluon(values.device):
        return False
    from engine_core.kernels.linear.hopper import triton as hopper

    if not hopper.fits(values.view(-1, k), weight):
        return False
    tile = _gated_tile(values, weight) if gated else ()
    return hopper.is_trusted(_as_matrix(x), bias is not None, gated, *tile)


def _as_matrix(x: Any) -> Any:
    """Contiguous ``x [..., K]``, divided or not, as ``[M, K]``."""
    if isinstance(x, DeferredRMSNorm):
        return replace(x, values=_as_matrix(x.values))
    return x.view(-1, x.shape[-1])


def _gated_tile(x: Tensor, weight: Tensor) -> tiles.GatedTile:
    """The tile of the kernel for Hopper, which is used."""
    gpu = gpu_of(x.device)
    assert gpu is not None, "it is for a kind of GPU"
    n, k = weight.shape
    tile = tiles.gated_tile(x.numel() // k, n, k, gpu.num_multiprocessors)
    assert tile is not None, "it has a tile"
    return tile


def _cublas_activates(x: Tensor, weight: Tensor) -> bool:
    """Whether cuBLAS activates by "gelu_tanh" what it multiplied and added a bias to."""
    return (
        gpu_of(x.device) is not None
        and x.dtype == weight.dtype
        and x.dtype in _SIXTEEN_BITS
        and x.numel() > 0
    )


def _kernel_of_codes(weight: GroupWeight, tile: tiles.Tile) -> ModuleType:
    """Hopper's own kernel for such codes."""
    if tile.mode == "teams":
        from engine_core.kernels.linear.teams.hopper import triton as teams

        return teams
    if tile.mode == "integers":
        from engine_core.kernels.linear.integers.hopper import triton as integers

        return integers
    if weight.group_size in (16, 32):
        from engine_core.kernels.linear.blocks.hopper import triton as blocks

        return blocks
    from engine_core.kernels.linear.groups.hopper import triton as hopper

    return hopper


def _hopper_takes(x: Tensor, weight: GroupWeight, tile: tiles.Tile, ending: str) -> bool:
    """Whether a kernel for codes on Hopper takes this linear."""
    from engine_core.kernels.launch.gluon import runs_gluon

    if not runs_gluon(x.device):
        return False
    hopper = _kernel_of_codes(weight, tile)
    taken: bool = hopper.fits(x, weight) and hopper.is_trusted(x, weight, tile, ending)
    return taken


def _held_takes(x: Tensor, weight: Tensor, tile: tiles.Tile, ending: str) -> bool:
    """Whether the kernel on Hopper whose weight waits in shared memory takes this linear."""
    from engine_core.kernels.launch.gluon import runs_gluon

    if not runs_gluon(x.device):
        return False
    from engine_core.kernels.linear.held.hopper import triton as held

    return held.fits(x, weight) and held.is_trusted(x, tile, ending)


def _launch(
    x: Tensor | DeferredRMSNorm,
    weight: Tensor | CodedWeight,
    epilogue: Any,
    tile: tiles.Tile,
    bias: Tensor | None,
) -> Tensor:
    """The result of the kernel that the tile is of."""
    if tile.mode in ("codes", "teams", "integers"):
        assert isinstance(weight, GroupWeight), "no other weight has such a tile"
        out: Tensor = _kernel_of_codes(weight, tile).linear(x, weight, epilogue, tile, bias)
        return out
    if tile.mode == "held":
        assert isinstance(weight, Tensor), "codes have no such tile"
        from engine_core.kernels.linear.held.hopper import triton as held

        return held.linear(x, weight, epilogue, tile, bias)
    from engine_core.kernels.linear import triton

    return triton.linear(x, triton.reader_of(weight), epilogue, tile, bias)


def _tile(
    x: Tensor,
    weight: Tensor | CodedWeight,
    gated: bool,
    deterministic: bool = False,
    ending: str | None = None,
) -> tiles.Tile | None:
    """The tile of this linear's kernel of few rows; None where it is not used.

    ``ending`` is what follows the products, by its name in Hopper's kernels; None if those have no
    such end.
    """
    if not x.is_cuda or x.stride(-1) != 1 or x.dtype != weight.dtype:
        return None
    n, k = weight.shape
    shape = (x.numel() // k, n, k, gated, gpu_of(x.device))
    if isinstance(weight, CodedWeight):
        if deterministic or x.dtype not in _SIXTEEN_BITS:
            return None
        if ending is not None and isinstance(weight, GroupWeight):
            if weight.group_size in (16, 32):
                choices = [tiles.choose_blocks_tile(*shape, weight.block_kind)]
            else:
                choices = [weight.tile_of_teams(shape[0], gated, shape[-1])]
                if weight.bits == 4:
                    choices.append(tiles.choose_codes_tile(*shape))
            for tile in choices:
                if tile is not None and _hopper_takes(x, weight, tile, ending):
                    return tile
        return weight.tile(shape[0], gated, shape[-1])
    if not weight.is_contiguous() or weight.data_ptr() % 16:
        return None
    if deterministic:
        few = 0 < shape[0] <= tiles.few_rows_of_invariant(n)
        return tiles.choose_invariant_tile(*shape, x.dtype) if few else None
    if x.dtype not in _SIXTEEN_BITS:
        return None
    tile = tiles.choose_tile(*shape)
    if tile is None or ending is None:
        return tile
    held = tiles.choose_held_tile(*shape)
    return held if held is not None and _held_takes(x, weight, held, ending) else tile
