"""The terminal: what is printed comes out as it is, answers break between words, and progress bars show how a model
is fetched, converted and loaded into the rings.

On something that is not a terminal (a log, a pipe) each stage is one line instead.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Self

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from shared.messages import GroupTraits, Heartbeat, StreamedWeights

if TYPE_CHECKING:
    from rich.markdown import Markdown


_CONTROLS = {code: None for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


def console() -> Console:
    """Standard output; `:words:` of a text stay words."""
    return Console(emoji=False)


def say(screen: Console, text: str, style: str | None = None) -> None:
    """Prints `text` as it is: the terminal wraps it, and nothing in it is markup."""
    screen.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """For programs, on one line."""
    print(msgspec.json.encode(value).decode())  # noqa: T201


def local_time(seconds: float) -> str:
    """A moment in unix seconds, for people on this machine."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def megabytes(count: int) -> str:
    """Such as "270 MB"; from ten thousand on in GB."""
    return f"{count / 1e6:,.0f} MB" if count < 1e10 else f"{count / 1e9:,.1f} GB"


def described_traits(traits: GroupTraits | None) -> list[str]:
    """What a group does that others of its model may not do, in parts; nothing while it is not known."""
    if traits is None:
        return []
    told = [f"computes sparse attention by {' and '.join(traits.sparse)}"] if traits.sparse else []
    if left_out := draft_left_out(traits):
        return [*told, left_out]
    return [*told, f"draft model: {traits.draft_model}"] if traits.draft_model else told


def draft_left_out(traits: GroupTraits | None) -> str:
    """That the group is served without its draft model, and why; empty: it is not."""
    if traits is None or not traits.draft_left_out:
        return ""
    return f"served without the draft model {traits.draft_model}: {traits.draft_left_out}"


def described_weights(weights: StreamedWeights) -> str:
    """Such as "270 MB in memory, 180 MB of others are read for each step"."""
    told = f"{megabytes(weights.memory)} in memory, {megabytes(weights.per_step)} of others are read for each step"
    if not weights.disk_rate:
        return told
    speed = f"{megabytes(int(weights.disk_rate))}/s from disk allow {weights.tokens_per_second:.2g} tokens/s"
    return f"{told}; {speed} to one sequence"


