"""Which stack a command is about: the command line's settings, and the stack's NATS and gateway.

A stack writes a run file once its NATS runs, and again when it is up, so that `status` and `chat` find it. It holds the
password of the stack's NATS server and is readable by its owner alone. Credentials in addresses of a NATS that somebody
else runs are never shown.
"""

import fcntl
import inspect
import os
import re
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple
from urllib.parse import unquote

import msgspec
import typer
from platformdirs import user_data_path
from pydantic import Field, SecretStr
from pydantic_settings import CliSuppress

from shared.config import CommonSettings, load_settings
from shared.errors import ConfigurationError
from shared.messages import GroupRecord
from shared.model_store.settings import ModelStoreSettings
from shared.tls import client_context, pinned_context


class LocalSettings(ModelStoreSettings):
    """Settings of the command line; options of the commands take precedence."""

    data_dir: Path = Field(default_factory=lambda: user_data_path("ryzanstein"))
    """The local stack's NATS store, logs and run file."""
    url: CliSuppress[str] = ""
    """The gateway that commands talk to where no stack runs here."""
    api_key: CliSuppress[SecretStr] = SecretStr("")
    """API key that commands send to that gateway."""


class StackSettings(LocalSettings):
    """Settings of the services that the stack must know as well; they read these by themselves too."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The executors' device: GPUs are divided among the groups unless it is `cpu`."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of each rank; 0: the cores divided among all ranks of the stack."""
    replicas_on_host: int = Field(default=0, ge=0)
    """Executor groups that share this host's memory; 0: those of the stack."""
    gateways: int = Field(default=1, ge=1, le=64)
    """Gateway processes on one port, among which the system divides connections (Linux)."""
    schedulers: int = Field(default=1, ge=1, le=16)
    """Scheduler processes, which share the queue; with two requests go on while one is started again."""
    tls_certificate: str = ""
    """File of the API's certificate chain (PEM); the API is at https:// then."""
    tls_key: str = ""
    """File of its private key (PEM)."""
    tls_client_ca: str = ""
    """File of the authorities that must have signed clients' certificates; empty: clients need none."""
    drain_grace: float = Field(default=10.0, ge=0)
    """Seconds that an executor takes to finish what runs; only then may it be killed."""
    handover_timeout: float = Field(default=10.0, ge=0)
    """Seconds more that it takes to transfer its sessions' KV blocks to peers."""
    drain_delay: float = Field(default=0.0, ge=0)
    """Seconds that the gateway keeps accepting requests before that."""
    drain_timeout: float = Field(default=20.0, ge=0)
    """Seconds that the gateway takes to finish its streams; only then may it be killed."""


class StartedProcess(msgspec.Struct, frozen=True):
    service: str
    instance: str
    pid: int


class RunFile(msgspec.Struct, frozen=True):
    """A local stack that is up, or starts."""

    pid: int
    gateway_url: str  # empty while it starts
    nats_url: str
    nats_user: str
    nats_password: str
    # File of the gateway's certificate, where it has one: what clients on this machine trust.
    certificate: str = ""
    model: str = ""  # what it serves, and where that lies
    directory: str = ""
    started: list[StartedProcess] = []  # its services as they were first started


def write_run_file(data_dir: Path, content: RunFile) -> None:
    path = _path(data_dir)
    fresh = path.with_name(f"{path.name}.new")  # whoever reads finds the old note or the new one, whole
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(content))
    fresh.replace(path)


def read_run_file(data_dir: Path, *, starting: bool = False) -> RunFile | None:
    """The stack that is up on `data_dir`, or with `starting` also one that starts; None when there is none (a note
    left by a dead one counts not)."""
    try:
        content = msgspec.json.decode(_path(data_dir).read_bytes(), type=RunFile)
        os.kill(content.pid, 0)
    except (OSError, msgspec.DecodeError):
        return None
    return content if content.gateway_url or starting else None


def remove_run_file(data_dir: Path) -> None:
    _path(data_dir).unlink(missing_ok=True)


