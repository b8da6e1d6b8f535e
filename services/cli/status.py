"""What runs where: the health monitor's records, for people and for machines."""

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from shared import subjects
from shared.bus import Bus
from shared.config import CommonSettings
from shared.messages import GroupRecord, ServiceRecord
from shared.stores import Bucket


class ServiceStatus(msgspec.Struct, frozen=True):
    name: str
    instance: str
    pid: int
    state: str


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
    kv_used: float
    """Share of the KV blocks that sequences hold, 0 to 1."""
    ranks: list[RankStatus]


class Status(msgspec.Struct, frozen=True):
    """The shape of `ryzanstein status --json`; scripts rely on it."""

    services: list[ServiceStatus]
    groups: list[GroupStatus]


async def read_status(settings: CommonSettings) -> Status:
    """Reads the health monitor's buckets. Raises `BrokerUnavailable`."""
    bus = await Bus.connect(settings, "ryzanstein status")
    try:
        services = await (await Bucket.open(bus, subjects.SERVICES_BUCKET, ServiceRecord)).items()
        groups = await (await Bucket.open(bus, subjects.GROUPS_BUCKET, GroupRecord)).items()
    finally:
        await bus.close()
    return Status(
        services=sorted(map(_service, services.values()), key=lambda one: (one.name, one.instance)),
        groups=sorted(map(_group, groups.values()), key=lambda one: one.group),
    )


def _service(record: ServiceRecord) -> ServiceStatus:
    return ServiceStatus(record.name, record.instance, record.pid, record.state)


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
    )


def print_status(status: Status, console: Console) -> None:
    """Two tables: services with their CPU time and memory, groups with their ranks."""
    services = Table(
        "service", "instance", "pid", "state", "CPU s", "memory", title="Services", title_justify="left"
    )
    for service in status.services:
        seconds, memory = _usage(service.pid)
        services.add_row(
            service.name, service.instance, str(service.pid), _coloured(service.state), seconds, memory
        )
    console.print(services)
    groups = Table(title="Groups", title_justify="left")
    for heading in (
        "group",
        "model",
        "state",
        "running",
        "waiting",
        "KV used",
        "rank",
        "pid",
        "step",
        "memory",
    ):
        groups.add_column(heading)
    for group in status.groups:
        columns = [group.group, group.model, _coloured(group.state), str(group.running), str(group.waiting)]
        columns.append(f"{group.kv_used:.1%}")
        rows = [[str(rank.rank), str(rank.pid), str(rank.step), _usage(rank.pid)[1]] for rank in group.ranks]
        for row in rows or [["-"] * 4]:
            groups.add_row(*columns, *row)
            columns = [""] * len(columns)
    console.print(groups)


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
        return "-", "-"
