"""Work in the background: task sets and pauses before restarts."""

import asyncio
import random

from structlog.testing import capture_logs

from shared.tasks import Backoff, TaskSet, Watchdog, Watched
from tests.simulation.core.loop import SimulatedLoop
from tests.simulation.core.processes import OUTSIDE


async def test_an_error_in_the_background_is_told_and_the_others_go_on() -> None:
    told: list[BaseException] = []
    failed, gate = asyncio.Event(), asyncio.Event()

    def on_failure(error: BaseException) -> None:
        told.append(error)
        failed.set()

    tasks = TaskSet("work_failed", on_failure=on_failure)

    async def fail() -> None:
        raise ValueError("wrong")

    tasks.spawn(fail())
    waiting = tasks.spawn(gate.wait())
    with capture_logs() as lines:
        await failed.wait()
    assert [(line["event"], line["error"]) for line in lines] == [("work_failed", "wrong")]
    assert [str(error) for error in told] == ["wrong"]
    assert not waiting.done()
    gate.set()
    await tasks.finished()
    assert waiting.result() is True


async def test_cancelled_work_ends_even_if_it_swallows_the_first_cancellation() -> None:
    tasks = TaskSet()
    swallowed = []

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            swallowed.append(True)
        await asyncio.Event().wait()

    task = tasks.spawn(stubborn())
    await asyncio.sleep(0)
    await tasks.cancel()
    assert task.cancelled()
    assert swallowed
    assert len(tasks) == 0


def test_pauses_grow_until_something_has_lived_for_a_while() -> None:
    pauses = Backoff()
    now, waits = 0.0, []
    for lived in (0.0, 1.0, 1.0, 100.0, 1.0):
        pauses.began(now)
        now += lived
        waits.append(pauses.next(now))
    assert waits == [0.2, 0.4, 0.8, 0.2, 0.4]
    assert [pauses.next(now) for _ in range(8)][-1] == 10.0, "while it cannot be started at all"


def test_what_shows_no_sign_of_life_is_told_once_its_time_is_up() -> None:
    OUTSIDE.forget()
    loop = SimulatedLoop(random.Random(1))
    told: list[tuple[str, float]] = []

    async def main() -> None:
        begun, watchdog = loop.time(), Watchdog()

        def watch(name: str, patience: float) -> Watched:
            return watchdog.watch(lambda: told.append((name, loop.time() - begun)), patience)

        living, _, forgotten = watch("living", 5.0), watch("silent", 8.0), watch("forgotten", 1.0)
        watch("impatient", 2.0)
        watchdog.forget(forgotten)
        for _ in range(4):
            await asyncio.sleep(3.0)
            living.seen = loop.time()
        await asyncio.sleep(60.0)
        watchdog.forget(living)
        assert watchdog._timer is None

    loop.run_until_complete(main())
    loop.close()
    OUTSIDE.forget()
    assert told == [("impatient", 2.0), ("silent", 8.0), ("living", 17.0)]
