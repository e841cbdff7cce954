"""``engine-core new-plugin``: the package of a new family, made after an installed one."""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import keyword
import re
from collections.abc import Mapping
from importlib import resources
from importlib.metadata import requires
from pathlib import Path
from string import Template
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_core import API_VERSION, __version__
from engine_core.cli.command import command
from engine_core.errors import ConfigError, PluginLoadError

if TYPE_CHECKING:
    from engine_core.configs import ConfigBuilder, HFConfig
    from engine_core.registry import PluginReport, Registry

_STEM = re.compile(r"(.+?)(For[A-Z]\w*|LMHeadModel|Model)")
# Keys of a checkpoint's config that a tiny one must not have: ids beyond its vocabulary, and
# references to weights or code that it lacks.
_WIDTH = 100
# Files that the README of a new package describes by itself.
_DESCRIBED = ("plugin", "config", "model", "conformance")
_DROPPED = re.compile(r".*_token_id|auto_map|(torch_)?dtype|quantization_config|_name_or_path")


class _Pattern:
    """The installed family that a new one is made after."""

    def __init__(self, registry: Registry, name: str) -> None:
        """Raises BadParameter if it is not installed, PluginLoadError if it cannot be read."""
        self.report = _find_report(registry, name)
        self.package = self.report.module.split(".")[0]
        self.origin = f"{self.report.distribution} {self.report.version}"
        plugin = importlib.import_module(self.report.module)
        case = _first_case(registry, self.package, self.origin)
        self.config: Mapping[str, Any] = case.config
        # What else its author says of the case, as it is written.
        self.case_source, self.case_names = _case_source(f"{self.package}.conformance", case)
        self.architecture: str = case.architecture
        self.module_map: dict[str, str] = plugin.module_map()
        self.builder = self._builder(plugin)
        self.processors = [
            item
            for item in getattr(plugin, "input_processors", list)()
            if self.architecture in _source(item.__module__)
        ]

    def _builder(self, plugin: ModuleType) -> type[ConfigBuilder]:
        from engine_core.configs import HFConfig

        builders: list[type[ConfigBuilder]] = getattr(plugin, "config_builders", list)()
        for builder in builders:
            if builder.condition(HFConfig(self.config)):
                return builder
        raise PluginLoadError(
            f"{self.origin} has no config builder for the first of its conformance cases; make "
            "the package after another family"
        )


def _find_report(registry: Registry, name: str) -> PluginReport:
    reports = {report.name: report for report in registry.reports if report.distribution}
    if name not in reports:
        known = ", ".join(reports) or "none"
        raise typer.BadParameter(
            f"--like: no installed family is named {name!r}; there are {known}"
        )
    if reports[name].error:
        raise PluginLoadError(f"--like {name}: {reports[name].error}")
    return reports[name]


def _first_case(registry: Registry, package: str, origin: str) -> Any:
    """The first conformance case with a config."""
    try:
        case = _case_with_config(package)
    except (ImportError, AttributeError) as error:
        raise PluginLoadError(
            f"{origin} has no conformance cases to start from: {error}; make the package after "
            "another family, or, of what transformers knows, by --from-transformers ARCHITECTURE"
        ) from error
    if case is None:
        raise PluginLoadError(
            f"{origin} has no conformance case with a config to start from, only golden files, "
            "which are results of its own code; make the package after one of "
            f"{', '.join(_patterns(registry)) or 'no other family that is installed'}"
        )
    return case


def _case_with_config(package: str) -> Any:
    cases = importlib.import_module(f"{package}.conformance").CASES
    return next((case for case in cases if case.config is not None), None)


