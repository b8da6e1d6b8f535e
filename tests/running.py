"""A service in the process of its test."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import TypeVar

from shared.service.lifecycle import Service

ServiceT = TypeVar("ServiceT", bound=Service)


@contextlib.asynccontextmanager
async def running(service: ServiceT) -> AsyncIterator[ServiceT]:
    """Has started, and is stopped at the end."""
    task = asyncio.create_task(service.run())
    end = time.monotonic() + 30
    while service.state != "ready" and not task.done():
        assert time.monotonic() < end, f"{service.name} did not start"
        await asyncio.sleep(0.005)
    if task.done():
        task.result()
    try:
        yield service
    finally:
        service.end()
        await task