def print_columns(screen: Console, rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> None:
    """Prints rows under each other, the first of them as headings; the last column is never broken or cut."""
    widths = [max(cell_len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for number, (*cells, last) in enumerate(rows):
        padded = [
            " " * (width - cell_len(cell)) + cell if column in right else cell + " " * (width - cell_len(cell))
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        style = "bold" if number == 0 else None
        say(screen, "  ".join([*padded, last]), style)


class WordWrap:
    """Breaks a text that comes in pieces between words. Pure.

    The last word is held back until it is known to be whole. A word that is longer than a line is left for
    the terminal to break; wide characters (as in Chinese) are words of their own.
    """

    def __init__(self, width: int) -> None:
        self._width = width  # of a line, in cells
        self._column = 0
        self._gap = ""
        self._word = ""

    def feed(self, text: str) -> str:
        """What can be printed now."""
        return "".join(map(self._take, text.expandtabs(4)))

    def end(self) -> str:
        return self._release()

    def _take(self, character: str) -> str:
        if character == "\n":
            released = self._release()
            self._column, self._gap = 0, ""
            return released + "\n"
        if character == " ":
            released = self._release()
            self._gap += " "
            return released
        released = self._release() if cell_len(character) > 1 or cell_len(self._word[-1:]) > 1 else ""
        self._word += character
        return released

    def _release(self) -> str:
        if not self._word:
            return ""
        text = self._gap + self._word
        if self._column and self._column + cell_len(text) > self._width:
            self._column = 0
            text = f"\n{self._word}"
        self._column += cell_len(text.lstrip("\n"))
        self._gap = self._word = ""
        return text


class MarkdownPrinter:
    """Prints an answer of a model as it comes, as the Markdown that it is: paragraph by paragraph (a fenced block of
    code is one). The paragraph under way is shown as it grows, and printed for good when it is whole."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self._live = Live(console=screen, transient=True, auto_refresh=False, vertical_overflow="crop")
        self._live.start()
        self._paragraph = ""

    def write(self, text: str) -> None:
        self._paragraph += text.translate(_CONTROLS)
        while (whole := end_of_paragraph(self._paragraph)) is not None:
            self._screen.print(_markdown(self._paragraph[:whole]))
            self._screen.print()
            self._paragraph = self._paragraph[whole:].lstrip("\n")
        self._live.update(_markdown(self._paragraph), refresh=True)

    def end(self) -> None:
        self._live.update("", refresh=True)
        self._live.stop()
        if self._paragraph:
            self._screen.print(_markdown(self._paragraph))
            self._paragraph = ""


def end_of_paragraph(text: str) -> int | None:
    """Where the first paragraph of `text` ends, at an empty line outside of fenced code; None: it may go on."""
    start = 0
    fence = ""
    while (end := text.find("\n", start)) >= 0:
        line = text[start:end].strip()
        if fence:
            fence = "" if line == fence else fence
        elif line.startswith(("```", "~~~")):
            fence = line[:3]
        elif not line and start:
            return start
        start = end + 1
    return None


def _markdown(text: str) -> "Markdown":
    """Links stay visible: where one leads is not hidden behind what it says."""
    from rich.markdown import Markdown  # for conversations alone: a start of the stack does not wait for it

    return Markdown(text, hyperlinks=False)


class AnswerPrinter:
    """Prints an answer of a model as it comes, without control characters: it must not steer the terminal."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self._wrap = WordWrap(screen.width) if screen.is_terminal else None

    def write(self, text: str) -> None:
        clean = text.translate(_CONTROLS)
        self._print(self._wrap.feed(clean) if self._wrap else clean)

    def end(self) -> None:
        self._print((self._wrap.end() if self._wrap else "") + "\n")

    def _print(self, text: str) -> None:
        if text:
            self._screen.print(text, end="", markup=False, highlight=False, soft_wrap=True)


def bar_columns(amount: ProgressColumn) -> tuple[ProgressColumn, ...]:
    """Of a progress bar; `amount` stands behind it."""
    description = TextColumn("{task.description}", table_column=Column(overflow="fold", ratio=1))
    return SpinnerColumn(finished_text=" "), description, BarColumn(bar_width=24), amount, TimeElapsedColumn()


_COUNTED_IN_BYTES = ("downloading", "unpacking", "writing")


class _AmountColumn(DownloadColumn):
    """Bytes where bytes are counted, with rate and time left; steps of a conversion need no number beside their bar."""

    def render(self, task: Task) -> Text:
        if not task.fields.get("bytes"):
            return Text()
        told = super().render(task)
        if task.speed and not task.finished:
            told.append(f"  {megabytes(int(task.speed))}/s")
        if task.time_remaining and not task.finished:
            told.append(f", {timedelta(seconds=int(task.time_remaining))} left")
        return told


@contextlib.contextmanager
def model_bars(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yields the callback for `models.ensure_model`: one bar per stage."""
    tasks: dict[str, TaskID] = {}
    with Progress(*bar_columns(_AmountColumn()), console=console, disable=not console.is_terminal) as progress:

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


class _Bars:
    """A bar by name, on a terminal."""

    def __init__(self, console: Console, amount: ProgressColumn, *, quiet: bool = False) -> None:
        """`quiet`: nothing is shown, for programs."""
        self._console = console
        self._lines = not console.is_terminal and not quiet  # whether what changes is told by lines instead
        self._progress = Progress(*bar_columns(amount), console=console, disable=quiet or not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class LoadBars(_Bars):
    """How far the services and the rings have come, from their heartbeats."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, TextColumn("{task.percentage:>3.0f}%"))
        self._told: set[str] = set()

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
        if self._lines and line not in self._told:
            self._told.add(line)
            say(self._console, line)


class ModelBars(_Bars):
    """How far models of a running stack have come: one bar for each, in bytes where they are known."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        super().__init__(console, _AmountColumn(), quiet=quiet)
        self._told: dict[str, str] = {}

    def update(self, name: str, description: str, share: float, done: int, total: int) -> None:
        """`share` from 0 to 1 counts where `done` and `total` (bytes) are not known."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=None)
        completed, whole, in_bytes = (done, total, True) if total else (share, 1.0 if share else None, False)
        self._progress.update(
            self._tasks[name], completed=completed, total=whole, bytes=in_bytes, description=escape(description)
        )
        if self._lines and self._told.get(name) != description:
            self._told[name] = description
            say(self._console, description)
