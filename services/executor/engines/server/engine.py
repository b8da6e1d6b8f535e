"""An engine behind a URL: a request for each generation, and a watch over who answers.

    submit ─▶ waits for one of `places` ─▶ ServerGeneration ══ HTTP ══▶ server
    next  ◀── deltas of all that have some, and steps ◀── events, Watch
    abort ──▶ closes the connection

`steps` grows with each event and with each look that finds the server further than before. It does not grow because a
server answers: the leader's supervisor judges by it one that hangs while it does.
"""

import asyncio
from pathlib import Path

import httpx
import msgspec
import structlog

from services.executor.core.settings import ExecutorSettings
from services.executor.engines.base import EngineFacts, EngineRequest, EngineStep, ServingEngine
from services.executor.engines.server.client import ServerClient, ServerFault
from services.executor.engines.server.dialects.base import Identity, ServerDialect, expect_ready
from services.executor.engines.server.dialects.catalog import DIALECTS
from services.executor.engines.server.generation import ServerGeneration
from services.executor.engines.server.watch import Watch
from services.executor.model.tokenizer_files import read_json
from shared.errors import ConfigurationError, RingLost, Unavailable, reason_of
from shared.tasks import TaskSet

log = structlog.get_logger(__name__)

REACH_SECONDS = 20.0  # that a server may take until it listens; then the supervisor is told, which tries again


def server_engine(settings: ExecutorSettings, directory: Path) -> ServingEngine:
    """At `settings.engine_url`, for the model in `directory`. Raises `ConfigurationError` and `ModelLoadError`."""
    config = read_json(directory / "config.json")
    facts = {**config, **(config.get("text_config") or {})}
    context = settings.context_length or int(facts.get("max_position_embeddings") or 0)
    return make_server_engine(
        settings.engine_kind,
        settings.engine_url,
        settings.engine_credentials,
        int(facts.get("vocab_size") or 0),
        context,
        settings.max_sequences,
    )


def make_server_engine(
    kind: str, url: str, credentials: Path | None, vocab_size: int, context_length: int, max_sequences: int
) -> ServingEngine:
    """`vocab_size` and `context_length` of the model's directory. Raises `ConfigurationError`."""
    if kind not in DIALECTS:
        raise ConfigurationError(f"There is no kind of server {kind!r}: choose one of {', '.join(DIALECTS)}.")
    client = ServerClient(url, credentials, max_sequences)
    return ServerEngine(DIALECTS[kind](client), client, vocab_size, context_length, max_sequences)


