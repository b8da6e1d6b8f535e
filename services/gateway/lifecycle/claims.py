"""Who looks after a generation when its gateway is lost: decided by compare-and-set in the bucket `generations`.

    no entry ──create──▶ {owner: B, consumers: [A, B]} ──update, B lost too──▶ {owner: C, consumers: [A, B, C]}

Of several who claim at once one wins, and the others are told who. A gateway that comes back and still
believes to own the generation hears of the entry by watching the bucket.
"""

from collections.abc import Sequence

from shared.messages.records import Ownership
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket, Contention

MAX_OWNERS = 16  # gateways in a row that one generation may outlive


class GenerationClaims:
    """Methods raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus, consumer: str, ttl: float) -> None:
        """`ttl`: seconds that an entry is kept."""
        self.bucket = Bucket(bus, subjects.GENERATIONS_BUCKET, Ownership, ttl=ttl)
        self._consumer = consumer

    async def get(self, identity: str) -> Ownership | None:
        """None: it has never been claimed."""
        entry = await self.bucket.get(identity)
        return None if entry is None else entry.value

    async def rival(self, identity: str) -> Ownership | None:
        """Whose it is, if another gateway has claimed it."""
        ownership = await self.get(identity)
        return None if ownership is None or ownership.owner == self._consumer else ownership

    async def claim(self, identity: str, lost: str, consumers: Sequence[str]) -> tuple[Ownership, int]:
        """Claims it from the gateway `lost`; returns whose it is now, and the number of that claim, which only
        grows. `consumers`: those of its log so far."""
        contention = Contention(f"the owner of the generation {identity}")
        while True:
            entry = await self.bucket.get(identity)
            if entry is not None and entry.value.owner not in (lost, self._consumer):
                return entry.value, entry.revision
            others = [name for name in (entry.value.consumers if entry else consumers) if name != self._consumer]
            mine = Ownership(self._consumer, [*others, self._consumer][-MAX_OWNERS:])
            if entry is None:
                number = await self.bucket.create(identity, mine)
            else:
                number = await self.bucket.update(identity, mine, entry.revision)
            if number is not None:
                return mine, number
            contention.lost()
