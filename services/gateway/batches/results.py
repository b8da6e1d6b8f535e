"""Results of lines, each in the stream `BATCHES` before it counts, until the batch's files are written.

    line ends ─┐  one turn of    ┌─ batches.results.<batch>    one message for all lines of a batch
    line ends ─┴─ the event loop ┴─ acknowledged: they are done

While one publish is under way the next results gather. A result may be in the stream twice (a publish of which
the acknowledgement was lost; a gateway that slept through the loss of its batch): both come of the same
generation, and readers take the first. So no window of deduplication has to be long enough.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator

import msgspec
import structlog
from nats.js.api import RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from shared.errors import RyzansteinError
from shared.messages.batches import LineResult, LineResults
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.errors import translated
from shared.nats.objects import Objects
from shared.nats.streams import ensure_stream

log = structlog.get_logger(__name__)

BATCH_BYTES = 256 << 10
"""Bytes of results in one message, unless one result alone has more."""
ROOM = 4096
"""Bytes of a message that are not the result's text."""
KEPT_LONGER = 172_800.0
"""Seconds beyond the longest completion window for which results are kept: files are written in that time."""


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

        async def parts() -> AsyncGenerator[bytes, None]:
            yield result.text

        await self._objects.write(name, parts(), nuid=secrets.token_hex(11), fresh=True)
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
            except RyzansteinError as error:
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
        if not result.object_name:
            return result.text
        return b"".join([part async for part in self._objects.read(result.object_name)])

    async def clear(self, batch: str) -> None:
        """The batch's files are written: forgets its results."""
        async for result in self.read(batch):
            if result.object_name:
                await self._objects.delete(result.object_name)
        with translated("clear the results of a batch"):
            await self._bus.jetstream().purge_stream(
                subjects.BATCHES_STREAM, subject=subjects.batch_results(batch)
            )

    async def stop(self) -> None:
        """Waits until everything is stored, or has failed."""
        if self._task is not None:
            await self._task
