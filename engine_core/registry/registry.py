"""Discovery of plugins and module maps, and look-ups in them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import importlib_metadata as metadata
import pluggy

from engine_core.configs.builder import DefaultConfigBuilder
from engine_core.errors import (
    ConfigError,
    DuplicateArchitectureError,
    EngineError,
    OptionError,
    PluginLoadError,
    UnknownArchitectureError,
)
from engine_core.plugin_code import contained, defined_at, failed_at, package_of
from engine_core.registry.hookspecs import API_VERSION, HOOK_NAMES, NAMESPACE, HookSpecs

if TYPE_CHECKING:
    from engine_core.configs import ConfigBuilder, HFConfig, ModelConfig
    from engine_core.configs.engine import ModelImpl
    from engine_core.inputs import InputProcessor
    from engine_core.nn.quantization import QuantizationScheme

logger = logging.getLogger(__name__)

# Errors of a plugin's code that do not end the process: other families still work.
_FAULTS = (Exception, SystemExit)
# Of a distribution's metadata, which are in the form of a mail's head.
_NAME_AND_VERSION = re.compile(r"^(Name|Version): *(.*?) *$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PluginReport:
    """The result of discovery for one plugin or module-map file.

    Attributes:
        name: the entry point's name, or the path of a module-map file.
        module: the module that the entry point names.
        distribution: the package that brought it, or None for a file.
        version: that package's version, or None.
        architectures: what its module map claims.
        requires_api: the version of the plugin contract that it states, or None.
        tool_parsers: names of those that it brings; so the next two.
        reasoning_parsers: of reasoning.
        quantization_schemes: of quantisation.
        error: why it was skipped, or None.
        refusals: what would be refused when it is asked for, if that was looked for.
    """

    name: str
    module: str
    distribution: str | None = None
    version: str | None = None
    architectures: tuple[str, ...] = ()
    requires_api: str | None = None
    tool_parsers: tuple[str, ...] = ()
    reasoning_parsers: tuple[str, ...] = ()
    quantization_schemes: tuple[str, ...] = ()
    error: str | None = None
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Source:
    """The checked contents of one plugin or module-map file."""

    name: str
    module_map: Mapping[str, str | type] = field(default_factory=dict)
    config_builders: tuple[type[ConfigBuilder], ...] = ()
    fallback_builders: tuple[type[ConfigBuilder], ...] = ()
    input_processors: tuple[type[InputProcessor], ...] = ()
    gguf_adapters: Mapping[str, str] = field(default_factory=dict)
    quantization_schemes: Mapping[str, str] = field(default_factory=dict)
    tool_parsers: Mapping[str, str] = field(default_factory=dict)
    reasoning_parsers: Mapping[str, str] = field(default_factory=dict)


_CORE = _Source(
    name="engine-core-llm",
    quantization_schemes={
        "int8": "engine_core.nn.quantization.Int8Scheme",
        "int4": "engine_core.nn.quantization.Int4Scheme",
        "awq": "engine_core.nn.quantization.AWQScheme",
        "gptq": "engine_core.nn.quantization.GPTQScheme",
        "compressed-tensors-int": "engine_core.nn.quantization.CompressedIntegersScheme",
        "compressed-tensors": "engine_core.nn.quantization.CompressedTensorsScheme",
        "fp8": "engine_core.nn.quantization.Fp8Scheme",
        "gguf": "engine_core.nn.quantization.GGUFScheme",
    },
)
"""Offers of the core itself, under names to which packages add theirs."""


class Registry:
    """All that installed plugins and given module maps offer. Made by :func:`build_registry`.

    A plugin whose ``condition`` fails on a model is broken from then on: it is reported, and the
    others go on as if it were not installed. With ``strict`` its error is raised.

    Attributes:
        reports: one for each plugin and module-map file, broken ones included.
    """

    def __init__(
        self,
        reports: Sequence[PluginReport],
        plugins: Sequence[_Source],
        custom: Sequence[_Source],
        *,
        strict: bool = False,
    ) -> None:
        self.reports = tuple(reports)
        self._plugins = tuple(plugins)
        self._custom = tuple(custom)
        self._strict = strict

    @property
    def architectures(self) -> dict[str, str]:
        """Every architecture known, with the plugin or file that brings it; a file wins."""
        return {
            architecture: source.name
            for source in (*self._plugins, *reversed(self._custom))
            for architecture in source.module_map
        }

    def model_class(self, architecture: str) -> type:
        """Import and return the class that runs ``architecture``.

        Raises:
            UnknownArchitectureError: nobody claims it; lists the nearest names.
            DuplicateArchitectureError: two plugins, or two files, claim it.
            PluginLoadError: the class cannot be imported.
        """
        for sources in (self._custom, self._plugins):
            claims = [source for source in sources if architecture in source.module_map]
            if claims:
                hint = ", or say which in a custom_module_map file"
                source = _only(claims, f"architecture {architecture!r}", hint)
                return _load_class(source.module_map[architecture], source.name)
        raise UnknownArchitectureError(self._unknown(architecture))

    def model_config(
        self, hf_config: HFConfig, model_path: Path | None = None, impl: ModelImpl = "native"
    ) -> ModelConfig:
        """The model config of a checkpoint, by the one builder that matches it.

        Args:
            hf_config: the checkpoint's config.
            model_path: its folder.
            impl: "native" asks the packages of families, "transformers" those that run what others
                were written for, and "auto" these if no family claims the checkpoint.

        Raises:
            DuplicateArchitectureError: two builders match.
            UnknownArchitectureError: none matches, and nobody claims the architecture.
            PluginLoadError: the builder does not keep its contract.
            ConfigError: the checkpoint's config is wrong, or the builder fails on it.
        """
        names = hf_config.get("architectures", [])
        if isinstance(names, list) and len(names) > 1:
            raise ConfigError(
                f"config.json: architectures names several model classes, {names!r}; say with "
                "hf_overrides which one it is"
            )
        for sources in (self._custom, self._plugins) if impl != "transformers" else ():
            built = self._built(sources, "config_builders", hf_config, model_path)
            if built is not None:
                return built
        claimed = isinstance(names, list) and names and str(names[0]) in self.architectures
        fallen = None
        if impl != "native" and (impl == "transformers" or not claimed):
            try:
                built = self._built(self._plugins, "fallback_builders", hf_config, model_path)
            except UnknownArchitectureError as error:
                built, fallen = None, error
            if built is not None:
                return built
        if isinstance(names, list) and names and (impl == "transformers" or not claimed):
            raise UnknownArchitectureError(self._unknown(str(names[0]), hf_config, impl, fallen))
        return _build(DefaultConfigBuilder, hf_config, model_path)

    def _built(
        self,
        sources: Sequence[_Source],
        hook: Literal["config_builders", "fallback_builders"],
        hf_config: HFConfig,
        model_path: Path | None,
    ) -> ModelConfig | None:
        matches = self._matching(sources, hook, hf_config)
        if len(matches) > 1:
            names = " and ".join(f"{b.__name__} of {source.name!r}" for source, b in matches)
            raise DuplicateArchitectureError(
                f"two config builders match this checkpoint: {names}; uninstall one, or say "
                "which in a custom_module_map file"
            )
        if not matches:
            return None
        source, builder = matches[0]
        with self._asked():
            return _build(builder, hf_config, model_path, owner=source.name)

    def claims(self, hf_config: HFConfig) -> bool:
        """Whether the config builder of a family matches a checkpoint's config."""
        sources = [*self._custom, *self._plugins]
        return bool(self._matching(sources, "config_builders", hf_config))

    def input_processor(self, model_config: ModelConfig) -> InputProcessor | None:
        """The one processor whose condition holds for the model, or None.

        Raises:
            DuplicateArchitectureError: two processors match.
            PluginLoadError: the model's own plugin fails at it.
        """
        matches = self._matching(
            self._plugins, "input_processors", model_config, needed=model_config.architecture
        )
        if len(matches) > 1:
            names = " and ".join(f"{p.__name__} of {source.name!r}" for source, p in matches)
            raise DuplicateArchitectureError(f"two input processors match this model: {names}")
        if not matches:
            return None
        source, processor = matches[0]
        with self._asked():
            made: InputProcessor = _make(processor, source.name, model_config)
        _check_state(made, source.name)
        return made

    def probe(self) -> None:
        """Ask each plugin's ``condition`` about a model that no family has; none may fail.

        Raises:
            PluginLoadError: a module-map file fails, or a plugin does in strict mode.
        """
        from engine_core.configs.hf_config import HFConfig
        from engine_core.configs.model import ModelConfig

        name = "NobodysForCausalLM"
        hf_config = HFConfig(architectures=[name], model_type="nobodys")
        for sources in (self._custom, self._plugins):
            self._matching(sources, "config_builders", hf_config)
        self._matching(self._plugins, "fallback_builders", hf_config)
        sizes: dict[str, Any] = {
            key: 1 for key, info in ModelConfig.model_fields.items() if info.annotation is int
        }
        model_config = ModelConfig(architecture=name, hf_config=hf_config, **sizes)
        self._matching(self._plugins, "input_processors", model_config)

    def with_refusals(self) -> tuple[PluginReport, ...]:
        """The reports, with what would be refused of each; every class that is named is imported.

        That is a name that two bring, and a class that cannot be imported.
        """
        found: dict[str, list[str]] = {report.name: [] for report in self.reports}
        decided = {name for source in self._custom for name in source.module_map}
        for sources, (hook, what) in product((self._custom, self._plugins), _NAMED.items()):
            claims: dict[str, list[_Source]] = {}
            if sources is self._plugins:
                claims = {name: [_CORE] for name in getattr(_CORE, hook)}
            for source in sources:
                for name, target in getattr(source, hook).items():
                    claims.setdefault(name, []).append(source)
                    try:
                        _load_class(target, source.name)
                    except EngineError as error:
                        found[source.name].append(f"{what} {name!r}: {error}")
            for name, claimants in claims.items():
                if sources is self._plugins and hook == "module_map" and name in decided:
                    continue
                try:
                    _only(claimants, f"{what} {name!r}")
                except DuplicateArchitectureError as error:
                    for source in claimants:
                        found.setdefault(source.name, []).append(str(error))
        return tuple(replace(each, refusals=tuple(found[each.name])) for each in self.reports)

    def _matching(
        self,
        sources: Sequence[_Source],
        hook: Literal["config_builders", "fallback_builders", "input_processors"],
        subject: HFConfig | ModelConfig,
        needed: str | None = None,
    ) -> list[tuple[_Source, Any]]:
        """The classes that the sources offer for ``subject``; a plugin that fails is left out.

        Nothing goes on without the plugin that claims the architecture ``needed``.
        """
        found: list[tuple[_Source, Any]] = []
        for source in sources:
            try:
                found += [
                    (source, item)
                    for item in getattr(source, hook)
                    if _holds(item, subject, source.name)
                ]
            except PluginLoadError as error:
                if self._strict or source in self._custom or needed in source.module_map:
                    raise
                self._leave_out(source, str(error))
        return found

    def _leave_out(self, source: _Source, error: str) -> None:
        logger.warning("%s; skipped", error)
        self._plugins = tuple(other for other in self._plugins if other is not source)
        self.reports = tuple(
            replace(report, error=error) if report.name == source.name else report
            for report in self.reports
        )

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Answer what a plugin asks of a text model inside its own in the ``with`` block."""
        token = _ASKED.set(self)
        try:
            yield
        finally:
            _ASKED.reset(token)

    def gguf_adapters(self) -> dict[str, str]:
        """GGUF architecture -> ``"package.module.Class"`` of its adapter.

        Raises:
            DuplicateArchitectureError: two plugins claim one GGUF architecture.
        """
        return self._named("gguf_adapters")

    def gguf_advice(self, name: str) -> str:
        """Advice about a GGUF architecture that no plugin translates."""
        package = _package_for("gguf", name)
        if package is not None:
            return f"{package} does: {_install(package)}.{self._broken()}"
        plain = re.sub("[^a-z0-9]", "", name)
        # A package with adapters has them for all that it knows.
        without = [each for each, has in _listed().items() if "gguf" not in has]
        ours = {re.sub("^engine-core-|-", "", each): each for each in without}
        who = f"{ours[plain]} runs" if plain in ours else f"another package or {_FALLBACK} may run"
        return (
            f"Take the model's checkpoint in safetensors, which {who}; or write an adapter, which "
            "a package offers by the hook gguf_adapters (docs/write-a-plugin.md)."
            f"{self._broken()}"
        )

    def gguf_adapter(self, name: str) -> type:
        """Import and return the adapter class of a GGUF architecture.

        Raises:
            UnknownArchitectureError: nobody claims it.
        """
        does = "reads GGUF files of architecture"
        return self._offered(self.gguf_adapters(), name, does, UnknownArchitectureError)

    def quantization_scheme(
        self, name: str, settings: Mapping[str, Any] | None = None
    ) -> QuantizationScheme:
        """Import and make a quantisation scheme; ``settings`` are a checkpoint's, if it has any.

        Raises:
            OptionError: nobody brings it; lists those that there are, and where they come from.
            DuplicateArchitectureError: two bring one of this name.
            PluginLoadError: the class cannot be imported or made.
            ConfigError: it does not support the settings.
        """
        sources = (_CORE, *self._plugins)
        claims = [source for source in sources if name in source.quantization_schemes]
        if not claims:
            from engine_core.configs.engine import UNPACKED

            listed = ", ".join(
                f"{each!r} ({source.name})"
                for source in sources
                for each in source.quantization_schemes
            )
            raise OptionError(
                f"quantization {name!r} is none of the schemes that are installed: {listed}; nor "
                f"is it {UNPACKED!r}, which makes numbers of a GGUF file's blocks.{self._broken()}"
            )
        source = _only(claims, f"quantization {name!r}")
        scheme = _load_class(source.quantization_schemes[name], source.name)
        made: QuantizationScheme = _make(scheme, source.name, name, settings)
        return made

    def recognise_quantization(self, settings: Mapping[str, Any]) -> str | None:
        """The name of the scheme of a checkpoint with this ``quantization_config``, or None.

        Raises:
            DuplicateArchitectureError: two schemes recognise it.
            PluginLoadError: a scheme cannot be asked, and plugins are strict.
        """
        matches: list[tuple[str, str]] = []
        for source in (_CORE, *self._plugins):
            try:
                matches += [
                    (name, source.name)
                    for name, path in source.quantization_schemes.items()
                    if _holds(_load_class(path, source.name), settings, source.name)
                ]
            except PluginLoadError as error:
                if self._strict:
                    raise
                self._leave_out(source, str(error))
        if len(matches) > 1:
            names = " and ".join(f"{name!r} of {who!r}" for name, who in matches)
            raise DuplicateArchitectureError(
                f"two quantisation schemes match this checkpoint: {names}; uninstall one"
            )
        return matches[0][0] if matches else None

    def tool_parser(self, name: str) -> type:
        """Import and return the tool parser of this name.

        Raises:
            ConfigError: no plugin brings it; lists those that there are.
            DuplicateArchitectureError: two plugins bring one of the same name.
        """
        parsers = self._named("tool_parsers")
        return self._offered(parsers, name, "brings the tool parser", ConfigError)

    def reasoning_parser(self, name: str) -> type:
        """Import and return the reasoning parser of this name; errors as of the other."""
        parsers = self._named("reasoning_parsers")
        return self._offered(parsers, name, "brings the reasoning parser", ConfigError)

    def _offered(
        self, paths: Mapping[str, str], name: str, does: str, error: type[EngineError]
    ) -> type:
        """Import and return the class at ``paths[name]``; ``error`` names those that there are."""
        if name not in paths:
            known = ", ".join(sorted(paths)) or "none"
            raise error(f"no installed plugin {does} {name!r}; known: {known}.{self._broken()}")
        return _load_class(paths[name], name)

    def _named(self, hook: str) -> dict[str, str]:
        """The merged answers of all plugins to a hook that maps names, each name once."""
        claims: dict[str, list[_Source]] = {}
        for source in self._plugins:
            for name in getattr(source, hook):
                claims.setdefault(name, []).append(source)
        return {
            name: getattr(_only(sources, f"{_NAMED[hook]} {name!r}"), hook)[name]
            for name, sources in claims.items()
        }

    def _broken(self) -> str:
        broken = [f"{report.name}: {report.error}" for report in self.reports if report.error]
        return f" Plugins that could not be used: {'; '.join(broken)}." if broken else ""

    def _unknown(
        self,
        architecture: str,
        hf_config: HFConfig | None = None,
        impl: ModelImpl = "native",
        refused: UnknownArchitectureError | None = None,
    ) -> str:
        """Facts and advice about an architecture that nobody claims.

        ``refused`` is the error of a package that runs what others were written for.
        """
        lines = [f"no installed plugin knows the architecture {architecture!r}."]
        model_type = None if hf_config is None else hf_config.get("model_type")
        if not isinstance(model_type, str | None):
            raise ConfigError(f"config.json: model_type must be a string, got {model_type!r}")
        if impl == "transformers" and architecture in self.architectures:
            lines = ["model_impl 'transformers' is asked for."]
        package = _package_for("architectures", architecture)
        near = [name for name in self.architectures if _misspelt(architecture, name)]
        falls_back = any(source.fallback_builders for source in self._plugins)
        known = architecture in self.architectures
        if package is not None and self._has(package) and impl == "transformers" and known:
            lines.append(f"{package} is installed, and with model_impl 'auto' it is asked first.")
        elif package is not None and self._has(package):
            lines.append(
                f"{package} is installed and would, but none of its config builders takes this "
                f"config (model_type {model_type!r})."
            )
        elif package is not None and impl != "transformers":
            lines.append(f"{package} does: {_install(package)}.")
        elif near:
            lines.append(f"Nearest: {', '.join(f'{n} ({self.architectures[n]})' for n in near)}.")
        media = sorted(set(_SENSES) & set(hf_config or ()))
        pair = hf_config is not None and hf_config.get("is_encoder_decoder") is True
        if refused is not None:
            lines.append(f"{refused}.")
        elif package is None and pair:
            lines.append("It has an encoder beside its decoder, and no package runs such a model.")
        elif package is None and media:
            lines.append(f"It takes pictures or sounds ({media[0]}), and no package has it.")
        elif impl != "native" and not falls_back:
            lines.append(
                f"If transformers knows it, {_FALLBACK} runs it, more slowly than a package of its "
                f"own: {_install(_FALLBACK)}."
            )
        elif falls_back and hf_config is not None:
            lines.append(f"With model_impl 'auto' {_FALLBACK} may run it, slowly.")
        if package is None:
            lines += self._own_package(architecture, model_type)
        return " ".join(lines) + self._broken()

    def _has(self, package: str) -> bool:
        return any(report.distribution == package for report in self.reports)

    def _own_package(self, architecture: str, model_type: str | None) -> Iterator[str]:
        """Advice to write what nobody has."""
        file = _data("module_maps.json").get(architecture)
        if file is not None:
            yield (
                f"The repository of this engine has it as examples/module_maps/{file}, which "
                "custom_module_map takes."
            )
        stem = re.split(r"For[A-Z]|LMHead|Model$", architecture)[0] or architecture
        listed = _listed()
        names = [
            "engine-core-" + re.sub("[^a-z0-9]+", "-", each.lower()).strip("-")
            for each in (model_type or stem, stem)
        ]
        for name in dict.fromkeys(names):
            if name in listed:
                known = ", ".join(listed[name]["architectures"])
                yield f"{name} knows {known}, but not this one."
        free = [name for name in names if name not in listed and not self._has(name)]
        named = f"would by convention be named {free[0]}" if free else "needs another name"
        yield (
            f"A package for it {named}; or pass a file with MODULE_MAP as custom_module_map. "
            "docs/write-a-plugin.md says how to write either, and what cannot be written yet."
        )


_FALLBACK = "engine-core-transformers"
# Keys of a config that only models have which take more than text.
_SENSES = (
    "audio_config",
    "image_token_id",
    "image_token_index",
    "img_processor",
    "mm_vision_tower",
    "thinker_config",
    "vision_config",
    "visual",
)


def _package_for(what: Literal["architectures", "gguf"], name: str) -> str | None:
    """The package of ours for an architecture, whether it is installed or not."""
    has = _listed().items()
    return next((package for package, lists in has if name in lists.get(what, ())), None)


def _install(package: str) -> str:
    """How to install a package of ours, of which a clone has the source."""
    folder = package.removeprefix("engine-core-").replace("-", "_")
    return f"pip install {package}, or ./plugins/{folder} from a clone"


def _listed() -> dict[str, dict[str, list[str]]]:
    """The architectures that packages of ours know, by their names."""
    listed: dict[str, dict[str, list[str]]] = _data("packages.json")
    return listed


def _data(name: str) -> dict[str, Any]:
    """The content of a file beside this one. ``module_maps.json`` names examples' files."""
    import json

    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def _misspelt(name: str, known: str) -> bool:
    """Whether a name is ``known`` but for its case or a letter; a number makes another model.

    So does another first letter, and a letter more or less in the part that names the family.
    """
    if name.lower() == known.lower():
        return True
    if name[:1] != known[:1]:
        return False
    if abs(len(name) - len(known)) == 1:
        shorter, longer = sorted((name, known), key=len)
        place = next((n for n, c in enumerate(shorter) if c != longer[n]), len(shorter))
        same = shorter == longer[:place] + longer[place + 1 :] and longer[place].isalpha()
        return same and "For" in longer[: place + 1]
    differ = [pair for pair in zip(name, known, strict=False) if pair[0] != pair[1]]
    if len(name) != len(known):
        return False
    swapped = len(differ) == 2 and differ[0] == differ[1][::-1]
    return (len(differ) == 1 or swapped) and all("".join(pair).isalpha() for pair in differ)


