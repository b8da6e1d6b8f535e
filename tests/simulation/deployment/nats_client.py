"""What nats-py looks for four times a second, told to it instead; and signs of life that come less often.

Each ordered consumer (a watch of a bucket is one) asks itself every 0.25 s whether it owes the broker an answer to its
flow control, and has the broker say every 5 s that it is there. With a dozen watches in each process that is most of
what an idle deployment does.
"""

import asyncio
from typing import Any

from nats.js.client import JetStreamContext

LOOKS_EVERY = 0.25
"""Seconds, as in nats-py, while an answer is owed."""
_State = JetStreamContext._JSI
_schedule = _State.schedule_flow_control_response


def install(heartbeat: float) -> None:
    """In a process that does nothing but simulate. Idempotent. `heartbeat`: seconds between the broker's signs."""
    _Seconds.heartbeat = heartbeat
    JetStreamContext.subscribe = _subscribe  # type: ignore[method-assign]
    _State.schedule_flow_control_response = _owed
    _State.check_flow_control_response = _answers


class _Seconds:
    heartbeat = 5.0


_subscribes = JetStreamContext.subscribe


async def _subscribe(self: Any, *given: Any, ordered_consumer: bool = False, **named: Any) -> Any:
    if ordered_consumer:
        named["idle_heartbeat"] = named.get("idle_heartbeat") or _Seconds.heartbeat
    return await _subscribes(self, *given, ordered_consumer=ordered_consumer, **named)


def _news(state: Any) -> asyncio.Event:
    if not hasattr(state, "_flow_control_news"):
        state._flow_control_news = asyncio.Event()
    return state._flow_control_news


def _owed(state: Any, reply: str) -> None:
    _schedule(state, reply)
    _news(state).set()


async def _answers(state: Any) -> None:
    """As nats-py's own, but asleep while nothing is owed."""
    news = _news(state)
    while not state._conn.is_closed:
        await news.wait()
        while state._fcr and state._fciseq - state._psub._pending_queue.qsize() < state._fcd:  # noqa: ASYNC110  # as it does
            await asyncio.sleep(LOOKS_EVERY)
        news.clear()
        reply, state._fcr, state._fcd = state._fcr, None, 0
        if reply and not state._conn.is_closed:
            await state._conn.publish(reply)
