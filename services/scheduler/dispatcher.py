"""Hands dispatch batches to group leaders and sorts out their replies.

    add ─▶ batcher ─▶ request-reply ─┬─ accepted ─────────────▶ the ring has it
                                     ├─ refused, for ever ────▶ the generation ends
                                     ├─ refused, for now ─────▶ back to the queue
                                     └─ no answer ────────────▶ back to the queue, the group is suspected

    link to NATS broke ────▶ back to the queue, the group is not to blame
    refresh ─▶ an empty batch ─▶ its reply says whether a full group has room again

A leader drops what it already has by (generation, attempt): handing in twice does no harm. Before a request
goes to another group than the one that has not answered, it is cancelled at that one.
"""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import structlog

from services.scheduler.groups import Group, GroupTable
from services.scheduler.metrics import SchedulerMetrics, code_label
from services.scheduler.request import WaitingRequest
from shared.errors import BrokerUnavailable, LinkLost, PayloadTooLarge, RyzansteinError
from shared.messages import Cancel, DispatchReply, Refusal
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.tasks import TaskSet

MAX_BATCH = 128  # requests of one dispatch batch, at most


@dataclass(slots=True)
class _Gathering:
    since: float
    items: list[WaitingRequest] = field(default_factory=list)


class Batcher:
    """Gathers requests by destination into dispatch batches. Waiting buys throughput only while a group is busy and
    more is on its way; otherwise a request goes at once. Times are monotonic seconds."""

    def __init__(self, max_wait: float, max_bytes: int) -> None:
        self._max_wait = max_wait
        self._max_bytes = max_bytes
        self._gathered: dict[str, _Gathering] = {}

    def add(self, group: str, item: WaitingRequest, now: float) -> None:
        self._gathered.setdefault(group, _Gathering(now)).items.append(item)

    def groups(self) -> list[str]:
        """Groups that something is gathered for."""
        return list(self._gathered)

    def take(self, group: str, now: float, *, at_once: bool) -> list[WaitingRequest]:
        """The next batch for `group`; empty while it is worth waiting.

        It goes when it is full, when its first request has waited long enough, or `at_once` (the
        group is idle, or nothing else is coming). A batch exceeds `max_bytes` only with a single request.
        """
        gathering = self._gathered.get(group)
        if gathering is None:
            return []
        count = self._fitting(gathering.items)
        full = count == MAX_BATCH or count < len(gathering.items)
        if not (at_once or full or now >= gathering.since + self._max_wait):
            return []
        batch, rest = gathering.items[:count], gathering.items[count:]
        if rest:
            # They have waited as long as the batch that goes: their time is not counted anew.
            gathering.items = rest
        else:
            del self._gathered[group]
        return batch

    def take_back(self, group: str) -> list[WaitingRequest]:
        """Everything gathered for a group that shall not have it any more."""
        gathering = self._gathered.pop(group, None)
        return gathering.items if gathering is not None else []

    def due(self) -> float | None:
        """When the oldest gathered request has waited long enough."""
        oldest = min((gathering.since for gathering in self._gathered.values()), default=None)
        return None if oldest is None else oldest + self._max_wait

    def _fitting(self, items: list[WaitingRequest]) -> int:
        size = 0
        for count, item in enumerate(items[:MAX_BATCH]):
            size += len(item.raw)
            if size > self._max_bytes and count:
                return count
        return min(len(items), MAX_BATCH)


log = structlog.get_logger(__name__)


class RawBatch(msgspec.Struct, frozen=True):
    """A DispatchBatch of requests that are encoded already."""

    requests: list[msgspec.Raw]
    epoch: int


class Outcome(Protocol):
    """What becomes of dispatched requests."""

    def accepted(self, item: WaitingRequest, group: str, epoch: int) -> None: ...

    def rejected(self, item: WaitingRequest, refusal: Refusal) -> None: ...

    def returned(self, item: WaitingRequest) -> None: ...

    def wake(self) -> None:
        """A batch is done with: there may be room for more."""
        ...


