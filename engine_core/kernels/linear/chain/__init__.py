"""The linears from one attention to the next, or to the end, as one operation of few rows."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine_core.kernels.gpu import GPU, gpu_of
from engine_core.kernels.launch.quick import Quick, is_quick
from engine_core.kernels.linear import linear, linear_add, linear_add_norm
from engine_core.kernels.linear.fp8 import Fp8Weight
from engine_core.kernels.linear.groups import BLOCK, GroupWeight

# Rows of a step. Beside the parts of one row of x in 8-bit floats the matrix units' columns have no
# room for another; more by 4-bit codes, for which they have, were not measured.
MOST_ROWS = 1
_HOPPER = (9, 0)
# By the bits of a code: columns that are a chunk of each quarter of K, or two groups; what more
# columns than these come to has no room in shared memory, or in registers.
_CHUNK = {8: 4 * 128, 4: 2 * BLOCK}
_MOST_COLUMNS = {8: 65536, 4: 32768}
# Chains that were measured have more bytes; launches of small weights hide one another.
_LEAST_BYTES = 32 << 20


class ChainForm(NamedTuple):
    """The form of a chain's weights, which its kernel depends on and all of them share.

    Attributes:
        bits: 8 of 8-bit floats with a scale a row, 4 of codes in groups of 128.
        scales: what these are of.
        has_zeros: whether groups have zeros.
    """

    bits: int
    scales: torch.dtype = torch.float32
    has_zeros: bool = False

    @classmethod
    def of(cls, weight: Fp8Weight | GroupWeight) -> ChainForm | None:
        """The form of a weight; None if it is none of a chain."""
        if isinstance(weight, Fp8Weight):
            return cls(8) if weight.scales.dim() == 1 else None
        words = weight.words
        fits = (
            (weight.bits, weight.group_size, words.shape[2]) == (4, BLOCK, BLOCK // 4)
            and weight.scales.dtype.itemsize == 2
            and weight.minima is None
            and weight.headers is None
            and weight.centred
            and words.is_contiguous()
        )
        return cls(4, weight.scales.dtype, weight.zeros is not None) if fits else None

    @classmethod
    def shared(cls, forms: Iterable[ChainForm | None]) -> ChainForm | None:
        """The form of all; None if one has none, or they differ."""
        first, *others = set(forms)
        return None if others else first


class ChainNorm(NamedTuple):
    """An RMSNorm between two linears of a chain, or at its end.

    Attributes:
        weight: ``[N]``.
        eps: as of the norm.
        offset: added to the weight.
    """

    weight: Tensor
    eps: float
    offset: float = 0.0


class Chain(NamedTuple):
    """The linears from an attention to the next one, and the norms between them.

    Behind the last attention they are three, to the final norm.

    Attributes:
        weights: the projection back ``[H, heads]``, which the residual is added to and ``middle``
            follows; gate's rows before those of up, ``[2 I, H]``, which the SiLU follows; down
            ``[H, I]``, which the residual is added to and ``end`` follows; queries, keys and
            values ``[Q, H]``, if there are any.
        middle: the norm before gate and up.
        end: the norm before the next attention, or the final one.
        biases: of as many; None where there is none.
    """

    weights: tuple[Fp8Weight, ...] | tuple[GroupWeight, ...]
    middle: ChainNorm
    end: ChainNorm
    biases: tuple[Tensor | None, ...]


def chain_declined(
    rows: int,
    shapes: list[tuple[int, int]],
    dtype: torch.dtype,
    gpu: GPU | None,
    bits: int = 8,
) -> str | None:
    """The reason why there is no kernel for so many rows and such a chain; None if there is.

    Args:
        rows: tokens.
        shapes: ``(N, K)`` of the matrices, in their order.
        dtype: of x.
        gpu: where it runs.
        bits: of a code, as of :class:`ChainForm`.
    """
    if rows > MOST_ROWS:
        return "for so many rows the linears are faster one by one"
    if gpu is None or gpu.capability != _HOPPER:
        return "only GPUs of compute capability 9.0 have a kernel for a chain of linears"
    if is_quick(Quick.PRODUCTS):
        return "its kernel takes seconds to compile"
    if dtype != torch.bfloat16:
        # Two 8-bit floats have fewer bits than one of float16. And a group's greatest number is
        # found among the bits of bfloat16, the first half of a float32's.
        return f"its kernel is for bfloat16, not for {dtype}"
    chunk, most = _CHUNK[bits], _MOST_COLUMNS[bits]
    rows_of_tiles = (16, 32 if bits == 4 else 16, 16, 16)[: len(shapes)]
    fits = (n % of == 0 for (n, _), of in zip(shapes, rows_of_tiles, strict=True))
    if any(k % chunk or k > most for _, k in shapes) or not all(fits):
        gated = ", that of gate and up one of 32" if bits == 4 else ""
        return f"each K must be a multiple of {chunk}, {most} at most, each N one of 16{gated}"
    if sum(n * k for n, k in shapes) * bits < 8 * _LEAST_BYTES:
        return "launches of such small weights hide one another"
    return None


def chains_run_on(device: torch.device) -> bool:
    """Whether a GPU that has the kernel can run it; True for devices that :func:`chain_declined`.

    Its programs wait for one another, so that all of them must be there at once: not beside those
    of another process, as NVIDIA's MPS has it. And Triton must be one that has the kernel's words.
    """
    if device.type != "cuda":
        return True
    from engine_core.kernels.launch.gluon import runs_gluon

    return not _shares_multiprocessors() and runs_gluon(device)


def _runs(x: Tensor, chain: Chain) -> bool:
    """Whether these rows ``[M, K]`` are one launch; the kernel may be tried for that."""
    shapes = [(weight.shape[0], weight.shape[1]) for weight in chain.weights]
    form = ChainForm.shared(ChainForm.of(weight) for weight in chain.weights)
    if form is None:
        return False
    if chain_declined(len(x), shapes, x.dtype, gpu_of(x.device), form.bits) is not None:
        return False
    if not chains_run_on(x.device) or barrier_count(x.device) is None:
        return False
    kernel = _kernel_of(chain)
    return bool(kernel.fits(x, chain) and kernel.is_trusted(x, chain))


def _kernel_of(chain: Chain) -> Any:
    """The module of the kernel for such weights."""
    if isinstance(chain.weights[0], GroupWeight):
        from engine_core.kernels.linear.chain.groups.hopper import triton as groups

        return groups
    from engine_core.kernels.linear.chain.hopper import triton as floats

    return floats


def linear_chain(x: Tensor, residual: Tensor, chain: Chain) -> tuple[Tensor, Tensor]:
    """From an attention's heads to the next one's queries, keys and values, not rotated yet.

    One launch where :func:`chain_declined` has no objection and the kernel proves right, else one
    for each linear. Sums are rounded alike; a norm's division follows the next product. A chain
    that ends with a norm gives that one's result, which it rounds as a norm by itself does.

    Args:
        x: ``[..., heads]``.
        residual: ``[..., H]``, that of the attention, x's dtype.
        chain: the linears and norms.

    Returns:
        ``[..., Q]``, or of three linears ``[..., H]``, and the residual ``[..., H]`` beside it.
    """
    rows = x.reshape(-1, x.shape[-1])
    if _runs(rows, chain):
        kernel = _kernel_of(chain)
        product, total = kernel.chain(rows, residual.reshape(len(rows), -1), chain)
        return product.view(*x.shape[:-1], -1), total.view_as(residual)
    o, gate_up, down, *following = chain.weights
    o_bias, gate_up_bias, down_bias, *following_bias = chain.biases
    (weight, eps, offset), (end_weight, end_eps, end_offset) = chain.middle, chain.end
    normed, total = linear_add(x, o, o_bias, residual, weight, eps, norm_offset=offset)
    activated = linear(normed, gate_up, gate_up_bias, gated=True)
    given = (activated, down, down_bias, total, end_weight, end_eps)
    if not following:
        return linear_add_norm(*given, norm_offset=end_offset)
    normed, total = linear_add(*given, norm_offset=end_offset)
    return linear(normed, *following, *following_bias), total


@functools.cache
def _shares_multiprocessors() -> bool:
    """Whether NVIDIA's MPS may run kernels of another process beside ours."""
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    return Path(pipe).exists()


_COUNTS: dict[tuple[torch.device, int], Tensor] = {}


def barrier_count(device: torch.device) -> Tensor | None:
    """``[2]`` int64, of this stream alone, that the programs of each launch add to.

    The first grows by as many for each meeting. The second counts tiles that are dealt out, and is
    0 between launches.

    None in a graph capture for whose stream none was made: the graph's memory would be its place.
    """
    cuda = device.type == "cuda"
    key = (device, torch.cuda.current_stream(device).cuda_stream if cuda else 0)
    if key not in _COUNTS and not (cuda and torch.cuda.is_current_stream_capturing()):
        _COUNTS[key] = torch.zeros(2, dtype=torch.int64, device=device)
    return _COUNTS.get(key)
