"""All generations in flight: handed in, followed, recovered, cancelled. The shell around `generation.py`."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import nats.errors
import structlog
from nats.js.errors import Error as JetStreamError
from nats.js.errors import NotFoundError

from services.gateway.catalog import Losses
from services.gateway.consumer import TokenConsumer
from services.gateway.generation import Decision, Generation
from services.gateway.metrics import GatewayMetrics
from services.gateway.settings import GatewaySettings
from shared import subjects
from shared.bus import Bus
from shared.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    NoGroupAvailable,
    PayloadTooLarge,
    QueueFull,
    RyzansteinError,
)
from shared.messages import Cancel, CancelRequest, GenerationRequest, GroupEvent, TokenFrame

log = structlog.get_logger(__name__)

SWEEP_INTERVAL = 0.25
SUSPICION = 5.0
"""Seconds after the loss of a ring in which a request without any entry may turn out to have been in it."""
CLOCK_MARGIN = 5.0
"""Seconds that this machine's clock and the broker's may differ by."""


class Generations:
    """Owns every unfinished `Generation` of this gateway."""

    def __init__(self, bus: Bus, consumer: str, settings: GatewaySettings, metrics: GatewayMetrics) -> None:
        self._bus = bus
        self._settings = settings
        self._metrics = metrics
        self._by_id: dict[str, Generation] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._losses = Losses()
        self._stopping = False
        self._has_ready_group: Callable[[str], bool] = lambda _model: True
        self.tokens = TokenConsumer(
            bus,
            consumer,
            on_frame=self.on_frame,
            replay_since=self._oldest,
            on_replayed=self._on_replayed,
            pending_frames=settings.pending_frames,
        )
        metrics.in_flight.set_function(lambda: float(len(self._by_id)))

    def __len__(self) -> int:
        return len(self._by_id)

    async def start(self, has_ready_group: Callable[[str], bool]) -> None:
        """Subscribes. `has_ready_group(model)` decides what a time-out is called."""
        self._has_ready_group = has_ready_group
        await self.tokens.start()
        await self._bus.subscribe(subjects.HEALTH_EVENTS, GroupEvent, self._on_group_event)

    async def run(self) -> None:
        """Looks after time-outs. Runs until it is cancelled."""
        while not self._stopping:
            await asyncio.sleep(SWEEP_INTERVAL)
            now = time.monotonic()
            for generation in list(self._by_id.values()):
                self._act(generation, generation.on_time(now))
            suspects = [item for item in self._by_id.values() if item.suspect_until > now]
            if suspects:
                await self._check_suspects(suspects)

    async def stop(self) -> None:
        """Waits until what was begun in the background is done."""
        self._stopping = True
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.tokens.stop()

    # --- from clients ----------------------------------------------------------------------------

    async def submit(self, generations: Sequence[Generation]) -> None:
        """Hands them in, durably. Raises `QueueFull`, `PayloadTooLarge`, `BrokerUnavailable`."""
        if len(self._by_id) + len(generations) > self._settings.max_generations:
            raise QueueFull(
                f"The gateway has {len(self._by_id)} generations in flight and takes at most "
                f"{self._settings.max_generations}; try again in a moment.",
                retry_after=1,
            )
        for generation in generations:
            self._by_id[generation.id] = generation
        try:
            if len(generations) == 1:
                await self._hand_in(generations[0])
            else:
                await asyncio.gather(*(self._hand_in(item) for item in generations))
        except RyzansteinError:
            self.cancel(generations)
            raise

    async def _hand_in(self, generation: Generation) -> None:
        request = generation.request
        sequence = await self._bus.publish_durable(subjects.intake(request.lane, request.model), request)
        generation.queued(sequence)

    def cancel(self, generations: Sequence[Generation]) -> None:
        """Ends those that have not ended, here and in the rings; at once here, soon there."""
        open_ones = [generation for generation in generations if not generation.ended]
        for generation in open_ones:
            generation.cancel()
        for generation in generations:
            self._by_id.pop(generation.id, None)
        if open_ones:
            self._metrics.cancelled.inc(len(open_ones))
            self._spawn(self._publish_cancel(open_ones))

    def fail_all(self, error: RyzansteinError) -> None:
        """Ends everything in flight with `error`."""
        generations = list(self._by_id.values())
        self._by_id.clear()
        for generation in generations:
            generation.fail(error)
        if generations:
            self._spawn(self._publish_cancel(generations))

    async def _publish_cancel(self, generations: Sequence[Generation]) -> None:
        groups: dict[str, list[str]] = {}
        for generation in generations:
            groups.setdefault(generation.group, []).append(generation.id)
        await self._bus.publish(subjects.CANCEL, CancelRequest([generation.id for generation in generations]))
        for group, ids in groups.items():
            if group:
                await self._bus.publish(subjects.control(group), Cancel(ids))
        for generation in generations:
            if not generation.group and generation.intake_sequence:
                await self._withdraw(generation.intake_sequence)

    async def _withdraw(self, sequence: int) -> None:
        """Takes a request that no ring has accepted out of the queue: nobody would read its tokens."""
        try:
            await self._bus.jetstream().delete_msg(subjects.INTAKE_STREAM, sequence)
        except (nats.errors.Error, TimeoutError) as error:
            log.debug("not_withdrawn", sequence=sequence, error=str(error))

    # --- from rings and the journal --------------------------------------------------------------

    def on_frame(self, frame: TokenFrame) -> None:
        """A frame has come, live or from the journal."""
        now = time.monotonic()
        for entry in frame.entries:
            generation = self._by_id.get(entry.generation_id)
            if generation is None:
                continue
            decision = generation.on_entry(frame.group, frame.epoch, entry, now)
            if decision is not Decision.NOTHING:
                self._act(generation, decision)

    def on_group_lost(self, group: str, epoch: int, model: str) -> None:
        """`epoch` of `group`, and all before it, are over: whatever was in it is handed in again."""
        if not self._losses.is_new(group, epoch):
            return
        until = time.monotonic() + SUSPICION
        for generation in list(self._by_id.values()):
            self._act(generation, generation.on_group_lost(group, epoch))
            if not generation.group and generation.request.model == model and generation.state == "queued":
                generation.suspect_until = until

    async def _on_group_event(self, event: GroupEvent) -> None:
        if event.kind == "down":
            self.on_group_lost(event.group, event.epoch, event.model)

    async def _check_suspects(self, suspects: Sequence[Generation]) -> None:
        """A request that left the queue before a ring was lost, and was never heard of, was in that ring."""
        for generation in suspects:
            sequence = generation.intake_sequence
            try:
                await self._bus.jetstream().get_msg(subjects.INTAKE_STREAM, sequence)
            except NotFoundError:
                if generation.state == "queued" and generation.intake_sequence == sequence:
                    self._act(generation, Decision.RECOVER)
            except (nats.errors.Error, JetStreamError, TimeoutError) as error:
                log.debug("suspect_not_checked", error=str(error))

    def _oldest(self) -> float | None:
        started = [generation.started_at for generation in self._by_id.values()]
        if not started:
            return None
        self._metrics.replays.inc()
        return min(started) - CLOCK_MARGIN

    def _on_replayed(self) -> None:
        for generation in list(self._by_id.values()):
            self._act(generation, generation.on_replayed())

    # --- what a decision means -------------------------------------------------------------------

    def _act(self, generation: Generation, decision: Decision) -> None:
        if decision is Decision.REPLAY:
            self.tokens.request_replay()
        elif decision is Decision.RECOVER:
            self._recover(generation)
        elif decision is Decision.EXPIRE:
            self._expire(generation)
        elif decision is Decision.ENDED:
            self._by_id.pop(generation.id, None)

    def _recover(self, generation: Generation) -> None:
        deadline = time.time() + self._settings.token_timeout
        lost = generation.group
        request = generation.next_attempt(time.monotonic(), deadline)
        if request is None:
            self._by_id.pop(generation.id, None)
            return
        self._metrics.recoveries.inc()
        log.info(
            "recovering",
            generation=generation.id,
            request_id=request.request_id,
            group=lost,
            attempt=request.attempt,
            tokens=len(request.generated),
        )
        self._spawn(self._hand_in_again(generation, request))

    async def _hand_in_again(self, generation: Generation, request: GenerationRequest) -> None:
        """Tries for as long as the broker is away and the generation waits for this attempt."""
        while not generation.ended and generation.request is request:
            try:
                await self._hand_in(generation)
            except BrokerUnavailable:
                await asyncio.sleep(SWEEP_INTERVAL)
            except PayloadTooLarge as error:
                generation.fail(error)
                self._by_id.pop(generation.id, None)
                return
            else:
                return

    def _expire(self, generation: Generation) -> None:
        seconds, model = self._settings.token_timeout, generation.request.model
        error: RyzansteinError
        if generation.tokens or self._has_ready_group(model):
            error = DeadlineExceeded(f"No token came within {seconds:g} s; try again later.", retry_after=5)
        else:
            error = NoGroupAvailable(
                f"No executor group for the model '{model}' was ready within {seconds:g} s; try again later.",
                retry_after=5,
            )
        generation.fail(error)
        self._by_id.pop(generation.id, None)
        self._spawn(self._publish_cancel([generation]))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("background_work_failed", error=str(error))
