"""Reading the journal: token frames and records of generations, again, in the order of their recording.

The gateway reads it when live frames were missed; a client that comes back reads it from the
position it knows.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime
from typing import Generic, TypeVar

import msgspec
import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from shared import subjects
from shared.broker_errors import BROKER_ERRORS
from shared.bus import Bus
from shared.messages import TokenFrame
from shared.records import GenerationRecords

T = TypeVar("T")

log = structlog.get_logger(__name__)
BATCH = 256


def replay(bus: Bus, consumer: str, since: float) -> AsyncIterator[TokenFrame]:
    """The recorded frames of `consumer` from `since` (unix seconds) to the newest; see `JournalReader.read`."""
    return JournalReader(bus, consumer).read(since)


def recorded(bus: Bus, writer: str, slot: str, since: float = 0.0) -> AsyncIterator[GenerationRecords]:
    """The records of the gateway that writes as `writer`, of one slot, or of all (`*`) from `since` on."""
    return SubjectReader(bus, subjects.records(writer, slot), GenerationRecords).read(since)


async def read_messages(bus: Bus, subject: str, config: ConsumerConfig) -> AsyncGenerator[Msg, None]:
    """The journal's messages of `subject` from where `config` begins to the newest, without a gap.

    Raises one of `BROKER_ERRORS` when the broker does not answer, or the connection is cut meanwhile.
    """
    subscription = await bus.jetstream().pull_subscribe(
        subject, stream=subjects.JOURNAL_STREAM, config=config
    )
    try:
        pending = (await subscription.consumer_info()).num_pending or 0
        delivered = 0
        while pending > 0:
            messages = await subscription.fetch(min(pending, BATCH), timeout=5)
            for message in messages:
                delivered += 1
                if message.metadata.sequence.consumer != delivered:
                    raise nats.errors.Error("the connection was cut within a reading of the journal")
                yield message
            pending = (messages[-1].metadata.num_pending if messages else 0) or 0
    finally:
        with contextlib.suppress(*BROKER_ERRORS):  # the broker removes an inactive consumer by itself
            await subscription.unsubscribe()


def from_moment(since: float) -> ConsumerConfig:
    """A reading of the journal that begins at `since` (unix seconds; 0: at its beginning)."""
    config = ConsumerConfig(ack_policy=AckPolicy.NONE, inactive_threshold=30, mem_storage=True)
    if not since:
        return config
    return config.evolve(
        deliver_policy=DeliverPolicy.BY_START_TIME, opt_start_time=datetime.fromtimestamp(since, UTC)
    )


class SubjectReader(Generic[T]):
    """Reads a subject of the journal, time and again: what was read to its end is not read twice."""

    def __init__(self, bus: Bus, subject: str, message_type: type[T]) -> None:
        self._bus = bus
        self._subject = subject
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self._read_to = 0
        """Number in the stream of the last message of a complete reading; 0: there was none."""
        self._read_at = 0.0
        """Unix seconds at which that reading began."""

    async def read(self, since: float) -> AsyncGenerator[T, None]:
        """Yields the messages from `since` (unix seconds; 0: all) to the newest, then ends.

        It begins behind the last reading that was complete, where that is later. A message that cannot be
        decoded is logged and left out. Raises one of `BROKER_ERRORS` when the broker does not answer,
        or the connection is cut meanwhile.
        """
        began, last = time.time(), self._read_to
        config = await self._start(since)
        async with contextlib.aclosing(read_messages(self._bus, self._subject, config)) as messages:
            async for message in messages:
                last = message.metadata.sequence.stream
                try:
                    decoded = self._decoder.decode(message.data)
                except msgspec.DecodeError as error:
                    log.warning("undecodable_frame", subject=message.subject, sequence=last, error=str(error))
                    continue
                yield decoded
        self._read_to, self._read_at = last, began

    async def _start(self, since: float) -> ConsumerConfig:
        if self._read_to and since < self._read_at:
            info = await self._bus.jetstream().stream_info(subjects.JOURNAL_STREAM)
            if info.state.last_seq >= self._read_to:  # else the stream was made anew
                return from_moment(0).evolve(
                    deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=self._read_to + 1
                )
        return from_moment(since)


class JournalReader(SubjectReader[TokenFrame]):
    """Reads the token frames of one consumer."""

    def __init__(self, bus: Bus, consumer: str) -> None:
        super().__init__(bus, subjects.tokens(consumer), TokenFrame)
