"""Commands whose options are made from the fields of config models."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import traceback
import types
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from engine_core.configs.base import FrozenConfig, describe
from engine_core.configs.engine import Bytes
from engine_core.errors import ConfigError, EngineError

Config = TypeVar("Config", bound=FrozenConfig)

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Checkpoint folder, .gguf file or hub id.")
]
"""The model that a command runs."""

_METAVARS = {int: "INTEGER", float: "FLOAT", str: "TEXT", Bytes: "SIZE", Path: "FILE"}


_VERBOSE = inspect.Parameter(
    "verbose",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option(
            "--verbose", help="Say what is imported of plugins; with an error print its traceback."
        ),
    ],
)


def startup_line(phases: Mapping[str, float]) -> str:
    """Seconds that loading took, as a whole and by phase."""
    each = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
    return f"start-up {sum(phases.values()):.2f} s ({each})"


def _members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _metavar(annotation: Any) -> str:
    if annotation in _METAVARS:
        return _METAVARS[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(arguments)
    if origin is tuple:
        return _metavar(arguments[0])
    if origin is dict:
        return "JSON"
    members = [item for item in _members(annotation) if item is not types.NoneType]
    # In a union of text and another type the command line gives text.
    return "TEXT" if str in members else "|".join(map(_metavar, members))


def repeats(field: FieldInfo) -> bool:
    """Whether the option is given once for each of the field's values."""
    return any(get_origin(item) is tuple for item in _members(field.annotation))


def parsed(field: FieldInfo, value: Any) -> Any:
    """``value`` of an option, or each of a list of them, as a number where the field holds numbers.

    Other text stays as it is; the config model refuses it.
    """
    if isinstance(value, list):
        return [parsed(field, item) for item in value]
    if not isinstance(value, str):
        return value
    members = set[Any]()
    for member in _members(field.annotation):
        members.update(get_args(member) if get_origin(member) is tuple else (member,))
    for kind in (int, float):
        if kind in members and str not in members:
            with contextlib.suppress(ValueError):
                return kind(value)
    return value


def _takes_none(field: FieldInfo) -> bool:
    """Whether None must be available as a value on the command line."""
    return field.default is not None and types.NoneType in _members(field.annotation)


def _help(description: str, field: FieldInfo, own_default: Any) -> str:
    text = " ".join(description.split())
    if repeats(field):
        text += " May be given again."
    default = own_default
    if default is None:
        default = field.get_default(call_default_factory=True)
    if default is None or default == () or default == {}:
        return text
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
    return f"{text} (default: {shown})"


def flag(name: str) -> str:
    """The option of a field."""
    return f"--{name.replace('_', '-')}"


class OptionGroup(Generic[Config]):
    """The fields of a config model as command-line options.

    Numbers are parsed here, everything else is passed to the model as it was written; it alone
    checks the values. An option that was not given is None and leaves the field to whoever builds
    the config.

    Args:
        model: the config model; each field's description is its help. Fields that it excludes from
            being written out cannot be written on a command line either, and are left out.
        only: the fields taken; all if None.
        skip: fields left out.
        defaults: values of fields that this command takes in place of the model's own.
    """

    def __init__(
        self,
        model: type[Config],
        *,
        only: Collection[str] | None = None,
        skip: Collection[str] = (),
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._model = model
        self._defaults = dict(defaults or {})
        self._fields = {
            name: field
            for name, field in model.model_fields.items()
            if (only is None or name in only) and name not in skip and not field.exclude
        }

    def parameters(self) -> list[inspect.Parameter]:
        """One keyword parameter per field, annotated as typer wants it."""
        return [self._parameter(name, field) for name, field in self._fields.items()]

    def helps(self) -> dict[str, str]:
        """The help of each field's option; it is read from the model's source."""
        described = describe(self._model)
        return {
            name: _help(described.get(name, ""), field, self._defaults.get(name))
            for name, field in self._fields.items()
        }

    def _parameter(self, name: str, field: FieldInfo) -> inspect.Parameter:
        kind: Any = str
        flags, metavar = flag(name), None
        if field.annotation is bool:
            kind, flags = bool, f"{flags}/--no-{flags[2:]}"
        else:
            kind = list[str] if repeats(field) else str
            metavar = _metavar(field.annotation) + ("|none" if _takes_none(field) else "")
        # As people say it: "--tensor-parallel 2".
        short = [flags.removesuffix("-size")] if name.endswith("_parallel_size") else []
        option = typer.Option(flags, *short, metavar=metavar, show_default=False)
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, option],
        )

    def given(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of this group that the command line gives, field -> value.

        Raises:
            typer.BadParameter: a value of a JSON option is not JSON.
        """
        values = {name: options[name] for name in self._fields if options[name] not in (None, [])}
        for name, value in values.items():
            field = self._fields[name]
            if get_origin(field.annotation) is dict:
                try:
                    values[name] = json.loads(value)
                except ValueError as error:
                    raise typer.BadParameter(f"{flag(name)}: not JSON: {error}") from None
            elif value == "none" and _takes_none(field):
                values[name] = None
            else:
                values[name] = parsed(field, value)
        return values

    def build(self, options: Mapping[str, Any]) -> Config:
        """The config model with what was given on the command line.

        Raises:
            typer.BadParameter: a value is out of range; names the option.
        """
        try:
            return self._model(**{**self._defaults, **self.given(options)})
        except ConfigError as error:
            message = error.named(
                lambda place: ".".join((flag(place.split(".")[0]), *place.split(".")[1:]))
            )
            raise typer.BadParameter(message) from None


def command(*groups: OptionGroup[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command: add the groups' options, and turn errors into exit codes.

    The function takes the added options as ``**options``. An :class:`EngineError` becomes one line
    on stderr and exit code 1, Ctrl-C exit code 130. Every command has ``--verbose``. The options'
    help is shown by a :class:`HelpfulCommand`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(*args: Any, verbose: bool, **kwargs: Any) -> None:
            if verbose:
                logging.getLogger("engine_core.registry").setLevel(logging.DEBUG)
            try:
                function(*args, **kwargs)
            except EngineError as error:
                if verbose:
                    typer.echo("".join(traceback.format_exception(error)), err=True)
                typer.echo(f"engine-core: error: {error}", err=True)
                raise typer.Exit(1) from None
            except KeyboardInterrupt as error:
                for note in getattr(error, "__notes__", ()):
                    typer.echo(f"engine-core: {note}", err=True)
                raise typer.Exit(130) from None

        signature = inspect.signature(function, eval_str=True)
        parameters = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        for group in groups:
            parameters += group.parameters()
        parameters.append(_VERBOSE)
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {item.name: item.annotation for item in parameters}
        run.option_groups = groups  # type: ignore[attr-defined]
        return run

    return decorate


class HelpfulCommand(TyperCommand):
    """A command that finds the help of its options' fields when it shows it."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help into the formatter."""
        groups = getattr(self.callback, "option_groups", ())
        helps = {name: text for group in groups for name, text in group.helps().items()}
        for parameter in self.params:
            if parameter.name in helps:
                parameter.help = helps[parameter.name]  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)
