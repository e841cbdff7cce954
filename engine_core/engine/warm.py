"""The kernels of a start, compiled ahead and without the GPU."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine_core.configs import EngineConfig
from engine_core.engine import kept_kernels
from engine_core.engine.beside import Rehearsal, usable_cores
from engine_core.engine.rehearsal import rehearse
from engine_core.errors import EngineError, OptionError
from engine_core.kernels import GPU
from engine_core.plugin_code import described
from engine_core.runtime.ahead import Compilers, Need, Part
from engine_core.runtime.compiles import MEMORY, START


@dataclass(frozen=True, slots=True)
class WarmReport:
    """The kernels of a start, and how they came to be in the cache.

    Attributes:
        variants: how many variants each kernel has.
        modules: how many modules launch them.
        kept: variants that were there before.
        failed: why each of the others is not there.
        steps: captured steps that launch them.
        rehearsal_seconds: until it was known what all steps launch.
        compile_seconds: of all compiles together, each in a process.
        seconds: in all.
        folder: the cache.
        note: the file that says what they are for; None if some are not there.
    """

    variants: Mapping[str, int]
    modules: int
    kept: int
    failed: tuple[str, ...]
    steps: int
    rehearsal_seconds: float
    compile_seconds: float
    seconds: float
    folder: Path
    note: Path | None


def warm(
    model: str,
    config: EngineConfig,
    *,
    capability: tuple[int, int],
    multiprocessors: int,
    memory: int,
) -> WarmReport:
    """Compile into Triton's cache all that steps of a start on such a GPU launch.

    For a process that does nothing else: PyTorch and Triton take the GPU for one that is there.

    Args:
        model: checkpoint folder, GGUF file or hub id.
        config: the settings that the engine will have.
        capability: the GPU's compute capability.
        multiprocessors: of the GPU.
        memory: bytes of the GPU.

    Raises:
        OptionError: with these settings no step is captured.
        EngineError: the model cannot run on such a GPU; the subclass says why.
    """
    if config.eager or config.pipeline_parallel_size > 1:
        raise OptionError(
            "kernels are compiled ahead for the steps that are captured: leave out eager and "
            "pipeline_parallel_size"
        )
    gpu = GPU.of_capability(capability, multiprocessors)
    processes = config.compile_processes or usable_cores()
    task, compilers = (
        Rehearsal(model, config, gpu, (memory, memory), processes),
        Compilers(processes),
    )
    steps: set[str] = set()

    def note(part: Part, need: Need) -> None:
        del need  # nobody waits for a first request
        compilers.add(part)
        compilers.poll()

    def recorded(step: str, kernels: list[str]) -> None:
        del kernels
        steps.add(step)

    begin = time.perf_counter()
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # what holds for the GPU that is not there
    try:
        opened = rehearse(task, note, recorded)
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(
            f"what {model} launches cannot be found out without a GPU: {described(error)}"
        ) from error
    finally:
        logging.disable(before)
    rehearsed = time.perf_counter() - begin
    while compilers.busy:
        compilers.poll(wait=True)
    made, file = kept_kernels.made_for(opened.source, config, gpu), None
    if not compilers.failed:
        try:
            file = kept_kernels.keep(made, compilers.done)
        except OSError as error:
            raise OptionError(
                f"{os.fspath(kept_kernels.folder())} cannot be written: {error.strerror}"
            ) from error
    return WarmReport(
        variants=dict(compilers.variants.most_common()),
        modules=len(compilers.done) - compilers.variants.total(),
        kept=compilers.hits,
        failed=tuple(end.error or "" for end in compilers.failed),
        steps=len(steps - {MEMORY, START}),
        rehearsal_seconds=rehearsed,
        compile_seconds=compilers.seconds,
        seconds=time.perf_counter() - begin,
        folder=kept_kernels.folder(),
        note=file,
    )
