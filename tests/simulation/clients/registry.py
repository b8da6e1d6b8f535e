"""Clients that change what is served, and the operator who makes and revokes keys.

models     declares a model, asks it, which may have to load first, and takes it back
operator   API keys, as `ryzanstein keys` writes them
"""

import asyncio
import time
from typing import ClassVar

import msgspec

from shared.config import CommonSettings
from shared.errors import RyzansteinError
from shared.keys import KeyRecord, NewKey, new_key
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.chaos.expected import stub_text
from tests.simulation.clients.ask import Refused
from tests.simulation.clients.client import Client, take_whole
from tests.simulation.clients.history import Acknowledged, History, KeySeen, Request, Try, Wanted

REGISTRY = "/v1/registry/models"
# Codes with which a model that has to load first may be refused for now.
LOADING = ("model_load_failed", "model_loading", "no_group_available", "deadline_exceeded", "queue_full")


class Models(Client):
    """One model at a time, under a name of its own."""

    kind: ClassVar[str] = "models"

    async def once(self) -> None:
        name = f"{self.name}-{self._number}"
        entry = {"source": f"simulated/{name}", "most": self.draw.randint(1, 2), "idle": self.draw.choice((0, 60, 600))}
        try:
            _, gateway = await self.around.insist("PUT", f"{REGISTRY}/{name}", entry)
        except Refused as error:
            self.wrong(f"the model {name} was not taken: {error}")
            return
        model = self.acknowledged("model", name, gateway)
        for _ in range(self.draw.randint(1, 4)):
            await self._ask(name)
            await asyncio.sleep(self.draw.uniform(*self.plan.wait))
        if self.draw.random() < 0.7:
            await self._take_back(model)

    async def _ask(self, model: str) -> None:
        body, seed, tokens = self.prompted(model)
        key = f"{model}-{self.draw.getrandbits(48):x}"
        request = self.request(body, Wanted(stub_text(seed, tokens), tokens), key)

        async def send(gateway: str, tried: Try) -> None:
            headers = {"Idempotency-Key": request.key}
            reply = await self.around.ask(gateway, "POST", "/v1/completions", body, headers, silence=300.0)
            take_whole(request, reply.json())

        await self.until_answered(request, send)

    def end_refused(self, request: Request, error: Refused) -> None:
        if error.code == "model_load_failed":  # which the product does not promise
            request.wanted.refusal = error.code
        super().end_refused(request, error)

    async def _take_back(self, model: Acknowledged) -> None:
        try:
            await self.around.insist("DELETE", f"{REGISTRY}/{model.identity}")
        except Refused as error:
            if error.status != 404:  # an earlier try has done it
                self.wrong(f"the model {model.identity} could not be taken back: {error}")
                return
        model.gone_at = self.around.now


class Operator:
    """Who makes and revokes keys; in a process of its own. It tries again while the broker does not answer."""

    def __init__(self, settings: CommonSettings, history: History) -> None:
        self._settings, self._history = settings, history
        self._bus: Bus | None = None

    async def _keys(self) -> Bucket[KeyRecord]:
        if self._bus is None:
            self._bus = await Bus.connect(self._settings, "simulated operator")
        return await Bucket.open(self._bus, subjects.KEYS_BUCKET, KeyRecord)

    async def _put(self, identity: str, record: KeyRecord) -> None:
        """Returns once it is written."""
        while True:
            try:
                await (await self._keys()).put(identity, record)
            except RyzansteinError:
                await asyncio.sleep(1.0)
            else:
                return

    async def make(self, tenant: str, **fields: object) -> NewKey:
        """`fields`: as of `new_key`."""
        key = new_key(tenant, time.time(), **fields)  # type: ignore[arg-type]
        await self._put(key.identity, key.record)
        return key

    async def change(self, key: NewKey) -> None:
        """It has this record from now on."""
        await self._put(key.identity, key.record)

    async def revoke(self, key: NewKey) -> KeySeen:
        record = msgspec.structs.replace(key.record, revoked=time.time())
        await self._put(key.identity, record)
        seen = KeySeen(key.identity, asyncio.get_running_loop().time(), key.record.tenant)
        self._history.keys.append(seen)
        return seen

    async def close(self) -> None:
        if self._bus is not None:
            await self._bus.close()
