"""The LoRA adapters in NATS KV, as a gateway sees and changes them (ADR 0029).

    KV `adapters`    name ──▶ record: base, digest     resolve: a request gets base and digest, and keeps them
                     put    the name gets another digest; the one before is retired
                     remove the name is gone; its digest is retired
    sweep            files of digests that were retired long ago, and that no name has, are deleted

A generation keeps the digest that it began with, on whichever ring goes on with it, so files outlive their name: for
`retention` seconds, longer than a generation can be taken up again.
"""

import asyncio
import time
from collections.abc import Iterator

import msgspec
import structlog

from services.gateway.core.errors import RouteError
from shared.errors import RyzansteinError, Unavailable
from shared.messages.registry import MAX_ADAPTERS, AdapterRecord
from shared.nats import subjects
from shared.nats.adapters import MAX_RETIRED, AdapterFiles, AdapterRefused, register, unregister
from shared.nats.bus import Bus
from shared.nats.kv import Bucket, Entry

log = structlog.get_logger(__name__)

MAX_PER_MODEL = 4096
RETENTION_FACTOR = 2.0
"""Of the journal's age, for how long retired files stay."""
SWEEP_INTERVAL = 300.0
_NEAR = 512


class AdapterRegistry:
    """A live copy of what is registered, and the writes to it. Writes raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus, retention: float) -> None:
        """`retention`: seconds for which files stay that no name has any more."""
        self._bus = bus
        self._retention = retention
        self._files = AdapterFiles(bus)
        self._entries: dict[str, AdapterRecord] = {}
        self.records: dict[str, AdapterRecord] = {}
        """By name; without those that were unloaded."""
        self.wanted: dict[str, AdapterRecord] = {}
        """By name: those that are declared and that no host has read yet."""
        self._per_model: dict[str, int] = {}
        self.changed = asyncio.Event()
        """Set when another name may be listed than before."""
        self._caught_up = asyncio.Event()

    def of_model(self, model: str) -> list[AdapterRecord]:
        """By name."""
        return sorted((one for one in self.records.values() if one.model == model), key=lambda one: one.name)

    def entries_of(self, tenant: str) -> Iterator[AdapterRecord]:
        """All that is known of a tenant's own, those that were unloaded and whose files still stay among them."""
        return (record for record in self._entries.values() if record.tenant == tenant)

    def seen_by(self, tenant: str | None) -> Iterator[AdapterRecord]:
        """Those that a tenant may use: everybody's, and its own. None: of nobody in particular."""
        return (record for record in self.records.values() if is_seen(record, tenant))

    def find(self, name: str, tenant: str | None) -> AdapterRecord | None:
        """The adapter of that name, if the tenant may use it; to others it is as if there were none."""
        record = self.records.get(name)
        return record if record is not None and is_seen(record, tenant) else None

    def near(self, name: str, tenant: str | None) -> list[str]:
        """Names that begin as `name` does, for somebody who has mistyped it; not all of very many."""
        found = (one.name for one in self.seen_by(tenant) if one.name[:1].lower() == name[:1].lower())
        return [known for _, known in zip(range(_NEAR), found, strict=False)]

    async def wait(self) -> None:
        """Until everything present in the bucket has been read once."""
        await self._caught_up.wait()

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        async for update in (await self._bucket()).watch():
            if update is None:
                self._caught_up.set()
            else:
                self._set(*update)

    def _set(self, name: str, record: AdapterRecord | None) -> None:
        if (before := self.records.pop(name, None)) is not None:
            self._per_model[before.model] -= 1
            if not self._per_model[before.model]:
                del self._per_model[before.model]
        self._entries.pop(name, None)
        self.wanted.pop(name, None)
        if record is not None:
            self._entries[name] = record
            if record.wanted is not None and not record.digest:
                self.wanted[name] = record
            if record.digest:
                self.records[name] = record
                self._per_model[record.model] = self._per_model.get(record.model, 0) + 1
        self.changed.set()

    # --- changing --------------------------------------------------------------------------------

    def check_room(self, name: str, model: str) -> None:
        """Raises `RouteError` where the registry takes no further adapter."""
        if name in self.records:
            return
        for count, most, of in (
            (len(self._entries), MAX_ADAPTERS, "There"),
            (self._per_model.get(model, 0), MAX_PER_MODEL, f"Of the model '{model}' there"),
        ):
            if count >= most:
                raise RouteError(
                    f"{of} are {count:,} LoRA adapters and may be no more; unload one first (limit {most:,}, fixed).",
                    status=409,
                    reason="too_many_adapters",
                    param="lora_name",
                )

    async def put(self, record: AdapterRecord, *, replace: bool) -> AdapterRecord:
        """Registers `record`; with `replace` also where the name has one, whose digest is retired then. Raises
        `RouteError`."""
        try:
            new = await register(await self._bucket(), record, replace=replace)
        except AdapterRefused as refused:
            raise self._refusal(record.name, refused) from None
        self._set(record.name, new)
        log.info("adapter_registered", adapter=record.name, model=record.model, digest=record.digest)
        return new

    async def remove(self, name: str) -> AdapterRecord:
        """Unloads an adapter: what runs with it goes on. Raises `RouteError` where there is none of that name."""
        try:
            gone = await unregister(await self._bucket(), name)
        except AdapterRefused as refused:
            raise self._refusal(name, refused) from None
        self._set(name, gone)
        log.info("adapter_unregistered", adapter=name, model=gone.model)
        return gone

    def _refusal(self, name: str, refused: AdapterRefused) -> RouteError:
        if refused.reason == "exists":
            return already_loaded(name)
        if refused.reason == "missing":
            return not_found(name)
        return RouteError(
            f"The adapter '{name}' was replaced {MAX_RETIRED} times in {self._retention:.0f} seconds, and generations "
            "may still need what it was; wait, or use another name.",
            status=409,
            reason="replaced_too_often",
            param="lora_name",
        )

    async def _bucket(self) -> Bucket[AdapterRecord]:
        return await Bucket.open(self._bus, subjects.ADAPTERS_BUCKET, AdapterRecord)

    # --- files that nobody needs -----------------------------------------------------------------

    async def run(self) -> None:
        """Sweeps now and then, until it is cancelled. Several gateways may do it at once."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL)
            try:
                await self.sweep(time.time())
            except RyzansteinError as error:
                log.warning("adapters_not_swept", error=str(error))

    async def sweep(self, now: float) -> None:
        """Deletes the files of digests that were retired before `now` (unix seconds) less the retention, unless a name
        has them; forgets names that have nothing left."""
        before = now - self._retention
        for name, record in list(self._entries.items()):
            late = [one for one in record.retired if one[1] < before]
            if not late:
                continue
            for digest, _ in late:
                if not self._needed(digest, before):
                    await self._files.delete(digest)
                    log.info("adapter_files_deleted", adapter=name, digest=digest)
            await self._forget(name, {digest for digest, _ in late})

    def _needed(self, digest: str, before: float) -> bool:
        return any(
            record.digest == digest or any(one[0] == digest and one[1] >= before for one in record.retired)
            for record in self._entries.values()
        )

    async def _forget(self, name: str, digests: set[str]) -> None:
        def made(known: Entry[AdapterRecord] | None) -> AdapterRecord | None:
            if known is None:
                return None
            left = [one for one in known.value.retired if one[0] not in digests]
            held = known.value.digest or known.value.wanted or left
            return msgspec.structs.replace(known.value, retired=left) if held else None

        after = (await (await self._bucket()).change(name, made)).after
        self._set(name, None if after is None else after.value)


def is_seen(record: AdapterRecord, tenant: str | None) -> bool:
    """Whether a tenant may know of an adapter."""
    return record.tenant is None or record.tenant == tenant


def not_read(record: AdapterRecord) -> Unavailable:
    """Of an adapter that is declared and that no host has read yet."""
    why = "" if record.wanted is None else record.wanted.error
    said = (
        f"could not be read so far: {why}"
        if why
        else f"is read as soon as a host has its base, '{record.model}'."
    )
    return Unavailable(
        f"The adapter '{record.name[:128]}' is declared and {said}", retry_after=5, param="model"
    )


def already_loaded(name: str) -> RouteError:
    """vLLM's words."""
    return RouteError(
        f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
        "'load_inplace' to True.",
        status=400,
        reason="adapter_already_loaded",
        param="lora_name",
    )


def not_found(name: str) -> RouteError:
    """vLLM's words."""
    return RouteError(
        f"The lora adapter '{name[:128]}' cannot be found.",
        status=404,
        reason="adapter_not_found",
        param="lora_name",
    )
