"""Within a process the loop keeps asyncio's order, whatever other processes do; cancelled timers do not pile up."""

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.core.loop import SimulatedLoop
from tests.simulation.core.processes import OUTSIDE, Host, Process

DELAYS = st.sampled_from([None, -1.0, 0.0, 0.5, 0.5, 1.0, 2.0])  # None: soon, and not by a timer
PLANS = st.lists(st.lists(st.tuples(DELAYS, st.booleans()), max_size=12), min_size=1, max_size=4)


@pytest.fixture
def loop() -> Any:
    OUTSIDE.forget()
    loop = SimulatedLoop(random.Random(1))
    yield loop
    loop.close()
    OUTSIDE.forget()


def new_loop(seed: int) -> SimulatedLoop:
    OUTSIDE.forget()
    return SimulatedLoop(random.Random(seed))


@given(PLANS, st.integers(0, 1000))
def test_each_process_keeps_its_order(plans: list[list[tuple[float | None, bool]]], seed: int) -> None:
    loop = new_loop(seed)
    ran: list[tuple[int, int, float]] = []
    due: list[tuple[int, int, float]] = []
    for who, plan in enumerate(plans):
        context = Process(str(who), Host("h")).context()
        for number, (delay, cancelled) in enumerate(plan):
            at = max(0.0, delay or 0.0)
            if delay is None:
                handle = loop.call_soon(lambda *one: ran.append((*one, loop.time())), who, number, context=context)
            else:
                handle = loop.call_later(
                    delay, lambda *one: ran.append((*one, loop.time())), who, number, context=context
                )
            if cancelled:
                handle.cancel()
            else:
                due.append((who, number, at))
    loop.run_until_complete(_sleep(5))
    loop.close()
    assert sorted(ran) == sorted(due)
    assert [at for _, _, at in ran] == sorted(at for _, _, at in ran)
    for who, plan in enumerate(plans):
        own = [number for process, number, _ in ran if process == who]
        assert own == sorted(own, key=lambda number: _place(plan[number][0], number))


def _place(delay: float | None, number: int) -> tuple[float, bool, float, int]:
    """What is to run soon runs before timers of the same moment; timers in the order of their times."""
    return max(0.0, delay or 0.0), delay is not None, delay or 0.0, number


async def _sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


def test_processes_take_turns_as_the_seed_says() -> None:
    def order(seed: int) -> list[int]:
        loop, ran = new_loop(seed), []
        for who in range(6):
            loop.call_soon(ran.append, who, context=Process(str(who), Host("h")).context())
        loop.run_until_complete(_sleep(1))
        loop.close()
        return ran

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(20)}) > 10


def test_cancelled_timers_do_not_pile_up(loop: SimulatedLoop) -> None:
    kept = loop.call_later(5, lambda: None)
    for _ in range(1000):
        loop.call_later(1000, lambda: None).cancel()
    assert len(loop._timers) < 250
    assert any(entry[2] is kept for entry in loop._timers)
    loop.run_until_complete(_sleep(10))
    assert loop.time() == 10


def test_a_timer_may_be_cancelled_at_the_moment_of_its_time(loop: SimulatedLoop) -> None:
    ran: list[str] = []
    loop.call_later(1, lambda: second.cancel())
    second = loop.call_later(1, ran.append, "second")
    loop.run_until_complete(_sleep(2))
    assert ran == []
    second.cancel()


def test_tasks_are_hashed_by_number(loop: SimulatedLoop) -> None:
    async def main() -> list[int]:
        tasks = [asyncio.create_task(_sleep(1)) for _ in range(3)]
        await asyncio.wait(tasks)
        return [hash(task) for task in tasks]

    first, second, third = loop.run_until_complete(main())
    assert first < second < third < 100
