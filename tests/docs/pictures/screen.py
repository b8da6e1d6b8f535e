"""A terminal of two panes, one over the other, whose changes are kept as an asciicast (version 2)."""

import json
import textwrap
import time
from pathlib import Path

WIDTH, HEIGHT = 100, 26
PROMPT = "\x1b[32m$\x1b[0m "


class Pane:
    """Some rows of the screen: lines that scroll."""

    def __init__(self, screen: "Screen", top: int, rows: int) -> None:
        self._screen, self._top, self._rows = screen, top, rows
        self._text = ""
        self._shown = [""] * rows

    def command(self, command: str, comment: str = "") -> None:
        """Typed as a person would, by words."""
        self.write(PROMPT)
        for word in command.split(" "):
            self.write(word + " ")
            time.sleep(0.08)
        self.write(f"\x1b[31m{comment}\x1b[0m\n" if comment else "\n")

    def write(self, text: str) -> None:
        self._text += text
        lines = [
            part
            for line in self._text.split("\n")
            for part in textwrap.wrap(line, WIDTH, break_on_hyphens=False) or [""]
        ][-self._rows :]
        lines += [""] * (self._rows - len(lines))
        changes = [
            f"\x1b[{self._top + row};1H\x1b[K{line}"
            for row, (line, before) in enumerate(zip(lines, self._shown, strict=True))
            if line != before
        ]
        self._shown = lines
        if changes:
            self._screen.put("".join(changes))


class Screen:
    """Two panes with a rule between them."""

    def __init__(self, upper_rows: int, titles: tuple[str, str]) -> None:
        self._start = time.monotonic()
        self._events: list[tuple[float, str, str]] = []
        for row, title in zip((1, upper_rows + 2), titles, strict=True):
            rule = f"── {title} ".ljust(WIDTH, "─")
            self.put(f"\x1b[?25l\x1b[{row};1H\x1b[36m{rule}\x1b[0m")
        self.upper = Pane(self, 2, upper_rows)
        self.lower = Pane(self, upper_rows + 3, HEIGHT - upper_rows - 2)

    def put(self, text: str) -> None:
        self._events.append((time.monotonic() - self._start, "o", text))

    def save(self, file: Path) -> None:
        header = {"version": 2, "width": WIDTH, "height": HEIGHT}
        file.write_text("".join(json.dumps(line) + "\n" for line in [header, *self._events]))
