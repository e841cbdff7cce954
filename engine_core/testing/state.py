"""Detection of state that a model keeps from one step to the next."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

State = dict[tuple[str, str], Any]
# What something can be kept in.
_KEPT = (Tensor, np.ndarray, dict, list, set, tuple, int, float, str, bytes, type(None))


def snapshot(model: nn.Module) -> State:
    """Every attribute, parameter and buffer of every module, by module name and attribute."""
    state: State = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers"):
                for inner, tensor in value.items():
                    state[path, inner] = _frozen(tensor)
            elif not name.startswith(("_forward", "_backward", "_modules", "_checked_for_hooks")):
                state[path, name] = _frozen(value)
    return state


def globals_of(package: str) -> State:
    """Every variable of the package's modules that are imported, and of their classes."""
    state: State = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != package:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                owned = {k: v for k, v in vars(value).items() if isinstance(v, _KEPT)}
                state |= {(f"{name}.{key}", k): _frozen(v) for k, v in owned.items()}
            elif isinstance(value, _KEPT) and not key.startswith("__"):
                state[name, key] = _frozen(value)
    return state


def kept_by(processor: object) -> State:
    """Every attribute of an input processor, and of its class."""
    if processor is None:
        return {}
    name = type(processor).__name__
    owned = {**vars(type(processor)), **getattr(processor, "__dict__", {})}
    return {(name, k): _frozen(v) for k, v in owned.items() if isinstance(v, _KEPT)}


def changes(model: nn.Module, before: State, after: State) -> list[str]:
    """The differences, such as ``"model.layers.0.self_attn.mask (set)"``."""
    classes = {path: type(module).__name__ for path, module in model.named_modules()}
    found = []
    for key in dict.fromkeys((*before, *after)):
        if key in before and key in after and _same(before[key], after[key]):
            continue
        path, name = key
        kind = "set" if key not in before else "removed" if key not in after else "changed"
        found.append(f"{path or classes['']}.{name} ({kind})")
    return found


def _frozen(value: Any) -> Any:
    """A copy that later changes of ``value`` do not reach."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_frozen(item) for item in value]
    if isinstance(value, set):
        return set(value)
    return value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other or bool(one == other)
