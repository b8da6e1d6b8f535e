"""Ending tasks for certain."""

import asyncio
from collections.abc import Iterable
from typing import Any

PATIENCE = 1.0
"""Seconds after which a task is told again."""


async def end_all(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancels `tasks` until they have ended.

    Before Python 3.12 `asyncio.wait_for`, which nats-py uses, swallows a cancellation that meets its result.
    """
    going = {task for task in tasks if not task.done()}
    while going:
        for task in going:
            task.cancel()
        _, going = await asyncio.wait(going, timeout=PATIENCE)
