"""What a peer answers to a ring that leaves: offers that it cannot take, and who comes at the wrong time."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.core import CollectorRegistry

from services.executor.kv_cache.prefix_index import root_digest, salted_root
from services.executor.kv_transfer.board import HandoverBoard, OwnRing, Receive, StopReceiving, decode_command
from services.executor.kv_transfer.receiver import HandoverReceiver
from services.executor.supervisor.metrics import HandoverCollector, Labels
from shared.messages.groups import BlockOffer, BlocksSent, HandoverEnd, OfferedBlock, OfferedSession
from tests.unit.executor.scheduler.stepped_ring import BLOCK, Ring

FORMAT = "format"
ROOT = root_digest("m")
TOKENS = bytes(4 * BLOCK)


class Peer:
    """A taker on a ring that is stepped by hand; its one rank is played by the test."""

    def __init__(self, directory: Path) -> None:
        self.ring = Ring(ttl=1000.0)
        self.board = HandoverBoard(directory / "handover", 1, create=True)
        self.rank = self.board.rank(0)
        self.port = 4321
        self.commands: list[object] = []
        self.taker = HandoverReceiver(
            self.ring.batcher.exchange,
            self.board,
            OwnRing("b", 7, "m", FORMAT, "10.0.0.1", BLOCK, 1),
            lambda: self.ring.batcher.receivable,
            self.wake,
        )

    def wake(self) -> None:
        """Steps at once, and does what the rank is told."""
        while self.ring.batcher.has_work:
            plan, _ = step = self.ring.schedule()
            if plan.handover:
                command = decode_command(plan.handover)
                self.commands.append(command)
                if isinstance(command, Receive):
                    self.rank.write("listening", command.batch, self.port)
            self.ring.finish(step)


def offer(group: str = "a", *, form: str = FORMAT, blocks: list[OfferedBlock] | None = None) -> BlockOffer:
    sessions = [OfferedSession("s", 1.0)]
    return BlockOffer(group, 1, form, sessions, [OfferedBlock(ROOT, TOKENS, 0)] if blocks is None else blocks)


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[Peer]:
    made = Peer(tmp_path)
    yield made
    await made.taker.answer(HandoverEnd("a", 1))  # its watch ends


async def test_an_offer_is_answered_with_addresses_and_a_key_of_its_own(peer: Peer) -> None:
    first = await peer.taker.answer(offer())
    assert (first.ok, first.wanted, first.addresses, first.epoch) == (True, [0], [("10.0.0.1", 4321)], 7)
    second = await peer.taker.answer(offer())
    assert len(first.key) == len(second.key) == 32
    assert first.key != second.key
    assert [command.batch for command in peer.commands if isinstance(command, Receive)] == [1, 2]


async def test_one_ring_at_a_time(peer: Peer) -> None:
    assert (await peer.taker.answer(offer())).ok
    refused = await peer.taker.answer(offer("b"))
    assert not refused.ok
    assert "another group" in refused.reason
    assert (await peer.taker.answer(HandoverEnd("a", 1))).ok
    assert isinstance(peer.commands[-1], StopReceiving)
    assert not peer.ring.batcher.exchange.arrivals.reserved
    assert (await peer.taker.answer(offer("b"))).ok
    assert (await peer.taker.answer(HandoverEnd("b", 1))).ok


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (offer(form="other"), "another format"),
        (offer(blocks=[OfferedBlock(ROOT[1:], TOKENS, 0)]), "blocks that do not exist"),
        (offer(blocks=[OfferedBlock(ROOT, TOKENS[1:], 0)]), "blocks that do not exist"),
        (offer(blocks=[OfferedBlock(ROOT, b"state:x", 0)]), "blocks that do not exist"),
        (offer(blocks=[OfferedBlock(ROOT, TOKENS, 1)]), "blocks that do not exist"),
        (offer(blocks=[OfferedBlock(ROOT, TOKENS, -1)]), "blocks that do not exist"),
        (BlocksSent("a", 1), "no offer from this group"),
        (HandoverEnd("a", 1), "no offer from this group"),
    ],
)
async def test_what_is_wrong_is_declined_with_the_reason(peer: Peer, message: BlockOffer, reason: str) -> None:
    answer = await peer.taker.answer(message)
    assert not answer.ok
    assert reason in answer.reason
    assert not peer.commands


async def test_a_ring_that_leaves_takes_nothing(peer: Peer) -> None:
    assert (await peer.taker.answer(offer(), "It is draining too.")).reason == "It is draining too."


async def test_a_ring_that_cannot_listen_declines_and_keeps_no_room(peer: Peer) -> None:
    peer.port = 0
    answer = await peer.taker.answer(offer())
    assert not answer.ok
    assert "cannot listen" in answer.reason
    assert not peer.ring.batcher.exchange.arrivals.reserved
    peer.ring.batcher.check()


async def test_what_has_not_come_is_not_held_and_is_counted_as_failed(peer: Peer, tmp_path: Path) -> None:
    await peer.taker.answer(offer())
    answer = await peer.taker.answer(BlocksSent("a", 1))
    assert (answer.ok, answer.held) == (True, b"\x00")
    assert peer.board.totals.failed == 1
    assert not peer.ring.batcher.exchange.arrivals.reserved
    registry = CollectorRegistry()
    registry.register(HandoverCollector(lambda: peer.board, lambda: Labels("g", "m")))
    name = "ryzanstein_executor_handover_blocks_total"
    labels = {"group": "g", "model": "m"}
    assert registry.get_sample_value(name, labels | {"direction": "failed"}) == 1
    assert registry.get_sample_value(name, labels | {"direction": "received"}) == 0
    await peer.taker.answer(HandoverEnd("a", 1))
    assert registry.get_sample_value("ryzanstein_executor_handover_seconds_count", labels) == 1


async def test_what_has_landed_is_adopted_before_the_answer(peer: Peer) -> None:
    await peer.taker.answer(offer())
    peer.ring.engine.landing = {0: [(0, position, 0) for position in range(BLOCK)]}
    peer.rank.write("landed", 1, 1)
    answer = await asyncio.wait_for(peer.taker.answer(BlocksSent("a", 1)), 30)
    assert answer.held == b"\x01"
    assert peer.board.totals.received == 1
    again = await peer.taker.answer(offer())
    assert (again.ok, again.wanted) == (True, []), "it is here"


async def test_blocks_behind_a_root_of_any_salt_are_wanted(peer: Peer) -> None:
    roots = [salted_root(ROOT, "a"), salted_root(ROOT, "b"), salted_root(root_digest("other"), "a")]
    reply = await peer.taker.answer(offer(blocks=[OfferedBlock(root, TOKENS, 0) for root in roots]))
    assert reply.wanted == [0, 1]
    adapters = [salted_root(ROOT, salt, one * 32) for salt in ("", "a") for one in ("ab", "cd")]
    assert len({*roots, *adapters, ROOT}) == 8, "none shares a block with another"
    reply = await peer.taker.answer(offer(blocks=[OfferedBlock(root, TOKENS, 0) for root in adapters]))
    assert reply.wanted == [0, 1, 2, 3]
    reply = await peer.taker.answer(offer(blocks=[OfferedBlock(ROOT + b"x", TOKENS, 0)]))
    assert (reply.ok, reply.reason) == (False, "The offer names blocks that do not exist.")
