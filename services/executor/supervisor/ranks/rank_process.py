"""The process of one rank, seen from whoever started it.

`ForkClient` starts the fork server, has it fork ranks, and does without it where it must.
"""

import asyncio
import contextlib
import ctypes
import ipaddress
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from services.executor.core.settings import ExecutorSettings, thread_count
from services.executor.supervisor.ranks import early_fork_server
from services.executor.supervisor.ranks.early_fork_server import RUNTIME, StartedForkServer
from services.executor.supervisor.ranks.fork_server import (
    LONGEST_MESSAGE,
    RANK_MODULE,
    Fork,
    Forked,
    ForkRefused,
    ForkServerReady,
    ImportModules,
)
from shared.process import VERSION, die_with_parent

log = structlog.get_logger(__name__)

IMPORTED_WITHIN = 300.0  # seconds for the imports, from a disk that has other work
FORKED_WITHIN = 30.0
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_ORPHANS_GONE_WITHIN = 0.2
_OUTPUT = (1, 2)  # a rank writes where we do: the server may have been started before we were told where

_answers = msgspec.json.Decoder(ForkServerReady | Forked | ForkRefused)


class ForkedRank:
    """A rank's process, our child although another process has forked it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def _on_end(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        os.close(self._pidfd)
        assert ended is not None
        self.returncode = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        # What it has started itself (a compiler) is an orphan, and would become a zombie of ours.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
            loop.call_later(_ORPHANS_GONE_WITHIN, _reap, self.pid)
        self._ended.set()


def _reap(group: int) -> None:
    """Takes note of the ends of our children in the process group `group`."""
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG) is not None:
            pass


class ForkClient:
    """One fork server at a time. `fork` gives None where there is none that may be used."""

    def __init__(self, variables: Mapping[str, str], started: StartedForkServer | None = None) -> None:
        """`variables`: of the ranks' environment, where ours does not have them. `started`: a server that we have
        already."""
        self._variables = dict(variables)
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._greeted = False
        self._given_up = False  # whether another server would be of no use either
        self._busy = asyncio.Lock()
        self._needed: list[str] = []
        if started is not None:
            self._process, self._line = started

    @property
    def pid(self) -> int | None:
        """None while there is no server."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts a server where there is none. It imports while others go on."""
        if self._given_up:
            return
        if not _is_subreaper():
            self._give_up("this system has no forked processes that become another's children")
        elif not self._alive:
            self.close()
            self._process, self._line = early_fork_server.start()
            self._greeted = False
            self._import(self._needed)

    def need(self, modules: Sequence[str]) -> None:
        """Ranks to come will need `modules` too."""
        new = [name for name in modules if name not in self._needed]
        self._needed += new
        if self._alive:
            self._import(new)

    async def fork(self, stdin: int, events: int, variables: Mapping[str, str] | None = None) -> ForkedRank | None:
        """A rank with `stdin` and `events`, or None: it is to be started in another way. `variables`: of its
        environment, whatever ours has."""
        async with self._busy:
            if not self._alive:
                return None
            try:
                if not self._greeted and not await self._greet():
                    return None
                return await self._fork(stdin, events, variables or {})
            except (OSError, TimeoutError, EOFError, msgspec.MsgspecError) as error:
                log.warning("fork_server_lost", reason=str(error) or type(error).__name__)
                self.close()
                return None

    def disable(self) -> None:
        """From now on there is none."""
        self._given_up = True
        self.close()

    def close(self) -> None:
        """Ends the server; ranks live on."""
        process, self._process = self._process, None
        if self._line is not None:
            self._line.close()
            self._line = None
        if process is not None:
            process.kill()
            process.wait()

    @property
    def _alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def _greet(self) -> bool:
        """Waits for the imports; whether the server may be used."""
        hello = await self._answer(IMPORTED_WITHIN)
        if not isinstance(hello, ForkServerReady) or hello.version != VERSION:
            self._give_up(f"it answers {hello} to the version {VERSION}")
            return False
        self._greeted = True
        log.info("fork_server_ready", pid=self.pid)
        return True

    async def _fork(self, stdin: int, events: int, own: Mapping[str, str]) -> ForkedRank | None:
        assert self._line is not None, "there is a server"
        fds = [stdin, events, *_OUTPUT]
        socket.send_fds(self._line, [msgspec.json.encode(Fork(self._variables, dict(own)))], fds)
        match await self._answer(FORKED_WITHIN):
            case Forked(pid):
                return ForkedRank(pid)
            case answer:
                self._give_up(answer.reason if isinstance(answer, ForkRefused) else f"it answers {answer}")
                return None

    async def _answer(self, timeout: float) -> ForkServerReady | Forked | ForkRefused:
        assert self._line is not None, "there is a server"
        async with asyncio.timeout(timeout):
            answer = await asyncio.get_running_loop().sock_recv(self._line, LONGEST_MESSAGE)
        if not answer:
            raise EOFError("it has ended")
        decoded: ForkServerReady | Forked | ForkRefused = _answers.decode(answer)
        return decoded

    def _import(self, modules: list[str]) -> None:
        if modules and self._line is not None:
            with contextlib.suppress(OSError):  # it is seen by the next fork
                self._line.send(msgspec.json.encode(ImportModules(modules)))

    def _give_up(self, reason: str) -> None:
        log.warning("fork_server_not_used", reason=reason)
        self.disable()


