"""TLS for what we serve and for the way to NATS: 1.2 at least, files that may be replaced while we run.

certificate, key ──▶ context ──▶ every new connection
     │ replaced         ▲
     └── tried first ───┘  a pair that does not fit, or half of one, changes nothing
"""

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

import structlog

from shared.errors import ConfigurationError

log = structlog.get_logger(__name__)


def server_context(certificate: str, key: str, client_ca: str = "", *, protocol: str = "http/1.1") -> ssl.SSLContext:
    """For a server. `client_ca`: authorities of which a client must bring a certificate; empty: it need not.
    `protocol`: what is spoken within (ALPN).

    Raises `ConfigurationError`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    _load(context, certificate, key)
    if client_ca:
        _trust(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(ca: str = "", certificate: str = "", key: str = "") -> ssl.SSLContext:
    """For a client that trusts the authorities in `ca` (empty: the system's). Raises `ConfigurationError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if ca else ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca:
        _trust(context, ca)
    if certificate:
        _load(context, certificate, key)
    return context


def pinned_context(certificate: str) -> ssl.SSLContext:
    """For a client on the server's own machine: it trusts that certificate alone, whatever names it is for."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    _trust(context, certificate)
    return context


class Certificates:
    """The pair of a running server, and whether its files were replaced."""

    def __init__(self, context: ssl.SSLContext, certificate: str, key: str) -> None:
        self._context = context
        self._certificate = certificate
        self._key = key
        self._seen = self._look()

    async def run(self, interval: float, on_change: Callable[[], None] = lambda: None) -> None:
        """Looks every `interval` seconds. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(interval)
            if self.refresh():
                on_change()

    def refresh(self) -> bool:
        """Has new connections use what the files hold now; False where that is what they use already.

        Two files cannot be replaced at once: until they fit, the old pair stays, and the next look tries again.
        """
        now = self._look()
        if now == self._seen or not all(now):
            return False
        try:
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._certificate, self._key)
            _load(self._context, self._certificate, self._key)
        except ConfigurationError as error:
            log.warning("certificate_reload_failed", error=str(error))
            return False
        self._seen = now
        log.info("certificate_reloaded", file=self._certificate)
        return True

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_state(Path(name)) for name in (self._certificate, self._key))


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _load(context: ssl.SSLContext, certificate: str, key: str) -> None:
    try:
        context.load_cert_chain(certificate, key or None, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigurationError(
            f"The certificate {certificate} and the key {key or certificate} cannot be used ({_reason(error)}); they "
            "must be PEM files that belong together, the key without a password."
        ) from None


def _trust(context: ssl.SSLContext, ca: str) -> None:
    try:
        context.load_verify_locations(cafile=ca)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"The certificate authorities in {ca} cannot be used ({_reason(error)}); it must be a PEM file."
        ) from None


def _no_password() -> bytes:
    """Else OpenSSL asks for one on the terminal."""
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
