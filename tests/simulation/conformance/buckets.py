"""Operations by nats-py's KV buckets."""

from typing import Any

from nats.js.api import KeyValueConfig
from nats.js.kv import KeyValue

from shared.nats.bus import Bus
from tests.simulation.conformance import outcomes
from tests.simulation.conformance.plain import PATIENCE


class Buckets:
    """Over one connection."""

    def __init__(self, bus: Bus) -> None:
        self._js = bus.jetstream()
        self._stores: dict[str, KeyValue] = {}
        self.watchers: dict[str, KeyValue.KeyWatcher] = {}
        self._shown: dict[str, int] = {}  # the last revision that each has shown

    async def create_kv(self, bucket: str, **config: Any) -> None:
        self._stores[bucket] = await self._js.create_key_value(KeyValueConfig(bucket=bucket, **config))

    async def open_kv(self, bucket: str) -> None:
        self._stores[bucket] = await self._js.key_value(bucket)

    async def delete_kv(self, bucket: str) -> Any:
        return await self._js.delete_key_value(bucket)

    async def kv_get(self, bucket: str, key: str, revision: int | None = None) -> Any:
        return _entry(await self._stores[bucket].get(key, revision))

    async def kv_put(self, bucket: str, key: str, value: str) -> Any:
        return await self._stores[bucket].put(key, value.encode())

    async def kv_create(self, bucket: str, key: str, value: str) -> Any:
        return await self._stores[bucket].create(key, value.encode())

    async def kv_update(self, bucket: str, key: str, value: str, last: int) -> Any:
        return await self._stores[bucket].update(key, value.encode(), last)

    async def kv_delete(self, bucket: str, key: str, last: int | None = None) -> Any:
        return await self._stores[bucket].delete(key, last)

    async def kv_purge(self, bucket: str, key: str) -> Any:
        return await self._stores[bucket].purge(key)

    async def kv_keys(self, bucket: str) -> Any:
        return await self._stores[bucket].keys()

    async def kv_history(self, bucket: str, key: str) -> Any:
        return [_entry(entry) for entry in await self._stores[bucket].history(key)]

    async def kv_status(self, bucket: str) -> Any:
        status = await self._stores[bucket].status()
        return {"values": status.values, "history": status.history, "ttl": status.ttl}

    async def kv_watch(self, name: str, bucket: str, keys: str = ">", **more: Any) -> None:
        self.watchers[name] = await self._stores[bucket].watch(keys, **more)

    async def kv_updates(self, name: str, count: int) -> Any:
        """The next `count` of a watcher; None: all that was there has been shown."""
        return [_entry(await self.watchers[name].updates(timeout=PATIENCE)) for _ in range(count)]

    async def kv_caught_up(self, name: str, bucket: str) -> Any:
        """All that a watcher of every key shows, up to the last write."""
        newest = (await self._stores[bucket].status()).stream_info.state.last_seq
        found: list[Any] = []
        while self._shown.get(name, -1) < newest:
            entry = await self.watchers[name].updates(timeout=PATIENCE)
            self._shown[name] = max(self._shown.get(name, 0), entry.revision or 0 if entry else 0)
            found.append(_entry(entry))
        return found

    async def kv_unwatch(self, name: str) -> None:
        await self.watchers.pop(name).stop()


def _entry(entry: KeyValue.Entry | None) -> Any:
    if entry is None:
        return None
    found = {"key": entry.key, "value": outcomes.text(entry.value), "revision": entry.revision}
    for name, value in (("delta", entry.delta), ("operation", entry.operation)):
        if value is not None:
            found[name] = value
    return found
