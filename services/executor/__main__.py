"""`python -m services.executor`: one executor, as a process; or a host of its ring.

With the argument `-` it does its imports, and then takes what it is to be from standard input (`take_arguments`).
`ryzanstein up` starts one so before it knows that (`services/cli/supervision/early_executor.py`).
"""

import sys

from services.executor.supervisor.ranks.early_fork_server import WAITING, start_early, take_arguments

if __name__ == "__main__":
    start_early(sys.argv[1:])  # before the imports below, which run beside its own

import shared.lean_imports  # noqa: F401  # isort: skip  # before all others
from services.executor.core.settings import ExecutorSettings
from services.executor.supervisor.multinode.node import RingNode
from services.executor.supervisor.service import ExecutorService
from shared.models import here
from shared.service import lifecycle


def make(settings: ExecutorSettings) -> ExecutorService | RingNode:
    """Host 0 speaks for the ring."""
    named = {"model": here(settings.model), "draft_model": here(settings.draft_model)}
    settings = settings.model_copy(update=named)
    return RingNode(settings) if settings.node_rank else ExecutorService(settings)


if __name__ == "__main__":
    if sys.argv[1:] == WAITING:
        take_arguments()
    raise SystemExit(lifecycle.main(make, ExecutorService.settings_type(), "ryzanstein serve executor"))