_ASKED: ContextVar[Registry | None] = ContextVar("engine_core_asked_registry", default=None)


def text_model_config(
    hf_config: HFConfig, model_path: Path | None, packages: Mapping[str, str]
) -> ModelConfig:
    """The config of a text model inside another family's, by the builder of its own.

    For config builders; outside of a registry's call to one, the installed plugins are asked. In
    ``hf_config`` of the result ``architectures`` names the architecture that the builder chose.

    Args:
        hf_config: the part of the checkpoint's config that is the text model's.
        model_path: the checkpoint's folder.
        packages: architecture -> the distribution that brings it, to name in the error.

    Raises:
        UnknownArchitectureError: no plugin brings its architecture; says what to install.
        ConfigError: as :meth:`Registry.model_config`.
    """
    registry = _ASKED.get() or build_registry()
    try:
        config = registry.model_config(hf_config, model_path)
    except UnknownArchitectureError as error:
        name = hf_config.architectures[0]
        if name not in packages:
            raise UnknownArchitectureError(f"the text model inside: {error}") from error
        raise UnknownArchitectureError(
            f"the text model inside is of the architecture {name!r}, which no installed plugin "
            f"knows; install it with 'pip install {packages[name]}'.{registry._broken()}"
        ) from error
    named = config.hf_config.replace(architectures=[config.architecture])
    return config.replace(hf_config=named)


