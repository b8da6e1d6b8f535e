"""All answers that this gateway owns or follows: submitted, found by their id, read, given up."""

import asyncio
import functools
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec
import structlog

from services.gateway.core.errors import RateLimited, RouteError
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.settings import GatewaySettings
from services.gateway.lifecycle.generation import Deliver
from services.gateway.lifecycle.generations import SWEEP_INTERVAL, Generations
from services.gateway.lifecycle.idempotency import IdempotencyKeys
from services.gateway.lifecycle.ownership import Owners
from services.gateway.lifecycle.records import LargeRecords, Misses, RecordReader, RecordWriter
from services.gateway.lifecycle.request_state import RequestState, followed_answer, writer_of
from services.gateway.lifecycle.token_stream import limits_of
from shared import limits
from shared.errors import BrokerUnavailable, QueueFull, RyzansteinError, Unavailable
from shared.messages.records import GenerationRecord, Ownership
from shared.nats.bus import Bus
from shared.tasks import TaskSet

log = structlog.get_logger(__name__)

ASKED_AT_ONCE = 64  # questions to the broker who owns an answer that is to be given up
STOP_TIMEOUT = 1.0  # seconds that background work gets to end; watching a generation has no end of its own


def unknown_generation(public_id: str) -> RouteError:
    return RouteError(
        f"No generation '{public_id[:64]}' is known: the id is wrong, or older than the journal keeps; "
        "send the request again.",
        reason="generation_not_found",
    )


class Archive(Protocol):
    """Where answers go that outlive the journal."""

    async def keep(self, answer: RequestState) -> None:
        """Writes an answer that has ended, if it is to be kept."""
        ...

    async def has(self, record: GenerationRecord) -> bool:
        """Whether it is there, or was deleted. Raises `BrokerUnavailable`."""
        ...


class SilentReader(Protocol):
    """Reads answers that nobody listens to."""

    async def watch(self, answer: RequestState, owner: "RequestTracker") -> None:
        """Up to its stop string."""
        ...


