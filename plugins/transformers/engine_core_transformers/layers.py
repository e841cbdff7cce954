"""Decoder layers whose residual is added in the launch of the norm after it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine_core.nn.module import hooks_registered
from engine_core_transformers.attention import has_layer
from engine_core_transformers.fused import Norm
from engine_core_transformers.merged import Call, Watch

# The place in a layer's call that an argument of its attention comes from; None for the norm's
# result. Anything else is a constant.
_Source = tuple[str | int, Any] | None


@dataclass(frozen=True, slots=True)
class _Parts:
    """The norms of a layer, the names of its other parts, and how it calls its attention."""

    norms: list[nn.Module]
    attention: str
    mlp: str
    args: list[_Source]
    kwargs: dict[str, _Source]
    gives_tuple: bool

    def attend(
        self, layer: nn.Module, normed: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """The attention's result, with its other arguments out of those of the layer."""

        def value(source: _Source) -> Any:
            if source is None:
                return normed
            place, constant = source
            if place == "":
                return constant
            return args[place] if isinstance(place, int) else kwargs[place]

        given = {key: value(source) for key, source in self.kwargs.items()}
        out: Any = getattr(layer, self.attention)(*map(value, self.args), **given)
        first: Tensor = out[0] if self.gives_tuple else out
        return first


def fuse_layers(model: nn.Module, watch: Watch, norms: dict[nn.Module, Norm]) -> int:
    """Fuse the residuals of decoder layers with the norms after them, one layer's and the next's.

    A layer is one of ``h = x + attention(norm(x))`` and ``h + mlp(norm(h))``, or with two more
    norms, of what is added; random numbers show whether it is.

    Args:
        model: whose attention layers are there.
        watch: the calls of its modules.
        norms: the norms that are ours.

    Returns:
        How many layers there are.
    """
    readers = {
        (id(call.args[0]), call.before): norm
        for module, norm in norms.items()
        if (call := watch.once(module)) is not None and call.alone
    }
    count = 0
    for layer in model.modules():
        call = watch.once(layer)
        parts = None if call is None else _parts(layer, call, watch, norms)
        if call is None or parts is None or not _is_plain(layer, parts, call):
            continue
        following = readers.get((id(call.output), call.after))
        layer.forward = _Forward(layer, parts, [norms[each] for each in parts.norms], following)
        count += 1
    return count


class _Forward:
    """The forward of a layer."""

    def __init__(
        self, layer: nn.Module, parts: _Parts, norms: list[Norm], following: Norm | None
    ) -> None:
        self._layer, self._parts, self._norms, self._following = layer, parts, norms, following

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if hooks_registered(self._layer):
            own: Callable[..., Tensor] = type(self._layer).forward
            return own(self._layer, x, *args, **kwargs)
        mlp = getattr(self._layer, self._parts.mlp)
        out = self._parts.attend(self._layer, self._norms[0](x), args, kwargs)
        if len(self._norms) == 4:
            _, after, before, last = self._norms
            normed, x = before.add(after(out), x)
            out = last(mlp(normed))
        else:
            normed, x = self._norms[1].add(out, x)
            out = mlp(normed)
        return x + out if self._following is None else self._following.ahead(out, x)


def _parts(
    layer: nn.Module, call: Call, watch: Watch, norms: dict[nn.Module, Norm]
) -> _Parts | None:
    """The parts of what may be a layer; None for what has others."""
    called = [
        child
        for child in watch.calls
        if child in set(layer.children()) and not isinstance(child, nn.Dropout | nn.Identity)
    ]
    mine = [child for child in called if child in norms]
    attending = [child for child in called if has_layer(child)]
    rest = [child for child in called if child not in norms and not has_layer(child)]
    if len(mine) not in (2, 4) or len(attending) != 1 or len(rest) != 1 or not call.args:
        return None
    calls = [each for child in (*mine, *attending, *rest) if (each := watch.once(child))]
    if len(calls) != len(mine) + 2:
        return None
    first, attended, fed = calls[0], calls[-2], calls[-1]
    x, out = call.args[0], attended.output
    gives_tuple = isinstance(out, tuple)
    tensors = [x, call.output, out[0] if gives_tuple else out, fed.output]
    if not fed.alone or not all(isinstance(each, Tensor) for each in tensors):
        return None
    if len({(each.dtype, each.shape) for each in tensors}) > 1:
        return None
    try:
        sources = [_source("", each, first, call) for each in attended.args]
        named = {key: _source(key, each, first, call) for key, each in attended.kwargs.items()}
    except LookupError:
        return None
    names = {child: key for key, child in layer.named_children()}
    return _Parts(mine, names[attending[0]], names[rest[0]], sources, named, gives_tuple)


def _source(key: str, value: Any, norm: Call, call: Call) -> _Source:
    """The place where a layer with such a call finds an argument of its attention.

    Raises:
        LookupError: it is made in the layer.
    """
    if value is norm.output:
        return None
    if key and key in call.kwargs and call.kwargs[key] is value:
        return key, None
    if isinstance(value, Tensor | tuple):
        for index, each in enumerate(call.args[1:]):
            if each is value:
                return index, None
        for name, each in call.kwargs.items():
            if each is value:
                return name, None
    # A number of tokens would be another one in the next step.
    tokens = type(value) is int and value in call.args[0].shape[:-1]
    if value is None or (isinstance(value, bool | int | float | str) and not tokens):
        return "", value
    raise LookupError(key)


class _Fake(nn.Module):
    """A function of each row in the place of a part, which gives what the part does."""

    def __init__(self, width: int, random: torch.Generator, *more: Any) -> None:
        super().__init__()
        self.scale = torch.randn(width, generator=random)
        self.more = more

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The function of the first tensor that is on the CPU."""
        x = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and not x.is_meta)
        out = torch.tanh(x) * self.scale + x.roll(1, dims=-1)
        return (out, *self.more) if self.more else out


def _is_plain(layer: nn.Module, parts: _Parts, call: Call) -> bool:
    """Whether a layer does nothing else than :class:`_Forward` with its parts."""
    random = torch.Generator("cpu").manual_seed(0)
    with torch.device("cpu"):
        width = call.args[0].shape[-1]
        x = torch.randn(1, 2, width, generator=random)
        norms = {each: _Fake(width, random) for each in parts.norms}
        more = (None,) if parts.gives_tuple else ()
        attention, mlp = _Fake(width, random, *more), _Fake(width, random)
    probe = copy.copy(layer)
    probe.__dict__["_modules"] = {
        **layer._modules,
        **{key: norms[child] for key, child in layer.named_children() if child in norms},
        parts.attention: attention,
        parts.mlp: mlp,
    }
    first, second, *more_norms = norms.values()
    # The larger ones would show a limit.
    for size in (1.0, 100.0):
        out: Any = attention(first(x * size))
        out = out[0] if parts.gives_tuple else out
        if more_norms:
            middle = x * size + second(out)
            ours = middle + more_norms[1](mlp(more_norms[0](middle)))
        else:
            middle = x * size + out
            ours = middle + mlp(second(middle))
        try:
            theirs = type(layer).forward(probe, x * size, *call.args[1:], **call.kwargs)
        except Exception:  # Its code is anything, which need not run with these parts.
            return False
        if not isinstance(theirs, Tensor) or not torch.allclose(theirs, ours, 1e-4, 1e-4 * size):
            return False
    return True