def text_processor(model_config: ModelConfig) -> InputProcessor | None:
    """The input processor of ``model_config.text_model``, by its own family; None if it has none.

    For input processors; who is asked, and errors, are as with :func:`text_model_config`.
    """
    assert model_config.text_model is not None, "the family's config builder sets it"
    return (_ASKED.get() or build_registry()).input_processor(model_config.text_model)


def _only(claims: Sequence[_Source], what: str, hint: str = "") -> _Source:
    """The one source that claims ``what``."""
    if len(claims) > 1:
        names = " and ".join(repr(source.name) for source in claims)
        raise DuplicateArchitectureError(f"{what} is claimed by {names}; uninstall one{hint}")
    return claims[0]


def _told(error: BaseException, item: Any) -> str:
    """The error in a line, with its place in the package of ``item``."""
    return f"{type(error).__name__}: {error}{failed_at(error, package_of(item))}"


@contextmanager
def _importing(owner: str, what: str) -> Iterator[None]:
    """Import code of a plugin's in the ``with`` block.

    The line before it is all that is left where C code ends the process.
    """
    logger.debug("importing %s (%s)", owner, what)
    try:
        with contained():
            yield
    except KeyboardInterrupt as error:
        error.add_note(f"interrupted while {owner} was imported ({what})")
        raise


