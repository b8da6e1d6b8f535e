"""All generations in flight: handed in, followed, recovered, cancelled. The shell around `generation.py`."""

import asyncio
import functools
import time
from collections.abc import Iterable, Sequence

import msgspec
import structlog

from services.gateway.core.catalog import Catalog
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.settings import GatewaySettings
from services.gateway.core.tenant_pool import Bound, TenantPool
from services.gateway.lifecycle.cancellation import Cancellations
from services.gateway.lifecycle.claims import GenerationClaims
from services.gateway.lifecycle.generation import Generation
from services.gateway.lifecycle.recovery import Losses, QueuedRequests, Suspects
from services.gateway.lifecycle.request_state import of_choice
from services.gateway.lifecycle.token_logs import TokenConsumer, TokenLogReaders
from services.gateway.lifecycle.token_stream import StreamDecision
from services.gateway.tracing.generations import taken_over
from shared import limits
from shared.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    LinkLost,
    NoGroupAvailable,
    PayloadTooLarge,
    RyzansteinError,
)
from shared.messages import FinishReason, GenerationRequest, GroupEvent, RingDeath, TokenEntry, TokenFrame
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.errors import BROKER_ERRORS, reason_of, translated
from shared.nats.journal import CLOCK_MARGIN, JournalEnd, StartPosition, earliest
from shared.tasks import TaskSet
from shared.tracing import NONE

# Seconds by which a record must be later than an entry to know of it: its load may be of an older
# heartbeat, and its time is of the monitor's clock.
IDLE_MARGIN = 10.0


def idle(rings: Catalog, generation: Generation, now: float) -> bool:
    """Whether the generation's ring has been without work since it was last heard. `now`: monotonic seconds."""
    if not generation.group:
        return False
    heard_at = time.time() - (now - generation.heard_at)
    return rings.idle_at(generation.group, generation.epoch) > heard_at + IDLE_MARGIN


log = structlog.get_logger(__name__)

SWEEP_INTERVAL = 0.25

_intake = functools.lru_cache(maxsize=1024)(subjects.intake)


