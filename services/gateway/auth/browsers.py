"""Which web pages may use the gateway: a browser sends requests for whatever page is open in it.

While no key exists, being able to reach the gateway is all that is asked for, and a browser on the machine can. So a
page of somebody else's must neither send anything (Origin) nor pass for a page of the gateway's own by a name that it
lets point here (Host: DNS rebinding). With keys neither helps a page, since it has none.
"""

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from services.gateway.core.asgi import header, request_headers
from services.gateway.core.errors import RouteError
from shared.service.endpoints import Scope

ANY = "*"
# Methods that change nothing (RFC 9110, 9.2.1); their answers no foreign page can read.
SAFE = ("GET", "HEAD", "OPTIONS")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
# Ends of names that nobody can have in the public DNS.
_PRIVATE = (".localhost", ".internal", ".svc", ".svc.cluster.local")


def listed(setting: str) -> tuple[str, ...]:
    """The values of a setting with commas."""
    return tuple(one.strip().lower().rstrip("/") for one in setting.split(",") if one.strip())


def is_loopback(host: str) -> bool:
    """Whether who listens on `host` is reached from its own machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Browsers:
    """What requests must name as Host and Origin. Pure."""

    def __init__(self, host: str, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        """`host`: the address listened on; `hosts`, `origins`: allowed beside the gateway's own, `*`: any."""
        self._given = frozenset(hosts)
        self._origins = frozenset(origins)
        self._hosts = {*_LOOPBACK, _bracketed(host.lower()), *self._given}
        self._anywhere = not is_loopback(host)

    def check(self, scope: Scope, *, everybody: bool) -> None:
        """`everybody`: no key is asked for. Raises `RouteError`."""
        if not everybody and not self._given:
            return
        headers = request_headers(scope)
        given = headers.get(b"host")
        host = None if given is None else given.decode("latin-1")
        if host is not None and not self._allows_host(host.lower()):
            raise RouteError(
                f"The Host '{host[:256]}' is not allowed here; ask for the gateway by its address, add the name to "
                "RYZANSTEIN_ALLOWED_HOSTS, or create an API key.",
                status=403,
                reason="host_not_allowed",
            )
        of_a_page = b"origin" in headers
        if everybody and of_a_page and (scope["type"] == "websocket" or scope["method"] not in SAFE):
            self._check_origin(scope, host or "")

    def _allows_host(self, host: str) -> bool:
        name, colon, port = host.rpartition(":")
        if not colon or "]" in port:
            name = host
        if host in self._hosts or name in self._hosts or ANY in self._given:
            return True
        return self._anywhere and _cannot_be_rebound(name)

    def _check_origin(self, scope: Scope, host: str) -> None:
        origin = header(scope, b"origin")
        if origin is None or ANY in self._origins or origin.lower() in self._origins:
            return
        if header(scope, b"sec-fetch-site") == "same-origin" or _authority(origin) == host.lower():
            return
        raise RouteError(
            f"Pages of '{origin[:256]}' may not use this gateway; add the origin to RYZANSTEIN_ALLOWED_ORIGINS, or "
            "create an API key.",
            status=403,
            reason="origin_not_allowed",
        )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _authority(origin: str) -> str:
    """Whatever the scheme: a proxy in front may end TLS. A browser leaves usual ports out of both headers."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _cannot_be_rebound(name: str) -> bool:
    """Whether no page can be of this name whose owner is not on this network: an address, a name without a dot (a
    service, a container, a machine), a name that public DNS does not have."""
    if "." not in name or name.endswith(_PRIVATE):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
