"""Addresses of a NATS that somebody else runs: credentials may stand in them, and are never shown."""

import re
from urllib.parse import unquote

from pydantic import SecretStr

from shared.config import CommonSettings
from shared.errors import ConfigurationError

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
    return ",".join(
        re.sub(r"^(\w+:/+)?.*@", lambda match: match[1] or "", url.strip()) for url in urls.split(",")
    )


def _parsed(url: str) -> re.Match[str]:
    match = _ADDRESS.fullmatch(url)
    if match is None:
        raise ConfigurationError(
            f"{without_credentials(url)!r} is no NATS address; write it as nats://host:port."
        )
    return match


def _joined(addresses: list[re.Match[str]]) -> str:
    return ",".join(one["scheme"] + one["rest"] for one in addresses)
