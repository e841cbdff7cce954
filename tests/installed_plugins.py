"""Packages with a plugin, installed without pip."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def install(folder: Path, name: str, body: str) -> dict[str, str]:
    """Install a package with one module and one entry point, as pip would.

    Returns:
        the environment variables that a process finds it by.
    """
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(body)
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[engine_core]\n{name} = {name}\n")
    return {"PYTHONPATH": os.pathsep.join((str(folder), *filter(None, sys.path)))}
