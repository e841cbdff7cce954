"""Scales of keys and values that a tool calibrated, and how its config states them.

Of each attention there is a number for keys and one for values, called ``k_scale`` and ``v_scale``
by the attention's name or by its projections', ``kv_scale`` for both, or ``output_scale`` of the
projections. A cache of e4m3 is then kept by these instead of a scale of each token and head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from engine_core.errors import ConfigError, ErrorCode
from engine_core.nn.attention import Attention
from engine_core.nn.linear import Linear
from engine_core.nn.loading import load_weight, take
from engine_core.nn.quantization.fp8_checkpoint import check_values, unsupported
from engine_core.nn.quantization.scheme import QuantizationScheme

if TYPE_CHECKING:
    from engine_core.nn.loading import LoadAccount, Weights

_NAME = re.compile(
    r"(?P<owner>.+?)(?:\.attn|\.(?P<projection>[qkv])_proj)?"
    r"\.(?P<leaf>[qkv]_scale|kv_scale|prob_scale|output_scale)"
)
_ROUTES = "_kv_scale_routes"
_Route = tuple[Attention, tuple[str, ...]] | None


def stated(settings: Mapping[str, Any] | None) -> Literal["static", "dynamic"] | None:
    """How ``kv_cache_scheme`` has an e4m3 cache scaled: by the checkpoint, or as it is written.

    Raises:
        ConfigError: it says something else.
    """
    given = (settings or {}).get("kv_cache_scheme")
    if not given:
        return None
    if given == "static":
        return "static"
    if not isinstance(given, dict):
        raise unsupported(f"kv_cache_scheme is {given!r}, neither 'static' nor an object")
    check_values("kv_cache_scheme", given, {"type": ("float",), "num_bits": (8,),
                 "symmetric": (True, None), "dynamic": (False, True, None)})  # fmt: skip
    if given.get("dynamic"):
        return "dynamic"
    check_values("kv_cache_scheme", given, {"strategy": ("tensor",)})
    return "static"


def set_aside(
    model: nn.Module, headers: Mapping[str, Any], scheme: QuantizationScheme | None
) -> None:
    """Have the tensors of such scales kept from the model's own ``load_weights``.

    Only of a checkpoint that a tool quantised. :func:`place` says which of them are used.
    """
    if scheme is None or scheme.cache_settings is None:
        return
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names = [name for name in headers if _which(name) is not None and name not in own]
    setattr(model, _ROUTES, dict.fromkeys(names))


def of_cache(headers: Iterable[str]) -> list[str]:
    """The names of scales of keys and values among those of a checkpoint's tensors."""
    found = ((name, _which(name)) for name in headers)
    return [name for name, which in found if which is not None and which[1]]


def is_scale(name: str) -> bool:
    """Whether a tensor's name is that of a scale of keys, values or queries."""
    return _which(name) is not None


def _which(name: str) -> tuple[str, tuple[str, ...]] | None:
    """The attention that a scale is of, and its parameters that the scale is for."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    owner, projection, leaf = found["owner"], found["projection"], found["leaf"]
    if leaf == "output_scale":
        if projection is None:
            return None
        leaf = f"{projection}_scale"
    both = ("k_scale", "v_scale")
    # Queries and probabilities are not rounded here.
    return owner, both if leaf == "kv_scale" else (leaf,) if leaf in both else ()


def place(
    model: nn.Module,
    account: LoadAccount,
    headers: Mapping[str, Any],
    scheme: QuantizationScheme | None,
) -> bool:
    """Give each attention that keeps e4m3 parameters for the scales of the checkpoint.

    Returns:
        whether there are any; they are not used by a cache of other types.

    Raises:
        ConfigError: the config says that there are scales, or some attention has them, and one has
            not both; or one is no single number.
    """
    routes: dict[str, _Route] = getattr(model, _ROUTES, {})
    expected = scheme is not None and stated(scheme.cache_settings) == "static"
    dynamic = scheme is not None and stated(scheme.cache_settings) == "dynamic"
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Attention) and module.codes == "float8_e4m3fn"
    }
    by_owner: dict[str, dict[str, str]] = {}
    for name in routes:
        found = _which(name)
        assert found is not None, "only such names were set aside"
        for leaf in found[1]:
            by_owner.setdefault(found[0], {})[leaf] = name
    if not layers or dynamic or not (by_owner or expected):
        return False
    for place, layer in layers.items():
        owner = _owner(model, account, place, set(by_owner))
        scales = by_owner.get(owner, {}) if owner is not None else {}
        if len(scales) < 2:
            lacking = "k_scale" if "k_scale" not in scales else "v_scale"
            at = owner or place.rpartition(".")[0]
            why = "kv_cache_scheme says that there is one" if expected else "other scales are there"
            raise unsupported(
                f"there is no {at}.{lacking}, by which the cache of {place} would be kept, and "
                f"{why}"
            )
        for name in set(scales.values()):
            shape = list(headers[name].shape)
            if math.prod(shape) != 1:
                raise unsupported(f"{name} has shape {shape}, not one number for all heads")
            leaves = tuple(leaf for leaf, each in scales.items() if each == name)
            routes[name] = layer, leaves
        layer.expect_scales()
    return True


def _owner(model: nn.Module, account: LoadAccount, place: str, owners: set[str]) -> str | None:
    """The name that the checkpoint has for an attention: that of the linears beside it."""
    parent = place.rpartition(".")[0]
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name.startswith(f"{parent}."):
            for source in sorted(account.sources(module.weight)):
                parts = source.split(".")
                around = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
                found = next((each for each in around if each in owners), None)
                if found is not None:
                    return found
    return parent if parent in owners else None


def used(model: nn.Module) -> Iterator[str]:
    """The names of the tensors that :func:`place` gave an attention."""
    routes: dict[str, _Route] = getattr(model, _ROUTES, {})
    return (name for name, route in routes.items() if route is not None)


def routed(model: nn.Module, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Load the scales that were placed, pass over those that are not used, and give the others."""
    routes: dict[str, _Route] = getattr(model, _ROUTES, {})
    for name, tensor in weights:
        if name not in routes:
            yield name, tensor
            continue
        route = routes[name]
        if route is None:
            take(tensor)
            continue
        for leaf in route[1]:
            load_weight(route[0].get_parameter(leaf), tensor)


def settle(model: nn.Module) -> None:
    """Take the scales that were loaded as numbers, once there are all.

    Raises:
        ConfigError: one is not positive, or not finite.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, Attention) or "k_scale" not in layer._parameters:
            continue
        values = [float(layer.get_parameter(leaf)) for leaf in ("k_scale", "v_scale")]
        for leaf, value in zip(("k_scale", "v_scale"), values, strict=True):
            if not 0 < value < torch.inf:
                raise ConfigError(
                    f"the {leaf} of {name} is {value}, no scale of a cache; take another "
                    "checkpoint of the model, or kv_cache_dtype='int8'",
                    code=ErrorCode.QUANTIZATION,
                )
        layer.kv_scales = values[0], values[1]
