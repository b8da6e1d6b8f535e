"""What a lost gateway leaves: found, taken over, and cancelled when nobody comes back for it in time.

    services record of a gateway: gone            another gateway, at once
    a gateway starts under the same name          itself
    a gateway starts and finds a gone one         itself: nobody was left to do it before
                    │
                    ▼
    inheritance claimed by compare-and-set (one heir looks; should it be lost too, its heir does it again)
                    │
    unfinished list + newest records ──▶ log of each read ──ended──▶ nothing to do
                                                          └─going──▶ claimed: grace or background begins anew

Every gateway writes the list of what it has had for longer than a moment, so that an heir need not read
the records of an hour.
"""

import asyncio
import time
from collections.abc import Collection

import structlog

from services.gateway.lifecycle.ownership import Owners
from services.gateway.lifecycle.request_state import place, writer_of
from services.gateway.lifecycle.request_tracker import Archive, RequestTracker
from shared.errors import RyzansteinError
from shared.messages import ServiceRecord
from shared.messages.records import GenerationRecord, Inheritance, Unfinished
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.errors import BROKER_ERRORS, reason_of
from shared.nats.journal import CLOCK_MARGIN, earliest, log_begin, replay
from shared.nats.kv import Bucket, Contention

log = structlog.get_logger(__name__)

LIST_INTERVAL = 5.0  # seconds between two lists of unfinished generations
LISTED_AFTER = 5.0  # age in seconds from which a generation is in the list
# Seconds before a list, or before the loss, in which records may be of generations that no list has.
LOOK_BACK = LIST_INTERVAL + LISTED_AFTER + 2 * CLOCK_MARGIN
LIST_BYTES = 512 << 10
SLICE = 256  # generations that are taken over, or kept, at a time
KEEP = 30.0  # seconds that it may take to take one of them over
TRIES = 5
PAUSE = 1.0