def _holds(item: Any, subject: HFConfig | ModelConfig | Mapping[str, Any], owner: str) -> bool:
    try:
        with contained():
            return bool(item.condition(subject))
    except _FAULTS as error:
        raise PluginLoadError(
            f"plugin {owner!r}: {item.__name__}.condition() failed: {_told(error, item)}"
        ) from error


def _make(item: type, owner: str, *arguments: Any) -> Any:
    try:
        with contained():
            return item(*arguments)
    except EngineError:
        raise
    except _FAULTS as error:
        raise PluginLoadError(
            f"plugin {owner!r}: {item.__name__} cannot be made for this model: {_told(error, item)}"
        ) from error


def _check_state(processor: InputProcessor, owner: str) -> None:
    """Refuse a declaration of state that is none."""
    import numpy as np

    declared: Any = getattr(processor, "prompt_state", None)
    if declared is None:
        return
    try:
        fine = "prompt_len" not in declared.row_state
        for dtype, shape in declared.row_state.values():
            fine = fine and np.zeros(shape, dtype).dtype.kind in "biuf"
        fine = fine and all(type(k) is int and k > 0 for k in declared.token_state.values())
    except (AttributeError, TypeError, ValueError):
        fine = False
    if not fine:
        raise PluginLoadError(
            f"plugin {owner!r}: {type(processor).__name__}.prompt_state must be a PromptState with "
            "a dtype and a shape for each name of row state ('prompt_len' is built in), and a "
            f"positive integer for each of token state; it is {declared!r}"
        )


