"""The process of one rank, seen from whoever started it."""

import asyncio
import ipaddress
import os
import signal
import socket
import sys
from typing import Protocol

from services.executor.settings import ExecutorSettings
from shared.process import die_with_parent

RANK_MODULE = "services.executor.rank"
SPIN_COUNT = "10000"
"""Turns that an OpenMP thread waits before it sleeps: the time between two operations."""

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


class LocalRank:
    """A child of this process."""

    def __init__(
        self, process: asyncio.subprocess.Process, events: asyncio.StreamReader, pipe: asyncio.ReadTransport
    ):
        self._process = process
        self.events = events
        """A line for each event; ends with the process."""
        self._pipe = pipe

    @classmethod
    async def start(cls, threads: int, settings: ExecutorSettings) -> "LocalRank":
        read_end, write_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                RANK_MODULE,
                str(write_end),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(write_end,),
                preexec_fn=die_with_parent(signal.SIGKILL),
                start_new_session=True,  # Ctrl-C goes to the orchestrator alone, which drains the ring
                env=environment(threads, settings),
            )
        finally:
            os.close(write_end)
        events = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(events), os.fdopen(read_end, "rb")
        )
        return cls(process, events, pipe)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def tell(self, line: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        if not stdin.is_closing():
            stdin.write(line)

    def kill(self) -> None:
        if self._process.returncode is None:
            try:
                self._process.kill()
            except ProcessLookupError:
                return

    async def wait(self) -> int:
        return await self._process.wait()

    def close(self) -> None:
        """Reads no more events."""
        self._pipe.close()


def environment(threads: int, settings: ExecutorSettings) -> dict[str, str]:
    """OpenMP reads these when torch is imported. A thread that waits spins for a moment only, which
    bridges the gap between two operations: one that spins for long takes the core from the other
    ranks and services of the machine, and one that sleeps at once is woken too late."""
    own = {"GOMP_SPINCOUNT": SPIN_COUNT, "OMP_NUM_THREADS": str(threads), **NCCL_IS_LOUD}
    if ipaddress.ip_address(socket.gethostbyname(settings.meeting_host)).is_loopback:
        own |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {**own, **os.environ}
