"""The shell around `LimitAccount`: windows in the KV bucket `limits`, changed by compare-and-set.

A limit that is far from reached costs one round trip to NATS per second and gateway; one of a few requests per
minute costs one per request, as does one that is nearly reached; a refusal is repeated without asking for a while.
"""

import asyncio
import contextlib
import time

from services.gateway.ratelimit.window import KEPT, LEASE, LimitAccount
from shared.errors import RyzansteinError
from shared.messages.records import Spent
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket, Contention, KvEntry

TTL = 300.0  # seconds after which NATS forgets a window that nobody has touched
TRIES = 3  # shares that may come so late, from a broker that is slow, that they cannot be spent any more
SWEEP = 0.5  # seconds within which the others get to know what was given back


class _Shared:
    """An account and what is known of its window's place in the bucket."""

    def __init__(self, limit: int) -> None:
        self.account = LimitAccount(limit)
        self.lock = asyncio.Lock()
        self.entry: KvEntry[Spent] | None = None


class SharedWindows:
    """Names are of keys and tenants, each with what is limited."""

    def __init__(self, bus: Bus) -> None:
        self.bucket = Bucket(bus, subjects.LIMITS_BUCKET, Spent, ttl=TTL)
        self._shared: dict[str, _Shared] = {}
        self._used = asyncio.Event()  # whether there are any

    def account(self, name: str, limit: int) -> LimitAccount:
        """What this gateway knows of it."""
        return self._of(name, limit).account

    async def spend(self, name: str, limit: int, amount: int) -> tuple[int | None, float]:
        """(second in which it was granted, 0), or (None, seconds to wait). Raises `BrokerUnavailable`."""
        shared = self._of(name, limit)
        account, now = shared.account, time.time()
        granted = account.spend(amount, now)
        if granted is not None:
            return granted, 0.0
        if wait := account.shut(amount, now):
            return None, wait
        account.waiting += amount
        try:
            async with shared.lock:
                return await self._take(name, shared, amount)
        finally:
            account.waiting -= amount

    async def run(self) -> None:
        """Tells the others what was given back, and forgets what is not used. Runs until it is cancelled."""
        while True:
            await self._used.wait()
            await asyncio.sleep(SWEEP)
            await self._sweep(time.time())
            if not self._shared:
                self._used.clear()

    async def stop(self) -> None:
        """Gives back what was not spent."""
        await self._sweep(float("inf"))

    # --- inside ----------------------------------------------------------------------------------

    def _of(self, name: str, limit: int) -> _Shared:
        shared = self._shared.get(name)
        if shared is None:
            shared = self._shared[name] = _Shared(limit)
            self._used.set()
        shared.account.limit = limit
        return shared

    async def _take(self, name: str, shared: _Shared, amount: int) -> tuple[int | None, float]:
        account = shared.account
        granted = account.spend(amount, time.time())  # another may have brought enough for all meanwhile
        if granted is not None:
            return granted, 0.0
        if wait := account.shut(amount, time.time()):
            return None, wait
        for _ in range(TRIES):
            if wait := await self._exchange(name, shared, amount):
                return None, wait
            granted = account.spend(amount, time.time())
            if granted is not None:
                return granted, 0.0
        return None, float(LEASE)

    async def _exchange(self, name: str, shared: _Shared, amount: int) -> float:
        """One change of the shared window; returns how long to wait where nothing was granted."""
        account, fresh = shared.account, False
        contention = Contention(f"the rate limit {name}")
        while True:
            now = time.time()
            entry = shared.entry
            taken = account.apply(entry.value if entry else Spent(), now, amount)
            if taken.wait and not fresh:  # somebody may have given something back since
                shared.entry, fresh = await self.bucket.get(name), True
                continue
            if entry is None:
                revision = await self.bucket.create(name, taken.window)
            else:
                revision = await self.bucket.update(name, taken.window, entry.revision)
            if revision is not None:
                account.applied(taken, now)
                shared.entry = KvEntry(name, taken.window, revision)
                return taken.wait
            contention.lost()
            shared.entry, fresh = await self.bucket.get(name), True

    async def _sweep(self, now: float) -> None:
        for name, shared in list(self._shared.items()):
            if shared.account.owes(now):
                with contextlib.suppress(RyzansteinError):  # next time
                    async with shared.lock:
                        await self._exchange(name, shared, 0)
            elif now - shared.account.used_at > KEPT:
                del self._shared[name]
