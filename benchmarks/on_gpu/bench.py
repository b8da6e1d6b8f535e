"""What a section is given: where it runs, what is known already, and where its rows go.

Rows are plain JSON, so that a process that dies leaves what it had: a section's process appends each row to a file of
lines as soon as it is known; the parent reads them whether the process ends, fails or is ended.
"""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from services.executor.core.gpu_errors import is_gpu_error

if TYPE_CHECKING:
    import torch


FORMAT = 1  # of the JSON file
Status = Literal["done", "failed", "timed out", "skipped", "not run"]


class Row(msgspec.Struct, frozen=True):
    """One measurement, or why there is none."""

    key: str  # names it for good, with slashes, like "decode/8b/bf16/kv-bf16/1k/1"
    what: str
    figure: float | None  # None: it was not measured; `note` says why
    unit: str = ""
    limit: float | None = None  # what the machine would allow, in the same unit; None: no limit is known
    share: float | None = None  # how near to the limit: 1 is at it
    note: str = ""
    ok: bool = True  # False: what was computed is wrong


def rate(
    key: str,
    what: str,
    done: float,
    seconds: float,
    limit: float | None = None,
    unit: str = "GB/s",
    note: str | None = None,
) -> Row:
    """Bytes or operations that were `done`, a second, beside what the machine would allow."""
    found, scale = done / seconds, SCALES[unit]
    bound, share = (limit / scale, found / limit) if limit else (None, None)
    return Row(key, what, found / scale, unit, bound, share, f"{seconds * 1e6:.1f} us" if note is None else note)


def checked(key: str, what: str, found: "torch.Tensor", expected: "torch.Tensor", limit: float) -> Row:
    """The root mean square of the errors, in parts of that of the values, of which `limit` is allowed."""
    found, expected = found.double(), expected.double()
    off = float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    return Row(key, what, off, "error", limit, ok=off <= limit)


SCALES = {"GB/s": 1e9, "TFLOP/s": 1e12}
ROUNDED = 0.02  # largest error of what is rounded to bf16 in between


class SectionResult(msgspec.Struct):
    """What one section has given."""

    name: str
    status: Status = "not run"
    seconds: float = 0.0
    limit_s: float = 0.0
    # The last lines that its process has written to standard error; of a skipped one, why.
    error: list[str] = []
    rows: list[Row] = []


class Report(msgspec.Struct):
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
        return next((row for row in self.rows_under(key) if row.key == key), None)

    def rows_under(self, prefix: str) -> list[Row]:
        """The rows with a figure whose keys begin so."""
        rows = (row for section in self.sections for row in section.rows)
        return [row for row in rows if row.key.startswith(prefix) and row.figure is not None]


def write_report(report: Report, path: Path) -> None:
    """In one piece: who reads it while it is written anew finds the old one."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    new.replace(path)


def read_report(path: Path) -> Report:
    """Raises OSError; ValueError for what is no report of this format."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except msgspec.DecodeError:
        report = None
    if report is None or report.format != FORMAT:
        raise ValueError(f"{path} is not a results file of `python -m benchmarks.gpu` (format {FORMAT})")
    return report


COMPARED = ("card", "driver", "python", "torch", "triton")


def combined(reports: Sequence[Report], order: Sequence[str]) -> Report:
    """Runs of one kind of machine as one: each section in the last run that has it, in `order`. Raises ValueError for
    runs of several kinds."""
    first = reports[0]
    if any(report.machine.get(of) != first.machine.get(of) for report in reports for of in COMPARED):
        raise ValueError("the results files are of different machines or versions; give those of one")
    sections = {section.name: section for report in reports for section in report.sections}
    known = sorted(sections.values(), key=lambda section: order.index(section.name) if section.name in order else -1)
    command = "`, `".join(dict.fromkeys(report.command for report in reports))
    date = " and ".join(dict.fromkeys(report.date for report in reports))
    return msgspec.structs.replace(first, command=command, sections=known, date=date)


def append_row(path: Path, row: Row) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(row) + b"\n")


def read_rows(path: Path) -> list[Row]:
    """Those that were written whole."""
    return list(_parsed(path.read_bytes().splitlines())) if path.exists() else []


def _parsed(lines: Iterable[bytes]) -> Iterable[Row]:
    for line in lines:
        try:
            yield msgspec.json.decode(line, type=Row)
        except msgspec.DecodeError:  # a line that was cut off
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
PLACES = 4  # lines of the project's code that an error is told with
COPY, BF16, FP8 = "machine/copy", "machine/bf16", "machine/fp8"  # keys of the rows that limits are taken from


@dataclass
class Bench:
    """One section's run."""

    device: "torch.device"
    tiny: bool  # tiny shapes, for a dry run on a CPU
    rows: Path
    deadline: float  # of `clock`: after it no new case is begun
    known: Mapping[str, float] = field(default_factory=dict)  # figures of the sections before, by key
    clock: Callable[[], float] = time.monotonic

    def left(self) -> float:
        """Seconds in which new cases may be begun."""
        return self.deadline - self.clock()

    def say(self, text: str) -> None:
        print(f"  {text}", flush=True)

    def tell(self, rows: Iterable[Row], section: str) -> None:
        """Reports what a section finds, until its time is up."""
        for row in rows:
            self.report(row)
            if self.late(f"{section}/rest", "what comes after it"):
                return

    def each(self, prefix: str, parts: "Iterable[Callable[[Bench], None]]", *, wrong: bool = False) -> None:
        """Part after part; one that fails is a row that says so, and leaves the others. `wrong`: checks."""
        for part in parts:
            name = part.__name__.lstrip("_")
            if not self.late(f"{prefix}/{name}", name):
                with self.case(f"{prefix}/{name}", name, wrong=wrong):
                    part(self)

    @contextmanager
    def case(self, key: str, what: str, *, wrong: bool = False) -> Iterator[None]:
        """One that fails is a row that says so, as `failed` has it, and leaves the others; what it held is given
        back."""
        from benchmarks.on_gpu.machine import release

        try:
            yield
        except Exception as error:
            self.failed(key, what, error, wrong=wrong)
        release(self.device)

    def late(self, key: str, what: str) -> bool:
        """Whether it is too late to begin a case, which is told then."""
        if late := self.left() <= 0:
            self.missing(key, what, "no time was left")
        return late

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

    def wrong_or_right(self, key: str, what: str, ok: bool, figure: float, limit: float, note: str = "") -> None:
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
