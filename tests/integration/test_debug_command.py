"""`ryzanstein debug` and an executor that tells little: each has its sentence."""

import gzip
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from services.cli.commands import debug
from services.cli.commands.debug import fetch_dump, fetch_profile
from shared.config import CommonSettings
from shared.errors import BrokerUnavailable, ConfigurationError, DeadlineExceeded
from shared.messages import GroupLoad, GroupRecord
from shared.messages.debugging import (
    DUMP_VERSION,
    DebugCommand,
    Dump,
    FetchCommand,
    JobFile,
    JobReply,
    Piece,
    ProfileCommand,
    ProfileSummary,
)
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket

DUMP = Dump(DUMP_VERSION, "g", "m", "i", "host", 5, 0.0, 0.2, "The ring is idle.", "ready")
ZIPPED = gzip.compress(msgspec.json.encode(DUMP))
DONE = JobReply("1", True, files=[JobFile("dump.json.gz", len(ZIPPED))])
Answer = Callable[[DebugCommand], JobReply | Piece | None]


def answers(reply: JobReply, data: bytes = b"") -> Answer:
    """`reply` to every command, and `data` of every file."""

    def answer(command: DebugCommand) -> JobReply | Piece:
        return Piece(data[command.offset :]) if isinstance(command, FetchCommand) else reply

    return answer


async def be(bus: Bus, answer: Answer, group: str = "g") -> None:
    """Is that group's executor from now on."""

    async def on_command(command: DebugCommand) -> JobReply | Piece | None:
        return answer(command)

    await bus.subscribe(subjects.debug(group), DebugCommand, on_command)  # type: ignore[arg-type]


async def register(bus: Bus, *groups: str) -> None:
    records = await Bucket.open(bus, subjects.GROUPS_BUCKET, GroupRecord)
    for group in groups:
        await records.put(group, GroupRecord(group, "m", "ready", 5, [], GroupLoad()))


async def test_the_one_group_that_there_is_needs_no_name(bus: Bus, nats_settings: CommonSettings) -> None:
    await be(bus, answers(DONE, ZIPPED))
    with pytest.raises(ConfigurationError, match="Name a group; there is none at the moment"):
        await fetch_dump(nats_settings, "", 0.0, 30)
    await register(bus, "g")
    assert await fetch_dump(nats_settings, "", 0.0, 30) == DUMP
    await register(bus, "h")
    with pytest.raises(ConfigurationError, match="Name a group; the groups are: g, h"):
        await fetch_dump(nats_settings, "", 0.0, 30)


async def test_a_group_whose_executor_has_ended_is_told_from_one_that_never_was(
    bus: Bus, nats_settings: CommonSettings
) -> None:
    await register(bus, "g")
    with pytest.raises(ConfigurationError, match=r"of the group g \(ready\) is not there"):
        await fetch_dump(nats_settings, "g", 0.0, 30)
    with pytest.raises(ConfigurationError, match="There is no group h"):
        await fetch_dump(nats_settings, "h", 0.0, 30)


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (answers(JobReply(error="The ring is gone.")), ConfigurationError, "The ring is gone"),
        (answers(JobReply("1")), DeadlineExceeded, "has not finished within 0 s; .* larger --timeout"),
        (answers(DONE), BrokerUnavailable, "does not have dump.json.gz any more; ask again"),
        (lambda command: None, BrokerUnavailable, "group g does not answer"),
        (
            answers(JobReply("1", True, files=[JobFile("dump.json.gz", 2 << 30)])),
            ConfigurationError,
            "dump.json.gz has 2,147,483,648 bytes; profile fewer steps or ranks",
        ),
    ],
    ids=["error", "never done", "gone", "no answer", "too large"],
)
async def test_what_goes_wrong_is_said(
    bus: Bus,
    nats_settings: CommonSettings,
    monkeypatch: pytest.MonkeyPatch,
    answer: Answer,
    kind: type[Exception],
    message: str,
) -> None:
    monkeypatch.setattr(debug, "ANSWER_TIMEOUT", 0.2)
    await be(bus, answer)
    with pytest.raises(kind, match=message):
        await fetch_dump(nats_settings, "g", 0.0, 0)


async def test_a_profile_s_files_go_into_a_directory_that_can_be_made(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path
) -> None:
    summary = msgspec.json.encode([ProfileSummary(0, 5, trace="rank-0")])
    files = {"rank-0": b"trace", "summary.json": summary}
    done = JobReply("1", True, files=[JobFile(name, len(data)) for name, data in files.items()])

    def answer(command: DebugCommand) -> JobReply | Piece:
        return (
            Piece(files[command.name][:4] if not command.offset else files[command.name][command.offset :])
            if (isinstance(command, FetchCommand))
            else done
        )

    await be(bus, answer)
    found = await fetch_profile(nats_settings, "g", ProfileCommand(), tmp_path / "new", lambda text: None)
    assert [one.trace for one in found] == ["rank-0"]
    assert (tmp_path / "new" / "rank-0").read_bytes() == b"trace"
    with pytest.raises(ConfigurationError, match=r"rank-0 cannot be made .*; name another with --output"):
        await fetch_profile(nats_settings, "g", ProfileCommand(), tmp_path / "new" / "rank-0", lambda text: None)
