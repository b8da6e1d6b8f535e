"""Which Host and Origin the gateway takes while it asks for no key, and afterwards."""

from typing import Any

import pytest

from services.gateway.auth.browsers import Browsers, is_loopback, listed
from services.gateway.core.asgi import read_body
from services.gateway.core.errors import RouteError

OWN = "127.0.0.1:8000"


def scope(method: str = "GET", *, kind: str = "http", **headers: str) -> dict[str, Any]:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": kind, "method": method, "headers": pairs}


def refusal(browsers: Browsers, asked: dict[str, Any], *, everybody: bool = True) -> str:
    """The code of the refusal; empty: let in."""
    found = None
    try:
        browsers.check(asked, everybody=everybody)
    except RouteError as error:
        found = error
    if found is None:
        return ""
    assert found.status == 403
    assert "RYZANSTEIN_ALLOWED_" in str(found)
    return found.reason


@pytest.mark.parametrize(
    ("listens", "host", "refused"),
    [
        ("127.0.0.1", "localhost:8000", False),
        ("127.0.0.1", "LOCALHOST", False),
        ("127.0.0.1", "127.0.0.1:8000", False),
        ("127.0.0.1", "[::1]:8000", False),
        ("::1", "[::1]", False),
        ("127.0.0.1", "evil.example", True),
        ("127.0.0.1", "evil.example:8000", True),
        ("127.0.0.1", "localhost.evil.example", True),
        ("127.0.0.1", "127.0.0.1.evil.example", True),
        ("127.0.0.1", "evil", True),
        ("127.0.0.1", "192.168.1.9", True),
        ("127.0.0.1", "", True),
        ("192.168.1.9", "192.168.1.9:8000", False),
        ("box.lan", "box.lan:8000", False),
        ("0.0.0.0", "192.168.1.9:8000", False),  # named, not bound
        ("0.0.0.0", "[fe80::1]:8000", False),
        ("0.0.0.0", "gateway:8000", False),
        ("0.0.0.0", "ryzanstein-gateway.ryzanstein.svc.cluster.local", False),
        ("0.0.0.0", "host.docker.internal:8000", False),
        ("0.0.0.0", "evil.example:8000", True),
        ("0.0.0.0", "10.0.0.1.evil.example", True),
    ],
)
def test_a_host_is_the_gateways_own_or_one_that_no_page_can_have(listens: str, host: str, refused: bool) -> None:
    assert refusal(Browsers(listens), scope(host=host)) == ("host_not_allowed" if refused else "")


def test_allowed_hosts_are_let_in_and_bind_keyed_gateways_too() -> None:
    browsers = Browsers("127.0.0.1", listed("llm.example, Other.example:80"))
    assert not refusal(browsers, scope(host="llm.example:443"))
    assert not refusal(browsers, scope(host="other.example:80"))
    assert refusal(browsers, scope(host="other.example:81"))
    assert refusal(browsers, scope(host="evil.example"), everybody=False) == "host_not_allowed"
    assert not refusal(Browsers("127.0.0.1"), scope(host="evil.example"), everybody=False)
    assert not refusal(Browsers("127.0.0.1", listed("*")), scope(host="evil.example"))


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_pages_of_others_send_nothing(kind: str) -> None:
    def asked(**headers: str) -> dict[str, Any]:
        return scope("POST", kind=kind, host=OWN, **headers)

    browsers = Browsers("127.0.0.1", (), listed("https://chat.example/"))
    assert not refusal(browsers, asked())
    assert not refusal(browsers, asked(origin=f"http://{OWN}"))
    assert not refusal(browsers, asked(origin="https://chat.example"))
    assert not refusal(browsers, asked(origin="https://proxied.example", sec_fetch_site="same-origin"))
    for origin in ("https://evil.example", "null", "http://127.0.0.1:9", "http://[", "https://chat.example.evil"):
        assert refusal(browsers, asked(origin=origin)) == "origin_not_allowed"
        assert not refusal(browsers, asked(origin=origin), everybody=False)
        assert not refusal(Browsers("127.0.0.1", (), ("*",)), asked(origin=origin))


def test_pages_of_others_may_ask_for_what_they_cannot_read() -> None:
    assert not refusal(Browsers("127.0.0.1"), scope("GET", host=OWN, origin="https://evil.example"))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.9", "::1"])
def test_loopback_is_known(host: str) -> None:
    assert is_loopback(host)
    assert not any(is_loopback(other) for other in ("0.0.0.0", "::", "", "192.168.1.9", "box"))


@pytest.mark.parametrize(
    ("kind", "taken"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("application/problem+json", True),
        ("text/plain", False),
        ("application/x-www-form-urlencoded", False),
        ("multipart/form-data; boundary=x", False),
        ("text/plain; application/json", False),
        ("", False),
    ],
)
async def test_a_body_is_json_by_its_type(kind: str, taken: bool) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    asked = scope("POST", content_type=kind)
    if taken:
        assert await read_body(asked, receive, 10, 1.0) == b"{}"
        return
    with pytest.raises(RouteError, match="application/json") as refused:
        await read_body(asked, receive, 10, 1.0)
    assert refused.value.status == 415
