"""What intake reads out of the subject by which a message is acknowledged."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.msg import Msg

from services.scheduler.intake import RequestIntake, delivery_of
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.settings import SchedulerSettings
from shared.service.endpoints import new_registry

NUMBER = st.integers(1, 1 << 48)
NANOSECONDS = st.integers(1_700_000_000 * 10**9, 1_900_000_000 * 10**9)


@pytest.mark.parametrize(
    "form",
    [
        "$JS.ACK.INTAKE.scheduler-batch.{}",
        "$JS.ACK._.ACCOUNT.INTAKE.scheduler-batch.{}",
        "$JS.ACK.hub.ACCOUNT.INTAKE.scheduler-batch.{}.x7Gq",
    ],
)
@given(NUMBER, NUMBER, NUMBER, NANOSECONDS, st.integers(0, 1 << 48))
def test_a_delivery_is_what_nats_py_makes_of_it(
    form: str, times: int, place: int, at_consumer: int, published: int, behind: int
) -> None:
    reply = form.format(f"{times}.{place}.{at_consumer}.{published}.{behind}")
    theirs = Msg.Metadata._from_reply(reply)
    delivered, order, seconds, left = delivery_of(reply)
    assert (delivered, order, left) == (theirs.num_delivered, theirs.sequence.stream, theirs.num_pending)
    assert seconds == pytest.approx(theirs.timestamp.timestamp(), abs=1e-5)


class Broker:
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.consumers: list[str] = []
        self.pulls: list[str] = []
        self.client = SimpleNamespace(new_inbox=lambda: "_INBOX.1", publish=self._publish)
        self.connected = True

    def jetstream(self) -> Any:
        return self

    async def add_consumer(self, stream: str, config: Any) -> None:
        self.consumers.append(config.durable_name)

    async def _publish(self, subject: str, data: bytes, reply: str) -> None:
        self.pulls.append(subject.rpartition(".")[2])


async def test_a_full_lane_asks_the_broker_for_nothing() -> None:
    broker, settings = Broker(), SchedulerSettings(held_requests=8)
    intake = RequestIntake(broker, settings, SchedulerMetrics(new_registry()), lambda *_, **__: True)  # type: ignore[arg-type]
    (full,) = (pull for pull in intake._pulls if pull.lane == "batch")
    full.held = full.limit  # and no pull of it is open
    for _ in range(5):
        await intake._revive()
    others = [pull.consumer for pull in intake._pulls if pull is not full]
    assert broker.consumers == broker.pulls == others
    full.broken = True
    await intake._revive()
    full.held -= 1
    await intake._revive()
    await intake._revive()
    assert broker.consumers == broker.pulls == [*others, full.consumer]
