"""A small checkpoint whose parts a test changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


class Model:
    """A checkpoint folder that a test changes: 3 layers, hidden 64, vocabulary 320, float32."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def weights(self) -> Path:
        return self.folder / "model.safetensors"

    def json(self, file: str, **changes: Any) -> None:
        """Set keys of a JSON file; None removes one."""
        path = self.folder / file
        values = json.loads(path.read_text()) if path.exists() else {}
        values |= changes
        kept = {key: value for key, value in values.items() if value is not None}
        path.write_text(json.dumps(kept))

    def tensors(self, change: Callable[[dict[str, Tensor]], Any]) -> None:
        """Write the weights anew after ``change`` was made to them."""
        tensors = {name: tensor.clone() for name, tensor in load_file(self.weights).items()}
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self.weights)
