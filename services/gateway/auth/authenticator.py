"""API keys: where a client puts one, whether it is good, and whose it is.

    unknown ──records read──▶ open, while there has never been a key ──first key──▶ closed, for good
       │ everything is refused (503)                                                  keys are asked for

Once closed it never opens again by itself, whatever becomes of the records. `KeyWatch` keeps an `Authenticator` up to
date with the KV bucket `api_keys`; the rest does no I/O.
"""

import asyncio
import contextlib
import hmac
import time
from collections.abc import Callable, Mapping

import msgspec

from services.gateway.core.asgi import request_headers
from services.gateway.core.errors import AuthenticationFailed
from shared.errors import BrokerUnavailable, Unavailable
from shared.keys import KeyLimits, KeyRecord, digest_of, parse
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.nats.permissions import may_create
from shared.nats.streams import messages_in
from shared.service.endpoints import OpsApp, Scope


class Principal(msgspec.Struct, frozen=True):
    """The owner of a key; what belongs to one tenant is not there for another."""

    key: str = ""  # id of the key; empty: nobody in particular, while no key exists
    tenant: str = ""
    limits: KeyLimits = KeyLimits()
    # Work that was accepted from this principal earlier: what becomes of its key since then stops it not.
    vouched: bool = False
    manage_models: bool = False  # as its key says, and so does `view_keys`
    view_keys: bool = False

    @property
    def manages_models(self) -> bool:
        """Whether it may say what is served: with a key of that right or, while no key exists, as everybody."""
        return self.manage_models or not self.key

    @property
    def views_keys(self) -> bool:
        """Whether it may see who has keys."""
        return self.view_keys or not self.key


ANONYMOUS = Principal()  # whoever asks before the first key exists


# Compared with where there is no record: an unknown id takes as long as a wrong secret.
_NOBODY = KeyRecord(bytes(32), "", 0.0)
_HOW = "in the header Authorization: Bearer YOUR_KEY; `ryzanstein keys create` makes one."


class Authenticator:
    """One per gateway."""

    def __init__(self, *, required: bool = False, clock: Callable[[], float] = time.time) -> None:
        """`required`: keys are asked for also before the first one exists. `clock` gives unix seconds."""
        self._records: dict[str, KeyRecord] = {}
        self._used: dict[str, float] = {}
        self._known = False
        self._closed = required
        self._clock = clock

    # --- from the bucket -------------------------------------------------------------------------

    def update(self, identity: str, record: KeyRecord | None) -> None:
        """A key has this record now; None: none any more."""
        if record is None:
            self._records.pop(identity, None)
            self._used.pop(identity, None)
            return
        self._records[identity] = record
        self._closed = True

    def complete(self) -> None:
        """Everything that was in the bucket has been given to `update`."""
        self._known = True

    @property
    def open(self) -> bool:
        """Whether everybody is let in, since there is no key yet."""
        return self._known and not self._closed

    @property
    def records(self) -> Mapping[str, KeyRecord]:
        """All keys by their id, those that are good no longer among them."""
        return self._records

    def used_at(self, identity: str) -> float | None:
        """When this key let somebody in here last; None: not since this gateway started."""
        return self._used.get(identity)

    # --- from requests ---------------------------------------------------------------------------

    def authenticate(self, token: str | None) -> Principal:
        """Who brings this key. Raises `AuthenticationFailed`, and `Unavailable` until the keys are known."""
        if not self._known:
            raise _unknown_yet()
        if not self._closed:
            return ANONYMOUS
        if not token:
            raise AuthenticationFailed(f"You didn't provide an API key. You need to provide it {_HOW}")
        identity, secret = parse(token) or ("", "")
        record = self._records.get(identity, _NOBODY)
        if not hmac.compare_digest(digest_of(secret), record.digest) or record is _NOBODY:
            raise AuthenticationFailed(f"Incorrect API key provided. Send a key that is valid {_HOW}")
        self._used[identity] = self._check_state(record)
        return Principal(
            identity, record.tenant, record.limits, manage_models=record.manage_models, view_keys=record.view_keys
        )

    def check(self, principal: Principal) -> None:
        """For a connection that was let in earlier: raises as `authenticate` where its key is good no longer."""
        if principal.vouched:
            return
        if not self._known:
            raise _unknown_yet()
        if not principal.key:
            if self._closed:
                self.authenticate(None)
            return
        record = self._records.get(principal.key)
        if record is None:
            raise AuthenticationFailed("The API key no longer exists; use another.")
        self._check_state(record)

    def vouched(self, key: str, tenant: str) -> Principal:
        """Whose work was accepted under the key `key` earlier, with the limits that the key has now."""
        record = self._records.get(key)
        if record is None or record.tenant != tenant:
            return Principal(key, tenant, vouched=True)
        return Principal(key, tenant, record.limits, vouched=True)

    def _check_state(self, record: KeyRecord) -> float:
        """Returns the time of the check."""
        now = self._clock()
        state = record.state(now)
        if state != "active":
            what = "was revoked" if state == "revoked" else "has expired"
            raise AuthenticationFailed(f"The API key provided {what}; use another.")
        return now