def lock(data_dir: Path) -> IO[bytes]:
    """Takes the data directory for this process; close the file to give it back.

    Raises `ConfigurationError` when another stack has it, or it cannot be written.
    """
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (data_dir / "lock").open("ab")
    except OSError as error:
        raise ConfigurationError(
            f"The data directory {data_dir} cannot be used ({error.strerror}); choose another with --data-dir."
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigurationError(
            f"Another stack already runs on the data directory {data_dir}; stop it, or choose another "
            "directory with --data-dir."
        ) from None
    return file


def is_locked(data_dir: Path) -> bool:
    """Whether a stack has the directory: one that starts has it before it writes its run file."""
    try:
        with (data_dir / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _path(data_dir: Path) -> Path:
    return data_dir / "stack.json"


CONNECT_TIMEOUT = 5.0  # seconds: whoever typed the command looks on
_ADDRESS = re.compile(
    r"(?P<scheme>(?:nats|tls|ws|wss)://)(?:(?P<user>[^:@/]*)(?::(?P<password>[^@/]*))?@)?(?P<rest>[^@]+)"
)


def existing_nats(settings: CommonSettings, urls: str) -> CommonSettings:
    """`settings` for the servers `urls` (several with commas). Raises `ConfigurationError`.

    One user and password for all of them leaves the addresses for the settings of that name; a token, or
    different credentials, stay in the addresses, where the NATS client reads them for each server.
    """
    addresses = [_parsed(url.strip()) for url in urls.split(",") if url.strip()]
    if not addresses:
        raise ConfigurationError("The NATS address is empty; write it as nats://host:port.")
    found = {(one["user"], one["password"]) for one in addresses if one["user"] is not None}
    if not found:
        return settings.model_copy(update={"nats_url": _joined(addresses)})
    user, password = next(iter(found))
    if len(found) > 1 or password is None:
        kept = ",".join(one[0] for one in addresses)
        return settings.model_copy(update={"nats_url": kept, "nats_user": "", "nats_password": SecretStr("")})
    return settings.model_copy(
        update={
            "nats_url": _joined(addresses),
            "nats_user": unquote(user),
            "nats_password": SecretStr(unquote(password)),
        }
    )


def without_credentials(urls: str) -> str:
    """`urls` as they may be shown."""
    return ",".join(re.sub(r"^(\w+:/+)?.*@", lambda match: match[1] or "", url.strip()) for url in urls.split(","))


def _parsed(url: str) -> re.Match[str]:
    match = _ADDRESS.fullmatch(url)
    if match is None:
        raise ConfigurationError(f"{without_credentials(url)!r} is no NATS address; write it as nats://host:port.")
    return match


def _joined(addresses: list[re.Match[str]]) -> str:
    return ",".join(one["scheme"] + one["rest"] for one in addresses)


Url = Annotated[str, typer.Option(help="The gateway. Default: the local stack's. [env: RYZANSTEIN_URL]")]
ApiKey = Annotated[
    str,
    typer.Option(
        envvar="RYZANSTEIN_API_KEY",
        help="Where the gateway asks for one. Other users of this machine can see options: the variable is safer.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print all details as JSON.")]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Where the stack keeps its NATS store, logs and run file. [env: RYZANSTEIN_DATA_DIR]"),
]
NatsUrl = Annotated[
    str,
    typer.Option(
        help="An existing NATS server (nats://[user:password@]host:port), or several with commas. "
        "[env: RYZANSTEIN_NATS_URL]"
    ),
]


def with_options_of(command: Callable[..., Any], run: Callable[..., None]) -> Callable[..., None]:
    """`run` as Typer is to see it: with the options of `command` behind its first parameter, then those of its own
    before its last, which takes the others by name."""
    _, *own = inspect.signature(command).parameters.values()
    *common, _ = inspect.signature(run).parameters.values()
    run.__signature__ = inspect.Signature([*own, *common])  # type: ignore[attr-defined]
    run.__annotations__ |= command.__annotations__
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


class Gateway(NamedTuple):
    url: str
    # File of the one to trust, of a gateway on this machine; empty: those of known authorities.
    certificate: str = ""


def find_stack(data_dir: Path | None, *, starting: bool = False) -> RunFile | None:
    """The local stack, if it is up; with `starting` also while it starts."""
    return read_run_file(_directory(data_dir), starting=starting)


def _directory(data_dir: Path | None) -> Path:
    return load_settings(LocalSettings, data_dir=data_dir).data_dir.expanduser()


def nats_of_stack(data_dir: Path | None, nats_url: str) -> CommonSettings:
    """The NATS that was named, else the local stack's, else what the environment says."""
    found = running_nats(data_dir, nats_url)
    if found is None:
        raise no_stack(_directory(data_dir), "name its NATS with --nats-url")
    return found


def running_nats(data_dir: Path | None, nats_url: str) -> CommonSettings | None:
    """The same; None: no stack runs here, and none elsewhere was named."""
    environment = load_settings(CommonSettings, nats_connect_timeout=CONNECT_TIMEOUT)
    if nats_url:
        return existing_nats(environment, nats_url)
    if (stack := find_stack(data_dir, starting=True)) is not None:
        return load_settings(
            CommonSettings,
            nats_url=stack.nats_url,
            nats_user=stack.nats_user,
            nats_password=stack.nats_password,
            nats_connect_timeout=CONNECT_TIMEOUT,
        )
    if "nats_url" in environment.model_fields_set:
        return existing_nats(environment, environment.nats_url)
    return None


def gateway_of_stack(data_dir: Path | None) -> Gateway:
    """The local stack's gateway, else the one that the environment names, else where one usually is."""
    if (stack := find_stack(data_dir)) is not None:
        return Gateway(stack.gateway_url, stack.certificate)
    url = load_settings(LocalSettings).url
    directory = _directory(data_dir)
    if data_dir is not None or (is_locked(directory) and not url):
        raise no_stack(directory, "name its gateway with --url")
    return Gateway(url or "http://127.0.0.1:8000")


def trust_of(certificate: str, ca: str = "") -> ssl.SSLContext | bool:
    """Whom to trust: the authorities in the file `ca`, the one certificate of a gateway on this machine, or
    those that everybody trusts."""
    if ca:
        return client_context(ca)
    return pinned_context(certificate) if certificate else True


def no_stack(directory: Path, instead: str) -> ConfigurationError:
    if not is_locked(directory):
        return ConfigurationError(
            f"No stack runs on the data directory {directory}; start one with `ryzanstein up`, or {instead}."
        )
    if read_run_file(directory, starting=True) is None:
        return ConfigurationError(
            f"The stack on the data directory {directory} is starting: it fetches its model or makes it ready, and has "
            "started no service yet. `ryzanstein up` shows how far it is."
        )
    return ConfigurationError(
        f"The stack on the data directory {directory} is starting: `ryzanstein status` shows how far each service is; "
        f"logs are in {directory / 'logs'}."
    )


def known_group(records: Mapping[str, GroupRecord], group: str) -> GroupRecord:
    """The group's record. Raises `ConfigurationError` where there is none, or it has left."""
    present = sorted(name for name, record in records.items() if record.state != "gone")
    if group in present:
        return records[group]
    names = f"the groups are: {', '.join(present)}" if present else "there is none at the moment"
    if group in records:
        raise ConfigurationError(
            f"The group {group} has left ({records[group].message}); start its executor to have it back. "
            f"{names[0].upper()}{names[1:]}."
        )
    raise ConfigurationError(f"There is no group {group}; {names}.")
