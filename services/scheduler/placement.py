"""Which group a request goes to: where its first token is expected soonest.

    session with a pin   its group, unless another one would answer sooner by more than moving costs
    no session           the home of the longest beginning that its prompt has a name for, within the same bound
    with an adapter      a group that has it in memory, else the adapter's home, unless another would answer sooner by
                         more than `ADAPTER_TOKENS` take; the home of a beginning only if it has the adapter
    a later attempt      whose ring is lost: the ring that was sent a prompt with the longest common beginning, within
                         the same bound, since that need not be computed again
    otherwise            the soonest of a sample of the open groups; equals take turns
    with sparse attention   of all this only the groups that compute its kind count; it waits for them

    expected seconds:     home, all cached     best, nothing cached          slack
                          |────────────────|   |────────────────────────────|──────|
                               stays, as long as it is not longer than that

Moving costs the request's own tokens, which another group would have to compute, and `sticky_tokens` on top.
A session that leaves a busy ring takes its pin along and stays for `HOLD` at least. No ping-pong: the ring it
went to was within TOLERANCE of every other with nothing cached, so while the loads stay as they are, it is so
with the session's tokens cached, however long its prompt has become. (Of more than `SAMPLE` open groups it was
so among the sample; there the slack and the time keep it in place.)

Of what rings were sent a scheduler knows its own part alone: another one may choose otherwise after a loss. Else what
one scheduler decides another one would: homes follow from names alone, pins are agreed upon. The sample
is random so that schedulers which see the same stale figures do not all choose the same group.
"""

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

import structlog

from services.scheduler.groups import Group, GroupTable
from services.scheduler.request import Prefix, WaitingRequest
from shared import limits
from shared.errors import RyzansteinError
from shared.messages import SessionPin
from shared.nats.kv import Bucket

SAMPLE = 16  # open groups that are compared; of fewer, all
TOLERANCE = 1.05  # groups whose times differ by no more than this factor are equals
# What it is worth, in prompt tokens, to compute a request where its LoRA adapter is in memory: elsewhere that would
# be read from disk, and another's might have to make way.
ADAPTER_TOKENS = 1024
RINGS = 4  # of those that have a beginning so many are remembered
HOLD = 30.0  # seconds that a session stays, at least, with the ring that it has moved to

_CHOSEN = attrgetter("chosen")

Reason = Literal["pinned", "spilled", "moved", "relieved", "prefix", "adapter", "least_loaded"]


class PlacementDecision(NamedTuple):
    """`pinned`: the session's group. `spilled`: that one is too busy or silent, this request goes elsewhere and
    the pin stays. `relieved`: that one is too busy, and the pin moves along. `moved`: that one is no more, so
    the pin must move. `prefix`: the home of the prompt's beginning. `adapter`: a group that has the request's LoRA
    adapter in memory, or will have. `least_loaded`: the soonest."""

    group: Group
    reason: Reason


class Beginnings:
    """Which rings were sent prompts with which beginnings, the latest ones: they may have their KV blocks still, in
    memory or in a spill tier."""

    def __init__(self, most: int = limits.KNOWN_BEGINNINGS.value) -> None:
        # Epochs by group, by the name of a beginning.
        self._rings: OrderedDict[int, dict[str, int]] = OrderedDict()
        self._most = most

    def sent(self, prefixes: Iterable[Prefix], group: str, epoch: int) -> None:
        """A ring has accepted a prompt with these; what was not met with for longest is forgotten."""
        for prefix in prefixes:
            rings = self._rings.setdefault(prefix.key, {})
            rings.pop(group, None)
            rings[group] = epoch
            if len(rings) > RINGS:
                del rings[next(iter(rings))]
            self._rings.move_to_end(prefix.key)
        while len(self._rings) > self._most:
            self._rings.popitem(last=False)

    def rings(self, prefix: Prefix) -> list[tuple[str, int]]:
        """(group, epoch) of those with a beginning, the one that was sent it last first."""
        return list(reversed(self._rings.get(prefix.key, {}).items()))

    def __len__(self) -> int:
        return len(self._rings)


