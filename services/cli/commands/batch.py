"""`ryzanstein batch`: its commands, and what they do whichever way the batches are reached."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from services.cli.commands.batch_clients import (
    FILE_FIELDS,
    Batch,
    BatchClient,
    Kind,
    Wanted,
    by_http,
    by_nats,
)
from services.cli.ui import console, print_columns
from shared.config import CommonSettings
from shared.errors import ConfigurationError, RyzansteinError, Unavailable
from shared.messages.batches import OVER

T = TypeVar("T")

Url = Annotated[str, typer.Option(help="The gateway. Default: the local stack's.")]
Nats = Annotated[bool, typer.Option("--nats", help="By the queue instead of the gateway's HTTP API.")]
NatsUrl = Annotated[str, typer.Option(help="With --nats: a NATS server instead of the local stack's.")]
DataDir = Annotated[Path | None, typer.Option(help="The local stack's. [env: RYZANSTEIN_DATA_DIR]")]
ApiKey = Annotated[
    str, typer.Option(envvar="RYZANSTEIN_API_KEY", help="Where the gateway asks for one.", show_envvar=True)
]
Output = Annotated[Path | None, typer.Option(help="Where the results go.", dir_okay=False)]
Errors = Annotated[Path | None, typer.Option(help="Where the lines go that failed.", dir_okay=False)]


class BatchUnfinished(RyzansteinError):
    """The batch is over, and not every line has its answer."""


class BatchCommands:
    """Each method is a command; `app` has them all."""

    def __init__(
        self,
        gateway_of: Callable[[Path | None], str],
        nats_of: Callable[[Path | None, str], CommonSettings],
    ) -> None:
        """They find the local stack's gateway and NATS."""
        self._gateway_of = gateway_of
        self._nats_of = nats_of

    def app(self) -> typer.Typer:
        made = typer.Typer(
            help="Many requests from a file, each answered once.", no_args_is_help=True, rich_markup_mode=None
        )
        for name, command in (
            ("submit", self.submit),
            ("status", self.status),
            ("list", self.list_),
            ("cancel", self.cancel),
            ("download", self.download),
        ):
            made.command(name)(command)
        return made

    def _run(
        self,
        do: Callable[[BatchClient], Awaitable[T]],
        url: str,
        key: str,
        nats: bool,
        nats_url: str,
        data_dir: Path | None,
    ) -> T:
        if nats and url:
            raise ConfigurationError("--url and --nats are two ways; name one.")

        async def reached() -> T:
            if nats or nats_url:
                way = by_nats(self._nats_of(data_dir, nats_url))
            else:
                way = by_http(url or self._gateway_of(data_dir), key)
            async with way as client:
                return await do(client)

        return asyncio.run(reached())

    def submit(
        self,
        file: Annotated[Path, typer.Argument(help="JSON lines, a request each.", metavar="FILE")],
        endpoint: Annotated[str, typer.Option(help="The URL of its lines.")] = "/v1/chat/completions",
        window: Annotated[str, typer.Option(help="Time for all of it: 24h, 90m, 7d.")] = "24h",
        metadata: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE")] = None,
        wait: Annotated[bool, typer.Option("--wait", help="Wait until it is over.")] = False,
        output: Output = None,
        errors: Errors = None,
        url: Url = "",
        api_key: ApiKey = "",
        nats: Nats = False,
        nats_url: NatsUrl = "",
        data_dir: DataDir = None,
    ) -> None:
        """Hand in a file; with --wait, --output or --errors wait for it and fetch what has come of it."""
        wanted = Wanted(file, endpoint, window, metadata_of(metadata or []))

        async def do(client: BatchClient) -> Batch:
            batch = await submit(client, wanted)
            if not (wait or output or errors):
                return batch
            console().print(batch["id"], markup=False, highlight=False)
            batch = await wait_for_end(client, batch, console())
            await _fetch(client, batch, output, errors)
            return batch

        batch = self._run(do, url, api_key, nats, nats_url, data_dir)
        if wait or output or errors:
            print_batch(batch, console())
            _judge(batch)
        else:
            print(batch["id"])  # noqa: T201

    def status(
        self,
        batch: Annotated[str, typer.Argument(metavar="ID")],
        wait: Annotated[bool, typer.Option("--wait", help="Wait until it is over.")] = False,
        url: Url = "",
        api_key: ApiKey = "",
        nats: Nats = False,
        nats_url: NatsUrl = "",
        data_dir: DataDir = None,
    ) -> None:
        """Show how far a batch is, or what was wrong with its file."""

        async def do(client: BatchClient) -> Batch:
            found = await client.get(batch)
            return await wait_for_end(client, found, console()) if wait else found

        print_batch(self._run(do, url, api_key, nats, nats_url, data_dir), console())

    def list_(
        self,
        limit: Annotated[int, typer.Option(min=1, max=100)] = 20,
        url: Url = "",
        api_key: ApiKey = "",
        nats: Nats = False,
        nats_url: NatsUrl = "",
        data_dir: DataDir = None,
    ) -> None:
        """Show the newest batches."""
        found = self._run(lambda client: client.listed(limit), url, api_key, nats, nats_url, data_dir)
        print_batches(found, console())

    def cancel(
        self,
        batch: Annotated[str, typer.Argument(metavar="ID")],
        url: Url = "",
        api_key: ApiKey = "",
        nats: Nats = False,
        nats_url: NatsUrl = "",
        data_dir: DataDir = None,
    ) -> None:
        """Begin no more of its lines; what is done is kept."""
        found = self._run(lambda client: client.cancel(batch), url, api_key, nats, nats_url, data_dir)
        print_batch(found, console())

    def download(
        self,
        batch: Annotated[str, typer.Argument(metavar="ID")],
        output: Output = None,
        errors: Errors = None,
        url: Url = "",
        api_key: ApiKey = "",
        nats: Nats = False,
        nats_url: NatsUrl = "",
        data_dir: DataDir = None,
    ) -> None:
        """Fetch the results of a batch that is over, and the lines that failed."""

        async def do(client: BatchClient) -> None:
            found = await client.get(batch)
            names = output, errors
            if not any(names):
                names = Path(f"{batch}_output.jsonl"), Path(f"{batch}_errors.jsonl")
            await _fetch(client, found, *names)

        self._run(do, url, api_key, nats, nats_url, data_dir)


