"""Tables that are made of the code: the site shows one where a page says `<!-- table: NAME -->` (docs/hooks.py)."""

import re
from collections.abc import Callable

from tests.alerts import page as alerts
from tests.docs import configuration, engines, folders, limits, models, rules, tools
from tests.monitoring import page as metrics

TABLES: dict[str, Callable[[], str]] = {
    "settings": configuration.tables,
    "metrics": metrics.tables,
    "architectures": models.served,
    "encoders": models.encoders,
    "refused": models.refused,
    "gguf": models.gguf_architectures,
    "limits": limits.table,
    "rules": rules.table,
    "tools": tools.table,
    "engines": engines.table,
    "alerts": alerts.alerts_table,
    "runbooks": alerts.index_table,
    "folders": folders.table,
    "decisions": folders.decisions,
}
MARK = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)


def with_tables(page: str) -> str:
    """The page with each table in the place of its mark."""
    return MARK.sub(lambda mark: TABLES[mark[1]](), page)
