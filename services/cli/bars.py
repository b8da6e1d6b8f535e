"""Progress bars: fetching and converting a model, and loading it into the rings.

On something that is not a terminal (a log, a pipe) each stage is one line instead.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from shared.messages import Heartbeat


@contextlib.contextmanager
def model_bars(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yields the callback for `models.ensure_model`: one bar per stage."""
    tasks: dict[str, TaskID] = {}
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(f"model: {stage}", total=None)
                if not console.is_terminal:
                    console.print(f"model: {stage} ...")
            progress.update(tasks[stage], completed=done, total=total or None)

        yield report


class LoadBars:
    """How far the services and the rings have come, from their heartbeats."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
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
            self._progress.update(self._tasks[instance], completed=share)
            if group is not None and group.message:
                self._tell(f"{instance}: {group.message}")
            if ready:
                self._tell(f"{instance}: ready")

    def _tell(self, line: str) -> None:
        if not self._console.is_terminal and line not in self._told:
            self._told.add(line)
            self._console.print(line, highlight=False)
