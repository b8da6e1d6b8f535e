"""`python -m services.executor`: one executor, as a process."""

from services.executor.orchestrator import ExecutorService
from services.executor.settings import ExecutorSettings
from shared import lifecycle

if __name__ == "__main__":
    raise SystemExit(lifecycle.main(ExecutorService, ExecutorSettings, "ryzanstein serve executor"))
