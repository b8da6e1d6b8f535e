"""A line that kills the gateway which runs it: how many it takes along, and what becomes of the others."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.batches import states
from services.gateway.batches.dependencies import BatchMetrics
from services.gateway.batches.line_runner import LineGate, LineRunner
from services.gateway.batches.runner import AHEAD, EVERY_LINE, BatchRunner
from services.gateway.files.lines import FileLine
from shared.messages.batches import BatchJob, LineResult
from shared.service.endpoints import new_registry
from shared.tasks import cancel_all

PLACES = 8
WITHIN = 30.0


def new_job() -> BatchJob:
    now = time.time()
    return BatchJob("batch_1", "", now, "/v1/completions", "f", "f", "24h", now + 3600)


def job_of(count: int) -> BatchJob:
    return states.begun(new_job(), time.time(), count, "m")


class Death(BaseException):
    """Of a gateway."""


class World:
    """What outlives a gateway."""

    def __init__(self, count: int, poison: Sequence[int] = (), *, poison_to_check: int = 0) -> None:
        self.job = new_job() if poison_to_check else job_of(count)
        self.poison = frozenset(poison)
        self.poison_to_check = poison_to_check
        self.results: list[LineResult] = []
        self.lines = [
            FileLine(number, msgspec.json.encode({"custom_id": str(number), "method": "POST", "url": "/v1/completions",
                                              "body": {"line": number}}), "")
            for number in range(1, count + 1)
        ]  # fmt: skip

    async def append(self, batch: str, result: LineResult) -> None:
        self.results.append(result)

    async def read(self, batch: str) -> AsyncGenerator[LineResult, None]:
        for result in self.results:
            yield result

    def failed(self) -> list[int]:
        return [result.line for result in self.results if not result.succeeded]


class Lease:
    """Writes into the world, until its gateway is dead."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.writes = 0

    @property
    def job(self) -> BatchJob:
        return self._world.job

    async def write(self, change: Callable[[BatchJob], BatchJob]) -> BatchJob:
        self.writes += 1
        self._world.job = change(self._world.job)
        return self._world.job

    @contextlib.asynccontextmanager
    async def renewed(self, *told: object) -> AsyncIterator[None]:
        yield


class Gateway:
    """One life of one: it dies when a poisonous line runs."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.died = asyncio.Event()
        self.together: list[list[int]] = []  # the lines that were under way whenever one began
        self._running: list[int] = []
        self._parts: Any = SimpleNamespace(
            results=world,
            endpoints={"/v1/completions": self},
            metrics=BatchMetrics(new_registry()),
            authenticator=SimpleNamespace(vouched=lambda key, tenant: None),
            catalog=SimpleNamespace(places=lambda model: PLACES, has_ready_group=lambda model: True),
            settings=SimpleNamespace(tenant_file_bytes=1 << 30),
            own=SimpleNamespace(batch_parallelism=PLACES, batch_requests=1000),
        )
        self.lease = Lease(world)
        self.gate = LineGate()

    def check(self, body: msgspec.Raw, tenant: str) -> str:
        if msgspec.json.decode(body)["line"] == self.world.poison_to_check:
            self.died.set()
            raise Death
        return "m"

    async def run(self, body: msgspec.Raw, context: Any, unwanted: Callable[[], bool]) -> bytes:
        line = msgspec.json.decode(body)["line"]
        self._running.append(line)
        self.together.append([*self._running])
        await asyncio.sleep(0)
        if line in self.world.poison:
            self.died.set()
        if self.died.is_set():
            await asyncio.Event().wait()
        self._running.remove(line)
        return b'{"usage":{}}'

    async def lives(self) -> None:
        """Runs the batch, to its end or the gateway's."""
        lines = LineRunner(self._parts, lambda: 1, self.gate)
        runner = BatchRunner(self.lease, self._parts, lines)  # type: ignore[arg-type]
        runner._input = self._input  # type: ignore[method-assign]
        work = asyncio.create_task(self._works(runner))
        death = asyncio.create_task(self.died.wait())
        async with asyncio.timeout(WITHIN):
            await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
        await cancel_all([work, death])

    async def _works(self, runner: BatchRunner) -> None:
        with contextlib.suppress(Death):
            if self.world.job.status == "validating":
                await runner._validate()
            if self.world.job.status == "in_progress":
                await runner._run_lines()

    async def _input(self) -> AsyncGenerator[FileLine, None]:
        for line in self.world.lines:
            yield line


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.batches.line_runner.LOOK", 0.001)


