"""Notes, beside Triton's compiled kernels, of starts whose kernels are all there."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import engine_core
from engine_core.configs import EngineConfig
from engine_core.kernels import GPU
from engine_core.runtime.source import ModelSource

if TYPE_CHECKING:  # Triton takes some tenths of a second
    from engine_core.runtime.ahead import Part

logger = logging.getLogger(__name__)

# Of the engine's settings those that a kernel may depend on.
_SETTINGS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "enable_prefix_caching",
    "encoder_cache_tokens",
    "deterministic",
    "quantization",
    "tensor_parallel_size",
    "enable_expert_parallel",
    "rank_sums",
)
# Rooms whose sources decide what is launched.
_ROOMS = ("kernels", "nn", "runtime")
_PREFIX = "engine-core-"

MadeFor = dict[str, Any]


def made_for(source: ModelSource, config: EngineConfig, gpu: GPU) -> MadeFor:
    """All that the kernels of a start depend on, by name."""
    from triton import __version__ as triton_version
    from triton.backends.nvidia.compiler import get_ptxas_version

    arch = 10 * gpu.capability[0] + gpu.capability[1]
    return {
        **_asked(source, config),
        **_on(gpu),
        "triton": triton_version,
        "ptxas": _digest(get_ptxas_version(arch)),
        **_installed(),
    }


def may_be_kept(source: ModelSource, config: EngineConfig, gpu: GPU | None) -> bool:
    """Whether kernels of such a start are there, for some Triton. It imports nothing.

    ``gpu`` is None if it is of a kind that nothing is kept for.
    """
    if gpu is None:
        return False
    asked = _asked(source, config) | _on(gpu)
    for file in folder().glob(f"{_PREFIX}*.json"):
        try:
            made = json.loads(file.read_text())["made_for"]
            if {name: made[name] for name in asked} != asked:
                continue
            installed = _installed()
            if {name: made[name] for name in installed} == installed:
                return True
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return False


def has_notes() -> bool:
    """Whether kernels of any start are there, so that those of the next may be."""
    return any(folder().glob(f"{_PREFIX}*.json"))


def _asked(source: ModelSource, config: EngineConfig) -> MadeFor:
    """The part of it that a user asked for."""
    return {
        "tensors": _tensors(source),
        "model": _digest(source.model_config.model_dump_json()),
        "class": source.model_class.__qualname__,
        "dtype": str(source.dtype),
        "kv_cache_dtype": source.kv_cache_dtype,
        "scheme": None if source.scheme is None else source.scheme.name,
        "settings": {name: getattr(config, name) for name in _SETTINGS},
    }


def _tensors(source: ModelSource) -> str | None:
    """A digest of how a checkpoint's weights are quantised, where its tensors say it."""
    scheme, checkpoint = source.scheme, source.checkpoint
    if scheme is None:
        return None
    # A rehearsal leaves a file unconverted whose numbers the engine has on the disk.
    if checkpoint.gguf is not None and not scheme.converts_gguf:
        return _digest(json.dumps(sorted(checkpoint.gguf.block_types.items())))
    if scheme.cache_settings is None:  # quantised at load
        return None
    held = sorted((each.name, each.dtype, each.shape) for each in checkpoint.headers.values())
    return _digest(json.dumps(held))


def _on(gpu: GPU) -> MadeFor:
    """The part of it that is the GPU's."""
    return {"gpu": [list(gpu.capability), gpu.shared_memory, gpu.num_multiprocessors]}


def _installed() -> MadeFor:
    """The part of it that is installed, but for Triton."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "engine-core": _sources(),
    }


def are_kept(made: MadeFor) -> bool:
    """Whether all kernels of such a start are in Triton's cache.

    A line of the log says what differs if there are only some of another version.
    """
    from engine_core.runtime.ahead import is_kept

    try:
        note = json.loads(_file(made).read_text())
        return all(is_kept(key, file) for file, key in note["kernels"])
    except FileNotFoundError:
        _tell_stale(made)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return False


def keep(made: MadeFor, kernels: Sequence[Part]) -> Path:
    """Note that all kernels of such a start are in Triton's cache; the file."""
    file = _file(made)
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"made_for": made, "kernels": [(each.file, each.key) for each in kernels]}
    # Of each process its own: replicas end at the same time.
    partial = file.with_suffix(f".{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(content, indent=1))
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return file


def _tell_stale(made: MadeFor) -> None:
    """Say in a line why none of the notes of this model and these settings will do."""
    versions = ("gpu", "triton", "ptxas", "torch", "python", "engine-core")
    same = {name: value for name, value in made.items() if name not in versions}
    for file in sorted(folder().glob(f"{_PREFIX}*.json")):
        try:
            other = json.loads(file.read_text())["made_for"]
            if {name: other[name] for name in same} != same:
                continue
            differing = [name for name in versions if other[name] != made[name]]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        logger.warning(
            "the kernels kept in %s are of another %s (%s, here %s): they are compiled anew",
            folder(),
            " and ".join(differing),
            ", ".join(str(other[name]) for name in differing),
            ", ".join(str(made[name]) for name in differing),
        )
        return


def folder() -> Path:
    """The cache of Triton's compiled kernels."""
    if "triton" in sys.modules:  # whose user may have set it
        from triton import knobs

        return Path(knobs.cache.dir)
    home = os.environ.get("TRITON_HOME") or Path.home()
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))


def _file(made: MadeFor) -> Path:
    return folder() / f"{_PREFIX}{_digest(json.dumps(made, sort_keys=True))}.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _sources() -> str:
    """A hash of the sources that decide what is launched."""
    root = Path(engine_core.__file__).parent
    found = hashlib.sha256()
    for room in _ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]
