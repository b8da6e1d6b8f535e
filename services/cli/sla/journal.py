"""A report from the recorded journal in NATS: its messages, in their order, to the figures of a report.

What is counted belongs to the period in which it happened: a request to that of its end, a token to that of its
arrival. So the reading begins a while before the period, to know what was under way when it began.

A model is *silent* while requests wait for it and nothing of it comes:

    request        tokens        tokens   (ring lost)              tokens of another ring, or the next life
    ───┼─────────────┼─────────────┼──────────────────────────────────┼────▶
                                   └── an outage, if longer than `silence` ──┘
"""

import contextlib
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, tzinfo
from statistics import fmean
from typing import Literal

import msgspec
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from services.cli.sla.periods import Interval, local_time
from services.cli.sla.report import Latencies, NoData, Reason, Report, ReportScope, Requests, outages_of, scope_of
from shared.config import CommonSettings
from shared.errors import ConfigurationError
from shared.messages import TokenEntry, TokenFrame
from shared.messages.records import GenerationRecord, GenerationRecords
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.errors import translated
from shared.nats.journal import from_moment, read_messages

End = Literal["completed", "failed", "refused", "cancelled"]

# Codes (`shared.errors`) that a gateway answers with 4xx: nothing of ours failed.
CLIENTS_FAULT = re.compile(
    "invalid_request|invalid_grammar|model_not_found|model_does_not_fit|context_length_exceeded|payload_too_large"
    "|rate_limit_exceeded|queue_full"
)
# Seconds after which a request that says nothing has failed: a gateway gives up by then (token_timeout), unless it
# was lost and nobody took its place.
PATIENCE = 600.0
LATE = 60.0  # seconds for which what is said of a request that has ended is known to be late
# Failures without a success between them that make an outage: fewer are errors, and stand in the error rate.
IN_A_ROW = 3


@dataclass(slots=True)
class ChoiceOutcome:
    """One generation. Attempts are fenced as a gateway does: an older one than the newest says nothing."""

    attempt: int = 0
    position: int = 0  # output tokens so far
    cached: int = 0
    last_at: float = 0.0  # when its last tokens came
    moved: bool = False  # whether a newer attempt has begun and nothing of it has come
    end: End | None = None

    def take(self, group: str, entry: TokenEntry) -> bool:
        """Whether the entry brings something: tokens behind those that are known, or a vector."""
        if self.end is not None or entry.attempt < self.attempt:
            return False
        if entry.attempt > self.attempt:
            self.attempt, self.moved = entry.attempt, bool(self.position)
        self.cached = max(self.cached, entry.cached_tokens)
        if entry.finish and not (entry.finish == "error" and entry.retryable and group):
            self.end = _end(entry)  # else another ring goes on with it
        known, self.position = self.position, max(self.position, entry.position + len(entry.tokens))
        return self.position > known or bool(entry.vector)


def _end(entry: TokenEntry) -> End:
    if entry.finish == "error":
        return "refused" if CLIENTS_FAULT.fullmatch(entry.error_code) else "failed"
    return "cancelled" if entry.finish == "cancelled" else "completed"


@dataclass(slots=True)
class ClientRequest:
    """One client's request: its record and the entries of its choices, of which either may come first."""

    identity: str
    began: float
    heard_at: float
    model: str = ""  # empty until the record has come
    batch: bool = False
    stops: bool = False  # whether its text may end before its tokens do: the gateway cancels the rest
    prompt: int = 0
    expected: int = 0  # choices in all; 0: not known yet
    first_at: float | None = None
    choices: defaultdict[str, ChoiceOutcome] = field(default_factory=lambda: defaultdict(ChoiceOutcome))

    def describe(self, record: GenerationRecord, at: float) -> None:
        """The record, or a part of it, was stored at `at`: a gateway whose clock is ahead does not shorten it."""
        self.began = min(record.created, at, self.began)
        first = record.outline or record.requests[0]
        self.model, self.batch, self.stops = first.model, first.lane == "batch", bool(record.stop)
        self.prompt += record.prompt_tokens + sum(len(request.prompt) for request in record.requests)
        self.expected = record.prompts * record.choices

    @property
    def output(self) -> int:
        return sum(choice.position for choice in self.choices.values())

    @property
    def end(self) -> End | None:
        """None while a choice goes on, or while its record is missing."""
        ends = [choice.end for choice in self.choices.values() if choice.end is not None]
        if not self.expected or len(ends) < self.expected:
            return None
        if self.stops and self.output:
            ends = ["completed" if end == "cancelled" else end for end in ends]
        return min(ends, key=("failed", "refused", "cancelled", "completed").index)


