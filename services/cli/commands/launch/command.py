"""`ryzanstein launch CLIENT`: a coding agent or an editor on the local stack, or on the gateway that is named."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from services.cli.commands.launch.clients import CLIENTS, Client, ClientSetup, Target
from services.cli.commands.launch.served import Served
from services.cli.commands.launch.stack import started_stack
from services.cli.target import (
    ApiKey,
    DataDir,
    Gateway,
    LocalSettings,
    Url,
    find_stack,
    gateway_of_stack,
    is_locked,
    trust_of,
)
from services.cli.ui import console, say
from shared.config import load_settings
from shared.errors import ConfigurationError

_NO_KEY = "none"  # what clients send that insist on a key, to a gateway that asks for none
_CONTEXT = 8192  # tokens, where the gateway does not know them yet
_TRUST = ("NODE_EXTRA_CA_CERTS", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


def launch(
    client: Annotated[str, typer.Argument(metavar="|".join(CLIENTS))],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Handed to the client, behind `--` where they begin with a dash.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="The model that it talks to. Default: the first that is served.", metavar="NAME")
    ] = "",
    url: Url = "",
    print_only: Annotated[
        bool, typer.Option("--print", help="Show the settings as shell lines, and start nothing.")
    ] = False,
    data_dir: DataDir = None,
    api_key: ApiKey = "",
) -> None:
    """Start a coding agent or an editor with the settings that lead it to your models. Its own configuration is not
    touched. Where no stack runs, one is started, and stopped when the client ends."""
    found = _known(client)
    if not print_only and shutil.which(found.program) is None:
        raise ConfigurationError(f"{found.name} is not installed: no program {found.program}; {found.install}.")
    directory = load_settings(LocalSettings, data_dir=data_dir).data_dir.expanduser()
    with _gateway(url, directory, model, may_start=not print_only) as gateway:
        target = _target(found, gateway, model, api_key, directory)
        setup = found.setup(target)
        if print_only:
            _show(found, target, setup, gateway, [*(arguments or [])])
            return
        _write(target.directory, setup.files)
        code = _run([found.program, *setup.arguments, *(arguments or [])], _environment(setup, gateway))
    raise typer.Exit(code)


def _known(name: str) -> Client:
    if name not in CLIENTS:
        raise ConfigurationError(f"There is no client {name!r} to launch; it is one of: {', '.join(CLIENTS)}.")
    return CLIENTS[name]


@contextlib.contextmanager
def _gateway(url: str, directory: Path, model: str, *, may_start: bool) -> Iterator[Gateway]:
    """The gateway that was named or runs here; else that of a stack which is started for the block."""
    elsewhere = url or load_settings(LocalSettings).url
    if elsewhere and find_stack(directory) is None:
        yield Gateway(elsewhere.rstrip("/"))
    elif find_stack(directory) is not None or is_locked(directory) or not may_start:
        yield Gateway(url.rstrip("/")) if url else gateway_of_stack(directory)
    else:
        with started_stack(directory, model, lambda text: say(console(), text)) as stack:
            yield Gateway(stack.gateway_url, stack.certificate)


def _target(client: Client, gateway: Gateway, model: str, api_key: str, directory: Path) -> Target:
    """What `client` is led to; what of it does not suit is said."""
    with contextlib.closing(Served(gateway.url, api_key, trust_of(gateway.certificate))) as served:
        chosen = served.model(model)
        for sentence in served.unsuitable(chosen, client):
            say(console(), f"warning: {sentence}", "yellow")
    context = chosen.max_model_len or _CONTEXT
    place = directory / "launch" / client.name
    return Target(gateway.url, chosen.id, api_key or _NO_KEY, context, place)


def _write(directory: Path, files: Mapping[str, str]) -> None:
    """With the API key in them: for their owner alone."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(content, encoding="utf-8")


def _environment(setup: ClientSetup, gateway: Gateway) -> dict[str, str]:
    trusted = dict.fromkeys(_TRUST, gateway.certificate) if gateway.certificate else {}
    return {**trusted, **setup.environment}


def _show(client: Client, target: Target, setup: ClientSetup, gateway: Gateway, arguments: list[str]) -> None:
    """As lines for a shell; an API key is not shown."""
    hidden = "${RYZANSTEIN_API_KEY}"

    def quoted(text: str) -> str:
        if target.api_key == _NO_KEY or target.api_key not in text:
            return shlex.quote(text)
        return f'"{hidden}"'.join(shlex.quote(part) if part else "" for part in text.split(target.api_key))

    screen = console()
    for name, content in setup.files.items():
        say(screen, f"# {target.directory / name}")
        say(screen, content.replace(target.api_key, hidden) if target.api_key != _NO_KEY else content)
    for name, value in _environment(setup, gateway).items():
        say(screen, f"export {name}={quoted(value)}")
    say(screen, " ".join([client.program, *(quoted(argument) for argument in (*setup.arguments, *arguments))]))


def _run(command: list[str], environment: Mapping[str, str]) -> int:
    """The client at this terminal, to its end: Ctrl-C is its own. Returns its exit code."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = subprocess.run(  # noqa: S603  # the client that was asked for
            command,
            env={**os.environ, **environment},
            check=False,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    finally:
        signal.signal(signal.SIGINT, before)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def add_to(app: typer.Typer) -> None:
    app.command()(launch)
