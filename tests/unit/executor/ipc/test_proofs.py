"""Messages between two ends that know a key: nothing in between changes, repeats, reorders or leaves out any."""

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.ipc.proofs import MessageMac
from services.executor.supervisor.multinode import wire
from services.executor.worker.rendezvous import refuse_connections

KEY, NONCES = b"k" * 32, b"n" * 64
MESSAGES = st.lists(st.binary(max_size=40), min_size=1, max_size=6, unique=True)


def macs(messages: list[bytes], side: str = "head", nonces: bytes = NONCES) -> list[bytes]:
    mac = MessageMac(KEY, side, nonces)
    return [mac.next(message) for message in messages]


def accepted(said: list[tuple[bytes, bytes]]) -> int:
    """How many messages are taken before the first that is not."""
    mac = MessageMac(KEY, "head", NONCES)
    for count, (message, shown) in enumerate(said):
        if not mac.accepts(shown, message):
            return count
    return len(said)


@given(MESSAGES)
def test_what_was_said_is_accepted(messages: list[bytes]) -> None:
    assert accepted(list(zip(messages, macs(messages), strict=True))) == len(messages)


@given(MESSAGES, st.data())
def test_nothing_is_accepted_from_the_first_change_on(messages: list[bytes], data: st.DataObject) -> None:
    said = list(zip(messages, macs(messages), strict=True))
    at = data.draw(st.integers(0, len(said) - 1))
    message, shown = said[at]
    others = {
        "another message": [*said[:at], (message + b"x", shown), *said[at + 1 :]],
        "repeated": [*said[: at + 1], *said[at:]],
        "left out": [*said[:at], *said[at + 1 :], (b"", b"")],
        "of the other side": [*said[:at], (message, macs(messages, "node 1")[at]), *said[at + 1 :]],
        "of another session": [*said[:at], (message, macs(messages, "head", b"m" * 64)[at]), *said[at + 1 :]],
    }
    kind = data.draw(st.sampled_from(sorted(others)))
    assert accepted(others[kind]) == at + (kind == "repeated")


async def said_by_head(message: wire.ToNode) -> bytearray:
    """What host 0 sends behind its greeting, byte for byte."""
    ours, theirs = socket.socketpair()
    line = wire.to_head(*await asyncio.open_connection(sock=ours))
    line.protected(MessageMac(KEY, "head", NONCES), MessageMac(KEY, "node 1", NONCES)).send(message)
    await line.close()
    with theirs:
        return bytearray(theirs.recv(1000))


async def heard_by_node(said: bytes) -> wire.ToNode:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(said)
    line = wire.to_node(*await asyncio.open_connection(sock=ours))
    try:
        return await line.protected(MessageMac(KEY, "node 1", NONCES), MessageMac(KEY, "head", NONCES)).receive()
    finally:
        await line.close()


@pytest.mark.parametrize("at", [4, 10, -1])
async def test_a_message_between_hosts_that_is_changed_on_its_way_ends_the_line(at: int) -> None:
    said = await said_by_head(wire.Begin(1, 7))
    assert await heard_by_node(said) == wire.Begin(1, 7)
    said[at] ^= 1
    with pytest.raises(wire.LineLost, match="changed on its way"):
        await heard_by_node(said)


def test_a_store_whose_ranks_have_met_hears_nobody_else() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as rank,
        socket.socket() as stranger,
    ):
        connection, _ = listening.accept()
        with connection:
            refuse_connections(listening)
            stranger.settimeout(0.2)
            with pytest.raises(TimeoutError):
                stranger.connect(listening.getsockname())
            rank.sendall(b"still here")
            assert connection.recv(10, socket.MSG_WAITALL) == b"still here"
