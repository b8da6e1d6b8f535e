"""The LoRA adapters in NATS KV, as a gateway sees and changes them (ADR 0029).

    KV `adapters`    name ──▶ record: base, digest     resolve: a request gets base and digest, and keeps them
                     put    the name holds the files, and gets another digest; the one before is retired
                     remove the name is gone; its digest is retired
    sweep            what was retired long ago is forgotten, and names release files that they do not stand for

A generation keeps the digest that it began with, on whichever ring goes on with it, so files outlive their name: for
`retention` seconds, longer than a generation can be taken up again. Files go with the last one who holds them
(`shared/nats/adapters.py`), whatever a gateway knows of the others.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping

import msgspec
import structlog

from services.gateway.core.errors import RouteError
from services.gateway.core.registry import LookUps
from shared.errors import RyzansteinError, Unavailable
from shared.messages.registry import MAX_ADAPTERS, AdapterHolders, AdapterRecord
from shared.nats import subjects
from shared.nats.adapters import (
    MAX_RETIRED,
    AdapterFiles,
    AdapterRefused,
    job_holder,
    name_holder,
    register,
    unregister,
)
from shared.nats.bus import Bus
from shared.nats.kv import Bucket, KvEntry
from shared.nats.training import KEEP

log = structlog.get_logger(__name__)

MAX_PER_MODEL = 4096
RETENTION_FACTOR = 2.0  # of the journal's age, for how long retired files stay
SWEEP_INTERVAL = 300.0
JOB_HOLDS = KEEP  # seconds after which a fine-tuning job holds files no more, whatever became of it
_NEAR = 512


class AdapterRegistry:
    """A live copy of what is registered, and the writes to it. Writes raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus, retention: float) -> None:
        """`retention`: seconds for which files stay that no name has any more."""
        self._bus = bus
        self._retention = retention
        self._files = AdapterFiles(bus)
        self._entries: dict[str, AdapterRecord] = {}
        self.records: dict[str, AdapterRecord] = {}  # by name; without those that were unloaded
        # By name: those that are declared and that no host has read yet.
        self.wanted: dict[str, AdapterRecord] = {}
        self._per_model: dict[str, int] = {}
        self.changed = asyncio.Event()  # set when another name may be listed than before
        self._caught_up = asyncio.Event()
        self._look_ups = LookUps()

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

    async def look_up(self, name: str) -> bool:
        """Reads the entry of `name` itself. Whether there is one; False also where that cannot be said."""
        entry = await self._look_ups.entry(self._bucket, name)
        if entry is not None:
            self._set(name, entry.value)
        return entry is not None

    def near(self, name: str, tenant: str | None) -> list[str]:
        """Names that begin as `name` does, for somebody who has mistyped it; not all of very many."""
        found = (one.name for one in self.seen_by(tenant) if one.name[:1].lower() == name[:1].lower())
        return [known for _, known in zip(range(_NEAR), found, strict=False)]

    async def wait(self) -> None:
        """Until everything present in the bucket has been read once."""
        await self._caught_up.wait()

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        await (await self._bucket()).follow(self._set, self._caught_up.set)

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
        await self._files.open()
        await self._files.hold(record.digest, name_holder(record.name))
        try:
            new = await register(await self._bucket(), record, replace=replace)
        except AdapterRefused as refused:
            raise self._refusal(record.name, refused) from None
        self._set(record.name, new)
        log.info("adapter_registered", adapter=record.name, model=record.model, digest=record.digest)
        return new

    async def remove(self, name: str, tenant: str | None) -> AdapterRecord:
        """Unloads an adapter: what runs with it goes on. Raises `RouteError` where there is none of that name that the
        tenant may know of."""
        try:
            gone = await unregister(await self._bucket(), name, lambda record: is_seen(record, tenant))
        except AdapterRefused as refused:
            raise self._refusal(name, refused) from None
        self._set(name, gone)
        log.info("adapter_unregistered", adapter=name, model=gone.model)
        return gone

    async def discard(self, name: str, tenant: str) -> None:
        """Unloads one, and its files go at once if nobody else holds them: a generation that another ring takes over
        ends with an error then. Raises `RouteError` as `remove`."""
        gone = await self.remove(name, tenant)
        await self._forget(name, time.time() + 1.0)
        for digest, _ in gone.retired:
            await self._files.release(digest, name_holder(name))

    async def release_job(self, job: str) -> None:
        """A fine-tuning job that is over holds no files any more; names hold theirs."""
        await self._files.open()
        mine = job_holder(job, "")
        for digest, held in (await self._files.holders()).items():
            for holder in held.holders:
                if holder.startswith(mine):
                    await self._files.release(digest, holder)

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
        await self.wait()
        while True:
            await asyncio.sleep(SWEEP_INTERVAL)
            try:
                await self.sweep(time.time())
            except RyzansteinError as error:
                log.warning("adapter_cleanup_failed", error=str(error))

    async def sweep(self, now: float) -> None:
        """Forgets what was retired before `now` (unix seconds) less the retention, and names that have nothing left;
        then releases files for those who have held them for longer than that and need them no more. Who has begun to
        hold files since then may be about to register them."""
        before = now - self._retention
        await self._files.open()
        known = await self._files.holders()
        for name, record in list(self._entries.items()):
            if any(at < before for _, at in record.retired):
                await self._forget(name, before)
        await self._hold_registered(known)
        for digest, held in known.items():
            old = {holder: at for holder, at in held.holders.items() if at < before}
            for holder, at in old.items():
                if not self._needs(holder, digest, at, now):
                    await self._files.release(digest, holder, at)
            if not held.holders:  # whoever was to delete them has died
                await self._files.release(digest, "")

    async def _hold_registered(self, known: Mapping[str, AdapterHolders]) -> None:
        """Files of names that versions before have registered, which held nothing."""
        for name, record in list(self._entries.items()):
            for digest in _digests_of(record):
                held = known.get(digest)
                if held is None or name_holder(name) not in held.holders:
                    await self._files.hold(digest, name_holder(name))

    def _needs(self, holder: str, digest: str, since: float, now: float) -> bool:
        kind, _, name = holder.partition("/")
        if kind != "name":  # a job releases its own; one that is forgotten by now was killed before it could
            return now - since < JOB_HOLDS
        record = self._entries.get(name)
        return record is not None and digest in _digests_of(record)

    async def _forget(self, name: str, before: float) -> None:
        """What the name has retired before then, in unix seconds."""

        def made(known: KvEntry[AdapterRecord] | None) -> AdapterRecord | None:
            if known is None:
                return None
            left = [one for one in known.value.retired if one[1] >= before]
            held = known.value.digest or known.value.wanted or left
            return msgspec.structs.replace(known.value, retired=left) if held else None

        after = (await (await self._bucket()).change(name, made)).after
        self._set(name, None if after is None else after.value)


def _digests_of(record: AdapterRecord) -> list[str]:
    """That it stands for, or did until lately."""
    return [*([record.digest] if record.digest else []), *(digest for digest, _ in record.retired)]


def is_seen(record: AdapterRecord, tenant: str | None) -> bool:
    """Whether a tenant may know of an adapter."""
    return record.tenant is None or record.tenant == tenant


def not_read(record: AdapterRecord) -> Unavailable:
    """Of an adapter that is declared and that no host has read yet."""
    why = "" if record.wanted is None else record.wanted.error
    said = f"could not be read so far: {why}" if why else f"is read as soon as a host has its base, '{record.model}'."
    return Unavailable(f"The adapter '{record.name[:128]}' is declared and {said}", retry_after=5, param="model")


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
        f"The lora adapter '{name[:128]}' cannot be found.", reason="adapter_not_found", param="lora_name"
    )
