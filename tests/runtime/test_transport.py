"""Messages to ranks: pickled once for all, and shared memory by value where it cannot be opened."""

from __future__ import annotations

import multiprocessing
import pickle
from multiprocessing.connection import Connection
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_examples import examples

from engine_core.runtime.ring import MessageRing, attach
from engine_core.runtime.transport import RingTransport, StreamTransport, Transport, send
from engine_core.workers import SharedBytes


class Counted:
    """Counts how often it is pickled."""

    def __init__(self) -> None:
        self.count = 0

    def __reduce__(self) -> tuple[Any, ...]:
        self.count += 1
        return int, (self.count,)


def ways() -> tuple[list[tuple[Transport, list[Connection]]], list[tuple[Transport, Connection]]]:
    """Two ranks that have a ring, and two that have none: the sender's side, and theirs."""
    ring, pairs = MessageRing(2, size=500), [multiprocessing.Pipe() for _ in range(4)]
    senders = [ours for ours, _ in pairs]
    kinds = [RingTransport(attach(ring.place), reader) for reader in range(2)]
    readers: list[Transport] = [*kinds, StreamTransport(), StreamTransport()]
    return (
        [(RingTransport(ring), senders[:2]), (StreamTransport(), senders[2:])],
        [(reader, theirs) for reader, (_, theirs) in zip(readers, pairs, strict=True)],
    )


@settings(max_examples=examples(40))
@given(st.lists(st.one_of(st.binary(max_size=700), st.tuples(st.text(), st.integers()))))
def test_all_ranks_get_all_messages_in_order(messages: list[Any]) -> None:
    """Some are too large for the ring, and one of 16 bytes is no notice."""
    to, at = ways()
    for message in [*messages, b"0123456789abcdef"]:
        send(message, to)
        for transport, connection in at:
            assert transport.unpack(connection.recv_bytes()) == message


def test_a_message_is_pickled_once_for_all_ranks() -> None:
    to, at = ways()
    counted = Counted()
    send(counted, to)
    assert [reader.unpack(connection.recv_bytes()) for reader, connection in at] == [1] * 4


def test_shared_memory_is_opened_here_and_copied_elsewhere() -> None:
    to, at = ways()
    block = SharedBytes.of([(0, b"picture"), (10, b"end")], 13)
    send(("add", block), to)
    sent = [connection.recv_bytes() for _, connection in at]
    near = at[0][0].unpack(sent[0])[1]
    del block
    for transport, packed in zip([t for t, _ in at[2:]], sent[2:], strict=True):
        far = transport.unpack(packed)[1]
        assert far.map()[:] == b"picture\0\0\0end"
        far.map()[0:1] = b"P"  # its own mapping's
    assert near.map()[:] == b"picture\0\0\0end"
    # The name alone is lost with the sender's block.
    late = at[1][0].unpack(sent[1])[1]
    assert late.lost is not None


def test_a_ring_that_is_gone_is_not_attached_to() -> None:
    ring = MessageRing(1, size=100)
    place = ring.place
    assert pickle.loads(pickle.dumps(place)) == place
    del ring
    with pytest.raises(OSError, match=r"no such ring any more|No such file"):
        attach(place)