async def gateways(world: World) -> list[Gateway]:
    """One after the other, until one has ended the batch."""
    lives: list[Gateway] = []
    while not lives or lives[-1].died.is_set():
        assert len(lives) < 10, "it never ends"
        lives.append(Gateway(world))
        await lives[-1].lives()
    return lives


@pytest.mark.parametrize("poison", [1, 5, 40])
async def test_it_ends_three_gateways_and_fails_alone(poison: int) -> None:
    world = World(40, [poison])
    lives = await gateways(world)
    assert len(lives) == 4
    assert world.job.status == "finalizing"
    assert sorted(result.line for result in world.results) == list(range(1, 41))
    [failed] = [result for result in world.results if not result.succeeded]
    assert failed.line == poison
    assert b'"fatal_request"' in failed.text
    assert b"3 gateways were lost" in failed.text
    assert lives[2].together[-1] == [poison]


@pytest.mark.parametrize("poison", [1, 40])
async def test_what_ends_gateways_while_it_is_checked_ends_three(poison: int) -> None:
    world = World(40, poison_to_check=poison)
    lives = await gateways(world)
    assert len(lives) == 4
    [error] = world.job.errors
    assert (world.job.status, error.code) == ("failed", "fatal_request")
    assert error.line is not None
    assert error.line <= poison <= error.line + AHEAD
    assert world.results == []


async def test_the_third_gateway_checks_alone() -> None:
    world = World(3, poison_to_check=99)
    world.job = msgspec.structs.replace(world.job, lost=[EVERY_LINE, EVERY_LINE])
    gateway = Gateway(world)
    gateway.gate.running = 1  # a line of another batch
    life = asyncio.create_task(gateway.lives())
    async with asyncio.timeout(WITHIN):
        while gateway.gate.admits(object(), alone=False):  # noqa: ASYNC110  # until nothing else may begin
            await asyncio.sleep(0)
    assert world.job.status == "validating"
    gateway.gate.running = 0
    await life
    assert world.job.status == "finalizing"
    assert len(world.results) == 3
    assert world.job.lost == []


async def test_each_of_several_is_found() -> None:
    world = World(40, [3, 5, 30])
    await gateways(world)
    assert sorted(world.failed()) == [3, 5, 30]
    assert sorted(result.line for result in world.results) == list(range(1, 41))


async def test_without_a_loss_lines_run_together_and_few_writings_are_needed() -> None:
    world = World(64)
    [gateway] = await gateways(world)
    assert max(map(len, gateway.together)) > 1
    assert gateway.lease.writes <= 64 // AHEAD + 2


async def test_a_gateway_that_hands_its_batch_back_is_not_lost() -> None:
    world = World(8)
    world.job = states.announced(world.job, 8)
    world.job = states.handed_back(world.job)
    assert states.taken_over(world.job) == world.job
    assert states.losses(world.job, 1) == 0


@given(st.lists(st.integers(0, 100), max_size=8), st.integers(1, 100))
def test_a_line_has_as_many_losses_as_gateways_that_had_got_so_far(marks: list[int], line: int) -> None:
    job = job_of(100)
    for mark in marks:
        job = states.taken_over(states.announced(job, mark))
        assert job.begun == 0
    assert len(job.lost) <= states.ALONE + 1
    lost = sum(mark >= line for mark in marks)
    assert states.losses(job, line) == min(lost, states.ALONE + 1)


def test_a_line_that_is_to_be_alone_waits_for_the_others_and_they_for_it() -> None:
    gate, one, two, three = LineGate(), object(), object(), object()
    assert gate.admits(one, alone=False)
    gate.running = 1
    assert not gate.admits(two, alone=True)
    assert not gate.admits(one, alone=False)
    assert not gate.admits(three, alone=True)
    gate.running = 0
    assert not gate.admits(three, alone=True)
    assert gate.admits(two, alone=True)
    gate.leave(three)
    assert not gate.admits(one, alone=False)
    gate.leave(two)
    assert gate.admits(one, alone=False)
