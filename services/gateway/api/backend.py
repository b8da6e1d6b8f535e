"""What the routes work with: there once the service has started, closed to new work when it stops.

starting ──open──▶ serving ──drain──▶ draining ──close──▶ closed
refuses            takes              sessions begin      refuses
everything         everything         nothing new         everything
"""

import asyncio
import contextlib
from collections.abc import Iterator

import msgspec

from services.gateway.api.cluster import Cluster
from services.gateway.auth.authenticator import Authenticator
from services.gateway.batches.files import Files
from services.gateway.batches.service import Batches
from services.gateway.core.catalog import Catalog
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake.intake import Intake
from services.gateway.persistence.chats import StoredChats
from services.gateway.persistence.responses import ResponseLookup
from services.gateway.streams.reading import Reading
from shared.errors import Unavailable


def shutting_down() -> Unavailable:
    """What requests are told while the gateway stops."""
    return Unavailable(
        "The gateway is shutting down; retry, or resume a stream at another gateway by its last event id.",
        retry_after=1,
    )


class Parts(msgspec.Struct, frozen=True):
    """What is there once the gateway has started."""

    intake: Intake
    reading: Reading
    catalog: Catalog
    responses: ResponseLookup
    stored_chats: StoredChats
    files: Files
    batches: Batches
    cluster: Cluster


class Backend:
    """Opened by the service, asked by the routes, which are built before NATS is connected. What is refused is refused
    here: `parts` and `started` raise `Unavailable` before it is open, and `parts` once it is closed."""

    def __init__(self, authenticator: Authenticator) -> None:
        self.authenticator = authenticator
        self._parts: Parts | None = None
        self._draining = self._closed = False
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, parts: Parts) -> None:
        """From now on requests are taken."""
        self._parts = parts

    def drain(self) -> None:
        """From now on sessions, which outlast their requests, begin nothing new. What came over a connection that
        ends with its answer is served: it was sent before its client could know."""
        self._draining = True

    def close(self) -> None:
        """From now on everything is refused."""
        self._closed = True

    def check_draining(self) -> None:
        """For a session that is about to begin something. Raises `Unavailable`."""
        if self._draining:
            raise shutting_down()

    @property
    def parts(self) -> Parts:
        """For a request."""
        if self._closed:
            raise shutting_down()
        return self.started

    @property
    def started(self) -> Parts:
        """To the gateway's end: what is there may be asked for as long as anybody listens."""
        if self._parts is None:
            raise Unavailable("The gateway is starting; try again in a moment.", retry_after=1)
        return self._parts

    @property
    def active_now(self) -> int:
        """Requests, and generations on WebSockets, that are being worked on."""
        return self._active

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Around the work for one request."""
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def idle(self, within: float) -> bool:
        """Waits until no request is being worked on; False when that takes longer than `within` seconds."""
        try:
            await asyncio.wait_for(self._idle.wait(), within)
        except TimeoutError:
            return False
        return True


class BackendRoute:
    """Answers the requests of one path with what the backend has."""

    def __init__(self, backend: Backend, settings: GatewaySettings) -> None:
        self._backend = backend
        self._settings = settings
