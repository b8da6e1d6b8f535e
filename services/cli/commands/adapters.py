"""`ryzanstein adapters`: LoRA adapters of the models that a running stack or cluster serves, as the operator."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer

from services.cli.cluster_models import ClusterModels, Snapshot
from services.cli.target import DataDir, NatsUrl, nats_of_stack
from services.cli.ui import console, megabytes, print_columns, say
from shared.errors import ConfigurationError, NobodyThere, NoGroupAvailable, UnknownModel, error_from_code
from shared.messages import HostReply, ModelSpec
from shared.messages.registry import MAX_ADAPTERS, AdapterRecord, PullAdapter
from shared.nats import subjects
from shared.nats.adapters import AdapterRefused, register, unregister
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.registry import nearest, of_hub, wrong_name

T = TypeVar("T")

PULL_TIMEOUT = 600.0
"""Seconds for a host to fetch, check and store an adapter."""

adapters_app = typer.Typer(
    help="LoRA adapters of the models that a running stack serves: load, unload, list, show.",
    no_args_is_help=True,
)
Name = Annotated[str, typer.Argument(metavar="NAME", help="What clients call it.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs: as JSON.")]


class Cluster:
    """One connection to a stack, and what stands there."""

    def __init__(self, bus: Bus, now: Snapshot, names: Bucket[AdapterRecord]) -> None:
        """`names`: the bucket `adapters`."""
        self.bus, self.now, self.names = bus, now, names

    @property
    def records(self) -> dict[str, AdapterRecord]:
        return {name: one for name, one in sorted(self.now.adapters.items()) if one.digest}

    def record(self, name: str) -> AdapterRecord:
        """Raises `UnknownModel`, with the nearest names."""
        found = self.records.get(name)
        if found is not None:
            return found
        near = nearest(name, list(self.records))
        told = (
            f"{' or '.join(near)} may be meant" if near else "`ryzanstein adapters list` shows what there is"
        )
        raise UnknownModel(f"There is no adapter {name!r}; {told}.")

    def groups_with(self, record: AdapterRecord) -> list[str]:
        return sorted(group.group for group in self.now.groups.values() if record.digest in group.adapters)

    async def pull(self, command: PullAdapter) -> AdapterRecord:
        """What the first host that answers has read. Raises what it has against it."""
        serving = {one.instance for one in self.now.groups_of(command.model) if one.instance}
        for host in dict.fromkeys([*sorted(serving), *self.now.taking_hosts()]):
            try:
                subject = subjects.host_control(host)
                reply = await self.bus.request(subject, command, HostReply, timeout=PULL_TIMEOUT)
            except NobodyThere:
                continue
            if not reply.ok or reply.adapter is None:
                raise error_from_code(reply.code, reply.error)
            return msgspec.structs.replace(
                reply.adapter, name=command.name, model=command.model, created=int(time.time()), retired=[]
            )
        raise NoGroupAvailable(f"No host is there that could read an adapter of {command.model}; start one.")


@adapters_app.command()
def load(
    name: Name,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="Directory of peft's files on the hosts, or hub name (ORG/NAME)."
        ),
    ],
    model: Annotated[
        str, typer.Option(help="Its base; may be left out where there is one model alone.")
    ] = "",
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Also where there is one of that name; what runs ends as it began."),
    ] = False,
    json: AsJson = False,
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
) -> None:
    """Load a LoRA adapter: it is on every replica of its base from then on, and there again after any restart."""
    if wrong := wrong_name(name):
        raise ConfigurationError(f"An adapter cannot be called {name[:64]!r}: {wrong}.")
    path = Path(source).expanduser()
    given = str(path.resolve()) if path.exists() and not of_hub(source) else source

    async def run(cluster: Cluster) -> AdapterRecord:
        base = _base(cluster.now, model)
        _check_name(cluster, name, replace=replace)
        spec = cluster.now.specs.get(base) or ModelSpec(base, "")
        record = await cluster.pull(PullAdapter(name, base, given, spec))
        with _told(name):
            return await register(cluster.names, record, replace=replace)

    record = _run(data_dir, nats_url, run)
    _show(record, [], as_json=json)


@adapters_app.command()
def unload(name: Name, data_dir: DataDir = None, nats_url: NatsUrl = "") -> None:
    """Unload a LoRA adapter: nobody can ask for it any more, and what runs with it ends as it began."""

    async def run(cluster: Cluster) -> None:
        cluster.record(name)
        with _told(name):
            await unregister(cluster.names, name)

    _run(data_dir, nats_url, run)
    say(console(), f"{name}: unloaded.")


@adapters_app.command("list")
def list_(
    model: Annotated[str, typer.Option(help="Of this model alone.")] = "",
    json: AsJson = False,
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
) -> None:
    """List the LoRA adapters."""

    async def run(cluster: Cluster) -> list[tuple[AdapterRecord, list[str]]]:
        base = cluster.now.resolve(model) if model else ""
        return [
            (one, cluster.groups_with(one)) for one in cluster.records.values() if base in ("", one.model)
        ]

    found = _run(data_dir, nats_url, run)
    if json:
        print(msgspec.json.encode([_fields(*one) for one in found]).decode())  # noqa: T201
        return
    if not found:
        say(console(), "There are no adapters; `ryzanstein adapters load` loads one.")
        return
    rows = [
        (one.name, one.model, str(one.rank), megabytes(one.bytes), str(len(groups)), one.source)
        for one, groups in found
    ]
    heads = ("adapter", "model", "rank", "size", "in memory", "source")
    print_columns(console(), [heads, *rows], right=(2, 3, 4))


@adapters_app.command()
def show(name: Name, json: AsJson = False, data_dir: DataDir = None, nats_url: NatsUrl = "") -> None:
    """Show one LoRA adapter."""

    async def run(cluster: Cluster) -> tuple[AdapterRecord, list[str]]:
        record = cluster.record(name)
        return record, cluster.groups_with(record)

    _show(*_run(data_dir, nats_url, run), as_json=json)


def _base(now: Snapshot, given: str) -> str:
    if given:
        return now.resolve(given)
    if len(names := now.names()) == 1:
        return names[0]
    raise ConfigurationError(f"There are {len(names)} models here; name the adapter's base with --model.")


def _check_name(cluster: Cluster, name: str, *, replace: bool) -> None:
    now = cluster.now
    if name in now.names() or any(name in spec.aliases for spec in now.specs.values()):
        raise ConfigurationError(
            f"A model is called {name!r}, or has it as an alias; give the adapter another name."
        )
    if name in cluster.records:
        if not replace:
            raise ConfigurationError(f"There is an adapter {name!r} already; replace it with --replace.")
    elif len(now.adapters) >= MAX_ADAPTERS:
        raise ConfigurationError(f"There are {MAX_ADAPTERS:,} adapters and may be no more; unload one first.")


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """What the registry has against a change, as a sentence."""
    try:
        yield
    except AdapterRefused as refused:
        said = {
            "exists": f"There is an adapter {name!r} already; replace it with --replace.",
            "missing": f"There is no adapter {name!r} any more.",
        }
        often = f"The adapter {name!r} was replaced too often within hours; wait, or use another name."
        raise ConfigurationError(said.get(refused.reason, often)) from None


def _fields(record: AdapterRecord, groups: list[str]) -> dict[str, object]:
    shown = msgspec.structs.asdict(record)
    del shown["retired"]
    return {**shown, "groups": groups}


def _show(record: AdapterRecord, groups: list[str], *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(_fields(record, groups)).decode())  # noqa: T201
        return
    size, where = megabytes(record.bytes), ", ".join(groups) or "no group yet"
    say(
        console(),
        f"{record.name}: adapter of {record.model}, rank {record.rank}, {size}, from {record.source}.",
    )
    say(console(), f"Digest {record.digest}; in memory of {where}.")


def _run(data_dir: Path | None, nats_url: str, work: Callable[[Cluster], Awaitable[T]]) -> T:
    settings = nats_of_stack(data_dir, nats_url)

    async def run() -> T:
        async with Bus.session(settings, "ryzanstein adapters") as bus:
            models = ClusterModels(bus)
            await models.open()
            names = await Bucket.open(bus, subjects.ADAPTERS_BUCKET, AdapterRecord)
            return await work(Cluster(bus, await models.read(), names))

    return asyncio.run(run())
