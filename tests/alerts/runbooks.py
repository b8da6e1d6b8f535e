"""The runbooks as data: what they have a reader run, and what they ask Prometheus.

The word after the fence's language says where a block belongs: none, `drains` (a group leaves) and `keys` (from
then on a key is needed) are run by a test; `kubernetes` and `compose` need these.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.alerts.rules import MONITORING

RUNBOOKS = MONITORING.parent / "docs" / "runbooks"
RUN = ("", "drains", "keys")  # kinds of blocks that are run, in this order
NOT_RUN = ("kubernetes", "compose")

_FENCE = re.compile(r"^```(\w+) ?(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a runbook."""

    runbook: str
    language: str
    kind: str
    lines: tuple[str, ...]


def blocks() -> Iterator[Block]:
    for path in sorted(RUNBOOKS.glob("ryzanstein-*.md")):
        for language, kind, text in _FENCE.findall(path.read_text()):
            yield Block(path.stem, language, kind, tuple(text.splitlines()))


def commands(kind: str) -> dict[str, str]:
    """Each command once, without its comment, and the first runbook that has it."""
    found: dict[str, str] = {}
    for block in blocks():
        if (block.language, block.kind) == ("sh", kind):
            for line in block.lines:
                found.setdefault(re.sub(r"\s+# .*$", "", line), block.runbook)
    return found


def queries() -> dict[str, str]:
    """Each query once, and the first runbook that has it."""
    found: dict[str, str] = {}
    for block in blocks():
        if block.language == "promql":
            for line in block.lines:
                found.setdefault(line, block.runbook)
    return found
