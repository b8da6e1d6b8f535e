"""What is asked of two models that take turns, and what came of it. The schedule is pure; the clients are not.

alternating   one request at a time, each of the other model than the one before: every one waits for a switch
mixed         Poisson arrivals; the model changes with a set probability from one request to the next
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import msgspec

from benchmarks.errors import BenchError
from benchmarks.harness import nearest
from benchmarks.serve.runner import Target
from benchmarks.serve.sse import Answer, Client

WORDS = ("river", "bridge", "signal", "harbour", "copper", "letter", "winter", "engine", "garden", "mirror")


class Asked(msgspec.Struct, frozen=True):
    """One request of the schedule."""

    at: float
    """Seconds after the begin; 0 where each follows the end of the one before."""
    model: int
    """Index of the model."""
    prompt: str


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one system and one schedule. Times in seconds."""

    system: str
    schedule: str
    requests: int
    failed: int
    first_token_p50: float
    first_token_p99: float
    tokens_per_second: float
    seconds: float
    """From the first request to the end of the last answer."""
    errors: list[str] = []


class System(Protocol):
    """What serves the models."""

    name: str

    def turn(self, model: int) -> AbstractAsyncContextManager[Target]:
        """Whom to ask for a model, from before the request until its answer has ended."""
        ...


def alternating(requests: int, models: int, seed: int) -> list[Asked]:
    """Each model in turn, one after the other's end."""
    generator = random.Random(seed)
    return [Asked(0.0, number % models, _prompt(generator)) for number in range(requests)]


def mixed(requests: int, models: int, rate: float, change: float, seed: int) -> list[Asked]:
    """Poisson arrivals at `rate` a second; after each request another model follows with the probability `change`."""
    generator = random.Random(seed)
    asked, now, model = [], 0.0, 0
    for _ in range(requests):
        asked.append(Asked(now, model, _prompt(generator)))
        now += generator.expovariate(rate)
        if generator.random() < change:
            model = (model + 1 + generator.randrange(models - 1)) % models
    return asked


def _prompt(generator: random.Random) -> str:
    return (
        f"Write about a {generator.choice(WORDS)} and a {generator.choice(WORDS)} ({generator.random():.6f})."
    )


async def play(system: System, schedule: str, asked: Sequence[Asked], output_tokens: int) -> Figures:
    """Asks all of it, an open loop where requests have times."""
    begin = time.perf_counter()
    if any(request.at for request in asked):
        answers = await asyncio.gather(
            *(_at_its_time(system, request, begin, output_tokens) for request in asked)
        )
    else:
        answers = [await _ask(system, request, time.perf_counter(), output_tokens) for request in asked]
    return figures(system.name, schedule, answers, time.perf_counter() - begin)


async def _at_its_time(system: System, request: Asked, begin: float, output_tokens: int) -> Answer:
    planned = begin + request.at
    await asyncio.sleep(max(0.0, planned - time.perf_counter()))
    return await _ask(system, request, planned, output_tokens)


async def _ask(system: System, request: Asked, planned: float, output_tokens: int) -> Answer:
    """Times count from `planned`: what a client waits before its request may be sent is part of them."""
    async with system.turn(request.model) as target:
        body = target.body([{"role": "user", "content": request.prompt}], output_tokens)
        return await target.client.stream(body, {}, started=planned)


def figures(system: str, schedule: str, answers: Sequence[Answer], seconds: float) -> Figures:
    """Percentiles by nearest rank, over the answers that are whole. Raises `BenchError` where none is."""
    faults = [fault for answer in answers if (fault := answer.fault())]
    whole = [answer for answer in answers if not answer.fault()]
    if not whole:
        raise BenchError(f"{system} answered no request of the schedule {schedule}: {faults[0]}.")
    firsts = [answer.arrivals[0] - answer.started for answer in whole]
    tokens = sum(answer.usage.completion_tokens for answer in whole if answer.usage is not None)
    return Figures(
        system=system,
        schedule=schedule,
        requests=len(answers),
        failed=len(faults),
        first_token_p50=nearest(firsts, 0.5),
        first_token_p99=nearest(firsts, 0.99),
        tokens_per_second=tokens / seconds,
        seconds=seconds,
        errors=sorted(set(faults))[:3],
    )


class Turns:
    """Ollama's order of requests where one model has room at a time: first come, first served. A request of another
    model than the one that is loaded waits until that one's requests have ended, and those after it wait behind it.

    requests   A A B A B          loaded A   A A │ B │ A │ B          three switches
    """

    def __init__(self) -> None:
        self._loaded = -1
        self._running = 0
        self._line = asyncio.Lock()
        """Held by the request whose turn it is; locks are given in the order in which they were asked for."""
        self._ended = asyncio.Event()

    @asynccontextmanager
    async def of(self, model: int) -> AsyncIterator[bool]:
        """The turn of a request; whether `model` must be loaded first, in which case nobody else begins meanwhile until
        `loaded` is called."""
        await self._line.acquire()
        switches = model != self._loaded
        if switches:
            while self._running:
                self._ended.clear()
                await self._ended.wait()
            self._loaded = model
        self._running += 1
        if not switches:
            self._line.release()
        try:
            yield switches
        finally:
            self._running -= 1
            self._ended.set()

    def loaded(self) -> None:
        """The model of the request that switches is there: the next in line may look."""
        self._line.release()


def target_of(url: str, model: str, timeout: float) -> Target:
    return Target(Client(url, timeout=timeout), model, {})
