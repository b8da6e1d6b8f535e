"""A NATS server that can be killed, stopped, started again, and whose disk can be filled."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import nats.errors
from nats.js.api import StreamConfig
from nats.js.errors import APIError

from services.cli.supervision.nats_server import LocalNats
from shared.nats.bus import Bus
from shared.process import die_with_parent

STORE_BYTES = 64 << 20


class SmallDisk:
    """A file system of its own, small enough to be filled; needs the privilege to mount one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._ballast = directory / "ballast"
        self.mounted = False

    def mount(self) -> bool:
        """Returns whether that is permitted."""
        self.directory.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={STORE_BYTES}", "chaos", str(self.directory)]
        with contextlib.suppress(OSError):
            self.mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        return self.mounted

    def fill(self) -> None:
        """Leaves no byte free."""
        with self._ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def unmount(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.directory)], capture_output=True, check=False)
            self.mounted = False


@contextlib.asynccontextmanager
async def full_store(bus: Bus) -> AsyncIterator[None]:
    """Meanwhile NATS has no room for more: a stream holds all that its quota leaves."""
    jetstream = bus.jetstream()
    await jetstream.add_stream(StreamConfig(name="BALLAST", subjects=["ballast"]))
    for size in (1 << 20, 1 << 16, 1 << 10, 16):
        with contextlib.suppress(APIError, nats.errors.Error):
            while True:
                await jetstream.publish("ballast", bytes(size), timeout=5)
    yield
    await jetstream.delete_stream("BALLAST")


class Broker(LocalNats):
    """`LocalNats` with faults. `quota`: bytes that JetStream may store, where the disk itself cannot be filled."""

    def __init__(self, directory: Path, *, quota: int = 0, least_rights: bool = False) -> None:
        super().__init__(directory, least_rights=least_rights)
        self._quota = quota

    def _write_config(self) -> Path:
        config = super()._write_config()
        if self._quota:
            text = config.read_text()
            config.write_text(text.replace("jetstream {", f"jetstream {{ max_file_store: {self._quota},"))
        return config

    @property
    def port(self) -> int:
        return self._port

    async def up(self) -> None:
        await self.start(die_with_parent())

    async def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        await self.wait()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def down(self) -> None:
        """Ends it even if it was stopped."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        await asyncio.shield(self.stop())