class ModelAvailability:
    """What one model did within the period, and when it did not answer those who waited."""

    def __init__(self, silence: float) -> None:
        self.counts: Counter[str] = Counter()  # by the fields of `Requests` and `Tokens`
        self.times: defaultdict[str, Latencies] = defaultdict(Latencies)
        self._silence = silence
        self._waiting = 0
        self._since = 0.0  # when something came last, or the first of those who wait began
        self._failures = 0  # in a row, the first of them at:
        self._failing_since = 0.0
        self._causes: list[tuple[Interval, Reason]] = []

    def begin(self, at: float) -> None:
        """A request waits."""
        if not self._waiting:
            self._since = at
        self._waiting += 1

    def news(self, at: float) -> None:
        """Something came for it."""
        self._causes += self._silent(at)
        self._since = max(self._since, at)

    def end(self, at: float, end: End) -> None:
        """A request waits no more."""
        self.news(at)
        self._waiting = max(0, self._waiting - 1)
        if end == "failed":
            self._failing_since = self._failing_since if self._failures else at
            self._failures += 1
        elif end == "completed":
            self._causes += self._failing(at)
            self._failures = 0

    def causes(self, until: float) -> list[tuple[Interval, Reason]]:
        """Of outages so far, at `until`."""
        return [*self._causes, *self._silent(until), *self._failing(until)]

    def _silent(self, at: float) -> Iterator[tuple[Interval, Reason]]:
        if self._waiting and at - self._since >= self._silence:
            yield Interval(self._since, at), "silent"

    def _failing(self, at: float) -> Iterator[tuple[Interval, Reason]]:
        if self._failures >= IN_A_ROW:
            yield Interval(self._failing_since, at), "failing"


