"""The files of the console and of the API's description, from the package: nothing comes from elsewhere.

What a page shows it asks of the API.
"""

import hashlib
from collections.abc import Iterator, Mapping, MutableMapping
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import msgspec
from starlette.routing import Route

from services.gateway.core.asgi import header
from shared.service.endpoints import Receive, Scope, Send

# Of what is served; licences and what else lies there is not.
TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
FOLDER = "/console/"
PAGES = {"/": "console.html", "/docs": "docs.html"}
_STATIC = resources.files(__package__).joinpath("static")


def _files(folder: Traversable, prefix: str = "") -> Iterator[str]:
    """Paths of what is served, below `static`."""
    for entry in sorted(folder.iterdir(), key=lambda one: one.name):
        if entry.is_dir():
            yield from _files(entry, f"{prefix}{entry.name}/")
        elif entry.name.rpartition(".")[2] in TYPES and entry.name not in PAGES.values():
            yield prefix + entry.name


FILES = tuple(_files(_STATIC))
PATHS = (*PAGES, *(FOLDER + name for name in FILES))


class Page:
    """One file, revalidated by its ETag at each visit."""

    def __init__(self, name: str) -> None:
        self._body = _STATIC.joinpath(*name.split("/")).read_bytes()
        self._tag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'
        self._head = {
            "content-type": TYPES[name.rpartition(".")[2]],
            "cache-control": "no-cache",
            "etag": self._tag,
            "content-security-policy": POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = (header(scope, b"if-none-match") or "").replace("W/", "")
        fresh = self._tag in (tag.strip() for tag in known.split(","))
        await _send(send, 304 if fresh else 200, self._head, b"" if fresh else self._body)


class Front:
    """What stands at /: the console for browsers, and for others where the API is."""

    def __init__(self) -> None:
        self._page = Page(PAGES["/"])
        links = {"api": "/v1", "openapi": "/openapi.json", "docs": "/docs", "health": "/health"}
        self._links = msgspec.json.encode({"name": "Ryzanstein", **links})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def vary(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"vary", b"accept")]
            await send(message)

        if "text/html" in (header(scope, b"accept") or ""):
            await self._page(scope, receive, vary)
            return
        await _send(vary, 200, {"content-type": "application/json"}, self._links)


def page_routes() -> list[Route]:
    """They are for people, and in no document."""
    routes = [
        Route("/", Front(), methods=["GET"], include_in_schema=False),
        Route("/docs", Page(PAGES["/docs"]), methods=["GET"], include_in_schema=False),
    ]
    return routes + [Route(FOLDER + name, Page(name), methods=["GET"], include_in_schema=False) for name in FILES]


async def _send(send: Send, status: int, head: Mapping[str, str], body: bytes) -> None:
    headers = [(name.encode(), value.encode()) for name, value in head.items()]
    if status != 304:
        headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
