"""Keys of a release that kept them beside everything else: good until `ryzanstein keys` has copied them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from services.cli.commands.keys import open_keys
from services.gateway.auth.authenticator import Authenticator, KeyWatch
from services.gateway.core.errors import AuthenticationFailed
from shared.keys import KeyRecord, NewKey, new_key
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.integration.gateway.fake_ring import until


@pytest.fixture
async def older(bus: Bus) -> Bucket[KeyRecord]:
    return await Bucket.open(bus, subjects.OLD_KEYS_BUCKET, KeyRecord)


@contextlib.asynccontextmanager
async def watched(bus: Bus) -> AsyncIterator[Authenticator]:
    """An authenticator that follows the keys. It looks for older ones once, as it begins."""
    made = Authenticator()
    watching = asyncio.create_task(KeyWatch(bus, made).run())
    try:
        yield made
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def lets_in(authenticator: Authenticator, key: NewKey) -> bool:
    try:
        return authenticator.authenticate(key.token).key == key.identity
    except AuthenticationFailed:
        return False


async def test_they_are_good_until_they_are_copied_and_what_is_written_there_later_is_not(
    bus: Bus, older: Bucket[KeyRecord]
) -> None:
    first, forged, new = (new_key("acme", 1.0) for _ in range(3))
    await older.put(first.identity, first.record)
    async with watched(bus) as authenticator:
        await until(lambda: authenticator.records.keys() == {first.identity})
        await until(lambda: not authenticator.open and lets_in(authenticator, first))

        keys = await open_keys(bus)
        assert await keys.items() == {first.identity: first.record}
        await keys.put(new.identity, new.record)
        await until(lambda: lets_in(authenticator, new))  # it reads the other bucket now

        await older.put(forged.identity, forged.record)
        assert (await (await open_keys(bus)).items()).keys() == {first.identity, new.identity}
        await keys.delete(first.identity)
        await until(lambda: first.identity not in authenticator.records)
        assert authenticator.records.keys() == {new.identity}
        assert not lets_in(authenticator, forged)


async def test_a_copy_that_was_interrupted_goes_on(bus: Bus, older: Bucket[KeyRecord]) -> None:
    """Without what was deleted or changed since, and without what was written to the older bucket later."""
    deleted, revoked, left, forged = (new_key("acme", 1.0) for _ in range(4))
    for key in (deleted, revoked, left):
        await older.put(key.identity, key.record)
    keys = await Bucket.open(bus, subjects.KEYS_BUCKET, KeyRecord)
    for key in (deleted, revoked):  # here it is interrupted
        await keys.create(key.identity, key.record)
    await keys.delete(deleted.identity)
    now_revoked = msgspec.structs.replace(revoked.record, revoked=2.0)
    await keys.put(revoked.identity, now_revoked)
    await older.put(forged.identity, forged.record)
    for _ in range(2):
        assert await (await open_keys(bus)).items() == {revoked.identity: now_revoked, left.identity: left.record}


@pytest.mark.usefixtures("older")
async def test_without_any_key_everybody_is_let_in(bus: Bus) -> None:
    async with watched(bus) as authenticator:
        await until(lambda: authenticator.open)
