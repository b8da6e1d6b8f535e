"""A recording: the ring that computes an answer is killed, and the answer goes on, to the same text."""

import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import psutil

from tests.docs.pictures.screen import Screen
from tests.e2e.stack import CLI, Stack

QUESTION = "Why is the sky blue, and why is it red in the evening?"
ASK = ("chat", QUESTION, "--temperature", "0", "--max-tokens", "170")
CHAT = " ".join(("ryzanstein", "chat", f'"{QUESTION}"', *ASK[2:]))
SEEN = 250  # characters of the answer after which its ring is killed; there must be more after it


def record(stack: Stack, directory: Path) -> Path:
    """The recording; fails where the text is not the one of an undisturbed run."""
    screen = Screen(12, ("client", "operator"))
    data_dir = ("--data-dir", str(stack.data_dir))
    lower = screen.lower
    lower.command("ryzanstein status | tail -8")
    lower.write(_groups(data_dir))
    time.sleep(1)

    pids = {group["group"]: group["ranks"][0]["pid"] for group in stack.status()["groups"]}
    before = _accepted(stack)
    answer = _Answer(screen, data_dir)
    answer.until(SEEN)
    (group,) = _accepted(stack) - before
    pid = pids[group]
    lower.command(f"kill -9 {pid}", f"    # the ring of {group}, which is computing this answer")
    psutil.Process(pid).kill()
    at_kill = answer.characters
    text = answer.whole()
    assert len(text) > at_kill + SEEN, f"the answer was over too soon: {text}"
    time.sleep(1)

    screen.upper.command(f"{CHAT} | cmp - killed.txt && echo the same text")
    again = subprocess.run([*CLI, *ASK, *data_dir], capture_output=True, check=True, text=True).stdout
    assert again == text, f"another text:\n{text}\n---\n{again}"
    screen.upper.write("the same text\n")
    lower.command("ryzanstein status | tail -8")
    lower.write(_groups(data_dir))
    screen.put("")
    screen.save(directory / "failover.cast")
    return directory / "failover.cast"


class _Answer:
    """A chat that runs, shown as it comes."""

    def __init__(self, screen: Screen, data_dir: tuple[str, str]) -> None:
        self._text = ""
        self._screen = screen
        screen.upper.command(f"{CHAT} | tee killed.txt")
        self._process = subprocess.Popen([*CLI, *ASK, *data_dir], stdout=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def characters(self) -> int:
        return len(self._text)

    def until(self, characters: int) -> None:
        end = time.monotonic() + 120
        while len(self._text) < characters:
            assert time.monotonic() < end, f"no answer: {self._text}"
            time.sleep(0.01)

    def whole(self) -> str:
        self._reader.join(120)
        assert self._process.wait(10) == 0, self._text
        return self._text

    def _read(self) -> None:
        assert self._process.stdout is not None
        while data := self._process.stdout.read1(65536):  # type: ignore[attr-defined]
            self._text += data.decode()
            self._screen.upper.write(data.decode())


def _accepted(stack: Stack) -> Counter[str]:
    """How many requests each group has accepted."""
    logs = sorted((stack.data_dir / "logs").glob("executor-*.log"))
    return Counter({log.stem.replace("executor", "group"): log.read_text().count("accepted") for log in logs})


def _groups(data_dir: tuple[str, str]) -> str:
    shown = subprocess.run([*CLI, "status", *data_dir], capture_output=True, check=True, text=True).stdout
    return "\n".join(shown.rstrip().splitlines()[-8:]) + "\n"
