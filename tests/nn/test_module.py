"""Whether somebody watches a model is known without looking at each of its modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from engine_core.nn.module import Module, hooks_registered


class Part(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def model() -> nn.Sequential:
    """Parts of our own and of torch's, one within the other."""
    return nn.Sequential(Part(), nn.Sequential(nn.Identity(), Part()))


def ignore(*_: Any) -> None: ...


Register = Callable[[nn.Sequential], RemovableHandle]
REGISTER: dict[str, Register] = {
    "ours": lambda top: top[0].register_forward_hook(ignore),
    "torch's": lambda top: top.get_submodule("1.0").register_forward_hook(ignore),
    "before": lambda top: top.get_submodule("1.1").register_forward_pre_hook(ignore),
    "itself": lambda top: top.register_forward_hook(ignore),
    "every module": lambda top: register_module_forward_hook(ignore),
    "before every module": lambda top: register_module_forward_pre_hook(ignore),
}


@pytest.mark.parametrize("register", REGISTER.values(), ids=REGISTER.keys())
def test_a_hook_is_noticed_when_it_comes_and_when_it_goes(register: Register) -> None:
    top = model()
    assert not hooks_registered(top)
    for _ in range(2):
        handle = register(top)
        try:
            assert hooks_registered(top)
            assert hooks_registered(top)
        finally:
            handle.remove()
        assert not hooks_registered(top)


def test_a_hook_that_is_there_from_the_start_is_noticed() -> None:
    top = model()
    top.get_submodule("1.0").register_forward_hook(ignore)
    assert hooks_registered(top)
    assert hooks_registered(top[1])
    assert not hooks_registered(top[0])
    assert hooks_registered(copy.deepcopy(top))


def test_other_models_hooks_are_not_this_ones() -> None:
    top, other = model(), model()
    other[0].register_forward_hook(ignore)
    assert not hooks_registered(top)
    assert hooks_registered(other)


def test_without_hooks_no_module_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    top = model()
    assert not hooks_registered(top)

    def modules(self: nn.Module) -> Iterator[nn.Module]:
        raise AssertionError("looked for hooks")

    monkeypatch.setattr(nn.Module, "modules", modules)
    assert not hooks_registered(top)
