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
from services.executor.ipc.trainer_pipe import TrainerEvent, TrainerSpec
from services.executor.supervisor.rank_process import environment
from shared.process import die_with_parent

TRAINER = "services.executor.training"
STUB = "services.executor.training.stub"
"""Of the stub engine."""
LAST_WORDS = 20
"""Lines of its standard error that are kept, of so many characters at most:"""
LONGEST_LINE = 400
LONGEST_EVENT = 1 << 20

log = structlog.get_logger(__name__)
_events = msgspec.json.Decoder(TrainerEvent)


class TrainerProcess:
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        events: asyncio.StreamReader,
        pipe: asyncio.ReadTransport,
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
        """`variables`: of its environment, whatever ours has. It ends with this process."""
        read, write = os.pipe()
        loop = asyncio.get_running_loop()
        events = asyncio.StreamReader(limit=LONGEST_EVENT)
        pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(events), os.fdopen(read, "rb")
        )
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
                preexec_fn=die_with_parent(signal.SIGKILL),
                start_new_session=True,
                env=own,
            )
        except BaseException:
            pipe.close()
            raise
        finally:
            os.close(write)
        started = cls(process, events, pipe)
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
        if self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(line)

    def kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

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
            self._last.extend(
                line.decode(errors="replace").strip()[:LONGEST_LINE] for line in lines if line.strip()
            )
        if rest.strip():
            self._last.append(rest.decode(errors="replace").strip()[:LONGEST_LINE])


StartTrainer = Callable[[TrainerSpec, ExecutorSettings, Mapping[str, str]], Awaitable[TrainerProcess]]
"""`TrainerProcess.start`, or what takes its place where there are no processes, as in a simulation."""