def _is_subreaper() -> bool:
    """Has orphaned descendants of this process become its children; whether the system can."""
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


# torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp names them. What the operator has set goes first.
NCCL_DEFAULTS = {
    # An error that NCCL reports on its own (a peer's socket closed, a link down) ends the process, which the
    # supervisor sees at once; PyTorch's thread that watches must not try to clean up first, where it can hang.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    # A thread that is stuck in the driver ends its process too, after PyTorch's 8 minutes; a hang with a step in
    # flight has been seen by the supervisor long before.
    "TORCH_NCCL_ENABLE_MONITORING": "1",
    # Waiting on the host would be a synchronisation per sum, which a CUDA graph cannot hold.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "NCCL_DEBUG": "WARN",
}


_Process = ForkedRank | asyncio.subprocess.Process


@dataclass(eq=False)
class LocalRank:
    process: _Process
    commands: asyncio.WriteTransport
    events: asyncio.StreamReader  # a line for each event; ends with the process
    pipe: asyncio.ReadTransport

    @classmethod
    async def start(
        cls,
        threads: int,
        settings: ExecutorSettings,
        forks: ForkClient | None = None,
        own: Mapping[str, str] | None = None,
    ) -> "LocalRank":
        """Forked by the server of `forks` where that can be, else a new Python. `own`: variables of its environment,
        whatever ours has."""
        commands_read, commands_write = os.pipe()
        events_read, events_write = os.pipe()
        loop = asyncio.get_running_loop()
        commands, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(commands_write, "wb"))
        events = asyncio.StreamReader()
        pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(events), os.fdopen(events_read, "rb")
        )
        try:
            process: _Process | None = None
            if forks is not None:
                process = await forks.fork(commands_read, events_write, own)
            if process is None:
                variables = {**environment(threads, settings), **(own or {})}
                process = await _executed(commands_read, events_write, variables)
        except BaseException:
            commands.close()
            pipe.close()
            raise
        finally:
            os.close(commands_read)
            os.close(events_write)
        return cls(process, commands, events, pipe)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    def tell(self, line: bytes) -> None:
        if not self.commands.is_closing():
            self.commands.write(line)

    def kill(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    async def wait(self) -> int:
        return await self.process.wait()

    def close(self) -> None:
        """Reads no more events, and tells nothing more."""
        self.pipe.close()
        if not self.commands.is_closing():
            self.commands.abort()


# `LocalRank.start`, or what takes its place where there are no processes, as in a simulation.
StartRank = Callable[[int, ExecutorSettings, ForkClient | None, Mapping[str, str]], Awaitable[LocalRank]]


async def _executed(commands: int, events: int, environment: dict[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        RANK_MODULE,
        str(events),
        stdin=commands,
        pass_fds=(events,),
        preexec_fn=die_with_parent(signal.SIGKILL),
        start_new_session=True,  # Ctrl-C goes to the supervisor alone, which drains the ring
        env=environment,
    )


def variables(threads: int, settings: ExecutorSettings) -> dict[str, str]:
    """Of a rank's environment, where the operator has not set them. OpenMP reads its own when torch is imported. A
    thread that waits spins for a moment only, which bridges the gap between two operations: one that spins for long
    takes the core from the other ranks and services of the machine, and one that sleeps at once is woken too late."""
    own = {**RUNTIME, "OMP_NUM_THREADS": str(threads), **NCCL_DEFAULTS}
    if ipaddress.ip_address(socket.gethostbyname(settings.meeting_host)).is_loopback:
        own |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return own


def environment(threads: int, settings: ExecutorSettings) -> dict[str, str]:
    return {**variables(threads, settings), **os.environ}


def fork_client(settings: ExecutorSettings) -> ForkClient:
    """For ranks of this host that compute; the stub's start as fast by themselves. Its server may not run yet."""
    client = ForkClient(variables(thread_count(settings), settings), early_fork_server.taken())
    if settings.engine == "stub" or settings.serving_engine or settings.fork_server == "off":
        client.disable()
    return client
