"""How soon a fault is alerted, and how many alarms are false: `python -m tests.chaos.alert_delays [--only NATS]`.

A house of two of everything under load, a real Prometheus that scrapes as often as monitoring/prometheus.yml says, and
our rules with their true durations. Faults that somebody must be called for, and between them what repairs itself and
must call nobody. An alarm is false when what it says of the house was not so: it was neither expected of the fault nor
is a consequence of it. Takes a quarter of an hour; prints what docs/alerts.md has.
"""

import argparse
import asyncio
import random
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path

from tests.alerts.prometheus import Prometheus
from tests.chaos.alerting import askers, fires, hang, kill, signal_if_there, signal_ranks, start, watched
from tests.chaos.cluster_fixture import House, Plan
from tests.chaos.expected import stub_tasks
from tests.chaos.load import Load

LIMIT = 180.0
QUIET = 75.0  # seconds after a harmless event: a page waits for a minute at most
# A service that does not reach NATS is not ready.
NOT_READY = [f"Ryzanstein{what}" for what in ("NoGateway", "NoScheduler", "NoHealthMonitor", "InstanceDown")]
# What is true as well while there is no such service.
UNSEEN = {
    "gateway": [],
    "scheduler": ["RyzansteinRequestsFailing", "RyzansteinErrorBudgetBurn", "RyzansteinFirstTokenBudgetBurn"],
    "health-monitor": [],
}
HUNG = ("--engine", "stub", "--served-model-name", "stub", "--stub-step-ms", "20", "--hung-after", "3600")

Act = Callable[[], Awaitable[object]]


class Delays:
    """Rows of the table, and every alarm there was."""

    def __init__(self, prometheus: Prometheus, only: str) -> None:
        """`only`: faults with this in their name."""
        self._prometheus = prometheus
        self._only = only
        self.rows: list[tuple[str, str, float]] = []
        self.alarms = 0
        self.false: list[tuple[str, str]] = []

    async def harmless(self, event: str, happen: Act) -> None:
        """What must call nobody, now or within `QUIET`."""
        if self._only in event:
            at = time.monotonic()
            await happen()
            await asyncio.sleep(QUIET)
            await self._count(event, at, set())

    async def measure(self, fault: str, inject: Act, heal: Act, *alerts: str, consequences: Sequence[str] = ()) -> None:
        """`alerts` are those that must come; then everything is healed, and they must be over. `consequences` may
        come, since they are true."""
        if self._only not in fault:
            return
        at = time.monotonic()
        await inject()

        async def wait(alert: str) -> None:
            await fires(self._prometheus, alert, LIMIT)
            self.rows.append((fault, alert, time.monotonic() - at))
            print(f"{fault}: {alert} after {time.monotonic() - at:.0f} s", flush=True)

        await asyncio.gather(*map(wait, alerts))
        await heal()
        for alert in alerts:
            await self._prometheus.until_over(alert, 600)
        await self._prometheus.until(self._silence, 600, "no alert is left")
        await self._count(fault, at, {*alerts, *consequences})

    async def _silence(self) -> bool:
        return not await self._prometheus.firing()

    async def _count(self, event: str, since: float, true: Collection[str]) -> None:
        fired = await self._prometheus.fired_within(time.monotonic() - since)
        self.alarms += len(fired)
        self.false += [(event, alert) for alert in sorted(fired.difference(true))]
        print(f"{event}: fired {', '.join(sorted(fired)) or 'nothing'}", flush=True)


async def measure(directory: Path, only: str) -> Delays:
    plan = Plan(tp=1, executor_arguments=HUNG)
    chance = random.Random()
    async with (
        House(directory / "house", plan) as house,
        watched(house, directory / "prometheus", factor=1) as seen,
        Load(house.addresses, stub_tasks(chance, 120), clients=4, patience=600) as load,
    ):
        await load.flowing()
        delays = Delays(seen, only)
        await _harmless(house, delays)
        for service, name in (
            ("gateway", "RyzansteinNoGateway"),
            ("scheduler", "RyzansteinNoScheduler"),
            ("health-monitor", "RyzansteinNoHealthMonitor"),
        ):
            both = (f"{service}-0", f"{service}-1")
            await delays.measure(
                f"kill -9 of every {service.replace('-', ' ')}",
                lambda both=both: kill(house, *both),
                lambda both=both: start(house, *both),
                name,
                "RyzansteinInstanceDown",
                consequences=UNSEEN[service],
            )

        async def wake() -> None:
            signal_ranks(house, "executor-0", signal.SIGCONT)

        await house.watch.until(house.all_work, 60, "every ring has work")
        await delays.measure(
            "SIGSTOP of a ring whose executor leaves it alone",
            lambda: hang(house, "executor-0"),
            wake,
            "RyzansteinGroupHung",
            consequences=["RyzansteinBreakerOpen"],
        )
        executors = ("executor-0", "executor-1")
        await delays.measure(
            "kill -9 of every executor, ring and all",
            lambda: kill(house, *executors),
            lambda: start(house, *executors),
            "RyzansteinModelWithoutGroup",
            "RyzansteinGroupLost",
            consequences=["RyzansteinInstanceDown", "RyzansteinQueueLong", "RyzansteinFirstTokenBudgetBurn"],
        )
        async with askers(house):
            await delays.measure(
                "kill -9 of NATS",
                house.broker.kill,
                house.broker.up,
                "RyzansteinBrokerUnreachable",
                "RyzansteinRequestsFailing",
                "RyzansteinErrorBudgetBurn",
                consequences=NOT_READY,
            )
        return delays


async def _harmless(house: House, delays: Delays) -> None:
    async def again(*instances: str) -> None:
        await kill(house, *instances)
        await start(house, *instances)

    async def lose_a_rank() -> None:
        await house.watch.until(house.all_work, 60, "every ring has work")
        signal_if_there(house.ranks("executor-1")[0], signal.SIGKILL)

    async def restart_nats() -> None:
        await house.broker.kill()
        await house.broker.up()

    async def nothing() -> None:
        pass

    await delays.harmless("nothing but full load", nothing)
    for name in ("gateway-1", "scheduler-1", "health-monitor-1", "executor-1"):
        await delays.harmless(f"kill -9 and start of {name}", lambda name=name: again(name))
    await delays.harmless("kill -9 of a rank", lose_a_rank)
    await delays.harmless("kill -9 and start of NATS", restart_nats)


def main() -> None:
    parser = argparse.ArgumentParser(description="How long after a fault its alert fires.")
    parser.add_argument("--only", default="", help="faults with this in their name")
    directory = Path(tempfile.mkdtemp(prefix="ryzanstein-alerts-"))
    delays = asyncio.run(measure(directory, parser.parse_args().only))
    print("\n| fault | alert | fires after |\n| --- | --- | ---: |")
    for fault, alert, seconds in delays.rows:
        print(f"| {fault} | {alert} | {seconds:.0f} s |")
    print(f"\n{delays.alarms} alarms, {len(delays.false)} of them false")
    for event, alert in delays.false:
        print(f"  {event}: {alert}")


if __name__ == "__main__":
    main()