class Generations:
    """Every unfinished `Generation` that this gateway looks after or follows."""

    def __init__(
        self, bus: Bus, consumer: str, settings: GatewaySettings, metrics: GatewayMetrics, rings: Catalog
    ) -> None:
        self._bus = bus
        self._consumer = consumer
        self._settings = settings
        self._metrics = metrics
        self._by_id: dict[str, Generation] = {}
        whole = Bound(limits.GENERATIONS, settings.max_generations)
        share = Bound(limits.TENANT_GENERATIONS, settings.max_tenant_generations)
        self.places = TenantPool(whole, "generations", share, strict=True)
        self._some = asyncio.Event()  # whether there may be any
        self._background = TaskSet("background_work_failed")
        # Of logs, again; they end with their source, or are ended.
        self._readings = TaskSet("background_work_failed")
        self._losses = Losses()
        self._rings = rings
        self._stall_replay_at = float("-inf")
        self.journal = JournalEnd(bus)
        self.claims = GenerationClaims(bus, consumer, settings.journal_max_age)
        self.cancellations = Cancellations(bus, self.claims)
        self.tokens = self._open_log("")
        self.sources = TokenLogReaders(self._open_log)
        self.suspects = Suspects(bus, self.tokens.replayed, self._recover)
        self._queued = QueuedRequests(bus, self._recover)
        metrics.in_flight.set_function(lambda: float(len(self._by_id)))

    def __len__(self) -> int:
        return len(self._by_id)

    async def start(self) -> None:
        with translated("look at the journal"):
            await self.journal.look()
        self._bus.on_reconnect(lambda: self._background.spawn(self._look_at_journal()))
        await self.tokens.start()
        await self._bus.subscribe(subjects.HEALTH_EVENTS, GroupEvent, self._on_group_event)

    async def run(self) -> None:
        """Looks after time-outs. Runs until it is cancelled."""
        while True:
            if not self._by_id:
                self._some.clear()
                await self._some.wait()
            await asyncio.sleep(SWEEP_INTERVAL)
            self._sweep(time.monotonic())

    async def stop(self) -> None:
        """Waits until what was begun in the background is done."""
        for reading in self._readings:
            reading.cancel()
        await self._background.finished()
        await self.cancellations.stop()
        await self.sources.stop()
        await self.tokens.stop()

    # --- from clients ----------------------------------------------------------------------------

    async def submit(self, generations: Sequence[Generation], *, insist: bool = False) -> None:
        """Hands them in, durably. Where the connection breaks meanwhile a request is handed in once more, as the
        next attempt: should the first be there after all, its ring is told to end it. `insist`: where the broker does
        not say whether it has a request, the queue is looked at; else that is an error, and whatever has come of it
        is cancelled.

        Raises `QueueFull`, `PayloadTooLarge`, `BrokerUnavailable`.
        """
        try:
            self.add(generations)
            for generation in generations:
                generation.begins_behind(self.journal.number)
            if len(generations) == 1:
                await self._submit(generations[0])
            else:
                await asyncio.gather(*(self._submit(item) for item in generations))
        except RyzansteinError as error:
            if not insist or not isinstance(error, BrokerUnavailable):
                self.cancel(generations)
                raise
            for generation in generations:
                if not generation.intake_sequence:
                    generation.queued(0)
                    self._look_for(generation)

    async def _submit(self, generation: Generation) -> None:
        try:
            await self._hand_in(generation)
        except LinkLost:
            if generation.request.lane == "batch":  # what waits long is looked for, and not computed twice
                raise
            if not generation.ended:
                self._recover(generation)

    def _look_for(self, generation: Generation) -> None:
        """In the queue; it is handed in again unless it is there."""
        if self._queued.add(generation):
            self._background.spawn(self._queued.look())

    def add(self, generations: Sequence[Generation], *, admitted: bool = False) -> None:
        """From now on they get what is said of them. `admitted`: by a gateway that is lost. Raises `QueueFull`."""
        take = self.places.hold if admitted else self.places.take
        take(generations[0].request.tenant, len(generations))
        if not self._by_id:
            self._some.set()
        for generation in generations:
            if generation.id in self._by_id:
                self.places.give_back(generation.request.tenant, 1)
            self._by_id[generation.id] = generation

    def forget(self, generations: Sequence[Generation]) -> None:
        """They are another gateway's, and nobody reads them here any more."""
        for generation in generations:
            self._remove(generation)

    def is_crowded(self, generation: Generation) -> bool:
        """Whether others wait for a place in the ring that has it."""
        if not generation.group:
            return False
        return self._rings.has_waiting(generation.group, generation.epoch)

    def _remove(self, generation: Generation) -> None:
        """It gets nothing more of what is said."""
        if self._by_id.pop(generation.id, None) is not None:
            self.places.give_back(generation.request.tenant, 1)
            generation.end_trace()

    def take_over(self, generations: Sequence[Generation], claim: int) -> None:
        """They have been followed so far; from now on they are looked after here, under `claim`."""
        now, begin = time.monotonic(), StartPosition(self.journal.number, time.time() - CLOCK_MARGIN)
        for generation in generations:
            if generation.trace is None and generation.request.traceparent and not generation.ended:
                generation.trace = taken_over(generation.request)
            decision = generation.take_over(self._consumer, claim, now, begin)
            if decision is StreamDecision.RECOVER and generation.may_be_queued:
                self._look_for(generation)
            else:
                self._act(generation, decision)
            if generation.ring_learns_claim() and not generation.ended:
                self.cancellations.tell_claim(generation)
        self._recover_lost(item for item in generations if not item.ended)

    def conclude(self, generation: Generation, error: RyzansteinError | None, finish: FinishReason = "error") -> None:
        """Writes an end that no ring has said into the log: whoever reads it later must not wait for more. Unless
        another gateway has claimed the generation, which then ends as that one says."""
        entry = TokenEntry(
            generation.id,
            generation.stream.attempt + 1,
            len(generation.tokens),
            [],
            finish,
            error_code=error.code if error is not None else "",
            error=error.message if error is not None else "",
        )
        self._background.spawn(self._write_end(TokenFrame("", 0, 0, [entry])))

    async def _write_end(self, frame: TokenFrame) -> None:
        generation_id = frame.entries[0].generation_id
        for last in (False, True):
            try:
                if await self.claims.rival(of_choice(generation_id)) is None:
                    await self._bus.publish_durable(subjects.tokens(self._consumer), frame)
                return
            except RyzansteinError as error:
                if last or not isinstance(error, LinkLost):  # else it may not be there: the same again
                    log.info("end_write_failed", generation_id=generation_id, error=str(error))
                    return

    async def _hand_in(self, generation: Generation) -> None:
        request = generation.request
        with generation.trace.handing_in(request) if generation.trace else NONE as span:
            if span.recording:
                request = msgspec.structs.replace(request, traceparent=span.traceparent)
            sequence = await self._bus.publish_durable(_intake(request.lane, request.model), request)
        generation.queued(sequence)

    def cancel(
        self,
        generations: Sequence[Generation],
        error: RyzansteinError | None = None,
        *,
        by_owner: bool = False,
        conclude: bool = False,
    ) -> None:
        """Ends those that have not ended, here and in the rings; at once here, soon there. Readers get `error`.
        `by_owner`: this gateway decides so and no client, which holds only while it owns them. `conclude`: the end is
        written here for those that a ring has too. For others nobody else would write one: they were refused, or are
        taken out of the queue, and whoever took over their records would compute them."""
        for generation in generations:
            if not generation.ended:
                generation.cancel(error)
                self._metrics.cancelled.inc()
                self.cancellations.cancel(generation, by_owner=by_owner)
                if conclude or not generation.group:
                    self.conclude(generation, error, "cancelled")
            self._remove(generation)

    # --- from rings and the journal --------------------------------------------------------------

    def on_frame(self, frame: TokenFrame) -> None:
        """A live frame has come; perhaps one of a ring that is known to be lost."""
        touched = self._take(frame)
        if self._losses.over_since(frame.group, frame.epoch) is not None:
            self._recover_lost(touched)

    def _take(self, frame: TokenFrame) -> list[Generation]:
        """Gives the frame's entries to their generations; returns these."""
        now = time.monotonic()
        touched = []
        for entry in frame.entries:
            generation = self._by_id.get(entry.generation_id)
            if generation is None:
                continue
            touched.append(generation)
            decision = generation.on_entry(frame.group, frame.epoch, entry, now)
            if decision is StreamDecision.NOTHING:  # nearly always
                pass
            elif decision is StreamDecision.REJECT:
                self.cancellations.end(frame.group, generation, entry.attempt)
            else:
                self._act(generation, decision)
            if generation.claim and generation.ring_learns_claim():
                self.cancellations.tell_claim(generation)
        return touched

    def on_group_lost(
        self, group: str, epoch: int, model: str, at: float = 0.0, death: RingDeath | None = None
    ) -> None:
        """`epoch` of `group`, and all before it, are over: whatever was in it is handed in again.

        `at`: the monitor's time of the news, 0 where it is not known. `death`: its cause, where that is known.
        """
        if not self._losses.lost(group, epoch, at=at, now=time.monotonic(), death=death):
            return
        for generation in list(self._by_id.values()):
            self._act(generation, generation.on_group_lost(group, epoch, death))
        self.suspects.add(item for item in self._by_id.values() if item.unheard and item.request.model == model)

    def on_group_alive(self, group: str, epoch: int, at: float = 0.0) -> None:
        """`epoch` of `group` is at work, even if it was given up before."""
        self._losses.alive(group, epoch, at=at)

    async def _on_group_event(self, event: GroupEvent) -> None:
        if event.kind == "down":
            self.on_group_lost(event.group, event.epoch, event.model, event.at, event.death)
        elif event.kind == "up":
            self.on_group_alive(event.group, event.epoch, event.at)

    def _recover_lost(self, generations: Iterable[Generation]) -> None:
        """Those that a late frame, or their owner's end, has bound to a ring which is over.

        A ring that has taken what was handed in after its loss lives, whatever is said of it: to hand in once
        more would spend the attempts on the very same ring.
        """
        for generation in generations:
            if generation.followed:
                continue
            group, epoch = generation.group, generation.epoch
            over_since = self._losses.over_since(group, epoch) if group else None
            if over_since is None:
                continue
            if generation.attempt_at > over_since:
                self._losses.alive(group, epoch)
            else:
                death = self._losses.death_of(group, epoch)
                self._act(generation, generation.on_group_lost(group, epoch, death))

    def _open_log(self, source: str) -> TokenConsumer:
        """Of that other gateway, or of this one (empty)."""
        return TokenConsumer(
            self._bus,
            source or self._consumer,
            on_frame=self.on_frame,
            on_recorded=self._take,
            replay_from=lambda: self._oldest(source),
            on_replayed=lambda: self._on_replayed(source),
            pending_frames=self._settings.pending_frames,
        )

    async def _look_at_journal(self) -> None:
        """A broker that is back may have lost the journal's last messages: their numbers are given again."""
        try:
            number = await self.journal.look()
        except BROKER_ERRORS as error:
            log.info("journal_position_unknown", error=reason_of(error))
            return
        for generation in self._by_id.values():
            generation.begins_behind(number)

    def _oldest(self, source: str) -> StartPosition | None:
        """Where the log of that other gateway, or of this one (empty), is to be read from; None: it need not be."""
        generations = self._by_id.values()
        if source:
            begins = [item.begin for item in generations if source in item.sources]
        else:
            begins = [item.own_begin for item in generations if item.own_begin is not None]
        oldest = earliest(begins)
        if oldest is not None:
            self._metrics.replays.inc()
        return oldest

    def _on_replayed(self, source: str) -> None:
        """The journal of that other gateway, or of this one (empty), has been read to its newest frame."""
        now = time.monotonic()
        for generation in list(self._by_id.values()):
            if (source not in generation.sources) if source else generation.followed:
                continue
            self._act(generation, generation.on_replayed(now, idle=idle(self._rings, generation, now)))
        self._recover_lost(list(self._by_id.values()))

    # --- what a decision means -------------------------------------------------------------------

    def _sweep(self, now: float) -> None:
        """Asks each generation. One reading of the journal serves all that have stalled, so it is done
        once per stall time-out at most."""
        stalled = []
        for generation in list(self._by_id.values()):
            decision = generation.on_time(now)
            if decision is StreamDecision.REPLAY:
                stalled.append(generation)
            else:
                self._act(generation, decision)
        if stalled and now - self._stall_replay_at >= self._settings.stall_timeout:
            self._stall_replay_at = now
            self.tokens.request_replay()
            self.sources.request_replay({name for generation in stalled for name in generation.sources})

    def _act(self, generation: Generation, decision: StreamDecision) -> None:
        if decision is StreamDecision.REPLAY:
            if not generation.followed:
                self.tokens.request_replay()
            self.sources.request_replay(generation.sources)
        elif decision is StreamDecision.REREAD:
            self._readings.spawn(self._read_again(generation))
        elif decision is StreamDecision.RECOVER:
            if not generation.followed:
                self._recover(generation)
        elif decision is StreamDecision.EXPIRE:
            self._expire(generation)
        elif decision is StreamDecision.ENDED:
            self._remove(generation)

    async def _read_again(self, generation: Generation) -> None:
        readings = [self.sources.get(name) for name in generation.sources]
        if generation.own_begin is not None:
            readings.append(self.tokens)
        for reading in readings:
            if reading is not None:
                await reading.catch_up(generation.begin, lambda: generation.ended)

    def _recover(self, generation: Generation) -> None:
        deadline = time.time() + self._settings.token_timeout
        lost, attempt = generation.group, generation.stream.attempt
        if lost and not generation.stream.ended:  # it may live: a false alarm, or only its frames are lost
            self.cancellations.end(lost, generation, attempt)
        request = generation.next_attempt(time.monotonic(), deadline)
        if request is None:
            self._remove(generation)
            if generation.error is not None:
                log.warning(
                    "recovery_failed",
                    generation_id=generation.id,
                    request_id=generation.request.request_id,
                    group=lost,
                    reason=str(generation.error),
                )
                self.conclude(generation, generation.error)
            return
        self._metrics.recoveries.inc()
        if request.suspected:
            self._metrics.suspected.labels(request.suspected).inc()
        if generation.trace is not None:
            generation.trace.recovering(lost, request)
        log.info(
            "recovering",
            generation_id=generation.id,
            request_id=request.request_id,
            group=lost,
            attempt=request.attempt,
            tokens=len(request.generated),
            suspected=request.suspected,
        )
        self._background.spawn(self._hand_in_again(generation, request))

    async def _hand_in_again(self, generation: Generation, request: GenerationRequest) -> None:
        """Tries for as long as the broker is away and the generation waits for this attempt."""
        while not generation.ended and generation.request is request:
            try:
                await self._hand_in(generation)
            except BrokerUnavailable:
                await asyncio.sleep(SWEEP_INTERVAL)
            except PayloadTooLarge as error:
                generation.fail(error)
                self.conclude(generation, error)
                self._remove(generation)
                return
            else:
                return

    def _expire(self, generation: Generation) -> None:
        seconds, model = self._settings.token_timeout, generation.request.model
        error: RyzansteinError
        if generation.overdue(time.monotonic()):
            whole = self._settings.request_timeout
            error = DeadlineExceeded(f"The generation took longer than {whole:g} s; ask for fewer tokens (max_tokens).")
        elif generation.tokens or self._rings.has_ready_group(model):
            error = DeadlineExceeded(f"No token came within {seconds:g} s; try again later.", retry_after=5)
        else:
            error = NoGroupAvailable(
                f"No executor group for the model '{model}' was ready within {seconds:g} s; try again later.",
                retry_after=self._rings.expected_seconds(model) or 5,
            )
        generation.fail(error)
        self._remove(generation)
        if not generation.followed:
            self.cancellations.cancel(generation, by_owner=True)
            self.conclude(generation, error)
