"""`ryzanstein batch`: its commands, by the gateway's HTTP API or by the queue itself (docs/batch.md)."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from services.cli.gateway_client import TIMEOUT, GatewayClient, RequestRefused, connected, metadata_of, patiently, save
from services.cli.target import ApiKey, DataDir, Gateway, NatsUrl, Url, gateway_of_stack, nats_of_stack, with_options_of
from services.cli.ui import bar_columns, console, local_time, print_columns, say
from shared.config import CommonSettings
from shared.errors import ConfigurationError, RyzansteinError
from shared.messages.batches import OVER, BatchAsk, BatchListing, BatchReply, BatchSubmit
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.objects import CHUNK, MissingObject, Objects

Batch = dict[str, Any]  # a batch as `GET /v1/batches/{id}` shows it
Kind = Literal["output", "errors"]
FILE_FIELDS = {"output": "output_file_id", "errors": "error_file_id"}


class RequestedBatch(msgspec.Struct, frozen=True):
    path: Path
    endpoint: str
    window: str
    metadata: dict[str, str] | None


class HttpBatches:
    """By the gateway's API, as any OpenAI client does it. Methods raise `RyzansteinError`."""

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway

    async def submit(self, wanted: RequestedBatch) -> Batch:
        file = await self._gateway.upload(wanted.path, "batch")
        body = {
            "input_file_id": file["id"],
            "endpoint": wanted.endpoint,
            "completion_window": wanted.window,
            "metadata": wanted.metadata,
        }
        key = {"Idempotency-Key": secrets.token_hex(16)}
        return await self._gateway.ask("POST", "/v1/batches", json=body, headers=key)

    async def get(self, batch: str) -> Batch:
        return await self._gateway.ask("GET", f"/v1/batches/{batch}")

    async def cancel(self, batch: str) -> Batch:
        return await self._gateway.ask("POST", f"/v1/batches/{batch}/cancel")

    async def listed(self, limit: int) -> list[Batch]:
        found: list[Batch] = (await self._gateway.ask("GET", f"/v1/batches?limit={limit}"))["data"]
        return found

    def content(self, batch: Batch, kind: Kind) -> AsyncGenerator[bytes, None]:
        return self._gateway.content(f"/v1/files/{batch[FILE_FIELDS[kind]]}/content")


