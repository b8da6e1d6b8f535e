"""Reading the journal: the token frames that were recorded, again, in order.

The gateway reads it when live frames were missed; a client that comes back reads it from the
position it knows.
"""

import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import msgspec
import nats.errors
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from shared import subjects
from shared.bus import Bus
from shared.messages import TokenFrame

_decoder = msgspec.msgpack.Decoder(TokenFrame)
BATCH = 256


async def replay(bus: Bus, consumer: str, since: float) -> AsyncIterator[TokenFrame]:
    """Yields the recorded frames of `consumer` from `since` (unix seconds) to the newest, then ends.

    Raises `nats.errors.Error` or `TimeoutError` when the broker does not answer.
    """
    subscription = await bus.jetstream().pull_subscribe(
        subjects.tokens(consumer),
        stream=subjects.JOURNAL_STREAM,
        config=ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_TIME,
            opt_start_time=datetime.fromtimestamp(since, UTC),
            ack_policy=AckPolicy.NONE,
            inactive_threshold=30,
            mem_storage=True,
        ),
    )
    try:
        pending = (await subscription.consumer_info()).num_pending or 0
        while pending > 0:
            messages = await subscription.fetch(min(pending, BATCH), timeout=5)
            for message in messages:
                yield _decoder.decode(message.data)
            pending = (messages[-1].metadata.num_pending if messages else 0) or 0
    finally:
        with contextlib.suppress(nats.errors.Error):  # the broker removes an inactive consumer by itself
            await subscription.unsubscribe()
