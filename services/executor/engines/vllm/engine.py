"""vLLM as a `ServingEngine`: a process in vLLM's own Python, and a socket to it (`plugin/ryzanstein_vllm/worker.py`).

    leader ── socket ── worker (AsyncLLM) ── vLLM's engine process ── its workers     one process group

Its output goes to this process's standard error as it comes; the last lines are kept for what is said of its end.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections import deque
from pathlib import Path

import msgspec
import structlog

from services.executor.core.gpu_errors import CRASHED
from services.executor.core.settings import ExecutorSettings
from services.executor.engines.base import EngineAbort, EngineFacts, EngineFailed, EngineRequest, EngineStep
from services.executor.engines.vllm.arguments import vllm_arguments
from services.executor.engines.vllm.plugin.ryzanstein_vllm.worker import Start, receive, send
from services.executor.supervisor.diagnostics.processes import is_stopped, with_descendants
from services.executor.supervisor.failure_detection import cause_of_exit
from shared.errors import ConfigurationError, InternalError, ModelLoadError, RingLost, RyzansteinError
from shared.process import die_with_parent

log = structlog.get_logger(__name__)

WORKER = "ryzanstein_vllm.worker"
PLUGIN = Path(__file__).parent / "plugin"
LAST_LINES = 200  # of its output, that are kept
LINE_BYTES = 2000
# What a line of vLLM's log says went wrong, in whichever of its processes. Others say that some process has ended, or
# that the reason stands above.
_CAUSE = re.compile(r" ERROR .*?\b((?!EngineDeadError)[A-Z]\w*(?:Error|Exception): .+)")
STOP_WITHIN = 5.0  # seconds that it has to end by itself
# What vLLM is told by its environment, where the operator has not: its usage report goes over the network.
# Its second model runner takes no logits processors of the interface that all versions have.
VARIABLES = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
_answers: "msgspec.msgpack.Decoder[EngineFacts | EngineFailed]" = msgspec.msgpack.Decoder(EngineFacts | EngineFailed)
_steps: "msgspec.msgpack.Decoder[EngineStep]" = msgspec.msgpack.Decoder(EngineStep)
_failures: "msgspec.msgpack.Decoder[EngineFailed]" = msgspec.msgpack.Decoder(EngineFailed)


class VllmEngine:
    def __init__(self, settings: ExecutorSettings, directory: Path) -> None:
        self._python = str(settings.engine_python or sys.executable)
        self._arguments = vllm_arguments(settings, directory)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._output: asyncio.Task[None] | None = None
        self._lines: deque[str] = deque(maxlen=LAST_LINES)

    async def start(self) -> EngineFacts:
        ours, theirs = socket.socketpair()
        try:
            self._process = await self._spawn(theirs.fileno())
        except OSError as error:
            ours.close()
            raise ConfigurationError(
                f"{self._python} cannot be started ({error.strerror}); name the Python of an environment that has "
                "vLLM with --engine-python."
            ) from None
        finally:
            theirs.close()
        log.info("engine_started", engine="vllm", pid=self._process.pid, arguments=self._arguments)
        self._output = asyncio.create_task(self._copy_output())
        self._reader, self._writer = await open_line(ours)
        self._send(Start(self._arguments))
        try:
            answer = _answers.decode(await self._receive())
        except EOFError:
            raise ModelLoadError(f"vLLM did not start: {await self._end()}.") from None
        if isinstance(answer, EngineFailed):
            await self._read_output(STOP_WITHIN)
            raise ModelLoadError(f"{answer.error.rstrip('.')}{self._cause()}; {self._remedy(answer.error)}.")
        return answer

    def submit(self, request: EngineRequest) -> None:
        self._send(request)

    def abort(self, ids: list[str]) -> None:
        self._send(EngineAbort(ids))

    async def next(self) -> EngineStep:
        try:
            data = await self._receive()
        except EOFError:
            reason = f"vLLM has ended: {await self._end()}."
            assert self._process is not None, "it has been started"
            raise _lost(reason, crashed=cause_of_exit(self._process.returncode or 0, 0) == CRASHED) from None
        try:
            return _steps.decode(data)
        except msgspec.ValidationError:
            failed = _failures.decode(data)
            self._kill()  # which may hang while it ends, and streams wait for what follows
            await self._read_output(STOP_WITHIN / 5)
            raise _lost(f"{failed.error}{self._said()}.", crashed=failed.crashed) from None

    def is_stopped(self) -> bool:
        pid = 0 if self._process is None else self._process.pid
        return bool(pid) and any(map(is_stopped, with_descendants([pid])))

    async def stop(self) -> None:
        if self._writer is not None:
            self._writer.close()  # which is the worker's end
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_WITHIN)
            self._kill()
        if self._output is not None:
            self._output.cancel()

    # --- inside ----------------------------------------------------------------------------------

    async def _spawn(self, fd: int) -> asyncio.subprocess.Process:
        path = os.pathsep.join(filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH", ""))))
        return await asyncio.create_subprocess_exec(
            self._python,
            "-m",
            WORKER,
            str(fd),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=(fd,),
            preexec_fn=die_with_parent(signal.SIGKILL),  # also where it is stopped
            start_new_session=True,  # all that it starts is in one process group, which ends with it
            env={**VARIABLES, **os.environ, "PYTHONPATH": path},
        )

    async def _copy_output(self) -> None:
        assert self._process is not None, "it has been started"
        assert self._process.stdout is not None, "it is a pipe"
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # longer than any line of a log: its beginning is dropped
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()[:LINE_BYTES]
            if text:
                self._lines.append(text)
                sys.stderr.write(text + "\n")

    async def _end(self) -> str:
        """How the process has ended, and the last that it said."""
        assert self._process is not None, "it has been started"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._process.wait()), STOP_WITHIN)
        await self._read_output(STOP_WITHIN / 5)
        code = self._process.returncode
        how = "its connection is closed" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        return how + self._said()

    async def _read_output(self, within: float) -> None:
        """All of it, where the process ends within so many seconds."""
        assert self._output is not None, "it has been started"
        await asyncio.wait({self._output}, timeout=within)

    def _said(self) -> str:
        """What went wrong as its output has it, or the last line of that, as the end of a sentence."""
        return self._cause() or (f", after: {self._lines[-1][:300].rstrip('.')}" if self._lines else "")

    def _cause(self) -> str:
        found = [match for line in self._lines if (match := _CAUSE.search(line))]
        return f", after: {found[-1][1][:300].rstrip('.')}" if found else ""

    def _kill(self) -> None:
        assert self._process is not None, "it has been started"
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _remedy(self, error: str) -> str:
        if "no vLLM" in error:
            return "name the Python of an environment that has it with --engine-python, or `pip install vllm` there"
        return "look into the log above, and at --engine-args"

    def _send(self, message: msgspec.Struct) -> None:
        assert self._writer is not None, "it has been started"
        send(self._writer, message)

    async def _receive(self) -> bytes:
        assert self._reader is not None, "it has been started"
        return await receive(self._reader)


class _LineProtocol(asyncio.StreamReaderProtocol):
    """A worker that ends with something unread resets the connection: an end like others, before which it is heard."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(None)


async def open_line(ours: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """To the worker, as `asyncio.open_connection` has it."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, protocol = await loop.create_connection(lambda: _LineProtocol(reader), sock=ours)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def _lost(reason: str, *, crashed: bool) -> RyzansteinError:
    return InternalError(reason) if crashed else RingLost(reason)
