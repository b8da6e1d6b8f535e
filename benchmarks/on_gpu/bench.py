"""What a section is given: where it runs, what is known already, and where its rows go."""

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.on_gpu.rows import Row, append_row
from services.executor.core.gpu_errors import is_gpu_error

if TYPE_CHECKING:
    import torch

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
