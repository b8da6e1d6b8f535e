"""A report from the recorded journal in NATS."""

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import UTC, tzinfo
from typing import NamedTuple

import msgspec
from nats.aio.msg import Msg
from nats.js.api import StreamInfo
from nats.js.errors import NotFoundError

from services.cli.sla.intervals import Interval
from services.cli.sla.ledger import PATIENCE, Ledger
from services.cli.sla.periods import shown
from services.cli.sla.report import Scope
from shared.config import CommonSettings
from shared.errors import ConfigurationError, RyzansteinError
from shared.messages import TokenFrame
from shared.messages.records import GenerationRecords
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.errors import BROKER_ERRORS, broker_error
from shared.nats.journal import from_moment, read_messages

Progress = Callable[[float], None]
"""Told the share of the reading that is done."""

_frames = msgspec.msgpack.Decoder(TokenFrame)
_records = msgspec.msgpack.Decoder(GenerationRecords)
_TOKENS = subjects.ALL_TOKENS.partition("*")[0]


class NoData(RyzansteinError):
    """The source knows nothing of the period."""


class Findings(NamedTuple):
    """What a source says of a period."""

    source: str
    covered: list[Interval]
    scopes: list[Scope]
    notes: list[str]


async def from_journal(
    settings: CommonSettings, period: Interval, *, silence: float, zone: tzinfo, progress: Progress
) -> Findings:
    """Reads the journal from a while before the period to its end.

    Raises `BrokerUnavailable`, `NoData`, and `ConfigurationError` where NATS has no journal.
    """
    bus = await Bus.connect(settings, "ryzanstein sla")
    try:
        info = await _journal(bus)
        first = await _first(bus, info)
        covered = _covered(info, first, period, bus.max_payload)
        if covered is None:
            raise NoData(_nothing(first, period, zone))
        ledger = Ledger(period, silence=silence)
        await _read(bus, ledger, period, progress)
    except BROKER_ERRORS as error:
        raise broker_error("read the journal", error) from error
    finally:
        await bus.close()
    scopes = ledger.scopes(covered.end, [covered])
    return Findings(f"journal in NATS at {bus.where}", [covered], scopes, _notes(ledger, scopes))


async def _journal(bus: Bus) -> StreamInfo:
    try:
        return await bus.jetstream().stream_info(subjects.JOURNAL_STREAM)
    except NotFoundError:
        raise ConfigurationError(
            f"NATS at {bus.where} has no journal (stream {subjects.JOURNAL_STREAM}); no gateway has used it yet. "
            "Name another server with --nats-url, or a Prometheus with --prometheus."
        ) from None


async def _first(bus: Bus, info: StreamInfo) -> float | None:
    """When the oldest message was stored; None: there is none."""
    if not info.state.messages:
        return None
    async with contextlib.aclosing(read_messages(bus, ">", from_moment(0))) as messages:
        async for message in messages:
            return _stamp(message)
    return None


def _covered(info: StreamInfo, first: float | None, period: Interval, margin: int) -> Interval | None:
    """The part of the period of which the journal has everything; None: no part.

    Messages go for their age, or because there are too many bytes; in the latter case the journal is full.
    """
    now, config, state = time.time(), info.config, info.state
    begin = now - (config.max_age or float("inf"))
    full = 0 < (config.max_bytes or 0) <= state.bytes + margin
    if state.first_seq > 1 and full and first is not None:
        begin = max(begin, first)
    if state.first_seq <= 1 and info.created is not None:
        begin = max(begin, info.created.timestamp())
    known = Interval(max(begin, period.begin), min(now, period.end))
    return known if known.end > known.begin else None


def _nothing(first: float | None, period: Interval, zone: tzinfo) -> str:
    has = f"it begins at {shown(first, zone)}" if first is not None else "it is empty"
    return (
        f"The journal has nothing of the period from {shown(period.begin, zone)} to {shown(period.end, zone)}; "
        f"{has}. Keep it for longer with RYZANSTEIN_JOURNAL_MAX_AGE and RYZANSTEIN_JOURNAL_MAX_BYTES, or name a "
        "Prometheus with --prometheus."
    )


async def _read(bus: Bus, ledger: Ledger, period: Interval, progress: Progress) -> None:
    read = 0
    begin = from_moment(max(1.0, period.begin - PATIENCE))
    async with contextlib.aclosing(read_messages(bus, ">", begin)) as messages:
        async for message in messages:
            at = _stamp(message)
            if at >= period.end:
                break
            _take(ledger, message, at)
            read += 1
            if not read % 256:
                progress(read / (read + message.metadata.num_pending))
    progress(1.0)


def _take(ledger: Ledger, message: Msg, at: float) -> None:
    """What cannot be decoded is of another version, and no reason to say nothing of the rest."""
    with contextlib.suppress(msgspec.DecodeError):
        if message.subject.startswith(_TOKENS):
            ledger.on_frame(at, _frames.decode(message.data))
        else:
            ledger.on_records(at, _records.decode(message.data).records)


def _stamp(message: Msg) -> float:
    """When the broker stored it: one clock for everything but the beginning of a request."""
    return message.metadata.timestamp.replace(tzinfo=UTC).timestamp()


def _notes(ledger: Ledger, scopes: Sequence[Scope]) -> list[str]:
    notes = [
        "The journal has no requests that were refused at once (4xx), nor those that NATS did not take: a gateway "
        "that answered 503 while the broker was away shows in Prometheus alone."
    ]
    if ledger.under_way:
        notes.append(f"{ledger.under_way} requests were under way at the end and are not counted.")
    if ledger.without_record:
        notes.append(
            f"{ledger.without_record} generations have tokens and no record, which was older than the journal; "
            "they are not counted."
        )
    requests = scopes[0].requests
    if not requests.completed + requests.failed:
        notes.append("No request ended in the period.")
    return notes
