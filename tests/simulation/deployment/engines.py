"""An engine that schedules for itself: a process of the world, beside the rank that leads its group.

    rank: EngineLeader, Engine ──submissions, aborts──▶ engine: Places      a line each, as vLLM's worker has messages
                               ◀────facts, steps──────

What has no room in its KV cache gives up its place without a word, and is computed again later. Several tokens of an
answer come at once, also some behind its end; of an abort it hears once the next step begins, or later still. Half of
the answers it ends itself, the others go on until they are aborted.

The text is the stub's. So what it shall continue is known too: it must be the beginning of the text.
"""

import asyncio
import random
import time
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.executor.core.engine import EngineSpec, with_tasks
from services.executor.core.gpu_errors import CRASHED
from services.executor.core.settings import ExecutorSettings
from services.executor.engines import leader
from services.executor.engines.base import EngineAbort, EngineDelta, EngineFacts, EngineRequest, EngineStep
from services.executor.supervisor.failure_detection import cause_of_exit
from services.executor.worker.stub import STUB_EOS_TOKEN, stub_token
from shared.engine_features import FEATURES
from shared.errors import InternalError, ModelLoadError, RingLost
from shared.messages import ModelCard, TokenLogprobs
from tests.simulation.core.processes import CURRENT, Process
from tests.simulation.deployment.children import Child, Family, is_stopped

VOCABULARY = 256
WIDTHS = (0, 1, 1, 1, 2, 4)  # tokens of an answer in a step, drawn each time
BEYOND = 3  # tokens that it may tell behind an answer's end
LATE = 0.25  # of the aborts that a step could hear of, how many it does not

_requests: "msgspec.json.Decoder[EngineRequest | EngineAbort]" = msgspec.json.Decoder(EngineRequest | EngineAbort)
_steps = msgspec.json.Decoder(EngineStep)


def stand_in() -> None:
    """For what leaders of engines ask their machine. Idempotent."""
    leader.read_card = _card  # type: ignore[attr-defined]


def _card(directory: Path, model: str, spec: EngineSpec) -> tuple[ModelCard, bytes]:
    """As the stub's: a token is a byte, in groups of either kind."""
    card = ModelCard(model, spec.context_length, spec.vocab_size, [STUB_EOS_TOKEN], "", int(time.time()))
    return with_tasks(card, spec), b""


@dataclass(eq=False)
class Answer:
    request: EngineRequest
    ends: bool  # by itself
    told: int = 0  # tokens of this submission
    computed: int = 0  # tokens that the KV cache has of it

    @property
    def length(self) -> int:
        return len(self.request.tokens) + self.told

    def delta(self, count: int, beyond: int) -> EngineDelta:
        """The next `count` tokens, of which `beyond` may stand behind its end."""
        request = self.request
        over = self.ends and self.told + count >= request.max_tokens
        if over:
            count = min(count, request.max_tokens - self.told + beyond)
        first = self.length - request.prompt_tokens
        tokens = _text(request, first, first + count)
        self.told += count
        wanted = request.sampling.logprobs
        sure = [TokenLogprobs(0.0, [(token, 0.0)] if wanted else []) for token in tokens] if wanted >= 0 else None
        return EngineDelta(request.id, tokens, "length" if over else "", sure)


def _text(request: EngineRequest, first: int, end: int) -> list[int]:
    return [stub_token(request.sampling.seed, position, VOCABULARY) for position in range(first, end)]