def _case_source(module: str, case: Any) -> tuple[dict[str, str], set[str]]:
    """The arguments of a case beside its name, architecture and config, as they are written.

    Returns:
        Their source by their names, and the names of the module that they need.

    Raises:
        PluginLoadError: no call in the module has the case's name.
    """
    from engine_core.cli.source_excerpt import defined, names_in

    source = _source(module)
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ConformanceCase"):
            given = {each.arg: each.value for each in node.keywords if each.arg}
            name = given.get("name")
            if isinstance(name, ast.Constant) and name.value == case.name:
                shared = ("name", "architecture", "config")
                more = {key: value for key, value in given.items() if key not in shared}
                used = set().union(*map(names_in, more.values()))
                own = {name for statement in tree.body for name in defined(statement)}
                text = {
                    key: ast.get_source_segment(source, each) or "" for key, each in more.items()
                }
                return text, used & own
    if case.prompts is None and not case.media and case.reference == "transformers":
        return {}, set()
    raise PluginLoadError(
        f"{module} makes its case {case.name!r} by other code than a call of ConformanceCase with "
        "that name, so that it cannot be copied; make the package after another family"
    )


def _patterns(registry: Registry) -> list[str]:
    """The names of the installed families that have a case with a config."""
    names = []
    for report in registry.reports:
        with contextlib.suppress(ImportError, AttributeError):
            if report.distribution and _case_with_config(report.module.split(".")[0]):
                names.append(report.name)
    return names


def _source(module: str) -> str:
    path = importlib.import_module(module).__file__
    return Path(path).read_text(encoding="utf-8") if path else ""


