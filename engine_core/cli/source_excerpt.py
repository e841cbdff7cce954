"""Cuts some definitions out of a package's source, with everything in it that they need."""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import indent

from engine_core.errors import PluginLoadError

_LINE_LENGTH = 100


class SourceExcerpt:
    """The definitions that are wanted of a package, by module.

    Attributes:
        modules: dotted name to the excerpt of its source: future import, the imports that are used,
            and the definitions in their order. The module's docstring is left out.
    """

    def __init__(self, package: str, wanted: Iterable[tuple[str, str]]) -> None:
        """Follow what ``wanted``, pairs of module and name, use inside ``package``.

        Raises:
            PluginLoadError: a module has no source, or not the name.
        """
        self._package = package
        self._sources: dict[str, _Module] = {}
        self._names: dict[str, set[str]] = defaultdict(set)
        for module, name in wanted:
            self._take(module, name)
        self.modules: Mapping[str, str] = {
            module: self._sources[module].text(names) for module, names in self._names.items()
        }

    def _take(self, module: str, name: str) -> None:
        if name in self._names[module]:
            return
        if module not in self._sources:
            self._sources[module] = _Module(module)
        source = self._sources[module]
        if name not in source.definitions:
            raise PluginLoadError(f"{module} does not define {name}, which is to be copied")
        self._names[module].add(name)
        for used in source.uses(name):
            if used in source.definitions:
                self._take(module, used)
            home = source.imports.get(used)
            if home is not None and home[0].split(".")[0] == self._package:
                self._take(*home)


class _Module:
    """A parsed module."""

    def __init__(self, name: str) -> None:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            raise PluginLoadError(f"{name} has no source file to copy from")
        text = Path(spec.origin).read_text(encoding="utf-8")
        self._lines = text.splitlines()
        self._tree = ast.parse(text)
        self.definitions: dict[str, ast.stmt] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        # What stands under "if TYPE_CHECKING:".
        self._for_types: list[ast.stmt] = []
        for node in self._tree.body:
            for defined in _defined(node):
                self.definitions[defined] = node
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                self._for_types += node.body
        for node in (*self._tree.body, *self._for_types):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = (node.module, alias.name)

    def uses(self, name: str) -> set[str]:
        """The names that a definition reads."""
        nodes = ast.walk(self.definitions[name])
        return {node.id for node in nodes if isinstance(node, ast.Name)}

    def text(self, names: set[str]) -> str:
        """The source of these definitions."""
        kept = [node for node in self._tree.body if names.intersection(_defined(node))]
        used = set().union(*(self.uses(name) for name in names))
        for_types = _imports(self._for_types, used)
        if for_types:
            used.add("TYPE_CHECKING")
        parts = [self._group(_imports(self._tree.body, used))]
        if for_types:
            parts.append("\nif TYPE_CHECKING:\n" + indent("\n".join(for_types), "    "))
        last: ast.stmt | None = None
        for node in kept:
            first, end = self._span(node)
            block = "\n".join(self._lines[first:end])
            if last is None or isinstance(node, ast.ClassDef | ast.FunctionDef):
                gap = "\n\n" if isinstance(node, ast.ClassDef | ast.FunctionDef) else "\n"
            elif isinstance(last, ast.ClassDef | ast.FunctionDef):
                gap = "\n\n"
            else:
                gap = "" if self._span(last)[1] == first else "\n"
            parts.append(f"{gap}{block}")
            last = node
        return "\n".join(parts) + "\n"

    def _span(self, node: ast.stmt) -> tuple[int, int]:
        """First line, counted from 0, with decorators and the comment above, and the end."""
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(item.lineno for item in decorators)]) - 1
        while first > 0 and self._lines[first - 1].startswith("#"):
            first -= 1
        assert node.end_lineno is not None, "ast.parse gives every statement its end"
        return first, node.end_lineno

    @staticmethod
    def _group(lines: list[str]) -> str:
        """Imports as the formatter wants them: future, standard library, the rest."""
        future = [line for line in lines if line.startswith("from __future__")]
        ours = [line for line in lines if line.startswith(("from engine_core", "import engine_c"))]
        torch = [line for line in lines if line.startswith(("from torch", "import torch"))]
        standard = [line for line in lines if line not in (*future, *ours, *torch)]
        groups = [future, standard, torch, ours]
        return "\n\n".join("\n".join(group) for group in groups if group)


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    inner = [item for target in targets for item in ast.walk(target)]
    return [item.id for item in inner if isinstance(item, ast.Name)]


def _imports(body: Iterable[ast.stmt], used: set[str]) -> list[str]:
    return [
        line
        for node in body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in _import_lines(node, used)
    ]


def _import_lines(node: ast.Import | ast.ImportFrom, used: set[str]) -> list[str]:
    """The import statement with the names that are used, as its module's author formats it."""
    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
        return [ast.unparse(node)]
    names = [alias for alias in node.names if (alias.asname or alias.name.split(".")[0]) in used]
    if not names:
        return []
    if isinstance(node, ast.Import):
        return [ast.unparse(ast.Import([alias])) for alias in names]
    line = ast.unparse(ast.ImportFrom(node.module, names, node.level))
    if len(line) <= _LINE_LENGTH:
        return [line]
    each = "".join(f"    {ast.unparse(alias)},\n" for alias in names)
    return [f"from {node.module} import (\n{each})"]
