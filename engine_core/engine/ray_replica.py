"""Replicas on the machines of a Ray cluster, each a deployment of Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import copyreg
import io
import logging
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from engine_core import __version__, own_process
from engine_core.configs import EngineConfig
from engine_core.engine import process
from engine_core.engine.arguments import WarmUp
from engine_core.engine.process import Failure, Found
from engine_core.engine.ray_host import (
    LAST_WORDS_SECONDS,
    STOP_SECONDS,
    CoreHost,
    CoreTask,
    Ended,
    Hosted,
)
from engine_core.engine.replica import MessageReplica, death
from engine_core.errors import EngineDeadError, EngineError, OptionError
from engine_core.ray_cluster import INSTALL, connect
from engine_core.workers import SharedBytes

logger = logging.getLogger(__name__)

# Seconds that a replica waits for a place on some machine, and after which it says so.
_PLACE_SECONDS, _PATIENT_SECONDS = 300.0, 10.0
# The name of Ray's error for an actor to which a connection has broken, and the seconds in which
# Ray may yet say that its machine is lost. That may take it half a minute: nobody waits so long.
_UNREACHABLE, _LOST_SECONDS = "ActorUnavailableError", 1.0
# How often Ray Serve is asked whether a deployment runs.
_ASK_SECONDS = 0.1
# Seconds between two signs of life to a replica.
_BEAT_SECONDS = 10.0
# Calls of a replica's methods at once: a stream, and as many commands as may be under way.
_MOST_CALLS = 10_000
# Ray Serve makes its configs with a setting of the whole process, which fails in two threads at
# once. Its own threads do so too, when a deployment changes; so it is tried again.
_one_at_a_time = threading.Lock()
_TRIES = 5


class RayReplicas:
    """The replicas of one frontend on a Ray cluster.

    Args:
        ray: the module, connected to the cluster.
        task: what each is started with.
        resources: what each takes, as options of an actor.
        most: how many there may be.
    """

    def __init__(self, ray: Any, task: CoreTask, resources: dict[str, Any], most: int) -> None:
        self._ray = ray
        self._task = task
        self._resources = resources
        self._most = most
        self._name = f"engine-core-{uuid4().hex[:8]}"
        self._lives = count()

    @classmethod
    async def open(
        cls,
        model: str,
        config: EngineConfig,
        max_step_time: float | None,
        warm_up: WarmUp,
        *,
        cpus: int = 1,
        most: int = 1,
    ) -> RayReplicas:
        """Connect to a cluster; nothing is placed there yet.

        Files are named by their absolute paths here, and must have the same on every machine.

        Args:
            model: a checkpoint folder, a GGUF file or a hub id.
            config: the engine's settings; ``ray_address`` is the cluster's.
            max_step_time: see :meth:`AsyncEngine.start`.
            warm_up: likewise.
            cpus: CPUs that each replica takes; on a CPU its threads, too.
            most: replicas at most.

        Raises:
            OptionError: Ray is not installed, the cluster is not there, ``config.device`` names
                one GPU, or ranks are to be on several machines.
        """
        if config.device not in ("auto", "cpu", "cuda"):
            raise OptionError(
                f"Ray gives each replica GPUs of its own, but device is {config.device!r}; leave "
                "it out"
            )
        if config.distributed_executor == "ray":
            raise OptionError(
                "a replica on Ray has all its ranks on one machine, and distributed_executor 'ray' "
                "would place them on several; leave it out, or serve one engine without replicas"
            )
        # Ray wants the main thread, if this is it, and nothing is served yet.
        ray = connect(config.ray_address)
        return await asyncio.to_thread(
            cls._open, ray, model, config, max_step_time, warm_up, cpus, most
        )

    @classmethod
    def _open(
        cls,
        ray: Any,
        model: str,
        config: EngineConfig,
        max_step_time: float | None,
        warm_up: WarmUp,
        cpus: int,
        most: int,
    ) -> RayReplicas:
        try:
            from ray import serve
        except ImportError as error:
            raise OptionError(
                f"replicas on Ray need Ray Serve, which cannot be imported ({error}): {INSTALL}"
            ) from None
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        # A cluster's own HTTP proxies stay as they are, and none are started.
        serve.start(http_options={"location": "NoServer"}, logging_config={"log_level": "WARNING"})
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        resources: dict[str, Any] = {"num_cpus": cpus}
        environment: dict[str, str] = {}
        gpus = any(node.get("GPU", 0) > 0 for node in nodes)
        if config.device == "cuda" or (gpus and config.device == "auto"):
            resources["num_gpus"] = config.num_ranks
        else:
            at_once = max((int(node.get("CPU", 0)) // cpus for node in nodes), default=1)
            share = max(1, min(most, at_once))
            environment = {"OMP_NUM_THREADS": str(cpus), own_process.HOST_SHARE: str(share)}
        task = CoreTask(
            version=__version__,
            model=_absolute(model),
            config=config.replace(
                distributed_executor="processes",
                ray_address=None,
                # Files are read where requests are taken.
                allowed_local_media_path=None,
                custom_module_map=tuple(map(_absolute, config.custom_module_map)),
                **({} if config.tokenizer is None else {"tokenizer": _absolute(config.tokenizer)}),
            ),
            max_step_time=max_step_time,
            warm_up=warm_up,
            log_level=logging.getLogger("engine_core").getEffectiveLevel(),
            environment=environment,
        )
        return cls(ray, task, resources, most)

    async def launch(self, index: int) -> RayReplica:
        """Start the replica of a number, which still waits for a place when it is returned."""
        label = f"replica {index}"
        return RayReplica(self, f"{self._name}-{index}", label, self._task)

    def new_life(self) -> str:
        """A name for the next engine process."""
        return f"{self._name}-{next(self._lives)}"

    async def place(self, name: str, label: str) -> Any:
        """The handle of a replica's deployment, once it runs; it is made unless it is there.

        Raises:
            EngineDeadError: it cannot be started, or there is no place for it.
        """
        await _in_thread(self._deploy, name)
        begun = time.monotonic()
        told = False
        while True:
            status, message = await _in_thread(self._status, name)
            if status == "RUNNING":
                from ray import serve

                return await _in_thread(serve.get_app_handle, name)
            waited = time.monotonic() - begun
            if status in ("DEPLOY_FAILED", "NOT_STARTED"):
                raise EngineDeadError(
                    f"Ray Serve could not start {label} ({_last_line(message) or status}); "
                    "engine-core and the model's plugins must be installed on every machine of "
                    "the cluster"
                )
            if waited > _PLACE_SECONDS:
                raise EngineDeadError(
                    f"{label} found no place in {_PLACE_SECONDS:g} s: {self._wanted()}; free some, "
                    "add machines, or ask for fewer replicas"
                )
            if waited > _PATIENT_SECONDS and not told:
                told = True
                logger.warning("%s waits for a place: %s", label, self._wanted())
            await asyncio.sleep(_ASK_SECONDS)

    def _deploy(self, name: str) -> None:
        from ray import serve

        if name in serve.status().applications:
            return
        deployment = serve.deployment(
            CoreHost,
            name="core",
            num_replicas=1,
            ray_actor_options=self._resources,
            max_ongoing_requests=_MOST_CALLS,
            # The engine's requests have been drained by the frontend.
            graceful_shutdown_timeout_s=0.5,
            graceful_shutdown_wait_loop_s=0.1,
            max_constructor_retry_count=1,
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        target = serve.RunTarget(deployment.bind(), name=name, route_prefix=None)
        serve.run_many([target], wait_for_applications_running=False)

    def _status(self, name: str) -> tuple[str, str]:
        from ray import serve

        application = serve.status().applications.get(name)
        if application is None:
            return "NOT_STARTED", "it is gone"
        return str(application.status.value), application.message

    def _wanted(self) -> str:
        """The resources of a replica, and those of the machines."""
        names = {"num_cpus": "CPU", "num_gpus": "GPU"}
        asked = ", ".join(f"{names[key]} {number}" for key, number in self._resources.items())
        nodes = [
            f"{node['NodeManagerAddress']} ("
            + ", ".join(f"{key} {node['Resources'].get(key, 0):g}" for key in ("CPU", "GPU"))
            + ")"
            for node in self._ray.nodes()
            if node["Alive"]
        ]
        return (
            f"it takes {asked} of one machine, beside what runs there; in the cluster are "
            f"{', '.join(nodes)}"
        )

    async def is_lost(self, node_id: str) -> bool:
        """Whether a machine has left the cluster, as far as that can be asked."""
        try:
            nodes = await asyncio.to_thread(self._ray.nodes)
        except Exception:  # Ray's errors have no base that tells them from others
            return False
        return not any(node["Alive"] and node["NodeID"] == node_id for node in nodes)

    async def remove(self, name: str) -> None:
        """Give a replica's place back."""
        from ray import serve

        with contextlib.suppress(Exception):  # the cluster may be gone
            await _in_thread(partial(serve.delete, _blocking=False), name)