async def _fetch(client: BatchClient, batch: Batch, output: Path | None, errors: Path | None) -> None:
    if output is not None and await download(client, batch, "output", output):
        console().print(f"results: {output}", markup=False, highlight=False, soft_wrap=True)
    if errors is not None and await download(client, batch, "errors", errors):
        console().print(f"errors: {errors}", markup=False, highlight=False, soft_wrap=True)


def _judge(batch: Batch) -> None:
    """Raises `BatchUnfinished`, so that a script hears of it by the exit code."""
    counts = batch["request_counts"]
    if batch["status"] != "completed" or counts["failed"]:
        if batch["status"] == "failed" and not counts["total"]:
            raise BatchUnfinished(
                f"No line was run: {_what_is_wrong(batch)} Correct the file and submit it again."
            )
        raise BatchUnfinished(
            f"The batch is {batch['status']}: {counts['completed']} of {counts['total']} lines are answered, "
            f"{counts['failed']} failed."
        )


def _what_is_wrong(batch: Batch) -> str:
    """The first thing that was found wrong with its file, and how many more there are."""
    found = (batch["errors"] or {"data": []})["data"]
    if not found:
        return "the file was refused, without a reason."
    where = f"line {found[0]['line']}: " if found[0]["line"] else ""
    more = f" ({len(found) - 1} more above)" if len(found) > 1 else ""
    return f"{where}{found[0]['message']}{more}"


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


async def wait_for_end(client: BatchClient, batch: Batch, console: Console) -> Batch:
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