class Ledger:
    """Takes records and frames in the journal's order; `scopes` at the end."""

    def __init__(self, period: Interval, *, silence: float) -> None:
        """`silence`: seconds without news from which on a model that is waited for is down."""
        self._period = period
        self._accounts: defaultdict[str, ModelAvailability] = defaultdict(lambda: ModelAvailability(silence))
        # In the order in which they were heard of last: those who are silent come first.
        self._requests: dict[str, ClientRequest] = {}
        # Those that ended lately, and when: another ring may still speak of them.
        self._ended: dict[str, float] = {}
        # Requests whose entries were seen and whose record was not: it is older than what was read.
        self.without_record = 0

    def on_records(self, at: float, records: Sequence[GenerationRecord]) -> None:
        self._give_up(at)
        for record in records:
            request = self._heard_of(record.identity, at)
            if request is None:
                continue
            further = bool(request.model)
            request.describe(record, at)
            if further:
                continue
            if not request.batch:
                self._accounts[request.model].begin(at)
            if request.first_at is not None:
                self._time("first_token", request, request.first_at, request.began)
            self._end(request, at, request.end)

    def on_frame(self, at: float, frame: TokenFrame) -> None:
        self._give_up(at)
        for entry in frame.entries:
            identity, _, number = entry.generation_id.rpartition("-")
            request = self._heard_of(identity, at)
            if request is None:
                continue
            choice = request.choices[number]
            if choice.take(frame.group, entry):
                self._on_tokens(request, choice, at)
            self._end(request, at, request.end)

    def scopes(self, covered: Interval) -> list[ReportScope]:
        """All models together, then each, as they stand at the end of `covered`."""
        self._give_up(covered.end)
        whole = ModelAvailability(0.0)
        causes: list[tuple[Interval, Reason]] = []
        single = []
        for model, account in sorted(self._accounts.items()):
            own = account.causes(covered.end)
            causes += own
            whole.counts += account.counts
            for name, times in account.times.items():
                whole.times[name].update(times)
            single.append(_scope(model, account, own, covered))
        return [_scope("", whole, causes, covered), *single]

    @property
    def under_way(self) -> int:
        """Requests that have not ended."""
        return sum(bool(one.model) and not one.batch for one in self._requests.values())

    def _heard_of(self, identity: str, at: float) -> ClientRequest | None:
        """None: it has ended."""
        if identity in self._ended:
            return None
        request = self._requests.pop(identity, None) or ClientRequest(identity, at, at)
        request.heard_at = at
        self._requests[identity] = request
        return request

    def _on_tokens(self, request: ClientRequest, choice: ChoiceOutcome, at: float) -> None:
        first, was, moved = request.first_at is None, choice.last_at, choice.moved
        choice.last_at, choice.moved = at, False
        if first:
            request.first_at = at
        if not request.model or request.batch:
            return
        self._accounts[request.model].news(at)
        if first:  # else with its record
            self._time("first_token", request, at, request.began)
        if was:
            self._time("between_tokens", request, at, was)
        if was and moved:
            self._time("interruption", request, at, was)

    def _time(self, name: str, request: ClientRequest, at: float, since: float) -> None:
        if not request.batch and self._period.holds(at):
            self._accounts[request.model].times[name].add(at - since)

    def _end(self, request: ClientRequest, at: float, end: End | None) -> None:
        """Where it has ended, it is counted."""
        if end is None:
            return
        del self._requests[request.identity]
        self._ended[request.identity] = at
        account = self._accounts[request.model]
        if not request.batch:
            account.end(at, end)
        if self._period.holds(at):
            account.counts["batch_lines" if request.batch else end] += 1
            account.counts["prompt"] += request.prompt
            account.counts["cached"] += max((one.cached for one in request.choices.values()), default=0)
            account.counts["output"] += request.output
        if end == "completed":
            self._time("end_to_end", request, at, request.began)

    def _give_up(self, at: float) -> None:
        while self._ended and at - next(iter(self._ended.values())) > LATE:
            del self._ended[next(iter(self._ended))]
        while self._requests and at - (request := next(iter(self._requests.values()))).heard_at >= PATIENCE:
            if request.batch:  # lines of batches may wait for long
                self._heard_of(request.identity, at)
            elif request.model:
                self._end(request, request.heard_at + PATIENCE, "failed")
            else:
                del self._requests[request.identity]
                self.without_record += 1


def _scope(
    model: str, account: ModelAvailability, causes: list[tuple[Interval, Reason]], covered: Interval
) -> ReportScope:
    outages = outages_of(causes, covered)
    downtime = sum(one.end - one.begin for one in outages)
    # Of one that reaches over an edge of what was recorded nobody knows how long it was.
    repaired = [one.end - one.begin for one in outages if covered.begin < one.begin and not one.ongoing]
    return scope_of(
        model,
        account.counts,
        {name: times.percentiles() for name, times in account.times.items()},
        availability=1 - downtime / covered.seconds,
        downtime=downtime,
        outages=outages,
        repaired=len(repaired),
        mttr=fmean(repaired) if repaired else None,
    )


# --- reading it ----------------------------------------------------------------------------------

_TOKENS = subjects.ALL_TOKENS.partition("*")[0]
_frames = msgspec.msgpack.Decoder(TokenFrame)
_records = msgspec.msgpack.Decoder(GenerationRecords)


