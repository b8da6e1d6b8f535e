"""Imported before all others by a service: has structlog do without rich and Pygments, which it would import for
tracebacks in colours. That is a fifth of what a service's imports take, and 4 MB of each process."""

import sys

if "structlog" not in sys.modules and "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]  # makes importing it an ImportError
    try:
        import structlog  # noqa: F401  # for what it does without
    finally:
        del sys.modules["rich"]
