"""Public names: what a package from outside may import of the core."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

# Rooms for packages, as docs/write-a-plugin.md lists them. Public is what they list in ``__all__``
# or, without one, what they define themselves.
_ROOMS = {
    "engine_core",
    "engine_core.configs",
    "engine_core.errors",
    "engine_core.inputs",
    "engine_core.kernels",
    "engine_core.nn",
    "engine_core.nn.epilogue",
    "engine_core.nn.quantization",
    "engine_core.parsers",
    "engine_core.registry",
    "engine_core.step_context",
}


def check_imports(file: Path) -> None:
    """Assert that ``file`` imports nothing of the core but public names."""
    imported = 0
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert not any(name.name.startswith("engine_core") for name in node.names)
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("engine_core."):
            assert node.module in _ROOMS, f"{file.name} imports from {node.module}"
            room = importlib.import_module(node.module)
            for name in node.names:
                assert not name.name.startswith("_")
                assert name.name in _public(room), f"{node.module}.{name.name} is not public"
                imported += 1
    assert imported > 0, f"{file} imports nothing of the core"


def _public(room: ModuleType) -> Collection[str]:
    listed: Collection[str] | None = getattr(room, "__all__", None)
    if listed is not None:
        return listed
    members = vars(room).items()
    return [name for name, value in members if getattr(value, "__module__", "") == room.__name__]