def _unknown_yet() -> Unavailable:
    return Unavailable(
        "The gateway is starting and does not know the API keys yet; try again in a moment.", retry_after=1
    )


# Answered without a key: what load balancers and Prometheus ask for. /metrics can be closed by a setting.
PUBLIC_PATHS = frozenset(OpsApp.paths)


def token_of(scope: Scope) -> str | None:
    """The key in `Authorization: Bearer`, else in `api-key` (Azure's clients) or `x-api-key` (Anthropic's)."""
    headers = request_headers(scope)
    scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    other = headers.get(b"api-key") or headers.get(b"x-api-key")
    return None if other is None else other.decode("latin-1")


LOOK = 1.0  # seconds between two looks for the bucket of keys, until it has one
_KEYS, _OLD_KEYS = f"KV_{subjects.KEYS_BUCKET}", f"KV_{subjects.OLD_KEYS_BUCKET}"


class KeyWatch:
    """A change reaches every gateway in the time of a message. While NATS is away, what was known last holds.

    Where gateways have rights of their own the bucket is made with the first key, which takes effect within `LOOK`.
    Until then the keys of an older release count, which `ryzanstein keys` copies to it.
    """

    def __init__(self, bus: Bus, authenticator: Authenticator) -> None:
        self._bus = bus
        self._authenticator = authenticator
        self._caught_up = asyncio.Event()

    async def run(self) -> None:
        """Runs until it is cancelled. Raises `BrokerUnavailable` where the broker is away at the start."""
        may_create_it = may_create(self._bus.settings.nats_user, _KEYS)
        if may_create_it:
            await Bucket.open(self._bus, subjects.KEYS_BUCKET, KeyRecord)
        nothing_older = may_create_it and not await messages_in(self._bus, _OLD_KEYS)
        if not nothing_older and not await messages_in(self._bus, _KEYS):
            older = asyncio.create_task(self._watch_older())
            try:
                while True:
                    if await self._made():
                        break
                    await asyncio.sleep(LOOK)
            finally:
                older.cancel()
                await asyncio.gather(older, return_exceptions=True)
        await self._watch(subjects.KEYS_BUCKET)

    async def _made(self) -> bool:
        with contextlib.suppress(BrokerUnavailable):
            return bool(await messages_in(self._bus, _KEYS))
        return False

    async def _watch_older(self) -> None:
        if await messages_in(self._bus, _OLD_KEYS):
            await self._watch(subjects.OLD_KEYS_BUCKET)
        self._complete()

    async def _watch(self, bucket: str) -> None:
        await Bucket(self._bus, bucket, KeyRecord).follow(self._authenticator.update, self._complete)

    def _complete(self) -> None:
        self._authenticator.complete()
        self._caught_up.set()

    async def wait(self) -> None:
        """Until every key that there is has been read once."""
        await self._caught_up.wait()
