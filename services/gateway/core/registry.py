"""The registry of models in NATS KV, as a gateway sees and changes it (ADR 0029).

KV `registry`    what is wanted   ──▶ specs, aliases ◀── put, delete, ask: by compare-and-set
KV `hosts`       what hosts have  ──▶ hosts
KV `placements`  what is planned  ──▶ placements
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

import msgspec

from services.gateway.core.errors import RouteError
from shared.errors import BrokerUnavailable
from shared.messages import HostRecord, ModelPlacement, ModelSpec
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket, KvEntry
from shared.registry_view import RegistryView, fold

T = TypeVar("T")
E = TypeVar("E", bound=msgspec.Struct)

# At a time; names beyond that are as the watch has them. So names that nobody knows cost the broker little.
MOST_LOOK_UPS = 8
LONGEST_LOOKED_UP = 256  # characters of a name


class Changed(RouteError):
    """Somebody else was first."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The model '{name[:128]}' was changed by somebody else in the meantime; read it again and repeat the "
            "change.",
            status=412,
            reason="precondition_failed",
        )


class LookUps:
    """Entries of names that are not known here, read from their bucket: the watch may not have told of them yet, for
    another gateway has just written them, or the broker was away."""

    def __init__(self) -> None:
        self._running = 0

    async def entry(self, opened: Callable[[], Awaitable[Bucket[E]]], name: str) -> KvEntry[E] | None:
        """The entry of `name`; None also where that cannot be said."""
        if self._running >= MOST_LOOK_UPS or len(name) > LONGEST_LOOKED_UP:
            return None
        self._running += 1
        try:
            return await (await opened()).get(name)
        except BrokerUnavailable:
            return None
        finally:
            self._running -= 1


class ModelRegistry(RegistryView):
    """A live copy of what is registered, and the writes to it. Writes raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus) -> None:
        super().__init__()
        self._bus = bus
        self.revisions: dict[str, int] = {}  # by model: the revision that a conditional change names
        self.aliases: dict[str, str] = {}  # the model that each alias stands for
        self._news = asyncio.Event()
        self._caught_up = tuple(asyncio.Event() for _ in range(3))
        self._listeners: list[Callable[[str], None]] = []
        self._look_ups = LookUps()

    # --- what is known ---------------------------------------------------------------------------

    def on_change(self, told: Callable[[str], None]) -> None:
        """`told` gets the name of each model whose entry comes, changes or goes."""
        self._listeners.append(told)

    def model_of(self, name: str) -> str:
        """The model that `name`, which may be an alias, stands for."""
        return name if name in self.specs else self.aliases.get(name, name)

    @property
    def news(self) -> asyncio.Event:
        """Set when anything changes after it was got."""
        return self._news

    def tell(self) -> None:
        """Something has changed."""
        self._news.set()
        self._news = asyncio.Event()

    async def wait(self) -> None:
        """Until everything present in the buckets has been read once."""
        for event in self._caught_up:
            await event.wait()

    # --- following -------------------------------------------------------------------------------

    async def watch_specs(self) -> None:
        """Runs until it is cancelled, as the others."""
        bucket = await Bucket.open(self._bus, subjects.REGISTRY_BUCKET, ModelSpec)
        await bucket.follow_revisions(self.spec_changed, self._caught_up[0].set)

    async def watch_hosts(self) -> None:
        bucket = await Bucket.open(self._bus, subjects.HOSTS_BUCKET, HostRecord)
        await bucket.follow(lambda *update: self._note(self.hosts, *update), self._caught_up[1].set)

    async def watch_placements(self) -> None:
        bucket = await Bucket.open(self._bus, subjects.PLACEMENTS_BUCKET, ModelPlacement)
        await bucket.follow(lambda *update: self._note(self.placements, *update), self._caught_up[2].set)

    def _note(self, into: dict[str, T], key: str, record: T | None) -> None:
        fold(into, key, record)
        self.tell()

    def spec_changed(self, name: str, spec: ModelSpec | None, revision: int) -> None:
        """The entry of `name` is this now; None: there is none any more. Old news of what was written here is none."""
        if 0 < revision < self.revisions.get(name, 0):
            return
        fold(self.specs, name, spec)
        fold(self.revisions, name, None if spec is None else revision)
        self.aliases = {alias: one.name for one in self.specs.values() for alias in one.aliases}
        for told in self._listeners:
            told(name)
        self.tell()

    async def look_up(self, name: str) -> bool:
        """Reads the entry of `name` itself. Whether there is one; False also where that cannot be said."""
        entry = await self._look_ups.entry(self._bucket, name)
        if entry is not None:
            self.spec_changed(name, entry.value, entry.revision)
        return entry is not None

    # --- changing --------------------------------------------------------------------------------

    async def put(
        self, name: str, made: Callable[[ModelSpec | None], ModelSpec], *, revision: int | None = None
    ) -> tuple[ModelSpec, int, bool]:
        """Writes what `made` makes of the newest entry, again where others are first; `revision`: only over that one,
        0: only where there is none. Returns the entry, its revision, and whether it is new. Raises `Changed`, and what
        `made` raises."""

        def newest(known: KvEntry[ModelSpec] | None) -> ModelSpec:
            if revision is not None and revision != (known.revision if known is not None else 0):
                raise Changed(name)
            return made(known.value if known is not None else None)

        change = await (await self._bucket()).change(name, newest)
        assert change.after is not None, "an entry was made"
        self.spec_changed(name, change.after.value, change.after.revision)
        return change.after.value, change.after.revision, change.before is None

    async def change(
        self, name: str, made: Callable[[ModelSpec], ModelSpec], *, revision: int | None = None
    ) -> tuple[ModelSpec, int]:
        """As `put`, of an entry that is there. Raises `RouteError` where there is none too."""

        def newest(known: ModelSpec | None) -> ModelSpec:
            if known is None:
                raise not_registered(name)
            return made(known)

        return (await self.put(name, newest, revision=revision))[:2]

    async def ask(self, name: str, action: Literal["load", "unload"], *, force: bool = False) -> ModelSpec:
        """Says that the model is to be loaded or unloaded; the scheduler that decides acts. Raises as `change`."""
        now = time.time()
        spec, _ = await self.change(
            name, lambda known: msgspec.structs.replace(known, action=action, action_at=now, force=force)
        )
        return spec

    async def delete(self, name: str, *, revision: int | None = None) -> ModelSpec:
        """Removes the entry, and returns what it was. Raises as `change`."""

        def nothing(known: KvEntry[ModelSpec] | None) -> None:
            if known is None:
                raise not_registered(name)
            if revision is not None and revision != known.revision:
                raise Changed(name)

        change = await (await self._bucket()).change(name, nothing)
        assert change.before is not None, "there was one"
        self.spec_changed(name, None, 0)
        return change.before.value

    async def _bucket(self) -> Bucket[ModelSpec]:
        return await Bucket.open(self._bus, subjects.REGISTRY_BUCKET, ModelSpec)


def not_registered(name: str) -> RouteError:
    """The error for a name of which the registry has no entry."""
    return RouteError(
        f"The model '{name[:128]}' is not in the registry; GET /v1/registry/models shows what is.",
        reason="model_not_found",
        param="model",
    )