class RayReplica(MessageReplica):
    """A core on a machine of a Ray cluster, reached by the handle of its deployment.

    The deployment outlives its engine process, which may be started there again, and ends when the
    replica is closed.
    """

    def __init__(self, site: RayReplicas, name: str, label: str, task: CoreTask) -> None:
        super().__init__(f"{label}: ")
        self._site = site
        self._name = name
        self._what = label
        self._life = site.new_life()
        self._hosted: Hosted | None = None
        self._code: int | None = None
        self._handle: Any = None
        self._sent = 0
        self._outbox: list[bytes] = []
        self._is_over = False
        self._closing = False
        self._lost = asyncio.Event()
        self._task = asyncio.ensure_future(self._live(pickle.dumps(task)))

    @property
    def is_closing(self) -> bool:
        """See :class:`Replica`."""
        return self._is_over

    async def _live(self, task: bytes) -> None:
        """Have the engine process run, take its messages in, and say how it ended."""
        cause: BaseException | None = None
        beats: asyncio.Task[None] | None = None
        try:
            self._handle = await self._site.place(self._name, self._what)
            beats = asyncio.ensure_future(self._beat())
            stream = self._handle.options(stream=True).run.remote(self._life, task)
            try:
                # A host that died is known to Ray Serve a moment later, or its machine full.
                data = await asyncio.wait_for(anext(stream), _PLACE_SECONDS)
                while self._feed(data):
                    data = await anext(stream)
            finally:
                stream.cancel()
        except StopAsyncIteration:
            pass
        except asyncio.CancelledError as error:
            cause = error
        except EngineError as error:
            trace = "".join(traceback.format_exception(error))
            self._failure = self._failure or Failure(str(error), trace, error)
        except Exception as error:
            # Ray's errors have no base that tells them from others.
            cause = error
        finally:
            if beats is not None:
                beats.cancel()
            self._is_over = True
        lost = await self._is_machine_lost(cause)
        end = self._death(cause, lost)
        self._lost.set()
        self._end_with(end)

    def _take(self, message: Any) -> None:
        if isinstance(message, Hosted):
            self._hosted = message
            logger.info("%s runs on %s, pid %d", self._what, message.node, message.pid)
        elif isinstance(message, Ended):
            self._code = message.code
        elif isinstance(message, Found) and not _is_here(message):
            assert self._hosted is not None, "it comes first"
            raise OptionError(
                f"the tokenizer is in {message.tokenizer_folder} on the machine "
                f"{self._hosted.node}, and this machine, which answers requests, has no such "
                "folder; put the model at the same path on every machine"
            )
        else:
            super()._take(message)

    async def _is_machine_lost(self, cause: BaseException | None) -> bool:
        """Whether Ray has lost the machine; it knows a moment after connections to it end."""
        # Also of an actor that is said to be out of reach, which may be a broken connection.
        if self._hosted is None or cause is None or isinstance(cause, asyncio.CancelledError):
            return False
        waits = _LOST_SECONDS if type(cause).__name__ == _UNREACHABLE else 0.0
        deadline = time.monotonic() + waits
        while not (lost := await self._site.is_lost(self._hosted.node_id)):
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(_ASK_SECONDS)
        return lost

    def _death(self, cause: BaseException | None, lost: bool) -> EngineDeadError:
        hosted = self._hosted
        where = "" if hosted is None else f" on {hosted.node} (node {hosted.node_id[:8]})"
        pid = "" if self._hosted is None else f" (pid {self._hosted.pid})"
        if self._failure is not None or cause is None or self._code is not None:
            return death(f"the engine process{pid}{where}", self._code, self._failure)
        if isinstance(cause, asyncio.CancelledError):
            return EngineDeadError(f"the engine process{pid}{where} was ended")
        if lost and self._hosted is not None:
            told = "Ray has lost the machine"
        elif isinstance(cause, TimeoutError):
            told = f"it was not started again in {_PLACE_SECONDS:g} s"
        else:
            told = _told(cause)
            if type(cause).__name__ == _UNREACHABLE:
                told = f"it or its machine cannot be reached; {told}"
        error = EngineDeadError(f"the Ray actor of the engine process{pid}{where} is gone: {told}")
        error.__cause__ = cause
        return error

    def send(self, message: Any) -> None:
        """See :class:`Replica`."""
        if self._is_over or self._closing:
            return
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(_encode(message))

    def _flush(self) -> None:
        """Send all commands of this turn of the event loop by one call."""
        data = b"".join(self._outbox)
        self._outbox.clear()
        if self._handle is not None and not self._is_over:
            self._call("send", self._life, self._sent, data)
            self._sent += 1

    def _call(self, method: str, *arguments: Any) -> None:
        """Call a method of the host, of which nobody waits for the end."""
        with contextlib.suppress(Exception):  # it is gone, as its stream will tell
            getattr(self._handle, method).remote(*arguments)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_SECONDS)
            self._call("beat")

    def give_up(self, why: str) -> None:
        """See :class:`Replica`. The stacks of its threads go to its worker's log in the cluster."""
        if self._is_over or self._failure is not None:
            return
        self._failure = Failure(why, "the stacks of its threads are in Ray's log of its worker")
        self._call("stop", self._life, "hang")
        # Nobody may be there to do it.
        loop = asyncio.get_running_loop()
        loop.call_later(LAST_WORDS_SECONDS + STOP_SECONDS, self._task.cancel)

    async def close(self, *, kill: bool) -> None:
        """See :class:`Replica`."""
        self._closing = True
        if self._handle is None:
            self._task.cancel()
        elif not self._is_over:
            self._call("stop", self._life, "kill" if kill else "close")
        try:
            await asyncio.wait_for(self._lost.wait(), 2 * STOP_SECONDS)
        except TimeoutError:
            self._task.cancel()
            await self._lost.wait()
        await self._site.remove(self._name)


