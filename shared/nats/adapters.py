"""The files of LoRA adapters in the object store `adapters`, as peft writes them, by the digest of their content.

    <digest>/adapter_model.safetensors
    <digest>/adapter_config.json          written last and deleted first: an adapter without it is not whole

What is there never changes: another content has another digest. Names stand in the KV bucket `adapters`; a name that
gets another digest, or none, keeps what it stood for as retired, so that somebody can delete those files later.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from shared.errors import BrokerUnavailable, InternalError, LinkLost, NobodyThere, PayloadTooLarge
from shared.messages.registry import AdapterRecord, HostReply, PullAdapter, WantedAdapter
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket, Change, Entry
from shared.nats.objects import CHUNK, MissingObject, Objects

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
CONFIG_BYTES = 1 << 20
MAX_BYTES = 8 << 30
"""Of one adapter's weights."""
PATIENCE = 30.0
"""Seconds for which a file is read on while the broker is away."""
FIRST_REPEAT = 5.0
"""Seconds after which a host is asked again to read an adapter, each time twice as many."""


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


class AdapterFiles:
    """Methods raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus) -> None:
        most = bus.settings.adapters_max_bytes
        self._objects = Objects(
            bus, subjects.ADAPTERS_STORE, max_bytes=most, setting="RYZANSTEIN_ADAPTERS_MAX_BYTES"
        )

    async def open(self) -> None:
        """Creates the store where it does not exist."""
        await self._objects.open()

    async def has(self, digest: str) -> bool:
        """Whether all of an adapter's files are there."""
        return await self._objects.info(f"{digest}/{CONFIG}") is not None

    async def put(self, digest: str, directory: Path) -> None:
        """Stores the files in `directory`, which have that digest; what is there already is no error.

        Raises `StorageFull`, `PayloadTooLarge`, `OSError`."""
        if await self.has(digest):
            return
        for name, limit in ((WEIGHTS, MAX_BYTES), (CONFIG, CONFIG_BYTES)):
            with await asyncio.to_thread((directory / name).open, "rb") as file:
                nuid = secrets.token_hex(11)
                await self._objects.write(f"{digest}/{name}", _parts_of(file), nuid=nuid, limit=limit)

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

    async def delete(self, digest: str) -> None:
        """No error where it is gone."""
        for name in (CONFIG, WEIGHTS):
            await self._objects.delete(f"{digest}/{name}")


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

MAX_RETIRED = 64
"""Digests that a name has had and whose files still stay; a further replacement has to wait."""


class AdapterRefused(Exception):
    """The registry stays as it is. `reason`: `exists`, `missing` or `replaced_too_often`."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.reason = reason


async def register(bucket: Bucket[AdapterRecord], record: AdapterRecord, *, replace: bool) -> AdapterRecord:
    """Registers `record` under its name; with `replace` also where there is one, whose digest is retired then. Returns
    what stands there now. Raises `AdapterRefused`, `BrokerUnavailable`."""

    def made(known: Entry[AdapterRecord] | None) -> AdapterRecord:
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

    def made(known: Entry[AdapterRecord] | None) -> AdapterRecord:
        if known is None or not (known.value.digest or known.value.wanted):
            retired = [] if known is None else known.value.retired
            now = int(time.time())
            return AdapterRecord(
                name, wanted.model, wanted.source, "", 0, 0, now, retired, origin=origin, wanted=wanted
            )
        return msgspec.structs.replace(known.value, origin=origin, wanted=wanted)

    return _there(await bucket.change(name, made))


async def settle(
    bucket: Bucket[AdapterRecord], name: str, wanted: WantedAdapter, found: AdapterRecord | str
) -> bool:
    """What has become of a wanted adapter: what a host has read, or why it could not. False: it is not wanted any more.
    Raises `AdapterRefused`, `BrokerUnavailable`."""

    def made(known: Entry[AdapterRecord] | None) -> AdapterRecord | None:
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


async def unregister(bucket: Bucket[AdapterRecord], name: str) -> AdapterRecord:
    """Takes an adapter out of the registry: what runs with it goes on. Returns what stands there now. Raises as
    `register`."""

    def made(known: Entry[AdapterRecord] | None) -> AdapterRecord:
        if known is None or not (known.value.digest or known.value.wanted):
            raise AdapterRefused(name, "missing")
        retired = _retired(known.value, "")
        return msgspec.structs.replace(known.value, digest="", retired=retired, origin="", wanted=None)

    return _there(await bucket.change(name, made))


def _there(change: Change[AdapterRecord]) -> AdapterRecord:
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