def _check_name(registry: Registry, name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        normal = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        hint = f"; try {normal!r}" if re.fullmatch(r"[a-z][a-z0-9-]*", normal) else ""
        raise typer.BadParameter(
            f"NAME {name!r} must be a normal package name (PEP 503): lower-case letters, digits "
            f"and single hyphens, a letter first{hint}"
        )
    if name.startswith("engine-core"):
        raise typer.BadParameter(
            f"NAME {name!r}: leave out engine-core, which is put before it by itself"
        )
    for report in registry.reports:
        if report.name == name or report.distribution == f"engine-core-{name}":
            raise typer.BadParameter(
                f"NAME {name!r} is taken by the installed {report.distribution} {report.version}"
            )


def _read_config(path: Path) -> HFConfig:
    from engine_core.configs import HFConfig

    folder = path.parent if path.name == "config.json" else path
    if not folder.is_dir():
        hint = "; copy it to a folder under that name" if path.is_file() else ""
        raise typer.BadParameter(
            f"--hf-config: {path} is no file named config.json, nor a folder with one{hint}"
        )
    return HFConfig.from_folder(folder)


def _new_architecture(registry: Registry, name: str, like: str, given: HFConfig | None) -> str:
    if given is None:
        match = _STEM.fullmatch(like)
        camel = "".join(part.capitalize() for part in name.split("-"))
        architecture = camel + (match[2] if match else "")
    else:
        names = given.get("architectures", [])
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise ConfigError(
                f"--hf-config: 'architectures' must be a list that names the model, got {names!r}"
            )
        architecture = names[0]
    if not architecture.isidentifier() or keyword.iskeyword(architecture):
        raise ConfigError(f"architecture {architecture!r} cannot be the name of a class")
    known = registry.architectures
    if architecture in known:
        raise typer.BadParameter(
            f"architecture {architecture!r} is already known, by plugin {known[architecture]!r}"
        )
    return architecture


def _tiny_config(pattern: _Pattern, architecture: str, given: HFConfig | None) -> dict[str, Any]:
    """The pattern's tiny config under the new name, with what ``given`` says beside sizes.

    Sizes, which are the integers, and the reference's model type stay the pattern's.

    Raises:
        ConfigError: the pattern's builder refuses it.
    """
    from engine_core.configs import HFConfig

    values = dict(pattern.config)
    for key, value in (given.to_dict() if given is not None else {}).items():
        if type(value) is int or isinstance(value, list) or _DROPPED.fullmatch(key):
            continue
        if key not in ("model_type", "transformers_version") and value is not None:
            values[key] = value
    try:
        old = pattern.config["architectures"]
        pattern.builder.build(HFConfig({**values, "architectures": old}))
    except ConfigError as error:
        raise ConfigError(
            f"{pattern.origin}, of which --like makes a copy, does not take the settings of "
            f"--hf-config: {error}. Make the package after a family that takes them, or with "
            f"--from-transformers {architecture} --hf-config"
        ) from error
    values["architectures"] = [architecture]
    if pattern.builder.condition(HFConfig(values)):
        raise PluginLoadError(
            f"{pattern.builder.__name__} of {pattern.origin} does not go by the architecture's "
            "name, so a copy of it would match the same checkpoints; make the package after "
            "another family"
        )
    return values


class _Renaming:
    """Turns the pattern's source into the new family's."""

    def __init__(self, pattern: _Pattern, package: str, architecture: str) -> None:
        old = _STEM.fullmatch(pattern.architecture)
        new = _STEM.fullmatch(architecture)
        self.stem = new[1] if new else architecture
        self._old_stem = old[1] if old else pattern.architecture
        # As it is written of all versions, and with a number or a size.
        family = self._old_stem.rstrip("0123456789")
        self._old_name = rf"{family}(-\d+B?)?"
        self._family = family.lower()
        # Before the kind of model, in names of classes that several share.
        self._old_base = rf"{family}(?={old[2]})" if old else self._old_name
        self._pattern = pattern
        self._package = package
        self._architecture = architecture
        self._docstrings = {
            pattern.architecture: (
                f"{self.stem}; say here what differs from {pattern.report.distribution}."
            ),
            pattern.builder.__name__: f"Reads the configs of {self.stem}.",
        }

    def __call__(self, text: str) -> str:
        """The source with the new names; other architectures of the pattern are left out."""
        text = self._by_name(text)
        distribution = self._pattern.report.distribution or ""
        new = self._package.replace("_", "-")
        text = re.sub(rf"\b{distribution}(?![\w-])", new, text) if distribution else text
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name in self._docstrings:
                docstring = ast.get_source_segment(text, node.body[0])
                if ast.get_docstring(node) and docstring:
                    text = text.replace(docstring, f'"""{self._docstrings[node.name]}"""', 1)
        others = set(self._pattern.module_map) - {self._pattern.architecture}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Tuple | ast.List):
                continue
            items = [item.value if isinstance(item, ast.Constant) else None for item in node.elts]
            segment = ast.get_source_segment(text, node) if others.intersection(items) else None
            if segment:
                kept = [json.dumps(item) for item in items if item not in others]
                comma = "," if isinstance(node, ast.Tuple) and len(kept) == 1 else ""
                body = ", ".join(kept) + comma
                text = text.replace(
                    segment, f"({body})" if isinstance(node, ast.Tuple) else f"[{body}]"
                )
        return self.name(text)

    def _by_name(self, text: str) -> str:
        """A builder that goes by other keys than the architecture's name goes by that."""
        from engine_core.cli.source_excerpt import without_unused
        from engine_core.configs import HFConfig

        builder = self._pattern.builder
        named = builder.condition(HFConfig(architectures=[self._pattern.architecture]))
        found = [
            method
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.ClassDef) and node.name == builder.__name__
            for method in node.body
            if isinstance(method, ast.FunctionDef) and method.name == "condition"
        ]
        if named or not found:
            return text
        body = [ast.get_source_segment(text, line) or "" for line in found[0].body]
        old = text[text.index(body[0]) : text.index(body[-1]) + len(body[-1])]
        text = text.replace(old, _CONDITION % self._architecture, 1)
        return without_unused(text)

    def name(self, text: str) -> str:
        """The new family's names in place of the pattern's."""
        text = re.sub(rf"\b{self._pattern.architecture}\b", self._architecture, text)
        text = re.sub(rf"(?<![A-Za-z]){self._old_stem}", self.stem, text)
        text = re.sub(rf"(?<![A-Za-z]){self._old_name}(?![A-Z0-9])", self.stem, text)
        text = re.sub(rf"(?<![A-Za-z]){self._old_base}", self.stem, text)
        # In texts: BLOOM of BloomForCausalLM.
        text = re.sub(
            rf"(?<![A-Za-z]){self._old_name}(?![A-Za-z0-9])",
            lambda found: self.stem if found[0][0].isupper() else found[0],
            text,
            flags=re.IGNORECASE,
        )
        # Of functions of a module's own: _is_qwen; modeling_qwen.py stays what it is.
        own = self._package.removeprefix("engine_core_")
        text = re.sub(rf"\b(_[a-z0-9_]*_){self._family}(?=_|\b)", rf"\g<1>{own}", text)
        return text.replace(self._pattern.package, self._package)


