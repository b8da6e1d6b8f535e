"""Python stacks of a process, asked for by a signal: its interpreter need not take part.

    orchestrator ──SIGUSR2──▶ rank: faulthandler's handler, in C, writes to a file ──▶ orchestrator reads it

It works while a thread sits in native code with the interpreter's lock. It does not while the process is stopped,
or where the kernel does not let it be interrupted. The signal ends a process that has no handler, so that is asked
first.
"""

import os
import re
import sys
from pathlib import Path

from services.executor.ipc.rank_pipe import STACK_SIGNAL
from services.executor.supervisor.diagnostics.processes import catches
from shared.messages.debugging import StackDump

MOST_BYTES = 512 << 10
"""Of a stack file that are read."""

# "Current" is the thread that took the signal, which says nothing.
_HEAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


class StackRequest:
    """Asks one process, and looks for its answer."""

    def __init__(self, pid: int, path: Path, missing: str = "") -> None:
        """`missing`: why it need not be asked."""
        self._path = path
        self._size = -1
        self.missing = missing or _ask(pid, path)
        """Why there will be no answer; empty where there may be one."""

    def poll(self) -> bool:
        """Whether the answer is complete, as far as can be told: it has not grown since the last look."""
        if self.missing:
            return True
        size = _size(self._path)
        done = size > 0 and size == self._size
        self._size = size
        return done

    def read(self) -> list[StackDump]:
        """What there is by now; the file is emptied for the next one."""
        if self.missing:
            return []
        with self._path.open("rb") as file:
            text = file.read(MOST_BYTES).decode(errors="replace")
        if text:
            os.truncate(self._path, 0)
        return parse(text, sys.path)


def _ask(pid: int, path: Path) -> str:
    if not path.exists() or not catches(pid, STACK_SIGNAL):
        return "the process is just starting, or has ended"
    try:
        os.truncate(path, 0)
        os.kill(pid, STACK_SIGNAL)
    except OSError as error:
        return f"the process cannot be asked ({error.strerror})"
    return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def parse(text: str, roots: list[str]) -> list[StackDump]:
    """The stacks in what faulthandler has written. `roots`: directories that files are named below."""
    found: list[StackDump] = []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            found.append(StackDump(head[2] or f"0x{head[1]}", []))
        elif found and (frame := _FRAME.match(line)):
            found[-1].frames.append(f"{_below(frame[1], roots)}:{frame[2]} {frame[3]}")
    return found


def _below(path: str, roots: list[str]) -> str:
    inside = [root for root in roots if root and path.startswith(root.rstrip("/") + "/")]
    return path[len(max(inside, key=len).rstrip("/")) + 1 :] if inside else path
