"""How long a model stays: `keep_alive`, requests that load or unload it, and the wait for what becomes of it.

    keep_alive 0      unload behind the answer       below 0   pin
    keep_alive 5m     idle time of its entry         left out  as its entry says

The last request's counts: a time or 0 takes back what another one has pinned, and never a pin by hand or of a file.

They change the registry, so they ask for what every such change asks for: a key with the right to manage models, once
there is a key. With another key `keep_alive` is named among the fields that change nothing.
"""

import contextlib
import time
from collections.abc import AsyncIterator

import structlog

from services.gateway.api.backend import RequestContext
from services.gateway.api.models.routes import looks
from services.gateway.core.catalog import Catalog
from services.gateway.core.errors import ModelLoadFailed
from services.gateway.dialects.ollama.translation import names_of, not_found, seconds_of
from services.gateway.intake.headers import tell_ignored
from services.gateway.intake.rules import TEXT, Ruled, some_of
from shared.errors import DeadlineExceeded, RyzansteinError

log = structlog.get_logger(__name__)

SETTLE = 0.1  # seconds between two looks: what changes within is seen at once


def named(catalog: Catalog, given: str, tenant: str) -> str:
    """The name that a model, an alias or an adapter has here which a client of that tenant calls `given`. Raises
    `RouteError`."""
    if catalog.is_model(given):
        return given
    for name in names_of(given):
        if catalog.is_model(name) or catalog.adapters.find(name, tenant) is not None:
            return name
    raise not_found(given)


@contextlib.asynccontextmanager
async def staying(ask: RequestContext, name: str, keep_alive: float | str | None) -> AsyncIterator[None]:
    """Around a request for an answer of the model `name`."""
    unloads = keep_alive is not None and await _kept(ask, name, seconds_of(keep_alive))
    try:
        yield
    finally:
        if unloads:
            try:
                await ask.parts.management.unload(name, force=False)
            except RyzansteinError as error:  # the answer is there
                log.warning("keep_alive_failed", model=name, error=error.message)


async def _kept(ask: RequestContext, name: str, seconds: float) -> bool:
    """Applies a time; whether the model is to be unloaded behind the answer."""
    model = ask.parts.catalog.resolve(name, ask.tenant).model
    spec = ask.parts.catalog.registry.specs.get(model)
    may = ask.settings.manage_models and ask.principal.manages_models
    if not may or spec is None or (spec.pinned and not spec.pinned_by_request and seconds >= 0):
        tell_ignored(["keep_alive"], ask.answer_headers, strict=ask.settings.strict_fields)
        return False
    await ask.parts.management.keep(model, seconds)
    return seconds == 0


async def load_or_unload(ask: RequestContext, name: str, keep_alive: float | str | None) -> str:
    """Of a request that has nothing to say; returns Ollama's reason. Raises `RouteError` where the key may not,
    `ModelDoesNotFit`, `ModelLoadFailed`, `DeadlineExceeded`."""
    await ask.counted()
    catalog, management = ask.parts.catalog, ask.parts.management
    model = catalog.resolve(name, ask.tenant).model
    if keep_alive is not None and seconds_of(keep_alive) == 0:
        ask.check_manages_models()
        if catalog.status(model).state != "unloaded":
            if model in catalog.registry.specs:
                await management.keep(model, 0)
            await management.unload(model, force=False)
        return "unload"
    async with staying(ask, name, keep_alive):
        if model in catalog.registry.specs and not catalog.status(model).ready:
            ask.check_manages_models()
            await management.load(model)
            await _loaded(ask, model)
    return "load"


async def _loaded(ask: RequestContext, model: str) -> None:
    give_up = time.monotonic() + ask.settings.token_timeout
    asked = time.time()
    async with contextlib.aclosing(looks(ask, SETTLE)) as every:
        async for _ in every:
            status = ask.parts.catalog.status(model)
            if status.ready:
                return
            if status.state == "failed" and status.failed_at >= asked:
                raise ModelLoadFailed(f"The model '{model[:128]}' could not be loaded: {status.reason}")
            if time.monotonic() >= give_up:
                break
    raise DeadlineExceeded(
        f"The model '{model[:128]}' was not loaded within {ask.settings.token_timeout:g} s; it is still loading; GET "
        "/models shows its progress."
    )


class ModelNamed(Ruled, frozen=True, kw_only=True):
    """What names a model by `model`, or by its older name `name`."""

    model: str | None = None
    name: str | None = None

    rules = (some_of({"model": TEXT, "name": TEXT}, "the name of a model"),)

    @property
    def given(self) -> str:
        return self.model or self.name or ""
