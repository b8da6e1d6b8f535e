"""What /proc says of a process and its threads. Reading it asks nothing of the process itself."""

import os
import signal
from pathlib import Path

import msgspec

from shared.messages.debugging import ThreadDump

_TICKS = os.sysconf("SC_CLK_TCK")
_SIGNIFICANT = 0.005
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
"""Names of the calls that threads wait in, by machine."""
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
    """A process at a moment."""

    pid: int
    state: str
    """One of the words above."""
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
    return ProcessSample(pid, word, _memory(proc), threads)


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
    for line in _text(Path("/proc") / str(pid) / "status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def is_stopped(pid: int) -> bool:
    return _STATES.get(_state(Path("/proc") / str(pid))) in STOPPED


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


def _memory(proc: Path) -> int:
    for line in _text(proc / "status").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


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
