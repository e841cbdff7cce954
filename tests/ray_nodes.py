"""A Ray cluster of two nodes on this machine, each with one processor, for tests of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from engine_core import EngineConfig

# Each process that is left out is a start of Python with an import of Ray.
_NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_log_monitor": False}
_HEAD = {**_NODE, "include_dashboard": False, "no_monitor": True}


@dataclass
class Nodes:
    """The cluster, and its nodes in the order in which they joined; this process is the first's."""

    cluster: Any
    nodes: list[Any]

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def config(self, **more: Any) -> EngineConfig:
        """Of two ranks on these nodes, unless ``more`` says otherwise."""
        settings = {
            "distributed_executor": "ray",
            "ray_address": self.address,
            "tensor_parallel_size": 2,
            "skip_tokenizer_init": True,
            "max_model_len": 160,
        }
        return EngineConfig(**settings | more)

    def ranks(self, node: int) -> list[psutil.Process]:
        """The processes of a node that live as ranks now."""
        raylet = psutil.Process(self.nodes[node].all_processes["raylet"][0].process.pid)
        found = []
        for process in raylet.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.cmdline()[:1] == ["ray::Rank.run"]:
                    found.append(process)
        return found


@contextlib.contextmanager
def two_nodes(**second: Any) -> Iterator[Nodes]:
    """A cluster until the end of the ``with`` block; ``second`` are settings of its second node."""
    import ray
    from ray._private import auto_init_hook
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=_HEAD)
    try:
        nodes = Nodes(cluster, [cluster.head_node])
        nodes.nodes.append(cluster.add_node(**_NODE, **second))
        yield nodes
    finally:
        # A thread of Serve's that hears late of a change would connect again, and a cluster that
        # this process is connected to cannot be ended.
        auto_init_hook.enable_auto_connect = False
        ray.shutdown()
        cluster.shutdown()
