"""Results of lines: what they say, which lines have one, the stream they are kept in, and the files made of them.

    line ends ─┐  one turn of    ┌─ batches.results.<batch>    one message for all lines of a batch
    line ends ─┴─ the event loop ┴─ acknowledged: they are done

While one publish is under way the next results gather. A result may be in the stream twice (a publish of which
the acknowledgement was lost; a gateway that slept through the loss of its batch): both come of the same
generation, and readers take the first. So no window of deduplication has to be long enough.

The ids and bytes of a batch's files follow from the batch, so whoever writes them writes the same ones, and of several
writings the first one stays.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Literal

import msgspec
import structlog
from nats.js.api import RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from services.gateway.batches.states import file_id
from services.gateway.core.errors import describe, status_of
from services.gateway.files.files import Files
from shared.messages.batches import BatchJob, Counts, FileRecord, LineResult, LineResults, TokenCounts
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.errors import translated
from shared.nats.objects import Objects
from shared.nats.streams import ensure_stream

_encode = msgspec.json.Encoder().encode


class _Usage(msgspec.Struct):
    """Tokens in a response's body: chat completions' and completions' names, then those of responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None
    input_tokens_details: dict[str, Any] | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


_body = msgspec.json.Decoder(_Body)


def request_id_of(batch: str, line: int) -> str:
    """The request id of a line: in its result, and in every service's log."""
    return f"{batch}-{line}"


def succeeded(batch: str, line: int, custom_id: str, body: bytes) -> LineResult:
    """`body`: the endpoint's response."""
    text = _line(batch, line, custom_id, _response(batch, line, 200, msgspec.Raw(body)), None)
    return LineResult(line, True, text, _usage(body))


def failed(batch: str, line: int, custom_id: str, error: BaseException) -> LineResult:
    """The request was refused, or the server has a fault: the answer that a client would have got."""
    body = _encode(describe(error, request_id_of(batch, line)))
    text = _line(batch, line, custom_id, _response(batch, line, status_of(error), msgspec.Raw(body)), None)
    return LineResult(line, False, text)


def not_run(batch: str, line: int, custom_id: str, error: dict[str, str]) -> LineResult:
    """It has no answer: `error` says why, by `code` and `message`."""
    return LineResult(line, False, _line(batch, line, custom_id, None, error))


EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


def _response(batch: str, line: int, status: int, body: msgspec.Raw) -> dict[str, Any]:
    return {"status_code": status, "request_id": request_id_of(batch, line), "body": body}


def _line(
    batch: str, line: int, custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None
) -> bytes:
    digest = hashlib.blake2b(request_id_of(batch, line).encode(), digest_size=12).hexdigest()
    return _encode({"id": f"batch_req_{digest}", "custom_id": custom_id, "response": response, "error": error})


def _usage(body: bytes) -> TokenCounts:
    try:
        usage = _body.decode(body).usage or _Usage()
    except msgspec.DecodeError:
        return TokenCounts()
    details = usage.prompt_tokens_details or usage.input_tokens_details or {}
    cached = details.get("cached_tokens", 0)
    return TokenCounts(
        usage.prompt_tokens or usage.input_tokens,
        cached if isinstance(cached, int) else 0,
        usage.completion_tokens or usage.output_tokens,
    )


