"""Tenants take turns, however many batches each has."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.jobs.runners import SHORT_TURN, TURN, Runners, Running, Waiting, next_of, to_yield
from shared.messages.batches import BatchJob

tenants = st.sampled_from(["", "a", "b", "c"])
waiting = st.lists(tenants, max_size=8).map(
    lambda names: [Waiting(f"w{at}", tenant, at) for at, tenant in enumerate(names)]
)
running = st.lists(st.tuples(tenants, st.floats(0, 1000)), max_size=8).map(
    lambda items: [Running(f"r{at}", tenant, began) for at, (tenant, began) in enumerate(items)]
)


@given(waiting, running)
def test_who_has_the_fewest_running_comes_next(wait: list[Waiting], run: list[Running]) -> None:
    chosen = next_of(wait, run, {})
    if chosen is None:
        assert wait == []
        return
    busy = Counter(item.tenant for item in run)
    assert busy[chosen.tenant] == min(busy[item.tenant] for item in wait)
    assert chosen.created_at == min(item.created_at for item in wait if item.tenant == chosen.tenant)


def test_tenants_are_served_in_turn() -> None:
    wait = [Waiting(f"a{number}", "a", number) for number in range(100)]
    wait += [Waiting(f"b{number}", "b", 200 + number) for number in range(2)] + [Waiting("c0", "c", 300)]
    served: dict[str, float] = {}
    order = []
    for now in range(1, 8):
        chosen = next_of(wait, [], served)
        wait.remove(chosen)
        served[chosen.tenant] = float(now)
        order.append(chosen.key)
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


@given(waiting, running, st.floats(0, 3000))
def test_only_who_has_more_makes_room_and_after_a_while(wait: list[Waiting], run: list[Running], now: float) -> None:
    chosen, busy = to_yield(wait, run, now), Counter(item.tenant for item in run)
    least = min((busy[item.tenant] for item in wait), default=99)
    most = max(busy.values(), default=0)
    if chosen is None:
        fair = [item for item in run if busy[item.tenant] > least]
        assert all(now - item.began < TURN for item in fair if busy[item.tenant] == most)
        return
    assert busy[chosen.tenant] == most > least
    assert now - chosen.began >= (TURN if most == least + 1 else SHORT_TURN)


def test_eight_of_one_tenant_make_room_for_another() -> None:
    run = [Running(f"a{number}", "a", float(number)) for number in range(8)]
    assert to_yield([Waiting("b", "b", 0.0)], run, 9.0) is None
    assert to_yield([Waiting("b", "b", 0.0)], run, 10.0) == run[0]
    assert to_yield([Waiting("a8", "a", 0.0)], run, 10_000.0) is None, "it gains nothing"
    assert to_yield([Waiting("b", "b", 0.0)], run[:1], 599.0) is None
    assert to_yield([Waiting("b", "b", 0.0)], run[:1], 600.0) == run[0]


async def test_a_job_that_another_gateway_takes_meanwhile_is_left_to_it() -> None:
    """Two wait; while one is claimed, the watch tells that another gateway has the other (seed 40276 of training)."""
    jobs = {
        name: BatchJob(name, "", float(at), "/v1/completions", "f", "f", "24h", expires_at=9e9)
        for at, name in enumerate("ab")
    }
    claimed = []

    async def claim(key: str, job: BatchJob, revision: int, owner: str) -> None:
        claimed.append((key, job.owner))
        runners.news("b", msgspec.structs.replace(jobs["b"], owner="other", beat=1), 3)

    work: Any = SimpleNamespace(needs=lambda job: True, can=lambda job: True, places=8, turns=True)
    store: Any = SimpleNamespace(traits=SimpleNamespace(word="batch"), claim=claim)
    bus: Any = SimpleNamespace(on_reconnect=lambda call: None)
    runners = Runners(bus, store, work, "here")
    for revision, (key, job) in enumerate(jobs.items(), 1):
        runners.news(key, job, revision)
    await runners._fill()
    assert claimed == [("a", "")]
