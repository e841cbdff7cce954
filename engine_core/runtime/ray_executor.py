"""Ranks as actors of a Ray cluster, on any of its machines."""

from __future__ import annotations

import contextlib
import hmac
import multiprocessing.connection
import pickle
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine_core.checkpoint import is_local
from engine_core.configs import EngineConfig
from engine_core.errors import EngineDeadError, OptionError
from engine_core.ray_cluster import connect
from engine_core.runtime.rank import Seat
from engine_core.runtime.ranks import Failure, RanksExecutor, sizes
from engine_core.runtime.ray_rank import HELLO, Task, actor_class, keep_alive
from engine_core.runtime.ring import MessageRing
from engine_core.runtime.source import ModelSource
from engine_core.runtime.transport import RingTransport, StreamTransport

# Seconds.
_PLACE_SECONDS = 60.0  # until other work leaves room in the cluster
_ACTOR_SECONDS = 120.0  # until a machine has started a Python process, which may have to fetch code
_HELLO_SECONDS = 2.0
_STOP_SECONDS = 5.0
# Messages of several machines are not in order: how long others may still come that explain one.
_GATHER_SECONDS = 1.0
# Ray hears of a lost machine later than we do.
_VERDICT_SECONDS = 20.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank's place in the cluster.

    Attributes:
        bundle: its bundle in the placement group.
        node: the id of its node.
        address: the node's address.
        ranks: how many ranks the node has.
        cpus: the node's processors, as Ray counts them.
    """

    bundle: int
    node: str
    address: str
    ranks: int
    cpus: float

    @property
    def named(self) -> str:
        """The node in words."""
        return f"node {self.address} ({self.node[:8]})"


class RayExecutor(RanksExecutor):
    """Every rank in an actor, all in one placement group; its death is theirs.

    Ranks connect to this process by TCP. Those on its machine read plans in shared memory, others
    by their connection. Tensors go from rank to rank by torch.distributed.
    """

    def __init__(self, source: ModelSource, config: EngineConfig, packages: Iterable[str]) -> None:
        """Place the ranks and start them.

        ``packages`` are top-level modules whose code the model is made of.

        Raises:
            OptionError: there is no cluster, it has too little, or a node lacks what the model
                needs: a package in this version, a module map or the model's files.
            EngineDeadError: a rank ended while it was started.
        """
        super().__init__(config, source.device)
        self._ray = connect(config.ray_address)
        self._resource = "GPU" if source.device.type == "cuda" else "CPU"
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []  # what each actor's life returns
        self._offsets: list[float] = []  # of this machine's clock to each rank's
        self._cause: EngineDeadError | None = None
        try:
            self._places = self._placed()
            self.ranks_per_machine = max(place.ranks for place in self._places)
            self._start(source, _absolute(config), packages)
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """See :class:`RanksExecutor`."""
        self._hang_up()
        # After a failure nobody is left to wait for.
        if self._runs and self._cause is None:
            with contextlib.suppress(Exception):  # the cluster is gone
                self._ray.wait(self._runs, num_returns=len(self._runs), timeout=_STOP_SECONDS)
        self._kill()

    def _placed(self) -> list[_Place]:
        """Reserve a bundle for each rank; the places by rank, those of one node side by side."""
        from ray.util.placement_group import placement_group, placement_group_table

        size, kind = self._config.num_ranks, self._resource
        nodes = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        has = sum(node["Resources"].get(kind, 0) for node in nodes.values())
        whole = f"{sizes(self._config)} takes {size} {kind}s of the Ray cluster"
        if has < size:
            raise OptionError(
                f"{whole}, and its {len(nodes)} nodes have {has:g}; let more machines join it with "
                "'ray start --address=HOST:6379', or set the size lower"
            )
        self._group = placement_group([{kind: 1.0}] * size, strategy="PACK")
        if not self._group.wait(_PLACE_SECONDS):
            free = self._ray.available_resources().get(kind, 0)
            raise OptionError(
                f"{whole}, of which {has:g} exist and {free:g} were free for {_PLACE_SECONDS:g} s; "
                "end what uses them ('ray status' lists it), or set the size lower"
            )
        chosen = placement_group_table(self._group)["bundles_to_node_id"]
        count, here = Counter(chosen.values()), self._ray.get_runtime_context().get_node_id()
        order = sorted(chosen, key=lambda i: (chosen[i] != here, -count[chosen[i]], chosen[i], i))
        return [
            _Place(
                bundle=bundle,
                node=chosen[bundle],
                address=nodes[chosen[bundle]]["NodeManagerAddress"],
                ranks=count[chosen[bundle]],
                cpus=nodes[chosen[bundle]]["Resources"].get("CPU", 1),
            )
            for bundle in order
        ]

    def _start(self, source: ModelSource, config: EngineConfig, packages: Iterable[str]) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        plain = actor_class()
        actor = self._ray.remote(plain).options
        taken = {"num_cpus": 1} if self._resource == "CPU" else {"num_cpus": 0, "num_gpus": 1}
        for place in self._places:
            strategy = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=place.bundle
            )
            self._actors.append(actor(scheduling_strategy=strategy, **taken).remote())
        self._compare(plain(), source, config, packages)

        here = self._ray.get_runtime_context().get_node_id()
        near = range(sum(place.node == here for place in self._places))  # the first ranks
        ring = MessageRing(len(near)) if near else None
        host = next(n["NodeManagerAddress"] for n in self._ray.nodes() if n["NodeID"] == here)
        import torch.distributed

        stores: Any = torch.distributed  # exports TCPStore without saying so
        self._store = stores.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        token = secrets.token_bytes(32)
        with socket.create_server((host, 0), backlog=config.num_ranks) as server:
            for rank, (place, each) in enumerate(zip(self._places, self._actors, strict=True)):
                task = Task(
                    model=_path(source.name) if is_local(source.name) else source.name,
                    config=config,
                    seat=Seat(
                        rank,
                        f"{host}:{self._store.port}",
                        gpu=0,  # Ray shows it one
                        threads=max(1, int(place.cpus) // place.ranks),
                        name=f"rank {rank} on {place.named}",
                        everywhere=True,
                    ),
                    parent=(host, server.getsockname()[1]),
                    token=token,
                    ring=None if ring is None or rank not in near else ring.place,
                )
                run = each.run.remote(pickle.dumps(task), place.address, place.ranks)
                self._runs.append(run)
            has_ring = self._accepted(server, token)
        # Without one of its readers the ring would soon be full.
        by_ring = len(near) if has_ring == {*near} else 0
        self._ways = [(StreamTransport(), self._connections[by_ring:])]
        if ring is not None and by_ring:
            self._ways.insert(0, (RingTransport(ring), self._connections[:by_ring]))

    def _compare(
        self, here: Any, source: ModelSource, config: EngineConfig, packages: Iterable[str]
    ) -> None:
        """Refuse nodes that lack what this machine has, before any rank reads a weight."""
        reports = {r.module.partition(".")[0]: r.distribution for r in source.registry.reports}
        named = {reports.get(package) for package in packages} - {None}
        wanted = ["engine-core-llm", "torch", "transformers", *sorted(map(str, named))]
        files = [*config.custom_module_map]
        if is_local(source.name):
            files.append(_path(source.name))
        own = here.inspect(wanted, files)
        first = {place.node: rank for rank, place in reversed([*enumerate(self._places)])}
        asked = [
            (rank, self._actors[rank].inspect.remote(wanted, files)) for rank in first.values()
        ]
        for rank, answer in asked:
            place = self._places[rank]
            try:
                theirs = self._ray.get(answer, timeout=_ACTOR_SECONDS)
            except self._ray.exceptions.GetTimeoutError:
                raise EngineDeadError(
                    f"{place.named} started no process for rank {rank} in {_ACTOR_SECONDS:g} s; "
                    "see its logs below /tmp/ray"
                ) from None
            except self._ray.exceptions.RayError as error:
                told = _condensed(error)
                raise EngineDeadError(f"rank {rank} on {place.named} ended: {told}") from None
            check_same(own, theirs, place.named)

    def _accepted(self, server: socket.socket, token: bytes) -> set[int]:
        """Have every rank connect; those that opened the ring."""
        found: dict[int, tuple[Connection, bool, float]] = {}
        server.settimeout(0.5)
        end = time.monotonic() + _ACTOR_SECONDS
        while len(found) < len(self._runs):
            with contextlib.suppress(TimeoutError):
                peer, _ = server.accept()
                hello = _heard(peer, token)
                if hello is not None:
                    rank, has_ring, clock = hello
                    offset = time.monotonic() - clock
                    found[rank] = Connection(peer.detach()), has_ring, offset
                continue
            # One that has ended before it connected will not.
            for rank, run in enumerate(self._runs):
                if rank not in found and (why := self._verdict(run, 0)) is not None:
                    raise EngineDeadError(f"rank {rank} on {self._places[rank].named} {why}")
            if time.monotonic() > end:
                rank = min({*range(len(self._runs))} - found.keys())
                place = self._places[rank]
                raise EngineDeadError(
                    f"rank {rank} on {place.named} did not connect to {server.getsockname()} in "
                    f"{_ACTOR_SECONDS:g} s; let its machine open connections to that address"
                )
        by_rank = [found[rank] for rank in range(len(self._runs))]
        self._connections = [connection for connection, _, _ in by_rank]
        self._offsets = [offset for _, _, offset in by_rank]
        return {rank for rank, (_, has_ring, _) in found.items() if has_ring}

    def _receive(self) -> None:
        if self._cause is not None:
            raise EngineDeadError(str(self._cause))
        multiprocessing.connection.wait(self._connections)
        self._read()

    def _fail(self, failures: list[Failure]) -> None:
        if self._cause is not None:
            raise EngineDeadError(str(self._cause))
        # A rank whose neighbour is gone fails too, and its words may come before that one's end.
        end = time.monotonic() + _GATHER_SECONDS
        while (left := end - time.monotonic()) > 0:
            rest = [c for rank, c in enumerate(self._connections) if rank not in self._ended]
            if not multiprocessing.connection.wait(rest, left):
                break
            failures += self._take_in()
        silent = sorted(self._ended - {failure.rank for failure in failures})
        if silent:
            self._cause = EngineDeadError(self._told(silent))
            self._kill()
            raise self._cause
        first = min(failures, key=lambda failure: failure.when + self._offsets[failure.rank])
        name = f"rank {first.rank} on {self._places[first.rank].named}"
        self._cause = EngineDeadError(f"{name} failed: {first.message}")
        self._kill()
        first.reraise(name)

    def _told(self, silent: list[int]) -> str:
        """The end of these ranks, which said nothing themselves, in words."""
        rank, end, why = silent[0], time.monotonic() + _VERDICT_SECONDS, None
        place = self._places[rank]
        with contextlib.suppress(Exception):  # Ray's head is gone, too
            while why is None and time.monotonic() < end:
                alive = {node["NodeID"]: node["Alive"] for node in self._ray.nodes()}
                if not alive.get(place.node, False):
                    why = "ended: Ray says that the node is dead"
                else:
                    why = self._verdict(self._runs[rank], _POLL_SECONDS)
        together = [each for each in silent if self._places[each].node == place.node]
        named = " and ".join(f"rank {each}" for each in together)
        return f"{named} on {place.named} {why or 'lost its connection; Ray does not say why'}"

    def _verdict(self, run: Any, timeout: float) -> str | None:
        """Ray's words on how an actor ended; None if it has none in so many seconds."""
        try:
            self._ray.get(run, timeout=timeout)
        except self._ray.exceptions.GetTimeoutError:
            return None
        except self._ray.exceptions.ActorUnavailableError:
            time.sleep(timeout)  # that is the answer from now on; its node may be dying
            return None
        except self._ray.exceptions.RayError as error:
            return f"ended: {_condensed(error)}"
        return "ended by itself"

    def _kill(self) -> None:
        with contextlib.suppress(Exception):  # the cluster is gone
            for actor in self._actors:
                self._ray.kill(actor)
            if self._group is not None:
                from ray.util.placement_group import remove_placement_group

                remove_placement_group(self._group)
                self._group = None


