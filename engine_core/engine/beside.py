"""Kernels that other processes compile while an engine starts."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from engine_core.configs import EngineConfig
from engine_core.engine.startup import Opened
from engine_core.kernels import GPU, gpu_of
from engine_core.runtime.compiles import NOBODY, CompileProcess, Compiles

_MOST_PROCESSES = 32


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A start that is to be rehearsed.

    Attributes:
        model: as the user named it.
        config: the engine's settings.
        gpu: where it will run.
        memory: bytes of the GPU that are free, and all of them.
        processes: how many compile at once.
    """

    model: str
    config: EngineConfig
    gpu: GPU
    memory: tuple[int, int]
    processes: int


def compile_beside(opened: Opened) -> Compiles:
    """Have other processes compile what a start on a GPU will launch, unless it was before.

    Nobody does where that is off, where nothing is captured, and for several ranks.
    """
    source, config = opened.source, opened.config
    if (
        source.device.type != "cuda"
        or config.compile_processes == 0
        or config.eager
        or config.num_ranks > 1
        or source.model_config.pooling is not None
        or not source.state_known
        or find_spec("triton") is None
        or (gpu := gpu_of(source.device)) is None
    ):
        return NOBODY
    from triton import knobs

    from engine_core.engine import kept_kernels

    made_for = kept_kernels.made_for(source, config, gpu)
    if kept_kernels.are_kept(made_for):
        return NOBODY
    processes = config.compile_processes or min(_MOST_PROCESSES, usable_cores())
    memory = torch.cuda.mem_get_info(source.device)
    task = Rehearsal(source.name, config, gpu, memory, processes)
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",  # what PyTorch would ask a GPU for would take memory
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TRITON_CACHE_DIR": str(knobs.cache.dir),
    }
    command = [sys.executable, "-c", "from engine_core.engine.rehearsal import main; main()"]
    return CompileProcess(command, pickle.dumps((os.getpid(), task)), environment)


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
