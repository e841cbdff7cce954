"""Cuts some definitions out of a package's source, with everything in it that they need."""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from textwrap import indent

from engine_core.errors import PluginLoadError

_LINE_LENGTH = 100
# Of a config builder: see RotaryConfigBuilder.
_OWN = "conventions"


def source_excerpts(
    package: str, wanted: Iterable[tuple[str, str]], imported: Iterable[str] = ()
) -> dict[str, str]:
    """The definitions that are ``wanted`` of ``package``, and all that they use inside it.

    Args:
        package: its import name.
        wanted: pairs of module and name.
        imported: names whose imports are kept even if nothing that is found uses them.

    Returns:
        A module's dotted name to the excerpt of its source: future import, the imports that are
        used, and the definitions in their order. The module's docstring is left out.

    Raises:
        PluginLoadError: a module has no source, or not the name.
    """
    sources: dict[str, _Module] = {}
    found: dict[str, set[str]] = defaultdict(set)
    todo = list(wanted)
    while todo:
        module, name = todo.pop()
        if name in found[module]:
            continue
        source = sources[module] = sources.get(module) or _Module(module)
        if name not in source.definitions:
            raise PluginLoadError(f"{module} does not define {name}, which is to be copied")
        found[module].add(name)
        uses = source.uses(name)
        todo += [(module, used) for used in uses if used in source.definitions]
        homes = [source.imports[used] for used in uses if used in source.imports]
        homes += _imported_from(source.definitions[name])
        todo += [home for home in homes if home[0].split(".")[0] == package]
    return {module: sources[module].text(names, imported) for module, names in found.items()}


class _Module:
    """A parsed module."""

    def __init__(self, name: str) -> None:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            raise PluginLoadError(f"{name} has no source file to copy from")
        self._lines = _without_own(Path(spec.origin).read_text(encoding="utf-8"))
        self._body = ast.parse("\n".join(self._lines)).body
        self.definitions = {name: node for node in self._body for name in defined(node)}
        self.imports: dict[str, tuple[str, str]] = {}
        for statement in self._body:
            for node in (statement, *_for_types(statement)):
                if isinstance(node, ast.ImportFrom) and node.module:
                    for alias in node.names:
                        self.imports[alias.asname or alias.name] = (node.module, alias.name)

    def uses(self, name: str) -> set[str]:
        """The names that a definition reads."""
        return names_in(self.definitions[name])

    def text(self, names: set[str], imported: Iterable[str] = ()) -> str:
        """The source of these definitions and of the imports that they use, or are named."""
        used = set(imported).union(*(self.uses(name) for name in names))
        if any(_imports(_for_types(node), used) for node in self._body):
            used.add("TYPE_CHECKING")
        text: list[str] = []
        gap = end = 0
        after_imports = False
        for node in self._body:
            first, last = self._span(node)
            gap = max(gap, min(first - end, 2))
            lines = _imports([node], used)
            if for_types := self._grouped(_for_types(node), used):
                lines = ["if TYPE_CHECKING:", indent("\n".join(for_types), "    ")]
            elif names.intersection(defined(node)):
                lines = self._lines[first:last]
            if lines:
                # After imports two lines are for definitions alone.
                block = isinstance(node, ast.ClassDef | ast.FunctionDef)
                text += [""] * (gap if block or not after_imports else min(gap, 1)) + lines
                after_imports = isinstance(node, ast.Import | ast.ImportFrom | ast.If)
                gap = 0
            end = last
        return "\n".join(text).strip("\n") + "\n"

    def _grouped(self, body: Iterable[ast.stmt], used: set[str]) -> list[str]:
        """The imports that are used, with an empty line where their author left one."""
        lines: list[str] = []
        empty = False
        end = None
        for node in body:
            empty = empty or (end is not None and node.lineno > end + 1)
            end = node.end_lineno
            if found := _imports([node], used):
                lines += ["", *found] if empty and lines else found
                empty = False
        return lines

    def _span(self, node: ast.stmt) -> tuple[int, int]:
        """First line, counted from 0, with decorators and the comment above, and the end."""
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(item.lineno for item in decorators)]) - 1
        while first > 0 and self._lines[first - 1].startswith("#"):
            first -= 1
        assert node.end_lineno is not None, "ast.parse gives every statement its end"
        return first, node.end_lineno


def _without_own(text: str) -> list[str]:
    """Lines of a source without the methods that are about its family's texts alone."""
    lines = text.splitlines()
    for node in reversed(list(ast.walk(ast.parse(text)))):
        if isinstance(node, ast.FunctionDef) and node.name == _OWN:
            first = min([node.lineno, *(item.lineno for item in node.decorator_list)]) - 1
            while not lines[first - 1]:
                first -= 1
            del lines[first : node.end_lineno]
    return lines


def without_unused(text: str) -> str:
    """A source without the private functions and constants that nothing in it uses."""
    while True:
        body = ast.parse(text).body
        used = {name for node in body for name in names_in(node) - set(defined(node))}
        unused = [
            node
            for node in body
            if isinstance(node, ast.FunctionDef | ast.Assign | ast.AnnAssign)
            and all(name.startswith("_") and name not in used for name in defined(node))
        ]
        if not unused:
            return text
        lines = text.splitlines()
        node = unused[-1]
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        while lines[first - 1].startswith("#"):
            first -= 1
        while not lines[first - 1]:
            first -= 1
        text = "\n".join([*lines[:first], *lines[last:]]) + "\n"


def _for_types(node: ast.stmt) -> list[ast.stmt]:
    """The statements under ``if TYPE_CHECKING``; of any other statement none."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return node.body
    return []


def names_in(node: ast.AST) -> set[str]:
    """The names that stand in a piece of code."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _imported_from(node: ast.AST) -> list[tuple[str, str]]:
    """Modules and names of the imports inside a definition."""
    return [
        (each.module, alias.name)
        for each in ast.walk(node)
        if isinstance(each, ast.ImportFrom) and each.module
        for alias in each.names
    ]


def defined(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
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
