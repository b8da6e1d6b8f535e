"""A consumer: where somebody is in a stream, and what he has not acknowledged. Pure: time comes in as seconds.

    stream ──next──▶ delivered ──acknowledged──▶ done
                        └── refused, or not acknowledged in time ──▶ delivered again, before anything new

A pull consumer delivers to the requests that wait, in turn; a push consumer to its subject, while somebody listens.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.simulation.broker.configs import SECOND, ConsumerConfig, time_of
from tests.simulation.broker.streams import Message, Stream, Watcher
from tests.simulation.broker.subjects import Filter

Interested = Callable[[str], bool]  # whether anybody listens on a subject


@dataclass(eq=False)
class Pull:
    """A request for messages."""

    reply: str
    left: int = 1
    expires: float | None = None
    no_wait: bool = False
    heartbeat: float = 0.0
    beat_at: float = 0.0
    delivered: int = 0
    max_bytes: int = 0


class Delivery(NamedTuple):
    to: str
    message: Message | None  # None: a status
    reply: str = ""
    header: bytes = b""  # of a status


class Pending(NamedTuple):
    number: int  # in the order of this consumer's deliveries
    due: float  # when it is delivered again


def status(code: int, text: str, **headers: object) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"NATS/1.0 {code} {text}\r\n{lines}\r\n".encode()


NO_MESSAGES = status(404, "No Messages")


class Consumer(Watcher):
    def __init__(self, config: ConsumerConfig, stream: Stream, created: int, now: float) -> None:
        """`created`: unix nanoseconds."""
        self.config, self.stream, self.created = config, stream, created
        self.name = config.name or ""
        self.taken = Filter(config.filters)
        self.delivered = 0  # deliveries so far
        self.floor = (0, 0)  # up to where everything is acknowledged: deliveries, number in the stream
        self.pending: OrderedDict[int, Pending] = OrderedDict()  # by number in the stream; in their order
        self.redelivered: dict[int, int] = {}  # how often each was delivered again
        self.waiting: deque[Pull] = deque()
        # Given up after so many deliveries, and not told yet: number in the stream, deliveries.
        self.exceeded: list[tuple[int, int]] = []
        # Unix nanoseconds of the last delivery and acknowledgement; 0: none.
        self.active_at = self.acked_at = 0
        self.idle_since = now  # seconds; of one that is deleted when nobody uses it
        self.awake = True  # whether there may be something to deliver
        self._again: deque[int] = deque()
        self._deadlines: list[tuple[float, int]] = []
        self._beat_at = now + config.idle_heartbeat / SECOND
        self._skip: deque[int] = deque()
        self._skip_end = 0
        self.next = self._begin(config)  # the number from which the stream is looked through
        # Messages that were never delivered.
        self.left = len(self._skip) + stream.pending(max(self.next, self._skip_end + 1), self.taken)
        self.floor = (0, self.next - 1)
        self._acked = config.ack_policy != "none"
        self._wait = config.ack_wait / SECOND

    def _begin(self, config: ConsumerConfig) -> int:
        stream, policy = self.stream, config.deliver_policy
        first = max(1, stream.first_sequence)
        if policy == "new":
            return stream.last_sequence + 1
        if policy == "by_start_sequence":
            return max(first, config.opt_start_seq)
        if policy == "by_start_time":
            return stream.since(time_of(config.opt_start_time or ""))
        if policy == "last":
            pattern = self.taken.patterns[0] if self.taken.patterns else ">"
            return stream.last_of(pattern) or stream.last_sequence + 1
        if policy == "last_per_subject":
            self._skip.extend(stream.lasts(self.taken))
            self._skip_end = stream.last_sequence
            return self._skip[0] if self._skip else stream.last_sequence + 1
        return first

    def revived(self, stream: Stream, now: float) -> "Consumer":
        """As a server finds it that starts; `stream` is what it has of the stream."""
        made = Consumer(self.config, stream, self.created, now)
        made.delivered, made.floor, made.redelivered = self.delivered, self.floor, dict(self.redelivered)
        made.next = min(self.next, stream.last_sequence + 1)
        made._skip = deque(number for number in self._skip if number in stream.messages)
        made._skip_end = self._skip_end
        made.left = len(made._skip) + stream.pending(max(made.next, made._skip_end + 1), made.taken)
        for number, known in self.pending.items():
            if number in stream.messages:
                made.pending[number] = Pending(known.number, 0.0)
                made._track(number, now + made._patience(number))
        return made

    def reconfigure(self, config: ConsumerConfig) -> None:
        if config.filters != self.config.filters:
            self.taken = Filter(config.filters)
            self.left = self.stream.pending(self.next, self.taken)
        self.config, self._wait, self.awake = config, config.ack_wait / SECOND, True

    # --- what becomes of the stream ------------------------------------------------------------------

    def stored(self, message: Message) -> None:
        if self.taken.takes(message.subject):
            self.left += 1
            self.awake = True

    def removed(self, message: Message) -> None:
        number = message.sequence
        if number in self.pending:
            self._done(number)
        if not self.taken.takes(message.subject):
            return
        if number <= self._skip_end:
            if number in self._skip:
                self._skip.remove(number)
                self.left -= 1
        elif number >= self.next:
            self.left -= 1

    # --- acknowledgements ------------------------------------------------------------------------------

    def acknowledge(self, number: int, wall: int) -> list[int]:
        """The message is done with. Returns the numbers that this consumer is done with by that."""
        self.acked_at = wall
        self.awake = True
        if self.config.ack_policy == "all":
            done = [one for one in self.pending if one <= number]
            for one in done:
                self._done(one)
            return done
        known = number in self.pending
        self._done(number)
        return [number] if known else []

    def _done(self, number: int) -> None:
        known = self.pending.pop(number, None)
        self.redelivered.pop(number, None)
        if number in self._again:
            self._again.remove(number)
        if known is None:
            return
        if not self.pending:
            self.floor = (self.delivered, self.next - 1)
        elif known.number == self.floor[0] + 1:
            first, oldest = next(iter(self.pending.items()))
            self.floor = (oldest.number - 1, first - 1)

    def refuse(self, number: int, now: float, delay: float) -> None:
        """It is to be delivered again, in `delay` seconds."""
        if number not in self.pending:
            return
        if delay > 0:
            self._track(number, now + delay)
        elif number not in self._again:
            self._again.append(number)
            self.awake = True

    def touch(self, number: int, now: float) -> None:
        """It is being worked on."""
        if number in self.pending:
            self._track(number, now + self._patience(number))

    def _patience(self, number: int) -> float:
        backoff = self.config.backoff
        if not backoff:
            return self._wait
        return backoff[min(self.redelivered.get(number, 0), len(backoff) - 1)] / SECOND

    def _track(self, number: int, due: float) -> None:
        known = self.pending.get(number)
        self.pending[number] = Pending(self.delivered if known is None else known.number, due)
        heapq.heappush(self._deadlines, (due, number))

    def _look_at_deadlines(self, now: float) -> None:
        missed = []
        while self._deadlines and self._deadlines[0][0] <= now:
            due, number = heapq.heappop(self._deadlines)
            known = self.pending.get(number)
            if known is not None and known.due == due and number not in self._again:
                missed.append(number)
        self._again.extend(sorted(missed))

    # --- deliveries ------------------------------------------------------------------------------------

    def request(self, pull: Pull, now: float) -> bytes | None:
        """Somebody asks for messages. Returns a status where he gets none."""
        self.idle_since = now
        if len(self.waiting) >= self.config.max_waiting:
            return status(409, "Exceeded MaxWaiting")
        if pull.no_wait and not self.left and not self._again and pull.expires is None:
            return NO_MESSAGES
        pull.beat_at = now + pull.heartbeat
        self.waiting.append(pull)
        self.awake = True
        return None

    def work(self, now: float, wall: int, interested: Interested) -> list[Delivery]:
        """Everything that is to be sent now."""
        self.awake = False
        self._look_at_deadlines(now)
        if self.config.deliver_subject:
            return self._push(self.config.deliver_subject, now, wall, interested)
        return self._serve(now, wall, interested)

    def _push(self, to: str, now: float, wall: int, interested: Interested) -> list[Delivery]:
        if not interested(to):
            self._beat_at = max(self._beat_at, now + self.config.idle_heartbeat / SECOND)
            return []
        self.idle_since = now
        out: list[Delivery] = []
        while (message := self._take(now, wall)) is not None:
            out.append(Delivery(to, message, self._reply(message)))
        beat = self.config.idle_heartbeat / SECOND
        if beat:
            if not out and now >= self._beat_at:
                out.append(Delivery(to, None, "", self._heartbeat()))
            if out:
                self._beat_at = now + beat
        return out

    def _heartbeat(self) -> bytes:
        return status(100, "Idle Heartbeat", Nats_Last_Consumer=self.delivered, Nats_Last_Stream=self.next - 1)

    def _serve(self, now: float, wall: int, interested: Interested) -> list[Delivery]:
        out = list(self._time_out(now))
        while self.waiting:
            pull = self.waiting[0]
            if not interested(pull.reply):
                self.waiting.popleft()
                continue
            message = self._take(now, wall)
            if message is None:
                break
            out.append(Delivery(pull.reply, message, self._reply(message)))
            pull.left -= 1
            pull.delivered += 1
            pull.beat_at = now + pull.heartbeat
            self.waiting.popleft()
            if pull.left:
                self.waiting.append(pull)
            self.idle_since = now
        for pull in [pull for pull in self.waiting if pull.no_wait and pull.delivered]:
            self.waiting.remove(pull)
            empty = pull.expires is None
            out.append(Delivery(pull.reply, None, "", NO_MESSAGES) if empty else _timed_out(pull))
        return out

    def _time_out(self, now: float) -> Iterator[Delivery]:
        over = [pull for pull in self.waiting if pull.expires is not None and pull.expires <= now]
        for pull in over:
            self.waiting.remove(pull)
            self.idle_since = now
            yield _timed_out(pull)
        for pull in self.waiting:
            if pull.heartbeat and pull.beat_at <= now:
                pull.beat_at = now + pull.heartbeat
                yield Delivery(pull.reply, None, "", self._heartbeat())

    def _take(self, now: float, wall: int) -> Message | None:
        """The next message to deliver, which counts as delivered then."""
        message = self._take_again() or self._take_new()
        if message is None:
            return None
        self.delivered += 1
        self.active_at = wall
        number = message.sequence
        if self._acked:
            self._track(number, now + self._patience(number))
        else:
            self.floor = (self.delivered, self.next - 1)
        return message

    def _take_again(self) -> Message | None:
        while self._again:
            number = self._again.popleft()
            if number not in self.pending:
                continue
            message = self.stream.messages.get(number)
            if message is None:
                self._done(number)
                continue
            times = self.redelivered.get(number, 0) + 2
            if 0 < self.config.max_deliver < times:
                del self.pending[number]
                self.redelivered.pop(number, None)
                self.exceeded.append((number, times - 1))
                continue
            self.redelivered[number] = times - 1
            return message
        return None

    def _take_new(self) -> Message | None:
        if self._acked and 0 < self.config.max_ack_pending <= len(self.pending):
            return None
        if self.left <= 0:
            return None
        if self._skip:
            message = self.stream.messages[self._skip.popleft()]
            self.next = self._skip[0] if self._skip else self._skip_end + 1
        else:
            found = self.stream.next(self.next, self.taken)
            if found is None:
                return None
            message = found
            self.next = message.sequence + 1
        self.left -= 1
        return message

    def _reply(self, message: Message) -> str:
        times = self.redelivered.get(message.sequence, 0) + 1
        where = f"{self.stream.config.name}.{self.name}"
        return f"$JS.ACK.{where}.{times}.{message.sequence}.{self.delivered}.{message.time}.{self.left}"

    # --- time ------------------------------------------------------------------------------------------

    def due(self) -> float | None:
        """When `work` is to be called though nothing has happened; None: never."""
        times = [pull.expires for pull in self.waiting if pull.expires is not None]
        times += [pull.beat_at for pull in self.waiting if pull.heartbeat]
        while self._deadlines:
            due, number = self._deadlines[0]
            known = self.pending.get(number)
            if known is not None and known.due == due:
                times.append(due)
                break
            heapq.heappop(self._deadlines)
        if self.config.deliver_subject and self.config.idle_heartbeat:
            times.append(self._beat_at)
        if self.config.inactive_threshold:
            times.append(self.idle_since + self.config.inactive_threshold / SECOND)
        return min(times) if times else None

    def unused(self, now: float, interested: Interested) -> bool:
        """Whether nobody has used it for as long as it is kept."""
        kept = self.config.inactive_threshold / SECOND
        if not kept or now < self.idle_since + kept:
            return False
        to = self.config.deliver_subject
        if (to and interested(to)) or any(interested(pull.reply) for pull in self.waiting):
            self.idle_since = now
            return False
        return True

    def closed(self, code: int, text: str) -> list[Delivery]:
        """What those are told who wait, when it ends."""
        waiting, self.waiting = self.waiting, deque()
        return [Delivery(pull.reply, None, "", status(code, text)) for pull in waiting]


def _timed_out(pull: Pull) -> Delivery:
    header = status(408, "Request Timeout", Nats_Pending_Messages=pull.left, Nats_Pending_Bytes=pull.max_bytes)
    return Delivery(pull.reply, None, "", header)