_CONDITION = '''\
"""Whether the checkpoint calls itself by this architecture."""
        return bool(hf_config.get("architectures") == ["%s"])'''


def _template(file: str, values: Mapping[str, str]) -> str:
    folder = resources.files("engine_core.cli").joinpath("templates")
    text = folder.joinpath(file).read_text(encoding="utf-8")
    return Template(text).substitute(values)


def _module_map(architecture: str, target: str) -> str:
    """The module map's literal, as the formatter writes it."""
    key, value = f'"{architecture}":', f'"{target}"'
    whole = f"{{{key} {value}}}"
    if len(whole) <= _WIDTH - len("    return "):
        return whole
    entry = f"        {key} {value},"
    if len(entry) > _WIDTH:
        entry = f"        {key} (\n            {value}\n        ),"
    return f"{{\n{entry}\n    }}"


def _before_a_constant(source: str) -> str:
    """The source with as many empty lines at its end as are due beside that of the template."""
    last = ast.parse(source).body[-1]
    empty = "\n" if isinstance(last, ast.FunctionDef | ast.ClassDef) else ""
    return source.rstrip("\n") + empty


def _about(module: str, rename: _Renaming) -> str:
    """The first sentence of a module's docstring, as one of a table."""
    about = (ast.get_docstring(ast.parse(_source(module))) or "").split(". ")[0].splitlines()
    text = rename.name(about[0].rstrip(".") if about else "what the others need")
    return text if text.startswith(rename.stem) else text[:1].lower() + text[1:]


def _extras(distribution: str) -> str:
    """The extras of the engine that a distribution requires, such as "[media]"."""
    required = [
        re.match(r"engine-core-llm(\[[^\]]+\])", line) for line in requires(distribution) or ()
    ]
    return next((found[1] for found in required if found), "")


