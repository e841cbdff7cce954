"""The HTTP service's settings."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from engine_core.configs.base import FrozenConfig
from engine_core.configs.engine import Bytes

# What a browser sends as Origin: lower case, without a path and without the scheme's own port.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")
_OWN_PORTS = (("http://", ":80"), ("https://", ":443"))
_HOST_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")


class ServerSettings(FrozenConfig):
    """The HTTP service's settings; the options of ``serve`` are made from these fields.

    The docstring of each field is its help text.
    """

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on; 0.0.0.0 is every one of this machine's."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    served_model_name: tuple[str, ...] = ()
    """Name that requests call the model by. If not set: of a path its last part, else MODEL
    itself."""
    allow_origin: tuple[str, ...] = ()
    """Web origin whose pages may call the server, * for any; none if not set."""
    allowed_hosts: tuple[str, ...] = ()
    """Name by which requests may call the server (their Host), besides localhost, --host and IP
    addresses; * for any. If not set: any, but none where it listens on this machine alone."""
    max_connections: int | None = Field(default=None, gt=0)
    """Connections at most. If not set: 4096, or as many as the limit of open files allows."""
    max_connections_per_address: int | None = Field(default=None, gt=0)
    """Connections of one address at most; half of all if not set."""
    trusted_proxies: tuple[str, ...] = ()
    """Address or network of a proxy in front of the server, whose X-Forwarded-For says who the
    client is."""
    max_header_size: Bytes = Field(default=32 * 2**10, ge=1024)
    """Bytes of a request's line and headers at most, like 32KiB."""
    max_headers: int = Field(default=100, ge=1)
    """Headers of a request at most."""
    header_timeout: float = Field(default=10.0, gt=0)
    """Seconds in which a connection must have sent all headers of a request that it begins; for its
    first request from its start."""
    idle_timeout: float = Field(default=75.0, gt=0)
    """Seconds that a connection may be without a request after an answer."""
    max_body_size: Bytes = Field(default=8 * 2**20, gt=0)
    """Bytes of a request's body at most, like 8MiB."""
    max_prompt_tokens: int | None = Field(default=None, gt=0)
    """Tokens of a prompt at most; what the model's length allows if not set."""
    max_n: int = Field(default=128, ge=1, le=1024)
    """Completions of a prompt at most (n)."""
    max_prompts: int = Field(default=64, ge=1)
    """Prompts in one completions request at most."""
    max_queued_requests: int = Field(default=1024, ge=1)
    """Requests that may wait for the engine; more are refused with status 429."""
    max_stored_responses: int = Field(default=1000, ge=0)
    """Responses of /v1/responses kept in memory for requests that continue them; those not used for
    longest are dropped. 0 keeps none."""
    max_stored_size: Bytes = Field(default=64 * 2**20, gt=0)
    """Bytes of all responses kept at most, like 64MiB; a conversation counts in each of its
    responses."""
    prefix_cache_sharing: Literal["key", "all"] = "key"
    """Whose requests share cached beginnings of prompts: those with the same API key, or all."""
    request_timeout: float | None = Field(default=None, gt=0)
    """Seconds from a request's arrival to its end at most; no limit if not set."""
    send_timeout: float = Field(default=60.0, gt=0)
    """Seconds that a client may take nothing of its answer before it is cut off and its request
    ended."""
    step_timeout: float = Field(default=600.0, gt=0)
    """Seconds that the engine may go without ending a step before it counts as hung and the server
    ends."""
    max_step_time: float | None = Field(default=None, gt=0)
    """Seconds that a step should take at most while texts are being generated; prompts that come
    meanwhile are computed in pieces. On a GPU 1.4 times that while prompts for more than 2 steps
    wait. 0.03 on a GPU and 0.25 on a CPU if not set."""
    warm_up: Literal["before", "beside"] = "beside"
    """When CUDA graphs of all likely steps are captured: beside requests, of which one then waits
    for a capture now and then, a tenth of a second, or before the first of them is taken."""
    drain_timeout: float = Field(default=30.0, ge=0)
    """Seconds that requests in flight have to end after SIGTERM."""
    api_server_count: int = Field(default=1, ge=1, le=64)
    """Processes that answer requests. A small model on a fast GPU is worth several."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Engines with the whole model each, of which a request goes to the one that has its beginning
    cached, unless that has too much to do. Each has GPUs of its own for all its
    ranks, or its share of a CPU's cores."""
    max_replicas: int | None = Field(default=None, ge=1, le=64)
    """Engines at most: their number then follows the queue, between --replicas and this."""
    scale_up_delay: float | None = Field(default=None, gt=0)
    """Seconds that requests must have waited until there is another replica; 10 if not set."""
    scale_down_delay: float | None = Field(default=None, gt=0)
    """Seconds that a replica must have been too many until it ends; 300 if not set."""
    replica_executor: Literal["processes", "ray"] = "processes"
    """Where replicas run: processes are all on this machine, ray places them on the machines of the
    Ray cluster that --ray-address names."""
    replica_cpus: int | None = Field(default=None, ge=1)
    """CPUs of the Ray cluster that a replica takes, which are its threads on a CPU; 1 if not
    set."""
    max_replica_restarts: int | None = Field(default=None, ge=0)
    """How often in a row one of several replicas is started again when it dies; 5 if not set."""
    tool_parser: str | None = Field(default=None, min_length=1)
    """How tool calls are written in the output; the model family's way if not set."""
    reasoning_parser: str | None = Field(default=None, min_length=1)
    """How reasoning is marked in the output; the model family's way if not set."""
    chat_template: str | None = Field(default=None, min_length=1)
    """Chat template in place of the checkpoint's: a file, or the template itself."""
    ssl_certfile: Path | None = None
    """Certificate, with those between it and the root, in PEM; the server then speaks HTTPS."""
    ssl_keyfile: Path | None = None
    """The certificate's key, in PEM, if it is not in the same file."""
    api_docs: bool = False
    """Describe the API at /docs, on a page whose scripts a browser loads from cdn.jsdelivr.net."""
    log_format: Literal["text", "json"] = "text"
    """Lines of the log as text or as JSON objects."""
    log_prompts: bool = False
    """Write prompts and outputs into the log too."""
    trace: Path | None = None
    """File that gets a trace of the server's last seconds when it ends, for ui.perfetto.dev."""
    trace_seconds: float | None = Field(default=None, gt=0)
    """Seconds of the trace; 10 if not set."""

    @property
    def traced_seconds(self) -> float:
        """Seconds of the trace, if there is one."""
        return self.trace_seconds or 10.0

    @property
    def replica_restarts(self) -> int:
        """How often in a row a replica is started again: one engine alone never is."""
        if not self.several_replicas:
            return 0
        return 5 if self.max_replica_restarts is None else self.max_replica_restarts

    @property
    def several_replicas(self) -> bool:
        """Whether there are several replicas, may be, or one that is on another machine."""
        return max(self.replicas, self.max_replicas or 1) > 1 or self.replica_executor == "ray"

    @model_validator(mode="after")
    def _bounds_of_replicas(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"max_replicas is {self.max_replicas}, and replicas, of which there are never "
                f"fewer, is {self.replicas}; raise the one or lower the other"
            )
        for name in ("scale_up_delay", "scale_down_delay"):
            if getattr(self, name) is not None and self.max_replicas is None:
                raise ValueError(
                    f"{name} is for a number of replicas that follows the queue; give max_replicas "
                    "too, or leave it out"
                )
        if self.replica_cpus is not None and self.replica_executor != "ray":
            raise ValueError(
                "replica_cpus is what a replica takes of a Ray cluster, and replica_executor is "
                f"{self.replica_executor!r}; leave it out, or set replica_executor to 'ray'"
            )
        if self.max_replica_restarts is not None and not self.several_replicas:
            raise ValueError(
                f"max_replica_restarts is {self.max_replica_restarts}, and there is one engine, "
                "with which the server ends; leave it out, or set replicas to 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _trace_has_a_file(self) -> Self:
        if self.trace_seconds is not None and self.trace is None:
            raise ValueError(
                f"trace_seconds is {self.trace_seconds:g}, and trace, the file of the trace, is "
                "not set; set it too, or leave trace_seconds out"
            )
        return self

    @model_validator(mode="after")
    def _one_of_several(self) -> Self:
        for name, given in (
            (f"api_server_count is {self.api_server_count}", self.api_server_count > 1),
            (f"trace is {self.trace}", self.trace is not None),
        ):
            if given and self.several_replicas:
                options = {"max_replicas": self.max_replicas or 1, "replicas": self.replicas}
                other = next((f"{key} is {n}" for key, n in options.items() if n > 1), None)
                raise ValueError(
                    f"{name}, which is for one engine of this machine, and "
                    f"{other or 'replica_executor is ray'}; leave one of them out"
                )
        return self

    @field_validator("served_model_name")
    @classmethod
    def _different_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for index, name in enumerate(value):
            if not name.strip():
                raise ValueError("a name that is empty cannot be asked for")
            if name in value[:index]:
                raise ValueError(f"the name {name!r} is given twice; give each name once")
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            try:
                ipaddress.ip_network(text)
            except ValueError as error:
                raise ValueError(
                    f"{text!r} is no address or network of a proxy, such as 10.0.0.2 or "
                    f"10.0.0.0/8: {error}"
                ) from None
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _host_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name != "*" and not _HOST_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is no name of a host as browsers send it, such as llm.example: "
                    "lower case, without a scheme, a port or a path"
                )
        return value

    @field_validator("allow_origin")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            own_port = any(
                origin.startswith(scheme) and origin.endswith(port) for scheme, port in _OWN_PORTS
            )
            if origin not in ("*", "null") and (own_port or not _ORIGIN.fullmatch(origin)):
                raise ValueError(
                    f"{origin!r} is no origin as browsers send it, such as https://page.example or "
                    "http://localhost:3000: a scheme and a host, the port unless it is the "
                    "scheme's own, and no path"
                )
            if origin != origin.lower():
                raise ValueError(f"browsers send an origin in lower case; write {origin.lower()!r}")
        return value
