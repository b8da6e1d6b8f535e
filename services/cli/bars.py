"""Progress bars: fetching and converting a model, and loading it into the rings.

On something that is not a terminal (a log, a pipe) each stage is one line instead.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from shared.messages import Heartbeat

_COUNTED_IN_BYTES = ("downloading", "unpacking")


class _AmountColumn(DownloadColumn):
    """Bytes where bytes are counted; steps of a conversion need no number beside their bar."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.fields.get("bytes") else Text()


@contextlib.contextmanager
def model_bars(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yields the callback for `models.ensure_model`: one bar per stage."""
    tasks: dict[str, TaskID] = {}
    columns = (
        SpinnerColumn(finished_text=" "),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        _AmountColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for earlier in tasks.values():
                    _finish(progress, earlier)
                in_bytes = stage in _COUNTED_IN_BYTES
                tasks[stage] = progress.add_task(f"model: {stage}", total=None, bytes=in_bytes)
                if not console.is_terminal:
                    console.print(f"model: {stage} ...", highlight=False)
            progress.update(tasks[stage], completed=done, total=total or None)

        yield report
        for task in tasks.values():
            _finish(progress, task)


def _finish(progress: Progress, task: TaskID) -> None:
    """A stage is over when the next one begins, whatever its numbers said."""
    known = next(one for one in progress.tasks if one.id == task)
    total = known.total or known.completed or 1
    progress.update(task, completed=total, total=total)


class LoadBars:
    """How far the services and the rings have come, from their heartbeats."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}", table_column=Column(overflow="fold", ratio=1)),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._told: set[str] = set()

    def __enter__(self) -> "LoadBars":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, beats: dict[str, Heartbeat]) -> None:
        """`beats`: the last heartbeat of each instance."""
        for instance, beat in sorted(beats.items()):
            group = beat.group
            ready = beat.state == "ready" and (group is None or group.state == "ready")
            share = 1.0 if ready else group.loaded * 0.99 if group is not None else 0.0
            if instance not in self._tasks:
                self._tasks[instance] = self._progress.add_task(instance, total=1.0)
            message = group.message if group is not None and not ready else ""
            description = escape(f"{instance}: {message}" if message else instance)
            self._progress.update(self._tasks[instance], completed=share, description=description)
            if message:
                self._tell(f"{instance}: {message}")
            if ready:
                self._tell(f"{instance}: ready")

    def _tell(self, line: str) -> None:
        if not self._console.is_terminal and line not in self._told:
            self._told.add(line)
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
