"""Checks of the imports of a family's package."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from engine_core.testing.case import ConformanceError

ROOMS = ("nn", "kernels", "configs", "registry", "step_context", "inputs", "parsers", "errors")
"""The parts of ``engine_core`` that a family may import."""

NAMES = ("hookimpl", "API_VERSION")
"""The names that it may import from ``engine_core`` itself."""

TYPES_ONLY = ("checkpoint",)
"""Those that it may import only under ``if TYPE_CHECKING``."""

HEAVY = ("torch", "transformers", "triton")
"""Modules that discovery must not import: together they take seconds."""


def package_folder(package: str) -> Path:
    """Where the sources of ``package`` are.

    Raises:
        ConformanceError: it cannot be imported, or is no package.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConformanceError(f"{package!r} is not an importable package; is it installed?")
    return Path(next(iter(spec.submodule_search_locations)))


def check_import_rules(package: str) -> None:
    """Every import statement of the package keeps to the public rooms.

    Raises:
        ConformanceError: one does not; lists file, line and module of each.
    """
    folder = package_folder(package)
    others = _other_families(package)
    broken = []
    for file in sorted(folder.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
        rooms = (*ROOMS, "testing") if file == folder / "conformance.py" else ROOMS
        for line, module, for_types in _imports(tree, set()):
            allowed = (*rooms, *TYPES_ONLY) if for_types else rooms
            wrong = _wrong(module, allowed, others)
            if wrong:
                broken.append(f"{file.relative_to(folder.parent)}:{line} imports {module}, {wrong}")
    if broken:
        raise ConformanceError(
            f"{'; '.join(broken)}. A family may import {', '.join(ROOMS)} of engine_core, "
            f"{' and '.join(NAMES)} from it, and {', '.join(TYPES_ONLY)} for types only"
        )


def _other_families(package: str) -> set[str]:
    modules = {point.value for point in metadata.entry_points(group="engine_core")}
    return {module.split(".")[0] for module in modules} - {package}


def _wrong(module: str, allowed: tuple[str, ...], others: set[str]) -> str | None:
    """The fault in importing ``module``, or None."""
    top, *rest = module.split(".")
    if top in others:
        return "which is another family's package"
    if top != "engine_core" or rest == [] or rest[0] in allowed or rest[0] in NAMES:
        return None
    return "which is none of a family's business"


def _imports(tree: ast.AST, typing_blocks: set[int]) -> Iterator[tuple[int, str, bool]]:
    """Line, dotted name, and whether it is for types only, of each import of other packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            typing_blocks.update(id(inner) for part in node.body for inner in ast.walk(part))
    for node in ast.walk(tree):
        for_types = id(node) in typing_blocks
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, for_types
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}", for_types
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            called = node.func.id if isinstance(node.func, ast.Name) else called
            if called in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value), False


_DISCOVERY = """
import importlib, json, os, sys

package, module, heavy = sys.argv[1], sys.argv[2], sys.argv[3].split(",")

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in heavy:
            frame, own = sys._getframe(1), None
            while frame is not None:
                if frame.f_globals.get("__name__", "").split(".")[0] == package:
                    own = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                    break
                frame = frame.f_back
            # The rest would only take time.
            print(json.dumps([name, own or "something that it uses"]), flush=True)
            os._exit(0)
        return None

sys.meta_path.insert(0, Watch())
plugin = importlib.import_module(module)
for hook in ("config_builders", "input_processors"):
    for item in getattr(plugin, hook, list)():
        importlib.import_module(item.__module__)
for hook in ("module_map", "gguf_adapters", "quantization_schemes"):
    getattr(plugin, hook, dict)()
print("null")
"""


def check_discovery(package: str, module: str) -> None:
    """Import the plugin's module and call its hooks in a fresh process, which brings no torch.

    Raises:
        ConformanceError: it does; names the line.
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", _DISCOVERY, package, module, ",".join(HEAVY)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )
    if done.returncode != 0:
        raise ConformanceError(f"{module} cannot be imported in a fresh process: {done.stderr}")
    blame: tuple[str, str] | None = json.loads(done.stdout.splitlines()[-1])
    if blame is not None:
        name, place = blame
        raise ConformanceError(
            f"discovery of {module} imports {name}, at {place}: every start of engine-core would "
            "pay for it, whatever the model. Import it in the module that holds the model class, "
            "which is loaded when it is asked for"
        )