def _build(
    builder: type[ConfigBuilder],
    hf_config: HFConfig,
    model_path: Path | None,
    owner: str | None = None,
) -> ModelConfig:
    from engine_core.configs.model import ModelConfig

    try:
        with contained():
            built: Any = builder.build(hf_config, model_path)
    except EngineError:
        raise
    except _FAULTS as error:  # Families check what they know of; a config may hold anything.
        where = "config.json" if model_path is None else model_path / "config.json"
        who = builder.__name__ + ("" if owner is None else f" of plugin {owner!r}")
        raise ConfigError(
            f"{where} cannot be understood: {who} failed: {_told(error, builder)}"
        ) from error
    if not isinstance(built, ModelConfig):
        raise PluginLoadError(
            f"plugin {owner!r}: {builder.__name__}.build() returned {built!r}, not a ModelConfig "
            f"({defined_at(builder.build)})"
        )
    return built


def _load_class(target: str | type, owner: str) -> type:
    if isinstance(target, type):
        return target
    module_name, _, class_name = target.rpartition(".")
    try:
        with _importing(f"plugin {owner!r}", module_name):
            module = importlib.import_module(module_name)
        value = getattr(module, class_name)
    except EngineError:
        raise
    except _FAULTS as error:
        raise PluginLoadError(
            f"plugin {owner!r}: {target} cannot be imported: {_told(error, target)}"
        ) from error
    if not isinstance(value, type):
        raise PluginLoadError(f"plugin {owner!r}: {target} is {value!r}, not a class")
    return value


