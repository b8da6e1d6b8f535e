"""API keys of a run's clients: made, limited, replaced and revoked, as operators do it with `ryzanstein keys`.

make ──every ready gateway knows it──▶ handed out ──replaced──▶ revoked ──▶ asked with, and to be refused
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from shared.config import CommonSettings
from shared.keys import KeyLimits, NewKey
from tests.simulation.clients.client import Client, Plan
from tests.simulation.clients.crowd import Crowd, Starter
from tests.simulation.clients.registry import Operator
from tests.simulation.deployment.deployment import Deployment, Member
from tests.simulation.faults.schedule import ClientPlan

# Of the keys of clients that ask for more than they may.
LIMITS = KeyLimits(requests_per_minute=600, concurrent=4)
NEWS = 2.0  # virtual seconds between two looks whether every gateway has heard of a new key
REVOKED_AFTER = 20.0  # virtual seconds that the key of a client is good that probes whether it still is
# With a key that was replaced: for so long every gateway is asked whether it still takes it.
PROBES = Plan(requests=10, pause=(0.0, 8.0))
T = TypeVar("T")


class Keys:
    def __init__(self, crowd: Crowd, deployment: Deployment, start: Starter) -> None:
        """`start`: runs the main of a client or operator in a process of its own."""
        self._crowd, self._deployment, self._start = crowd, deployment, start
        self._shared: list[tuple[str, NewKey]] = []  # by tenant: what its clients have
        self._changing = asyncio.Lock()
        self._made = 0

    async def open(self, tenants: int) -> None:
        """One for each tenant; with none, nobody needs a key."""
        for number in range(tenants):
            tenant = f"tenant-{number + 1}"
            self._shared.append((tenant, await self._make(tenant, tenant)))

    async def of(self, plan: ClientPlan) -> tuple[str, str]:
        """The tenant and the token of a client. Who tries limits, or whether a key still holds, has one of its own."""
        if not self._shared:
            return "", ""
        tenant, key = self._shared[plan.seed % len(self._shared)]
        if plan.client == "limited":
            key = await self._make(tenant, plan.name, limits=LIMITS)
        elif plan.client == "probing":
            key = await self._make(tenant, plan.name, revoked_after=REVOKED_AFTER)
        return tenant, key.token

    async def replace(self, which: float) -> None:
        """`which`: of the tenants, as a share. Its clients get another key, and the one that they had is revoked;
        returns once it was tried for some time after."""
        if not self._shared:
            return
        async with self._changing:
            at = self._at(which)
            tenant, old = self._shared[at]
            self._made += 1
            new = await self._make(tenant, f"{tenant}-{self._made}")
            self._shared[at] = tenant, new
            self._crowd.replace_token(old.token, new.token)
            await self._operate(f"revoke-{tenant}", lambda operator: operator.revoke(old))
            name = f"probing-{tenant}-{self._made}"
        await self.run(self._crowd.add("probing", PROBES, name=name, tenant=tenant, token=old.token))

    async def limit(self, which: float, requests: int, concurrent: int) -> None:
        """Of a tenant's key: requests per minute, and at the same time; 0: no limit."""
        if not self._shared:
            return
        async with self._changing:
            at = self._at(which)
            tenant, key = self._shared[at]
            limits = KeyLimits(requests_per_minute=requests, concurrent=concurrent)
            key = msgspec.structs.replace(key, record=msgspec.structs.replace(key.record, limits=limits))
            self._shared[at] = tenant, key
            await self._operate(f"limit-{tenant}", lambda operator: operator.change(key))

    async def trouble(self, kind: str, which: float, plan: Plan) -> None:
        """A client of that kind, of one of the tenants, with a key of its own; to its end."""
        if not self._shared:
            return
        self._made += 1
        tenant, name = self._shared[self._at(which)][0], f"{kind}-{self._made}"
        key = await self._make(tenant, name)
        await self.run(self._crowd.add(kind, plan, name=name, tenant=tenant, token=key.token))

    async def run(self, client: Client) -> None:
        """In a process of its own, to its end."""
        over = asyncio.get_running_loop().create_future()

        async def main() -> None:
            await client.run()
            over.set_result(None)

        self._start(client.name, main)
        await over

    def _at(self, which: float) -> int:
        return min(int(which * len(self._shared)), len(self._shared) - 1)

    async def _make(self, tenant: str, name: str, *, revoked_after: float = 0.0, **fields: object) -> NewKey:
        """As `ryzanstein keys` makes one, in a process of its own, which may revoke it later."""
        made = asyncio.get_running_loop().create_future()

        async def work(operator: Operator) -> None:
            made.set_result(await operator.make(tenant, manage_models=True, **fields))
            if revoked_after:
                await asyncio.sleep(revoked_after)
                await operator.revoke(made.result())

        self._begin(f"operator-{name}", work)
        key: NewKey = await made
        while not all(self._knows(member, key) for member in self._deployment.gateways()):  # noqa: ASYNC110
            await asyncio.sleep(NEWS)
        return key

    def _knows(self, member: Member, key: NewKey) -> bool:
        """Whether a gateway takes a new key, once it takes any: one that is cut off does not, and its operator hands
        none out meanwhile."""
        gateway: Any = member.service
        return not member.ready or gateway is None or key.identity in gateway._backend.authenticator.records

    async def _operate(self, name: str, work: Callable[[Operator], Awaitable[T]]) -> T:
        """Returns what it has come to."""
        done = asyncio.get_running_loop().create_future()

        async def all_of_it(operator: Operator) -> None:
            done.set_result(await work(operator))

        self._begin(name, all_of_it)
        result: T = await done
        return result

    def _begin(self, name: str, work: Callable[[Operator], Awaitable[None]]) -> None:
        async def main() -> None:
            operator = Operator(CommonSettings(nats_url=self._deployment.nats_url), self._crowd.history)
            await work(operator)
            await operator.close()

        self._start(name, main)
