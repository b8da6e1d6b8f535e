"""API keys for tests: made as the command line makes them, used as clients do."""

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec

from shared.keys import KeyRecord, NewKey, new_key
from shared.nats.kv import Bucket

if TYPE_CHECKING:
    from tests.integration.gateway.conftest import RunningGateway


class Keys:
    """What the command line does."""

    def __init__(self, bucket: Bucket[KeyRecord]) -> None:
        self.bucket = bucket

    async def make(self, tenant: str, **fields: Any) -> NewKey:
        """`fields`: as of `new_key`."""
        key = new_key(tenant, time.time(), **fields)
        await self.bucket.put(key.identity, key.record)
        return key

    async def revoke(self, key: NewKey) -> None:
        await self.bucket.put(key.identity, msgspec.structs.replace(key.record, revoked=time.time()))


def bearer(key: NewKey) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.token}"}


async def status(gateway: "RunningGateway", headers: dict[str, str], path: str = "/load") -> int:
    async with gateway.http() as http:
        return (await http.get(path, headers=headers)).status_code


async def changes_to(gateway: "RunningGateway", headers: dict[str, str], wanted: int) -> None:
    """Returns when requests are answered with that status."""
    began = time.monotonic()
    while await status(gateway, headers) != wanted:
        assert time.monotonic() - began < 10
        await asyncio.sleep(0.01)