async def _in_thread(call: Callable[[str], Any], name: str) -> Any:
    """Call a function of Ray Serve for an application."""

    def safely() -> Any:
        for left in reversed(range(_TRIES)):
            try:
                with _one_at_a_time:
                    return call(name)
            except ValueError:
                if not left:
                    raise
        raise AssertionError("it is tried")

    return await asyncio.to_thread(safely)


def _encode(message: Any) -> bytes:
    """A message as :func:`process.encode` has it, with shared memory by value."""
    content = io.BytesIO()
    pickler = pickle.Pickler(content, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(message)
    return process.framed(content.getvalue())


# Memory that processes of one machine share cannot be opened on another one.
_REDUCERS = copyreg.dispatch_table.copy()
_REDUCERS[SharedBytes] = SharedBytes.reduced_by_value


def _absolute(path: str) -> str:
    """The path as other folders know it; a hub id stays as it is."""
    return str(Path(path).absolute()) if Path(path).exists() else path


def _is_here(found: Found) -> bool:
    folder = found.tokenizer_folder
    return folder is None or folder.exists()


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def _told(error: BaseException) -> str:
    """The sentence of Ray's message that says why."""
    text = " ".join(str(error).split())
    for sign in ("The actor is dead because ", "The actor died because "):
        if sign in text:
            text = text.split(sign, 1)[1]
            break
    return text.split(". ")[0].rstrip(".") or type(error).__name__


__all__ = ["RayReplica", "RayReplicas"]