def _check_names(owner: str, hook: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(
        isinstance(key, str) and isinstance(path, str) and "." in path
        for key, path in value.items()
    ):
        raise PluginLoadError(
            f"{owner}: {hook}() must map names to 'package.module.Class' strings, got {value!r}"
        )
    return value


def _check_classes(owner: str, hook: str, value: Any, methods: Iterable[str]) -> tuple[type, ...]:
    if not isinstance(value, list | tuple):
        raise PluginLoadError(f"{owner}: {hook}() must return a list of classes, got {value!r}")
    for item in value:
        lacking = [name for name in methods if not callable(getattr(item, name, None))]
        if not isinstance(item, type) or lacking:
            raise PluginLoadError(
                f"{owner}: {hook}() offers {item!r}, which is not a class with {', '.join(methods)}"
            )
    return tuple(value)


_NAMED = {
    "module_map": "architecture",
    "gguf_adapters": "GGUF architecture",
    "quantization_schemes": "quantization",
    "tool_parsers": "tool parser",
    "reasoning_parsers": "reasoning parser",
}
"""The hooks that give names to classes, and what each name is of."""

_CLASS_METHODS = {
    "config_builders": ("condition", "build"),
    "fallback_builders": ("condition", "build"),
    "input_processors": ("condition", "process"),
}


def _requires_api(module: ModuleType) -> str | None:
    wanted = getattr(module, "requires_api", None)
    return wanted if isinstance(wanted, str) else None


def _check_api(owner: str, module: ModuleType) -> None:
    wanted = _requires_api(module)
    if wanted is None:
        raise PluginLoadError(
            f"{owner}: states no requires_api; this core offers API {API_VERSION}, so the module "
            f'needs requires_api = "{API_VERSION}"'
        )
    stated = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)*", wanted, re.ASCII)
    major, minor = map(int, API_VERSION.split("."))
    if stated is None or int(stated[1]) != major or int(stated[2]) > minor:
        raise PluginLoadError(
            f"{owner}: asks for plugin API {wanted}, this core offers {API_VERSION} and the minor "
            "versions before it; install a version of the plugin, or of engine-core-llm, that "
            "matches"
        )


