"""Executors, which run a model's ranks in this process or each in one of its own."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import signal
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from operator import attrgetter
from typing import TYPE_CHECKING

from engine_core import own_process
from engine_core.configs import EngineConfig
from engine_core.errors import EngineDeadError, OptionError
from engine_core.nn import Experts
from engine_core.plugin_code import package_of
from engine_core.ray_cluster import connect
from engine_core.runtime.compiles import NOBODY, Compiles
from engine_core.runtime.loader import build_on_meta
from engine_core.runtime.rank_processes import RankProcesses, spawn_ranks
from engine_core.runtime.ranks import Failure, RanksExecutor, sizes
from engine_core.runtime.source import ModelSource
from engine_core.runtime.stages import find_decoder
from engine_core.runtime.transport import RingTransport
from engine_core.runtime.worker import Worker
from engine_core.step_context import BuildContext

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger(__name__)

# A sum over ranks with its norm takes 3 to 4 us on an H200, in which this much is read.
_SUM_BYTES = 16_000_000
# How long a failing rank's neighbours are looked at for one that was killed.
_DEATH_SECONDS = 0.5


def build_executor(
    source: ModelSource,
    config: EngineConfig,
    compiles: Compiles = NOBODY,
    ranks: RankProcesses | None = None,
) -> Executor:
    """The executor of ``config.num_ranks`` ranks; ``compiles`` are not for those of a cluster.

    ``ranks`` are processes that wait for their executor. If another kind of executor is chosen,
    or none, their end is the caller's to see to.

    Raises:
        OptionError: the devices are not those that the ranks need, or the model cannot be split
            over so many.
        ConfigError: its class cannot be built from its config.
    """
    if config.num_ranks == 1:
        return Worker(source, config, BuildContext(), compiles=compiles)
    by_ray = takes_ray(config, source.device)
    if not by_ray:
        check_devices(config, source.device)
    # Otherwise each rank would refuse by itself, after all of them were started.
    context = BuildContext(
        tp_size=config.tensor_parallel_size,
        dtype=source.dtype,
        deterministic=config.deterministic,
        kv_cache_dtype=source.kv_cache_dtype,
        expert_parallel=config.enable_expert_parallel,
        model_class=source.registry.model_class,
    )
    model = build_on_meta(source.model_class, source.model_config, context, source.scheme)
    check_experts(config, model)
    check_stages(config, model, pools=source.model_config.pooling is not None)
    if source.device.type == "cuda":
        weights = sum(param.nbytes for param in model.parameters())
        small = small_for_ranks(config, source.model_config.num_layers, weights)
        if small is not None:
            logger.warning("%s", small)
    if not by_ray:
        return ProcessExecutor(source, config, ranks, compiles)
    from engine_core.runtime.ray_executor import RayExecutor

    parts = [source.model_class, *map(type, model.modules()), type(source.scheme)]
    return RayExecutor(source, config, {package_of(part) for part in parts})


def takes_ray(config: EngineConfig, device: torch.device) -> bool:
    """Whether ranks go to the machines of a Ray cluster.

    Raises:
        OptionError: they are to, and Ray or the cluster is missing, or one GPU is named.
    """
    kind = config.distributed_executor
    if kind == "auto" and device.type == "cuda":
        import torch

        # Otherwise, or if there is no cluster, the count of GPUs is the thing to speak of.
        if torch.cuda.device_count() < config.num_ranks and find_spec("ray") is not None:
            with contextlib.suppress(OptionError):
                connect(config.ray_address)
                kind = "ray"
    if kind == "ray":
        _check_device_name(config, device)
        connect(config.ray_address)
    return kind == "ray"


def _check_device_name(config: EngineConfig, device: torch.device) -> None:
    if device.type == "cuda" and config.device not in ("auto", "cuda"):
        raise OptionError(
            f"{sizes(config)} takes one GPU per rank, but device is {config.device!r}; set "
            "device='cuda', and CUDA_VISIBLE_DEVICES to choose GPUs"
        )


def check_devices(config: EngineConfig, device: torch.device) -> None:
    """Refuse more ranks than this machine has GPUs, unless Ray is to place them.

    Raises:
        OptionError: there are too few, or ``config.device`` names one of them.
    """
    size = config.num_ranks
    if size == 1 or device.type != "cuda":
        return
    import torch

    _check_device_name(config, device)
    count = torch.cuda.device_count()
    if config.distributed_executor != "ray" and count < size:
        raise OptionError(
            f"{sizes(config)} takes {size} GPUs, but torch sees {count}; set it to at most "
            f"{count}, or place the processes on several machines with distributed_executor 'ray'"
        )


def check_experts(config: EngineConfig, model: nn.Module) -> None:
    """Refuse to share out the experts of a model that has none.

    Raises:
        OptionError: it is asked for.
    """
    if config.enable_expert_parallel and not any(isinstance(m, Experts) for m in model.modules()):
        raise OptionError(
            f"enable_expert_parallel: {type(model).__name__} has no experts; leave it out"
        )


def small_for_ranks(config: EngineConfig, num_layers: int, weights: int) -> str | None:
    """A warning that ranks on GPUs gain less than their sums take; ``weights``: bytes of a rank."""
    size = config.tensor_parallel_size
    # Each layer adds up twice, and spares a rank the reading of what the others have.
    spared = weights * (size - 1)
    if size == 1 or config.pipeline_parallel_size > 1 or spared >= 2 * num_layers * _SUM_BYTES:
        return None
    return (
        f"tensor_parallel_size {size}: a model as small as this one is hardly faster than on one "
        "GPU, or slower, as two sums over the ranks a layer take longer than reading the weights "
        "that others have; leave tensor_parallel_size out, or use several GPUs by replicas"
    )


def check_stages(config: EngineConfig, model: nn.Module, *, pools: bool) -> None:
    """Refuse to cut a model whose layers the core does not know, or that has too few.

    ``pools``: it gives vectors or scores in place of tokens.

    Raises:
        OptionError: it cannot be cut into ``config.pipeline_parallel_size`` stages.
    """
    if config.pipeline_parallel_size > 1:
        find_decoder(model, config.pipeline_parallel_size, pools=pools)


class ProcessExecutor(RanksExecutor):
    """Every rank in a process of its own; plans go out in shared memory, results come by pipes."""

    def __init__(
        self,
        source: ModelSource,
        config: EngineConfig,
        ranks: RankProcesses | None = None,
        compiles: Compiles = NOBODY,
    ) -> None:
        """Each of ``ranks``, spawned if none are given, opens the model anew from its name."""
        super().__init__(config, source.device, compiles)
        if ranks is not None and not ranks.took_gpus() and source.device.type == "cuda":
            logger.warning(
                "a fork of this process could not use its GPU, so ranks are started as new "
                "processes, which takes some seconds longer"
            )
            ranks.end()
            ranks = None
        self._ranks = ranks or spawn_ranks(source.name, config)
        self._processes = self._ranks.processes
        self._connections += self._ranks.connections
        self._ways = [(RingTransport(self._ranks.ring), self._connections)]

    def close(self) -> None:
        """See :class:`RanksExecutor`."""
        self._compiles.close()
        self._ranks.close()

    def _receive(self) -> None:
        open_ones = [c for rank, c in enumerate(self._connections) if rank not in self._ended]
        ready = multiprocessing.connection.wait(
            [*open_ones, *(process.sentinel for process in self._processes)]
        )
        # Read all messages before looking at deaths: a reported failure explains them.
        self._read()
        for rank, process in enumerate(self._processes):
            if process.sentinel in ready:
                process.join()
                self._ranks.kill()
                raise EngineDeadError(_ended(rank, process))

    def _fail(self, failures: list[Failure]) -> None:
        if not failures:
            return  # the exit code will say why
        killed = self._killed(failures)
        self._ranks.kill()
        if killed is not None:
            raise EngineDeadError(killed)
        # Ranks that wait for one that is gone fail too, after it.
        first = min(failures, key=attrgetter("when"))
        first.reraise(f"rank {first.rank}")

    def _killed(self, failures: list[Failure]) -> str | None:
        """Say what killed another rank, if that is why these have failed, else None."""
        if any(failure.error is not None for failure in failures):
            return None
        told = {failure.rank for failure in failures}
        others = [(rank, each) for rank, each in enumerate(self._processes) if rank not in told]
        # Its connections and its sentinel are closed shortly before it is known to have ended.
        sentinels = [each.sentinel for _, each in others]
        closed = multiprocessing.connection.wait(sentinels, _DEATH_SECONDS)
        for rank, process in others:
            if process.sentinel in closed:
                process.join(_DEATH_SECONDS)
            # One that aborts may itself have lost a neighbour.
            if (process.exitcode or 0) < 0 and process.exitcode != -signal.SIGABRT:
                return _ended(rank, process)
        return None


Executor = Worker | RanksExecutor
"""Runs plans on every rank of a model; the results are asked for in the order of the plans."""


def _ended(rank: int, process: BaseProcess) -> str:
    return f"the process of rank {rank} ended {own_process.how_ended(process.exitcode)}"
