"""How many connections there may be, in all and by address, and who goes when there are more."""

from __future__ import annotations

import ipaddress
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from engine_core.errors import ConfigError
from engine_core.server.metrics import Metrics
from engine_core.server.settings import ServerSettings

_DEFAULT = 4096
_BACKLOG = 2048
# Connections beyond the limit, which may only ask for health and metrics.
RESERVE = 16
# Open files of the process that are not connections.
_OWN_FILES = 192


class Client(Protocol):
    """A connection, as those who count them see it."""

    def drop(self) -> None:
        """Break it off at once."""


class Connections:
    """The connections of this process.

    A connection that finds all places taken gets that of the one that has waited longest for a
    request: of those that never sent one first. If all are busy, or its address has too many, it
    is reserved: it is told so, unless it asks for health or metrics.

    Args:
        settings: the service's.
        metrics: count the refusals.

    Attributes:
        backlog: how many may wait to be taken in.

    Raises:
        ConfigError: more connections are asked for than this process may have files.
    """

    def __init__(self, settings: ServerSettings, metrics: Metrics) -> None:
        self._limit, self.backlog = allow_connections(settings.max_connections)
        each = settings.max_connections_per_address
        self._each = max(1, self._limit // 2) if each is None else each
        self._proxies = [ipaddress.ip_network(text) for text in settings.trusted_proxies]
        self._refused = metrics.refused_connections
        self._open: dict[Client, str | None] = {}
        self._by_address: Counter[str] = Counter()
        # Those that wait, the longest first.
        self._silent: dict[Client, None] = {}
        self._idle: dict[Client, None] = {}
        self._reserved: dict[Client, None] = {}

    def enter(self, client: Client, host: str | None) -> str | None:
        """Take in a connection; why it is only reserved, if it is."""
        address = None if host is None or self.is_proxy(host) else network_of(host)
        reason = None
        if address is not None and self._by_address[address] >= self._each:
            reason = "address"
        elif len(self._open) >= self._limit:
            longest = next(iter(self._silent), None) or next(iter(self._idle), None)
            if longest is None:
                reason = "all"
            else:
                self._drop(longest)
        if reason is None:
            self._open[client] = address
            self._add(address)
            self._silent[client] = None
            return None
        self.count(reason)
        if len(self._reserved) >= RESERVE:
            self._drop(next(iter(self._reserved)))
        self._reserved[client] = None
        return reason

    def busy(self, client: Client) -> None:
        """A request of it has begun."""
        self._silent.pop(client, None)
        self._idle.pop(client, None)

    def idle(self, client: Client) -> None:
        """It has no request any more."""
        if client in self._open:
            self._idle[client] = None

    def leave(self, client: Client) -> None:
        """It is closed, or as good as closed; it may be said twice."""
        self.busy(client)
        self._reserved.pop(client, None)
        if client in self._open:
            self._remove(self._open.pop(client))

    def enter_forwarded(self, host: str) -> bool:
        """Take in a request that a proxy forwards for ``host``; whether there may be one more."""
        address = network_of(host)
        self._add(address)
        if self._by_address[address] > self._each:
            self.count("address")
            return False
        return True

    def leave_forwarded(self, host: str) -> None:
        """A request that a proxy forwarded has its answer."""
        self._remove(network_of(host))

    def forwarded_for(self, host: str | None, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """The client for whom the proxy ``host`` speaks; None if it is none, or does not say."""
        if host is None or not self._proxies or not self.is_proxy(host):
            return None
        values = [value for name, value in headers if name == b"x-forwarded-for"]
        hosts = [part.strip() for part in b",".join(values).decode("latin-1").split(",")]
        # Each proxy adds the one that it heard from; what stands before may be invented.
        return next((each for each in reversed(hosts) if each and not self.is_proxy(each)), None)

    def is_proxy(self, host: str) -> bool:
        """Whether it is one whose word is taken."""
        address = address_of(host)
        return address is not None and any(address in network for network in self._proxies)

    def count(self, reason: str) -> None:
        """Count a connection that was refused or broken off."""
        self._refused.labels(reason).inc()

    def _drop(self, client: Client) -> None:
        self.count("dropped")
        self.leave(client)
        client.drop()

    def _add(self, address: str | None) -> None:
        if address is not None:
            self._by_address[address] += 1

    def _remove(self, address: str | None) -> None:
        if address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]


def network_of(host: str) -> str:
    """The address as which ``host`` counts: of IPv6 the network of 64 bits that one client has."""
    address = address_of(host)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host[:64] if address is None else str(address)


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a client, a proxy or a socket wrote, which may have a port or a zone."""
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def allow_connections(wanted: int | None) -> tuple[int, int]:
    """How many connections this process takes, and how many may wait to be taken.

    It is allowed as many open files as they need, if the system lets it. All that wait are taken at
    once, before a place is made for any of them, so that there are files for twice as many.

    Raises:
        ConfigError: ``wanted`` need more files.
    """
    number = _DEFAULT if wanted is None else wanted
    if sys.platform == "win32":
        return number, _BACKLOG

    import resource

    needed = number + RESERVE + _OWN_FILES + 2 * _BACKLOG
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < needed:
        soft = needed if hard == unlimited else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == unlimited or soft >= needed:
        return number, _BACKLOG
    backlog = min(_BACKLOG, max(1, soft // 8))
    most = max(1, soft - RESERVE - _OWN_FILES - 2 * backlog)
    if wanted is not None and wanted > most:
        raise ConfigError(
            f"max_connections is {wanted}, and this process may have {soft} files open, which is "
            f"enough for {most} connections; allow more (ulimit -n) or choose fewer"
        )
    return min(number, most), backlog
