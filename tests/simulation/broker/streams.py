"""A stream: messages under numbers, within limits. Pure: time comes in as unix nanoseconds.

publish ──checks──▶ stored, refused, or known already (its id) ──limits──▶ the oldest go
                       └── consumers are told what came and what went
"""

import bisect
import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.simulation.broker.configs import SECOND, Refused, StreamConfig
from tests.simulation.broker.subjects import Filter, is_literal, matches

Headers = dict[str, str]
# Bytes that a message takes in a file store beside its subject, headers and data.
OVERHEAD, HEADER_OVERHEAD = 30, 34


class Message(NamedTuple):
    sequence: int
    subject: str
    header: bytes  # as it came: `NATS/1.0`, lines, an empty line; nothing where it had none
    data: bytes
    time: int

    @property
    def size(self) -> int:
        overhead = HEADER_OVERHEAD if self.header else OVERHEAD
        return overhead + len(self.subject) + len(self.header) + len(self.data)


class Stored(NamedTuple):
    sequence: int
    duplicate: bool = False


def parse_header(header: bytes) -> Headers:
    """Names as they were written; the last of a name counts."""
    lines = header.decode(errors="replace").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if line)
    return {name.strip(): value.strip() for name, _, value in pairs}


class _Numbers:
    """Growing numbers, of which any may go. Those that have gone are dropped when they are come across."""

    __slots__ = ("_head", "_items", "_live", "_there")

    def __init__(self, there: "OrderedDict[int, Message]") -> None:
        self._there, self._items, self._head, self._live = there, list[int](), 0, 0

    def add(self, number: int) -> None:
        self._items.append(number)
        self._live += 1

    def remove(self) -> None:
        """One of them has left what is there."""
        self._live -= 1
        if len(self._items) - self._head > 2 * self._live + 64:
            self._items, self._head = [n for n in self._items[self._head :] if n in self._there], 0

    def __len__(self) -> int:
        return self._live

    def __iter__(self) -> Iterator[int]:
        return (number for number in self._items[self._head :] if number in self._there)

    def first(self) -> int:
        while self._items[self._head] not in self._there:
            self._head += 1
        return self._items[self._head]

    def last(self) -> int:
        while self._items[-1] not in self._there:
            self._items.pop()
        return self._items[-1]

    def since(self, number: int) -> int:
        """The first from `number` on; 0: there is none."""
        for at in range(bisect.bisect_left(self._items, number, self._head), len(self._items)):
            if self._items[at] in self._there:
                return self._items[at]
        return 0

    def walk(self, number: int) -> Iterator[int]:
        for at in range(bisect.bisect_left(self._items, number, self._head), len(self._items)):
            if self._items[at] in self._there:
                yield self._items[at]


class Watcher:
    """What a consumer wants to hear."""

    def stored(self, message: Message) -> None: ...

    def removed(self, message: Message) -> None: ...