class RequestTracker:
    """One entry per generation that is read here, or that this gateway decides about."""

    def __init__(
        self,
        bus: Bus,
        consumer: str,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        generations: Generations,
        keys: IdempotencyKeys,
        keeper: Archive,
        reader: SilentReader,
    ) -> None:
        """`consumer`: the gateway's instance, whose token subject the rings publish to."""
        self._keys = keys
        self._keeper = keeper
        self._reader = reader
        self.consumer = consumer
        self.writer = writer_of(consumer)
        self._settings = settings
        self._metrics = metrics
        self._generations = generations
        self._by_identity: dict[str, RequestState] = {}
        self._some = asyncio.Event()  # whether there may be any
        self._finding: dict[str, asyncio.Task[RequestState]] = {}
        self.large_records = LargeRecords(bus, settings)
        self._writer = RecordWriter(bus, self.writer, generations.journal, self.large_records)
        metrics.journal_lag.set_function(lambda: self._writer.lag.seconds(time.monotonic()))
        self.records = RecordReader(bus, self.large_records)
        self._misses = Misses(limits.UNKNOWN_IDS.value)
        self.owners = Owners(bus, consumer, generations.claims, metrics, self)
        self._tasks = TaskSet("background_work_failed")
        self._submitting = TaskSet("")
        self._giving_up: set[str] = set()  # answers whose owner is being asked for, before they are cancelled
        self._giving_up_gate = asyncio.Semaphore(ASKED_AT_ONCE)
        self._stopping = False

    def all(self) -> list[RequestState]:
        return list(self._by_identity.values())

    def get(self, identity: str) -> RequestState | None:
        return self._by_identity.get(identity)

    async def run(self) -> None:
        """Gives up what nobody listens to. Runs until it is cancelled."""
        while True:
            if not self._by_identity:
                self._some.clear()
                await self._some.wait()
            await asyncio.sleep(SWEEP_INTERVAL)
            self._sweep(time.monotonic())

    async def stop(self) -> None:
        """Leaves what others can go on with, cancels the rest, and waits until the records are stored."""
        self._stopping = True
        for answer in self.all():
            if answer.owned and not answer.ended and not answer.resumable:
                self.cancel(answer, by_owner=True)
        for answer in self.all():
            self._keep(answer)
        if tasks := [*self._tasks, *self._submitting]:
            _, endless = await asyncio.wait(tasks, timeout=STOP_TIMEOUT)
            for task in endless:
                task.cancel()
            await asyncio.gather(*endless, return_exceptions=True)
        await self._writer.stop()

    def end_readers(self, error: RyzansteinError) -> None:
        """Whoever reads here is told `error`; the generations go on, for others to take over."""
        for answer in self.all():
            for generation in answer.generations:
                generation.dismiss(error)

    # --- of this gateway's clients ---------------------------------------------------------------

    async def submit(self, answer: RequestState, *, record_first: bool = False) -> "asyncio.Future[None]":
        """Hands it in; what is returned is done when its record is durable. `record_first`: it is handed in only
        then, so that whatever is in the queue is known to everybody; whoever is cancelled meanwhile leaves none
        that has a record and was never handed in; and what the broker may have taken is not given up.

        Raises `RateLimited`, `QueueFull`, `PayloadTooLarge`, `BrokerUnavailable`.
        """
        if not record_first:
            return await self._submit(answer, record_first=False)
        return await asyncio.shield(self._submitting.spawn(self._submit(answer, record_first=True)))

    async def _submit(self, answer: RequestState, *, record_first: bool) -> "asyncio.Future[None]":
        try:
            if answer.admission is not None:
                await answer.admission.begin(answer.may_cost)
            # Before its record: who takes over what a lost gateway has recorded computes it, refused or not.
            self._generations.places.check(answer.generations[0].request.tenant, len(answer.generations))
            if not self._by_identity:
                self._some.set()
            self._by_identity[answer.identity] = answer
            behind = self._generations.journal.number
            # In place: what shows the answer holds it too, and a second one for each would take as much again.
            msgspec.structs.force_setattr(answer.record, "log_behind", behind)
            if record_first:
                stored = await self._recorded(answer.record)
                if answer.ended:
                    raise Unavailable("The generation was cancelled before it was submitted.", retry_after=1)
            else:
                stored = self._writer.write(answer.record)
            await self._generations.submit(answer.generations, insist=record_first)
        except RyzansteinError:
            self._by_identity.pop(answer.identity, None)
            if answer.admission is not None:
                answer.admission.end(0)
            if answer.record.idempotency:
                self.spawn(self._keys.free(answer.record))
            raise
        return stored

    async def _recorded(self, record: GenerationRecord) -> "asyncio.Future[None]":
        """Writes it until the broker says that it is durable: it may be so before, and others may have read it.
        Raises `PayloadTooLarge`."""
        while True:
            stored = self._writer.write(record)
            try:
                await asyncio.shield(stored)  # it is that of other records too
            except BrokerUnavailable:
                await asyncio.sleep(SWEEP_INTERVAL)
            else:
                return stored

    def join(self, answer: RequestState, deliver: Deliver) -> None:
        """`deliver` gets the whole log of every choice. Raises `QueueFull`, and `Unavailable` for one that was
        forgotten since it was found: nothing would come of it any more."""
        if not answer.owned and not answer.ended and self._by_identity.get(answer.identity) is not answer:
            raise Unavailable("The generation is no longer in memory; request it again.", retry_after=1)
        if answer.readers >= self._settings.max_readers:
            raise QueueFull(
                f"The generation has {answer.readers} readers here already; try again in a moment.", retry_after=1
            )
        answer.readers += 1
        answer.left = False
        for generation in answer.generations:
            generation.attach(deliver)

    def leave(self, answer: RequestState, deliver: Deliver) -> None:
        """Undoes `join`. The last one to leave lets the generation's time without listeners begin."""
        for generation in answer.generations:
            generation.detach(deliver)
        answer.readers -= 1
        if answer.readers or self._by_identity.get(answer.identity) is not answer:
            return
        now = answer.quiet_since = time.monotonic()
        answer.left = not self._stopping
        if answer.ended:
            self._drop(answer)
        elif answer.owned and not self._stopping:
            if self._is_forsaken(answer, now):
                self._give_up(answer)
            else:
                self._watch(answer)

    def end_choice(self, answer: RequestState, index: int) -> None:
        """Nobody wants more of that choice, for a stop string has ended its text."""
        self._generations.cancel([answer.generations[index]])

    def cancel(self, answer: RequestState, *, by_owner: bool = False) -> None:
        """Ends it, wherever it is, as its client wishes, or as this gateway has decided `by_owner`. Of another
        gateway's, the log itself will say that it has ended."""
        going = [generation for generation in answer.generations if not generation.ended]
        if not answer.owned:
            for generation in going:
                self._generations.cancellations.cancel(generation, by_owner=False)
            return
        error = Unavailable("The generation was cancelled; send the request again.", retry_after=1)
        self._generations.cancel(going, error, by_owner=by_owner, conclude=answer.resumable)
        if not answer.readers:
            self._drop(answer)

    # --- of any gateway's ------------------------------------------------------------------------

    async def find(self, public_id: str, identity: str, tenant: str) -> RequestState:
        """The answer with that identity, its log read as far as it has come; to be joined at once. One that is at hand
        may be another tenant's: whoever asks looks at that.

        Raises `RouteError` when `tenant` has no such record, `RateLimited` when that has been so too often,
        `QueueFull`, `BrokerUnavailable`.
        """
        if (task := self._finding.get(identity)) is not None:
            answer = await asyncio.shield(task)
        elif (known := self._by_identity.get(identity)) is not None:
            answer = known
        else:
            answer = await self._find(public_id, identity, tenant)
        answer.quiet_since = max(answer.quiet_since, time.monotonic())
        return answer

    async def inherit(self, record: GenerationRecord, *, keep: float) -> RequestState:
        """As `find`, for a record of a lost gateway, which had admitted it: no place is refused. Kept for `keep`
        seconds at least, though nobody reads it."""

        async def follow() -> RequestState:
            return await self._follow(record, await self.owners.of(record.identity), keep, admitted=True)

        return await self._once(record.identity, follow)

    async def _once(self, identity: str, make: Callable[[], Coroutine[Any, Any, RequestState]]) -> RequestState:
        """The answer that is at hand, or what `make` makes; all who ask meanwhile get the same."""
        task = self._finding.get(identity)
        if task is None:
            if (answer := self._by_identity.get(identity)) is not None:
                return answer
            task = self._finding[identity] = asyncio.create_task(make())
            task.add_done_callback(functools.partial(self._found, identity))
        return await asyncio.shield(task)

    def _found(self, identity: str, task: "asyncio.Task[RequestState]") -> None:
        self._finding.pop(identity, None)
        if not task.cancelled():
            task.exception()  # whoever asked has it, unless the client has gone

    async def _find(self, public_id: str, identity: str, tenant: str) -> RequestState:
        if wait := self._misses.wait(tenant, time.monotonic()):
            raise RateLimited(
                f"Too many lookups of unknown ids ({limits.UNKNOWN_IDS.cited()}); try again in {math.ceil(wait)} s.",
                kind="requests",
                wait=wait,
            )
        found = await self.records.find(identity)
        if found is None or found.tenant != tenant:
            self._misses.missed(tenant, time.monotonic())
            raise unknown_generation(public_id)
        record = found

        async def follow() -> RequestState:
            answer = await self._follow(record, await self.owners.of(identity))
            if not answer.ended:
                self.owners.ask_soon(answer)
            return answer

        return await self._once(identity, follow)

    async def _follow(
        self, record: GenerationRecord, ownership: Ownership | None, keep: float = 0.0, *, admitted: bool = False
    ) -> RequestState:
        """Reads the log of a generation that is not at hand, and goes on reading it."""
        now, bounds = time.monotonic(), limits_of(self._settings)
        answer = followed_answer(record, bounds, ownership, now=now, now_unix=time.time(), keep=keep)
        self._generations.add(answer.generations, admitted=admitted)
        self._some.set()
        self._by_identity[answer.identity] = answer
        try:
            await self.read_sources(answer, answer.consumers)
        except BaseException:
            self._drop(answer)
            raise
        answer.quiet_since = time.monotonic() + keep  # reading a long log takes longer than it may be quiet
        self._metrics.followed.inc()
        return answer

    async def read_sources(self, answer: RequestState, consumers: Sequence[str]) -> None:
        """Reads the log of `answer` on the token subjects of `consumers`, from its beginning to its newest
        entry, and whatever comes there from now on. Raises `BrokerUnavailable`."""
        logs = []
        for name in consumers:
            if name == self.consumer:
                logs.append(self._generations.tokens)
                continue
            logs.append(await self._generations.sources.acquire(name))
            known = answer.generations[0].sources
            if name in known or self._by_identity.get(answer.identity) is not answer:
                self._generations.sources.release(name)
                continue
            for generation in answer.generations:
                generation.sources = (*known, name)
        for source in logs:
            await source.catch_up(answer.generations[0].begin, lambda: answer.ended)

    # --- inside ----------------------------------------------------------------------------------

    def _drop(self, answer: RequestState) -> None:
        """Forgets it; whoever asks for it later is answered from the journal."""
        if self._by_identity.pop(answer.identity, None) is None:
            return
        if answer.admission is not None:
            answer.admission.end(answer.cost)
        self._generations.forget(answer.generations)
        if answer.watched and not answer.ended:  # another gateway's by now
            for generation in answer.generations:
                generation.dismiss(Unavailable("Another gateway owns the generation."))
        for name in answer.generations[0].sources:
            self._generations.sources.release(name)
        for generation in answer.generations:
            generation.sources = ()
        if answer.owned and answer.record.idempotency and answer.failed:
            self.spawn(self._keys.free(answer.record))
        self._keep(answer)

    def _keep(self, answer: RequestState) -> None:
        """What outlives the journal is written by its owner."""
        if answer.owned and answer.ended and answer.record.outlives:
            self.spawn(self._keeper.keep(answer))

    def _sweep(self, now: float) -> None:
        for answer in self.all():
            if answer.readers or answer.identity in self._finding:
                continue
            if answer.forgettable(now):
                self._drop(answer)
            elif self._is_forsaken(answer, now):
                self._give_up(answer)

    def _is_forsaken(self, answer: RequestState, now: float) -> bool:
        if not answer.owned or answer.ended:
            return False
        crowded = any(map(self._generations.is_crowded, answer.generations))
        return answer.forsaken(now, self._settings.resume_grace, crowded=crowded)

    def _give_up(self, answer: RequestState) -> None:
        """Nobody listens any more. Where a client can come back, it may have done so at another gateway, which has
        claimed the generation while this one was cut off or stopped: whoever owns it is asked for first."""
        if not answer.resumable:
            self.cancel(answer, by_owner=True)
        elif answer.identity not in self._giving_up:
            self._giving_up.add(answer.identity)
            self.spawn(self._give_up_own(answer))

    async def _give_up_own(self, answer: RequestState) -> None:
        try:
            async with self._giving_up_gate:
                if not await self.owners.still(answer):
                    return
        except BrokerUnavailable as error:  # asked again with the next sweep
            log.info("ownership_check_failed", generation_id=answer.identity, error=str(error))
            return
        finally:
            self._giving_up.discard(answer.identity)
        at_hand = self._by_identity.get(answer.identity) is answer
        if at_hand and not self._stopping and self._is_forsaken(answer, time.monotonic()):
            self.cancel(answer, by_owner=True)

    def _watch(self, answer: RequestState) -> None:
        """A ring knows nothing of stop strings: somebody has to read for them."""
        if answer.record.stop and not answer.watched:
            answer.watched = True
            self.spawn(self._reader.watch(answer, self))

    def on_owned(self, answer: RequestState, claim: int) -> None:
        """This gateway looks after `answer` from now on, under `claim`."""
        self._generations.take_over(answer.generations, claim)
        if not answer.readers:
            self._watch(answer)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs `work` in the background."""
        self._tasks.spawn(work)
