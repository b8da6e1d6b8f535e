"""What a screen keeps can be played: a real terminal shows what the panes were given."""

import json
from pathlib import Path

from tests.docs.pictures.screen import HEIGHT, WIDTH, Screen


def test_a_recording_is_an_asciicast_of_changes(tmp_path: Path) -> None:
    screen = Screen(12, ("client", "operator"))
    screen.upper.command("say hello")
    for word in ("hello", " ", "world"):
        screen.upper.write(word)
    screen.lower.write("\n".join(f"line {number}" for number in range(30)))
    screen.save(tmp_path / "a.cast")
    header, *events = [json.loads(line) for line in (tmp_path / "a.cast").read_text().splitlines()]
    assert header == {"version": 2, "width": WIDTH, "height": HEIGHT}
    assert [kind for _, kind, _ in events] == ["o"] * len(events)
    assert sorted(at for at, _, _ in events) == [at for at, _, _ in events]
    shown = events[-1][2]
    assert "line 29" in shown
    assert "line 17" not in shown  # it has scrolled away
    assert "hello" not in shown  # what has not changed is not written again


def test_long_lines_are_wrapped() -> None:
    screen = Screen(12, ("client", "operator"))
    screen.upper.write("word " * 60)
    rows = screen._events[-1][2].split("\x1b[K")[1:]
    assert len(rows) > 2
    assert all(len(row.split("\x1b")[0]) <= WIDTH for row in rows)
