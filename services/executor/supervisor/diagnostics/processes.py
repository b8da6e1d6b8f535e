"""A process, looked at from outside: what /proc says of it and its threads, which asks nothing of the process itself;
and its Python stacks, asked for by a signal: its interpreter need not take part.

    supervisor ──SIGUSR2──▶ rank: faulthandler's handler, in C, writes to a file ──▶ supervisor reads it

It works while a thread sits in native code with the interpreter's lock. It does not while the process is stopped,
or where the kernel does not let it be interrupted. The signal ends a process that has no handler, so that is asked
first. The handler reads frames that a running thread may be about to let go of, which can end the process: only a
rank that neither answers by itself nor goes on is signalled.
"""

import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from services.executor.ipc.rank_pipe import STACK_SIGNAL, below
from shared.messages.debugging import StackDump, ThreadDump

_TICKS = os.sysconf("SC_CLK_TCK")
_SIGNIFICANT = 0.005
# Names of the calls that threads wait in, by machine.
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 9: "mmap", 16: "ioctl", 23: "select", 24: "sched_yield", 35: "nanosleep",
        42: "connect", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 74: "fsync",
        75: "fdatasync", 202: "futex", 219: "restart_syscall", 230: "clock_nanosleep", 232: "epoll_wait",
        270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 288: "accept4", 441: "epoll_pwait2",
    },
    "aarch64": {
        22: "epoll_pwait", 29: "ioctl", 63: "read", 64: "write", 72: "pselect6", 73: "ppoll", 82: "fsync",
        98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 124: "sched_yield", 128: "restart_syscall",
        203: "connect", 206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 260: "wait4",
    },
}  # fmt: skip
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "stuck in the kernel",
    "T": "stopped",
    "t": "stopped by a debugger",
    "I": "idle",
}
ENDED = "ended"
STOPPED = ("stopped", "stopped by a debugger")


class ProcessSample(msgspec.Struct, frozen=True):
    pid: int
    state: str  # one of the words above
    memory_bytes: int
    threads: list[ThreadDump]


def sample(pid: int) -> ProcessSample:
    """The process as it is. A process that is not there has ended."""
    proc = Path("/proc") / str(pid)
    state = _state(proc)
    if state in ("", "Z", "X"):
        return ProcessSample(pid, ENDED, 0, [])
    threads = []
    for task in sorted(_listing(proc / "task"), key=int):
        thread = _thread(proc / "task" / task)
        if thread is not None:
            threads.append(thread)
    word = _STATES.get(state, state)
    if word not in STOPPED and any(thread.state == "R" for thread in threads):
        word = "running"
    elif word not in STOPPED and any(thread.state == "D" for thread in threads):
        word = _STATES["D"]
    return ProcessSample(pid, word, int(_status(proc, "VmRSS")) << 10, threads)


def with_usage(before: ProcessSample, after: ProcessSample, seconds: float) -> list[ThreadDump]:
    """The threads of `after`, with the share of a core that each has used since `before`."""
    earlier = {thread.tid: thread.cpu_seconds for thread in before.threads}
    found = []
    for thread in after.threads:
        used = thread.cpu_seconds - earlier.get(thread.tid, thread.cpu_seconds)
        share = round(used / seconds, 2) if seconds > _SIGNIFICANT else 0.0
        found.append(msgspec.structs.replace(thread, busy=share))
    return found


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for that signal: it would end by it else."""
    return bool(int(_status(Path("/proc") / str(pid), "SigCgt"), 16) >> (number - 1) & 1)


def is_stopped(pid: int) -> bool:
    return _STATES.get(_state(Path("/proc") / str(pid))) in STOPPED


def with_descendants(pids: Iterable[int]) -> Iterator[int]:
    """These processes and all that they have started; those that end meanwhile are left out."""
    for pid in pids:
        yield pid
        for thread in (Path("/proc") / str(pid) / "task").glob("*"):
            yield from with_descendants(int(child) for child in _text(thread / "children").split())


def _state(proc: Path) -> str:
    """Its letter; empty where there is no such process."""
    fields = _text(proc / "stat").rpartition(")")[2].split()
    return fields[0] if fields else ""


def _thread(task: Path) -> ThreadDump | None:
    name, _, rest = _text(task / "stat").rpartition(")")
    fields = rest.split()
    if len(fields) < 13:
        return None  # it has ended meanwhile
    return ThreadDump(
        tid=int(task.name),
        name=name.partition("(")[2],
        state=fields[0],
        cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS,
        wchan=_text(task / "wchan").strip("0\n"),
        syscall=_syscall(_text(task / "syscall")),
        kernel_stack=[line.split()[-1] for line in _text(task / "stack").splitlines() if line.split()][:20],
    )


def _syscall(text: str) -> str:
    """Its name where it is one of those that are waited in, else its number; empty while it runs."""
    number = text.partition(" ")[0].strip()
    if not number.lstrip("-").isdigit():
        return ""
    return _CALLS.get(os.uname().machine, {}).get(int(number), number)


def _status(proc: Path, name: str) -> str:
    """The first word of that line of its status; "0" where there is none."""
    lines = (line.split() for line in _text(proc / "status").splitlines())
    return next((words[1] for words in lines if words[0] == f"{name}:"), "0")


def _listing(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)  # noqa: PTH208  # names are wanted
    except OSError:
        return []


def _text(path: Path) -> str:
    """Empty where it may not be read, or is gone."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


MOST_BYTES = 512 << 10  # of a stack file that are read

# "Current" is the thread that took the signal, which says nothing.
_HEAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


class StackRequest:
    """Asks one process, and looks for its answer."""

    def __init__(self, pid: int, path: Path) -> None:
        self._path = path
        self.missing = _ask(pid, path)  # why there will be no answer; empty where there may be one

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


def parse(text: str, roots: list[str]) -> list[StackDump]:
    """The stacks in what faulthandler has written. `roots`: directories that files are named below."""
    found: list[StackDump] = []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            found.append(StackDump(head[2] or f"0x{head[1]}", []))
        elif found and (frame := _FRAME.match(line)):
            found[-1].frames.append(f"{below(frame[1], roots)}:{frame[2]} {frame[3]}")
    return found
