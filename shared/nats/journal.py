"""Reading the journal: token frames and records of generations, again, in the order of their recording.

The gateway reads it when live frames were missed; a client that comes back reads it from the
position it knows.
"""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from datetime import UTC, datetime
from typing import Generic, NamedTuple, TypeVar

import msgspec
import structlog
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from shared.messages import TokenFrame
from shared.messages.records import GenerationRecord, GenerationRecords
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.streams import read_stream

T = TypeVar("T")

log = structlog.get_logger(__name__)
CLOCK_MARGIN = 5.0  # seconds that two machines' clocks may differ by, where a time is all that is known


class StartPosition(NamedTuple):
    """Where something may begin in the journal: behind a number, which needs no clock; or at a time."""

    behind: int = -1  # a number in the stream; -1: not known
    # Unix seconds by the broker's clock, where the number is not known; 0: the journal's beginning.
    since: float = 0.0


def log_begin(record: GenerationRecord) -> StartPosition:
    """Where the log of a generation begins. Records of older gateways do not say behind which number."""
    return StartPosition(record.log_behind, record.created - CLOCK_MARGIN)


def earliest(begins: Iterable[StartPosition]) -> StartPosition | None:
    """Where one must begin to read for all of them; None: there are none."""
    found = list(begins)
    if not found:
        return None
    return StartPosition(min(begin.behind for begin in found), min(begin.since for begin in found))


class JournalEnd:
    """How far the journal has come, as this process knows: whatever is published from now on stands behind it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.number = -1  # -1: nothing is known

    def on_stored(self, number: int) -> None:
        """The broker has told that a message is stored there."""
        self.number = max(self.number, number)

    async def look(self) -> int:
        """Asks the broker: a stream that was made anew, or has lost its last messages with its machine, begins
        again further down. Raises one of `BROKER_ERRORS`."""
        info = await self._bus.jetstream().stream_info(subjects.JOURNAL_STREAM)
        self.number = info.state.last_seq
        return self.number


def replay(bus: Bus, consumer: str, begin: StartPosition) -> AsyncIterator[TokenFrame]:
    """The recorded frames of `consumer` from `begin` to the newest; see `JournalReader.read`."""
    return JournalReader(bus, consumer).read(begin)


async def recorded_since(bus: Bus, writer: str, since: float) -> AsyncIterator[tuple[float, GenerationRecords]]:
    """The records of the gateway that writes as `writer`, from `since` (unix seconds by the broker's clock) on, each
    with the time at which it was stored."""
    reader = SubjectReader(bus, subjects.records(writer, "*"), GenerationRecords)
    async with contextlib.aclosing(reader.read_stored(StartPosition(since=since))) as messages:
        async for message in messages:
            yield message


async def recorded_in(bus: Bus, writer: str, slot: str) -> AsyncGenerator[GenerationRecords, None]:
    """The records of one slot of the gateway that writes as `writer`. Whoever knows no more than an id can have them
    looked for, so no consumer is made, which the broker would keep. Raises one of `BROKER_ERRORS`."""
    subject, number = subjects.records(writer, slot), 0
    decoder = msgspec.msgpack.Decoder(GenerationRecords)
    while True:
        try:
            message = await bus.jetstream().get_msg(subjects.JOURNAL_STREAM, seq=number + 1, subject=subject, next=True)
        except NotFoundError:
            return
        number = message.seq or 0
        try:
            yield decoder.decode(message.data or b"")
        except msgspec.DecodeError as error:
            log.warning("undecodable_record", subject=subject, sequence=number, error=str(error))


def read_messages(bus: Bus, subject: str, config: ConsumerConfig) -> AsyncGenerator[Msg, None]:
    """The journal's messages of `subject` from where `config` begins to the newest; see `read_stream`."""
    return read_stream(bus, subjects.JOURNAL_STREAM, subject, config, timeout=5)


def from_moment(since: float) -> ConsumerConfig:
    """A reading of the journal that begins at `since` (unix seconds; 0: at its beginning)."""
    config = ConsumerConfig(ack_policy=AckPolicy.NONE, inactive_threshold=30, mem_storage=True)
    if not since:
        return config
    return config.evolve(deliver_policy=DeliverPolicy.BY_START_TIME, opt_start_time=datetime.fromtimestamp(since, UTC))


class SubjectReader(Generic[T]):
    """Reads a subject of the journal, time and again: what was read to its end is not read twice."""

    def __init__(self, bus: Bus, subject: str, message_type: type[T]) -> None:
        self._bus = bus
        self._subject = subject
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self._read_to = 0  # number in the stream of the last message of a complete reading; 0: there was none

    async def read(self, begin: StartPosition) -> AsyncGenerator[T, None]:
        """Yields the messages from `begin` to the newest, then ends.

        It begins behind the last reading that was complete, where that is later. A message that cannot be
        decoded is logged and left out. Raises one of `BROKER_ERRORS` when the broker does not answer,
        or the connection is cut meanwhile.
        """
        async with contextlib.aclosing(self.read_stored(begin)) as messages:
            async for _, message in messages:
                yield message

    async def read_stored(self, begin: StartPosition) -> AsyncGenerator[tuple[float, T], None]:
        """As `read`, each message with the time (unix seconds, the broker's clock) at which it was stored."""
        last = self._read_to
        config = await self._start(begin)
        async with contextlib.aclosing(read_messages(self._bus, self._subject, config)) as messages:
            async for message in messages:
                last = message.metadata.sequence.stream
                try:
                    decoded = self._decoder.decode(message.data)
                except msgspec.DecodeError as error:
                    log.warning("undecodable_frame", subject=message.subject, sequence=last, error=str(error))
                    continue
                yield message.metadata.timestamp.timestamp(), decoded
        self._read_to = last

    async def _start(self, begin: StartPosition) -> ConsumerConfig:
        behind = max(begin.behind, self._read_to)
        if behind > 0:
            info = await self._bus.jetstream().stream_info(subjects.JOURNAL_STREAM)
            if info.state.last_seq >= behind:
                return from_moment(0).evolve(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=behind + 1)
            self._read_to = 0  # the stream was made anew
        return from_moment(begin.since if begin.behind else 0)


class JournalReader(SubjectReader[TokenFrame]):
    """Reads the token frames of one consumer."""

    def __init__(self, bus: Bus, consumer: str) -> None:
        super().__init__(bus, subjects.tokens(consumer), TokenFrame)