async def from_journal(
    settings: CommonSettings, period: Interval, *, silence: float, zone: tzinfo, progress: Callable[[float], None]
) -> Report:
    """Reads the journal from a while before the period to its end; `progress` is told the share that is done.

    Raises `BrokerUnavailable`, `NoData`, and `ConfigurationError` where NATS has no journal.
    """
    ledger = Ledger(period, silence=silence)
    async with Bus.session(settings, "ryzanstein sla") as bus:
        with translated("read the journal"):
            covered = await _covered(bus, period, zone)
            await _read(bus, ledger, period, progress)
    scopes = ledger.scopes(covered)
    source = f"journal in NATS at {bus.where}"
    return Report(source, *period, [covered], scopes, list(_notes(ledger, scopes[0].requests)))


async def _covered(bus: Bus, period: Interval, zone: tzinfo) -> Interval:
    """The part of the period of which the journal has everything.

    Messages go for their age, or because there are too many bytes; in the latter case the journal is full.
    """
    try:
        info = await bus.jetstream().stream_info(subjects.JOURNAL_STREAM)
    except NotFoundError:
        raise ConfigurationError(
            f"NATS at {bus.where} has no journal (stream {subjects.JOURNAL_STREAM}); no gateway has used it yet. "
            "Name another server with --nats-url, or a Prometheus with --prometheus."
        ) from None
    first = await _first(bus) if info.state.messages else None
    now, config, state = time.time(), info.config, info.state
    begin = max(period.begin, now - (config.max_age or float("inf")))
    if state.first_seq > 1 and first is not None and 0 < (config.max_bytes or 0) <= state.bytes + bus.max_payload:
        begin = max(begin, first)
    if state.first_seq <= 1 and info.created is not None:
        begin = max(begin, info.created.timestamp())
    covered = Interval(begin, min(now, period.end))
    if covered.seconds > 0:
        return covered
    has = "it is empty" if first is None else f"it begins at {local_time(first, zone)}"
    raise NoData(
        f"The journal has nothing of the period from {local_time(period.begin, zone)} to "
        f"{local_time(period.end, zone)}; {has}. "
        "Keep it for longer with RYZANSTEIN_JOURNAL_MAX_AGE and RYZANSTEIN_JOURNAL_MAX_BYTES, or name a Prometheus "
        "with --prometheus."
    )


async def _first(bus: Bus) -> float | None:
    """When the oldest message was stored; None: there is none."""
    async with contextlib.aclosing(read_messages(bus, ">", from_moment(0))) as messages:
        async for message in messages:
            return _stamp(message)
    return None


async def _read(bus: Bus, ledger: Ledger, period: Interval, progress: Callable[[float], None]) -> None:
    begin = from_moment(max(1.0, period.begin - PATIENCE))
    async with contextlib.aclosing(read_messages(bus, ">", begin)) as messages:
        async for message in messages:
            at = _stamp(message)
            if at >= period.end:
                return
            # Of another version: no reason to say nothing of the rest.
            with contextlib.suppress(msgspec.DecodeError):
                if message.subject.startswith(_TOKENS):
                    ledger.on_frame(at, _frames.decode(message.data))
                else:
                    ledger.on_records(at, _records.decode(message.data).records)
            number = message.metadata.sequence.consumer
            if not number % 256:
                progress(number / (number + message.metadata.num_pending))


def _stamp(message: Msg) -> float:
    """When the broker stored it: one clock for everything but the beginning of a request."""
    return message.metadata.timestamp.replace(tzinfo=UTC).timestamp()


def _notes(ledger: Ledger, requests: Requests) -> Iterator[str]:
    yield (
        "The journal has no requests that were refused at once (4xx), nor those that NATS did not take: a gateway "
        "that answered 503 while the broker was away shows in Prometheus alone."
    )
    if ledger.under_way:
        yield f"{ledger.under_way} requests were under way at the end and are not counted."
    if ledger.without_record:
        yield (
            f"{ledger.without_record} generations have tokens and no record, which was older than the journal; they "
            "are not counted."
        )
    if not requests.completed + requests.failed:
        yield "No request ended in the period."
