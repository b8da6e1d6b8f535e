"""`python -m tests.monitoring > docs/metrics.md`"""

from tests.monitoring.page import page

print(page(), end="")  # noqa: T201  # what it is for
