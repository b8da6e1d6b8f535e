"""`ryzanstein log-level`: what services log, while they run."""

import asyncio
import time
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console

from services.cli.target import DataDir, NatsUrl, nats_of_stack
from services.cli.ui import console, print_columns
from shared.config import CommonSettings, seconds_of
from shared.errors import BrokerUnavailable, ConfigurationError, RyzansteinError
from shared.messages import GroupRecord, LogLevel, ServiceRecord, SetLogLevel
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.service.logs import LEVELS

LEVEL_TIMEOUT = 3.0  # seconds that a service has to answer


def log_level(
    target: Annotated[
        str, typer.Argument(help="A service (gateway, executor ...), an instance, a group, or all.")
    ] = "all",
    level: Annotated[
        str, typer.Argument(metavar="|".join((*LEVELS, "usual")), help="Without it: show the current levels.")
    ] = "",
    duration: Annotated[str, typer.Option("--for", help="Reset after this time: 30s, 10m, 2h.", metavar="TIME")] = "",
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
) -> None:
    """Show or change what services log, while they run. Ranks follow their executor."""
    if level and level not in (*LEVELS, "usual"):
        raise ConfigurationError(f"There is no level {level!r}; it is one of {', '.join(LEVELS)}, usual.")
    if duration and not level:
        raise ConfigurationError("--for needs a level: ryzanstein log-level all debug --for 10m.")
    seconds = seconds_of(duration) if duration else 0.0
    if seconds is None:
        raise ConfigurationError(f"--for cannot be {duration!r}; say 30s, 10m, 2h or 1d.")
    wanted = SetLogLevel(level, seconds)
    found = asyncio.run(set_levels(nats_of_stack(data_dir, nats_url), target, wanted))
    print_levels(found, console())
    silent = [record.instance for record, answer in found if answer is None]
    if silent:
        raise BrokerUnavailable(f"No answer from {', '.join(silent)}; see `ryzanstein status`.")


async def set_levels(
    settings: CommonSettings, target: str, wanted: SetLogLevel
) -> list[tuple[ServiceRecord, LogLevel | None]]:
    """Each instance that is meant, with its answer; None: there was none. Raises `ConfigurationError` where none is
    meant, `BrokerUnavailable`."""
    async with Bus.session(settings, "ryzanstein log-level") as bus:
        services = await (await Bucket.open(bus, subjects.SERVICES_BUCKET, ServiceRecord)).items()
        groups = await (await Bucket.open(bus, subjects.GROUPS_BUCKET, GroupRecord)).items()
        meant = meant_by(target, services, groups)
        answers = await asyncio.gather(*(_ask(bus, record, wanted) for record in meant))
    return list(zip(meant, answers, strict=True))


def meant_by(
    target: str, services: Mapping[str, ServiceRecord], groups: Mapping[str, GroupRecord]
) -> list[ServiceRecord]:
    """The instances that `target` names. Raises `ConfigurationError`."""
    present = sorted(
        (record for record in services.values() if record.state != "gone"),
        key=lambda record: (record.name, record.instance),
    )
    group = groups.get(target)
    found = [
        record
        for record in present
        if target in ("all", record.name, record.instance) or (group and record.instance == group.instance)
    ]
    if not found:
        names = ", ".join(record.instance for record in present) or "none"
        raise ConfigurationError(f"No service, instance or group is called {target}; the instances are: {names}.")
    return found


async def _ask(bus: Bus, record: ServiceRecord, wanted: SetLogLevel) -> LogLevel | None:
    subject = subjects.service_control(record.name, record.instance)
    try:
        return await bus.request(subject, wanted, LogLevel, timeout=LEVEL_TIMEOUT)
    except RyzansteinError:
        return None


def print_levels(found: list[tuple[ServiceRecord, LogLevel | None]], screen: Console) -> None:
    """Who logs what, and until when."""
    rows = [("service", "instance", "level", "then")]
    for record, answer in found:
        level, then = ("no answer", "") if answer is None else (answer.error or answer.level, "")
        if answer is not None and answer.until:
            left = max(0, round(answer.until - time.time()))
            then = f"{answer.usual} in {left // 60}m {left % 60:02d}s"
        rows.append((record.name, record.instance, level, then))
    print_columns(screen, rows)


def add_to(app: typer.Typer) -> None:
    app.command("log-level")(log_level)