class Places:
    """What the engine has, and computes next."""

    def __init__(self, places: int, kv_tokens: int, draw: random.Random) -> None:
        self._places, self._kv_tokens, self._draw = places, kv_tokens, draw
        self._running: list[Answer] = []
        self._waiting: deque[Answer] = deque()
        self._unread: list[EngineRequest | EngineAbort] = []
        self._aborted: set[str] = set()
        self._known: set[str] = set()
        self._steps = 0
        self.preemptions = 0

    def __len__(self) -> int:
        """Answers."""
        return len(self._running) + len(self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self._unread or len(self))

    def take(self, message: EngineRequest | EngineAbort) -> None:
        """It is read when the next step begins."""
        self._unread.append(message)

    def begin(self) -> int:
        """A step; how many tokens it computes. 0: there is none. Raises `ValueError` for what nobody may ask."""
        for message in self._unread:
            self._read(message)
        self._unread.clear()
        self._drop()
        while self._waiting and self._has_room(self._waiting[0]):
            self._running.append(self._waiting.popleft())
        return sum(max(1, answer.length - answer.computed) for answer in self._running)

    def end(self) -> EngineStep:
        """Of the step that was begun."""
        self._steps += 1
        deltas = []
        for answer in [*self._running]:
            answer.computed = answer.length
            delta = answer.delta(max(self._draw.choice(WIDTHS), not answer.told), self._draw.randint(0, BEYOND))
            if delta.tokens:
                deltas.append(delta)
            if delta.finish:
                self._running.remove(answer)
        while self._used > self._kv_tokens and len(self._running) > 1:
            self._preempt(self._running.pop())
        used = min(1.0, self._used / self._kv_tokens)
        return EngineStep(self._steps, deltas, len(self._running), len(self._waiting), used)

    @property
    def _used(self) -> int:
        return sum(answer.length for answer in self._running)

    def _has_room(self, answer: Answer) -> bool:
        if not self._running:
            return True
        return len(self._running) < self._places and self._used + answer.length < self._kv_tokens

    def _preempt(self, answer: Answer) -> None:
        answer.computed = 0
        self._waiting.appendleft(answer)
        self.preemptions += 1

    def _read(self, message: EngineRequest | EngineAbort) -> None:
        if isinstance(message, EngineAbort):
            self._aborted.update(message.ids)
            return
        so_far = list(message.tokens[message.prompt_tokens :])
        if message.id in self._known or so_far != _text(message, 0, len(so_far)):
            raise ValueError(f"{message.id} came before, or goes on from what is not its text: {bytes(so_far)!r}")
        self._known.add(message.id)
        self._waiting.append(Answer(message, self._draw.random() < 0.5))

    def _drop(self) -> None:
        """What is aborted, as far as it hears of it."""
        there = [*self._running, *self._waiting]
        self._aborted &= {answer.request.id for answer in there}
        heard = {name for name in sorted(self._aborted) if self._draw.random() >= LATE}
        self._running = [one for one in self._running if one.request.id not in heard]
        self._waiting = deque(one for one in self._waiting if one.request.id not in heard)


# Of each engine, by its process: who looks at the world sees what it has.
PLACES: weakref.WeakKeyDictionary[Process, Places] = weakref.WeakKeyDictionary()


class Engine:
    """`ServingEngine`, in the process of its leader."""

    def __init__(self, family: Family, settings: ExecutorSettings) -> None:
        self._family, self._settings = family, settings

    async def start(self) -> EngineFacts:
        self._child = self._family.start("engine", lambda child: compute(child, self._settings))
        line = await self._child.events.readline()
        if not line:
            raise ModelLoadError("The engine did not start.")
        return msgspec.json.decode(line, type=EngineFacts)

    def submit(self, request: EngineRequest) -> None:
        self._child.stdin.write(msgspec.json.encode(request) + b"\n")

    def abort(self, ids: list[str]) -> None:
        self._child.stdin.write(msgspec.json.encode(EngineAbort(ids)) + b"\n")

    async def next(self) -> EngineStep:
        if line := await self._child.events.readline():
            return _steps.decode(line)
        code = await self._child.wait()
        reason = f"The engine has ended with {code}."
        raise InternalError(reason) if cause_of_exit(code, 0) == CRASHED else RingLost(reason)

    def is_stopped(self) -> bool:
        return is_stopped(self._child.pid)

    async def stop(self) -> None:
        self._child.kill()


async def compute(child: Child, settings: ExecutorSettings) -> int:
    """The engine's process. It tells of no step in which it has nothing to compute."""
    kv_tokens = settings.stub_blocks * settings.block_size
    unsupported = [name for name in FEATURES if name != "logprobs"]
    facts = EngineFacts(
        "simulated 1",
        VOCABULARY,
        settings.stub_context_length,
        settings.max_sequences,
        kv_tokens,
        exact=True,
        unsupported=unsupported,
    )
    world = asyncio.get_running_loop().world  # type: ignore[attr-defined]  # a deployment sets it
    draw = random.Random(f"{world.seed} {CURRENT.get().name} {world.now:.6f}")
    places, news = Places(facts.places, kv_tokens, draw), asyncio.Event()
    PLACES[CURRENT.get()] = places
    child.tell(msgspec.json.encode(facts) + b"\n")
    reading = asyncio.create_task(_read(child, places, news))
    while not reading.done():
        if tokens := places.begin() if places.busy else 0:
            await asyncio.sleep(settings.stub_step_ms / 1e3 + tokens * settings.stub_us_per_token / 1e6)
            child.tell(msgspec.json.encode(places.end()) + b"\n")
        else:
            news.clear()
            await news.wait()
    return 1


async def _read(child: Child, places: Places, news: asyncio.Event) -> None:
    async for line in child.commands:
        places.take(_requests.decode(line))
        news.set()
    news.set()
