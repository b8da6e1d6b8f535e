"""Adapters that are fetched before anybody asks for them."""

import asyncio
from pathlib import Path
from typing import Any

from services.executor.leader.adapter_cache import AdapterCache
from services.executor.leader.adapters import Adapters
from shared.errors import BrokerUnavailable


async def test_a_broker_that_is_away_does_not_end_the_preloading(tmp_path: Path) -> None:
    first, second = "0" * 64, "1" * 64

    reached = asyncio.Event()

    class Files:
        async def size(self, digest: str) -> int:
            if digest == first:
                raise BrokerUnavailable("it is away")
            reached.set()
            return 1 << 40  # more than there is room for

    batcher: Any = None
    adapters = Adapters("m", AdapterCache(tmp_path, 1), batcher, str, lambda: None)
    adapters._files = Files()  # type: ignore[assignment]
    for digest in (first, second):
        adapters._wanted.put_nowait(digest)
    preloading = asyncio.create_task(adapters._preload())
    await asyncio.wait_for(reached.wait(), 5)
    preloading.cancel()
