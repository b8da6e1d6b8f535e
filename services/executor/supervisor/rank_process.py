"""The process of one rank, seen from whoever started it."""

import asyncio
import ipaddress
import os
import signal
import socket
import sys
from typing import Protocol

from services.executor.core.settings import ExecutorSettings, thread_count
from services.executor.supervisor import early_fork_server
from services.executor.supervisor.early_fork_server import RUNTIME
from services.executor.supervisor.fork_client import ForkClient, ForkedRank
from services.executor.supervisor.fork_server import RANK_MODULE
from shared.process import die_with_parent

SPIN_COUNT = RUNTIME["GOMP_SPINCOUNT"]

NCCL_IS_LOUD = {
    # An error that NCCL reports on its own (a peer's socket closed, a link down) ends the process, which the
    # orchestrator sees at once; PyTorch's thread that watches must not try to clean up first, where it can hang.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    # A thread that is stuck in the driver ends its process too, after PyTorch's 8 minutes; a hang with a step in
    # flight has been seen by the orchestrator long before.
    "TORCH_NCCL_ENABLE_MONITORING": "1",
    # Waiting on the host would be a synchronisation per sum, which a CUDA graph cannot hold.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "NCCL_DEBUG": "WARN",
}
"""torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp names them. What the operator has set goes first."""


class RankProcess(Protocol):
    """A rank's process, here or on another host. Its events are read beside it."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def tell(self, line: bytes) -> None:
        """Writes to its standard input; one that has ended is told nothing."""

    def kill(self) -> None: ...

    async def wait(self) -> int: ...


class _Process(Protocol):
    """What has been started: by us, or by the fork server."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def kill(self) -> None: ...

    async def wait(self) -> int: ...


class LocalRank:
    """A child of this process."""

    def __init__(
        self,
        process: _Process,
        commands: asyncio.WriteTransport,
        events: asyncio.StreamReader,
        pipe: asyncio.ReadTransport,
    ):
        self._process = process
        self._commands = commands
        self.events = events
        """A line for each event; ends with the process."""
        self._pipe = pipe

    @classmethod
    async def start(
        cls, threads: int, settings: ExecutorSettings, forks: ForkClient | None = None
    ) -> "LocalRank":
        """Forked by the server of `forks` where that can be, else a new Python."""
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
                process = await forks.fork(commands_read, events_write)
            if process is None:
                process = await _executed(commands_read, events_write, environment(threads, settings))
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
        return self._process.pid

    @property
    def is_forked(self) -> bool:
        """Whether the fork server has started it."""
        return isinstance(self._process, ForkedRank)

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def tell(self, line: bytes) -> None:
        if not self._commands.is_closing():
            self._commands.write(line)

    def kill(self) -> None:
        if self._process.returncode is None:
            try:
                self._process.kill()
            except ProcessLookupError:
                return

    async def wait(self) -> int:
        return await self._process.wait()

    def close(self) -> None:
        """Reads no more events, and tells nothing more."""
        self._pipe.close()
        if not self._commands.is_closing():
            self._commands.abort()


async def _executed(commands: int, events: int, environment: dict[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        RANK_MODULE,
        str(events),
        stdin=commands,
        pass_fds=(events,),
        preexec_fn=die_with_parent(signal.SIGKILL),
        start_new_session=True,  # Ctrl-C goes to the orchestrator alone, which drains the ring
        env=environment,
    )


def variables(threads: int, settings: ExecutorSettings) -> dict[str, str]:
    """Of a rank's environment, where the operator has not set them. OpenMP reads its own when torch is imported. A
    thread that waits spins for a moment only, which bridges the gap between two operations: one that spins for long
    takes the core from the other ranks and services of the machine, and one that sleeps at once is woken too late."""
    own = {**RUNTIME, "OMP_NUM_THREADS": str(threads), **NCCL_IS_LOUD}
    if ipaddress.ip_address(socket.gethostbyname(settings.meeting_host)).is_loopback:
        own |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return own


def environment(threads: int, settings: ExecutorSettings) -> dict[str, str]:
    """Of a rank."""
    return {**variables(threads, settings), **os.environ}


def fork_client(settings: ExecutorSettings) -> ForkClient | None:
    """For ranks of this host that compute; the stub's start as fast by themselves. Its server may not run yet."""
    client = ForkClient(variables(thread_count(settings), settings), early_fork_server.taken())
    if settings.engine == "stub" or settings.fork_server == "off":
        client.close()
        return None
    return client
