"""What is told to rings and schedulers while NATS does not take it, and who has claimed a generation meanwhile."""

import asyncio
from typing import Any

import pytest
from nats.js.errors import APIError

from services.gateway.lifecycle import cancellation
from services.gateway.lifecycle.cancellation import Cancellations
from services.gateway.lifecycle.generation import Generation
from shared.errors import BrokerUnavailable
from tests.unit.executor.scheduler.stepped_ring import ask
from tests.unit.gateway.streams.test_resumed_reading import LIMITS


class FakeBus:
    """Takes messages while it is connected, and none of `refused` first ones."""

    def __init__(self) -> None:
        self.connected = True
        self.refused = 0
        self.fault: Exception | None = None  # of taking a message out of a stream
        self.said: list[tuple[str, Any]] = []
        self._reconnected: Any = None

    def on_reconnect(self, callback: Any) -> None:
        self._reconnected = callback

    def reconnect(self) -> None:
        self.connected = True
        self._reconnected()

    async def request(self, subject: str, message: Any, *more: Any, timeout: float) -> None:
        await self.publish(subject, message)

    async def publish(self, subject: str, message: Any) -> None:
        if self.refused:
            self.refused -= 1
            raise BrokerUnavailable("not now")
        self.said.append((subject, message))

    def jetstream(self) -> "FakeBus":
        return self

    async def delete_msg(self, stream: str, sequence: int) -> None:
        if self.fault is not None:
            raise self.fault
        self.said.append((stream, sequence))


class FakeClaims:
    def __init__(self) -> None:
        self.rivals: dict[str, object] = {}

    async def rival(self, identity: str) -> object | None:
        found = self.rivals.get(identity)
        if isinstance(found, Exception):
            raise found
        return found


def generation(number: int, group: str = "g1") -> Generation:
    made = Generation(ask(f"{number:032}-0"), 0, LIMITS, now=0.0, started_at=0.0)
    made.group, made.claim, made.intake_sequence = group, 3, number
    return made


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> FakeBus:
    monkeypatch.setattr(cancellation, "RETRY_PAUSE", 0.0)
    return FakeBus()


def of(bus: FakeBus, claims: FakeClaims | None = None) -> Cancellations:
    return Cancellations(bus, claims or FakeClaims())  # type: ignore[arg-type]


async def settle(cancellations: Cancellations) -> None:
    await asyncio.sleep(0)  # what is asked for in one turn travels together
    await cancellations._tasks.finished()
    assert cancellations.idle


@pytest.mark.parametrize(("numbers", "own"), [((1, 2, 3), [f"{1:032}-0"]), ((2,), [])])
async def test_an_owner_says_again_only_what_is_still_its_own(
    bus: FakeBus, numbers: tuple[int, ...], own: list[str]
) -> None:
    claims = FakeClaims()
    claims.rivals = {f"{2:032}": object(), f"{3:032}": BrokerUnavailable("who knows")}
    cancellations = of(bus, claims)
    bus.refused = 1
    for number in numbers:
        cancellations.cancel(generation(number), by_owner=True)
    await settle(cancellations)
    assert [said.generation_ids for _, said in bus.said] == ([own] if own else [])


async def test_it_waits_for_the_connection_and_gives_up_after_a_second_refusal(bus: FakeBus) -> None:
    cancellations = of(bus)
    bus.connected = False
    cancellations.cancel(generation(1), by_owner=False)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not cancellations.idle
    bus.reconnect()
    await settle(cancellations)
    assert len(bus.said) == 1
    bus.refused = 2
    cancellations.cancel(generation(2), by_owner=False)
    await settle(cancellations)
    assert len(bus.said) == 1


@pytest.mark.parametrize("fault", [APIError(code=400), TimeoutError()], ids=["it has left", "no answer"])
async def test_a_request_that_cannot_be_taken_back_is_left(bus: FakeBus, fault: Exception) -> None:
    cancellations = of(bus)
    bus.fault = fault
    cancellations.cancel(generation(7, group=""), by_owner=False)
    await settle(cancellations)
    assert [subject for subject, _ in bus.said] == ["generations.cancel"]


async def test_the_end_sends_what_is_left_at_once(bus: FakeBus) -> None:
    cancellations = of(bus)
    cancellations.cancel(generation(7, group=""), by_owner=False)
    await cancellations.stop()
    assert {subject for subject, _ in bus.said} == {"generations.cancel", "INTAKE"}
