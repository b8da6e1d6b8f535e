"""Mean time to recovery of what repairs itself: `python -m tests.chaos.recovery_times [--rounds 3]`.

Each fault several times under load, on a house of two of everything; a supervisor starts what has died as soon as its
death was told. Every token is checked as in the other tests. Prints a table for docs/reliability.md.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.chaos.cluster_fixture import House
from tests.chaos.exercise import Row, exercise
from tests.chaos.faults import all_faults
from tests.chaos.load import stub_load

FAULTS = ("kill-rank-0", "kill-ring", "stop-rank-0", "kill-gateway", "kill-scheduler", "kill-monitor", "kill-nats")


async def measure(rounds: int, directory: Path) -> dict[str, list[Row]]:
    """Rows by fault. Raises `AssertionError` for a token that was wrong or a request without an answer."""
    found: dict[str, list[Row]] = defaultdict(list)
    async with House(directory) as house:
        for _ in range(rounds):
            for name in FAULTS:
                fault = all_faults()[name]()
                load = stub_load(house.addresses, random.Random())
                async with load:
                    row = await exercise(house, fault, load)
                    await load.finish()
                load.check(may_refuse=fault.may_refuse)
                await house.all_ready()
                found[row.fault].append(row)
                print(f"{row.fault}: {row.whole:.2f} s", file=sys.stderr, flush=True)
    return found


def table(found: dict[str, list[Row]]) -> str:
    """Served: until the last stream that was hit went on. Whole: until every process was back."""
    lines = [
        "| fault | times | served again after (mean) | at most | recovered after (mean) | at most |",
        "| --- " + "| ---: " * 5 + "|",
    ]
    every = [row for rows in found.values() for row in rows]
    for name, rows in [*found.items(), ("**all**", every)]:
        served, whole = [row.streaming for row in rows], [row.whole for row in rows]
        lines.append(
            f"| {name} | {len(rows)} | {statistics.mean(served):.2f} s | {max(served):.2f} s | "
            f"{statistics.mean(whole):.2f} s | {max(whole):.2f} s |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Mean time to recovery of what repairs itself.")
    parser.add_argument("--rounds", type=int, default=3, help="times that each fault comes (default: 3)")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="ryzanstein-recovery-"))
    print(table(asyncio.run(measure(arguments.rounds, directory))))


if __name__ == "__main__":
    main()