class Placement:
    """Chooses groups out of a table. Times are unix seconds."""

    def __init__(self, table: GroupTable, sticky_tokens: int, seed: int | None = None) -> None:
        """`seed` of the samples; None: a random one."""
        self._table = table
        self._sticky_tokens = sticky_tokens
        self._random = random.Random(seed)
        self._beginnings = Beginnings()

    def accepted(self, item: WaitingRequest, group: str, epoch: int) -> None:
        """A ring has taken `item`."""
        self._beginnings.sent(item.prefixes, group, epoch)

    def alive(self, model: str, pin: SessionPin) -> bool:
        """Whether the ring that `pin` names still stands, with the session's cache."""
        group = self._table.get(pin.group)
        return group is not None and group.model == model and group.epoch == pin.epoch and group.up

    def choose(self, item: WaitingRequest, pin: SessionPin | None, now: float) -> PlacementDecision | None:
        """The group for `item`; None when no open group has room for it."""
        best = self._soonest(item)
        if best is None:
            return None
        if not best.computes(item.sparse):
            return PlacementDecision(best, "spilled")  # no group of its model does, which this one is going to say
        if pin is not None and self.alive(item.model, pin):
            return self._by_pin(item, pin, best, now)
        kept = self._that_has(item, best) if item.attempt else None
        if pin is not None:
            return PlacementDecision(kept or best, "moved")
        if item.session:
            home = None
            best = kept or best
        else:
            home = kept or self._home(item, best)
        if home is not None and (not item.adapter or item.adapter in home.adapters):
            return PlacementDecision(home, "prefix")
        holder = self._holder(item, best) if item.adapter else None
        return PlacementDecision(best, "least_loaded") if holder is None else PlacementDecision(holder, "adapter")

    def _holder(self, item: WaitingRequest, best: Group) -> Group | None:
        """The soonest group with the request's adapter in memory, else the first of those that the adapter's name
        belongs to: so it is in memory of few groups, and the same ones whoever decides."""
        holders = [group for group in self._table.holders(item.model, item.adapter) if _may_take(group, item)]
        if holders:
            soonest = min(holders, key=lambda group: group.ttft.first_token(item.tokens))
            return soonest if self._is_worth(soonest, best, item, item.tokens, ADAPTER_TOKENS) else None
        for name in self._table.ranking(item.model).ranked(int(item.adapter[:15] or "0", 16)):
            home = self._table.get(name)
            worth = home is not None and self._is_worth(home, best, item, item.tokens, ADAPTER_TOKENS)
            if home is not None and worth and _may_take(home, item):
                return home
        return None

    def _by_pin(self, item: WaitingRequest, pin: SessionPin, best: Group, now: float) -> PlacementDecision:
        """Of a pin to a ring that stands."""
        home = self._table.get(pin.group)
        assert home is not None, "a living ring is in the table"
        if _may_take(home, item) and self._is_worth(home, best, item, 0, self._sticky_tokens):
            return PlacementDecision(home, "pinned")
        suspected = home.breaker.state != "closed"  # whether it is lost, others will say
        if suspected or item.lane == "batch" or now < pin.moved_at + HOLD:
            return PlacementDecision(best, "spilled")
        return PlacementDecision(best, "relieved")

    def _that_has(self, item: WaitingRequest, best: Group) -> Group | None:
        """The ring that may have the longest beginning of the prompt, if that is worth its waiting time: whose life is
        that in which it was sent it."""
        for prefix in item.prefixes:
            for name, epoch in self._beginnings.rings(prefix):
                if not self.alive(item.model, SessionPin(name, epoch)):
                    continue
                ring = self._table.get(name)
                if ring is not None and _may_take(ring, item) and self._saves(ring, best, item, prefix):
                    return ring
        return None

    def _saves(self, ring: Group, best: Group, item: WaitingRequest, prefix: Prefix) -> bool:
        """As `_is_worth`. A ring that has not said how fast it is counts as fast as this one: seconds of work would be
        done twice on a guess."""
        here, there = ring.ttft, best.ttft
        speed = there if best.load.prompt_tokens_per_second else here
        limit = there.seconds + item.tokens * speed.seconds_per_token
        return here.first_token(max(0, item.tokens - prefix.tokens)) <= TOLERANCE * limit

    def _home(self, item: WaitingRequest, best: Group) -> Group | None:
        """Where the prompt's beginning is kept, if that is worth its waiting time."""
        ranking = self._table.ranking(item.model)
        for prefix in item.prefixes:
            for name in ranking.ranked(prefix.key):
                home = self._table.get(name)
                uncached = max(0, item.tokens - prefix.tokens)
                if home is not None and _may_take(home, item) and self._is_worth(home, best, item, uncached, 0):
                    return home
        return None

    def _is_worth(self, home: Group, best: Group, item: WaitingRequest, uncached: int, slack: int) -> bool:
        """Whether `home`, which lacks `uncached` tokens, answers as soon as `best`, which lacks all."""
        there, here = best.ttft, home.ttft
        limit = TOLERANCE * there.first_token(item.tokens) + slack * here.seconds_per_token
        return here.first_token(uncached) <= limit

    def _soonest(self, item: WaitingRequest) -> Group | None:
        """The group that would answer first without a cache; of equals the one chosen longest ago."""
        tokens = item.tokens
        timed = [(group.ttft.first_token(tokens), group) for group in self._sample(item)]
        if not timed:
            return None
        limit = min(seconds for seconds, _ in timed) * TOLERANCE
        return min((group for seconds, group in timed if seconds <= limit), key=_CHOSEN)

    def _sample(self, item: WaitingRequest) -> Iterable[Group]:
        table, model = self._table, item.model
        candidates = table.computing(model, item.sparse) if item.sparse else table.open(model)
        if len(candidates) > SAMPLE:
            candidates = self._random.choices(candidates, k=SAMPLE)
        if item.lane == "batch":
            return [group for group in candidates if group.has_idle_capacity]
        return candidates


