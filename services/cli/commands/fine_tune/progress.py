"""How far a job is, by its object and its events, and how a terminal shows it: losses as a curve, a bar below.

On something that is not a terminal (a log, a pipe) each message is a line, and of the steps the newest one at each
look.
"""

from collections import deque
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from services.cli.commands.fine_tune.client import Event, Job
from services.cli.commands.fine_tune.curve import draw
from services.cli.ui import say

_CURVE_ROWS, _CURVE_COLUMNS = 10, 100
_SPEED_STEPS = 20  # by which tokens a second are told


class Metrics:
    """What the events of a job have told of its steps. Pure."""

    def __init__(self) -> None:
        self._train: dict[int, float] = {}
        self._valid: dict[int, float] = {}
        self._recent: deque[dict[str, Any]] = deque(maxlen=_SPEED_STEPS)

    def take(self, event: Event) -> None:
        """Those of steps count; a step that is told again is told better."""
        data = event.get("data") or {}
        if event.get("type") != "metrics" or not isinstance(step := data.get("step"), int):
            return
        for values, name in ((self._train, "train_loss"), (self._valid, "valid_loss")):
            if isinstance(value := data.get(name), int | float):
                values[step] = float(value)
        if self._recent and self._recent[-1]["step"] >= step:
            self._recent.clear()  # it goes on from an earlier state
        self._recent.append(data)

    @property
    def loss(self) -> float | None:
        """Of the last step."""
        return self._train[max(self._train)] if self._train else None

    @property
    def tokens_per_second(self) -> float | None:
        """While it computes; None: too little is known."""
        first, *rest = self._recent or [{}]
        seconds = sum(one.get("seconds") or 0.0 for one in rest)
        if not rest or seconds <= 0:
            return None
        return ((rest[-1].get("tokens") or 0) - (first.get("tokens") or 0)) / seconds

    def curve(self, width: int) -> list[str]:
        """Losses of training as a line, of validation as marks; nothing before there are two steps."""
        if len(self._train) < 2:
            return []
        return draw(sorted(self._train.items()), sorted(self._valid.items()), width, _CURVE_ROWS)


def steps_of(job: Job) -> tuple[int, int]:
    """(done, in all); 0: not known."""
    progress = job.get("progress") or {}
    return int(progress.get("step") or 0), int(progress.get("steps") or 0)


def figures_of(job: Job, metrics: Metrics, now: float) -> str:
    """Such as "step 12/88, loss 1.234, 812 tokens/s, 0:02:10 left"."""
    done, steps = steps_of(job)
    told = [f"step {done:,}/{steps:,}"] if steps else []
    if metrics.loss is not None:
        told.append(f"loss {metrics.loss:.4g}")
    if job["status"] == "running":
        if (speed := metrics.tokens_per_second) is not None:
            told.append(f"{speed:,.0f} tokens/s")
        if finish := job.get("estimated_finish"):
            told.append(f"{_duration(max(0.0, finish - now))} left")
    return ", ".join(told)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class JobView:
    """Shows one job as it goes."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self._metrics = Metrics()
        columns = (SpinnerColumn(finished_text=" "), TextColumn("{task.description}"), BarColumn(bar_width=24))
        self._bar = Progress(*columns, console=screen, auto_refresh=False)
        self._task = self._bar.add_task("", total=None)
        self._live = Live(self._bar, console=screen, refresh_per_second=4) if screen.is_terminal else None
        self._told = ""

    def __enter__(self) -> "JobView":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, job: Job, events: list[Event], now: float) -> None:
        """`events`: those that are new; `now` in unix seconds."""
        steps = ""
        for event in events:
            self._metrics.take(event)
            if event.get("type") == "metrics":
                steps = event["message"]
            else:
                say(self._screen, event["message"], {"warn": "yellow", "error": "red"}.get(event["level"]))
        self._tell_status(job)
        if self._live is None and steps:
            say(self._screen, steps)
        done, total = steps_of(job)
        self._bar.update(self._task, description=job["status"], completed=done, total=total or None)
        if self._live is not None:
            curve = self._metrics.curve(min(_CURVE_COLUMNS, self._screen.width))
            figures = figures_of(job, self._metrics, now)
            self._live.update(Group(*map(Text, curve), self._bar, *map(Text, [figures] if figures else [])))

    def _tell_status(self, job: Job) -> None:
        """Why no host has it, whenever that is another reason."""
        waits = job.get("waiting_for") or ""
        if waits != self._told:
            self._told = waits
            if waits:
                say(self._screen, waits, "yellow")
