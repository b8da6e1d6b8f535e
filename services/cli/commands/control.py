"""`ryzanstein drain` and `undrain`: take a group out of service, and back."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Annotated

import typer
from rich.console import Console

from services.cli.target import DataDir, NatsUrl, known_group, nats_of_stack
from services.cli.ui import console, print_columns, say
from shared.config import CommonSettings
from shared.errors import BrokerUnavailable, ConfigurationError, DeadlineExceeded
from shared.messages import ControlCommand, ControlReply, Drain, GroupRecord, Undrain
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket

ANSWER_TIMEOUT = 5.0  # seconds that a leader has to answer a command

Group = Annotated[str, typer.Argument(help="The group, as `ryzanstein status` names it.")]
Report = Callable[[GroupRecord], None]  # called with what is left of the group whenever it changes


def drain(
    group: Group,
    wait: Annotated[bool, typer.Option(help="Wait until the group has left.")] = True,
    grace: Annotated[
        float | None,
        typer.Option(
            help="Seconds for running generations to finish; the rest continues in other groups.",
            min=0,
            show_default="as the executor is set",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait; 0: no limit.", min=0)] = 0,
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
) -> None:
    """Take a group out of service: it accepts nothing more, finishes or hands over what runs, and leaves."""
    settings = nats_of_stack(data_dir, nats_url)
    screen = console()
    with screen.status(f"{group}: draining") as progress:
        left, groups = asyncio.run(
            drain_group(
                settings,
                group,
                grace=-1.0 if grace is None else grace,
                wait=wait,
                timeout=timeout,
                report=lambda record: progress.update(left_of(record)),
            )
        )
    print_groups(groups, screen)
    if left:
        say(screen, f"{group} has left.")
    elif wait:
        raise DeadlineExceeded(
            f"{group} has not left within {timeout:g} s; it goes on draining. See `ryzanstein status`."
        )


def undrain(group: Group, data_dir: DataDir = None, nats_url: NatsUrl = "") -> None:
    """Cancel a drain that is under way; a group that has left must be started again."""
    asyncio.run(undrain_group(nats_of_stack(data_dir, nats_url), group))
    say(console(), f"{group} accepts requests again.")


async def drain_group(
    settings: CommonSettings, group: str, *, grace: float, wait: bool, timeout: float, report: Report
) -> tuple[bool, dict[str, GroupRecord]]:
    """Has `group` accept nothing more, and waits for its end for up to `timeout` seconds (0: for ever). Returns whether
    it has left, and all groups of its model as they stand.

    `grace`: seconds that what runs may take to finish; below 0: as the executor's settings say. What has not
    finished then goes on in other groups. Raises `ConfigurationError` for a group that is not there, and
    `BrokerUnavailable`.
    """
    async with Bus.session(settings, "ryzanstein drain") as bus:
        bucket = await Bucket.open(bus, subjects.GROUPS_BUCKET, GroupRecord)
        record = known_group(await bucket.items(), group)
        await _command(bus, record, Drain(grace))
        left = False
        with contextlib.suppress(TimeoutError):
            if wait:
                async with asyncio.timeout(timeout or None):
                    await _gone(bucket, record, report)
                left = True
        groups = await bucket.items()
    return left, {name: one for name, one in groups.items() if one.model == record.model}


async def undrain_group(settings: CommonSettings, group: str) -> None:
    """Takes back a drain that is under way. Raises `ConfigurationError`, `BrokerUnavailable`."""
    async with Bus.session(settings, "ryzanstein undrain") as bus:
        bucket = await Bucket.open(bus, subjects.GROUPS_BUCKET, GroupRecord)
        await _command(bus, known_group(await bucket.items(), group), Undrain())


async def _command(bus: Bus, record: GroupRecord, command: ControlCommand) -> None:
    try:
        reply = await bus.request(subjects.control(record.group), command, ControlReply, timeout=ANSWER_TIMEOUT)
    except BrokerUnavailable:
        raise BrokerUnavailable(
            f"The group {record.group} ({record.state}) does not answer; wait until it is ready, or stop its executor."
        ) from None
    if not reply.ok:
        raise ConfigurationError(reply.error)


async def _gone(bucket: Bucket[GroupRecord], record: GroupRecord, report: Report) -> None:
    """Returns when that life of the group is over."""
    async for update in bucket.watch():
        if update is None or update[0] != record.group:
            continue
        now = update[1]
        if now is None or now.state in ("gone", "hung") or now.epoch != record.epoch:
            return
        report(now)


def left_of(record: GroupRecord) -> str:
    """What a group still has to do, in a few words."""
    load = record.load
    return f"{record.group}: {record.state}, {load.running} running, {load.waiting} waiting"


def print_groups(groups: Mapping[str, GroupRecord], console: Console) -> None:
    """What is left, and where it can go."""
    rows = [("group", "state", "running", "waiting", "KV used")]
    for name, record in sorted(groups.items()):
        load = record.load
        used = 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
        rows.append((name, record.state, str(load.running), str(load.waiting), f"{used:.1%}"))
    print_columns(console, rows, right=(2, 3))


def add_to(app: typer.Typer) -> None:
    app.command()(drain)
    app.command()(undrain)
