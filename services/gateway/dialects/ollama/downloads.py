"""Ollama's POST /api/pull: the files of a model are fetched by a host, and lines tell how far that is."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

import msgspec

from services.gateway.api.backend import RequestContext
from services.gateway.api.models.routes import looks
from services.gateway.core.asgi import LineStream, StreamChunk, send_json
from services.gateway.core.errors import ClientGone, ModelLoadFailed
from services.gateway.dialects.ollama.residency import SETTLE
from services.gateway.dialects.ollama.shapes import Progress, ShowResponse, described
from shared.errors import RyzansteinError, Unavailable
from shared.messages import HostModel

# Seconds without a word of any host about a model that was to be fetched, after which it counts as lost.
QUIET = 60.0
_FETCHED = ("stored", "loading", "sleeping")


class Fetch:
    """What hosts say of a model since it was asked for. Pure."""

    def __init__(self, model: str, before: dict[str, HostModel], now: float) -> None:
        """`before`: what each host said of it then."""
        self._model = model
        self._failed = {name: one.failed_at for name, one in before.items() if one.state == "failed"}
        self._heard = now

    def step(self, said: dict[str, HostModel], now: float) -> HostModel | None:
        """What the host that is furthest says; None: none has begun. Raises `ModelLoadFailed` where it has failed,
        `Unavailable` where nothing is heard of it any more."""
        news = {
            name: one for name, one in said.items() if one.state != "failed" or self._failed.get(name) != one.failed_at
        }
        best = max(news.values(), key=_furthest, default=None)
        if best is None:
            if now - self._heard >= QUIET:
                raise Unavailable(
                    f"No host has said anything of the model '{self._model[:128]}' for {QUIET:g} s; pull it again.",
                    retry_after=5,
                )
            return None
        self._heard = now
        if best.state == "failed":
            raise ModelLoadFailed(f"The model '{self._model[:128]}' could not be fetched: {best.error}")
        return best


def _furthest(one: HostModel) -> tuple[int, float]:
    order = {"failed": 0, "downloading": 1}
    return order.get(one.state, 2), one.done / one.total if one.total else 0.0


async def pull(ask: RequestContext, name: str, *, streamed: bool) -> None:
    """Answers when it is there, or with lines until it is."""
    before, registry = _said(ask, name), ask.parts.catalog.registry
    new = registry.model_of(name) not in registry.specs
    await ask.parts.management.pull(name, 1)
    model = registry.model_of(name)
    fetch = Fetch(model, before, time.monotonic())
    await send_progress(ask, _progress(ask, model, fetch, new=new), streamed=streamed)


async def _progress(ask: RequestContext, model: str, fetch: Fetch, *, new: bool) -> AsyncGenerator[Progress, None]:
    """Lines until the files are there. Raises as `Fetch.step`, and as `looks`. `new`: the model was registered for
    this, and goes if there is no such model."""
    digest = ShowResponse(ask.parts.catalog).digest(model)
    last = Progress("pulling manifest")
    yield last
    async with contextlib.aclosing(looks(ask, SETTLE)) as every:
        async for _ in every:
            try:
                one = fetch.step(_said(ask, model), time.monotonic())
            except ModelLoadFailed:
                if new:
                    with contextlib.suppress(RyzansteinError):
                        await ask.parts.management.delete(model)
                raise
            if one is None:
                continue
            done = one.total if one.state in _FETCHED else one.done
            line = Progress(f"pulling {digest[:12]}", f"sha256:{digest}", one.total, done)
            if line != last:
                yield (last := line)
            if one.state in _FETCHED:
                return


def _said(ask: RequestContext, name: str) -> dict[str, HostModel]:
    """What each host that is there says of a model."""
    registry = ask.parts.catalog.registry
    return registry.hosts_say(registry.model_of(name))


async def send_progress(ask: RequestContext, lines: AsyncGenerator[Progress, None], *, streamed: bool) -> None:
    """Each of `lines` where it is `streamed`, then that all went well; or what did not."""
    if not streamed:
        async with contextlib.aclosing(lines):
            async for _ in lines:
                pass
        await send_json(ask.send, 200, Progress("success"))
        return
    stream = LineStream(ask.send)
    try:
        async with contextlib.aclosing(lines):
            async for line in lines:
                await stream.write([StreamChunk(msgspec.json.encode(line))])
        await stream.write([StreamChunk(msgspec.json.encode(Progress("success")))], end=True)
    except (ClientGone, asyncio.CancelledError):
        raise
    except Exception as error:
        if stream.started:
            told = msgspec.json.encode(described(error, ask.request_id))
            await stream.write([StreamChunk(told)], end=True)
        raise
