"""Waiting for what only shared memory shows: another process cannot wake an event loop through it."""

import asyncio
import time
from collections.abc import Callable

POLL = 0.003
"""Seconds between two looks."""


async def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Returns as soon as `condition` holds, or after `seconds`; whether it holds."""
    by = time.monotonic() + seconds
    while True:
        if condition():
            return True
        if time.monotonic() >= by:
            return False
        await asyncio.sleep(POLL)
