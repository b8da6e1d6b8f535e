"""Batches for programs that speak NATS: request-reply on `batches.submit`, `.status`, `.cancel`, `.list`.

One gateway answers (queue group). A request is a map in MessagePack or JSON, and the answer comes in the same:
a map in MessagePack never begins with the byte of `{`. Who may talk to NATS is trusted to name a tenant.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import structlog
from nats.aio.msg import Msg

from services.gateway.auth.authenticator import Principal
from services.gateway.batches.service import BatchCreate, Batches
from services.gateway.batches.states import batch_object
from services.gateway.core.errors import InvalidParameter, check_range, convert, describe, refusal, status_of
from services.gateway.core.pagination import MOST
from services.gateway.files.files import Files
from services.gateway.intake.decoding import decode
from shared.errors import RyzansteinError
from shared.messages.batches import BatchAsk, BatchJob, BatchListing, BatchReply, BatchSubmit
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.errors import BROKER_ERRORS, reason_of

T = TypeVar("T")

log = structlog.get_logger(__name__)


class BatchQueue:
    """The subjects' other end; subscribed by `start`."""

    def __init__(self, bus: Bus, batches: Batches, files: Files) -> None:
        self._bus = bus
        self._batches = batches
        self._files = files

    async def start(self) -> None:
        for subject, kind, answer in (
            (subjects.BATCH_SUBMIT, BatchSubmit, self._submit),
            (subjects.BATCH_STATUS, BatchAsk, self._status),
            (subjects.BATCH_CANCEL, BatchAsk, self._cancel),
            (subjects.BATCH_LIST, BatchListing, self._list),
        ):
            await self._bus.client.subscribe(
                subject,
                queue=subjects.BATCH_QUEUE,
                cb=self._handler(kind, answer),  # type: ignore[arg-type]
            )

    def _handler(self, kind: type[T], answer: Callable[[T], Awaitable[BatchReply]]) -> Callable[[Msg], Awaitable[None]]:
        from_json, from_msgpack = msgspec.json.Decoder(kind), msgspec.msgpack.Decoder(kind)

        async def handle(message: Msg) -> None:
            plain = message.data[:1] == b"{"
            try:
                data = message.data
                reply = await answer(decode(data, from_json) if plain else _unpacked(data, from_msgpack))
            except Exception as error:
                if not isinstance(error, RyzansteinError):
                    log.exception("batch_request_failed", subject=message.subject)
                shown = msgspec.to_builtins(describe(error, message.subject).error)
                reply = BatchReply(error=shown, status=status_of(error))
            if not message.reply:
                return
            encode = msgspec.json.encode if plain else msgspec.msgpack.encode
            try:
                await self._bus.client.publish(message.reply, encode(reply))
            except BROKER_ERRORS as error:
                log.info("batch_reply_failed", subject=message.subject, error=reason_of(error))

        return handle

    async def _submit(self, asked: BatchSubmit) -> BatchReply:
        file_id = asked.input_file_id
        if (file_id is None) == (asked.object is None):
            raise InvalidParameter(
                "Name the input by 'input_file_id' or by 'object', one of them.",
                param="input_file_id",
                reason="missing_required_parameter",
            )
        if asked.object is not None:
            name = asked.filename or asked.object
            file_id = (await self._files.adopt(asked.tenant, asked.object, name)).id
        given = {name: getattr(asked, name) for name in BatchCreate.__struct_fields__}
        wanted = convert(given | {"input_file_id": file_id}, BatchCreate)
        return self._shown(
            await self._batches.submit(wanted, Principal(tenant=asked.tenant), asked.idempotency_key or "")
        )

    async def _status(self, asked: BatchAsk) -> BatchReply:
        return self._shown(await self._batches.get(asked.id, asked.tenant))

    async def _cancel(self, asked: BatchAsk) -> BatchReply:
        return self._shown(await self._batches.cancel(asked.id, asked.tenant))

    async def _list(self, asked: BatchListing) -> BatchReply:
        check_range("limit", asked.limit, 1, MOST)
        jobs, more = await self._batches.listed(asked.tenant, asked.after, asked.limit)
        return BatchReply(batches=[batch_object(job) for job in jobs], has_more=more)

    def _shown(self, job: BatchJob) -> BatchReply:
        names = {"input": job.input_object, "output": job.output_file_id, "errors": job.error_file_id}
        return BatchReply(batch=batch_object(job), files={kind: name for kind, name in names.items() if name})


def _unpacked(data: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if isinstance(error, msgspec.ValidationError):
            refused = refusal(error, decoder.type, lambda: msgspec.msgpack.decode(data))
            if refused.param:
                raise refused from None
        raise InvalidParameter(
            f"The request could not be read ({error}); send a map in MessagePack or JSON.",
            param=None,
            reason="invalid_request_body",
        ) from None
