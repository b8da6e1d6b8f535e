"""Takes requests from their arrival to a ring: the asyncio shell around queue, placement and batcher."""

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import msgspec
import structlog

from services.scheduler.dispatcher import Batcher, Dispatcher
from services.scheduler.fair_queue import RequestQueue
from services.scheduler.groups import GroupTable
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.models.controller import ModelController
from services.scheduler.placement import Placement, PlacementDecision, SessionPins
from services.scheduler.rejections import Rejections
from services.scheduler.request import WaitingRequest
from services.scheduler.settings import SchedulerSettings
from shared.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    NoGroupAvailable,
    QueueFull,
    UnknownModel,
    error_from_code,
)
from shared.messages import Cancel, CancelRequest, ControlReply, Lane, ModelPlacement, Refusal, SessionPin
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.subjects import pin_key
from shared.tasks import TaskSet

REMEMBER = 120.0  # seconds for which a cancelled generation is known


class Holder(NamedTuple):
    """The ring that has accepted an attempt of a generation."""

    attempt: int
    group: str
    epoch: int


class _Cancelled(NamedTuple):
    until: float  # monotonic seconds for which it is remembered
    claim: float  # of the gateway that said so; infinite: whoever owns the generation


class DispatchHistory:
    """What is remembered of generations that do not wait here: which are cancelled before they are pulled, and which
    ring has taken which attempt. Bounded in number."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._cancelled: OrderedDict[str, _Cancelled] = OrderedDict()
        self._taken: OrderedDict[str, Holder] = OrderedDict()

    def cancel(self, generation_id: str, now: float, claim: int = -1) -> None:
        """Remembers a cancellation until `now + REMEMBER` (monotonic seconds). `claim`: of the gateway that has
        said so; -1: it holds whoever owns the generation."""
        known = self._cancelled.get(generation_id)
        reach = math.inf if claim < 0 else max(claim, known.claim if known else 0.0)
        self._cancelled[generation_id] = _Cancelled(now + REMEMBER, reach)
        self._cancelled.move_to_end(generation_id)
        while self._cancelled:
            oldest, entry = next(iter(self._cancelled.items()))
            if entry.until > now and len(self._cancelled) <= self._capacity:
                break
            del self._cancelled[oldest]

    def cancelled(self, generation_id: str, claim: int = 0) -> bool:
        """Whether a request that was handed in under `claim` is cancelled."""
        entry = self._cancelled.get(generation_id)
        return entry is not None and claim <= entry.claim

    def claim_of_cancel(self, generation_id: str) -> int:
        """The claim under which it was cancelled; -1: whoever owns it."""
        entry = self._cancelled.get(generation_id)
        return -1 if entry is None or entry.claim == math.inf else int(entry.claim)

    def on_accepted(self, generation_id: str, holder: Holder) -> None:
        """Remembers which ring has accepted a generation."""
        self._taken[generation_id] = holder
        self._taken.move_to_end(generation_id)
        if len(self._taken) > self._capacity:
            self._taken.popitem(last=False)

    def holder(self, generation_id: str) -> Holder | None:
        """The ring that accepted the generation last."""
        return self._taken.get(generation_id)


TICK = 0.02  # seconds between two looks at deadlines and closed groups
REFRESHES = 32  # full groups per model that are asked at each look, at most, whether they have room again
BATCH_REFRESH = 0.1  # seconds between two such questions for the sake of batch work
FAULT_PAUSE = 0.5  # seconds before a request is tried again that a fault of ours has hit
PAYLOAD_MARGIN = 4096  # bytes of a message kept free for the batch's own framing

log = structlog.get_logger(__name__)


class Router:
    """One scheduler's work. Synchronous where it decides; replies and pins come back as tasks."""

    def __init__(
        self,
        bus: Bus,
        settings: SchedulerSettings,
        table: GroupTable,
        pins: SessionPins,
        rejections: Rejections,
        metrics: SchedulerMetrics,
        more_coming: Callable[[], bool],
        models: ModelController,
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._table = table
        self._pins = pins
        self._rejections = rejections
        self._metrics = metrics
        self._more_coming = more_coming
        self._models = models
        self._queue = RequestQueue()
        self._placement = Placement(table, settings.sticky_tokens)
        self._history = DispatchHistory()
        self._dispatcher = Dispatcher(
            bus,
            table,
            Batcher(settings.batch_wait, bus.max_payload - PAYLOAD_MARGIN),
            self,
            metrics,
            timeout=settings.dispatch_timeout,
        )
        self._tasks = TaskSet()
        self._claiming = 0
        self._ending: set[str] = set()  # removed models about which the registry is asked
        self._woken = False
        self._stopped = False
        self._work_waiting = asyncio.Event()

    # --- from outside ----------------------------------------------------------------------------

    def admit(self, item: WaitingRequest, *, crowded: bool) -> bool:
        """A request has arrived from intake. False: it cannot wait here now.

        `crowded`: much of what intake may hold is held. Then the requests of a model that nobody serves
        stay in the stream, so that those of other models still come through.
        """
        if self._history.cancelled(item.generation_id, item.claim):
            self._rejections.cancel(item)
        elif self._is_taken(item):
            self._rejections.settle(item)
        elif (refused := self._refused(item)) is not None:
            self._models.arrived(item.model, served=False)
            self._refuse(item, refused)
        elif crowded and not 0 < item.deadline <= time.time() and self._waits_for_group(item.model):
            self._models.deferred(item.model)
            return False
        elif self._is_full(item):
            error = QueueFull(
                f"{self._settings.max_waiting:,} requests are already waiting for the model {item.model}; try again "
                "in a few seconds."
            )
            self._rejections.fail(item, error.code, str(error), retryable=error.retryable)
        else:
            self._enqueue(item)
            self._models.arrived(item.model, served=self._is_served(item.model))
        return True

    def _refused(self, item: WaitingRequest) -> ModelPlacement | None:
        """Why the request would wait in vain: no host can take its model. One that another group has begun waits
        all the same: it was accepted."""
        if item.lane == "recovery" or item.attempt:
            return None
        placement = self._models.placement(item.model)
        return placement if placement is not None and placement.code and not self._is_served(item.model) else None

    def _refuse(self, item: WaitingRequest, placement: ModelPlacement) -> None:
        retryable = error_from_code(placement.code, "").retryable
        self._rejections.fail(item, placement.code, placement.reason, retryable=retryable)

    def _is_removed(self, model: str) -> bool:
        """Whether its requests would wait in vain, those of lost rings too: it is out of the registry, and its last
        group is gone."""
        return self._models.removed(model) and all(group.status == "gone" for group in self._table.of(model))

    async def _end_removed(self, model: str) -> None:
        """Ends what waits for `model`, once the registry says that it is not there again."""
        try:
            removed = await self._models.still_removed(model) and self._is_removed(model)
        except BrokerUnavailable as error:
            log.info("registry_read_failed", model=model, error=str(error))
            return
        finally:
            self._ending.discard(model)
        reason = f"The model {model} was removed from the registry and unloaded; GET /v1/models shows what is served."
        for item in self._queue.of(model) if removed else ():
            self._queue.remove(item.generation_id)
            self._rejections.fail(item, UnknownModel.code, reason, retryable=UnknownModel.retryable)

    def placed(self, model: str, placement: ModelPlacement | None) -> None:
        """It was decided where the model is loaded, or that no host can take it."""
        self._table.cordon(model, placement.cordoned if placement is not None else ())
        if placement is not None and placement.code:
            for item in self._queue.of(model):
                if self._refused(item) is not None:
                    self._queue.remove(item.generation_id)
                    self._refuse(item, placement)
        self.wake()

    def _is_taken(self, item: WaitingRequest) -> bool:
        """Whether a delivery is a repeat: a living ring has this attempt, or a later one has been placed."""
        holder = self._history.holder(item.generation_id)
        if holder is None or holder.attempt != item.attempt:
            return holder is not None and holder.attempt > item.attempt
        group = self._table.get(holder.group)
        return group is not None and group.up and group.epoch == holder.epoch

    def _is_served(self, model: str) -> bool:
        return bool(self._table.open(model)) or any(group.up for group in self._table.of(model))

    def _waits_for_group(self, model: str) -> bool:
        """Whether nobody serves it and somebody may later."""
        return not self._is_served(model) and not self._is_removed(model)

    def _is_full(self, item: WaitingRequest) -> bool:
        waiting = self._queue.depth_of(item.model, item.lane)
        return item.lane == "interactive" and waiting >= self._settings.max_waiting

    async def cancel(self, request: CancelRequest) -> None:
        """Stops generations wherever they are; ids that are not known yet are remembered."""
        now = asyncio.get_running_loop().time()
        by_group: dict[str, list[str]] = {}
        for generation_id in request.generation_ids:
            self._history.cancel(generation_id, now, request.claim)
            item = self._queue.get(generation_id)
            if item is not None and self._history.cancelled(generation_id, item.claim):
                self._queue.remove(generation_id)
                self._rejections.cancel(item)
            elif item is None and (holder := self._history.holder(generation_id)) is not None:
                by_group.setdefault(holder.group, []).append(generation_id)
        for group, generation_ids in by_group.items():
            self._tasks.spawn(self._forward_cancel(group, Cancel(generation_ids, claim=request.claim)))
        self.wake()

    @property
    def waiting(self) -> Mapping[tuple[str, Lane], int]:
        """How many requests wait for each model in each lane, where any do. Not to be changed."""
        return self._queue.depths

    def demand(self) -> Iterator[tuple[str, int, float]]:
        """Of each model that requests wait for: their number, and seconds that the next of them has waited."""
        now, totals = asyncio.get_running_loop().time(), Counter[str]()
        for (model, _), count in self._queue.depths.items():
            totals[model] += count
        for model, count in totals.items():
            item = self._queue.peek(model)
            yield model, count, now - item.arrived if item is not None else 0.0

    def wake(self) -> None:
        """Something has changed: requests may find a place now."""
        if not self._woken and not self._stopped:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._pump)

    async def tick(self) -> None:
        """Looks after deadlines and closed groups, for ever; sleeps while there are none."""
        while True:
            if not len(self._queue) and not self._table.closed:
                self._work_waiting.clear()
                await self._work_waiting.wait()
            await asyncio.sleep(TICK)
            self._expire()
            now = asyncio.get_running_loop().time()
            self._refresh(now)
            if self._table.reopen(now):
                self.wake()

    def _refresh(self, now: float) -> None:
        """Requests wait and groups are full: asks these again, since they say so only when they are asked."""
        if self._stopped:
            return
        for model in self._queue.models():
            if (item := self._queue.peek(model)) is not None:
                before = now - (BATCH_REFRESH if item.lane == "batch" else TICK / 2)
                for group in self._table.stalest(model, item.lane, REFRESHES, before):
                    self._dispatcher.refresh(group)

    async def stop(self) -> None:
        """Waits for what was handed to rings; what waits stays in the stream, unacknowledged."""
        self._stopped = True
        await self._dispatcher.finish()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._settings.dispatch_timeout)
        await self._dispatcher.finish()

    # --- placing ---------------------------------------------------------------------------------

    def _pump(self) -> None:
        self._woken = False
        self._expire()
        for model in self._queue.models():
            try:
                self._place_all(model)
            except Exception:  # the other models' requests must go on
                log.exception("placement_failed", model=model)
        self._dispatcher.flush(more_coming=self._more_coming() or self._claiming > 0)
        if len(self._queue) or self._table.closed:
            self._work_waiting.set()

    def _place_all(self, model: str) -> None:
        """As far as groups have room. Requests that none of those is for that compute their kind of sparse attention
        wait without being in the others' way."""
        full: set[str] = set()
        while (item := self._queue.peek(model, full)) is not None:
            if self._place(item):
                continue
            if not item.sparse:
                return
            full.add(item.sparse)

    def _place(self, item: WaitingRequest) -> bool:
        """Takes `item` out of the queue to a group; False when no group has room for it."""
        now = asyncio.get_running_loop().time()
        if not item.delivery.ours(now):
            self._queue.take(item)
            self._release_lost(item)
            return True
        key = pin_key(item.model, item.session) if item.session else ""
        pin = self._pins.cached(key, now) if key else None
        decision = self._placement.choose(item, pin, time.time())
        if decision is None:
            return False
        self._queue.take(item)
        item.decided = now
        item.trace.chosen()
        self._commit(item, key, decision, pin)
        return True

    def _commit(self, item: WaitingRequest, key: str, decision: PlacementDecision, pin: SessionPin | None) -> None:
        """Counts `item` as sent, and sends it once the pin of its session (`key`) is agreed upon."""
        self._table.reserve(decision.group, item.tokens)
        if key and self._needs_pin(item.model, decision):
            self._claiming += 1
            left = pin if decision.reason == "relieved" else None
            self._tasks.spawn(self._place_pinned(item, key, decision, left))
            return
        self._send(item, decision)
        now = asyncio.get_running_loop().time()
        if key and self._pins.refresh_due(key, now):
            self._tasks.spawn(self._pins.refresh(key, now))

    def _needs_pin(self, model: str, decision: PlacementDecision) -> bool:
        """Whether schedulers must agree on the session's group. With one group there is nothing to agree on:
        the session is pinned by its first turn after there are more."""
        if decision.reason == "least_loaded":
            up = (group for group in self._table.of(model) if group.up)
            return len(list(islice(up, 2))) > 1
        return decision.reason in ("moved", "relieved")

    async def _place_pinned(
        self, item: WaitingRequest, key: str, decision: PlacementDecision, left: SessionPin | None
    ) -> None:
        """Agrees with the other schedulers on the session's group. Where another one was first, the request
        is placed by what that one has written. `left`: the pin to a ring that lives and is too busy."""
        moved_at = time.time() if left is not None else 0.0
        wanted = SessionPin(decision.group.name, decision.group.epoch, moved_at)
        try:
            pin, outcome = await self._pins.claim(
                key,
                wanted,
                lambda pin: pin != left and self._placement.alive(item.model, pin),
                asyncio.get_running_loop().time(),
            )
        except Exception:
            log.exception("placement_failed", **item.log_fields)
            self._table.release(decision.group, item.tokens)
            asyncio.get_running_loop().call_later(FAULT_PAUSE, self.returned, item)
            return
        finally:
            self._claiming -= 1
        self._metrics.pins.labels(outcome).inc()
        if pin == wanted:
            self._send(item, decision)
        else:
            self._table.release(decision.group, item.tokens)
            adopted = self._placement.choose(item, pin, time.time())
            if adopted is None:
                self.returned(item)
            else:
                self._commit(item, key, adopted, pin)
        self.wake()

    def _send(self, item: WaitingRequest, decision: PlacementDecision) -> None:
        self._metrics.placements.labels(decision.reason).inc()
        item.reason = decision.reason
        if decision.reason == "pinned":
            self._metrics.pins.labels("hit").inc()
        self._dispatcher.add(decision.group, item)

    # --- outcomes of dispatches ------------------------------------------------------------------

    def accepted(self, item: WaitingRequest, group: str, epoch: int) -> None:
        self._history.on_accepted(item.generation_id, Holder(item.attempt, group, epoch))
        self._placement.accepted(item, group, epoch)
        item.trace.accepted(epoch)
        self._rejections.settle(item)
        self._metrics.groups.dispatched(group)
        self._metrics.queue_seconds.observe(asyncio.get_running_loop().time() - item.arrived)
        log.info("dispatched", group=group, epoch=epoch, **item.log_fields)
        if self._history.cancelled(item.generation_id, item.claim):
            claim = self._history.claim_of_cancel(item.generation_id)
            self._tasks.spawn(self._forward_cancel(group, Cancel([item.generation_id], claim=claim)))

    def rejected(self, item: WaitingRequest, refusal: Refusal) -> None:
        self._rejections.fail(item, refusal.code, refusal.message, retryable=False)

    def returned(self, item: WaitingRequest) -> None:
        """A request comes back: it waits again, in its old place."""
        item.trace.returned()
        if self._history.cancelled(item.generation_id, item.claim):
            self._rejections.cancel(item)
        else:
            self._enqueue(item)

    def _enqueue(self, item: WaitingRequest) -> None:
        displaced = self._queue.push(item)
        if displaced is not None:
            self._rejections.settle(displaced)
        self.wake()

    def _expire(self) -> None:
        for model in filter(self._is_removed, self._queue.models()):
            if model not in self._ending:
                self._ending.add(model)
                self._tasks.spawn(self._end_removed(model))
        now = asyncio.get_running_loop().time()
        for item in self._queue.expire(time.time()):
            if not item.delivery.ours(now):
                self._release_lost(item)
                continue
            if any(group.up for group in self._table.of(item.model)):
                error: DeadlineExceeded | NoGroupAvailable = DeadlineExceeded(
                    "No group had room for the request before its deadline; try again later."
                )
            else:
                error = NoGroupAvailable(self._why_unserved(item.model))
            self._rejections.fail(item, error.code, str(error), retryable=error.retryable)

    def _why_unserved(self, model: str) -> str:
        placement = self._models.placement(model)
        if placement is not None and placement.expected_at:
            seconds = max(1, round(placement.expected_at - time.time()))
            return f"The model {model} is still being loaded; try again in about {seconds:,} s."
        if placement is not None and placement.reason:
            return placement.reason
        return f"No executor group serves the model {model} at the moment; start one, or try again later."

    def _release_lost(self, item: WaitingRequest) -> None:
        """We have been silent for so long that the broker has given the request to another scheduler."""
        log.warning("request_lost", **item.log_fields)
        item.trace.ended("lost")
        self._metrics.lost.inc()
        item.delivery.drop()

    # --- helpers ---------------------------------------------------------------------------------

    async def _forward_cancel(self, group: str, command: Cancel) -> None:
        try:
            await self._bus.request(subjects.control(group), command, ControlReply, timeout=2.0)
        except (BrokerUnavailable, msgspec.DecodeError) as error:
            log.warning("cancel_forward_failed", group=group, error=str(error))
