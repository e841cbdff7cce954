"""Public names: what a package from outside may import of the core."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

# Rooms for authors of models; what they list in ``__all__``, if they have one, is public.
_ROOMS = {
    "engine_core",
    "engine_core.configs",
    "engine_core.errors",
    "engine_core.inputs",
    "engine_core.kernels",
    "engine_core.nn",
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
                public = getattr(room, "__all__", None)
                assert not name.name.startswith("_")
                assert public is None or name.name in public, f"{node.module}.{name.name}"
                imported += 1
    assert imported > 0, f"{file} imports nothing of the core"
