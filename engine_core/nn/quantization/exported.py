"""Integer codes as ``engine-core export`` writes them, which are those of compressed-tensors.

Of 4 bits (its pack-quantized) a linear has ``weight_packed``, eight codes in an int32, a
``weight_scale`` for each group of 32, a ``weight_zero_point``, eight rows in an int32, and
``weight_shape``; or a ``weight_zero`` for each group, see
:class:`~engine_core.nn.quantization.packed.CompressedIntegersScheme`, which reads them. Of 8 bits
(its int-quantized) it has a ``weight`` of int8 and a ``weight_scale`` for each row; so may the
vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine_core.kernels.linear.groups import pack_codes
from engine_core.nn.quantization.int4 import GROUP_SIZE, quantize_int4
from engine_core.nn.quantization.int8 import Int8Matrix
from engine_core.nn.quantization.packed import unpack_numbers

# Codes of 4 bits in an int32.
_CODES = 8
# Numbers that are quantised at once, so that temporaries stay small.
_CHUNK = 2**20


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


QUANTIZERS = {"int4": quantize_with_zero_points, "int4-zeros": quantize_int4}
"""What makes the codes ``[N, K]``, scales and zeros ``[N, K / 32]`` of a form of 4 bits."""


def squared_error(form: str, weight: Tensor) -> float:
    """The sum of squares by which a form of 4 bits is off ``weight [N, K]``."""
    codes, scales, zeros = QUANTIZERS[form](weight)
    group = torch.arange(weight.shape[1]) // GROUP_SIZE
    numbers = unpack_numbers(pack_codes(codes, 4), 4, group, scales, zeros)
    return float((numbers - weight).square().sum())


def pack_form(form: str, weight: Tensor) -> dict[str, Tensor]:
    """The tensors that stand for ``weight [N, K]`` in a form, by the last part of their names.

    K is a multiple of 32 and N, with 4 bits, of 8.
    """
    if form == "int8":
        matrix = Int8Matrix(weight)
        return {"weight": matrix.codes, "weight_scale": matrix.scales.unsqueeze(1)}
    step = max(_CHUNK // weight.shape[1] // _CODES, 1) * _CODES
    made = [QUANTIZERS[form](rows) for rows in weight.split(step)]
    codes, scales, zeros = (torch.cat(kind) for kind in zip(*made, strict=True))
    if form == "int4":
        zeros = _words(zeros.T).T.contiguous()
    values = (_words(codes), scales, zeros, torch.tensor(weight.shape))
    return dict(zip(form_shapes(form, *weight.shape), values, strict=True))


def _words(codes: Tensor) -> Tensor:
    # Of a single row contiguous() keeps strides that no view of 32 bits takes.
    packed = pack_codes(codes, 4).clone(memory_format=torch.contiguous_format)
    return packed.view(torch.int32)


def form_shapes(form: str, rows: int, columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of what :func:`pack_form` makes."""
    if form == "int8":
        return {"weight": ("int8", (rows, columns)), "weight_scale": ("bfloat16", (rows, 1))}
    groups = columns // GROUP_SIZE
    points = {"weight_zero_point": ("int32", (rows // _CODES, groups))}
    return {
        "weight_packed": ("int32", (rows, columns // _CODES)),
        "weight_scale": ("bfloat16", (rows, groups)),
        **(points if form == "int4" else {"weight_zero": ("bfloat16", (rows, groups))}),
        "weight_shape": ("int64", (2,)),
    }
