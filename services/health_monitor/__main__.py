"""`python -m services.health_monitor`: one health monitor process."""

import shared.lean_imports  # noqa: F401  # isort: skip  # before all others
from services.health_monitor.service import HealthMonitorService, HealthMonitorSettings
from shared.service import lifecycle

if __name__ == "__main__":
    raise SystemExit(lifecycle.main(HealthMonitorService, HealthMonitorSettings, "ryzanstein serve health-monitor"))
