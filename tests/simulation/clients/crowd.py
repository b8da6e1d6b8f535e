"""All clients of a run: each a process on a host of its own, with a seed of its own.

So a client's draws do not depend on what others do, and one can be left out without changing the others.
"""

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tests.simulation.clients import grpc, jobs, registry, sessions, streams, tenants, whole
from tests.simulation.clients.ask import Refused, Surroundings
from tests.simulation.clients.client import Client, Plan
from tests.simulation.clients.history import Acknowledged, History

# Clients as scenarios name them.
KINDS: dict[str, type[Client]] = {
    one.kind: one
    for one in (
        streams.Stream,
        streams.Completion,
        streams.Hasty,
        streams.Slow,
        streams.Leaving,
        streams.Cancelling,
        streams.Response,
        sessions.WebSocketClient,
        grpc.GrpcClient,
        whole.Whole,
        whole.Keyed,
        whole.Conversation,
        whole.Stored,
        whole.Limited,
        whole.Probing,
        jobs.Batches,
        jobs.Training,
        registry.Models,
        tenants.Flooding,
        tenants.Poison,
        tenants.Filling,
    )
}
# Runs the main of a client, whose name it is, in a process of its own.
Starter = Callable[[str, Callable[[], Any]], object]


class Crowd:
    """`add` clients, `start` them, `stop` them, and wait until all have `finished`."""

    def __init__(self, seed: int, gateways: Callable[[], Sequence[str]], start: Starter, model: str = "stub") -> None:
        self.history = History()
        self.clients: list[Client] = []
        self._seed, self._gateways, self._start, self._model = seed, gateways, start, model
        self._stopping = False

    def add(
        self, kind: str, plan: Plan | None = None, *, name: str = "", tenant: str = "", token: str = "", model: str = ""
    ) -> Client:
        """One more; its draws depend on its name alone. Raises `ValueError` for a kind that is not known."""
        if kind not in KINDS:
            raise ValueError(f"there are no clients {kind!r}; known are {', '.join(sorted(KINDS))}")
        name = name or f"{kind}-{sum(1 for one in self.clients if one.kind == kind) + 1}"
        around = self.surroundings(name, tenant, token, model)
        client = KINDS[kind](name, around, plan)
        self.clients.append(client)
        return client

    def surroundings(self, name: str, tenant: str = "", token: str = "", model: str = "") -> Surroundings:
        """Of somebody who is called so."""
        draw = random.Random(f"{self._seed} {name}")
        around = Surroundings(
            self._gateways, self.history, draw, model or self._model, tenant, token, lambda: self._stopping
        )
        around.turn(draw.randrange(64))
        return around

    def replace_token(self, old: str, new: str) -> None:
        """Who has the old API key uses the new one from now on."""
        for one in [client.around for client in self.clients] + self.history.acknowledged:
            if one.token == old:
                one.token = new

    def start(self) -> None:
        for client in self.clients:
            self._start(client.name, client.run)

    def stop(self) -> None:
        """Nothing new is begun; what is under way comes to its end."""
        self._stopping = True

    @property
    def finished(self) -> bool:
        return all(client.finished for client in self.clients)

    def auditor(self, done: Callable[[], object]) -> Callable[[], Awaitable[None]]:
        """The main of one who looks, once all is quiet, for everything that the API has acknowledged. `done` is called
        at its end."""

        async def look() -> None:
            for known in self.history.acknowledged:
                known.found = await self._look(known)
            done()

        return look

    async def _look(self, known: Acknowledged) -> int:
        """The status with which it is answered."""
        around = self.surroundings("auditor", known.tenant, known.token)
        try:
            reply, _ = await around.insist("GET", path_of(known))
        except Refused as error:
            return error.status
        return reply.status


def path_of(known: Acknowledged) -> str:
    """Where the API shows it."""
    folder = {
        "file": "/v1/files",
        "batch": "/v1/batches",
        "job": "/v1/fine_tuning/jobs",
        "model": registry.REGISTRY,
        "response": "/v1/responses",
        "chat": "/v1/chat/completions",
        "conversation": "/v1/conversations",
        "adapter": "/v1/loras",
    }
    return f"{folder[known.what]}/{known.identity}"
