"""Requests for models that were never loaded here: nobody knows their tokens, so they cannot go into the queue yet.

    request ──no card──▶ held, counted ──card──▶ goes on, as any other
                           │  ModelDemand, once a second, so that a scheduler has the model loaded
                           └──▶ failed load, no host that could take it, deadline, client gone

Bounded by number and bytes, for one model and for all.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator

import structlog
from prometheus_client import Gauge

from services.gateway.core.catalog import Catalog
from services.gateway.core.errors import ClientGone, ModelLoadFailed
from services.gateway.core.settings import GatewaySettings
from shared import limits
from shared.errors import (
    BrokerUnavailable,
    InternalError,
    NoGroupAvailable,
    QueueFull,
    RyzansteinError,
    error_from_code,
)
from shared.messages import ModelCard, ModelDemand
from shared.nats import subjects
from shared.nats.bus import Bus

log = structlog.get_logger(__name__)

INTERVAL = 1.0  # seconds between two tellings of the demand


class _Model:
    def __init__(self) -> None:
        self.requests = 0
        self.bytes = 0
        self.wanted = 0  # others that wait for a group of it and are in no queue: lines of batches
        self.since = time.time()
        self.waiters: dict[asyncio.Future[ModelCard], None] = {}  # in the order of their coming


class ColdStarts:
    """One per gateway."""

    def __init__(self, bus: Bus, gateway: str, settings: GatewaySettings, catalog: Catalog, held: Gauge) -> None:
        """`gateway`: its instance, by which schedulers tell demands apart; `held`: shows how many wait, by model."""
        self._bus = bus
        self._gateway = gateway
        self._settings = settings
        self._catalog = catalog
        self._shown = held
        self._models: dict[str, _Model] = {}
        self._told: set[str] = set()
        self._asked = asyncio.Event()
        catalog.on_loaded(self._card_came)

    async def run(self) -> None:
        """Tells the schedulers what is waited for. Runs until it is cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL if self._models or self._told else None):
                    await self._asked.wait()
            self._asked.clear()
            await self._tell()
            self._fail_hopeless()

    async def card(
        self,
        name: str,
        tenant: str | None = None,
        *,
        size: Callable[[], int],
        deadline: float,
        gone: Callable[[], Awaitable[object]] | None = None,
    ) -> ModelCard:
        """The card of a model, once there is one. `tenant`: as of `Catalog.resolve`; `size` gives the bytes that are
        held meanwhile; `deadline`: unix seconds; `gone` returns when nobody waits any more.

        Raises `UnknownModel`, `QueueFull`, `NoGroupAvailable`, `ModelLoadFailed`, `ModelDoesNotFit`, `ClientGone`.
        """
        if (card := self._catalog.card_at_hand(name)) is not None:
            return card
        model = (await self._catalog.resolve_or_look_up(name, tenant)).model
        card = self._catalog.known_card(model)
        if card is not None:
            return card
        with self._held(model, size()) as held:
            if error := self._failure(model, held.since):
                raise error
            return await self._wait(model, held, deadline, gone)

    @contextlib.contextmanager
    def wanted(self, model: str) -> Iterator[None]:
        """Around a wait for a group of `model` that no queue knows of."""
        held = self._entry(model)
        held.wanted += 1
        try:
            yield
        finally:
            held.wanted -= 1
            self._forget(model, held)

    # --- inside ----------------------------------------------------------------------------------

    async def _wait(
        self, model: str, held: _Model, deadline: float, gone: Callable[[], Awaitable[object]] | None
    ) -> ModelCard:
        waiter = asyncio.get_running_loop().create_future()
        held.waiters[waiter] = None
        watcher = asyncio.ensure_future(gone()) if gone is not None else None
        try:
            await asyncio.wait(
                [waiter, watcher] if watcher is not None else [waiter],
                timeout=max(0.0, deadline - time.time()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if waiter.done():
                card: ModelCard = waiter.result()
                return card
            if watcher is not None and watcher.done():
                raise ClientGone
            raise self._too_late(model, list(held.waiters).index(waiter))
        finally:
            held.waiters.pop(waiter, None)
            waiter.cancel()
            if watcher is not None:
                watcher.cancel()

    def _card_came(self, model: str) -> None:
        held = self._models.get(model)
        card = self._catalog.known_card(model) if held is not None and held.waiters else None
        if held is not None and card is not None:
            for waiter in held.waiters:
                if not waiter.done():
                    waiter.set_result(card)

    def _fail_hopeless(self) -> None:
        """Tells those whose model will not be loaded."""
        for model, held in list(self._models.items()):
            if held.waiters and (error := self._failure(model, held.since)):
                for waiter in held.waiters:
                    if not waiter.done():
                        waiter.set_exception(error)

    def _failure(self, model: str, since: float) -> RyzansteinError | None:
        """Why the model will not be loaded for those who have waited `since`."""
        if not self._catalog.is_model(model):
            return NoGroupAvailable(
                f"The model '{model[:128]}' is gone: it was removed from the registry, or the group that "
                "was loading it has gone."
            )
        status = self._catalog.status(model)
        if status.state == "failed" and status.failed_at >= since:
            return ModelLoadFailed(f"The model '{model[:128]}' could not be loaded: {status.reason}")
        plan = self._catalog.registry.placements.get(model)
        if plan is not None and plan.code and not status.ready:
            error = error_from_code(plan.code, plan.reason)
            return ModelLoadFailed(plan.reason) if isinstance(error, InternalError) else error
        return None

    def _too_late(self, model: str, before: int) -> NoGroupAvailable:
        """`before`: requests that came before and wait too."""
        status = self._catalog.status(model)
        expected = status.expected_seconds
        why = f" ({status.reason.rstrip('.')})" if status.reason else ""
        soon = f"; it is expected in {expected:.0f} s" if expected else ""
        ahead = f"; {before} requests are ahead of it" if before else ""
        return NoGroupAvailable(
            f"The model '{model[:128]}' is {status.state}{why} and could not take the request in time{soon}{ahead}.",
            retry_after=expected or 5,
        )

    @contextlib.contextmanager
    def _held(self, model: str, size: int) -> Iterator[_Model]:
        self._check_room(model, size)
        held = self._entry(model)
        held.requests += 1
        held.bytes += size
        self._shown.labels(model).set(held.requests)
        try:
            yield held
        finally:
            held.requests -= 1
            held.bytes -= size
            self._shown.labels(model).set(held.requests)
            self._forget(model, held)

    def _entry(self, model: str) -> _Model:
        held = self._models.get(model)
        if held is None:
            held = self._models[model] = _Model()
            self._asked.set()
        return held

    def _forget(self, model: str, held: _Model) -> None:
        if not held.requests and not held.wanted:
            self._models.pop(model, None)
            with contextlib.suppress(KeyError):  # of batches alone it was never shown
                self._shown.remove(model)

    def _check_room(self, model: str, size: int) -> None:
        """Raises `QueueFull` that names the bound."""
        settings = self._settings
        own = self._models.get(model) or _Model()
        every = self._models.values()
        requests, held = sum(one.requests for one in every), sum(one.bytes for one in every)
        for limit, value, used, wanted in (
            (limits.COLD_MODEL_REQUESTS, settings.cold_model_requests, own.requests, 1),
            (limits.COLD_REQUESTS, settings.cold_requests, requests, 1),
            (limits.COLD_MODEL_BYTES, settings.cold_model_bytes, own.bytes, size),
            (limits.COLD_BYTES, settings.cold_bytes, held, size),
        ):
            if used + wanted > value:
                expected = self._catalog.expected_seconds(model)
                raise QueueFull(
                    f"The model '{model[:128]}' is not loaded yet, and {own.requests} requests wait for it; try again "
                    f"{f'in {expected:.0f} s' if expected else 'in a moment'} ({limit.cited(value)}).",
                    retry_after=expected or 5,
                )

    async def _tell(self) -> None:
        """Models of which nothing is waited for any more are told once more, with 0."""
        registered = self._catalog.registry.specs
        demands = {model: held.requests + held.wanted for model, held in self._models.items() if model in registered}
        try:
            for model in {*demands, *self._told}:
                demand = ModelDemand(model, self._gateway, demands.get(model, 0))
                await self._bus.publish(subjects.MODEL_DEMAND, demand)
        except BrokerUnavailable as error:
            log.info("demand_report_failed", error=str(error))
            return
        self._told = set(demands)
