"""How long after a fault its alert fires, with the true durations: `python -m tests.chaos.alert_delays [--only NATS]`.

A house of two of everything under load, a real Prometheus that scrapes every 5 s as monitoring/prometheus.yml says,
and our rules as they stand. Takes ten minutes or so; prints a table for docs/alerts.md.
"""

import argparse
import asyncio
import random
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.alerts.prometheus import Prometheus
from tests.chaos.alerting import askers, fires, hang, kill, signal_ranks, start, watched
from tests.chaos.expected import stub_tasks
from tests.chaos.house import House, Plan
from tests.chaos.load import Load

LIMIT = 180.0
HUNG = ("--engine", "stub", "--served-model-name", "stub", "--stub-step-ms", "20", "--hung-after", "3600")

Act = Callable[[], Awaitable[object]]


class Delays:
    """Rows of the table."""

    def __init__(self, prometheus: Prometheus, only: str) -> None:
        """`only`: faults with this in their name."""
        self._prometheus = prometheus
        self._only = only
        self.rows: list[tuple[str, str, float]] = []

    async def measure(self, fault: str, inject: Act, heal: Act, *alerts: str) -> None:
        """`alerts` are those that must come; then everything is healed, and they must be over."""
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


async def measure(directory: Path, only: str) -> list[tuple[str, str, float]]:
    plan = Plan(tp=1, executor_arguments=HUNG)
    chance = random.Random()
    async with (
        House(directory / "house", plan) as house,
        watched(house, directory / "prometheus", factor=1) as seen,
        Load(house.addresses, stub_tasks(chance, 120), clients=4, patience=600) as load,
    ):
        await load.flowing()
        delays = Delays(seen, only)
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
            )

        async def wake() -> None:
            signal_ranks(house, "executor-0", signal.SIGCONT)

        await house.watch.until(house.all_work, 60, "every ring has work")
        await delays.measure(
            "SIGSTOP of a ring whose executor leaves it alone",
            lambda: hang(house, "executor-0"),
            wake,
            "RyzansteinGroupHung",
        )
        executors = ("executor-0", "executor-1")
        await delays.measure(
            "kill -9 of every executor, ring and all",
            lambda: kill(house, *executors),
            lambda: start(house, *executors),
            "RyzansteinModelWithoutGroup",
            "RyzansteinGroupLost",
        )
        async with askers(house):
            await delays.measure(
                "kill -9 of NATS",
                house.broker.kill,
                house.broker.up,
                "RyzansteinBrokerUnreachable",
                "RyzansteinRequestsFailing",
                "RyzansteinErrorBudgetBurn",
            )
        return delays.rows


def main() -> None:
    parser = argparse.ArgumentParser(description="How long after a fault its alert fires.")
    parser.add_argument("--only", default="", help="faults with this in their name")
    directory = Path(tempfile.mkdtemp(prefix="ryzanstein-alerts-"))
    rows = asyncio.run(measure(directory, parser.parse_args().only))
    print("\n| fault | alert | fires after |\n| --- | --- | ---: |")
    for fault, alert, seconds in rows:
        print(f"| {fault} | {alert} | {seconds:.0f} s |")


if __name__ == "__main__":
    main()
