"""An executor that waits to be told what it is, and then says it: `python -m` with the name of this module."""

import json
import os
import sys

from services.executor.supervisor.early_fork_server import take_arguments

if __name__ == "__main__":
    take_arguments()
    said = [sys.argv[1:], os.environ["TOLD"], os.environ["RYZANSTEIN_INSTANCE"], sys.stdin.read()]
    print(json.dumps(said))  # noqa: T201