def _may_take(group: Group, item: WaitingRequest) -> bool:
    return group.may_take(item.lane) and group.computes(item.sparse)


REFRESH_SHARE = 4  # a pin in use is written anew once per this fraction of its time to live
_TRIES = 8

Outcome = Literal["created", "moved", "adopted", "unpinned"]

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Cached:
    pin: SessionPin
    revision: int
    written: float


class SessionPins:
    """Which ring holds a session's KV cache, agreed among all schedulers by compare-and-set: pins in the KV bucket
    `sessions`, behind a cache of the least recently used. Times are monotonic.

    A pin is written once and cached: the common case costs no round trip. When its ring is gone the first
    scheduler that notices moves it; the others lose the compare-and-set and adopt what the first one wrote.
    Each follows the bucket, so that it does not go on with a pin that another one has moved.
    """

    def __init__(self, bucket: Bucket[SessionPin], ttl: float, capacity: int) -> None:
        self._bucket = bucket
        self._ttl = ttl
        self._capacity = capacity
        self._cache: OrderedDict[str, _Cached] = OrderedDict()

    def cached(self, key: str, now: float) -> SessionPin | None:
        """The pin as this scheduler remembers it, without asking anybody."""
        cached = self._cache.get(key)
        if cached is None:
            return None
        if now - cached.written >= self._ttl:
            del self._cache[key]
            return None
        self._cache.move_to_end(key)
        return cached.pin

    async def follow(self) -> None:
        """Forgets cached pins that others have changed, for ever: the next request asks the bucket."""
        await self._bucket.follow(self._changed)

    def _changed(self, key: str, pin: SessionPin | None) -> None:
        cached = self._cache.get(key)
        if cached is not None and cached.pin != pin:
            del self._cache[key]

    async def claim(
        self, key: str, wanted: SessionPin, alive: Callable[[SessionPin], bool], now: float
    ) -> tuple[SessionPin, Outcome]:
        """Pins the session to `wanted` unless a living pin stands; returns the pin that holds.

        Without an answer from the broker the request goes unpinned: a miss in a cache, not a failure.
        """
        try:
            return await self._claim(key, wanted, alive, now)
        except RyzansteinError as error:
            log.warning("session_pin_failed", error=str(error))
            return wanted, "unpinned"

    async def _claim(
        self, key: str, wanted: SessionPin, alive: Callable[[SessionPin], bool], now: float
    ) -> tuple[SessionPin, Outcome]:
        known = self._cache.get(key)
        for _ in range(_TRIES):
            if known is not None and alive(known.pin):
                self._remember(key, known)
                return known.pin, "adopted"
            outcome: Outcome = "created" if known is None else "moved"
            if known is None:
                revision = await self._bucket.create(key, wanted)
            else:
                revision = await self._bucket.update(key, wanted, known.revision)
            if revision is not None:
                self._remember(key, _Cached(wanted, revision, now))
                return wanted, outcome
            entry = await self._bucket.get(key)
            known = None if entry is None else _Cached(entry.value, entry.revision, now)
        return wanted, "unpinned"

    def refresh_due(self, key: str, now: float) -> bool:
        """Whether the pin should be written anew, so that it outlives its time; true once per due time."""
        cached = self._cache.get(key)
        if cached is None or now - cached.written < self._ttl / REFRESH_SHARE:
            return False
        cached.written = now
        return True

    async def refresh(self, key: str, now: float) -> None:
        """Writes the pin anew, or adopts what another scheduler has made of it."""
        cached = self._cache.get(key)
        if cached is None:
            return
        try:
            revision = await self._bucket.update(key, cached.pin, cached.revision)
            if revision is not None:
                self._remember(key, _Cached(cached.pin, revision, now))
            elif (entry := await self._bucket.get(key)) is not None:
                self._remember(key, _Cached(entry.value, entry.revision, now))
            else:
                self._cache.pop(key, None)
        except RyzansteinError as error:
            log.debug("session_pin_refresh_failed", error=str(error))

    def _remember(self, key: str, cached: _Cached) -> None:
        self._cache[key] = cached
        self._cache.move_to_end(key)
        if len(self._cache) > self._capacity:
            self._cache.popitem(last=False)
