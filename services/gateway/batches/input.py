"""The lines of a batch's input, from the object store, a few at a time."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from services.gateway.batches.lines import Line, LineSplitter
from services.gateway.files.store import Files
from shared.messages.batches import BatchJob

AT_ONCE = 32
"""Lines that are looked at before others get their turn."""
PATIENCE = 60.0
"""Seconds for which a chunk is tried again while the broker is away."""
ENVELOPE = 64 << 10
"""Bytes of a line beside its body."""


async def input_lines(files: Files, job: BatchJob, body_limit: int) -> AsyncGenerator[Line, None]:
    """Every line that is not blank. Raises `MissingObject`, `BrokerUnavailable`, `InternalError`."""
    splitter = LineSplitter(body_limit + ENVELOPE)
    count = 0
    async with contextlib.aclosing(files.objects.read(job.input_object, patience=PATIENCE)) as parts:
        async for part in parts:
            for line in splitter.feed(part):
                yield line
                count += 1
                if count % AT_ONCE == 0:
                    await asyncio.sleep(0)
    for line in splitter.end():
        yield line
