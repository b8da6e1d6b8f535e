"""The scheduler's spans of a request that is sampled.

process intake.interactive       from its arrival to a ring's taking it, or its end here
├─ wait                          in the fair queue; again, when it comes back
├─ place                         choosing a group, and agreeing on its session's
└─ dispatch GROUP                until the leader's reply; what it sends carries on in the ring
"""

import msgspec

from shared import tracing
from shared.messages import GenerationRequest
from shared.nats.bus import encode
from shared.tracing import NONE, Span, Value

NO_FAULT = ("cancelled", "deferred", "settled")
"""Ends that are none of the request's failures: nobody wants it, or another has it."""

_decoder = msgspec.msgpack.Decoder(GenerationRequest)


class RequestTrace:
    """Of a request that nobody traces: records nothing."""

    __slots__ = ()

    @property
    def ids(self) -> dict[str, str]:
        """For log lines about the request."""
        return {}

    def chosen(self) -> None:
        """A group has been chosen: it waits no more."""

    def sent(self, raw: bytes, group: str, reason: str, batch: int) -> bytes:
        """It goes to a group's leader, with `batch` requests in all; `raw` as the leader gets it."""
        return raw

    def accepted(self, epoch: int) -> None:
        """The leader has it."""

    def refused(self, code: str) -> None:
        """The leader has not taken it, or has not answered."""

    def returned(self) -> None:
        """It waits again."""

    def ended(self, code: str) -> None:
        """Nothing comes of it here."""


UNTRACED = RequestTrace()


class SampledRequest(RequestTrace):
    """Of one that is sampled."""

    __slots__ = ("_done", "_part", "_span")

    def __init__(self, span: Span) -> None:
        self._span = span
        self._done = False
        self._part = tracing.under(span, "wait")
        """What is under way: it waits, or is placed, or is sent."""

    @property
    def ids(self) -> dict[str, str]:
        return tracing.ids_of(self._span)

    def chosen(self) -> None:
        self._next("place")

    def sent(self, raw: bytes, group: str, reason: str, batch: int) -> bytes:
        self._part.set({"ryzanstein.group": group, "ryzanstein.placement": reason})
        self._part.end()
        self._part = tracing.under(
            self._span,
            f"dispatch {group}",
            kind="client",
            attributes={
                "messaging.system": "nats",
                "messaging.operation.type": "send",
                "messaging.operation.name": "request",
                "messaging.batch.message_count": batch,
                "ryzanstein.group": group,
            },
        )
        request = _decoder.decode(raw)
        return encode(msgspec.structs.replace(request, traceparent=self._part.traceparent))

    def accepted(self, epoch: int) -> None:
        self._part.set({"ryzanstein.epoch": epoch})
        self._finish()

    def refused(self, code: str) -> None:
        self._part.fail(code)

    def returned(self) -> None:
        self._next("wait")

    def ended(self, code: str) -> None:
        if self._done:
            return
        self._span.set({"ryzanstein.end": code})
        if code not in NO_FAULT:
            self._span.fail(code)
        self._finish()

    def _next(self, name: str) -> None:
        self._part.end()
        self._part = tracing.under(self._span, name)

    def _finish(self) -> None:
        self._done = True
        self._part.end()
        self._span.end()


def trace_of(request: GenerationRequest, lane: str, delivered: int) -> RequestTrace:
    """Of a request that has arrived for the `delivered`th time."""
    attributes: dict[str, Value] = {
        "messaging.system": "nats",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.destination.name": f"intake.{lane}",
        "messaging.consumer.group.name": f"scheduler-{lane}",
        "gen_ai.request.model": request.model,
        "ryzanstein.request_id": request.request_id,
        "ryzanstein.generation_id": request.generation_id,
        "ryzanstein.attempt": request.attempt,
        "ryzanstein.lane": lane,
        "ryzanstein.deliveries": delivered,
    }
    span = tracing.follow(
        request.traceparent,
        request.tracestate,
        f"process intake.{lane}",
        kind="consumer",
        attributes=attributes,
    )
    return UNTRACED if span is NONE else SampledRequest(span)
