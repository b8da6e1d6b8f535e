"""The process of a trainer, seen from the host that has started it: told by lines, heard by lines, and what it says
last on its standard error is kept."""

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

import msgspec
import structlog

from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.trainer_pipe import SUSPENDED, TrainerEvent, TrainerSpec
from services.executor.supervisor.ranks.rank_process import environment
from shared.process import die_with_parent

TRAINER = "services.executor.training"
STUB = "services.executor.training.stub"  # of the stub engine
LAST_WORDS = 20  # lines of its standard error that are kept, of so many characters at most:
LONGEST_LINE = 400
LONGEST_EVENT = 1 << 20

log = structlog.get_logger(__name__)
_events = msgspec.json.Decoder(TrainerEvent)


class TrainerProcess:
    def __init__(
        self, process: asyncio.subprocess.Process, events: asyncio.StreamReader, pipe: asyncio.ReadTransport
    ) -> None:
        self._process = process
        self._events = events
        self._pipe = pipe
        self._last: deque[str] = deque(maxlen=LAST_WORDS)
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(
        cls, spec: TrainerSpec, settings: ExecutorSettings, variables: Mapping[str, str]
    ) -> "TrainerProcess":
        """`variables`: of its environment, whatever ours has. It ends with this process, suspended or not."""
        read, write = os.pipe()
        loop = asyncio.get_running_loop()
        events = asyncio.StreamReader(limit=LONGEST_EVENT)
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(events), os.fdopen(read, "rb"))
        module = STUB if settings.engine == "stub" else TRAINER
        own = {**environment(spec.threads, settings), "OMP_NUM_THREADS": str(spec.threads), **variables}
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                str(write),
                stdin=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(write,),
                preexec_fn=_in_own_group,
                env=own,
            )
        except BaseException:
            pipe.close()
            raise
        finally:
            os.close(write)
        started = cls(process, events, pipe)
        started._watch_first()
        started.tell(msgspec.json.encode(spec) + b"\n")
        return started

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_words(self) -> str:
        """The last lines of its standard error, as one; empty: it has said nothing."""
        return " / ".join(self._last)

    def tell(self, line: bytes) -> None:
        stdin = self._process.stdin
        if self._process.returncode is None and stdin is not None and not stdin.is_closing():
            stdin.write(line)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def suspend(self) -> None:
        """Stops all of its processes, whatever they do."""
        self._signal(signal.SIGSTOP)

    def resume(self, suspended: float) -> None:
        """They go on. `suspended`: seconds, since its start."""
        stdin = self._process.stdin
        reads = stdin is not None and not stdin.transport.get_write_buffer_size()
        if reads:  # else a later line tells it too
            self.tell(b"%s %.6f\n" % (SUSPENDED, suspended))
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        """To the process group that it is the first of; until we have noted its end, nobody else has that number."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # all of them have ended
                os.killpg(self.pid, number)

    async def events(self) -> AsyncGenerator[TrainerEvent, None]:
        """What it says, until it ends. Raises `msgspec.MsgspecError`."""
        while line := await self._events.readline():
            event: TrainerEvent = _events.decode(line)
            yield event

    async def end(self) -> str:
        """Waits for its end, and says how it was: `code 1`, `signal SIGKILL`."""
        code = await self._process.wait()
        await asyncio.wait({self._listening}, timeout=1.0)
        self._listening.cancel()
        self._pipe.close()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"

    def _watch_first(self) -> None:
        """Ranks that the first one has started end with it by themselves, but for one that was suspended before it had
        asked the kernel for that: it would stand still for ever, and hold the pipes open, for whose end asyncio waits.
        Where a process has no descriptor (macOS) none is left with us: the kernel ends stopped ones without a parent.
        """
        if sys.platform != "linux":
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            pidfd = os.pidfd_open(self.pid)
            asyncio.get_running_loop().add_reader(pidfd, self._end_others, pidfd)

    def _end_others(self, pidfd: int) -> None:
        """A group keeps its number as long as one of it is left."""
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _listen(self) -> None:
        """What it logs goes where ours does."""
        stderr = self._process.stderr
        assert stderr is not None, "it is a pipe"
        rest = b""
        while part := await stderr.read(1 << 16):
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.buffer.write(part)
                sys.stderr.buffer.flush()
            *lines, rest = (rest + part).split(b"\n")
            rest = rest[-LONGEST_LINE:]
            self._last.extend(line.decode(errors="replace").strip()[:LONGEST_LINE] for line in lines if line.strip())
        if rest.strip():
            self._last.append(rest.decode(errors="replace").strip()[:LONGEST_LINE])


# `TrainerProcess.start`, or what takes its place where there are no processes, as in a simulation.
StartTrainer = Callable[[TrainerSpec, ExecutorSettings, Mapping[str, str]], Awaitable[TrainerProcess]]


_die_with_parent = die_with_parent(signal.SIGKILL)


def _in_own_group() -> None:
    """In the new process: a process group for it and the ranks that it starts, in our session, so that Ctrl-C is ours
    alone. Where the kernel has no signal for a parent's death (macOS), POSIX has SIGHUP and SIGCONT for a group that is
    stopped and loses its last parent in the session; one in a session of its own would stay stopped for ever."""
    os.setpgid(0, 0)
    if _die_with_parent is not None:
        _die_with_parent()
