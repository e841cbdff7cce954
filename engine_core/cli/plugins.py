"""``engine-core plugins``: which families are installed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_core.cli.command import OptionGroup, command
from engine_core.configs import EngineConfig

if TYPE_CHECKING:
    from engine_core.registry import PluginReport

PLUGIN_OPTIONS = OptionGroup(EngineConfig, only=("custom_module_map", "plugin_errors"))


def plugin_reports(options: dict[str, Any], *, thorough: bool = False) -> tuple[PluginReport, ...]:
    """Report each plugin that discovery finds with the options of :data:`PLUGIN_OPTIONS`.

    ``thorough`` also imports all that they name, to say what would be refused later.

    Raises:
        PluginLoadError: a module-map file is broken, or a plugin is and strictness was asked for.
    """
    from engine_core.registry import build_registry

    config = PLUGIN_OPTIONS.build(options)
    registry = build_registry(config.custom_module_map, plugin_errors=config.plugin_errors)
    registry.probe()
    return registry.with_refusals() if thorough else registry.reports


@command(PLUGIN_OPTIONS)
def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False, **options: Any
) -> None:
    """Show the installed model families, and what of them would be refused; then the code is 1.

    All that a plugin names is imported: its models, parsers and schemes.
    """
    reports = plugin_reports(options, thorough=True)
    if as_json:
        print(json.dumps([dataclasses.asdict(report) for report in reports], indent=2))
    elif not reports:
        print("No plugin is installed; a family's package is named engine-core-<family>.")
    else:
        _print_table(reports)
    if any(report.error or report.refusals for report in reports):
        raise typer.Exit(1)


def _print_table(reports: Sequence[PluginReport]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("Name", "Package", "Version", "API", "Brings", "Status")
    for report in reports:
        brings = [*report.architectures]
        brings += [f"{name} (tools)" for name in report.tool_parsers]
        brings += [f"{name} (reasoning)" for name in report.reasoning_parsers]
        brings += [f"{name} (quantization)" for name in report.quantization_schemes]
        cells = [
            report.name,
            report.distribution or "a file",
            report.version or "",
            report.requires_api or "",
            "\n".join(brings),
            report.error or "\n".join(report.refusals) or "ok",
        ]
        table.add_row(*(Text(cell, overflow="fold") for cell in cells))
    Console().print(table)
