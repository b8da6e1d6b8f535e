"""The files of LoRA adapters in the object store `adapters`, as peft writes them, by the digest of their content.

    <digest>/adapter_model.safetensors
    <digest>/adapter_config.json          written last and deleted first: an adapter without it is not whole

What is there never changes: another content has another digest. Names stand in the KV bucket `adapters`; a name that
gets another digest, or none, keeps what it stood for as retired, so that somebody can delete those files later.

Who needs files holds them, under their digest in the KV bucket `adapter_files`: every change there is a
compare-and-set, so that equal files of two jobs or names go with the last one that needs them.

    put       holder added ──▶ not whole: files written ──▶ whole
    release   what is there is seen ──▶ the last holder removed, not whole ──▶ what was seen is deleted ──▶ forgotten

Whoever holds files after the last holder has gone finds them not whole, and writes them again: the deletion, however
late, takes only what was seen before.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import structlog

from shared.errors import (
    BrokerUnavailable,
    InternalError,
    LinkLost,
    ModelNotStored,
    NobodyThere,
    PayloadTooLarge,
    StorageFull,
)
from shared.messages.registry import AdapterHolders, AdapterRecord, HostReply, PullAdapter, WantedAdapter, is_digest
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket, Contention, KvChange, KvEntry
from shared.nats.objects import CHUNK, MissingObject, Objects, StoredVersion

log = structlog.get_logger(__name__)

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
CONFIG_BYTES = 1 << 20
MAX_BYTES = 8 << 30  # of one adapter's weights
PATIENCE = 30.0  # seconds for which a file is read on while the broker is away
FIRST_REPEAT = 5.0  # seconds after which a host is asked again to read an adapter, each time twice as many


async def ask_to_read(bus: Bus, host: str, command: PullAdapter, *, timeout: float) -> HostReply:
    """What the host says of the adapter within `timeout` seconds. It is asked again meanwhile: one that reads it goes
    on, and one that has ended and begun anew knows nothing of it. Raises `NobodyThere`, `BrokerUnavailable`."""
    give_up, pause = time.monotonic() + timeout, FIRST_REPEAT
    while True:
        left = give_up - time.monotonic()
        try:
            patience = max(0.0, min(pause, left))
            return await bus.request(subjects.host_control(host), command, HostReply, timeout=patience)
        except (NobodyThere, LinkLost):
            raise
        except BrokerUnavailable:
            if left <= pause:
                raise
        pause *= 2


async def read_by_first(
    bus: Bus, hosts: Iterable[str], command: PullAdapter, *, timeout: float
) -> AdapterRecord | HostReply | None:
    """What the first of `hosts` that has the base of an adapter has read, as it is to be registered, or that host's
    refusal; None: no host has the base. `timeout`: seconds for each. Raises `BrokerUnavailable`."""
    for host in hosts:
        try:
            reply = await ask_to_read(bus, host, command, timeout=timeout)
        except NobodyThere:
            continue
        if reply.ok and reply.adapter is not None and is_digest(reply.adapter.digest):
            return msgspec.structs.replace(
                reply.adapter, name=command.name, model=command.model, created=int(time.time()), retired=[]
            )
        if reply.code != ModelNotStored.code:
            return reply
    return None


class AdapterFiles:
    """Methods raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus) -> None:
        most = bus.settings.adapters_max_bytes
        self._objects = Objects(bus, subjects.ADAPTERS_STORE, max_bytes=most, setting="RYZANSTEIN_ADAPTERS_MAX_BYTES")

        self._holders = Bucket(bus, subjects.ADAPTER_FILES_BUCKET, AdapterHolders, plain=True)

    async def open(self) -> None:
        """Creates the store and the bucket where they do not exist."""
        await self._objects.open()
        await self._holders.ensure()

    async def has(self, digest: str) -> bool:
        """Whether all of an adapter's files are there."""
        return await self._objects.info(f"{digest}/{CONFIG}") is not None

    async def put(self, digest: str, directory: Path, holder: str) -> None:
        """Stores the files in `directory`, which have that digest, and holds them; what is there already is no error.

        Raises `StorageFull`, `PayloadTooLarge`, `OSError`."""
        if await self.hold(digest, holder) and await self.has(digest):
            return
        try:
            for name, limit in ((WEIGHTS, MAX_BYTES), (CONFIG, CONFIG_BYTES)):
                with await asyncio.to_thread((directory / name).open, "rb") as file:
                    nuid = f"{digest}.{secrets.token_hex(11)}"
                    await self._objects.write(f"{digest}/{name}", _parts_of(file), nuid=nuid, limit=limit)
        except (StorageFull, PayloadTooLarge, OSError):
            with contextlib.suppress(BrokerUnavailable):
                await self.release(digest, holder)
            raise
        await self._holders.change(digest, _made_whole)

    # --- who needs them --------------------------------------------------------------------------

    async def hold(self, digest: str, holder: str) -> bool:
        """The files stay until the holder releases them. Whether all of them are there."""
        now = time.time()

        def made(known: KvEntry[AdapterHolders] | None) -> AdapterHolders:
            held = AdapterHolders() if known is None else known.value
            return msgspec.structs.replace(held, holders={**held.holders, holder: now})

        change = await self._holders.change(digest, made)
        return change.before is not None and change.before.value.whole

    async def release(self, digest: str, holder: str, since: float | None = None) -> None:
        """The holder needs them no more; where nobody does they are deleted. `since`: only if it has held them since
        then, as `holders` says. No error where it does not hold them."""
        contention = Contention(f"the holders of the adapter {digest[:12]}")
        while True:
            known = await self._holders.get(digest)
            if known is None or (since is not None and known.value.holders.get(holder) != since):
                return
            left = {name: at for name, at in known.value.holders.items() if name != holder}
            if left and len(left) == len(known.value.holders):
                return
            seen = [] if left else await self._seen(digest)
            changed = AdapterHolders(left, known.value.whole and bool(left))
            revision = await self._holders.update(digest, changed, known.revision)
            if revision is not None:
                if not left:
                    await self._delete(digest, seen, revision)
                return
            contention.lost()

    async def holders(self) -> dict[str, AdapterHolders]:
        """Who holds files, by digest."""
        return await self._holders.items()

    async def _seen(self, digest: str) -> "list[StoredVersion | str]":
        """What is there of them: files, and chunks of writings that were cut off."""
        files = [await self._objects.version(f"{digest}/{name}") for name in (CONFIG, WEIGHTS)]
        return [*(file for file in files if file is not None), *await self._objects.writings(f"{digest}.")]

    async def _delete(self, digest: str, seen: "Iterable[StoredVersion | str]", revision: int) -> None:
        for one in seen:
            if isinstance(one, StoredVersion):
                await self._objects.delete_version(one)
            else:
                await self._objects.purge(one)
        await self._holders.purge(digest, before=revision + 1)  # unless somebody holds them again
        log.info("adapter_files_deleted", digest=digest)

    async def fetch(self, digest: str, directory: Path) -> None:
        """Writes an adapter's files into `directory`. Raises `MissingObject`, `PayloadTooLarge`, `InternalError` where
        they are not what was stored, and `OSError`."""
        for name, limit in ((CONFIG, CONFIG_BYTES), (WEIGHTS, MAX_BYTES)):
            parts = self._objects.read(f"{digest}/{name}", patience=PATIENCE)
            with await asyncio.to_thread((directory / name).open, "wb") as file:
                await _write(file, parts, limit)

    async def size(self, digest: str) -> int:
        """Bytes of its weights. Raises `MissingObject`."""
        info = await self._objects.info(f"{digest}/{WEIGHTS}")
        if info is None or not await self.has(digest):
            raise MissingObject(digest)
        return info.size

    async def file(self, digest: str, name: str) -> tuple[int, AsyncGenerator[bytes, None]]:
        """The size and the bytes of one of its files (`CONFIG`, `WEIGHTS`). Raises `MissingObject`; reading it raises
        that too, and `InternalError` where it is not what was stored."""
        info = await self._objects.info(f"{digest}/{name}")
        if info is None:
            raise MissingObject(digest)
        return info.size, self._objects.read(f"{digest}/{name}", patience=PATIENCE)


