"""Everything on disk: finding a checkpoint, checking its files, and reading its tensors.

Importing it brings no torch; that comes when tensors are read or written.
"""

from engine_core.checkpoint.checkpoint import (
    Checkpoint,
    apply_overrides,
    open_checkpoint,
    read_generation_config,
)
from engine_core.checkpoint.disk_cache import DiskCache
from engine_core.checkpoint.files import TensorHeader
from engine_core.checkpoint.gguf import GGUFAdapter, GGUFFile
from engine_core.checkpoint.resolve import is_local, resolve_model

__all__ = [
    "Checkpoint",
    "DiskCache",
    "GGUFAdapter",
    "GGUFFile",
    "TensorHeader",
    "apply_overrides",
    "is_local",
    "open_checkpoint",
    "read_generation_config",
    "resolve_model",
]
