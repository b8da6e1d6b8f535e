"""The lines of one batch that are under way: begun as there is room, tried again, their results stored.

    begin ──room?──▶ generation ──▶ result ──▶ stored ──▶ counted
                        │ 429, 503, group lost ...: again after a pause, until the batch ends
                        ▼
                     refused, or a fault of ours three times: a result too

    places of the model's groups ──▶ at most the setting ──▶ shared out among the batches that run here

More would only wait in the queue: the scheduler gives batch work to groups with idle places alone. A group whose places
are not known counts as `UNKNOWN`.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog

from services.gateway.batches.dependencies import BatchParts, LineEndpoint
from services.gateway.batches.lines import BatchLine
from services.gateway.batches.results import CompletionBitmap, failed, request_id_of, succeeded
from services.gateway.intake.record import Context
from services.gateway.tracing.requests import line_span
from shared import tracing
from shared.errors import InternalError, RyzansteinError
from shared.messages.batches import BatchJob, LineResult
from shared.tasks import cancel_all

log = structlog.get_logger(__name__)

LOOK = 0.25  # seconds between two looks at whether groups have come, or have more places
FAULTS = 3  # tries of a line that a fault of ours may cost


class LineGate:
    """Which lines of a gateway's batches may begin: any number beside each other, or one that is alone, before which
    all others end and behind which they go on. Pure."""

    def __init__(self) -> None:
        self.running = 0
        # The batch that has the gateway for a line of its own, or is the next that will.
        self._alone: object | None = None

    def admits(self, batch: object, *, alone: bool) -> bool:
        """Whether a line of `batch` may begin now. Where it is to be `alone`, no other begins from now on."""
        if not alone:
            return self._alone is None
        if self._alone is None:
            self._alone = batch
        return self._alone is batch and not self.running

    def leave(self, batch: object) -> None:
        """Others may begin again, if it was for `batch` that they could not."""
        if self._alone is batch:
            self._alone = None


class LineRunner:
    """One batch's."""

    def __init__(self, parts: BatchParts, batches: Callable[[], int], gate: LineGate) -> None:
        """`batches` says how many batches run in this gateway; `gate` is that of all of them."""
        self._parts = parts
        self._batches = batches
        self._gate = gate
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._ended = False
        self._unwanted = False

    def end(self) -> None:
        """Begins no more lines, and waits for none."""
        self._ended = True
        self._changed.set()

    async def begin(
        self,
        job: BatchJob,
        request: BatchLine,
        endpoint: LineEndpoint,
        tally: CompletionBitmap,
        announce: Callable[[], Awaitable[bool]],
        *,
        alone: bool = False,
    ) -> bool:
        """Begins `request` as soon as there is room and a group for it, and `announce` says so; False when no more are
        to be begun. `alone`: while no other line runs in this gateway, and returns when it has its result."""
        await self._wait_for_room(job.model, alone)
        if self._ended:
            return False
        self._gate.running += 1
        begins = False
        try:
            begins = await announce()
        finally:
            if not begins:
                self._gate.running -= 1
        if not begins:
            return False
        task = asyncio.create_task(self._run(job, request, endpoint, tally))
        self._tasks.add(task)
        task.add_done_callback(self._done)
        self._parts.metrics.in_flight.inc()
        if alone:
            await self.drained()
            self._gate.leave(self)
            await self._change()  # lines of other batches begin meanwhile
        return True

    @contextlib.asynccontextmanager
    async def place(self, *, alone: bool) -> AsyncIterator[None]:
        """For the checking of lines, as for one that runs; entered at once where no more are to be begun."""
        while not self._ended and not self._gate.admits(self, alone=alone):
            await self._change()
        self._gate.running += 1
        try:
            yield
        finally:
            self._gate.running -= 1
            self._gate.leave(self)

    async def refuse(self, job: BatchJob, request: BatchLine, error: RyzansteinError, tally: CompletionBitmap) -> None:
        """Stores that `request` has failed without being run."""
        result = failed(job.id, request.line, request.custom_id, error)
        await self._store(job, result)
        self._count(result, tally)

    async def _wait_for_room(self, model: str, alone: bool) -> None:
        while not self._ended and not self._has_room(model, alone):
            if self._parts.catalog.has_ready_group(model):
                await self._change()
            else:
                self._gate.leave(self)
                await self._wait_for_group(model)

    async def _wait_for_group(self, model: str) -> None:
        """The model is asked for meanwhile: the batch's lines are in no queue that shows it."""
        with self._parts.cold_starts.wanted(model):
            while not self._ended and not self._parts.catalog.has_ready_group(model):
                await self._change()

    def _has_room(self, model: str, alone: bool) -> bool:
        """While no group is up nothing is begun: what waits is the batch, not its lines in a queue."""
        catalog = self._parts.catalog
        most = room(catalog.places(model), self._parts.own.batch_parallelism, self._batches())
        fits = len(self._tasks) < most and catalog.has_ready_group(model)
        return fits and self._gate.admits(self, alone=alone)

    async def _change(self) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), LOOK)

    async def drained(self) -> None:
        """Waits until every line that was begun has its result, or no more are waited for."""
        while self._tasks and not self._ended:
            self._changed.clear()
            await self._changed.wait()

    async def stop(self, *, unwanted: bool) -> None:
        """Ends what is under way; `unwanted`: nobody will go on with it."""
        self._unwanted = unwanted
        await cancel_all(self._tasks)
        self._gate.leave(self)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._gate.running -= 1
        self._parts.metrics.in_flight.dec()
        self._changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("line_failed", error=repr(error))

    # --- one line --------------------------------------------------------------------------------

    async def _run(self, job: BatchJob, request: BatchLine, endpoint: LineEndpoint, tally: CompletionBitmap) -> None:
        identity = request_id_of(job.id, request.line)
        structlog.contextvars.bind_contextvars(request_id=identity, batch=job.id, line=request.line)
        with line_span(job, request.line, identity) as span, tracing.active(span):
            result = await self._result(job, request, endpoint)
            await self._store(job, result)
        self._count(result, tally)

    def _count(self, result: LineResult, tally: CompletionBitmap) -> None:
        if tally.add(result):
            self._parts.metrics.lines.labels("completed" if result.succeeded else "failed").inc()

    async def _result(self, job: BatchJob, request: BatchLine, endpoint: LineEndpoint) -> LineResult:
        context = Context(
            request_id_of(job.id, request.line),
            background=max(1.0, job.expires_at - time.time()),
            key=f"batch {job.id} {request.line}",  # no client can send a key with a space
            tenant=job.tenant,
            principal=self._parts.authenticator.vouched(job.key, job.tenant),
            lane="batch",
        )
        tries = faults = 0
        while True:
            try:
                body = await endpoint.run(request.body, context, lambda: self._unwanted)
                return succeeded(job.id, request.line, request.custom_id, body)
            except RyzansteinError as error:
                if not error.retryable:
                    return failed(job.id, request.line, request.custom_id, error)
                log.info("line_retried", error=str(error))
            except Exception:
                log.exception("line_unexpected_error")
                faults += 1
                if faults >= FAULTS:
                    fault = InternalError("The line failed by a fault of the server.")
                    return failed(job.id, request.line, request.custom_id, fault)
            self._parts.metrics.retries.inc()
            await asyncio.sleep(backoff(tries))
            tries += 1

    async def _store(self, job: BatchJob, result: LineResult) -> None:
        """Tries for as long as the broker is away: the answer has been paid for."""
        for tries in itertools.count():
            try:
                await self._parts.results.append(job.id, result)
                return
            except RyzansteinError as error:
                log.info("result_write_failed", error=str(error))
            await asyncio.sleep(min(2.0, backoff(tries)))


UNKNOWN = 16
LEAST = 2


def room(places: int, parallelism: int, batches: int) -> int:
    """`places`: of the model's groups; `batches`: that run in this gateway, at least 1."""
    wanted = min(places or UNKNOWN, parallelism)
    return max(min(LEAST, parallelism), -(-wanted // max(1, batches)))


def backoff(tries: int) -> float:
    """Seconds to wait before the next try, after `tries` that failed: 0.25, 0.5, 1 ... 60."""
    return float(min(60.0, 0.25 * 2 ** min(tries, 10)))
