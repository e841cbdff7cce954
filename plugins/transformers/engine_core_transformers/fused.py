"""Our kernels in the place of what transformers' code computes in many launches.

A norm takes seven launches there and a rotation of queries and keys ten, which is what decoding
waits for. A module or function is replaced only where random numbers show that ours gives the same.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from engine_core.kernels.norm import rms_norm
from engine_core.kernels.rotary import apply_rotary
from engine_core_transformers.attention import Step

_ROTATION = "apply_rotary_pos_emb"
Rotate = Callable[..., tuple[Tensor, Tensor]]


def replace_norms(model: nn.Module, dtype: torch.dtype) -> int:
    """Have our kernel compute each root mean square norm of ``model`` with weights of ``dtype``.

    Returns:
        How many there are.
    """
    count = 0
    for module in model.modules():
        found = _norm_of(module, dtype)
        if found is not None:
            module.forward = found
            count += 1
    return count


def _norm_of(module: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    """The same norm by our kernel, None for a module that is none."""
    weight = module._parameters.get("weight")
    stated = [vars(module)[key] for key in ("variance_epsilon", "eps") if key in vars(module)]
    plain = "RMSNorm" in type(module).__name__ and len(module._parameters) == 1
    plain = plain and len(stated) == 1 and isinstance(stated[0], float)
    if not plain or weight is None or weight.dim() != 1 or weight.dtype is not dtype:
        return None
    (eps,) = stated
    probe = copy.copy(module)
    draw = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0))
    # So small that a forgotten or another eps would show.
    x, scale = draw[:3] * eps**0.5, draw[3]
    probe.__dict__["_parameters"] = {"weight": nn.Parameter(scale, requires_grad=False)}
    try:
        theirs = type(module).forward(probe, x)
    except (TypeError, ValueError, RuntimeError):  # It wants more than x, or other shapes.
        return None
    for offset in (0.0, 1.0):
        if _close(theirs, rms_norm(x, scale, eps, offset=offset)):
            return partial(_norm, module, eps, offset)
    return None


def _norm(module: nn.Module, eps: float, offset: float, x: Tensor) -> Tensor:
    weight: Tensor = module.weight  # type: ignore[assignment]
    return rms_norm(x, weight, eps, offset=offset)


class Rotations:
    """The rotations of a model's attention modules.

    While the model runs once, each call is looked at; :meth:`replace` has our kernel do those that
    were what it can do. Functions are replaced for this model's modules alone.
    """

    def __init__(self, modules: list[nn.Module], step: Step) -> None:
        self._step = step
        self._seen: dict[nn.Module, list[bool | None]] = {}
        self._original: dict[nn.Module, Rotate] = {}
        for module in modules:
            forward = type(module).forward
            plain = isinstance(forward, FunctionType) and inspect.unwrap(forward) is forward
            original = forward.__globals__.get(_ROTATION) if plain else None
            if original is None or _ROTATION not in forward.__code__.co_names:
                continue
            self._original[module], self._seen[module] = original, []
            self._call_instead(module, self._watched(module, original))

    def _call_instead(self, module: nn.Module, rotate: Rotate) -> None:
        """Have the module's forward find ``rotate`` under the name of the original."""
        forward: Any = type(module).forward
        names = {**forward.__globals__, _ROTATION: rotate}
        code, defaults, cells = forward.__code__, forward.__defaults__, forward.__closure__
        copied = FunctionType(code, names, forward.__name__, defaults, cells)
        copied.__kwdefaults__ = forward.__kwdefaults__
        module.forward = MethodType(copied, module)

    def _watched(self, module: nn.Module, original: Rotate) -> Rotate:
        def rotate(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            known = None if kwargs or len(args) != 4 else _pairing(original, *args)
            self._seen[module].append(known)
            return original(*args, **kwargs)

        return rotate

    def replace(self) -> int:
        """Put our kernel, or the original, where calls were looked at; the number of ours."""
        count = 0
        for module, seen in self._seen.items():
            pairing = seen[0] if len(set(seen)) == 1 else None
            if pairing is None:
                del module.forward
                continue
            self._call_instead(module, self._ours(pairing))
            count += 1
        return count

    def restore(self) -> None:
        """Put the originals back."""
        for module in self._seen:
            module.__dict__.pop("forward", None)

    def _ours(self, interleaved: bool) -> Rotate:
        step = self._step

        def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            # All layers get the same two tensors, so these are made once a step.
            kept = step.angles.get(id(cos))
            if kept is None:
                kept = (cos, *_angles(cos, sin, interleaved))
                step.angles[id(cos)] = kept
            apply_rotary(_rows(q), _rows(k), kept[1], kept[2], interleaved=interleaved)
            return q, k

        return rotate


def _rows(x: Tensor) -> Tensor:
    """``[1, heads, T, D]`` to ``[T, heads, D]``."""
    return x[0].transpose(0, 1)


def _angles(cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """``[1, T, 2 * half]`` to ``[T, half]`` in float32."""
    half = cos.shape[-1] // 2
    which = slice(None, None, 2) if interleaved else slice(half)
    return cos[0, :, which].float().contiguous(), sin[0, :, which].float().contiguous()


def _pairing(original: Rotate, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool | None:
    """Whether the original turns neighbours as our kernel does (True), or halves (False).

    None if it does something else, or changes shapes.
    """
    fits = q.dim() == k.dim() == 4 and q.shape[0] == 1 and cos.dim() == 3 and cos.shape[0] == 1
    if not fits or q.stride(-1) != 1 or k.stride(-1) != 1 or cos.shape[-1] % 2:
        return None
    wide = [x.detach().float() for x in (q, k, cos, sin)]
    theirs = original(*(x.clone() for x in wide))
    for interleaved in (False, True):
        ours = [x.clone() for x in wide[:2]]
        turns = _angles(wide[2], wide[3], interleaved)
        try:
            apply_rotary(_rows(ours[0]), _rows(ours[1]), *turns, interleaved=interleaved)
        except ValueError:
            return None
        pairs = list(zip(ours, theirs, strict=True))
        if all(a.shape == b.shape and _close(a, b) for a, b in pairs):
            return interleaved
    return None


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)
