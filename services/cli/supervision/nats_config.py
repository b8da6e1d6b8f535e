"""The part of a nats-server configuration that says who may do what (accounts, users, rights), and
`ryzanstein nats-config`, which prints a whole one whose users have the least rights.
"""

import json
from collections.abc import Mapping
from typing import Annotated

import typer

from shared.errors import ConfigurationError
from shared.nats import subjects
from shared.nats.permissions import USERS, Rights, User, rights

ACCOUNT = "RYZANSTEIN"
MAX_PAYLOAD = 8 << 20


def accounts(users: str) -> str:
    """An account with these users, which is told whose connections in it open and close.

    Nobody can log in to the system account: of all that it hears, these two subjects are passed on, about our
    own account alone.
    """
    events = [(subjects.CONNECTION_OPENED, "CONNECT"), (subjects.CONNECTION_CLOSED, "DISCONNECT")]
    source = f"$SYS.ACCOUNT.{ACCOUNT}"
    exports = ", ".join(f'{{ stream: "{source}.{event}", accounts: [{ACCOUNT}] }}' for _, event in events)
    imports = ", ".join(
        f'{{ stream: {{ account: SYS, subject: "{source}.{event}" }}, to: "{subject}" }}'
        for subject, event in events
    )
    return (
        "accounts {\n"
        f"  SYS {{ exports: [{exports}] }}\n"
        f"  {ACCOUNT} {{\n"
        "    jetstream: enabled\n"
        f"    users: [\n{users}    ]\n"
        f"    imports: [{imports}]\n"
        "  }\n"
        "}\n"
        "system_account: SYS\n"
    )


def one_user(user: str, password: str) -> str:
    """A single user who may do everything."""
    return f"      {{ user: {json.dumps(user)}, password: {json.dumps(password)} }}\n"


def service_users(passwords: Mapping[User, str]) -> str:
    """A user per service. Passwords are written as they are given: quoted text, or a `$VARIABLE`."""
    return "".join(_user(user, passwords[user], rights(user)) for user in USERS)


def quoted(password: str) -> str:
    return json.dumps(password)


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
    users = service_users({user: f"${variable_of(user)}" for user in USERS})
    return head + "\n".join(lines) + "\n" + accounts(users)


def _user(user: User, password: str, given: Rights) -> str:
    publish, subscribe = (
        "".join(f"            {json.dumps(subject)}\n" for subject in sorted(set(allowed)))
        for allowed in (given.publish, given.subscribe)
    )
    return (
        f"      {{\n        user: {json.dumps(user)}, password: {password}\n"
        f"        permissions {{\n"
        f"          publish {{ allow: [\n{publish}          ] }}\n"
        f"          subscribe {{ allow: [\n{subscribe}          ] }}\n"
        "        }\n      }\n"
    )


def nats_config(
    listen: Annotated[str, typer.Option(help="Address of the server.")] = "0.0.0.0:4222",
    store: Annotated[str, typer.Option(help="Directory of JetStream's store.")] = "/data/jetstream",
    tls_certificate: Annotated[str, typer.Option(help="File of the server's certificate chain (PEM).")] = "",
    tls_key: Annotated[str, typer.Option(help="File of its key.")] = "",
    tls_client_ca: Annotated[
        str, typer.Option(help="File of the authorities whose certificates clients must have.")
    ] = "",
    passwords: Annotated[
        str,
        typer.Option(
            help='File of the passwords, a line RYZANSTEIN_NATS_PASSWORD_GATEWAY = "..." for each user; '
            "its path is relative to the configuration's. Default: nats-server's environment."
        ),
    ] = "",
) -> None:
    """Print a nats-server configuration: a user per service, and what each may say and hear.

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
