"""Which stack a command is about: its NATS and its gateway."""

import ssl
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from services.cli.nats_address import existing_nats
from services.cli.run_file import RunFile, is_locked, read_run_file
from services.cli.settings import LocalSettings
from shared.config import CommonSettings, load_settings
from shared.errors import ConfigurationError
from shared.tls import client_context, pinned_context

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


class Gateway(NamedTuple):
    """Where one answers."""

    url: str
    certificate: str = ""
    """File of the one to trust, of a gateway on this machine; empty: those of known authorities."""


def find_stack(data_dir: Path | None, *, starting: bool = False) -> RunFile | None:
    """The local stack, if it is up; with `starting` also while it starts."""
    return read_run_file(_directory(data_dir), starting=starting)


def _directory(data_dir: Path | None) -> Path:
    return load_settings(LocalSettings, data_dir=data_dir).data_dir.expanduser()


def nats_of_stack(data_dir: Path | None, nats_url: str) -> CommonSettings:
    """The NATS that was named, else the local stack's, else what the environment says."""
    environment = load_settings(CommonSettings, nats_connect_timeout=5.0)
    if nats_url:
        return existing_nats(environment, nats_url)
    stack = find_stack(data_dir, starting=True)
    if stack is not None:
        return load_settings(
            CommonSettings,
            nats_url=stack.nats_url,
            nats_user=stack.nats_user,
            nats_password=stack.nats_password,
            nats_connect_timeout=5.0,
        )
    if "nats_url" in environment.model_fields_set:
        return existing_nats(environment, environment.nats_url)
    raise no_stack(_directory(data_dir), "name its NATS with --nats-url")


def gateway_of_stack(data_dir: Path | None) -> Gateway:
    """The local stack's gateway, else the one that the environment names, else where one usually is."""
    stack = find_stack(data_dir)
    if stack is not None:
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
