"""`ryzanstein batch`: what its commands do, whichever way the batches are reached."""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from services.cli.batch_clients import FILE_FIELDS, Batch, BatchClient, Kind, Wanted
from services.cli.terminal import print_columns
from shared.errors import ConfigurationError, Unavailable
from shared.messages.batches import OVER

POLL = 0.5
"""Seconds between two looks at a batch that is waited for."""
PATIENCE = 60.0
"""Seconds for which a gateway that is waited at may be away."""


async def submit(client: BatchClient, wanted: Wanted) -> Batch:
    """Raises `ConfigurationError` where the file cannot be read."""
    try:
        return await client.submit(wanted)
    except OSError as error:
        raise ConfigurationError(f"{wanted.path} cannot be read: {error.strerror}.") from None


async def wait(client: BatchClient, batch: Batch, console: Console) -> Batch:
    """Until it is over, with a bar; on something that is no terminal a line for each state."""
    columns = (
        SpinnerColumn(finished_text=" "),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    told = ""
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(batch["status"], total=None)
        while True:
            counts = batch["request_counts"]
            done, total = counts["completed"] + counts["failed"], counts["total"]
            progress.update(task, description=batch["status"], completed=done, total=total or None)
            if not console.is_terminal and batch["status"] != told:
                told = batch["status"]
                console.print(f"{batch['id']}: {told}", markup=False, highlight=False, soft_wrap=True)
            if batch["status"] in OVER:
                return batch
            await asyncio.sleep(POLL)
            batch = await _look(client, batch["id"])


async def _look(client: BatchClient, batch: str) -> Batch:
    loop = asyncio.get_running_loop()
    give_up = loop.time() + PATIENCE
    while True:
        try:
            return await client.get(batch)
        except Unavailable:
            if loop.time() >= give_up:
                raise
        await asyncio.sleep(POLL)


async def download(client: BatchClient, batch: Batch, kind: Kind, path: Path) -> bool:
    """Writes one of its files to `path`; False when it has none of that kind."""
    if not batch[FILE_FIELDS[kind]]:
        return False
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as out:
            async for data in client.content(batch, kind):
                out.write(data)
        part.replace(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}.") from None
    return True


def metadata_of(pairs: Sequence[str]) -> dict[str, str] | None:
    """From `key=value` pairs. Raises `ConfigurationError`."""
    found = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not key or not separator:
            raise ConfigurationError(f"--metadata takes KEY=VALUE, not {pair!r}.")
        found[key] = value
    return found or None


def print_batch(batch: Batch, console: Console) -> None:
    """Its state, and what is wrong with its input."""
    counts = batch["request_counts"]
    rows = [("field", "value"), ("id", batch["id"]), ("status", batch["status"])]
    rows += [(name, batch[name]) for name in ("endpoint", "model", "input_file_id") if batch[name]]
    rows.append(
        ("lines", f"{counts['completed']} completed, {counts['failed']} failed, {counts['total']} in all")
    )
    rows += [(name, batch[name]) for name in FILE_FIELDS.values() if batch[name]]
    rows += [(name, _time(batch[name])) for name in ("created_at", "expires_at") if batch[name]]
    print_columns(console, rows[1:])
    for error in (batch["errors"] or {"data": []})["data"]:
        where = f"line {error['line']}: " if error["line"] else ""
        console.print(f"{where}{error['message']} ({error['code']})", markup=False, highlight=False)


def print_batches(batches: Sequence[Batch], console: Console) -> None:
    """One row each, the newest first."""
    rows = [("created", "status", "done", "failed", "total", "batch")]
    for batch in batches:
        counts = batch["request_counts"]
        numbers = (str(counts[name]) for name in ("completed", "failed", "total"))
        rows.append((_time(batch["created_at"]), batch["status"], *numbers, batch["id"]))
    print_columns(console, rows, right=(2, 3, 4))


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
