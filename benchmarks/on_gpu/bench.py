"""What a section is given: where it runs, what is known already, and where its rows go.

Rows are plain JSON, so that a process that dies leaves what it had: a section's process appends each row to a file of
lines as soon as it is known; the parent reads them whether the process ends, fails or is ended.
"""

import json
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from services.executor.core.gpu_errors import is_gpu_error

if TYPE_CHECKING:
    import torch


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
        raise ValueError(f"{path} is not a results file of `python -m benchmarks.gpu` (format {FORMAT})")
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


DATA_SHEET = {
    # Bytes/s of memory and dense bf16 and fp8 operations/s, from NVIDIA's data sheets; the smallest variant of each.
    "B200": (7.7e12, 2.25e15, 4.5e15),
    "GH200": (4.0e12, 9.89e14, 1.979e15),
    "H200": (4.8e12, 9.89e14, 1.979e15),
    "H100": (2.0e12, 7.56e14, 1.513e15),
    "A100": (1.555e12, 3.12e14, 0.0),
    "L40": (8.64e11, 1.81e14, 3.62e14),
    "L4": (3.0e11, 1.21e14, 2.42e14),
}
ROOT = Path(__file__).parents[2]
PLACES = 4
"""Lines of the project's code that an error is told with."""
COPY, BF16, FP8 = "machine/copy", "machine/bf16", "machine/fp8"
"""Keys of the rows that limits are taken from."""


@dataclass
class Bench:
    """One section's run."""

    device: "torch.device"
    tiny: bool
    """Tiny shapes, for a dry run on a CPU."""
    rows: Path
    deadline: float
    """Of `clock`: after it no new case is begun."""
    known: Mapping[str, float] = field(default_factory=dict)
    """Figures of the sections before, by key."""
    clock: Callable[[], float] = time.monotonic

    def left(self) -> float:
        """Seconds in which new cases may be begun."""
        return self.deadline - self.clock()

    def say(self, text: str) -> None:
        print(f"  {text}", flush=True)

    def report(self, row: Row) -> None:
        """Writes it down at once, and says it."""
        append_row(self.rows, row)
        self.say(line(row))

    def measured(
        self, key: str, what: str, figure: float, unit: str, limit: float | None = None, note: str = ""
    ) -> None:
        """A figure that grows towards its limit, as rates do."""
        share = figure / limit if limit else None
        self.report(Row(key, what, figure, unit, limit, share, note))

    def missing(self, key: str, what: str, why: str) -> None:
        """A case that was not measured."""
        self.report(Row(key, what, None, note=why))

    def failed(self, key: str, what: str, error: Exception, *, wrong: bool = False) -> None:
        """A case that raised `error`; `wrong`: where a check did, so that what it checks counts as wrong. Raises
        `error` again where nothing more can be computed in this process."""
        self.report(Row(key, what, None, note=told(error), ok=not wrong))
        traceback.print_exception(error)
        if is_gpu_error(error):
            raise error

    def wrong_or_right(
        self, key: str, what: str, ok: bool, figure: float, limit: float, note: str = ""
    ) -> None:
        """A check: `figure` is an error, and `limit` the largest that is allowed."""
        self.report(Row(key, what, figure, "error", limit, note=note, ok=ok))

    @property
    def bandwidth(self) -> float | None:
        """Bytes/s, measured, else as the data sheet has it; None: unknown."""
        return self._limit(COPY, 0, 1e9)

    def matrix_rate(self, weights: str) -> float | None:
        """Operations/s of products with weights of that data type, likewise."""
        return self._limit(FP8, 2, 1e12) if weights == "fp8" else self._limit(BF16, 1, 1e12)

    def _limit(self, key: str, column: int, scale: float) -> float | None:
        if self.tiny or self.device.type != "cuda":
            return None
        if key in self.known:
            return self.known[key] * scale
        import torch

        return data_sheet(torch.cuda.get_device_name(self.device), column)


def data_sheet(card: str, column: int) -> float | None:
    """What is printed of a card whose name holds one that is known."""
    found = next((figures[column] for name, figures in DATA_SHEET.items() if name in card), 0.0)
    return found or None


def told(error: BaseException) -> str:
    """An error in a line: what it says, and where in the project it came up, the innermost place last."""
    words = (str(error).strip().splitlines() or ["no words"])[0][:300]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT)]
    places = " > ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in ours[-PLACES:])
    return f"{type(error).__name__}: {words}" + (f" ({places})" if places else "")


def line(row: Row) -> str:
    """A row in a line of text."""
    if row.figure is None:
        return f"{row.what}: not measured: {row.note}"
    share = f", {row.share:.0%} of {shown(row.limit)}" if row.share is not None else ""
    verdict = "" if row.ok else "  WRONG"
    return f"{row.what}: {shown(row.figure)} {row.unit}{share}{verdict}"


def shown(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return "-"
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