class ServerEngine:
    def __init__(
        self, dialect: ServerDialect, client: ServerClient, vocab_size: int, context_length: int, max_sequences: int
    ) -> None:
        self._dialect = dialect
        self._client = client
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._max_sequences = max_sequences
        self._places = asyncio.Semaphore(max_sequences)
        self._watch: Watch | None = None
        self._tasks = TaskSet("engine_task_failed")
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._running = 0
        self._news: dict[str, ServerGeneration] = {}  # those that have something to take, in their order
        self._wake = asyncio.Event()
        self._steps = 0
        self._told_steps = 0
        self._kv_used = 0.0
        self._lost: RingLost | None = None

    async def start(self) -> EngineFacts:
        name = self._client.name
        try:
            identity = await self._reached()
            # SGLang listens, and computes what it is asked for, before its warm-up is over.
            expect_ready(self._client, await self._client.ask("/health"))
            facts = await self._dialect.examine(identity, self._vocab_size)
        except httpx.TransportError as error:
            raise Unavailable(
                f"{name} cannot be reached ({reason_of(error)}): start the server there, or correct the engine's URL"
            ) from None
        except ServerFault as fault:
            raise ConfigurationError(f"{name} cannot be used: {fault}") from None
        self._watch = Watch(self._client, self._dialect, identity, self._progressed)
        self._tasks.spawn(self._watched(self._watch), name="engine-watch")
        places = min(self._max_sequences, facts.places or self._max_sequences)
        self._places = asyncio.Semaphore(places)
        context_length = min(self._context_length, facts.context_length or self._context_length)
        return msgspec.structs.replace(facts, places=places, context_length=context_length)

    async def _reached(self) -> Identity:
        """Of a server that may be started at the same time as this. Raises `httpx.TransportError`."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            try:
                return await self._dialect.identify()
            except httpx.TransportError as error:
                if loop.time() - began >= REACH_SECONDS:
                    raise
                log.info("engine_server_awaited", url=self._client.name, reason=reason_of(error))
                await asyncio.sleep(1)

    def submit(self, request: EngineRequest) -> None:
        assert request.id not in self._serving, "ids are of one submission"
        generation = ServerGeneration(request, self._client, self._dialect, self._vocab_size, self._has_news)
        if request.max_tokens == 0 and not request.pool:  # servers generate one at least
            generation.end("length", "")
            return
        task = self._tasks.spawn(self._serve(generation), name=f"generation-{request.id}")
        self._serving[request.id] = task
        task.add_done_callback(lambda done: self._served(request.id, done))

    def abort(self, ids: list[str]) -> None:
        for request_id in ids:
            self._news.pop(request_id, None)
            if task := self._serving.pop(request_id, None):
                task.cancel()

    async def next(self) -> EngineStep:
        while not self._news and self._steps == self._told_steps:
            if self._lost is not None:
                raise self._lost
            self._wake.clear()
            await self._wake.wait()
        news, self._news = self._news, {}
        self._told_steps = self._steps
        return EngineStep(
            steps=self._steps,
            deltas=[generation.take() for generation in news.values()],
            running=self._running,
            waiting=len(self._serving) - self._running,
            kv_used=self._kv_used,
        )

    def is_stopped(self) -> bool:
        return False  # its processes may be on another host: what it does not compute is seen by `steps`

    async def stop(self) -> None:
        await self._tasks.cancel()
        if self._watch is not None:
            self._watch.stop()
        await self._client.close()

    async def _serve(self, generation: ServerGeneration) -> None:
        async with self._places:
            self._running += 1
            try:
                await self._ask(generation)
            except RingLost as lost:
                self._lose(lost)
            except ConfigurationError as error:  # it refuses the credentials that it took at the start
                self._lose(RingLost(error.message))
            except Exception as error:
                log.exception("generation_failed", request=generation.request.id)
                generation.end("", reason_of(error))
            finally:
                self._running -= 1

    async def _ask(self, generation: ServerGeneration) -> None:
        """Where the server is gone all of its requests are lost, and none is told as failed."""
        assert self._watch is not None, "requests come after the start"
        for last in (False, True):
            try:
                await generation.run()
                return
            except httpx.TransportError as error:
                await self._watch.confirm()
                # A connection that was kept open can be closed as it is used: then nothing has come of it.
                if last or generation.answered or not isinstance(error, httpx.RemoteProtocolError):
                    generation.end("", f"the connection broke ({reason_of(error)})", "unavailable")
                    return

    async def _watched(self, watch: Watch) -> None:
        try:
            await watch.run()
        except RingLost as lost:
            self._lose(lost)
        except Exception as error:
            self._lose(RingLost(f"{self._client.name} cannot be watched any more: {reason_of(error)}"))
            raise

    def _served(self, request_id: str, task: "asyncio.Task[None]") -> None:
        if self._serving.get(request_id) is task:
            del self._serving[request_id]

    def _has_news(self, generation: ServerGeneration) -> None:
        self._news[generation.request.id] = generation
        self._steps += 1
        self._wake.set()

    def _progressed(self, kv_used: float) -> None:
        self._kv_used = kv_used
        if self._serving:  # else it is what the server does of itself
            self._steps += 1
            self._wake.set()

    def _lose(self, lost: RingLost) -> None:
        self._lost = self._lost or lost
        self._wake.set()
