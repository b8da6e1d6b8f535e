"""Random faults at random times under load: `python -m tests.chaos.soak --minutes 10 [--seed 7]`.

The seed decides which faults come and when; a run that fails prints it with the schedule up to there.
Exits with 0 when every token of every request was the right one.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.cluster_fixture import House, Plan
from tests.chaos.exercise import Row, markdown, row_of, struck
from tests.chaos.faults import CUTTABLE, all_faults
from tests.chaos.load import Load, stub_load
from tests.chaos.schedule import Strike, rounds


class Soak:
    """One run. `schedule` says what has been done."""

    def __init__(self, house: House, load: Load, began: float) -> None:
        self._house = house
        self._load = load
        self._began = began
        self.schedule: list[str] = []
        self.rows: list[Row] = []

    async def run(self, plan: Iterator[list[Strike]], seconds: float) -> None:
        while time.monotonic() - self._began < seconds:
            strikes = next(plan)
            await asyncio.gather(*map(self._strike, strikes))
            await self._house.all_ready()
            await self._load.settled(time.monotonic())
            faults = [record.fault for record in self._load.records if record.fault]
            assert not faults, faults[0]

    async def _strike(self, strike: Strike) -> None:
        await asyncio.sleep(strike.after)
        fault = all_faults(strike.number)[strike.fault]()
        self.schedule.append(f"{time.monotonic() - self._began:7.2f} s  {strike.fault} of {fault.target}")
        times = await struck(self._house, fault)
        self.rows.append(row_of(fault.name, self._load.records, self._house.watch.moved, *times))


def worst(rows: list[Row]) -> list[Row]:
    """Of each fault the one with the longest wait."""
    found: dict[str, Row] = {}
    for row in rows:
        if row.fault not in found or row.stall > found[row.fault].stall:
            found[row.fault] = row
    return list(found.values())


async def soak(seed: int, minutes: float, directory: Path) -> None:
    """Raises `AssertionError`, whose text has what is needed to repeat the run."""
    async with House(directory, Plan(cuttable=CUTTABLE)) as house:
        load = stub_load(house.addresses, random.Random(seed))
        began = time.monotonic()
        run = Soak(house, load, began)
        try:
            async with load:
                await load.flowing()
                await run.run(rounds(seed), minutes * 60)
                await load.finish()
            load.check(may_refuse=True)
        except Exception as error:
            told = "\n".join(run.schedule)
            raise AssertionError(
                f"seed {seed} failed: {error}\nschedule:\n{told}\nlogs: {directory}\n{house.logs()}"
            ) from error
        print(f"The worst of each fault, links cut with: {house.cut_with}")
        print(markdown(worst(run.rows)))
        broken = sum(bool(record.broken) for record in load.records)
        print(
            f"seed {seed}: {len(run.rows)} faults, {len(load.records)} requests, "
            f"{sum(len(record.text) for record in load.records)} tokens, each the right one; "
            f"{broken} requests lost their connection and were answered elsewhere."
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Random faults at random times under load.")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default: 5)")
    parser.add_argument("--seed", type=int, help="which faults come when; made up when left out")
    arguments = parser.parse_args()
    seed = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="ryzanstein-chaos-"))
    try:
        asyncio.run(soak(seed, arguments.minutes, directory))
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
