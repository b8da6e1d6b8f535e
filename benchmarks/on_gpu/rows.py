"""What a run has found: rows, by section. Plain JSON, so that a process that dies leaves what it had.

A section's process appends each row to a file of lines as soon as it is known; the parent reads them whether
the process ends, fails or is ended.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

FORMAT = 1
"""Of the JSON file."""
Status = Literal["done", "failed", "timed out", "skipped", "not run"]


@dataclass(frozen=True)
class Row:
    """One measurement, or why there is none."""

    key: str
    """Names it for good, with slashes, like "decode/8b/bf16/kv-bf16/1k/1"."""
    what: str
    figure: float | None
    """None: it was not measured; `note` says why."""
    unit: str = ""
    limit: float | None = None
    """What the machine would allow, in the same unit; None: no limit is known."""
    share: float | None = None
    """How near to the limit: 1 is at it."""
    note: str = ""
    ok: bool = True
    """False: what was computed is wrong."""


def row_of(content: dict[str, Any]) -> Row:
    """A row from JSON; what it does not know is left out, what is missing has its default."""
    known = {field.name for field in fields(Row)}
    return Row(**{"key": "", "what": "", "figure": None, **{k: v for k, v in content.items() if k in known}})


@dataclass
class SectionResult:
    """What one section has given."""

    name: str
    status: Status = "not run"
    seconds: float = 0.0
    limit_s: float = 0.0
    error: list[str] = field(default_factory=list)
    """The last lines that its process has written to standard error; of a skipped one, why."""
    rows: list[Row] = field(default_factory=list)


@dataclass
class Report:
    """A whole run."""

    date: str
    command: str
    dry_run: bool
    budget_s: float
    machine: dict[str, str]
    sections: list[SectionResult]
    format: int = FORMAT

    def row(self, key: str) -> Row | None:
        """The row of that key that has a figure."""
        rows = (row for section in self.sections for row in section.rows)
        return next((row for row in rows if row.key == key and row.figure is not None), None)

    def rows_under(self, prefix: str) -> list[Row]:
        """The rows with a figure whose keys begin so."""
        rows = (row for section in self.sections for row in section.rows)
        return [row for row in rows if row.key.startswith(prefix) and row.figure is not None]


def write_report(report: Report, path: Path) -> None:
    """In one piece: who reads it while it is written anew finds the old one."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def read_report(path: Path) -> Report:
    """Raises OSError; ValueError for what is no report of this format."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is no results file of `python -m benchmarks.gpu` (format {FORMAT})")
    sections = [
        SectionResult(**{**section, "rows": [row_of(row) for row in section["rows"]]})
        for section in content.pop("sections")
    ]
    return Report(sections=sections, **content)


def append_row(path: Path, row: Row) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Those that were written whole."""
    if not path.exists():
        return []
    return list(_parsed(path.read_text(encoding="utf-8", errors="replace").splitlines()))


def _parsed(lines: Iterable[str]) -> Iterable[Row]:
    for line in lines:
        try:
            yield row_of(json.loads(line))
        except (ValueError, TypeError):  # a line that was cut off
            continue
