"""Each fault alone, under load: no token lost, repeated or wrong, no request unanswered."""

from collections.abc import Callable

import pytest

from tests.chaos.cluster_fixture import House
from tests.chaos.conftest import Loader
from tests.chaos.exercise import Row, exercise
from tests.chaos.faults import all_faults

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

# The few that `make test-slow` runs; the rest needs `make chaos`.
ALWAYS = ("kill-rank-0", "kill-gateway", "kill-scheduler", "kill-nats")


@pytest.mark.parametrize("name", [n if n in ALWAYS else pytest.param(n, marks=pytest.mark.chaos) for n in all_faults()])
async def test_nothing_is_lost_by(name: str, house: House, load: Loader, note: Callable[[Row], None]) -> None:
    fault = all_faults()[name]()
    async with load(house) as clients:
        try:
            row = await exercise(house, fault, clients)
            await clients.finish()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{house.logs()}") from error
    note(row)
    clients.check(may_refuse=fault.may_refuse)
    if fault.target.startswith("executor"):
        assert row.moved, "no stream had to change its ring: the test shows nothing"
    await house.all_ready()