def check_same(own: Mapping[str, Any], theirs: Mapping[str, Any], node: str) -> None:
    """Refuse a node that lacks what this machine has, or has another version of it.

    Raises:
        OptionError: names the node, and each package and file.
    """
    if not theirs["installed"]:
        raise OptionError(
            f"{node} has no engine-core; install engine-core-llm and the model family's package "
            "there, in the versions of this machine"
        )
    wrong = []
    for name, version in own["versions"].items():
        other = theirs["versions"][name]
        if other != version:
            has = f"version {other}" if other else "none"
            wrong.append(f"package {name}: {version or 'none'} here, {has} there")
    for name, content in own["files"].items():
        other = theirs["files"][name]
        if other is None:
            wrong.append(f"{name} is missing there")
        elif other != content:
            keys = sorted(key for key in {*content, *other} if content.get(key) != other.get(key))
            wrong.append(f"{name} is another one there ({', '.join(keys[:4])})")
    if wrong:
        raise OptionError(
            f"{node} differs from this machine, and ranks must run the same: {'; '.join(wrong)}; "
            "make them equal"
        )


def _heard(peer: socket.socket, token: bytes) -> tuple[int, bool, float] | None:
    """A rank's first words; None, and the end of the connection, for a stranger's."""
    peer.settimeout(_HELLO_SECONDS)
    said = b""
    with contextlib.suppress(OSError):
        while len(said) < HELLO.size and (more := peer.recv(HELLO.size - len(said))):
            said += more
    if len(said) < HELLO.size or not hmac.compare_digest(said[: len(token)], token):
        peer.close()
        return None
    keep_alive(peer)
    _, rank, has_ring, clock = HELLO.unpack(said)
    return rank, has_ring, clock


def _path(name: str) -> str:
    # Links are kept: they may lead elsewhere on another machine.
    return str(Path(name).expanduser().absolute())


def _absolute(config: EngineConfig) -> EngineConfig:
    """The config for ranks, with paths that do not depend on the folder of a process."""
    changed: dict[str, Any] = {
        "custom_module_map": tuple(map(_path, config.custom_module_map)),
        # Only this machine reads it, and others may not have it.
        "allowed_local_media_path": None,
    }
    if config.tokenizer is not None and Path(config.tokenizer).exists():
        changed["tokenizer"] = _path(config.tokenizer)
    return config.replace(**changed)


def _condensed(error: Exception) -> str:
    """Ray's words on an actor's end, without ids and advice."""
    text = " ".join(str(error).split())
    if hasattr(error, "traceback_str"):  # an exception of our own code
        return str(error).strip().splitlines()[-1]
    return text.partition("The actor is dead because ")[2].partition(" Some common")[0] or text
