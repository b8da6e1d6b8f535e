"""Runs one batch from whatever state it is in, so that a gateway which takes it over does the very same.

    validating   the whole file is read and checked           nothing is kept but how far: done again after a kill
    in_progress  line ──▶ generation ──▶ result in the stream
    finalizing   stream ──▶ output file, error file           ids follow from the batch; the first writing stays
    completed    stream purged ──▶ clean

**Each line once.** A line is a generation under the idempotency key (batch, line number). What there is of it
when its gateway is killed, and what the next gateway makes of that:

    1  nothing                        not in the stream: runs it
    2  key taken, no record           the key stands for nothing after 2 s: runs it under the same key
    3  record in the journal          attaches to the generation, finds no owner, becomes it, hands it in
    4  request in the queue           the same, and sees it in the queue: waits for it (`Generations.take_over`)
    5  tokens in the journal          the same: the ring has noticed nothing, the rest comes in
    6  finished, not in the stream    attaches, has the whole answer from the journal
    7  in the stream                  done: left out, for good

From 2 to 3 the order holds because a line's record is durable before the request is handed in
(`Run.begin(record_first=True)`). Between 6 and 7 the journal keeps the answer for RYZANSTEIN_JOURNAL_MAX_AGE, and
the key is known for RYZANSTEIN_IDEMPOTENCY_TTL: a batch must not lie without a gateway for longer than the shorter
of the two, or lines of 3 to 6 run again.

**A line that kills gateways.** How far lines may have begun is written into the job before they begin. Whoever takes it
over from a lost gateway counts that against the lines which have no result: those that were under way when two gateways
were lost run alone, and fail with `fatal_request` where one more is lost then. A line that does so while it is checked
ends its batch in the same way.

**Two gateways at once** (one slept through the loss of its lease): both take keys by compare-and-set, so of each
line one generates and the other reads; both may store its result, and readers of the stream take the first.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from functools import partial

import msgspec
import structlog

from services.gateway.batches import states
from services.gateway.batches.dependencies import BatchParts
from services.gateway.batches.line_runner import LineGate, LineRunner, backoff
from services.gateway.batches.lines import ENVELOPE, BatchLine, Checker, Wrong, parse
from services.gateway.batches.results import EXPIRED, CompletionBitmap, Kind, not_run, write_file
from services.gateway.core.errors import QuotaExceeded
from services.gateway.files.lines import FileLine, input_lines
from services.gateway.jobs.leases import JobLease, LeaseLost
from services.gateway.jobs.runners import RunnerSpec
from shared.errors import BrokerUnavailable, FatalRequest, InternalError, RyzansteinError, StorageFull
from shared.limits import TENANT_FILE_BYTES
from shared.messages.batches import OVER, BatchError, BatchJob, Ending
from shared.nats.objects import MissingObject

log = structlog.get_logger(__name__)

# Seconds for which writing a batch's files is tried while there is no room for them: somebody may delete some.
FINISH_WITHIN = 3600.0


AHEAD = 16  # lines that are written into the job beside the one that begins
EVERY_LINE = 2**31 - 1  # in the job while its input is checked for the first times: any line may be under way


def _fatal(losses: int) -> FatalRequest:
    return FatalRequest(
        f"{losses} gateways were lost while this line was running, the last one while it ran alone; do not send it "
        "again as it is."
    )


def _fatal_check(job: BatchJob) -> BatchError:
    last = min(job.lost)
    said = (
        f"{len(job.lost)} gateways were lost while the input was checked, the last one while it checked nothing else, "
        f"at one of the lines {max(1, last - AHEAD)} to {last}; do not send them again as they are."
    )
    return BatchError("fatal_request", said, max(1, last - AHEAD))


class BatchRunner:
    """One batch under one lease. `run` ends when nothing is left to do, or the lease is lost."""

    def __init__(self, lease: JobLease[BatchJob], parts: BatchParts, lines: LineRunner) -> None:
        """`lines` is this runner's alone."""
        self._lease = lease
        self._parts = parts
        self._lines = lines
        self._endpoint = parts.endpoints[lease.job.endpoint]
        self._tally = CompletionBitmap()
        self._reason: Ending = ""  # why no more lines are begun
        self._began = False  # whether lines have run under this lease

    @property
    def _job(self) -> BatchJob:
        return self._lease.job

    async def run(self) -> None:
        """Until the batch is over. What the broker or a fault prevents is tried again. Raises `LeaseLost`."""
        try:
            async with self._lease.renewed(self._with_counts, self._renewed):
                await self._steps()
        finally:
            await self._lines.stop(unwanted=False)

    async def _steps(self) -> None:
        tries = 0
        while states.needs_work(self._job):
            began = self._job.status
            try:
                await self._step()
            except (RyzansteinError, msgspec.DecodeError) as error:
                log.warning("batch_step_failed", batch=self._job.id, error=str(error))
                await asyncio.sleep(backoff(tries))
            tries = 0 if self._job.status != began else tries + 1

    async def release(self) -> None:
        """Another gateway may go on at once."""
        with contextlib.suppress(LeaseLost, RyzansteinError):
            await self._lease.write(states.handed_back)

    def news(self, job: BatchJob) -> None:
        """Somebody has written the batch."""
        if job.status == "cancelling":
            self._end_lines("cancelled")

    async def _step(self) -> None:
        status = self._job.status
        try:
            if status == "validating":
                await self._validate()
            elif status == "in_progress":
                await self._run_lines()
            elif status in OVER:
                await self._clean()
            else:
                await self._finish()
        except (StorageFull, QuotaExceeded) as error:
            await self._no_room(error)
        except MissingObject:
            await self._lease.write(lambda job: states.input_gone(job, time.time()))

    def _renewed(self, job: BatchJob) -> None:
        """With each renewal of the lease: looks at the clock."""
        self.news(job)
        if job.status in ("validating", "in_progress") and time.time() >= job.expires_at:
            self._end_lines("expired")

    def _with_counts(self, job: BatchJob) -> BatchJob:
        if job.status not in ("in_progress", "cancelling") or self._tally.done < job.counts.completed:
            return job
        return msgspec.structs.replace(job, counts=self._tally.counts(job.counts.total), usage=self._tally.usage)

    def _end_lines(self, reason: Ending) -> None:
        self._reason = self._reason or reason
        self._lines.end()

    # --- validating ------------------------------------------------------------------------------

    async def _validate(self) -> None:
        check = partial(self._endpoint.check, tenant=self._job.tenant)
        checker = Checker(self._job.endpoint, check, self._parts.own.batch_requests)
        await self._count_loss()
        lost = len(self._job.lost)
        if lost > states.ALONE:
            checker.errors.append(_fatal_check(self._job))
        else:
            alone = lost == states.ALONE
            async with self._lines.place(alone=alone):
                await self._check(checker, alone)
            checker.end()
        now = time.time()
        if self._reason == "expired":
            await self._lease.write(lambda job: states.finalizing(job, now, "expired"))
        elif self._reason == "cancelled":
            await self._lease.write(lambda job: states.cancelling(job, now))
        elif checker.errors:
            await self._lease.write(lambda job: states.failed(job, now, checker.errors))
        else:
            count, model = checker.requests, checker.model
            await self._lease.write(lambda job: states.begun(job, now, count, model))
        log.info("batch_checked", batch=self._job.id, requests=checker.requests, errors=len(checker.errors))

    async def _check(self, checker: Checker, alone: bool) -> None:
        """`alone`: says how far it has come, should it be lost as well."""
        announced = 0
        async with contextlib.aclosing(self._input()) as lines:
            async for line in lines:
                if checker.full or self._reason:
                    return
                if line.number > announced:
                    announced = line.number + AHEAD if alone else EVERY_LINE
                    if not await self._announce(announced):
                        return
                checker.check(line)

    async def _count_loss(self) -> None:
        """Of the gateway before, if it was lost."""
        if not self._began and self._job.begun:
            log.warning("batch_gateway_lost", batch=self._job.id, begun=self._job.begun)
            await self._lease.write(states.taken_over)
        self._began = True

    def _input(self) -> AsyncGenerator[FileLine, None]:
        most = self._parts.settings.body_limit + ENVELOPE
        return input_lines(self._parts.files, self._job.input_object, most)

    # --- in progress -----------------------------------------------------------------------------

    async def _run_lines(self) -> None:
        await self._count()
        await self._count_loss()
        try:
            async with contextlib.aclosing(self._unfinished()) as requests:
                async for request in requests:
                    if self._tally.size >= self._parts.settings.tenant_file_bytes:
                        self._end_lines("failed")
                    if not await self._begin(request):
                        break
            await self._lines.drained()
        finally:
            await self._lines.stop(unwanted=bool(self._reason))
        if not self._reason and self._tally.done < self._job.counts.total:
            raise InternalError("Not every line of the batch has a result; they are looked for again.")
        if self._reason == "failed":
            await self._lease.write(lambda job: states.too_large(job, time.time(), self._too_large()))
        elif self._reason != "cancelled":
            ending: Ending = "expired" if self._reason else "completed"
            await self._lease.write(lambda job: states.finalizing(job, time.time(), ending))
        elif self._job.status == "in_progress":  # heard of by a watcher, and not read here yet
            await self._lease.write(lambda job: states.cancelling(job, time.time()))

    async def _begin(self, request: BatchLine) -> bool:
        """False when no more lines are to be begun."""
        losses = states.losses(self._job, request.line)
        if losses > states.ALONE:
            log.warning("line_fatal", batch=self._job.id, line=request.line, gateways=losses)
            await self._lines.refuse(self._job, request, _fatal(losses), self._tally)
            return True
        alone = losses == states.ALONE
        return await self._lines.begin(
            self._job,
            request,
            self._endpoint,
            self._tally,
            partial(self._announce_line, request.line, alone),
            alone=alone,
        )

    async def _announce_line(self, line: int, alone: bool) -> bool:
        """With those that will be under way soon, so that few begin with a writing of the job."""
        if not alone and line <= self._job.begun:
            return True
        return await self._announce(line if alone else line + AHEAD)

    async def _announce(self, begun: int) -> bool:
        """Writes that the lines up to `begun` are under way. Tries for as long as the broker is away; False when no
        more lines are to be begun."""
        tries = 0
        while not self._reason:
            try:
                await self._lease.write(lambda job: states.announced(job, begun))
                return True
            except BrokerUnavailable as error:
                log.info("line_announcement_failed", batch=self._job.id, line=begun, error=str(error))
            await asyncio.sleep(min(2.0, backoff(tries)))
            tries += 1
        return False

    def _too_large(self) -> BatchError:
        limit = TENANT_FILE_BYTES.cited(self._parts.settings.tenant_file_bytes)
        said = f"The results have {self._tally.size:,} bytes ({limit}); send the lines that are left as another batch."
        return BatchError("quota_exceeded", said)

    async def _count(self) -> None:
        """Reads anew what is done."""
        tally = CompletionBitmap()
        async with contextlib.aclosing(self._parts.results.read(self._job.id)) as results:
            async for result in results:
                tally.add(result)
        self._tally = tally

    async def _unfinished(self) -> AsyncGenerator[BatchLine, None]:
        """The requests that have no result, in the order of the file."""
        async with contextlib.aclosing(self._input()) as lines:
            async for line in lines:
                if line.number in self._tally:
                    continue
                try:
                    yield parse(line, self._job.endpoint)
                except Wrong as wrong:  # it was checked: the object is another one now
                    raise MissingObject(self._job.input_object) from wrong

    # --- the end ---------------------------------------------------------------------------------

    async def _finish(self) -> None:
        await self._count()
        if self._job.ending == "expired":
            await self._expire_rest()
        output = errors = ""
        counts = self._tally.counts(self._job.counts.total)
        if counts.completed:
            output = await self._write("output")
        if counts.failed:
            errors = await self._write("errors")
        usage = self._tally.usage
        await self._lease.write(
            lambda job: states.ended(job, time.time(), counts=counts, usage=usage, output=output, errors=errors)
        )
        log.info(
            "batch_ended", batch=self._job.id, status=self._job.status, completed=counts.completed, failed=counts.failed
        )

    async def _no_room(self, error: RyzansteinError) -> None:
        """Raises `error`, to be tried again, unless it has been for long enough."""
        job, now = self._job, time.time()
        began = max(job.finalizing_at, job.cancelling_at)
        if job.status not in ("finalizing", "cancelling") or now < began + FINISH_WITHIN:
            raise error
        said = f"There was no room for the batch's files for {FINISH_WITHIN:g} s: {error.message}"
        await self._lease.write(lambda job: states.unwritten(job, now, BatchError(error.code, said)))
        log.warning("batch_output_failed", batch=job.id, error=error.message)

    async def _write(self, kind: Kind) -> str:
        confirm = self._lease.write
        return await write_file(
            self._parts.files, self._parts.results, self._job, kind, lambda: confirm(lambda job: job)
        )

    async def _expire_rest(self) -> None:
        """What has no result gets that one, as durably as the others."""
        async with contextlib.aclosing(self._unfinished()) as requests:
            async for request in requests:
                result = not_run(self._job.id, request.line, request.custom_id, EXPIRED)
                await self._parts.results.append(self._job.id, result)
                self._tally.add(result)

    async def _clean(self) -> None:
        await self._parts.results.clear(self._job.id)
        await self._lease.write(lambda job: msgspec.structs.replace(job, clean=True, owner=""))


def batch_work(parts: BatchParts) -> RunnerSpec[BatchJob]:
    """How this gateway runs batches."""
    gate = LineGate()
    return RunnerSpec(
        states.needs_work,
        lambda job: job.endpoint in parts.endpoints,
        parts.own.batch_jobs,
        lambda lease, running: BatchRunner(lease, parts, LineRunner(parts, running, gate)),
        parts.metrics.running,
        parts.metrics.taken_over,
    )
