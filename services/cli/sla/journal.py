"""A report from the recorded journal in NATS: its messages, in their order, to the figures of a report.

What is counted belongs to the period in which it happened: a request to that of its end, a token to that of its
arrival. So the reading begins a while before the period, to know what was under way when it began.

A model is *silent* while requests wait for it and nothing of it comes:

    request        tokens        tokens   (ring lost)              tokens of another ring, or the next life
    ───┼─────────────┼─────────────┼──────────────────────────────────┼────▶
                                   └── an outage, if longer than `silence` ──┘
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, tzinfo
from typing import Literal, NamedTuple

import msgspec
from nats.aio.msg import Msg
from nats.js.api import StreamInfo
from nats.js.errors import NotFoundError

from services.cli.sla.periods import FailingRuns, Interval, shown
from services.cli.sla.report import Failovers, Latencies, Reason, Requests, Scope, Tokens, scope_of
from shared.config import CommonSettings
from shared.errors import ConfigurationError, RyzansteinError
from shared.messages import TokenEntry, TokenFrame
from shared.messages.records import GenerationRecord, GenerationRecords
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.errors import translated
from shared.nats.journal import from_moment, read_messages

End = Literal["completed", "failed", "refused", "cancelled"]

CLIENTS_FAULT = frozenset(
    (
        "invalid_request",
        "model_not_found",
        "model_does_not_fit",
        "context_length_exceeded",
        "invalid_grammar",
        "payload_too_large",
        "rate_limit_exceeded",
        "queue_full",
    )
)
"""Codes (`shared.errors`) that a gateway answers with 4xx: nothing of ours failed."""


@dataclass(slots=True)
class Choice:
    """One generation. Attempts are fenced as a gateway does: an older one than the newest says nothing."""

    attempt: int = 0
    position: int = 0
    """Output tokens so far."""
    cached: int = 0
    last_at: float = 0.0
    """When its last tokens came."""
    moved: bool = False
    """Whether a newer attempt has begun and nothing of it has come."""
    end: End | None = None

    def take(self, group: str, entry: TokenEntry) -> bool:
        """Whether the entry is news: tokens behind those that are known, or the end."""
        if self.end is not None or entry.attempt < self.attempt:
            return False
        if entry.attempt > self.attempt:
            self.attempt, self.moved = entry.attempt, bool(self.position)
        self.cached = max(self.cached, entry.cached_tokens)
        reached = entry.position + len(entry.tokens)
        fresh = reached > self.position or bool(entry.vector)
        self.position = max(self.position, reached)
        if entry.finish and not (entry.finish == "error" and entry.retryable and group):
            self.end = _end(entry)  # else another ring goes on with it
            return True
        return fresh


def _end(entry: TokenEntry) -> End:
    if entry.finish == "error":
        return "refused" if entry.error_code in CLIENTS_FAULT else "failed"
    return "cancelled" if entry.finish == "cancelled" else "completed"


@dataclass(slots=True)
class Request:
    """One client's request as the journal shows it: its record and the entries of its choices.

    record ─────────────┐  either may come first
    entry, entry, ... ──┴▶ first token, gaps, failovers ──▶ an end of every choice ──▶ how the request ended
    """

    began: float
    heard_at: float
    model: str = ""
    """Empty until the record has come."""
    batch: bool = False
    stops: bool = False
    """Whether its text may end before its tokens do: the gateway cancels the rest."""
    prompt: int = 0
    expected: int = 0
    """Choices in all; 0: not known yet."""
    first_at: float | None = None
    choices: dict[str, Choice] = field(default_factory=dict)

    def describe(self, record: GenerationRecord, at: float) -> None:
        """The record, or a part of it, was stored at `at`.

        It began when the gateway took it; a gateway whose clock is ahead of the broker's does not shorten it.
        """
        self.began = min(record.created, at, self.began)
        first = record.outline or record.requests[0]
        self.model, self.batch = first.model, first.lane == "batch"
        self.stops = bool(record.stop)
        self.prompt += record.prompt_tokens + sum(len(request.prompt) for request in record.requests)
        self.expected = record.prompts * record.choices

    def choice(self, number: str) -> Choice:
        known = self.choices.get(number)
        if known is None:
            known = self.choices[number] = Choice()
        return known

    @property
    def output(self) -> int:
        return sum(choice.position for choice in self.choices.values())

    @property
    def cached(self) -> int:
        return max((choice.cached for choice in self.choices.values()), default=0)

    @property
    def end(self) -> End | None:
        """None while a choice goes on, or while its record is missing."""
        ends = [choice.end for choice in self.choices.values() if choice.end is not None]
        if not self.expected or len(ends) < self.expected:
            return None
        if "failed" in ends:
            return "failed"
        if "refused" in ends:
            return "refused"
        if "cancelled" in ends and not (self.stops and self.output):
            return "cancelled"
        return "completed"


PATIENCE = 600.0
"""Seconds after which a request that says nothing has failed: a gateway gives up by then (token_timeout), unless
it was lost and nobody took its place."""
LATE = 60.0
"""Seconds for which what is said of a request that has ended is known to be late."""


class Watch:
    """Whether a model answers those who wait for it."""

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._waiting = 0
        self._since = 0.0
        """When something came last, or the first of those who wait began."""
        self._silent: list[Interval] = []
        self.failing = FailingRuns()

    def begin(self, at: float) -> None:
        """A request waits."""
        if not self._waiting:
            self._since = at
        self._waiting += 1

    def news(self, at: float) -> None:
        """Something came for it."""
        self._close(at)
        self._since = max(self._since, at)

    def end(self, at: float, end: End) -> None:
        """A request waits no more."""
        self._close(at)
        self._waiting = max(0, self._waiting - 1)
        self._since = max(self._since, at)
        if end == "failed":
            self.failing.bad(at)
        elif end == "completed":
            self.failing.good(at)

    def outages(self, until: float) -> Iterator[tuple[Reason, Interval]]:
        for one in self._silent:
            yield "silent", one
        if self._waiting and until - self._since >= self._silence:
            yield "silent", Interval(self._since, until)
        for one in self.failing.outages(until):
            yield "failing", one

    def _close(self, at: float) -> None:
        if self._waiting and at - self._since >= self._silence:
            self._silent.append(Interval(self._since, at))


class Account:
    """What one model did within the period."""

    def __init__(self, silence: float) -> None:
        self.watch = Watch(silence)
        self.ends: dict[End, int] = {"completed": 0, "failed": 0, "refused": 0, "cancelled": 0}
        self.batch_lines = 0
        self.first_token, self.between_tokens, self.end_to_end = Latencies(), Latencies(), Latencies()
        self.interruption = Latencies()
        self.prompt = self.cached = self.output = 0

    def add(self, other: "Account") -> None:
        """Its figures; not its outages."""
        for end, count in other.ends.items():
            self.ends[end] += count
        self.batch_lines += other.batch_lines
        for name in ("first_token", "between_tokens", "end_to_end", "interruption"):
            getattr(self, name).merge(getattr(other, name))
        self.prompt += other.prompt
        self.cached += other.cached
        self.output += other.output

    def scope(
        self, model: str, causes: Sequence[tuple[Reason, Interval]], covered: Sequence[Interval]
    ) -> Scope:
        return scope_of(
            model,
            Requests(**self.ends, batch_lines=self.batch_lines),
            causes,
            covered,
            first_token=self.first_token.percentiles(),
            between_tokens=self.between_tokens.percentiles(),
            end_to_end=self.end_to_end.percentiles(),
            tokens=Tokens(self.prompt, self.cached, self.output),
            failovers=Failovers(self.interruption.count, self.interruption.percentiles()),
        )


class Ledger:
    """Takes records and frames in the journal's order; `scopes` at the end."""

    def __init__(self, period: Interval, *, silence: float) -> None:
        """`silence`: seconds without news from which on a model that is waited for is down."""
        self._period = period
        self._silence = silence
        self._accounts: dict[str, Account] = {}
        self._open: dict[str, Request] = {}
        """In the order in which they were heard of last: those who are silent come first."""
        self._lines: dict[str, Request] = {}
        """Lines of batches, which may wait for long."""
        self._ended: dict[str, float] = {}
        """Those that ended lately, and when: another ring may still speak of them."""
        self.without_record = 0
        """Requests whose entries were seen and whose record was not: it is older than what was read."""

    def on_records(self, at: float, records: Sequence[GenerationRecord]) -> None:
        self._give_up(at)
        for record in records:
            request = self._request(record.identity, at)
            if not request.model:
                request.describe(record, at)
                if request.batch:
                    self._lines[record.identity] = self._open.pop(record.identity)
                else:
                    self._account(request.model).watch.begin(at)
                if request.first_at is not None:
                    self._on_first_token(request, request.first_at)
                self._settle(record.identity, request, at)
            else:
                request.describe(record, at)  # a further part

    def on_frame(self, at: float, frame: TokenFrame) -> None:
        self._give_up(at)
        for entry in frame.entries:
            identity, _, number = entry.generation_id.rpartition("-")
            if identity in self._ended:
                continue
            request = self._request(identity, at)
            choice = request.choice(number)
            known, was = choice.position, choice.last_at
            if not choice.take(frame.group, entry):
                continue
            if choice.position > known or entry.vector:
                self._on_tokens(request, at, was, moved=choice.moved)
                choice.last_at, choice.moved = at, False
            self._settle(identity, request, at)

    def scopes(self, until: float, covered: Sequence[Interval]) -> list[Scope]:
        """All models together, then each, as they stand at `until`."""
        self._give_up(until)
        whole = Account(self._silence)
        causes: list[tuple[Reason, Interval]] = []
        single = []
        for model, account in sorted(self._accounts.items()):
            outages = list(account.watch.outages(until))
            causes += outages
            whole.add(account)
            single.append(account.scope(model, outages, covered))
        return [whole.scope("", causes, covered), *single]

    @property
    def under_way(self) -> int:
        """Requests that have not ended."""
        return sum(bool(request.model) for request in self._open.values())

    def _account(self, model: str) -> Account:
        known = self._accounts.get(model)
        if known is None:
            known = self._accounts[model] = Account(self._silence)
        return known

    def _request(self, identity: str, at: float) -> Request:
        """Heard of at `at`."""
        if identity in self._lines:
            return self._lines[identity]
        request = self._open.pop(identity, None) or Request(at, at)
        request.heard_at = at
        self._open[identity] = request
        return request

    def _on_tokens(self, request: Request, at: float, was: float, *, moved: bool) -> None:
        if request.first_at is None:
            request.first_at = at
            if request.model:  # else with its record
                self._on_first_token(request, at)
        if not request.model:
            return
        account = self._account(request.model)
        if request.batch:
            return
        account.watch.news(at)
        if was and self._period.holds(at):
            account.between_tokens.add(at - was)
            if moved:
                account.interruption.add(at - was)

    def _on_first_token(self, request: Request, at: float) -> None:
        if not request.batch and self._period.holds(at):
            self._account(request.model).first_token.add(at - request.began)

    def _settle(self, identity: str, request: Request, at: float) -> None:
        """Where it has ended, it is counted and forgotten."""
        if request.model and request.end is not None:
            del (self._lines if request.batch else self._open)[identity]
            self._ended[identity] = at
            self._close(request, at, request.end)

    def _close(self, request: Request, at: float, end: End) -> None:
        account = self._account(request.model)
        if not request.batch:
            account.watch.end(at, end)
        if not self._period.holds(at):
            return
        account.prompt += request.prompt
        account.cached += request.cached
        account.output += request.output
        if request.batch:
            account.batch_lines += 1
            return
        account.ends[end] += 1
        if end == "completed":
            account.end_to_end.add(at - request.began)

    def _give_up(self, at: float) -> None:
        while self._ended and at - next(iter(self._ended.values())) > LATE:
            del self._ended[next(iter(self._ended))]
        while self._open:
            identity, request = next(iter(self._open.items()))
            if at - request.heard_at < PATIENCE:
                return
            del self._open[identity]
            if not request.model:
                self.without_record += 1
            else:
                self._close(request, request.heard_at + PATIENCE, "failed")


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
    async with Bus.session(settings, "ryzanstein sla") as bus:
        with translated("read the journal"):
            info = await _journal(bus)
            first = await _first(bus, info)
            covered = _covered(info, first, period, bus.max_payload)
            if covered is None:
                raise NoData(_nothing(first, period, zone))
            ledger = Ledger(period, silence=silence)
            await _read(bus, ledger, period, progress)
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