class NatsBatches:
    """By the queue: the file goes into the object store, the rest is request and reply. Raises as `HttpBatches`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._objects = Objects(bus, subjects.FILES_STORE)

    async def submit(self, wanted: RequestedBatch) -> Batch:
        name = f"upload-{secrets.token_hex(12)}"
        await self._objects.write(name, _parts(wanted.path), nuid=secrets.token_hex(11))
        asked = BatchSubmit(
            endpoint=wanted.endpoint,
            object=name,
            filename=wanted.path.name,
            completion_window=wanted.window,
            metadata=wanted.metadata,
        )
        return (await self._ask(subjects.BATCH_SUBMIT, asked)).batch or {}

    async def get(self, batch: str) -> Batch:
        return (await self._ask(subjects.BATCH_STATUS, BatchAsk(id=batch))).batch or {}

    async def cancel(self, batch: str) -> Batch:
        return (await self._ask(subjects.BATCH_CANCEL, BatchAsk(id=batch))).batch or {}

    async def listed(self, limit: int) -> list[Batch]:
        return (await self._ask(subjects.BATCH_LIST, BatchListing(limit=limit))).batches or []

    async def content(self, batch: Batch, kind: Kind) -> AsyncGenerator[bytes, None]:
        name = batch[FILE_FIELDS[kind]]
        try:
            async with contextlib.aclosing(self._objects.read(name)) as parts:
                async for part in parts:
                    yield part
        except MissingObject:
            raise RequestRefused(f"The file {name} is gone.") from None

    async def _ask(self, subject: str, asked: msgspec.Struct) -> BatchReply:
        reply = await self._bus.request(subject, asked, BatchReply, timeout=TIMEOUT)
        if reply.error is not None:
            raise RequestRefused(str(reply.error["message"]))
        return reply


BatchClient = HttpBatches | NatsBatches


async def _parts(path: Path) -> AsyncGenerator[bytes, None]:
    with path.open("rb") as data:
        while part := data.read(CHUNK):
            yield part


@contextlib.asynccontextmanager
async def by_http(gateway: Gateway, key: str) -> AsyncIterator[BatchClient]:
    """`key`: an API key, or none. Raises `ConfigurationError` for what is no address."""
    async with connected(gateway, key) as client:
        yield HttpBatches(client)


@contextlib.asynccontextmanager
async def by_nats(settings: CommonSettings) -> AsyncIterator[BatchClient]:
    """Raises `BrokerUnavailable`."""
    async with Bus.session(settings, "ryzanstein batch") as bus:
        yield NatsBatches(bus)


Id = Annotated[str, typer.Argument(metavar="ID")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until it has finished.")]
Output = Annotated[Path | None, typer.Option(help="File for the results.", dir_okay=False)]
Errors = Annotated[Path | None, typer.Option(help="File for the lines that failed.", dir_okay=False)]

batch_app = typer.Typer(
    help="Many requests from a file, each answered once.", no_args_is_help=True, rich_markup_mode=None
)


class BatchUnfinished(RyzansteinError):
    """The batch is over, and not every line has its answer."""


def _command(name: str) -> Callable[[Callable[..., Awaitable[None]]], None]:
    """Registers a command that is given a client first, and has the options that say how batches are reached."""

    def register(command: Callable[..., Awaitable[None]]) -> None:
        def run(
            url: Url = "",
            api_key: ApiKey = "",
            nats: Annotated[
                bool, typer.Option("--nats", help="Submit through NATS instead of the gateway's HTTP API.")
            ] = False,
            nats_url: NatsUrl = "",
            data_dir: DataDir = None,
            **given: Any,
        ) -> None:
            if nats and url:
                raise ConfigurationError("--url and --nats exclude each other; give one.")
            if nats or nats_url:
                way = by_nats(nats_of_stack(data_dir, nats_url))
            else:
                way = by_http(Gateway(url) if url else gateway_of_stack(data_dir), api_key)
            asyncio.run(reached(way, given))

        async def reached(way: AbstractAsyncContextManager[BatchClient], given: dict[str, Any]) -> None:
            async with way as client:
                await command(client, **given)

        batch_app.command(name)(with_options_of(command, run))

    return register


@_command("submit")
async def _submit(
    client: BatchClient,
    file: Annotated[Path, typer.Argument(help="JSON lines, a request each.", metavar="FILE")],
    endpoint: Annotated[str, typer.Option(help="Endpoint of all its lines.")] = "/v1/chat/completions",
    window: Annotated[str, typer.Option(help="Completion window: 24h, 90m, 7d.")] = "24h",
    metadata: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE")] = None,
    wait: Wait = False,
    output: Output = None,
    errors: Errors = None,
) -> None:
    """Submit a file; with --wait, --output or --errors wait until it is over and download its results."""
    batch = await submit(client, RequestedBatch(file, endpoint, window, metadata_of(metadata or [])))
    if not (wait or output or errors):
        print(batch["id"])  # noqa: T201
        return
    say(console(), batch["id"])
    batch = await wait_for_end(client, batch, console())
    await _fetch(client, batch, output, errors)
    print_batch(batch, console())
    _judge(batch)


@_command("status")
async def _status(client: BatchClient, batch: Id, wait: Wait = False) -> None:
    """Show how far a batch is, or what was wrong with its file."""
    found = await client.get(batch)
    print_batch(await wait_for_end(client, found, console()) if wait else found, console())


@_command("list")
async def _list(client: BatchClient, limit: Annotated[int, typer.Option(min=1, max=100)] = 20) -> None:
    """Show the newest batches."""
    rows = [("created", "status", "done", "failed", "total", "batch")]
    for batch in await client.listed(limit):
        counts = batch["request_counts"]
        numbers = (str(counts[name]) for name in ("completed", "failed", "total"))
        rows.append((local_time(batch["created_at"]), batch["status"], *numbers, batch["id"]))
    print_columns(console(), rows, right=(2, 3, 4))


@_command("cancel")
async def _cancel(client: BatchClient, batch: Id) -> None:
    """Begin no more of its lines; what is done is kept."""
    print_batch(await client.cancel(batch), console())


@_command("download")
async def _download(client: BatchClient, batch: Id, output: Output = None, errors: Errors = None) -> None:
    """Fetch the results of a batch that is over, and the lines that failed."""
    names = output, errors
    if not any(names):
        names = Path(f"{batch}_output.jsonl"), Path(f"{batch}_errors.jsonl")
    await _fetch(client, await client.get(batch), *names)


async def _fetch(client: BatchClient, batch: Batch, output: Path | None, errors: Path | None) -> None:
    kinds: tuple[tuple[Kind, str, Path | None], ...] = (("output", "results", output), ("errors", "errors", errors))
    for kind, told, path in kinds:
        if path is not None and batch[FILE_FIELDS[kind]]:
            await save(client.content(batch, kind), path)
            say(console(), f"{told}: {path}")


def _judge(batch: Batch) -> None:
    """Raises `BatchUnfinished`, so that a script hears of it by the exit code."""
    counts = batch["request_counts"]
    if batch["status"] != "completed" or counts["failed"]:
        if batch["status"] == "failed" and not counts["total"]:
            raise BatchUnfinished(f"No line was run: {_what_is_wrong(batch)} Correct the file and submit it again.")
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


POLL = 0.5  # seconds between two looks at a batch that is waited for


async def submit(client: BatchClient, wanted: RequestedBatch) -> Batch:
    """Raises `ConfigurationError` where the file cannot be read."""
    try:
        return await client.submit(wanted)
    except OSError as error:
        raise ConfigurationError(f"{wanted.path} cannot be read: {error.strerror}.") from None


async def wait_for_end(client: BatchClient, batch: Batch, console: Console) -> Batch:
    """Until it is over, with a bar; on something that is no terminal a line for each state."""
    columns = bar_columns(MofNCompleteColumn())
    told = ""
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(batch["status"], total=None)
        while True:
            counts = batch["request_counts"]
            done, total = counts["completed"] + counts["failed"], counts["total"]
            progress.update(task, description=batch["status"], completed=done, total=total or None)
            if not console.is_terminal and batch["status"] != told:
                told = batch["status"]
                say(console, f"{batch['id']}: {told}")
            if batch["status"] in OVER:
                return batch
            await asyncio.sleep(POLL)
            batch = await patiently(partial(client.get, batch["id"]))


def print_batch(batch: Batch, console: Console) -> None:
    """Its state, and what is wrong with its input."""
    counts = batch["request_counts"]
    rows = [("field", "value"), ("id", batch["id"]), ("status", batch["status"])]
    rows += [(name, batch[name]) for name in ("endpoint", "model", "input_file_id") if batch[name]]
    rows.append(("lines", f"{counts['completed']} completed, {counts['failed']} failed, {counts['total']} in all"))
    rows += [(name, batch[name]) for name in FILE_FIELDS.values() if batch[name]]
    rows += [(name, local_time(batch[name])) for name in ("created_at", "expires_at") if batch[name]]
    print_columns(console, rows[1:])
    for error in (batch["errors"] or {"data": []})["data"]:
        where = f"line {error['line']}: " if error["line"] else ""
        say(console, f"{where}{error['message']} ({error['code']})")


def add_to(app: typer.Typer) -> None:
    app.add_typer(batch_app, name="batch")
