"""Checks of what a model's own code gives, where the engine takes it over."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engine_core.errors import ModelError
from engine_core.kernels import CodedRows, DeferredRMSNorm
from engine_core.plugin_code import defined_at, is_own, label


def shown(value: Any) -> str:
    """A result in words: the shape of a tensor, the kind of anything else."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple | list) and len(value) <= 4:
        return f"({', '.join(map(shown, value))})"
    return "None" if value is None else f"a {type(value).__name__}"


def refuse(model: nn.Module, method: str, given: Any, wanted: str) -> ModelError:
    """The error of a method of ``model`` that returned ``given``."""
    where = defined_at(getattr(model, method)) or method
    return ModelError(f"{label('', model)}, {where}, returned {shown(given)}; {wanted}")


def check_shape(
    model: nn.Module, method: str, given: Any, *shape: int | None, names: str
) -> Tensor:
    """``given``, which ``method`` of ``model`` returned, if it is floats of this shape.

    Args:
        model: the model.
        method: its method.
        given: anything.
        shape: of the tensor expected; None for any size.
        names: the dimensions, for the message.

    Raises:
        ModelError: it is not.
    """
    if (
        isinstance(given, Tensor)
        and given.dim() == len(shape)
        and given.is_floating_point()
        and all(size is None or size == own for size, own in zip(shape, given.shape, strict=True))
    ):
        return given
    sizes = ", ".join(
        name if size is None or name == str(size) else f"{name} = {size}"
        for name, size in zip(names.split(), shape, strict=True)
    )
    raise refuse(model, method, given, f"a tensor of floats [{sizes}] is expected")


@contextmanager
def first_pass(model: nn.Module) -> Iterator[None]:
    """Check, while ``model`` runs for the first time, what goes into its layers.

    Later passes run without: a wrong width shows in the first one. If it fails, the error has a
    note of what the last of the author's own parts before returned, which is often the cause.

    Raises:
        ModelError: a layer of :mod:`engine_core.nn` gets no tensor, or one of the wrong width.
    """
    returned: list[str] = []
    with ExitStack() as undo:
        for name, part in model.named_modules():
            # Those of torch's and of other languages' have their own ways to be called.
            forward: Any = getattr(part, "forward", None)
            if part is model or not hasattr(forward, "__func__"):
                continue
            own = is_own(type(part))
            width = None if own else getattr(part, "input_width", None)
            if own or width is not None:
                run = _checked(label(name, part), forward, width, returned if own else None)
                undo.callback(part.__dict__.pop, "forward", None)
                part.__dict__["forward"] = run
        try:
            yield
        except Exception as error:
            for note in returned:
                error.add_note(note)
            raise


def _checked(
    part: str, forward: Callable[..., Any], width: int | None, returned: list[str] | None
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if width is not None:
            x = args[0] if args else next(iter(kwargs.values()), None)
            fits = isinstance(x, Tensor) and x.shape[-1:] == torch.Size([width])
            if not fits and not isinstance(x, DeferredRMSNorm | CodedRows):
                raise ModelError(f"{part} takes a tensor [..., {width}], got {shown(x)}")
        result = forward(*args, **kwargs)
        # A part that returns nothing is more suspect than those after it.
        if returned is not None and not (returned and returned[0].endswith("returned None")):
            returned[:] = [f"before, {part}, {defined_at(forward)}, returned {shown(result)}"]
        return result

    return run


__all__ = ["check_shape", "first_pass", "refuse", "shown"]
