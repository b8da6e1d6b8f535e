"""Takes requests in: whose they are, their turn and their limits, and what an Idempotency-Key already stands for."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from services.gateway.auth.authenticator import Authenticator, Principal
from services.gateway.core.errors import RouteError
from services.gateway.core.large_requests import LARGE_REQUEST, LargeRequests
from services.gateway.intake.endpoint import BodyEndpoint, Endpoint, Endpoints, streamed
from services.gateway.intake.headers import IgnoredFields
from services.gateway.intake.processor import Canonical, InputProcessor, decoded_chat
from services.gateway.intake.prompts.prefill import Prefill, Prefills
from services.gateway.intake.record import Context
from services.gateway.lifecycle.idempotency import ABANDONED, POLL, IdempotencyKeys, entry_name, fingerprint
from services.gateway.streams.reading import Reading
from services.gateway.streams.stream_reader import StreamReader
from shared import tracing
from shared.messages.records import Idempotency
from shared.nats.kv import Contention, KvEntry


class Intake:
    """The same for REST, WebSocket, gRPC and batches."""

    def __init__(
        self,
        processor: InputProcessor,
        endpoints: Iterable[Endpoint],
        keys: IdempotencyKeys,
        reading: Reading,
        authenticator: Authenticator,
    ) -> None:
        self.processor = processor
        self._endpoints = Endpoints(endpoints)
        self._keys = keys
        self._reading = reading
        self._authenticator = authenticator
        self.large = LargeRequests()
        self.prefills = Prefills()

    async def prepare(
        self, endpoint: str, body: bytes | msgspec.Raw, context: Context, *, always_streamed: bool = False
    ) -> StreamReader:
        """A large one is decoded in its turn. `always_streamed`: the connection knows no other way, so `stream` need
        not be given.

        Raises `InvalidRequest` in all its forms, `Unavailable`.
        """
        self._authenticator.check(context.principal)
        found = self._endpoints.bodies.get(endpoint) or self._endpoints.named(endpoint, body)
        make = partial(self._prepared, found, body, context, always_streamed)
        if not context.key:
            return await make()
        return await self._repeatable(found.name, fingerprint(body), context, make)

    async def _prepared(
        self, endpoint: BodyEndpoint, body: bytes | msgspec.Raw, context: Context, always_streamed: bool
    ) -> StreamReader:
        with tracing.stage("prepare"):
            await self.processor.admit(context)
            context.body_bytes = len(body) if type(body) is bytes else memoryview(body).nbytes
            if type(body) is not bytes or len(body) > LARGE_REQUEST:
                await self.large.turn(context.tenant, context.body_bytes)
            ignored = IgnoredFields(context.answer_headers, self.processor.strict)
            request = self.processor.of_some_model(partial(endpoint.decode, ignored=ignored), body)
            if always_streamed:
                request = streamed(endpoint, request)
            return await endpoint.prepare(self.processor, request, context)

    async def prepare_decoded(
        self, endpoint: str, request: Canonical, context: Context, print_: str = ""
    ) -> StreamReader:
        """As `prepare`, for a request that came in another form than JSON. Idempotency keys belong to
        `endpoint`; `print_` is the fingerprint of the body, needed where there is one."""
        self._authenticator.check(context.principal)
        make = partial(self._prepared_decoded, request, context)
        return await (self._repeatable(endpoint, print_, context, make) if context.key else make())

    async def _prepared_decoded(self, request: Canonical, context: Context) -> StreamReader:
        with tracing.stage("prepare"):
            await self.processor.admit(context)
            return await self.processor.run(request, context)

    def serves(self, endpoint: str) -> bool:
        """Whether bodies are taken for it."""
        return endpoint in self._endpoints.bodies

    def check(self, endpoint: str, body: bytes | msgspec.Raw) -> Any:
        """The request in `body`, decoded and checked as far as that needs no tokenizer. Raises `InvalidRequest`."""
        found = self._endpoints.bodies.get(endpoint) or self._endpoints.named(endpoint, body)
        ignored = self.processor.ignored({})
        request = found.decode(body, ignored)
        found.check(request, ignored)
        return request

    async def prefill(self, body: bytes, context: Context) -> Prefill:
        """Has the prompt of a conversation so far, of the session that `context` names, computed before its next turn.
        `body`: of a chat completion, or of another endpoint's conversation. Raises as `prepare`, and
        `ModelNotLoaded`."""
        self._authenticator.check(context.principal)
        await self.processor.admit(context)
        await self.large.turn(context.tenant, len(body))
        context.body_bytes = len(body)
        if (endpoint := self._endpoints.of_conversation(body)) is not None:
            request = await endpoint.conversation(self.processor, body, context)
        else:
            decoded = partial(decoded_chat, ignored=self.processor.ignored(context.answer_headers))
            request = self.processor.of_some_model(decoded, body)
        return await self.prefills.begin(await self.processor.prefill(request, context), context.session)

    async def count(self, principal: Principal, headers: dict[str, str]) -> None:
        """Counts a request that generates nothing. `headers` gets what the answer should say. Raises `RateLimited`."""
        await self.processor.admit(Context("", principal=principal, answer_headers=headers))

    async def _repeatable(
        self, endpoint: str, print_: str, context: Context, make: Callable[[], Awaitable[StreamReader]]
    ) -> StreamReader:
        """A reading of what the key stands for, or a new request that has taken the key."""
        context.idempotency = name = entry_name(context.tenant, endpoint, context.key)
        contention = Contention("what the Idempotency-Key stands for")
        while True:
            known = await self._keys.get(name, print_)
            if known is not None and (run := await self._repeat(known, context)) is not None:
                if self._endpoints.generates(run.answer.record.endpoint):
                    self.processor.tell_exact(run.answer.record.requests[0].model, context)
                return run
            if context.after is not None:
                raise RouteError(
                    "No generation is known under this Idempotency-Key (any more), so there is no stream to resume; "
                    "leave out Last-Event-ID to start a new one.",
                    status=404,
                    reason="generation_not_found",
                )
            run = await make()
            if await self._keys.take(name, run.answer.identity, print_, known):
                return run
            contention.lost()

    async def _repeat(self, known: KvEntry[Idempotency], context: Context) -> StreamReader | None:
        """None when the key stands for nothing (any more)."""
        give_up = time.monotonic() + ABANDONED
        while True:
            try:
                run = await self._reading.attach(
                    known.value.identity, context.after, how="idempotency", view=context.view, tenant=context.tenant
                )
            except RouteError:
                if time.monotonic() >= give_up:
                    return None
                await asyncio.sleep(POLL)  # whoever was first is about to write its record
                continue
            if not await self._reading.over(run.answer):
                return run
            run.close()
            return None
