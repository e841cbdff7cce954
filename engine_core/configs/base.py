"""The common base of every config model."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from engine_core.errors import ConfigError


def _explain(model: str, error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"])
        offered = "" if item["type"] == "missing" else f", got {item['input']!r}"
        message = item["msg"].removeprefix("Value error, ")
        lines.append(f"{model}.{field}: {message}{offered}" if field else f"{model}: {message}")
    return "; ".join(lines)


class FrozenConfig(BaseModel):
    """A frozen pydantic model that refuses unknown fields.

    Raises:
        ConfigError: a field is unknown, missing or out of range; names the field and the value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(type(self).__name__, error)) from None

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated like a new one."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**values, **changes})