class Stream:
    def __init__(self, config: StreamConfig, created: int) -> None:
        self.config, self.created = config, created
        self.messages: OrderedDict[int, Message] = OrderedDict()
        self.last_sequence = max(0, config.first_seq - 1)
        self.last_time = 0
        self.bytes = 0
        self.watchers: dict[str, Watcher] = {}  # consumers, by name
        self._numbers = _Numbers(self.messages)
        self._subjects: dict[str, _Numbers] = {}
        # By `Nats-Msg-Id`: the number and the time.
        self._ids: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._expiring: list[tuple[int, int]] = []  # when messages with a time to live go, and which

    # --- in ----------------------------------------------------------------------------------------

    def publish(self, subject: str, header: bytes, data: bytes, now: int) -> Stored:
        """Raises `Refused`."""
        config = self.config
        headers = parse_header(header) if header else None
        if headers:
            known = self._check_headers(subject, headers, now)
            if known is not None:
                return known
        if 0 <= config.max_msg_size < len(header) + len(data):
            raise Refused(400, 10054, "message size exceeds maximum allowed")
        message = Message(self.last_sequence + 1, subject, header, data, now)
        self._check_room(message)
        self._add(message)
        if headers:
            self._note(message, headers)
        self._shrink(message)
        for watcher in list(self.watchers.values()):
            watcher.stored(message)
        return Stored(message.sequence)

    def restore(self, message: Message) -> None:
        """As it was on disk."""
        self._add(message)
        if message.header:
            self._note(message, parse_header(message.header))

    def _add(self, message: Message) -> None:
        numbers = self._subjects.get(message.subject)
        if numbers is None:
            numbers = self._subjects[message.subject] = _Numbers(self.messages)
        self.messages[message.sequence] = message
        self._numbers.add(message.sequence)
        numbers.add(message.sequence)
        self.last_sequence, self.last_time = message.sequence, message.time
        self.bytes += message.size

    def _check_headers(self, subject: str, headers: Headers, now: int) -> Stored | None:
        """What it is where the message is known already."""
        expected = headers.get("Nats-Expected-Stream")
        if expected is not None and expected != self.config.name:
            raise Refused(400, 10060, "expected stream does not match")
        if (identity := headers.get("Nats-Msg-Id")) is not None:
            self._forget_ids(now)
            if identity in self._ids:
                return Stored(self._ids[identity][0], duplicate=True)
        self._check_expected(subject, headers)
        if "Nats-TTL" in headers and not self.config.allow_msg_ttl:
            raise Refused(400, 10166, "per-message TTL is disabled")
        if (rollup := headers.get("Nats-Rollup")) is not None:
            if not self.config.allow_rollup_hdrs:
                raise Refused(500, 10111, "rollup not permitted")
            if rollup not in ("sub", "all"):
                raise Refused(500, 10111, f'rollup value invalid: "{rollup}"')
        return None

    def _check_expected(self, subject: str, headers: Headers) -> None:
        whole, of_subject = "Nats-Expected-Last-Sequence", "Nats-Expected-Last-Subject-Sequence"
        if (wanted := headers.get(whole)) is not None and wanted != str(self.last_sequence):
            raise Refused(400, 10071, f"wrong last sequence: {self.last_sequence}")
        if (wanted := headers.get(of_subject)) is not None:
            last = self.last_of(headers.get(f"{of_subject}-Subject", subject))
            if wanted != str(last):
                raise Refused(400, 10071, f"wrong last sequence: {last}")
        identity = headers.get("Nats-Expected-Last-Msg-Id")
        if identity is not None and identity != (last_id := next(reversed(self._ids), "")):
            raise Refused(400, 10070, f"wrong last msg ID: {last_id}")

    def _check_room(self, message: Message) -> None:
        config = self.config
        if config.discard != "new":
            return
        replaced = self._replaced(message)
        if 0 <= config.max_msgs < len(self.messages) + 1 - (replaced is not None):
            raise Refused(503, 10077, "maximum messages exceeded")
        size = message.size - (replaced.size if replaced is not None else 0)
        if 0 <= config.max_bytes < self.bytes + size:
            raise Refused(503, 10077, "maximum bytes exceeded")
        if config.discard_new_per_subject and 0 < config.max_msgs_per_subject <= self.count(message.subject):
            raise Refused(503, 10077, "maximum messages per subject exceeded")

    def _replaced(self, message: Message) -> Message | None:
        """What makes room for it by the limit of its subject."""
        most, numbers = self.config.max_msgs_per_subject, self._subjects.get(message.subject)
        if most < 1 or numbers is None or len(numbers) < most:
            return None
        return self.messages[numbers.first()]

    def _note(self, message: Message, headers: Headers) -> None:
        if (identity := headers.get("Nats-Msg-Id")) is not None:
            self._ids[identity] = message.sequence, message.time
        if (wanted := headers.get("Nats-TTL")) is not None and wanted.rstrip("s").isdigit():
            due = message.time + int(wanted.rstrip("s")) * SECOND
            heapq.heappush(self._expiring, (due, message.sequence))
        rollup = headers.get("Nats-Rollup")
        if rollup == "sub":
            self.purge(Filter([message.subject]), before=message.sequence)
        elif rollup == "all":
            self.purge(Filter([]), before=message.sequence)

    def _forget_ids(self, now: int) -> None:
        while self._ids:
            identity, (_, at) = next(iter(self._ids.items()))
            if at > now - self.config.duplicate_window:
                return
            del self._ids[identity]

    # --- out -----------------------------------------------------------------------------------------

    def _shrink(self, message: Message) -> None:
        """Keeps the limits, now that `message` is there."""
        config, numbers = self.config, self._subjects[message.subject]
        if config.max_msgs_per_subject > 0:
            while len(numbers) > config.max_msgs_per_subject:
                self.remove(numbers.first())
        if config.max_msgs > 0:
            while len(self.messages) > config.max_msgs:
                self.remove(self._numbers.first())
        if config.max_bytes > 0:
            while self.bytes > config.max_bytes and self.messages:
                self.remove(self._numbers.first())

    def update(self, config: StreamConfig) -> None:
        self.config = config
        for subject in list(self._subjects):
            numbers = self._subjects[subject]
            self._shrink(self.messages[numbers.last()])

    def expire(self, now: int) -> None:
        """What is too old goes."""
        if self.config.max_age:
            while self.messages:
                first = self.messages[self._numbers.first()]
                if first.time > now - self.config.max_age:
                    break
                self.remove(first.sequence)
        while self._expiring and self._expiring[0][0] <= now:
            self.remove(heapq.heappop(self._expiring)[1])

    def due(self) -> int | None:
        """When something is too old; None: never."""
        ages = [self._expiring[0][0]] if self._expiring else []
        if self.config.max_age and self.messages:
            ages.append(self.messages[self._numbers.first()].time + self.config.max_age)
        return min(ages) if ages else None

    def remove(self, sequence: int) -> bool:
        """False: it is not there."""
        message = self.messages.pop(sequence, None)
        if message is None:
            return False
        self.bytes -= message.size
        self._numbers.remove()
        numbers = self._subjects[message.subject]
        numbers.remove()
        if not len(numbers):
            del self._subjects[message.subject]
        for watcher in list(self.watchers.values()):
            watcher.removed(message)
        return True

    def purge(self, taken: Filter, *, before: int = 0, keep: int = 0) -> int:
        """Removes what `taken` takes, before the number `before` (0: all), but for the `keep` newest. How many."""
        found = [number for number in self.numbers(taken) if not before or number < before]
        gone = found[: max(0, len(found) - keep)] if keep else found
        for number in gone:
            self.remove(number)
        if taken.literal is None and not taken.patterns and before > self.last_sequence:
            self.last_sequence = before - 1  # nats-server goes on from there
        return len(gone)

    # --- what is there ---------------------------------------------------------------------------------

    def takes(self, subject: str) -> bool:
        return any(matches(pattern, subject) for pattern in self.config.subjects or [])

    @property
    def first_sequence(self) -> int:
        if self.messages:
            return self._numbers.first()
        return self.last_sequence + 1 if self.last_sequence else 0

    def first_time(self) -> int:
        return self.messages[self._numbers.first()].time if self.messages else 0

    def count(self, subject: str) -> int:
        numbers = self._subjects.get(subject)
        return len(numbers) if numbers is not None else 0

    def last_of(self, subject: str) -> int:
        """The newest number of a subject, or of those that a pattern takes; 0: there is none."""
        if is_literal(subject):
            numbers = self._subjects.get(subject)
            return numbers.last() if numbers is not None else 0
        return max((n.last() for name, n in self._subjects.items() if matches(subject, name)), default=0)

    def subjects(self, taken: Filter) -> dict[str, int]:
        """How many messages each has."""
        return {name: len(numbers) for name, numbers in sorted(self._subjects.items()) if taken.takes(name)}

    def subjects_count(self) -> int:
        return len(self._subjects)

    def lasts(self, taken: Filter) -> list[int]:
        """The newest number of each subject, in order."""
        return sorted(numbers.last() for name, numbers in self._subjects.items() if taken.takes(name))

    def numbers(self, taken: Filter) -> Iterator[int]:
        """Of all messages that `taken` takes, in order."""
        if taken.literal is not None:
            yield from list(self._subjects.get(taken.literal, ()))
            return
        for number in list(self._numbers):
            if number in self.messages and taken.takes(self.messages[number].subject):
                yield number

    def next(self, sequence: int, taken: Filter) -> Message | None:
        """The first message from `sequence` on that `taken` takes."""
        if taken.literal is not None:
            numbers = self._subjects.get(taken.literal)
            found = numbers.since(sequence) if numbers is not None else 0
            return self.messages[found] if found else None
        for number in self._numbers.walk(sequence):
            message = self.messages[number]
            if taken.takes(message.subject):
                return message
        return None

    def pending(self, sequence: int, taken: Filter) -> int:
        """How many there are from `sequence` on that `taken` takes."""
        if sequence <= self.first_sequence:
            return sum(len(numbers) for name, numbers in self._subjects.items() if taken.takes(name))
        return sum(1 for number in self._numbers.walk(sequence) if taken.takes(self.messages[number].subject))

    def since(self, time: int) -> int:
        """The number of the first message from that time on, or of the one that comes next."""
        found: Callable[[int], bool] = lambda number: self.messages[number].time >= time  # noqa: E731
        return next((number for number in self._numbers if found(number)), self.last_sequence + 1)
