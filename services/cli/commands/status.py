"""What runs where: the health monitor's records, for people and for machines."""

import asyncio
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import psutil
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.cli.target import AsJson, DataDir, NatsUrl, StartedProcess, find_stack, nats_of_stack
from services.cli.ui import console, described_traits, described_weights, megabytes, print_json, say
from shared.config import CommonSettings
from shared.messages import GroupRecord, GroupTraits, HostModel, HostRecord, ServiceRecord, StreamedWeights
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.process import pid_namespace
from shared.releases import far_apart

UNKNOWN = ("-", "-")  # CPU time and memory of a process on another machine, or in another container
NUMBERS = {"pid", "rank", "step", "running", "waiting", "KV used", "KV at most", "CPU s", "memory", "promised"}


def status(json: AsJson = False, data_dir: DataDir = None, nats_url: NatsUrl = "") -> None:
    """Show services, groups and ranks: process ids, states, load, KV use."""
    settings = nats_of_stack(data_dir, nats_url)
    stack = None if nats_url else find_stack(data_dir, starting=True)
    starting = stack is not None and not stack.gateway_url
    found = asyncio.run(read_status(settings, stack.started if stack is not None and starting else ()))
    if json:
        print_json(found.status)
    else:
        screen = console()
        if starting:
            screen.print("The stack is starting.\n", style="yellow")
        print_status(found, screen)


class ServiceStatus(msgspec.Struct, frozen=True):
    name: str
    instance: str
    pid: int
    state: str
    version: str = ""  # of Ryzanstein; empty: not known yet


class RankStatus(msgspec.Struct, frozen=True):
    rank: int
    pid: int
    step: int


class GroupStatus(msgspec.Struct, frozen=True):
    group: str
    model: str
    state: str
    running: int
    waiting: int
    kv_used: float  # share of the KV blocks that sequences hold, 0 to 1
    ranks: list[RankStatus]
    kv_bytes: int = 0  # most memory that the ranks' KV caches take together; they grow to it as they are used
    message: str = ""  # why it is not ready, or how far its start has come
    kernels: str = ""  # what its ranks compute with, such as `native avx2`
    streamed: StreamedWeights | None = None  # null: all weights are in memory
    # Its kinds of sparse attention, and its draft model; null: not known yet.
    traits: GroupTraits | None = None


class HostStatus(msgspec.Struct, frozen=True):
    """An executor as a host of models."""

    instance: str
    memory: int  # bytes that its groups may take together
    used: int  # bytes that were promised to them
    models: list[HostModel]  # what it fetches, loads, keeps asleep, could not load, and has on disk


class StackStatus(msgspec.Struct, frozen=True):
    """The shape of `ryzanstein status --json`; scripts rely on it."""

    services: list[ServiceStatus]
    groups: list[GroupStatus]
    hosts: list[HostStatus] = []


class StackSnapshot(NamedTuple):
    """What is known, for machines and for people."""

    status: StackStatus  # the shape of `status --json`, which is promised
    # Speed of each group against its own past and its peers; below 1 it is degraded.
    weights: dict[str, float]
    # Instances whose process ids mean processes that can be looked at from here.
    here: frozenset[str] = frozenset()
    instances: dict[str, str] = {}  # whose ranks they are, by group


async def read_status(settings: CommonSettings, started: Iterable[StartedProcess] = ()) -> StackSnapshot:
    """Reads the health monitor's buckets; `started` as of `snapshot`. Raises `BrokerUnavailable`."""
    async with Bus.session(settings, "ryzanstein status") as bus:
        services = await (await Bucket.open(bus, subjects.SERVICES_BUCKET, ServiceRecord)).items()
        groups = await (await Bucket.open(bus, subjects.GROUPS_BUCKET, GroupRecord)).items()
        hosts = await (await Bucket.open(bus, subjects.HOSTS_BUCKET, HostRecord)).items()
    return snapshot(services.values(), groups.values(), started, hosts.values())


def snapshot(
    services: Iterable[ServiceRecord],
    groups: Iterable[GroupRecord],
    started: Iterable[StartedProcess] = (),
    hosts: Iterable[HostRecord] = (),
) -> StackSnapshot:
    """From the monitor's records. `started`: processes of a stack that is not up yet, some of which the monitor has
    not heard; what it knows of their names is of an earlier stack's then."""
    services, groups = list(services), sorted(groups, key=lambda one: one.group)
    heard = {(service.instance, service.pid) for service in services}
    silent = {one.instance: one for one in started if (one.instance, one.pid) not in heard}
    services = [service for service in services if service.instance not in silent]
    groups = [group for group in groups if group.instance not in silent]
    status = StackStatus(
        services=sorted(
            [
                *map(_service, services),
                *(ServiceStatus(one.service, one.instance, one.pid, "starting") for one in silent.values()),
            ],
            key=lambda one: (one.name, one.instance),
        ),
        groups=list(map(_group, groups)),
        hosts=[
            HostStatus(one.instance, one.host.memory, one.host.used, one.host.models)
            for one in sorted(hosts, key=lambda one: one.instance)
            if one.host.takes_models and one.state != "gone" and one.instance not in silent
        ],
    )
    own = pid_namespace()
    return StackSnapshot(
        status,
        {group.group: group.weight for group in groups},
        frozenset(service.instance for service in services if own and service.pid_namespace == own) | silent.keys(),
        {group.group: group.instance for group in groups},
    )


