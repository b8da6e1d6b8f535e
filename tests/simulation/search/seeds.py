"""Many seeds of a scenario, some at a time, until one has said enough."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from tests.simulation.faults.schedule import Schedule
from tests.simulation.scenarios.drawing import draw
from tests.simulation.scenarios.scenario import Scenario
from tests.simulation.search.runner import Order, RunFailed, Worker
from tests.simulation.systems.outcome import Broken, Outcome

MOST_JOBS = 256


def outcomes(
    scenario: Scenario,
    seeds: Iterable[int],
    *,
    jobs: int = 1,
    minutes: float = 0.0,
    timeout: float = 600.0,
    change: Callable[[Schedule], Schedule] = lambda schedule: schedule,
) -> Iterator[Outcome]:
    """In the order in which they end. `minutes`: after so many no run is begun; 0: all seeds. `timeout`: real seconds
    of a run. `change`: what is done to each drawn schedule."""
    until = time.monotonic() + minutes * 60 if minutes else float("inf")
    waiting, found = iter(seeds), queue.SimpleQueue[Outcome | None]()
    lock, stopped = threading.Lock(), threading.Event()

    def work(worker: Worker) -> None:
        with worker:
            while not stopped.is_set() and time.monotonic() < until:
                with lock:
                    seed = next(waiting, None)
                if seed is None:
                    break
                found.put(one(worker, scenario, change(draw(scenario, seed))))
        found.put(None)

    workers = [Worker(timeout) for _ in range(jobs)]
    threads = [threading.Thread(target=work, args=[worker], daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        running = jobs
        while running:
            outcome = found.get()
            if outcome is None:
                running -= 1
            else:
                yield outcome
    finally:
        stopped.set()
        for worker in workers:
            worker.kill()
        for thread in threads:
            thread.join()


def one(worker: Worker, scenario: Scenario, schedule: Schedule, story: str = "") -> Outcome:
    """A run that breaks its process breaks a promise too."""
    try:
        return worker.run(Order(scenario, schedule, story))
    except RunFailed as failed:
        return Outcome(schedule, "", 0.0, 0.0, [Broken("no_error", str(failed))])
