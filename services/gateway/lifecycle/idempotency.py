"""Idempotency keys: which generation a key stands for, on whatever gateway the request is repeated.

    unknown ──create──▶ {identity, fingerprint} ──▶ its generation runs, has finished: a repeat reads it
                              │ failed, cancelled, refused, or its gateway died before it was recorded
                              ▼
                            free: the next request under the key is a new one

The entry is created by compare-and-set before the request is handed in, so of several that arrive at once
one generates and the others read.
"""

import contextlib
import hashlib
import time

import msgspec

from services.gateway.core.errors import KeyReused
from shared.errors import BrokerUnavailable
from shared.messages.records import GenerationRecord, Idempotency
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket, KvEntry

# Seconds after which a key whose generation has no record stands for nothing: its gateway has died.
ABANDONED = 2.0
POLL = 0.05  # seconds between two looks for a record that is about to be written


def entry_name(tenant: str, endpoint: str, key: str) -> str:
    """The entry of `key`: every tenant and every endpoint has keys of its own."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (tenant, endpoint, key):
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


def fingerprint(body: bytes | msgspec.Raw) -> str:
    """The same for bodies that say the same, however they are written. `body` is JSON, or will be refused."""
    try:
        plain = msgspec.json.encode(msgspec.json.decode(body), order="deterministic")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        plain = bytes(body)
    return hashlib.blake2b(plain, digest_size=16).hexdigest()


class IdempotencyKeys:
    """`get` and `take` raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus, ttl: float) -> None:
        """`ttl`: seconds that a key is known."""
        self.bucket = Bucket(bus, subjects.IDEMPOTENCY_BUCKET, Idempotency, ttl=ttl)

    async def get(self, name: str, print_: str) -> KvEntry[Idempotency] | None:
        """What the key stands for. Raises `KeyReused` when its body was another one."""
        entry = await self.bucket.get(name)
        if entry is not None and entry.value.fingerprint != print_:
            raise KeyReused(
                "This Idempotency-Key was used with another request body; use a new key for another request.",
                param="Idempotency-Key",
            )
        return entry

    async def take(self, name: str, identity: str, print_: str, stale: KvEntry[Idempotency] | None) -> bool:
        """Lets the key stand for `identity`; False when another request was first. `stale`: an entry that
        stands for nothing any more."""
        value = Idempotency(identity, print_, time.time())
        if stale is None:
            return await self.bucket.create(name, value) is not None
        return await self.bucket.update(name, value, stale.revision) is not None

    async def free(self, record: GenerationRecord) -> None:
        """The generation of `record` has failed: a repeat is a new request. Without the broker the entry stays: whoever
        repeats the request finds that its generation has failed, or was never recorded, and takes the key."""
        with contextlib.suppress(BrokerUnavailable):
            entry = await self.bucket.get(record.idempotency)
            if entry is not None and entry.value.identity == record.identity:
                await self.bucket.delete(record.idempotency)