def _service(record: ServiceRecord) -> ServiceStatus:
    return ServiceStatus(record.name, record.instance, record.pid, record.state, record.version)


def _group(record: GroupRecord) -> GroupStatus:
    load = record.load
    used = 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
    return GroupStatus(
        group=record.group,
        model=record.model,
        state=record.state,
        running=load.running,
        waiting=load.waiting,
        kv_used=round(used, 4),
        ranks=[RankStatus(rank.rank, rank.pid, rank.step) for rank in record.ranks],
        kv_bytes=record.kv_bytes,
        message="" if record.state in ("ready", "busy") else record.message or _phase(record),
        kernels=record.kernels,
        streamed=record.streamed,
        traits=record.traits,
    )


def _phase(record: GroupRecord) -> str:
    """How far a group's start has come."""
    if record.state != "starting":
        return ""
    if not record.loaded:
        return "its ranks are started"
    return f"{record.loaded:.0%} of its weights are read" + ("; it gets ready" if record.loaded >= 1 else "")


def print_status(snapshot: StackSnapshot, console: Console) -> None:
    """Tables for 80 columns: services with their CPU time and memory, groups, their ranks, and hosts that take models;
    then what there is to say of groups and models that are not ready."""
    several = len({service.version for service in snapshot.status.services} - {""}) > 1  # as during a rolling update
    services = _table(
        "Services", "service", "instance", "pid", "state", "CPU s", "memory", *(["version"] if several else [])
    )
    groups = _table("Groups", "group", "model", "state", "running", "waiting", "KV used", "KV at most")
    ranks = _table("Ranks", "group", "rank", "pid", "step", "memory", "kernels")
    for service in snapshot.status.services:
        state = _coloured(service.state)
        usage = _usage(service.pid) if service.instance in snapshot.here else UNKNOWN
        version = [service.version or "-"] if several else []
        services.add_row(service.name, service.instance, str(service.pid), state, *usage, *version)
    for group in snapshot.status.groups:
        most = megabytes(group.kv_bytes) if group.kv_bytes else "-"
        load = (str(group.running), str(group.waiting), f"{group.kv_used:.1%}", most)
        weight = snapshot.weights.get(group.group, 1.0)
        slow = f" [yellow](speed {weight:.0%})[/]" if weight < 1 else ""
        groups.add_row(escape(group.group), escape(group.model), _coloured(group.state) + slow, *load)
        here = snapshot.instances.get(group.group, "") in snapshot.here
        for rank in group.ranks:
            memory = (_usage(rank.pid) if here else UNKNOWN)[1]
            numbers = (str(rank.rank), str(rank.pid), str(rank.step), memory)
            ranks.add_row(escape(group.group), *numbers, escape(group.kernels) or "-")
    for table in (services, groups, ranks, *_hosts_table(snapshot.status.hosts)):
        console.print(table)
        console.print()
    for line in _remarks(snapshot.status):
        say(console, line)


def _remarks(status: StackStatus) -> Iterator[str]:
    """Of versions that are no neighbours, of models that are on their way or have failed, of what groups say."""
    if (apart := far_apart(service.version for service in status.services)) is not None:
        advice = "which is tried with neighbouring minor versions alone; replace the older instances."
        yield f"{apart[0]} and {apart[1]} run side by side, {advice}"
    yield from _news_of(status.hosts)
    for group in status.groups:
        if group.message:
            yield f"{group.group}: {group.message}"
        if group.streamed is not None:
            yield f"{group.group}: {described_weights(group.streamed)}"
        yield from (f"{group.group}: {line}" for line in described_traits(group.traits))


def _hosts_table(hosts: Iterable[HostStatus]) -> list[Table]:
    """None where there are no hosts."""
    table = _table("Hosts", "host", "memory", "promised", "models asleep")
    for host in hosts:
        asleep = ", ".join(model.model for model in host.models if model.state == "sleeping")
        figures = (megabytes(host.memory), megabytes(host.used), escape(asleep) or "-")
        table.add_row(escape(host.instance), *figures)
    return [table] if table.rows else []


def _news_of(hosts: Iterable[HostStatus]) -> Iterator[str]:
    """Of models that are on their way, or have failed."""
    for host in hosts:
        for model in host.models:
            if model.state == "failed":
                yield f"{host.instance}: {model.model} has failed: {model.error}"
            elif model.state in ("downloading", "loading"):
                share = f", {model.done / model.total:.0%}" if model.total else ""
                yield f"{host.instance}: {model.model} is {model.state}{share}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in NUMBERS else "left", overflow="fold")
    return table


def _coloured(state: str) -> str:
    colour = {"ready": "green", "busy": "green", "starting": "yellow", "draining": "yellow"}.get(state, "red")
    return f"[{colour}]{state}[/]"


def _usage(pid: int) -> tuple[str, str]:
    """CPU seconds and resident memory of a process of this machine; blank for others."""
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return f"{times.user + times.system:.1f}", f"{process.memory_info().rss / (1 << 20):.0f} MiB"
    except psutil.Error:
        return UNKNOWN


def add_to(app: typer.Typer) -> None:
    app.command()(status)
