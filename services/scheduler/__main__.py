"""`python -m services.scheduler`: one scheduler process."""

import shared.lean_imports  # noqa: F401  # isort: skip  # before all others
from services.scheduler.service import SchedulerService
from services.scheduler.settings import SchedulerSettings
from shared.service import lifecycle

if __name__ == "__main__":
    raise SystemExit(lifecycle.main(SchedulerService, SchedulerSettings, "ryzanstein serve scheduler"))
