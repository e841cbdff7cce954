"""``engine-core plugins``: which families are installed."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_core.cli.command import OptionGroup, command
from engine_core.configs import EngineConfig

if TYPE_CHECKING:
    from engine_core.registry import PluginReport

PLUGIN_OPTIONS = OptionGroup(EngineConfig, only=("custom_module_map", "plugin_errors"))


def plugin_reports(options: dict[str, Any]) -> tuple[PluginReport, ...]:
    """Report each plugin that discovery finds with the options of :data:`PLUGIN_OPTIONS`.

    Raises:
        PluginLoadError: a module-map file is broken, or a plugin is and strictness was asked for.
    """
    from engine_core.registry import build_registry

    config = PLUGIN_OPTIONS.build(options)
    registry = build_registry(config.custom_module_map, plugin_errors=config.plugin_errors)
    registry.probe()
    return registry.reports


@command(PLUGIN_OPTIONS)
def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False, **options: Any
) -> None:
    """Show the installed model families, and why one cannot be used."""
    reports = plugin_reports(options)
    if as_json:
        print(json.dumps([dataclasses.asdict(report) for report in reports], indent=2))
        return
    if not reports:
        print("No plugin is installed; a family's package is named engine-core-<family>.")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("Name", "Package", "Version", "Architectures", "Status")
    for report in reports:
        cells = [
            report.name,
            report.distribution or "a file",
            report.version or "",
            "\n".join(report.architectures),
            report.error or "ok",
        ]
        table.add_row(*(Text(cell, overflow="fold") for cell in cells))
    Console().print(table)
