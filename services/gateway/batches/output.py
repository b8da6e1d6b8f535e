"""The files of a batch: written from the results in the stream, each result once.

Their ids and their bytes follow from the batch, so whoever writes them writes the same ones, and of several
writings the first one stays.
"""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Literal

from services.gateway.batches.results import Results
from services.gateway.batches.states import file_id
from services.gateway.batches.tally import Tally
from services.gateway.files.store import Files
from shared.messages.batches import BatchJob, FileRecord

Kind = Literal["output", "errors"]


async def write_file(
    files: Files, results: Results, job: BatchJob, kind: Kind, confirm: Callable[[], Awaitable[object]]
) -> str:
    """Writes the output or the error file; returns its id. `confirm` is called before it is seen: it raises
    where the batch is another gateway's by now. Raises `RyzansteinError`."""
    now = time.time()
    name = file_id(job, kind)

    async def parts() -> AsyncGenerator[bytes, None]:
        tally = Tally()
        async for result in results.read(job.id):
            if tally.add(result) and result.succeeded == (kind == "output"):
                yield await results.text(result) + b"\n"
        await confirm()

    record = FileRecord(
        id=name,
        tenant=job.tenant,
        filename=f"{job.id}_{kind}.jsonl",
        purpose="batch_output",
        created_at=now,
        expires_at=now + job.output_expires_after if job.output_expires_after else 0.0,
        object_name=name,
    )
    await files.put(record, parts())
    return name
