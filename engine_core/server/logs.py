"""The server's log: lines of text, or JSON objects."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

from engine_core.server.encoding import encode

_FIELDS = "fields"


def log(logger: logging.Logger, level: int, message: str, **fields: Any) -> None:
    """Write ``message`` with ``fields`` beside it."""
    logger.log(level, message, extra={_FIELDS: fields})


class TextFormatter(logging.Formatter):
    """``time LEVEL message key=value ...``."""

    def format(self, record: logging.LogRecord) -> str:
        """See :meth:`logging.Formatter.format`."""
        text = f"{_time(record)} {record.levelname} {record.getMessage()}"
        for name, value in getattr(record, _FIELDS, {}).items():
            shown = value if isinstance(value, int | float) else encode(value).decode()
            text += f" {name}={shown}"
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        return text


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """See :meth:`logging.Formatter.format`."""
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return encode(line).decode()


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def configure_logging(log_format: Literal["text", "json"]) -> None:
    """Send this package's and uvicorn's log to standard error, requests included."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    # What replicas do is as much the server's business as requests are.
    for name in ("server", "engine.autoscale", "engine.ray_replica"):
        logging.getLogger(f"engine_core.{name}").setLevel(logging.INFO)