def name_holder(name: str) -> str:
    """As which a name of the registry holds files."""
    return f"name/{name}"


def job_holder(job: str, step: int | str) -> str:
    """As which a fine-tuning job holds those that it has made after a step."""
    return f"job/{job}/{step}"


def _made_whole(known: KvEntry[AdapterHolders] | None) -> AdapterHolders | None:
    if known is None or not known.value.holders:  # its holder has released them meanwhile
        return None if known is None else known.value
    return msgspec.structs.replace(known.value, whole=True)


async def _parts_of(file: BinaryIO) -> AsyncGenerator[bytes, None]:
    while part := await asyncio.to_thread(file.read, 8 * CHUNK):
        yield part


async def _write(file: BinaryIO, parts: AsyncIterable[bytes], limit: int) -> None:
    size = 0
    async for part in parts:
        size += len(part)
        if size > limit:
            raise PayloadTooLarge(f"{Path(file.name).name} has more than {limit:,} bytes; no adapter has.")
        await asyncio.to_thread(file.write, part)
    if not size:
        raise InternalError(f"{Path(file.name).name} is empty in the object store; load the adapter again.")


# --- names ---------------------------------------------------------------------------------------

MAX_RETIRED = 64  # digests that a name has had and whose files still stay; a further replacement has to wait


