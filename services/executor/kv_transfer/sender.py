"""The leaving ring's side: offers its sessions' blocks to peers, has its ranks send them, moves the sessions' pins.

    batch ─▶ offer ─▶ wanted? ─▶ ranks send ─▶ "sent" ─▶ what does the peer have? ─▶ pins ─▶ next batch

It begins with the drain, while the last generations still run: what is idle goes first, and what they leave
behind goes when they have ended. Whatever fails costs cache and nothing else.

`Homes` says which peer gets which session, and `PinMover` moves the sessions' pins there by compare-and-set.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

import structlog

from services.executor.kv_transfer.board import POLL, HandoverBoard, OwnRing, Send, StopSending, encode_command, until
from services.executor.kv_transfer.endpoint import ENDED, IDLE_TIMEOUT
from services.executor.kv_transfer.exchange import MOST_BLOCKS, Exchange, SessionBlock
from shared.errors import RyzansteinError
from shared.messages import GroupRecord, SessionPin
from shared.messages.groups import (
    BlockOffer,
    BlocksSent,
    HandoverEnd,
    HandoverMessage,
    HandoverReply,
    OfferedBlock,
    OfferedSession,
)
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.nats.subjects import pin_key

log = structlog.get_logger(__name__)

SERVING = ("ready", "busy")


class TransferPeer:
    def __init__(self, record: GroupRecord) -> None:
        self.group = record.group
        self.epoch = record.epoch
        self.room = record.load.free_blocks  # blocks, less those of the sessions assigned to it


def peers_of(records: Iterable[GroupRecord], model: str, group: str) -> dict[str, TransferPeer]:
    """The groups that serve `model` beside `group`. Whether their blocks are of the same format they know
    themselves."""
    return {
        record.group: TransferPeer(record)
        for record in records
        if record.model == model and record.group != group and record.state in SERVING
    }


def is_coming(records: Iterable[GroupRecord], model: str, group: str) -> bool:
    """Whether another group of `model` is starting."""
    return any(record.model == model and record.group != group and record.state == "starting" for record in records)


class Homes:
    """Which peer each session goes to: where a scheduler has sent it already, else where there is most room."""

    def __init__(self, peers: dict[str, TransferPeer]) -> None:
        self.peers = peers
        self._homes: dict[str, str] = {}

    def of(self, session: str) -> str:
        """The session's peer; empty: it has none."""
        home = self._homes.get(session, "")
        return home if home in self.peers else ""

    def assign(self, session: str, blocks: int, pinned: str) -> None:
        """`pinned`: the group that the session is pinned to, whatever it is."""
        if not self.peers:
            return
        home = pinned if pinned in self.peers else max(self.peers, key=lambda name: self.peers[name].room)
        self.peers[home].room -= blocks
        self._homes[session] = home

    def drop(self, group: str) -> None:
        """A peer that takes nothing more; its sessions have no home until they are assigned again."""
        self.peers.pop(group, None)


AT_A_TIME = 64  # sessions that are asked for, or moved, at once


class PinMover:
    """Reads and moves pins. Without an answer from the broker they stay as they are: the next turn is placed by
    load then, and finds no cache."""

    def __init__(self, bus: Bus, model: str, group: str, ttl: float) -> None:
        self._bus = bus
        self._model = model
        self._group = group
        self._ttl = ttl
        self._bucket: Bucket[SessionPin] | None = None
        # Whether the broker has not answered: it is not waited for again, since the ring has little time.
        self._away = False

    async def groups(self, sessions: Sequence[str]) -> list[str]:
        """Where each is pinned to; empty: nowhere, as far as can be told."""
        found: list[str] = []
        for start in range(0, len(sessions), AT_A_TIME):
            found += await asyncio.gather(*map(self._group_of, sessions[start : start + AT_A_TIME]))
        return found

    async def move(self, sessions: Sequence[str], group: str, epoch: int) -> None:
        """From this ring, or from nowhere, to another; what a scheduler has pinned elsewhere stays there."""
        for start in range(0, len(sessions), AT_A_TIME):
            some = sessions[start : start + AT_A_TIME]
            await asyncio.gather(*(self._move(session, SessionPin(group, epoch)) for session in some))

    async def _group_of(self, session: str) -> str:
        if self._away:
            return ""
        try:
            entry = await (await self._open()).get(pin_key(self._model, session))
        except RyzansteinError:
            self._away = True
            return ""
        return "" if entry is None else entry.value.group

    async def _move(self, session: str, pin: SessionPin) -> None:
        if self._away:
            return
        key = pin_key(self._model, session)
        try:
            bucket = await self._open()
            entry = await bucket.get(key)
            if entry is None:
                await bucket.create(key, pin)
            elif entry.value.group == self._group:
                await bucket.update(key, pin, entry.revision)
        except RyzansteinError as error:
            self._away = True
            log.warning("session_pin_move_failed", error=str(error))

    async def _open(self) -> Bucket[SessionPin]:
        if self._bucket is None:
            self._bucket = await Bucket.open(self._bus, subjects.SESSIONS_BUCKET, SessionPin, ttl=self._ttl)
        return self._bucket


