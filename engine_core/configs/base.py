"""The common base of every config model."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from engine_core.errors import ConfigError, Fault, shown

_MOST_BITS = 4096


class FieldError(ValueError):
    """Raised by a validator of the whole model for the fault of one field."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def number(value: Any, refused: tuple[type, ...]) -> Any:
    """``value`` as it is.

    Raises:
        ValueError: it is of a type that pydantic would make a number of, or so large that Python
            would not write it out.
    """
    if isinstance(value, refused):
        raise ValueError("a number is expected")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError(f"a number of at most {_MOST_BITS} bits is expected")
    return value


def _faults(error: ValidationError) -> tuple[Fault, ...]:
    faults = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if not place:
            field = getattr(item.get("ctx", {}).get("error"), "field", None)
            faults.append(Fault("", message, field))
            continue
        offered = "" if item["type"] == "missing" else f", got {shown(item['input'])}"
        faults.append(Fault(place, f"{message}{offered}", place))
    return tuple(faults)


class FrozenConfig(BaseModel):
    """A frozen pydantic model that refuses unknown fields; a docstring under one describes it.

    :func:`describe` finds these docstrings. Pydantic would read them from the source whenever the
    class is made, which takes 2 ms each time.

    Raises:
        ConfigError: a field is unknown, missing or out of range; names the field and the value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            name, faults = type(self).__name__, _faults(error)
            lines = (f"{name}.{f.place}".rstrip(".") + f": {f.message}" for f in faults)
            raise ConfigError("; ".join(lines), faults=faults) from None
        except TypeError as error:  # a field's own fields, of which one's name is no text
            raise ConfigError(f"{type(self).__name__}: {error}") from None

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated like a new one."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**values, **changes})


@cache
def describe(model: type[FrozenConfig]) -> dict[str, str]:
    """The docstrings under the fields of a config model, by the fields' names."""
    found = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, FrozenConfig):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef), f"{base} is a class"
        for field, after in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                found[field.target.id] = inspect.cleandoc(after.value.value)
    return found