def _load_plugin(manager: pluggy.PluginManager, name: str, module: ModuleType) -> _Source:
    owner = f"plugin {name!r}"
    _check_api(owner, module)
    unknown = [
        attribute
        for attribute, value in vars(module).items()
        if getattr(value, f"{NAMESPACE}_impl", None) is not None and attribute not in HOOK_NAMES
    ]
    unmarked = [
        name
        for name in HOOK_NAMES
        if inspect.isfunction(hook := vars(module).get(name))
        and hook.__module__ == module.__name__
        and not hasattr(hook, f"{NAMESPACE}_impl")
    ]
    if unmarked:
        raise PluginLoadError(
            f"{owner}: {', '.join(unmarked)} has the name of a hook and lacks its mark; write "
            "@hookimpl above it (from engine_core import hookimpl)"
        )
    if unknown:
        raise PluginLoadError(
            f"{owner}: implements unknown hook {', '.join(unknown)}; the hooks are "
            f"{', '.join(HOOK_NAMES)}"
        )
    try:
        manager.register(module, name=name)
    except (pluggy.PluginValidationError, ValueError) as error:
        raise PluginLoadError(f"{owner}: {error}") from error
    offers: dict[str, Any] = {}
    for caller in manager.get_hookcallers(module) or ():
        hook = caller.name
        try:
            with contained():
                offer = getattr(module, hook)()
        except _FAULTS as error:
            raise PluginLoadError(
                f"{owner}: {hook}() failed: {_told(error, getattr(module, hook))}"
            ) from error
        if hook in _CLASS_METHODS:
            offers[hook] = _check_classes(owner, hook, offer, _CLASS_METHODS[hook])
        else:
            offers[hook] = _check_names(owner, hook, offer)
    return _Source(name=name, **offers)


def _load_module_map_file(path: str) -> _Source:
    file = Path(path).expanduser()
    owner = f"custom module map {str(file)!r}"
    try:
        is_file = file.is_file()
    except OSError as error:
        raise PluginLoadError(f"{owner}: {error.strerror}") from error
    if not is_file:
        raise PluginLoadError(f"{owner}: no such file")
    import hashlib

    # Named after the file's path, so that the classes in it can be pickled and found again.
    digest = hashlib.blake2b(str(file.resolve()).encode(), digest_size=6).hexdigest()
    module_name = f"engine_core_module_map_{digest}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise PluginLoadError(f"{owner}: not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with _importing(owner, str(file)):
            spec.loader.exec_module(module)
    except _FAULTS as error:
        del sys.modules[module_name]
        raise PluginLoadError(f"{owner}: {_told(error, module_name)}") from error
    declared = getattr(module, "MODULE_MAP", None)
    if not isinstance(declared, dict) or not all(isinstance(key, str) for key in declared):
        raise PluginLoadError(
            f"{owner}: needs MODULE_MAP, a dictionary of architecture -> class, got {declared!r}"
        )
    module_map: dict[str, str | type] = {}
    for architecture, target in declared.items():
        found = getattr(module, target, None) if isinstance(target, str) else target
        if isinstance(found, type):
            module_map[architecture] = found
        elif isinstance(target, str) and "." in target:
            module_map[architecture] = target
        else:
            raise PluginLoadError(
                f"{owner}: MODULE_MAP[{architecture!r}] is {target!r}: neither a class in this "
                "file nor 'package.module.Class'"
            )
    builders = _check_classes(
        owner,
        "CONFIG_BUILDERS",
        getattr(module, "CONFIG_BUILDERS", []),
        _CLASS_METHODS["config_builders"],
    )
    return _Source(name=str(file), module_map=module_map, config_builders=builders)