class GatewayFailover:
    """Lists what is unfinished here, and watches for gateways that are lost."""

    def __init__(
        self, bus: Bus, consumer: str, answers: RequestTracker, owners: Owners, keeper: Archive, ttl: float
    ) -> None:
        """`ttl`: seconds after which a list or an inheritance is of no use any more."""
        self._bus = bus
        self._consumer = consumer
        self._answers = answers
        self._owners = owners
        self._keeper = keeper
        self._unfinished = Bucket(bus, subjects.UNFINISHED_BUCKET, Unfinished, ttl=ttl)
        self._inheritances = Bucket(bus, subjects.INHERITANCES_BUCKET, Inheritance, ttl=ttl)
        self._services = Bucket(bus, subjects.SERVICES_BUCKET, ServiceRecord)
        self.buckets = self._unfinished, self._inheritances, self._services
        self._listed = False
        self._began = time.time()

    # --- what this gateway would leave -----------------------------------------------------------

    async def run(self) -> None:
        """Keeps the list. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(LIST_INTERVAL)
            await self.write_list()

    async def write_list(self) -> None:
        """Writes what is unfinished here and not new; nothing, when that was nothing last time too."""
        now = time.time()
        old = [
            answer.identity
            for answer in self._answers.all()
            if answer.owned and not answer.ended and answer.record.created < now - LISTED_AFTER
        ]
        if not old and not self._listed:
            return
        try:
            await self._unfinished.put(self._consumer, Unfinished(now, old[: LIST_BYTES // 40]))
            self._listed = bool(old)
        except RyzansteinError as error:
            log.info("unfinished_list_write_failed", error=str(error))

    # --- what others leave -----------------------------------------------------------------------

    async def watch(self) -> None:
        """Looks after the losses of other gateways, and of earlier lives of this one. Runs until cancelled."""
        await self._try_to_inherit(self._consumer, self._began)
        async for update in self._services.watch():
            record = update[1] if update is not None else None
            if record is None or record.name != "gateway" or record.instance == self._consumer:
                continue
            if record.state == "gone":
                self._answers.spawn(self._try_to_inherit(record.instance, record.updated_at))

    async def _try_to_inherit(self, lost: str, lost_at: float) -> None:
        for _ in range(TRIES):
            try:
                await self._inherit(lost, lost_at)
                return
            except (RyzansteinError, *BROKER_ERRORS) as error:
                reason = str(error) if isinstance(error, RyzansteinError) else reason_of(error)
                log.warning("takeover_failed", of=lost, error=reason)
            await asyncio.sleep(PAUSE)

    async def _inherit(self, lost: str, lost_at: float) -> None:
        if lost != self._consumer and not await self._claim(lost, lost_at):
            return
        left = await self._left_by(lost, lost_at)
        records = await self._going(lost, list(left.values()))
        going: set[str] = set()
        for begin in range(0, len(records), SLICE):
            going |= await self._take(records[begin : begin + SLICE])
        if records:
            log.info("generations_taken_over", of=lost, generations=len(records))
        await self._keep_ended(left, going)
        await self._settle(lost, lost_at)
        for heirless in await self._unsettled(lost):
            await self._inherit(*heirless)

    async def _keep_ended(self, left: dict[str, GenerationRecord], going: Collection[str]) -> None:
        """What had ended and outlives the journal; its gateway may not have kept it any more. `going`: identities."""
        ended = [record for identity, record in left.items() if record.outlives and identity not in going]
        for begin in range(0, len(ended), SLICE):
            await asyncio.gather(*map(self._keep, ended[begin : begin + SLICE]))

    async def _keep(self, record: GenerationRecord) -> None:
        """Writes an answer that had ended when its gateway was lost, unless that has done it."""
        if await self._keeper.has(record):
            return
        answer = await self._answers.inherit(record, keep=KEEP)
        if answer.ended:
            await self._keeper.keep(answer)

    async def _claim(self, lost: str, lost_at: float) -> bool:
        """Whether this gateway is the heir: of a life of `lost`, one is."""
        mine = Inheritance(self._consumer, lost_at)
        contention = Contention(f"the heir of the gateway {lost}")
        while True:
            entry = await self._inheritances.get(lost)
            if entry is None:
                written = await self._inheritances.create(lost, mine)
            else:
                same_life = entry.value.lost_at >= lost_at
                if same_life and (entry.value.done or not await self._is_gone(entry.value.heir)):
                    return entry.value.heir == self._consumer and not entry.value.done
                written = await self._inheritances.update(lost, mine, entry.revision)
            if written is not None:
                return True
            contention.lost()

    async def _is_gone(self, heir: str) -> bool:
        if heir == self._consumer:
            return False
        entry = await self._services.get(heir)
        return entry is None or entry.value.state == "gone"

    async def _settle(self, lost: str, lost_at: float) -> None:
        await self._inheritances.put(lost, Inheritance(self._consumer, lost_at, done=True))

    async def _unsettled(self, heir: str) -> list[tuple[str, float]]:
        """What `heir` had begun to inherit itself and not done with."""
        entries = await self._inheritances.items()
        return [
            (lost, entry.lost_at)
            for lost, entry in entries.items()
            if entry.heir == heir != self._consumer and not entry.done
        ]

    async def _left_by(self, lost: str, lost_at: float) -> dict[str, GenerationRecord]:
        """Records of everything that `lost` may not have finished."""
        entry = await self._unfinished.get(lost)
        listed = entry.value if entry is not None else Unfinished(lost_at, [])
        begin = min(listed.at, lost_at) - LOOK_BACK
        newest, stored_at = await self._answers.records.collect_since(writer_of(lost), begin)
        found = {
            identity: record
            for identity, record in newest.items()
            if record.requests[0].consumer == lost and self._is_older(record, stored_at[identity], lost_at)
        }
        missing = [identity for identity in listed.identities if identity not in found]
        slots = sorted({place(identity) for identity in missing})
        for spot in slots:
            wanted = {identity for identity in missing if place(identity) == spot}
            found |= await self._answers.records.collect(spot, wanted)
        return found

    def _is_older(self, record: GenerationRecord, stored_at: float, lost_at: float) -> bool:
        """Whether it is of the life that was lost at `lost_at`, and not of the next one under the same name: by this
        gateway's own clock for its own name, else by the monitor's and the broker's, which may differ."""
        own = record.requests[0].consumer == self._consumer
        return record.created < lost_at if own else stored_at < lost_at + CLOCK_MARGIN

    async def _going(self, lost: str, records: list[GenerationRecord]) -> list[GenerationRecord]:
        """Those that have not ended by the log on the token subject of `lost`, and are not at hand."""
        records = [record for record in records if self._answers.get(record.identity) is None]
        if not records:
            return []
        ended: set[str] = set()
        begin = earliest(map(log_begin, records))
        assert begin is not None, "there are records"
        async for frame in replay(self._bus, lost, begin):
            for entry in frame.entries:
                if entry.finish and not (entry.finish == "error" and entry.retryable):
                    ended.add(entry.generation_id)
        return [
            record
            for record in records
            if not ended.issuperset(f"{record.identity}-{index}" for index in range(record.prompts * record.choices))
        ]

    async def _take(self, records: list[GenerationRecord]) -> set[str]:
        """Reads the logs of some generations, and takes over what has not ended and has no owner. Returns what goes
        on, by identity: of some the end comes into the journal only now."""
        answers = await asyncio.gather(*(self._answers.inherit(record, keep=KEEP) for record in records))
        await self._owners.take([answer for answer in answers if not answer.ended])
        return {answer.identity for answer in answers if answer.owned or not answer.ended}
