"""What promises are held against at the end of a run: what clients saw, which faults there were, what the broker was
given to store, who held what when, and what the services still have.

Times are virtual seconds since the world's beginning.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec

from shared.messages import TokenFrame
from shared.messages.records import GenerationRecord, GenerationRecords
from shared.nats.subjects import unescape
from tests.simulation.clients.history import History

StructT = TypeVar("StructT")
DELETED = (b"KV-Operation: DEL", b"KV-Operation: PURGE")


class Fault(NamedTuple):
    """One that has happened."""

    name: str
    target: str
    begun: float
    ended: float  # when it was undone; what is not undone, such as a death, ends when its process is back
    # What its target may refuse for now: `limits` is what is beyond one, `nothing` is nothing.
    refuses: str = "anything"

    def concerns(self, host: str) -> bool:
        """Whether what is asked there may be refused: it befalls that host, a broker, or the deployment."""
        return self.refuses == "anything" and (self.target in ("", host) or self.target.startswith("broker"))

    def explains(self, begun: float, ended: float, aftermath: float) -> bool:
        """Whether what happened then may have come of it: it had begun, and was not over for longer than that."""
        return self.begun <= ended and begun <= self.ended + aftermath

    def meets(self, begun: float, ended: float, margin: float) -> bool:
        """Whether it overlaps that time."""
        return self.begun - margin <= ended and begun <= self.ended + margin


class Written(NamedTuple):
    """A message that a stream took."""

    at: float
    subject: str
    header: bytes
    data: bytes


class StoreLog:
    """All that was stored, in order. `wrote` is told of each message by the broker."""

    def __init__(self) -> None:
        self.messages: list[Written] = []

    def wrote(self, at: float, subject: str, header: bytes, data: bytes) -> None:
        self.messages.append(Written(at, subject, header, data))

    def entries(self, bucket: str, kind: type[StructT]) -> Iterator[tuple[float, str, StructT | None]]:
        """(time, key, value) of each change of a KV bucket; None: it was deleted."""
        decoder = msgspec.msgpack.Decoder(kind)
        head = f"$KV.{bucket}."
        for message in self.messages:
            if message.subject.startswith(head):
                deleted = any(mark in message.header for mark in DELETED) or not message.data
                key = unescape(message.subject.removeprefix(head))
                yield message.at, key, None if deleted else decoder.decode(message.data)

    def records(self) -> Iterator[tuple[float, GenerationRecord]]:
        """Of generations, as their gateways wrote them."""
        decoder = msgspec.msgpack.Decoder(GenerationRecords)
        for message in self.messages:
            if message.subject.startswith("records."):
                for record in decoder.decode(message.data).records:
                    yield message.at, record

    def frames(self) -> Iterator[tuple[float, str, TokenFrame]]:
        """(time, consumer, frame) of tokens."""
        decoder = msgspec.msgpack.Decoder(TokenFrame)
        for message in self.messages:
            if message.subject.startswith("tokens."):
                yield (message.at, unescape(message.subject.removeprefix("tokens.")), decoder.decode(message.data))


class Held(NamedTuple):
    """That two had the same thing at the same time."""

    what: str
    who: tuple[str, ...]
    since: float
    until: float


class Holdings:
    """Who has what, looked at now and then; kept is when several had the same."""

    def __init__(self) -> None:
        self._open: dict[str, Held] = {}
        self.shared: list[Held] = []

    def look(self, now: float, held: Mapping[str, frozenset[str]]) -> None:
        """`held`: who believes to have each thing, of those that run and are reached by the others."""
        for what in [what for what in self._open if len(held.get(what, ())) < 2]:
            self.shared.append(self._open.pop(what))
        for what, who in held.items():
            if len(who) > 1:
                since = self._open[what].since if what in self._open else now
                self._open[what] = Held(what, tuple(sorted(who)), since, now)

    def all(self) -> list[Held]:
        return [*self.shared, *self._open.values()]


class Reading(NamedTuple):
    """A number of something that a service has."""

    service: str
    what: str
    count: float
    most: float = 0.0  # that it may be at the end, when nothing is asked any more
    always: bool = False  # whether `most` is a bound at all times: of a table that lives long


@dataclass
class Evidence:
    history: History
    now: float
    faults: list[Fault] = field(default_factory=list)
    store: StoreLog = field(default_factory=StoreLog)
    holdings: Holdings = field(default_factory=Holdings)
    readings: list[Reading] = field(default_factory=list)
    # Whether clients came to their ends and what must become free had its time; else nothing is said of that.
    ended: bool = True
    settings: dict[str, Any] = field(default_factory=dict)  # `model_lease`: of schedulers, in seconds
    # How many times longer everything may take than usual, since services look more rarely.
    patience: float = 1.0

    @property
    def quiet_since(self) -> float:
        """When the last fault was over."""
        return max((fault.ended for fault in self.faults), default=0.0)

    def during(self, begun: float, ended: float, margin: float) -> list[Fault]:
        """Those that overlap a time."""
        return [fault for fault in self.faults if fault.meets(begun, ended, margin)]


def by_identity(store: StoreLog) -> dict[str, GenerationRecord]:
    """The latest record of each generation."""
    return {record.identity: record for _, record in store.records()}


def finished(store: StoreLog) -> dict[str, set[int]]:
    """Attempts of each generation that a ring brought to a good end, by the generation's wire id."""
    found: dict[str, set[int]] = defaultdict(set)
    for _, _, frame in store.frames():
        for entry in frame.entries:
            if entry.finish in ("stop", "length"):
                found[entry.generation_id].add(entry.attempt)
    return found
