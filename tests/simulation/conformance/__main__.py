"""Runs the scripts against nats-server and the model: `python -m tests.simulation.conformance [NAME...]`.

Prints where they differ. A name is any part of a script's. `--twice` runs them against two nats-servers instead, which
shows what cannot be compared; `--show` prints the outcomes of nats-server.
"""

import argparse
import asyncio
import itertools
import logging
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from tests.simulation.conformance.operations import Script
from tests.simulation.conformance.runner import Run, compare
from tests.simulation.conformance.scripts import CORPUS
from tests.simulation.conformance.servers import NatsServer, Server, model


@asynccontextmanager
async def both(directory: Path, script: Script, twice: bool) -> AsyncIterator[tuple[Server, Server]]:
    """Servers as `script` wants them."""
    other = NatsServer if twice else model
    pair = (
        NatsServer(directory / "real", room=script.room),
        other(directory / "other", room=script.room),
    )
    for server in pair:
        await server.start()
    try:
        yield pair
    finally:
        for server in pair:
            await server.stop()


async def run(scripts: Iterable[Script], *, twice: bool, show: bool) -> int:
    """The number of scripts that differ."""
    differ = 0
    for room, group in itertools.groupby(scripts, key=lambda script: script.room):
        chosen = list(group)
        with tempfile.TemporaryDirectory(prefix=f"conformance-{room}-") as directory:
            async with both(Path(directory), chosen[0], twice) as (real, other):
                for script in chosen:
                    began = time.perf_counter()
                    if show:
                        for step, outcome in zip(script.steps, await Run(real).script(script), strict=True):
                            print(f"    {step}\n        {outcome}")
                    found = await compare(script, real, other)
                    differ += found is not None
                    print(found or f"same: {script.name} ({time.perf_counter() - began:.1f} s)", flush=True)
    return differ


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.conformance")
    parser.add_argument("names", nargs="*", help="parts of scripts' names")
    parser.add_argument("--twice", action="store_true", help="two nats-servers instead of the model")
    parser.add_argument("--show", action="store_true", help="print what nats-server does")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    scripts = [one for one in CORPUS if not args.names or any(name in one.name for name in args.names)]
    return min(1, asyncio.run(run(scripts, twice=args.twice, show=args.show)))


if __name__ == "__main__":
    sys.exit(main())
