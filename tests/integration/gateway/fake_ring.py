"""Scheduler, executor and health monitor in one small stand-in that speaks real NATS."""

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import nats.errors
from nats.aio.msg import Msg

from shared.messages import (
    Cancel,
    CancelRequest,
    Claimed,
    ControlCommand,
    ControlReply,
    FinishReason,
    GenerationRequest,
    GroupEvent,
    GroupLoad,
    GroupRecord,
    ModelCard,
    TokenEntry,
    TokenFrame,
    TokenizerBundle,
    TokenLogprobs,
)
from shared.nats import subjects
from shared.nats.bus import Bus, encode
from shared.nats.kv import Bucket
from shared.nats.objects import Objects

MODEL = "org/stub-model"
Behaviour = Callable[["FakeRing", GenerationRequest], Awaitable[None]]


def stub_card(name: str = MODEL, **changes: object) -> ModelCard:
    card = ModelCard(
        model=name, context_length=2048, vocab_size=256, eos_token_ids=[0], tokenizer="", created=1_700_000_000
    )
    return msgspec.structs.replace(card, **changes)


async def say(ring: "FakeRing", request: GenerationRequest, text: str = "Hello, world!") -> None:
    """Answers with `text`, a token a frame, after what an earlier attempt has said of it."""
    tokens = list(text.encode("latin-1"))[: request.max_tokens]
    reason: FinishReason = "length" if len(tokens) == request.max_tokens else "stop"
    begin = len(request.generated)
    for position in range(begin, len(tokens)):
        await ring.emit(request, position, [tokens[position]], cached=4 if position == begin else 0)
    await ring.emit(request, len(tokens), [], finish=reason)


def saying(text: str) -> Behaviour:
    async def behave(ring: "FakeRing", request: GenerationRequest) -> None:
        await say(ring, request, text)

    return behave


async def silence(ring: "FakeRing", request: GenerationRequest) -> None:
    """Accepts and never answers."""


def beginning(text: bytes) -> Behaviour:
    """Says so much, and no more."""

    async def behave(ring: "FakeRing", request: GenerationRequest) -> None:
        await ring.emit(request, 0, list(text))

    return behave


def halting(
    then: Callable[["FakeRing"], Awaitable[None]], behind: bytes = b"Hello", again: Behaviour = say
) -> Behaviour:
    """The first attempt goes no further than these tokens, behind which `then` is done; later ones do as `again`."""

    async def behave(ring: "FakeRing", request: GenerationRequest) -> None:
        if request.attempt:
            await again(ring, request)
            return
        await ring.emit(request, 0, list(behind))
        await then(ring)

    return behave


def failing(code: str, message: str, *, behind: bytes = b"", retryable: bool = False) -> Behaviour:
    """Ends with an error, behind these tokens."""

    async def behave(ring: "FakeRing", request: GenerationRequest) -> None:
        if behind:
            await ring.emit(request, 0, list(behind))
        await ring.emit(request, len(behind), [], finish="error", error=(code, message, retryable))

    return behave


