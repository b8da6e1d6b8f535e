"""What nats-py raises, as errors of our own tree: one sentence each, with the remedy."""

import contextlib
from collections.abc import Iterator
from urllib.parse import urlsplit

import nats.errors
from nats.js.errors import APIError, NoStreamResponseError, ServiceUnavailableError

from shared.errors import BrokerFull, BrokerUnavailable, ConfigurationError, LinkLost, PayloadTooLarge, RyzansteinError

# Everything that a call of nats-py raises because of the broker or the way to it.
BROKER_ERRORS = (nats.errors.Error, TimeoutError, OSError)

# Error codes of the JetStream API: github.com/nats-io/nats-server, server/errors.json.
_NOT_ENABLED = (None, 10039, 10076)
_NO_ROOM = (10002, 10023, 10028, 10047, 10077)
_TOO_FEW_SERVERS = (10005, 10074)
_NO_LEADER = (10008, 10009)
_NAME_IN_USE = 10058


class ConnectionBroke(nats.errors.Error):
    """The connection was lost, and is back, while an answer was waited for; see `LinkLost`."""

    def __str__(self) -> str:
        return "the connection broke before the answer came"


def lacks_jetstream(error: Exception) -> bool:
    """Whether the broker runs, but without JetStream."""
    return isinstance(error, ServiceUnavailableError) and error.err_code in _NOT_ENABLED


def lacks_room(error: Exception) -> bool:
    """Whether the broker has no disk space or memory left, or none that it may use."""
    return isinstance(error, APIError) and error.err_code in _NO_ROOM


def lacks_servers(error: Exception) -> bool:
    """Whether there are fewer servers than replicas were asked for."""
    return isinstance(error, APIError) and error.err_code in _TOO_FEW_SERVERS


def lacks_leader(error: Exception) -> bool:
    """Whether a cluster is choosing a leader: what was asked was not done, and can be in some seconds."""
    unheard = isinstance(error, NoStreamResponseError)
    return unheard or (isinstance(error, APIError) and error.err_code in _NO_LEADER)


def exists_otherwise(error: Exception) -> bool:
    """Whether there is a stream of that name with other settings."""
    return isinstance(error, APIError) and error.err_code == _NAME_IN_USE


def broker_error(doing: str, error: Exception) -> RyzansteinError:
    """The error for a broker that did not do what `doing` says ("read the bucket groups")."""
    if isinstance(error, nats.errors.MaxPayloadError):
        return PayloadTooLarge(f"NATS did not {doing}: it is larger than max_payload; raise that of the server.")
    if lacks_jetstream(error):
        return BrokerUnavailable(
            f"NATS did not {doing}: it runs without JetStream; start nats-server with -js -sd DIRECTORY."
        )
    if lacks_room(error):
        return BrokerFull(f"NATS did not {doing}: {reason_of(error)}; free disk space, or raise its storage limits.")
    kind = LinkLost if isinstance(error, ConnectionBroke) else BrokerUnavailable
    return kind(f"NATS did not {doing} ({reason_of(error)}); is it running? Try again.")


def reason_of(error: Exception) -> str:
    """A few words; many time-outs have none of their own."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, APIError) and error.description:
        return error.description
    return str(error) or type(error).__name__


@contextlib.contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raises `BrokerUnavailable` or `PayloadTooLarge` for what nats-py raises inside."""
    try:
        yield
    except BROKER_ERRORS as error:
        raise broker_error(doing, error) from error


def server_urls(setting: str) -> list[str]:
    """The addresses in `setting`, separated by commas; a bare `host:port` is one too.

    nats-py takes an empty list and then tries for ever, without a pause in which a time-out could fire:
    what is not an address must not reach it. Raises `ConfigurationError`.
    """
    urls = [url if "://" in url else f"nats://{url}" for part in setting.split(",") if (url := part.strip())]
    if not urls:
        raise ConfigurationError("No NATS address is set; set RYZANSTEIN_NATS_URL or --nats-url to nats://host:port.")
    for url in urls:
        if not _is_address(url):
            raise ConfigurationError(
                f"The NATS address {without_password(url)!r} is not one; write it as nats://host:port."
            )
    return urls


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises when it is no number, or too large
    except ValueError:
        return False
    return parts.scheme in ("nats", "tls") and bool((parts.hostname or "").strip())


def without_password(urls: str) -> str:
    """`urls` fit for a message: credentials in them are left out."""
    return ",".join(
        f"{scheme}://{rest.rpartition('@')[2]}" if separator else url.rpartition("@")[2]
        for url, scheme, separator, rest in ((url.strip(), *url.strip().partition("://")) for url in urls.split(","))
    )
