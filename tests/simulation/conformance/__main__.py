"""Runs the scripts against nats-server and the model: `python -m tests.simulation.conformance [NAME...]`.

Prints where they differ. A name is any part of a script's. `--drawn 500 --seed 7` draws scripts instead, of the
families that are named. `--twice` takes two nats-servers, which shows what cannot be compared; `--show` prints what
nats-server does.
"""

import argparse
import asyncio
import itertools
import logging
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import hypothesis
import structlog
from hypothesis import strategies as st

from tests.simulation.conformance import drawn
from tests.simulation.conformance.operations import Script
from tests.simulation.conformance.runner import Difference, Run, compare
from tests.simulation.conformance.scripts import CORPUS
from tests.simulation.conformance.servers import Model, NatsServer, Server


@asynccontextmanager
async def both(
    directory: Path, *, room: int = 0, users: bool = False, twice: bool = False
) -> AsyncIterator[tuple[Server, Server]]:
    """nats-server, and what is held against it."""
    other: Callable[..., Server] = NatsServer if twice else Model
    pair = (NatsServer(directory / "real", room=room, users=users), other(directory / "other", room=room, users=users))
    for server in pair:
        await server.start()
    try:
        yield pair
    finally:
        for server in pair:
            await server.stop()


async def run_corpus(scripts: Iterable[Script], *, twice: bool, show: bool) -> int:
    """The number of scripts that differ."""
    differ = 0
    for (room, users), group in itertools.groupby(scripts, key=lambda script: (script.room, script.users)):
        with tempfile.TemporaryDirectory(prefix="conformance-") as directory:
            async with both(Path(directory), room=room, users=users, twice=twice) as (real, other):
                for script in group:
                    began = time.perf_counter()
                    if show:
                        outcomes = await Run(real, users=users).script(script)
                        for step, outcome in zip(script.steps, outcomes, strict=True):
                            print(f"    {step}\n        {outcome}")
                    found = await compare(script, real, other)
                    differ += found is not None
                    print(found or f"same: {script.name} ({time.perf_counter() - began:.1f} s)", flush=True)
    return differ


class Differs(AssertionError):
    """What hypothesis reduces."""


def run_drawn(
    runner: asyncio.Runner,
    pair: tuple[Server, Server],
    family: st.SearchStrategy[Script],
    number: int,
    seed: int | None = None,
) -> None:
    """Raises `Differs` with the shortest script that was found to differ. `seed`: None for the same ones each time."""

    def check(script: Script) -> None:
        found: Difference | None = runner.run(compare(script, *pair))
        if found is not None:
            raise Differs(str(found))

    settings = hypothesis.settings(
        max_examples=number,
        deadline=None,
        database=None,
        derandomize=seed is None,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    test = settings(hypothesis.given(family)(check))
    (test if seed is None else hypothesis.seed(seed)(test))()


def draw_all(names: list[str], number: int, seed: int, *, twice: bool) -> int:
    """The number of families in which a difference was found."""
    differ = 0
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory(prefix="conformance-") as directory:
        servers = both(Path(directory), twice=twice)
        pair = runner.run(servers.__aenter__())
        try:
            for name in names or drawn.FAMILIES:
                began = time.perf_counter()
                try:
                    run_drawn(runner, pair, drawn.FAMILIES[name](), number, seed)
                    print(f"same: {number} drawn {name} ({time.perf_counter() - began:.1f} s)", flush=True)
                except Differs as error:
                    differ += 1
                    print(error, flush=True)
        finally:
            runner.run(servers.__aexit__(None, None, None))
    return differ


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.conformance")
    parser.add_argument("names", nargs="*", help="parts of scripts' names; families of drawn ones")
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help="draw N scripts of each family")
    parser.add_argument("--seed", type=int, default=0, help="from which they are drawn")
    parser.add_argument("--twice", action="store_true", help="two nats-servers instead of the model")
    parser.add_argument("--show", action="store_true", help="print what nats-server does")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if args.drawn:
        if unknown := sorted(set(args.names) - set(drawn.FAMILIES)):
            parser.error(f"there is no family {', '.join(unknown)}; there are {', '.join(drawn.FAMILIES)}")
        return min(1, draw_all(args.names, args.drawn, args.seed, twice=args.twice))
    scripts = [one for one in CORPUS if not args.names or any(name in one.name for name in args.names)]
    return min(1, asyncio.run(run_corpus(scripts, twice=args.twice, show=args.show)))


if __name__ == "__main__":
    sys.exit(main())