def _literal(value: Any, indent: int) -> str:
    """A JSON value as the formatter writes it in Python."""
    inner, end = " " * (indent + 4), " " * indent
    if isinstance(value, Mapping):
        items = [f"{inner}{json.dumps(k)}: {_literal(v, indent + 4)},\n" for k, v in value.items()]
        for index, (key, each) in enumerate(value.items()):
            if isinstance(each, list | tuple) and len(items[index]) > _WIDTH + 1:
                lines = "".join(f"{inner}    {_literal(item, indent + 8)},\n" for item in each)
                items[index] = f"{inner}{json.dumps(key)}: [\n{lines}{inner}],\n"
        return f"{{\n{''.join(items)}{end}}}" if items else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_literal(item, indent + 4) for item in value)}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _package_files(
    name: str, pattern: _Pattern, architecture: str, config: Mapping[str, Any]
) -> dict[str, str]:
    """Path to content of every file of the package."""
    from engine_core.cli.source_excerpt import source_excerpts

    package = f"engine_core_{name.replace('-', '_')}"
    rename = _Renaming(pattern, package, architecture)
    model_module, _, model_class = pattern.module_map[pattern.architecture].rpartition(".")
    offered = [pattern.builder, *pattern.processors]
    excerpts = source_excerpts(
        pattern.package,
        [(model_module, model_class), *((item.__module__, item.__name__) for item in offered)],
    )
    docstring = f'"""Copied from {pattern.origin}; change what differs."""\n\n'
    cases = f"{pattern.package}.conformance"
    made_of = source_excerpts(
        pattern.package, [(cases, name) for name in sorted(pattern.case_names)], ["ConformanceCase"]
    )
    head = made_of.pop(cases, "from engine_core.testing import ConformanceCase\n")
    excerpts |= made_of
    files = {
        rename.name(module).replace(".", "/") + ".py": docstring + rename(source)
        for module, source in excerpts.items()
    }
    homes: dict[str, list[str]] = {}
    for item in offered:
        homes.setdefault(rename.name(item.__module__), []).append(rename.name(item.__name__))
    imports = [
        f"from {home} import {', '.join(sorted(offered))}" for home, offered in homes.items()
    ]
    major, minor, *_ = __version__.split(".")
    processors = ", ".join(rename.name(item.__name__) for item in pattern.processors)
    values = {
        "name": name,
        "made": (
            f"`engine-core new-plugin {name} --like {pattern.report.name}` copied the source from "
            f"{pattern.origin}.\nIts tests pass as they are; change what differs, and the "
            "reference in `conformance.py`. Choose a\nlicence before you publish it."
        ),
        "reference": _REFERENCE,
        "distribution": f"engine-core-{name}",
        "package": package,
        "architecture": architecture,
        "stem": rename.stem,
        "api": pattern.report.requires_api or API_VERSION,
        "core": f"{major}.{minor}",
        "next_core": f"{major}.{int(minor) + 1}",
        "module_map": _module_map(architecture, rename.name(f"{model_module}.{model_class}")),
        "builder": rename.name(pattern.builder.__name__),
        "imports": "\n".join(sorted(imports)),
        "config": _literal(config, 8),
        "head": _before_a_constant(rename(head)),
        "more": "".join(
            f"\n        {key}={rename.name(text)}," for key, text in pattern.case_source.items()
        ),
        "extras": _extras(pattern.report.distribution or ""),
        "files": "".join(
            f"| `{rename.name(module).rpartition('.')[2]}.py` | {_about(module, rename)} |\n"
            for module in sorted(excerpts)
            if module.rpartition(".")[2] not in _DESCRIBED
        ),
    }
    values["processors_hook"] = (
        _template("processors_hook.txt", {"processors": processors}).rstrip("\n")
        if processors
        else ""
    )
    return _with_templates(files, values)


_REFERENCE = (
    "        # The reference is the class that transformers has for this model_type: that of the\n"
    "        # family which the source was copied from. Name your own here, or give golden files\n"
    "        # or a function.\n"
)


