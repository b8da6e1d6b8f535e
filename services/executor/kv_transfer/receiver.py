"""The peer's side: answers the offers of a leaving ring, while this ring goes on computing.

    offer ─▶ reserve ─▶ ranks listen ─▶ answer        blocks land on every rank ─▶ plans ─▶ findable
    sent  ─▶ what has landed is adopted ─▶ answer: which blocks are here

One leaving ring at a time: a second one is told so, and looks for another peer.
"""

import asyncio
import secrets
import time
from collections.abc import Callable

import structlog

from services.executor.kv_cache.prefix_index import PARENT_SIZES, holds
from services.executor.kv_transfer.board import (
    POLL,
    HandoverBoard,
    OwnRing,
    Receive,
    StopReceiving,
    encode_command,
    until,
)
from services.executor.kv_transfer.exchange import Exchange, Offered
from shared.messages.groups import BlockOffer, BlocksSent, HandoverMessage, HandoverReply

log = structlog.get_logger(__name__)

LISTEN_TIMEOUT = 5.0
ADOPT_TIMEOUT = 5.0
QUIET_TIMEOUT = 6.0  # seconds without a block, or a word, after which a leaving ring is taken for lost


class HandoverReceiver:
    """Takes sessions' blocks over. Its caller decides whether this ring is one that does."""

    def __init__(
        self,
        exchange: Exchange,
        board: HandoverBoard,
        ring: OwnRing,
        room: Callable[[], int],
        wake: Callable[[], object],
    ) -> None:
        """`room`: blocks that may be taken over now; `wake`: has the next step planned."""
        self._exchange = exchange
        self._board = board
        self._ring = ring
        self._room = room
        self._wake = wake
        self._source: tuple[str, int] | None = None
        self._began = self._heard = 0.0
        self._batch = 0
        self._wanted = 0  # blocks of the batch
        self._counted = 0  # of `Arrivals.received`
        self._blocks = 0  # from this source
        self._watching: asyncio.Task[None] | None = None

    async def answer(self, message: HandoverMessage, refusal: str = "") -> HandoverReply:
        """`refusal`: why this ring takes nothing new."""
        source = (message.group, message.epoch)
        if self._source not in (None, source):
            return HandoverReply(False, "It is already receiving another group's sessions.")
        self._heard = time.monotonic()
        if isinstance(message, BlockOffer):
            refusal = refusal or self._problem_with(message)
            return HandoverReply(False, refusal) if refusal else await self._offered(message)
        if self._source is None:
            return HandoverReply(False, "It has no offer from this group, or the offer has expired.")
        if isinstance(message, BlocksSent):
            return await self._sent()
        self._end("ended")
        return HandoverReply(True, epoch=self._ring.epoch)

    def _problem_with(self, offer: BlockOffer) -> str:
        if offer.format != self._ring.format:
            return "Its KV blocks are of another format, or of another model."
        sizes_are_right = all(
            len(block.parent) in PARENT_SIZES
            and holds(block.tokens, self._ring.block_size)
            and 0 <= block.session < len(offer.sessions)
            for block in offer.blocks
        )
        return "" if sizes_are_right else "The offer names blocks that do not exist."

    async def _offered(self, offer: BlockOffer) -> HandoverReply:
        now = time.monotonic()
        if self._source is None:
            self._source, self._began = (offer.group, offer.epoch), now
            log.info("handover_started", group=offer.group)
        sessions = [(session.name, now - max(0.0, session.idle)) for session in offer.sessions]
        self._settle()
        wanted = self._exchange.arrivals.begin(
            [Offered(block.parent, block.tokens, *sessions[block.session]) for block in offer.blocks], self._room()
        )
        self._batch += 1
        self._wanted = len(wanted)
        self._watch()
        if not wanted:
            return HandoverReply(True, epoch=self._ring.epoch)
        key = secrets.token_bytes(32)
        self._exchange.command(encode_command(Receive(self._batch, key, len(wanted))))
        self._wake()
        ports = await self._ports(self._batch)
        if not all(ports):
            self._settle()
            return HandoverReply(False, "Its ranks cannot listen for blocks.")
        addresses = [(self._ring.host, port) for port in ports]
        return HandoverReply(True, wanted=wanted, key=key, addresses=addresses, epoch=self._ring.epoch)

    async def _ports(self, batch: int) -> list[int]:
        """Where each rank listens; 0 where it does not."""
        await until(lambda: None not in self._board.numbers("listening", batch), LISTEN_TIMEOUT)
        return [port or 0 for port in self._board.numbers("listening", batch)]

    def _watch(self) -> None:
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        """Has plans bring what has landed, until the leaving ring has ended, or is quiet for too long."""
        arrivals, batch, before = self._exchange.arrivals, self._batch, 0
        while self._source is not None:
            landed = self._board.least("landed", self._batch)
            if (self._batch, landed) != (batch, before):
                batch, before = self._batch, landed
                self._heard = time.monotonic()
                arrivals.landed(landed)
                self._wake()
            elif not arrivals.adopting and time.monotonic() - self._heard > QUIET_TIMEOUT:
                self._end("lost")
            await asyncio.sleep(POLL)

    async def _sent(self) -> HandoverReply:
        arrivals = self._exchange.arrivals
        arrivals.landed(self._board.least("landed", self._batch))
        self._wake()
        await until(lambda: not arrivals.adopting, ADOPT_TIMEOUT)
        self._heard = time.monotonic()
        self._settle()
        return HandoverReply(True, held=arrivals.held(), epoch=self._ring.epoch)

    def _end(self, how: str) -> None:
        seconds = time.monotonic() - self._began
        self._settle()
        self._exchange.command(encode_command(StopReceiving()))
        self._wake()
        self._board.totals.seconds += seconds
        self._board.totals.count += 1
        assert self._source is not None
        log.info("handover_received", group=self._source[0], how=how, blocks=self._blocks, seconds=round(seconds, 3))
        self._source = None
        self._blocks = 0

    def _settle(self) -> None:
        """What is missing of the batch does not come any more."""
        arrivals = self._exchange.arrivals
        received = arrivals.received - self._counted
        self._board.totals.received += received
        self._board.totals.failed += max(0, self._wanted - received)
        self._counted, self._wanted = arrivals.received, 0
        self._blocks += received
        arrivals.end()