class Dispatcher:
    """Runs the dispatches of all groups side by side. Requests given to it are reserved in the table."""

    def __init__(
        self,
        bus: Bus,
        table: GroupTable,
        batcher: Batcher,
        outcome: Outcome,
        metrics: SchedulerMetrics,
        *,
        timeout: float,
    ) -> None:
        self._bus = bus
        self._table = table
        self._batcher = batcher
        self._outcome = outcome
        self._metrics = metrics
        self._timeout = timeout
        # Groups that a batch is under way to. What comes meanwhile gathers for the next one: the busier a group is,
        # the fewer messages a request needs.
        self._asked: set[str] = set()
        self._tasks = TaskSet("dispatch_failed")
        self._timer: asyncio.TimerHandle | None = None
        self._more_coming = False

    def add(self, group: Group, item: WaitingRequest) -> None:
        self._batcher.add(group.name, item, asyncio.get_running_loop().time())

    def flush(self, *, more_coming: bool) -> None:
        """Sends every batch that need not wait. `more_coming`: requests are under way that may join."""
        self._more_coming = more_coming
        loop = asyncio.get_running_loop()
        now = loop.time()
        for name in self._batcher.groups():
            group = self._table.get(name)
            if group is None or not group.up or group.breaker.state == "open":
                self._give_back(name)
                continue
            if name in self._asked:
                continue
            if batch := self._batcher.take(name, now, at_once=group.idle or not more_coming):
                self._metrics.batch_size.observe(len(batch))
                self._begin(group, batch)
        self._set_timer(loop)

    def refresh(self, group: Group) -> None:
        """Asks a group how full it is, unless an answer is due from it anyway."""
        if group.name not in self._asked:
            group.asked = asyncio.get_running_loop().time()
            self._begin(group, [])

    async def finish(self) -> None:
        """Waits for the replies that are due and gives everything else back."""
        for name in self._batcher.groups():
            self._give_back(name)
        await self._tasks.finished()
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self, group: Group, batch: list[WaitingRequest]) -> None:
        self._asked.add(group.name)
        self._tasks.spawn(self._send(group, batch))

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """Comes back when the oldest gathered request has waited long enough (a group that has a batch to
        answer comes back with its reply)."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._batcher.due()
        if due is not None and due > loop.time():
            self._timer = loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.flush(more_coming=self._more_coming)

    async def _send(self, group: Group, batch: list[WaitingRequest]) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for item in batch:
            self._metrics.decision_seconds.observe(began - item.decided)
        try:
            await self._withdraw(group, batch)
            began = loop.time()
            sent = [msgspec.Raw(item.trace.sent(item.raw, group.name, item.reason, len(batch))) for item in batch]
            reply = await self._bus.request(
                subjects.dispatch(group.name), RawBatch(sent, group.epoch), DispatchReply, timeout=self._timeout
            )
        except PayloadTooLarge as error:
            refused = [Refusal(item.generation_id, error.code, str(error), False) for item in batch]
            self._settle(group, batch, DispatchReply(group.name, group.epoch, [], refused, group.load))
        except LinkLost as error:  # nothing is wrong with the group: it is asked again, and drops what it has
            log.info("dispatch_reply_lost", group=group.name, requests=len(batch), error=str(error))
            self._return(group, batch)
        except (BrokerUnavailable, msgspec.DecodeError) as error:
            log.warning("dispatch_timed_out", group=group.name, requests=len(batch), error=str(error))
            self._on_no_answer(group, batch)
        except Exception:
            log.exception("dispatch_failed", group=group.name, requests=len(batch))
            self._on_no_answer(group, batch)
        else:
            now = loop.time()
            self._table.report(group, reply.load, now, now - began)
            self._settle(group, batch, reply)
        finally:
            self._asked.remove(group.name)
        self._outcome.wake()

    async def _withdraw(self, group: Group, batch: list[WaitingRequest]) -> None:
        """Cancels requests at the groups that did not answer for them: such a one may have them, or find
        them when it wakes, and would compute the same attempt twice."""
        stray: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        for item in batch:
            if item.asked and item.asked != group.name:
                stray[item.asked, item.attempt].append(item.generation_id)
            item.asked = ""
        for (name, attempt), generation_ids in stray.items():
            try:
                await self._bus.publish(subjects.control(name), Cancel(generation_ids, attempt))
            except RyzansteinError as error:
                log.warning("withdrawal_failed", group=name, error=str(error))

    def _settle(self, group: Group, batch: list[WaitingRequest], reply: DispatchReply) -> None:
        taken = set(reply.accepted)
        refusals = {refusal.generation_id: refusal for refusal in reply.refused}
        again = []
        for item in batch:
            self._table.release(group, item.tokens)
            refusal = refusals.get(item.generation_id)
            if item.generation_id in taken:
                self._outcome.accepted(item, group.name, reply.epoch)
            elif refusal is not None and self._is_final(item, group, reply, refusal):
                self._metrics.refusals.labels(code_label(refusal.code)).inc()
                self._outcome.rejected(item, refusal)
            else:
                code = code_label(refusal.code) if refusal else "unnamed"
                self._metrics.refusals.labels(code).inc()
                item.trace.refused(code)
                again.append(item)
        if again:
            self._table.refused(group, asyncio.get_running_loop().time())
        else:
            self._table.accepted(group)
        for item in again:
            self._outcome.returned(item)

    def _is_final(self, item: WaitingRequest, group: Group, reply: DispatchReply, refusal: Refusal) -> bool:
        """Whether no group would take it. A ring that began anew may compute less than the one before, or a group that
        computes more has come meanwhile."""
        another = self._table.another_computes(group.name, reply.epoch, item.model, item.sparse)
        return not refusal.retryable and not another

    def _on_no_answer(self, group: Group, batch: list[WaitingRequest]) -> None:
        self._metrics.unanswered.inc()
        self._table.timed_out(group, asyncio.get_running_loop().time())
        self._return(group, batch)
        self._give_back(group.name)

    def _return(self, group: Group, batch: list[WaitingRequest]) -> None:
        """Requests that the group may have or not."""
        for item in batch:
            item.asked = group.name
            item.trace.refused("no_answer")
            self._table.release(group, item.tokens)
            self._outcome.returned(item)

    def _give_back(self, name: str) -> None:
        group = self._table.get(name)
        for item in self._batcher.take_back(name):
            if group is not None:
                self._table.release(group, item.tokens)
            self._outcome.returned(item)
