"""What intake reads out of the subject by which a message is acknowledged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.msg import Msg

from services.scheduler.intake import delivery_of

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