class AdapterRefused(Exception):
    """The registry stays as it is. `reason`: `exists`, `missing` or `replaced_too_often`."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.reason = reason


async def register(bucket: Bucket[AdapterRecord], record: AdapterRecord, *, replace: bool) -> AdapterRecord:
    """Registers `record` under its name; with `replace` also where there is one, whose digest is retired then. Returns
    what stands there now. Raises `AdapterRefused`, `BrokerUnavailable`."""

    def made(known: KvEntry[AdapterRecord] | None) -> AdapterRecord:
        if known is None:
            return record
        if known.value.digest and not replace:
            raise AdapterRefused(record.name, "exists")
        return msgspec.structs.replace(record, retired=_retired(known.value, record.digest))

    return _there(await bucket.change(record.name, made))


async def want(
    bucket: Bucket[AdapterRecord], name: str, wanted: WantedAdapter, origin: Literal["", "up", "file"]
) -> AdapterRecord:
    """Says what `name` is to stand for, and who has declared it: the scheduler that decides has a host read it, and
    until then it stands for what it stood for before. Returns what stands there now. Raises as `register`."""

    def made(known: KvEntry[AdapterRecord] | None) -> AdapterRecord:
        if known is None or not (known.value.digest or known.value.wanted):
            retired = [] if known is None else known.value.retired
            now = int(time.time())
            return AdapterRecord(
                name, wanted.model, wanted.source, "", 0, 0, now, retired, origin=origin, wanted=wanted
            )
        return msgspec.structs.replace(known.value, origin=origin, wanted=wanted)

    return _there(await bucket.change(name, made))


async def settle(bucket: Bucket[AdapterRecord], name: str, wanted: WantedAdapter, found: AdapterRecord | str) -> bool:
    """What has become of a wanted adapter: what a host has read, or why it could not. False: it is not wanted any more.
    Raises `AdapterRefused`, `BrokerUnavailable`."""

    def made(known: KvEntry[AdapterRecord] | None) -> AdapterRecord | None:
        if known is None or not same_wanted(known.value.wanted, wanted):
            return None if known is None else known.value
        if isinstance(found, str):
            return msgspec.structs.replace(known.value, wanted=msgspec.structs.replace(wanted, error=found))
        return msgspec.structs.replace(
            found,
            name=name,
            model=wanted.model,
            created=int(time.time()),
            retired=_retired(known.value, found.digest),
            origin=known.value.origin,
            wanted=None,
        )

    change = await bucket.change(name, made)
    return change.before != change.after


def same_wanted(left: WantedAdapter | None, right: WantedAdapter) -> bool:
    """Whether they are the same order, whatever became of it so far."""
    return left is not None and msgspec.structs.replace(left, error=right.error) == right


async def unregister(
    bucket: Bucket[AdapterRecord], name: str, may: Callable[[AdapterRecord], bool] = lambda record: True
) -> AdapterRecord:
    """Takes an adapter out of the registry: what runs with it goes on. `may`: whether who asks may know of it, as it is
    there then. Returns what stands there now. Raises as `register`."""

    def made(known: KvEntry[AdapterRecord] | None) -> AdapterRecord:
        if known is None or not (known.value.digest or known.value.wanted) or not may(known.value):
            raise AdapterRefused(name, "missing")
        retired = _retired(known.value, "")
        return msgspec.structs.replace(known.value, digest="", retired=retired, origin="", wanted=None)

    return _there(await bucket.change(name, made))


def _there(change: KvChange[AdapterRecord]) -> AdapterRecord:
    assert change.after is not None, "it was made"
    return change.after.value


def _retired(known: AdapterRecord, digest: str) -> list[tuple[str, int]]:
    """What `known` has retired, its own digest with it, now that it gets another one."""
    if known.digest == digest:
        return known.retired
    retired = [one for one in known.retired if one[0] not in (digest, known.digest)]
    if known.digest:
        retired.append((known.digest, int(time.time())))
    if len(retired) > MAX_RETIRED:
        raise AdapterRefused(known.name, "replaced_too_often")
    return retired