OFFER_TIMEOUT = 8.0
LAST_TIMEOUT = 2.0  # seconds for an answer once the time is over
PEER_PAUSE = 0.1
BATCH_TIMEOUT = 30.0
# Of one batch and rank: what the peer keeps in memory until its plans bring it into its cache.
MOST_BYTES = 64 << 20
MOST_OFFER_BYTES = 256 << 10  # of tokens in one offer: NATS takes a megabyte in a message


class HandoverSender:
    """Gives a ring's sessions away. `run` once; `stop` has it end soon."""

    def __init__(
        self,
        bus: Bus,
        exchange: Exchange,
        board: HandoverBoard,
        pins: PinMover,
        ring: OwnRing,
        wake: Callable[[], object],
    ) -> None:
        self._bus = bus
        self._exchange = exchange
        self._board = board
        self._pins = pins
        self._ring = ring
        offered = MOST_OFFER_BYTES // (4 * ring.block_size)
        self._most = max(1, min(MOST_BLOCKS, MOST_BYTES // ring.block_bytes, offered))
        self._wake = wake
        self._homes = Homes({})
        self._batch = 0  # the one that is being sent
        self._stopping = False
        self._finished: Callable[[], bool] = lambda: False
        self._timeout = 0.0
        self._give_up = float("inf")
        self._begun: set[str] = set()  # peers that have taken an offer
        self.sent = 0  # blocks

    def stop(self) -> None:
        self._stopping = True

    async def run(self, finished: Callable[[], bool], timeout: float) -> None:
        """Gives until nothing is left and `finished` says that nothing more will come; for at most `timeout`
        seconds after that."""
        began = time.monotonic()
        self._finished, self._timeout = finished, timeout
        self._exchange.departures.restart()
        await self._find_peers()
        while self._homes.peers and not self._is_late():
            was_last = finished()
            if was_last:
                self._exchange.departures.crowded = False
            await self._assign()
            if not await self._round():
                if was_last:
                    break
                await asyncio.sleep(POLL)
        seconds = time.monotonic() - began
        self._board.totals.seconds += seconds
        self._board.totals.count += 1
        log.info(
            "handover_sent",
            blocks=self.sent,
            bytes_per_rank=self.sent * self._ring.block_bytes,
            peers=sorted(self._begun),
            seconds=round(seconds, 3),
        )
        for peer in self._begun:
            await self._ask(peer, HandoverEnd(self._ring.group, self._ring.epoch))

    async def _find_peers(self) -> None:
        """Waits for a ring that is starting where there is no other: in a rolling update it may take a moment
        until the next one's readiness is known."""
        groups = await Bucket.open(self._bus, subjects.GROUPS_BUCKET, GroupRecord)
        while not self._is_late():
            records = list((await groups.items()).values())
            self._homes = Homes(peers_of(records, self._ring.model, self._ring.group))
            if self._homes.peers or not is_coming(records, self._ring.model, self._ring.group):
                return
            if self._finished() and not self._exchange.departures.sessions():
                return
            await asyncio.sleep(PEER_PAUSE)

    def _is_late(self) -> bool:
        """The time begins when the last generation has ended, be a batch under way or not."""
        if self._finished() and self._give_up == float("inf"):
            self._give_up = time.monotonic() + self._timeout
        return self._stopping or time.monotonic() >= self._give_up

    async def _assign(self) -> None:
        departures = self._exchange.departures
        homeless = [session for session in departures.sessions() if not self._homes.of(session)]
        for session, pinned in zip(homeless, await self._pins.groups(homeless), strict=True):
            self._homes.assign(session, departures.size(session), pinned)

    async def _round(self) -> bool:
        """A batch for each peer; whether there was any."""
        given = False
        for peer in list(self._homes.peers):
            if self._is_late() or self._exchange.departures.crowded:
                break
            batch = self._exchange.departures.next_batch(peer, self._homes.of, self._most)
            if batch:
                given = True
                if not await self._give(peer, batch):
                    self._homes.drop(peer)
        return given

    # --- one batch -------------------------------------------------------------------------------

    async def _give(self, peer: str, batch: list[SessionBlock]) -> bool:
        """Whether the peer may be offered more."""
        ended = True
        try:
            reply = await self._ask(peer, self._offer(batch))
            if not reply.ok:
                return False
            self._begun.add(peer)
            complete = True
            if reply.wanted:
                ended, complete = await self._send([batch[index].block for index in reply.wanted], reply)
            reply = await self._ask(peer, BlocksSent(self._ring.group, self._ring.epoch))
            if not reply.ok or len(reply.held) != len(batch):
                return False
            whole = self._whole_sessions(batch, reply.held)
            await self._pins.move(whole, peer, reply.epoch)
            if not complete and self._exchange.departures.crowded:
                self._exchange.departures.again(peer, batch)
                return True
            return complete and all(reply.held)
        finally:
            if ended:  # else some rank may still read them: they stay as they are until the ring ends
                self._exchange.departures.release(batch)

    def _offer(self, batch: list[SessionBlock]) -> BlockOffer:
        now = time.monotonic()
        names = dict.fromkeys(gift.session for gift in batch)
        last_used = {gift.session: gift.last_used for gift in batch}
        numbers = {name: number for number, name in enumerate(names)}
        return BlockOffer(
            self._ring.group,
            self._ring.epoch,
            self._ring.format,
            [OfferedSession(name, now - last_used[name]) for name in names],
            [OfferedBlock(gift.key.parent, gift.key.tokens, numbers[gift.session]) for gift in batch],
        )

    @staticmethod
    def _whole_sessions(batch: list[SessionBlock], held: bytes) -> list[str]:
        """Those of which the peer has everything that was offered."""
        missing = {gift.session for gift, has in zip(batch, held, strict=True) if not has}
        return [name for name in dict.fromkeys(gift.session for gift in batch) if name not in missing]

    async def _send(self, blocks: list[int], reply: HandoverReply) -> tuple[bool, bool]:
        """(whether every rank has stopped reading the blocks, whether every rank has sent all)."""
        departures = self._exchange.departures
        departures.batches += 1
        self._batch = departures.batches
        within = min(BATCH_TIMEOUT, max(0.0, self._give_up - time.monotonic()))
        command = Send(self._batch, reply.key, reply.addresses, blocks, within)
        self._exchange.command(encode_command(command))
        self._wake()
        await until(lambda: self._all_ended() or departures.crowded or self._is_late(), within)
        if not self._all_ended():
            self._exchange.command(encode_command(StopSending()))
            self._wake()
            await until(self._all_ended, IDLE_TIMEOUT + 1)
        sent = self._board.least("sent", self._batch)
        self.sent += sent
        self._board.totals.sent += sent
        self._board.totals.failed += len(blocks) - sent
        complete = set(self._board.numbers("ended", self._batch)) == {ENDED}
        return self._all_ended(), complete

    def _all_ended(self) -> bool:
        return None not in self._board.numbers("ended", self._batch)

    async def _ask(self, peer: str, message: HandoverMessage) -> HandoverReply:
        """What the peer says; that it does not answer is a no."""
        try:
            timeout = min(OFFER_TIMEOUT, max(LAST_TIMEOUT, self._give_up - time.monotonic()))
            reply = await self._bus.request(subjects.handover(peer), message, HandoverReply, timeout=timeout)
        except RyzansteinError as error:
            reply = HandoverReply(False, str(error))
        if not reply.ok:
            log.info("handover_declined", peer=peer, reason=reply.reason)
        return reply
