"""`ryzanstein nats-config`: the configuration of a NATS server whose users have the least rights."""

from typing import Annotated

import typer

from services.cli.nats_config import deployed
from shared.errors import ConfigurationError


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
