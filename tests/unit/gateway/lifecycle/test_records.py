"""How far the journal is behind, and what is told of records that it does not take or give."""

import asyncio
import time

import pytest

from services.gateway.lifecycle import records
from services.gateway.lifecycle.records import WINDOW, JournalLag, RecordReader, RecordWriter
from shared.errors import BrokerUnavailable, LinkLost
from shared.messages.records import GenerationRecord
from tests.unit.executor.scheduler.stepped_ring import ask


def test_what_waits_counts_with_its_age_and_what_is_stored_with_the_time_it_took() -> None:
    lag = JournalLag()
    assert lag.seconds(0) == 0
    lag.given(10.0)
    lag.given(11.0)
    assert lag.seconds(12.0) == 2.0
    lag.stored(12.5)
    assert lag.seconds(12.5) == 2.5, "longer than the age of the other"
    lag.stored(12.6)
    assert lag.seconds(13.0) == 2.5, "the slowest of the second"
    assert lag.seconds(12.5 + WINDOW) == 2.5
    assert lag.seconds(12.7 + WINDOW) == 0


def test_many_records_of_a_second_take_no_room() -> None:
    lag = JournalLag()
    for number in range(10_000):
        lag.given(number / 1000)
        lag.stored(number / 1000 + 0.0005)
    assert len(lag._slowest) <= WINDOW + 1


class Lines:
    """A bus of which the first `lost` messages are lost with their connection."""

    max_payload = 1 << 20

    def __init__(self, lost: int, error: Exception, *, clustered: bool = False) -> None:
        self.lost, self.error, self.clustered = lost, error, clustered
        self.stored = 0

    async def publish_durable(self, subject: str, message: object) -> int:
        if self.lost:
            self.lost -= 1
            raise self.error
        self.stored += 1
        return self.stored


class End:
    """Of a journal: how far it has come is of no interest here."""

    def on_stored(self, number: int) -> None:
        return


def writer_on(bus: Lines) -> RecordWriter:
    return RecordWriter(bus, "w", End(), None)  # type: ignore[arg-type]


def record() -> GenerationRecord:
    return GenerationRecord("0" * 32, "chat", 0.0, [ask(f"{'0' * 32}-0")])


def silence() -> BrokerUnavailable:
    error = BrokerUnavailable("no answer in time")
    error.__cause__ = TimeoutError()
    return error


@pytest.mark.parametrize(("times", "error"), [(1, LinkLost("cut")), (2, silence())], ids=["a connection", "a leader"])
async def test_what_was_lost_with_a_connection_or_a_clusters_leader_is_stored_again(
    times: int, error: Exception
) -> None:
    """The one that led may be stopped or cut off: then nobody answers, until the others have missed it."""
    bus = Lines(times, error, clustered=times > 1)
    writer = writer_on(bus)
    await writer.write(record())
    await writer.stop()
    assert bus.stored == 1


async def test_a_cluster_that_stays_silent_is_told_to_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "ELECTION", 0.0)
    bus = Lines(2, silence(), clustered=True)
    writer = writer_on(bus)
    with pytest.raises(BrokerUnavailable, match="no answer"):
        await writer.write(record())
    await writer.stop()
    assert (bus.lost, bus.stored) == (1, 0)


@pytest.mark.parametrize("error", [BrokerUnavailable("no answer"), ValueError("no answer that can be read")])
async def test_what_is_not_stored_is_told_to_whoever_waits(error: Exception) -> None:
    """And the next one is stored."""
    writer = writer_on(Lines(1, error))
    stored = writer.write(record())
    with pytest.raises(type(error), match="no answer"):
        await stored
    await writer.write(record())
    await writer.stop()
    assert writer.lag.seconds(time.monotonic()) < WINDOW


async def test_a_journal_that_does_not_answer_is_told_to_all_who_look(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = RecordReader(None, None)  # type: ignore[arg-type]

    async def nothing(spot: object, wanted: set[str]) -> dict[str, GenerationRecord]:
        raise TimeoutError

    monkeypatch.setattr(reader, "collect", nothing)
    identity = "0" * 32
    found = await asyncio.gather(reader.find(identity), reader.find(identity), return_exceptions=True)
    assert [type(error) for error in found] == [BrokerUnavailable, BrokerUnavailable]