@dataclass(frozen=True, slots=True)
class _Installed:
    """An entry point of ours with what its distribution's metadata say, which is slow to read."""

    point: Any
    distribution: str | None
    version: str | None

    @classmethod
    def of(cls, point: Any) -> _Installed:
        dist = point.dist
        if dist is None:
            return cls(point, None, None)
        # To have all fields parsed, with an import of Python's email, takes 20 ms for ten families.
        head = (dist.read_text("METADATA") or "").partition("\n\n")[0]
        # The first of a name counts, as where all are parsed.
        fields = dict(reversed(_NAME_AND_VERSION.findall(head)))
        name, version = (fields.get(field, "").strip() for field in ("Name", "Version"))
        return cls(point, name or dist.name, version or dist.version)


_seen: tuple[object, list[_Installed]] | None = None


def _installed() -> list[_Installed]:
    """The installed entry points, by name.

    They are looked for again where a folder that Python imports from has changed since. Each look
    reads the metadata of all that is installed, a fifth of what a small engine's start takes.
    """
    global _seen
    places = [*sys.meta_path, *((path, _changed(path)) for path in sys.path)]
    if _seen is None or _seen[0] != places:
        points = sorted(metadata.entry_points(group=NAMESPACE), key=lambda point: point.name)
        _seen = places, [_Installed.of(point) for point in points]
    return _seen[1]


def _changed(path: str) -> int | None:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return None  # no folder, or the place of a finder of its own


def build_registry(
    custom_module_map: Sequence[str] = (),
    *,
    plugin_errors: Literal["report", "strict"] = "report",
    entry_points: Iterable[Any] | None = None,
) -> Registry:
    """Discover the installed plugins and read the module-map files.

    Entry points are loaded one by one, so that a broken plugin is reported and the others work on.

    Args:
        custom_module_map: Python files with ``MODULE_MAP`` and, if wanted, ``CONFIG_BUILDERS``.
            They are executed, and win over the plugins.
        plugin_errors: "report" logs a broken plugin and skips it; "strict" raises its error.
        entry_points: what to look at instead of the installed entry points.

    Raises:
        PluginLoadError: a module-map file is broken, or a plugin is and ``plugin_errors`` is
            "strict".
    """
    manager = pluggy.PluginManager(NAMESPACE)
    manager.add_hookspecs(HookSpecs)
    reports: list[PluginReport] = []
    plugins: list[_Source] = []
    installed = _installed() if entry_points is None else map(_Installed.of, entry_points)
    for known in installed:
        point = known.point
        report = PluginReport(
            name=point.name,
            module=point.value,
            distribution=known.distribution,
            version=known.version,
        )
        try:
            try:
                with _importing(f"plugin {point.name!r}", point.value):
                    module = point.load()
            except _FAULTS as error:
                raise PluginLoadError(
                    f"plugin {point.name!r}: {point.value} cannot be imported: "
                    f"{_told(error, point.value)}"
                ) from error
            report = replace(report, requires_api=_requires_api(module))
            source = _load_plugin(manager, point.name, module)
        except PluginLoadError as error:
            if plugin_errors == "strict":
                raise
            logger.warning("%s; skipped", error)
            reports.append(replace(report, error=str(error)))
            continue
        plugins.append(source)
        reports.append(
            replace(
                report,
                architectures=tuple(source.module_map),
                tool_parsers=tuple(source.tool_parsers),
                reasoning_parsers=tuple(source.reasoning_parsers),
                quantization_schemes=tuple(source.quantization_schemes),
            )
        )
    custom = [_load_module_map_file(path) for path in custom_module_map]
    claimed = {name: source.name for source in plugins for name in source.module_map}
    for source in custom:
        reports.append(
            PluginReport(
                name=source.name, module=source.name, architectures=tuple(source.module_map)
            )
        )
        for architecture in source.module_map:
            if architecture in claimed:
                logger.warning(
                    "%s takes %s over from plugin %r",
                    source.name,
                    architecture,
                    claimed[architecture],
                )
    return Registry(reports, plugins, custom, strict=plugin_errors == "strict")