class CompletionBitmap:
    """Fed with results, some of them twice perhaps."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._completed = 0
        self._failed = 0
        self.usage = TokenCounts()
        self.size = 0  # bytes of all results

    def __contains__(self, line: int) -> bool:
        place = line >> 3
        return place < len(self._bits) and bool(self._bits[place] & (1 << (line & 7)))

    def add(self, result: LineResult) -> bool:
        """False when the line was done before: its first result counts."""
        if result.line in self:
            return False
        place = result.line >> 3
        if place >= len(self._bits):
            self._bits.extend(bytes(place + 1 - len(self._bits)))
        self._bits[place] |= 1 << (result.line & 7)
        if result.succeeded:
            self._completed += 1
        else:
            self._failed += 1
        self.usage = self.usage.plus(result.usage)
        self.size += len(result.text) or result.size
        return True

    def counts(self, total: int) -> Counts:
        """Of `total` requests."""
        return Counts(total, self._completed, self._failed)

    @property
    def done(self) -> int:
        """Lines that have a result."""
        return self._completed + self._failed


log = structlog.get_logger(__name__)

BATCH_BYTES = 256 << 10  # bytes of results in one message, unless one result alone has more
ROOM = 4096  # bytes of a message that are not the result's text
# Seconds beyond the longest completion window for which results are kept: files are written in that time.
KEPT_LONGER = 172_800.0


class _Turn:
    """Results on their way to one subject."""

    def __init__(self, batch: str) -> None:
        self.batch = batch
        self.results: list[LineResult] = []
        self.size = 0
        self.stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Results:
    """Those of all batches that this gateway runs. Methods raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus, objects: Objects, longest: float) -> None:
        """`objects`: where results go that are too large for a message; `longest`: seconds that a batch may
        take."""
        self._bus = bus
        self._objects = objects
        self._max_age = longest + KEPT_LONGER
        self._turns: list[_Turn] = []
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await ensure_stream(
            self._bus,
            StreamConfig(
                name=subjects.BATCHES_STREAM,
                subjects=[subjects.ALL_BATCH_RESULTS],
                retention=RetentionPolicy.LIMITS,
                storage=StorageType.FILE,
                max_age=self._max_age,
            ),
        )

    async def append(self, batch: str, result: LineResult) -> None:
        """Returns when `result` is durable."""
        if len(result.text) > self._bus.max_payload - ROOM:
            result = await self._put_aside(batch, result)
        turn = self._turn(batch, len(result.text))
        turn.results.append(result)
        turn.size += len(result.text)
        if self._task is None:
            self._task = asyncio.create_task(self._send())
        await asyncio.shield(turn.stored)

    async def _put_aside(self, batch: str, result: LineResult) -> LineResult:
        name = f"{batch}-{result.line}"
        await self._objects.put(name, result.text, fresh=True)
        return msgspec.structs.replace(result, text=b"", object_name=name, size=len(result.text))

    def _turn(self, batch: str, size: int) -> _Turn:
        last = self._turns[-1] if self._turns else None
        most = min(BATCH_BYTES, self._bus.max_payload - ROOM)
        if last is None or last.batch != batch or last.size + size > most:
            last = _Turn(batch)
            self._turns.append(last)
        return last

    async def _send(self) -> None:
        while self._turns:
            turn = self._turns.pop(0)
            try:
                await self._bus.publish_durable(subjects.batch_results(turn.batch), LineResults(turn.results))
            except Exception as error:  # whatever it is, whoever waits is told, and the next are stored
                turn.stored.set_exception(error)
                turn.stored.exception()  # whoever waited may have gone
            else:
                turn.stored.set_result(None)
        self._task = None

    async def read(self, batch: str) -> AsyncGenerator[LineResult, None]:
        """All results of `batch` in the order of their storing, some twice perhaps.

        Asked for one by one, of the stream's leader: there is no consumer to lose, and nothing that a server
        which lags behind might leave out.
        """
        sequence, subject = 1, subjects.batch_results(batch)
        decoder = msgspec.msgpack.Decoder(LineResults)
        while True:
            with translated("read the results of a batch"):
                try:
                    message = await self._bus.jetstream().get_msg(
                        subjects.BATCHES_STREAM, seq=sequence, subject=subject, next=True
                    )
                except NotFoundError:
                    return
            sequence = (message.seq or 0) + 1
            for result in decoder.decode(message.data or b"").results:
                yield result

    async def text(self, result: LineResult) -> bytes:
        """The line of `result`, wherever it lies."""
        return await self._objects.get(result.object_name) if result.object_name else result.text

    async def clear(self, batch: str) -> None:
        """The batch's files are written: forgets its results."""
        async for result in self.read(batch):
            if result.object_name:
                await self._objects.delete(result.object_name)
        with translated("clear the results of a batch"):
            await self._bus.jetstream().purge_stream(subjects.BATCHES_STREAM, subject=subjects.batch_results(batch))

    async def stop(self) -> None:
        """Waits until everything is stored, or has failed."""
        if self._task is not None:
            await self._task


Kind = Literal["output", "errors"]


async def write_file(
    files: Files, results: Results, job: BatchJob, kind: Kind, confirm: Callable[[], Awaitable[object]]
) -> str:
    """Writes the output or the error file; returns its id. `confirm` is called before it is seen: it raises
    where the batch is another gateway's by now. Raises `RyzansteinError`."""
    now = time.time()
    name = file_id(job, kind)

    async def parts() -> AsyncGenerator[bytes, None]:
        tally = CompletionBitmap()
        async for result in results.read(job.id):
            if tally.add(result) and result.succeeded == (kind == "output"):
                yield await results.text(result) + b"\n"
        await confirm()

    record = FileRecord(
        id=name,
        tenant=job.tenant,
        filename=f"{job.id}_{kind}.jsonl",
        purpose="batch_output",
        created_at=now,
        expires_at=now + job.output_expires_after if job.output_expires_after else 0.0,
        object_name=name,
    )
    await files.put(record, parts())
    return name
