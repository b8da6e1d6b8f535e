"""The way between one service and NATS, which a test can cut as a dead switch would: silence, no goodbye.

    namespace   service in a network namespace of its own ══ veth pair ══ forwarder ── NATS
                cut: the pair is taken down, packets are lost, TCP tries again by itself
    proxy       service ── forwarder ── NATS
                cut: the forwarder passes no byte on and answers nobody

Namespaces need privileges; `open_links` tries at run time and says which of the two it will be.
"""

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

ATTACH_TIMEOUT = 10.0
# Environment variable: `proxy` keeps to the proxy where namespaces would be permitted.
FORCE = "RYZANSTEIN_CHAOS_PARTITION"

_numbers = itertools.count()


class Pass(Protocol):
    """Changes what the broker sends to a service."""

    def feed(self, data: bytes) -> bytes: ...


class Forwarder:
    """Passes bytes between a service and NATS, and stops doing so when told."""

    def __init__(self, target: tuple[str, int], mischief: Pass | None = None) -> None:
        self._target = target
        self._mischief = mischief
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int = 0) -> int:
        """Returns the port."""
        self._server = await asyncio.start_server(self._serve, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        self._open.clear()

    def sever(self) -> None:
        """As `cut`, and both sides see their connection end."""
        self.cut()
        for task in self._tasks:
            task.cancel()

    def heal(self) -> None:
        self._open.set()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        feed = self._mischief.feed if self._mischief is not None else None
        for source, sink, change in ((reader, far_writer, None), (far_reader, writer, feed)):
            task = asyncio.create_task(self._pump(source, sink, change))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, change: Callable[[bytes], bytes] | None
    ) -> None:
        try:
            while data := await source.read(1 << 16):
                await self._open.wait()
                sink.write(change(data) if change is not None else data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()


class Link(Protocol):
    """One service's way to NATS."""

    prefix: list[str]  # words before the service's command
    host: str  # where the service is to listen

    async def prepare(self, nats_port: int) -> str:
        """Before the service starts; returns the address of NATS for it."""
        ...

    async def attach(self, pid: int) -> None:
        """When the service's process is there."""
        ...

    def reach(self, address: str) -> str:
        """Where the test finds what listens at `address` in the service."""
        ...

    async def cut(self) -> None: ...

    async def heal(self) -> None: ...

    async def close(self) -> None: ...


class Direct:
    """Not to be cut."""

    prefix: list[str] = []
    host = "127.0.0.1"

    async def prepare(self, nats_port: int) -> str:
        return f"nats://127.0.0.1:{nats_port}"

    async def attach(self, pid: int) -> None:
        pass

    def reach(self, address: str) -> str:
        return address

    async def cut(self) -> None:
        raise AssertionError("this service has no link that can be cut")

    async def heal(self) -> None:
        pass

    async def close(self) -> None:
        pass


class ProxyLink(Direct):
    """A forwarder on loopback, with mischief where asked for."""

    def __init__(self, mischief: Pass | None = None) -> None:
        self._mischief = mischief
        self._forwarder: Forwarder | None = None
        self._port = 0

    async def prepare(self, nats_port: int) -> str:
        if self._forwarder is None:
            self._forwarder = Forwarder(("127.0.0.1", nats_port), self._mischief)
            self._port = await self._forwarder.listen("127.0.0.1")
        return f"nats://127.0.0.1:{self._port}"

    async def cut(self) -> None:
        assert self._forwarder is not None
        self._forwarder.cut()

    async def heal(self) -> None:
        if self._forwarder is not None:
            self._forwarder.heal()

    async def close(self) -> None:
        if self._forwarder is not None:
            await self._forwarder.close()


class NamespaceLink:
    """Two veth pairs: one to NATS, which is cut, and one on which the test reaches the service.

    The namespace lives as long as the service's process, and the pairs as long as the namespace.
    """

    prefix = ["unshare", "--net"]
    host = "0.0.0.0"  # of a namespace that nobody else can reach

    def __init__(self) -> None:
        self._net = f"10.{random.randrange(64, 250)}.{random.randrange(256)}"
        self._name = f"rz{os.getpid() % 100_000}x{next(_numbers)}"
        self._forwarder: Forwarder | None = None
        self._nats_port = 0

    async def prepare(self, nats_port: int) -> str:
        self._nats_port = nats_port
        return f"nats://{self._net}.1:{nats_port}"

    async def attach(self, pid: int) -> None:
        await _until_unshared(pid)
        await self.close()
        inside = ["nsenter", "-t", str(pid), "-n"]
        await _run(*inside, "ip", "link", "set", "lo", "up")
        for ours, theirs, base in ((f"{self._name}n", "nats0", 0), (f"{self._name}w", "web0", 4)):
            await _run("ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", str(pid))
            await _run("ip", "addr", "add", f"{self._net}.{base + 1}/30", "dev", ours)
            await _run("ip", "link", "set", ours, "up")
            await _run(*inside, "ip", "addr", "add", f"{self._net}.{base + 2}/30", "dev", theirs)
            await _run(*inside, "ip", "link", "set", theirs, "up")
        self._forwarder = Forwarder(("127.0.0.1", self._nats_port))
        await self._forwarder.listen(f"{self._net}.1", self._nats_port)

    def reach(self, address: str) -> str:
        return f"{self._net}.6:{address.rpartition(':')[2]}"

    async def cut(self) -> None:
        await _run("ip", "link", "set", f"{self._name}n", "down")

    async def heal(self) -> None:
        """Setting a link down keeps its address, and drops its routes, which come back with it."""
        with contextlib.suppress(OSError):  # its service is gone, and the pair with it
            await _run("ip", "link", "set", f"{self._name}n", "up")

    async def close(self) -> None:
        if self._forwarder is not None:
            await self._forwarder.close()
            self._forwarder = None


async def namespaces_work() -> bool:
    """Tries it out, to the end."""
    if os.environ.get(FORCE) == "proxy" or not all(map(shutil.which, ("unshare", "nsenter", "ip", "sleep"))):
        return False
    link = NamespaceLink()
    await link.prepare(1)
    process = await asyncio.create_subprocess_exec(*link.prefix, "sleep", "60", stderr=asyncio.subprocess.DEVNULL)
    try:
        await link.attach(process.pid)
        await link.cut()
        await link.heal()
    except (OSError, TimeoutError):
        return False
    else:
        return True
    finally:
        await link.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _until_unshared(pid: int) -> None:
    end = time.monotonic() + ATTACH_TIMEOUT
    while _namespace(pid) == _namespace(os.getpid()):
        assert time.monotonic() < end, f"process {pid} has no network namespace of its own"
        await asyncio.sleep(0.01)


def _namespace(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


async def _run(*command: str) -> None:
    """Raises `OSError` with what the program said."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    if process.returncode:
        raise OSError(f"{' '.join(command)}: {errors.decode().strip()}")
