"""`python -m services.gateway`: the gateway as a process."""

import shared.lean_imports  # noqa: F401  # isort: skip  # before all others
from services.gateway.service import GatewayService
from shared import process
from shared.service import lifecycle

if __name__ == "__main__":
    process.keep_little()
    raise SystemExit(lifecycle.main(GatewayService, GatewayService.settings_type(), "ryzanstein serve gateway"))
