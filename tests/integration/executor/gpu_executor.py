"""An executor whose ranks are `gpu_rank`s: `python -m tests.integration.executor.gpu_executor`."""

from services.executor.__main__ import make
from services.executor.core.settings import ExecutorSettings
from services.executor.supervisor.ranks import rank_process
from shared.service import lifecycle

if __name__ == "__main__":
    rank_process.RANK_MODULE = "tests.integration.executor.gpu_rank"
    raise SystemExit(lifecycle.main(make, ExecutorSettings, "gpu_executor"))
