"""Everything that only a GPU can say, in one call of less than ten minutes: `python -m benchmarks.gpu --help`.

Prints one table and writes JSON. What a machine lacks is said before anything that needs it is imported, so that a
machine without a network is told what to carry there.
"""

import sys

from benchmarks.on_gpu import wheels


def start() -> None:
    absent = wheels.missing(wheels.BASE) + wheels.missing(wheels.NEEDED)
    if absent:
        print(f"error: {wheels.sentence(absent)}", file=sys.stderr)
        raise SystemExit(2)
    from benchmarks.harness import run
    from benchmarks.on_gpu.command import main

    run(main)


if __name__ == "__main__":
    start()
