"""Whether a request may begin, by the limits of its key and its tenant; and what becomes of its reservation.

    prepare ─▶ one request of the minute ─▶ ... tokenized ─▶ begin ─▶ a place, and prompt + output tokens ─▶ runs
                    │ 429 before any work                      │ 429                                          │
                                                                              what was not used goes back ◀─ end

Where nothing is limited, none of this costs anything. Lines of batch jobs take tokens alone, and wait for them
instead of being refused: what a job may do at a time is its lane's business, what it costs is its owner's. Clients see
limits in OpenAI's headers and words.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from services.gateway.auth.authenticator import Principal
from services.gateway.core.errors import RateLimited
from services.gateway.core.settings import GatewaySettings
from services.gateway.ratelimit import window as windows
from services.gateway.ratelimit.concurrency import TELL, ConcurrencyCounts
from services.gateway.ratelimit.shared_windows import SharedWindows
from shared.errors import RyzansteinError
from shared.keys import KeyLimits
from shared.messages import Lane
from shared.messages.records import InUse
from shared.nats import subjects
from shared.nats.bus import Bus

CONCURRENT_WAIT = 1.0  # seconds after which a place may be free: nobody knows when a generation ends

BATCH_WAIT = 1.0  # seconds after which a batch line looks again for tokens: others may have given some back


NO_LIMITS = KeyLimits()


class LimitScope(NamedTuple):
    """Whom limits are for."""

    name: str
    whose: str  # in words
    limits: KeyLimits


class Use(msgspec.Struct, frozen=True):
    """What of a limit is used by all gateways together; what they have taken ahead of need counts for a second."""

    limit: int
    used: int
    remaining: int


class LimitsInUse(msgspec.Struct, frozen=True):
    """null: no limit."""

    requests_per_minute: Use | None = None
    tokens_per_minute: Use | None = None
    concurrent: Use | None = None  # generations at the same time


class Limiter:
    """One per gateway. Opened by `start`."""

    def __init__(self, bus: Bus, gateway: str, settings: GatewaySettings) -> None:
        self._bus = bus
        self._default = KeyLimits(
            settings.requests_per_minute, settings.tokens_per_minute, settings.concurrent_generations
        )
        self._tenant = KeyLimits(
            settings.tenant_requests_per_minute,
            settings.tenant_tokens_per_minute,
            settings.tenant_concurrent_generations,
        )
        self._unlimited = self._default == self._tenant == NO_LIMITS
        self.windows = SharedWindows(bus)
        self.counts = ConcurrencyCounts(gateway)
        self._in_use = asyncio.Event()  # set by whoever takes a place

    async def start(self) -> None:
        await self.windows.bucket.ensure()
        await self._bus.subscribe(subjects.IN_USE, InUse, self._hear)

    async def run(self) -> None:
        """Tells the other gateways what is in use here. Runs until it is cancelled."""
        while True:
            await self._in_use.wait()
            await asyncio.sleep(TELL)
            news = self.counts.news(time.monotonic())
            if news is not None:
                with contextlib.suppress(RyzansteinError):  # it is told again
                    await self._bus.publish(subjects.IN_USE, news)
            if self.counts.quiet:
                self._in_use.clear()

    def take_place(self, limits: dict[str, int]) -> tuple[str, int] | None:
        """As `ConcurrencyCounts.begin`."""
        self._in_use.set()
        return self.counts.begin(limits, time.monotonic())

    def admission(self, principal: Principal, lane: Lane, headers: dict[str, str]) -> "RequestAdmission | None":
        """For one request; None where nothing is limited. `headers` gets what the answer should say."""
        if self._unlimited and principal.limits == NO_LIMITS:
            return None
        scopes = [scope for scope in self.scopes(principal) if scope.limits != NO_LIMITS]
        return RequestAdmission(self, scopes, headers, batch=lane == "batch") if scopes else None

    def scopes(self, principal: Principal) -> Iterator[LimitScope]:
        """Its key, then its tenant, with the limits that hold for them."""
        own, default = principal.limits, self._default
        limits = KeyLimits(
            own.requests_per_minute or default.requests_per_minute,
            own.tokens_per_minute or default.tokens_per_minute,
            own.concurrent or default.concurrent,
        )
        key, tenant = principal.key, principal.tenant
        if key or not tenant:
            whose = f"API key rz-{key}" if key else "all requests without an API key"
            yield LimitScope(f"key/{key}", whose, limits)
        if tenant:
            yield LimitScope(f"tenant/{tenant}", f"tenant {tenant}", self._tenant)

    async def in_use(self, scope: LimitScope) -> LimitsInUse:
        """Raises `BrokerUnavailable`."""
        limits = scope.limits
        return LimitsInUse(
            await self._window_use(f"{scope.name}/requests", limits.requests_per_minute),
            await self._window_use(f"{scope.name}/tokens", limits.tokens_per_minute),
            _use(limits.concurrent, self.counts.count(scope.name, time.monotonic())),
        )

    async def _window_use(self, name: str, limit: int) -> Use | None:
        entry = await self.windows.bucket.get(name) if limit else None
        return _use(limit, windows.used(entry.value, time.time()) if entry else 0)

    async def _hear(self, news: InUse) -> None:
        self.counts.hear(news, time.monotonic())


def _use(limit: int, used: int) -> Use | None:
    return Use(limit, used, max(0, limit - used)) if limit else None


class _Taken(NamedTuple):
    """Tokens or requests of a window."""

    name: str
    limit: int
    second: int
    amount: int


class RequestAdmission:
    """Of one request: `request`, then `begin`, then `end`, whatever happened after `begin`."""

    def __init__(self, limiter: Limiter, scopes: list[LimitScope], headers: dict[str, str], *, batch: bool) -> None:
        self._limiter = limiter
        self._windows = limiter.windows
        self._scopes = scopes
        self._headers = headers
        self._batch = batch
        self._tokens: list[_Taken] = []
        self._places: dict[str, int] = {}

    async def request(self) -> None:
        """Counts it. Raises `RateLimited`, `BrokerUnavailable`."""
        if not self._batch:
            await self._take("requests", 1)

    async def begin(self, tokens: int) -> None:
        """Takes a place, and as many tokens as it may come to. Raises as `request`."""
        self._take_place()
        try:
            while True:
                try:
                    self._tokens = await self._take("tokens", tokens)
                except RateLimited as error:
                    if not self._batch or not error.retry_after:
                        raise
                    await asyncio.sleep(min(error.wait, BATCH_WAIT))
                else:
                    return
        except BaseException:
            self.end(0)
            raise

    def end(self, tokens: int) -> None:
        """`tokens` is what it has come to. Twice is safe."""
        taken, self._tokens = self._tokens, []
        for name, limit, second, amount in taken:
            self._windows.account(name, limit).settle(second, amount, tokens)
        places, self._places = self._places, {}
        if places:
            self._limiter.counts.end(places)

    def _take_place(self) -> None:
        limits = {scope.name: scope.limits.concurrent for scope in self._scopes if scope.limits.concurrent}
        if self._batch or not limits:
            return
        full = self._limiter.take_place(limits)
        if full is None:
            self._places = limits
            return
        name, count = full
        whose = next(scope.whose for scope in self._scopes if scope.name == name)
        raise reached("concurrent", whose, limit=limits[name], used=count, requested=1, wait=CONCURRENT_WAIT)

    async def _take(self, what: str, amount: int) -> list[_Taken]:
        """Of the key's window and of the tenant's, or of none."""
        taken: list[_Taken] = []
        try:
            for scope in self._scopes:
                limit = getattr(scope.limits, f"{what}_per_minute")
                if limit:
                    taken.append(await self._take_of(scope, what, limit, amount))
        except RyzansteinError:
            for name, limit, second, _ in taken:
                self._windows.account(name, limit).settle(second, amount, 0)
            raise
        finally:
            self._show(what)
        return taken

    async def _take_of(self, scope: LimitScope, what: str, limit: int, amount: int) -> _Taken:
        if amount > limit:
            raise too_large(scope.whose, limit=limit, requested=amount)
        name = f"{scope.name}/{what}"
        second, wait = await self._windows.spend(name, limit, amount)
        if second is None:
            used = limit - self._windows.account(name, limit).remaining(time.time())
            wait = max(wait, 0.05)
            raise reached(what, scope.whose, limit=limit, used=used, requested=amount, wait=wait)
        return _Taken(name, limit, second, amount)

    def _show(self, what: str) -> None:
        """The headers of the limit that is nearest."""
        now, nearest = time.time(), None
        for scope in self._scopes:
            limit = getattr(scope.limits, f"{what}_per_minute")
            if limit:
                account = self._windows.account(f"{scope.name}/{what}", limit)
                remaining = account.remaining(now)
                if nearest is None or remaining < nearest[1]:
                    nearest = limit, remaining, windows.clear_in(account.window, now)
        if nearest is not None:
            self._headers.update(limit_headers(what, *nearest))


_WORDS = {
    "requests": ("requests per min (RPM)", "requests"),
    "tokens": ("tokens per min (TPM)", "tokens"),
    "concurrent": ("concurrent requests", "requests"),
}


def duration(seconds: float) -> str:
    """As OpenAI writes it: `120ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    tenths = math.ceil(seconds * 10)
    if tenths < 600:
        return f"{tenths / 10:g}s"
    whole = math.ceil(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return (f"{hours}h" if hours else "") + f"{minutes}m{whole % 60}s"


def limit_headers(what: str, limit: int, remaining: int, reset: float) -> dict[str, str]:
    """`what`: requests or tokens; `reset`: seconds until nothing is counted any more."""
    return {
        f"x-ratelimit-limit-{what}": str(limit),
        f"x-ratelimit-remaining-{what}": str(max(0, min(limit, remaining))),
        f"x-ratelimit-reset-{what}": duration(reset),
    }


def reached(what: str, whose: str, *, limit: int, used: int, requested: int, wait: float) -> RateLimited:
    """Too much within this minute, or at this moment; `wait`: seconds after which it may be tried again."""
    words, kind = _WORDS[what]
    return RateLimited(
        f"Rate limit reached for {whose} on {words}: Limit {limit}, Used {used}, Requested {requested}. "
        f"Please try again in {duration(wait)}.",
        kind=kind,
        wait=wait,
    )


def too_large(whose: str, *, limit: int, requested: int) -> RateLimited:
    """No minute has room for this request."""
    return RateLimited(
        f"Request too large for {whose} on tokens per min (TPM): Limit {limit}, Requested {requested}. "
        "The input or output tokens must be reduced in order to run successfully.",
        kind="tokens",
    )