class FakeRing:
    """Pulls from intake and lets `behave` answer each request; several at a time."""

    def __init__(self, bus: Bus, *, group: str = "g1", epoch: int = 1) -> None:
        self.bus = bus
        self.group = group
        self.epoch = epoch
        self.behave: Behaviour = say
        self.requests: list[GenerationRequest] = []
        self.answered = 0
        self.cancelled: set[str] = set()
        self.commanded: set[str] = set()
        self.commands: list[Cancel] = []
        self.claimed: dict[str, int] = {}  # by generation: the claim under which a gateway has taken it over
        self.taking = asyncio.Event()  # cleared: it takes no more than one further request of the queue
        self.taking.set()
        self._step = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, *cards: ModelCard) -> None:
        for card in cards or (stub_card(),):
            await self.add_model(card)
        await self.listen()
        self.resume()

    async def listen(self) -> None:
        """Hears of cancellations."""
        await self.bus.subscribe(subjects.CANCEL, CancelRequest, self._on_cancel)
        await self.bus.subscribe(subjects.control(self.group), ControlCommand, self._on_control)  # type: ignore[arg-type]
        await self.bus.flush()

    async def add_model(self, card: ModelCard) -> None:
        models = await Bucket.open(self.bus, subjects.MODELS_BUCKET, ModelCard)
        await models.put(card.model, card)

    async def add_tokenizer(self, name: str, files: dict[str, bytes]) -> None:
        store = Objects(self.bus, subjects.TOKENIZERS_STORE)
        await store.open()
        await store.put(name, encode(TokenizerBundle(files)))

    async def put_record(
        self, state: str, *, model: str = MODEL, running: int = 0, waiting: int = 0, at: float = 0.0
    ) -> None:
        """What the health monitor writes; `at` is its time stamp."""
        groups = await Bucket.open(self.bus, subjects.GROUPS_BUCKET, GroupRecord)
        load = GroupLoad(running=running, waiting=waiting)
        record = GroupRecord(self.group, model, state, self.epoch, [], load, updated_at=at)  # type: ignore[arg-type]
        await groups.put(self.group, record)

    async def event(self, kind: str, *, at: float = 0.0) -> None:
        """What the health monitor tells everybody."""
        event = GroupEvent(self.group, MODEL, self.epoch, kind, at=at)  # type: ignore[arg-type]
        await self.bus.publish(subjects.HEALTH_EVENTS, event)

    def resume(self) -> None:
        """Pulls from intake (again)."""
        self._spawn(self._pull())

    async def stop(self) -> None:
        while self._tasks:  # before Python 3.12 `wait_for` swallows a cancellation that meets its result
            for task in list(self._tasks):
                task.cancel()
            await asyncio.wait(list(self._tasks), timeout=0.5)

    async def die(self) -> None:
        """Everything in the ring is lost; the monitor says so."""
        await self.stop()
        await self.lose()

    async def lose(self) -> None:
        """The monitor says that this life of the ring is over; the next one goes on."""
        await self.event("down")
        self.epoch += 1

    async def emit(
        self,
        request: GenerationRequest,
        position: int,
        tokens: Sequence[int],
        *,
        finish: FinishReason = "",
        cached: int = 0,
        error: tuple[str, str, bool] | None = None,
        group: str | None = None,
        **fields: Any,
    ) -> None:
        """One frame with one entry; `error`: (code, message, retryable); `fields`: others of the entry."""
        code, message, retryable = error or ("", "", False)
        self._step += 1
        told = {"logprobs": self._logprobs(request, tokens), "error_code": code, "error": message} | fields
        entry = TokenEntry(
            request.generation_id,
            request.attempt,
            position,
            list(tokens),
            finish=finish,
            cached_tokens=cached,
            retryable=retryable,
            **told,
        )
        frame = TokenFrame(self.group if group is None else group, self.epoch, self._step, [entry])
        await self.bus.publish(subjects.tokens(request.consumer), frame)

    def _logprobs(self, request: GenerationRequest, tokens: Sequence[int]) -> list[TokenLogprobs] | None:
        count = request.sampling.logprobs
        if count < 0:
            return None
        top = [(ord("a") + index, -1.0 - index) for index in range(count)]
        return [TokenLogprobs(-0.5, top) for _ in tokens]

    async def _pull(self) -> None:
        jetstream = self.bus.jetstream()
        source = await jetstream.pull_subscribe(subjects.ALL_INTAKE, durable="fake-ring", stream=subjects.INTAKE_STREAM)
        try:
            while True:
                await self.taking.wait()
                with contextlib.suppress(nats.errors.TimeoutError):
                    (message,) = await source.fetch(1, timeout=5)
                    await self._take(message)
        finally:  # else the server would hand the next request to nobody
            await source.unsubscribe()
            await self.bus.flush()

    async def _take(self, message: Msg) -> None:
        acknowledged = False
        while not acknowledged:  # a busy server confirms too late, and the request has left the queue all the same
            with contextlib.suppress(nats.errors.TimeoutError):
                await message.ack_sync()
                acknowledged = True
        request = msgspec.msgpack.decode(message.data, type=GenerationRequest)
        self.requests.append(request)
        self._spawn(self._answer(request))

    async def _answer(self, request: GenerationRequest) -> None:
        await self.behave(self, request)
        self.answered += 1

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _on_cancel(self, message: CancelRequest) -> None:
        self.cancelled.update(message.generation_ids)

    async def _on_control(self, command: ControlCommand) -> ControlReply:
        if isinstance(command, Cancel):
            self.commanded.update(command.generation_ids)
            self.commands.append(command)
        elif isinstance(command, Claimed):
            self.claimed.update(dict.fromkeys(command.generation_ids, command.claim))
        return ControlReply(ok=True)


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Waits until `condition`, a coroutine function perhaps, holds; fails when it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not (await held if inspect.isawaitable(held := condition()) else held):
        assert time.monotonic() < end, "the condition did not come true"
        await asyncio.sleep(0.005)
