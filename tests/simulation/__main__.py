"""Simulates the control plane, searches for seeds that break a promise, and makes them short.

python -m tests.simulation COMMAND:

run       --scenario X --seed N [--schedule FILE] [--story]
search    --scenario X [--scenario Y] --seeds 1000 [--first N] [--jobs J] [--minutes M] [--coverage]
reduce    --scenario X --seed N [--runs R] [--out FILE]
list      scenarios, faults, bugs that can be put back
"""

import sys

from tests.simulation.search import command, runner

if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        runner.work(sys.argv[2])
    else:
        sys.exit(command.main(sys.argv[1:]))
