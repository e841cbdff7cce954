"""``engine-core env``: versions and devices of a machine, for bug reports."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from engine_core.cli.command import command
from engine_core.cli.plugins import PLUGIN_OPTIONS, plugin_reports

_PACKAGES = (
    "engine-core-llm",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "pluggy",
    "pydantic",
    "numpy",
    "numba",
)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _hide_home(text: str) -> str:
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text


def _describe(options: dict[str, Any]) -> dict[str, Any]:
    import torch

    from engine_core.engine.startup import hopper_kernels

    count = torch.cuda.device_count()
    return {
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in _PACKAGES},
        },
        "platform": platform.platform(),
        "cpu": {
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        "cuda": {
            "version": torch.version.cuda,
            "devices": [
                {
                    "name": properties.name,
                    "memory_gib": round(properties.total_memory / 2**30, 1),
                    "capability": f"{properties.major}.{properties.minor}",
                }
                for properties in map(torch.cuda.get_device_properties, range(count))
            ],
            "hopper_kernels": hopper_kernels([torch.device("cuda", i) for i in range(count)]),
        },
        "plugins": [
            {
                "name": _hide_home(report.name),
                "distribution": report.distribution,
                "version": report.version,
                "error": report.error and _hide_home(report.error),
            }
            for report in plugin_reports(options)
        ],
    }


def _lines(about: dict[str, Any]) -> list[str]:
    rows = {name: version or "not installed" for name, version in about["versions"].items()}
    rows["platform"] = about["platform"]
    rows["cpu"] = f"{about['cpu']['capability']}, {about['cpu']['threads']} threads"
    rows["cuda"] = about["cuda"]["version"] or "not in this build of torch"
    for index, device in enumerate(about["cuda"]["devices"]):
        rows[f"cuda:{index}"] = (
            f"{device['name']}, {device['memory_gib']} GiB, capability {device['capability']}"
        )
    rows["hopper kernels"] = about["cuda"]["hopper_kernels"]
    for plugin in about["plugins"]:
        package = f"{plugin['distribution'] or 'a file'} {plugin['version'] or ''}".rstrip()
        rows[f"plugin {plugin['name']}"] = package + (
            f": {plugin['error']}" if plugin["error"] else ""
        )
    width = max(map(len, rows))
    return [f"{name:<{width}}  {value}" for name, value in rows.items()]


@command(PLUGIN_OPTIONS)
def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False, **options: Any
) -> None:
    """Show versions, devices and plugins, ready to paste into a bug report."""
    about = _describe(options)
    print(json.dumps(about, indent=2) if as_json else "\n".join(_lines(about)))
