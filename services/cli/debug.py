"""The work behind `ryzanstein debug`: asks a group's orchestrator, waits, fetches what there is."""

import asyncio
import gzip
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from services.cli.drain import known_group
from shared.config import CommonSettings
from shared.errors import BrokerUnavailable, ConfigurationError, DeadlineExceeded, NobodyThere
from shared.messages import GroupRecord
from shared.messages.debugging import (
    DebugCommand,
    Dump,
    DumpCommand,
    FetchCommand,
    JobReply,
    Piece,
    ProfileCommand,
    ProfileSummary,
    ResultCommand,
)
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket

ANSWER_TIMEOUT = 5.0
"""Seconds that an orchestrator has to answer a command: it does so at once."""
POLL = 0.1
WRITE_TIME = 90.0
"""Seconds that ranks may take to write a profile, beyond the time-out of the profile itself."""
MOST_BYTES = 1 << 30
"""Of one file."""


async def fetch_dump(settings: CommonSettings, group: str, wait: float, timeout: float) -> Dump:
    """`wait`: seconds for ranks that do not answer. Raises `ConfigurationError`, `BrokerUnavailable`,
    `DeadlineExceeded`."""
    bus = await Bus.connect(settings, "ryzanstein debug")
    try:
        group_desk = await _Desk.of(bus, group)
        reply = await group_desk.run(DumpCommand(wait), timeout)
        data = await group_desk.fetch(reply.job, "dump.json.gz", reply.files[0].size)
    finally:
        await bus.close()
    return msgspec.json.decode(gzip.decompress(data), type=Dump)


async def fetch_profile(
    settings: CommonSettings,
    group: str,
    command: ProfileCommand,
    output: Path,
    report: Callable[[str], object],
) -> list[ProfileSummary]:
    """Traces go to the directory `output`, which is made. `report` is told how it goes. Raises as `fetch_dump`."""
    bus = await Bus.connect(settings, "ryzanstein debug")
    try:
        group_desk = await _Desk.of(bus, group)
        reply = await group_desk.run(command, command.timeout + WRITE_TIME)
        _make(output)
        found: list[ProfileSummary] = []
        for file in reply.files:
            report(f"fetching {file.name} ({file.size / 1e6:.1f} MB)")
            data = await group_desk.fetch(reply.job, file.name, file.size)
            if file.name == "summary.json":
                found = msgspec.json.decode(data, type=list[ProfileSummary])
            else:
                (output / Path(file.name).name).write_bytes(data)
    finally:
        await bus.close()
    return found


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"The directory {directory} cannot be made ({error.strerror}); name another with --output."
        ) from None


class _Desk:
    """A group's orchestrator."""

    def __init__(self, bus: Bus, group: str) -> None:
        self._bus = bus
        self._group = group

    @classmethod
    async def of(cls, bus: Bus, group: str) -> "_Desk":
        """That of `group`, or of the one group that there is where none is named. Raises `ConfigurationError`."""
        if group:
            return cls(bus, group)
        records = await (await Bucket.open(bus, subjects.GROUPS_BUCKET, GroupRecord)).items()
        present = sorted(name for name, record in records.items() if record.state != "gone")
        if len(present) == 1:
            return cls(bus, present[0])
        names = f"the groups are: {', '.join(present)}" if present else "there is none at the moment"
        raise ConfigurationError(f"Name a group; {names}.")

    async def run(self, command: DebugCommand, timeout: float) -> JobReply:
        """Has the work done, and waits for it. Raises what `_ask` does, and `DeadlineExceeded`."""
        reply = await self._ask(command)
        give_up = time.monotonic() + timeout
        while not reply.done:
            if time.monotonic() >= give_up:
                raise DeadlineExceeded(
                    f"The executor of the group {self._group} has not finished within {timeout:g} s; try again, "
                    "with a larger --timeout."
                )
            await asyncio.sleep(POLL)
            reply = await self._ask(ResultCommand(reply.job))
        return reply

    async def _ask(self, command: DebugCommand) -> JobReply:
        subject = subjects.debug(self._group)
        try:
            reply = await self._bus.request(subject, command, JobReply, timeout=ANSWER_TIMEOUT)
        except NobodyThere:
            raise await self._absence() from None
        except BrokerUnavailable:
            raise BrokerUnavailable(
                f"The executor of the group {self._group} does not answer; its orchestrator is stopped or the host "
                "is overloaded: look at the process itself (`ryzanstein status` has its pid)."
            ) from None
        if reply.error:
            raise ConfigurationError(reply.error)
        return reply

    async def _absence(self) -> ConfigurationError:
        """Why nobody listens."""
        records = await (await Bucket.open(self._bus, subjects.GROUPS_BUCKET, GroupRecord)).items()
        record = known_group(records, self._group)
        return ConfigurationError(
            f"The executor of the group {self._group} ({record.state}) is not there; see its log for why it ended."
        )

    async def fetch(self, job: str, name: str, size: int) -> bytes:
        """One file of a job that is done. Raises `BrokerUnavailable` where it is gone."""
        if size > MOST_BYTES:
            raise ConfigurationError(f"{name} has {size:,} bytes; profile fewer steps or ranks.")
        data = bytearray()
        while len(data) < size:
            command = FetchCommand(job, name, len(data))
            piece = await self._bus.request(
                subjects.debug(self._group), command, Piece, timeout=ANSWER_TIMEOUT
            )
            if not piece.data:
                raise BrokerUnavailable(f"The executor does not have {name} any more; ask again.")
            data += piece.data
        return bytes(data)