def _with_templates(files: dict[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """The files with those that are the same in every package."""
    package = values["package"]
    made = {
        "pyproject.toml": "pyproject.toml.txt",
        "README.md": "README.md.txt",
        f"{package}/__init__.py": "init.py.txt",
        f"{package}/plugin.py": "plugin.py.txt",
        f"{package}/conformance.py": "conformance.py.txt",
        f"tests/test_{values['name'].replace('-', '_')}.py": "tests.py.txt",
    }
    files |= {path: _template(template, values) for path, template in made.items()}
    files[f"{package}/py.typed"] = ""
    return {path: text.rstrip("\n") + "\n" if text else "" for path, text in files.items()}


def _draft(registry: Registry, architecture: str, given: HFConfig | None) -> Any:
    """The draft that the package of transformers' models makes of one."""
    names = [architecture] if given is None else given.get("architectures", [])
    if names != [architecture]:
        raise typer.BadParameter(
            f"--hf-config is of {names}, and --from-transformers names {architecture!r}"
        )
    if architecture in registry.architectures:
        raise typer.BadParameter(
            f"architecture {architecture!r} is already known, by plugin "
            f"{registry.architectures[architecture]!r}"
        )
    try:
        scaffold = importlib.import_module("engine_core_transformers.scaffold")
    except ImportError as error:
        raise typer.BadParameter(
            f"--from-transformers needs the package engine-core-transformers: {error}"
        ) from error
    return scaffold.draft(architecture, None if given is None else given.to_dict())


def _drafted_files(name: str, made: Any) -> dict[str, str]:
    """Path to content of every file of a package that was drawn from transformers."""
    package = f"engine_core_{name.replace('-', '_')}"
    major, minor, *_ = __version__.split(".")
    left = "".join(f"\n- {line}" for line in made.left)
    values = {
        "name": name,
        "made": (
            f"`engine-core new-plugin {name} --from-transformers {made.architecture}` wrote it.\n"
            + (f"Left to do:\n{left}" if left else "A block was found for every part of a layer.")
            + "\n\nChoose a licence before you publish it."
        ),
        "reference": "",
        "distribution": f"engine-core-{name}",
        "package": package,
        "architecture": made.architecture,
        "stem": made.builder.removesuffix("ConfigBuilder"),
        "api": "0.1",
        "core": f"{major}.{minor}",
        "next_core": f"{major}.{int(minor) + 1}",
        "module_map": _module_map(made.architecture, f"{package}.model.{made.architecture}"),
        "builder": made.builder,
        "imports": f"from {package}.config import {made.builder}",
        "config": _literal(made.tiny, 8),
        "head": "from engine_core.testing import ConformanceCase",
        "more": "",
        "extras": "",
        "files": "",
        "processors_hook": "",
    }
    files = {f"{package}/config.py": made.config, f"{package}/model.py": made.model}
    return _with_templates(files, values)


@command()
def new_plugin(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The family's name, such as my-model.")
    ],
    like: Annotated[
        str | None,
        typer.Option(
            metavar="FAMILY",
            help="Installed family to copy the source from.",
        ),
    ] = None,
    from_transformers: Annotated[
        str | None,
        typer.Option(
            metavar="ARCHITECTURE",
            help="Class of transformers, such as Olmo2ForCausalLM, whose parts are looked at for "
            "those that engine_core.nn has blocks for.",
        ),
    ] = None,
    hf_config: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="A checkpoint's config.json: its architecture and settings."
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the package's folder is made.")
    ] = Path(),
) -> None:
    """Write the package of a new model family.

    It is named engine-core-NAME and runs the conformance kit. After --like its tests pass as they
    are: change what differs from that family. After --from-transformers they pass if blocks were
    found for all parts; what is left to do is told. docs/write-a-plugin.md explains each part.
    """
    from engine_core.registry import build_registry

    registry = build_registry()
    _check_name(registry, name)
    folder = out / f"engine-core-{name}"
    if folder.exists():
        raise typer.BadParameter(f"--out: {folder} exists already; nothing was written")
    if (like is None) == (from_transformers is None):
        raise typer.BadParameter("give one of --like and --from-transformers")
    left: list[str] = []
    given = None if hf_config is None else _read_config(hf_config)
    if like is None:
        made = _draft(registry, from_transformers or "", given)
        architecture, origin, left = made.architecture, "drawn from transformers", made.left
        files = _drafted_files(name, made)
    else:
        pattern = _Pattern(registry, like)
        architecture = _new_architecture(registry, name, pattern.architecture, given)
        files = _package_files(
            name, pattern, architecture, _tiny_config(pattern, architecture, given)
        )
        origin = f"copied from {pattern.origin}"
    for path, text in files.items():
        file = folder / path
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise typer.BadParameter(f"--out: {file} cannot be written: {error.strerror}") from None
    print(f"{folder}: {architecture}, {origin}")
    if like is not None and given is None:
        print(
            f"{architecture} is made of NAME: what the architectures of a config.json say comes by "
            "--hf-config"
        )
    for line in left:
        print(f"Left to do: {line}")
    print(f"Next: pip install -e '{folder}[test]' && pytest {folder}")
