"""A house under a real Prometheus with our rules: what is broken must be alerted, what is busy must not."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.alerts import rules
from tests.alerts.prometheus import Prometheus, Target
from tests.chaos.cluster_fixture import House
from tests.chaos.load import PAUSE
from tests.monitoring.dashboards import scrape_interval

# Times by which windows and `for` are shorter than an operator's, so that 5 min are 25 s. Measured with the true
# ones: `python -m tests.chaos.alert_delays`.
FACTOR = 12.0
OWN_FACTORS = {
    "RyzansteinBatchesStuck": 60.0,  # it looks back for many minutes
    "RyzansteinRecoveryStorm": 4.0,  # a group that says nothing is gone after 4 s
    # A request that NATS does not store is refused after 5 s: windows must be longer than that.
    "ryzanstein:requests:rate30s": 3.0,
    "ryzanstein:requests_failed:rate30s": 3.0,
    "RyzansteinRequestsFailing": 3.0,
}
SCRAPE = scrape_interval()
LIMIT = 90.0  # seconds after which an alert that has not come will not come


@dataclass
class Targets:
    """The house's processes as Prometheus would find them: those that are away stay on the list."""

    house: House
    scheme: str = "http"

    def __post_init__(self) -> None:
        self._known: dict[str, Target] = {}

    def __call__(self) -> Iterator[Target]:
        for name, member in self.house.members.items():
            beat = self.house.watch.beats.get(name)
            if beat is not None and beat.address:
                job = f"ryzanstein-{member.service}"
                scheme = self.scheme if member.service == "gateway" else "http"
                self._known[name] = Target(job, name, member.link.reach(beat.address), scheme)
        yield from self._known.values()


def watched(house: House, directory: Path, *, factor: float = FACTOR, scheme: str = "http") -> Prometheus:
    """A Prometheus for `house`, with rules and scrapes `factor` times as fast as an operator's."""
    fast = rules.scaled(rules.load(), factor, OWN_FACTORS if factor > 1 else {})
    return Prometheus(directory, fast, Targets(house, scheme), interval=SCRAPE / factor)


async def fires(prometheus: Prometheus, name: str, seconds: float = LIMIT, **labels: str) -> dict[str, Any]:
    """Waits for an alert; it must have these labels, and say everything that it has to say."""
    alert = await prometheus.until_firing(name, seconds)
    assert labels.items() <= alert["labels"].items(), alert
    said = " ".join(alert["annotations"].values())
    assert "<no value>" not in said, said
    assert "<error" not in said, said
    return alert


async def kill(house: House, *instances: str) -> None:
    """Without a goodbye, ring and all."""
    for name in instances:
        member = house.members[name]
        ranks = house.ranks(name) if member.service == "executor" else []
        for pid in (member.pid, *ranks):
            signal_if_there(pid, signal.SIGKILL)
        await member.ended()


def signal_if_there(pid: int, number: signal.Signals) -> None:

    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


async def start(house: House, *instances: str) -> None:
    """Again, as a supervisor would."""
    for name in instances:
        await house.start(name)
    for name in instances:
        await house.ready(name)


async def hang(house: House, executor: str) -> None:
    """Stops a ring in the middle of a step. Between two steps a standstill is seen by its executor alone."""
    while True:
        await house.watch.until(lambda: house.work(executor) > 0, 60, f"{executor} has work")
        signal_ranks(house, executor, signal.SIGSTOP)
        for _ in range(2):  # the first beat may be from before
            last = house.watch.beats[executor]
            await house.watch.until(lambda seen=last: house.watch.beats[executor] is not seen, 30, "it beats")
        said = house.watch.beats[executor].group
        if said is not None and said.ranks[0].in_flight and said.load.running:
            return
        signal_ranks(house, executor, signal.SIGCONT)


def signal_ranks(house: House, executor: str, number: signal.Signals) -> None:
    for pid in house.ranks(executor):
        signal_if_there(pid, number)


@contextlib.asynccontextmanager
async def askers(house: House, clients: int = 8) -> AsyncIterator[None]:
    """Clients that ask again and again, whatever the answer: those of `Load` may all wait for one that is under way."""
    stopping = False

    async def ask(number: int) -> None:
        body = {"model": "stub", "prompt": f"Client {number}", "max_tokens": 4}
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            while not stopping:
                for _, address in house.addresses():
                    with contextlib.suppress(httpx.TransportError):
                        await http.post(f"http://{address}/v1/completions", json=body)
                await asyncio.sleep(PAUSE)

    async with asyncio.TaskGroup() as tasks:
        for number in range(clients):
            tasks.create_task(ask(number))
        try:
            yield
        finally:
            stopping = True
