"""The scheduler's own view of a request: what placement needs, and the bytes that a ring gets."""

import math
from dataclasses import dataclass
from typing import Protocol

from services.scheduler.costs import cost
from services.scheduler.prefixes import Prefix, prefixes
from services.scheduler.traces import UNTRACED, RequestTrace
from shared.messages import GenerationRequest, Lane

PATIENCE = 600.0
"""Seconds after its publication by which a request without a deadline is due, among its tenant's others."""


class Delivery(Protocol):
    """The durable message behind a request. It stays in the stream until it is settled."""

    async def ack(self) -> None:
        """The request is in other hands, or ended: the stream may forget it."""
        ...

    def ours(self, now: float) -> bool:
        """Whether the broker still counts on us at `now` (monotonic seconds): after a silence it has
        given the request to another scheduler."""
        ...

    def drop(self) -> None:
        """Lets go of a request that is not ours any more."""
        ...


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request between intake and ring.

    `raw` is the GenerationRequest as it came: it is handed on unchanged, without encoding it again.
    """

    generation_id: str
    request_id: str
    model: str
    consumer: str
    lane: Lane
    tenant: str
    session: str
    deadline: float
    """Unix seconds; 0: none."""
    attempt: int
    position: int
    """Output tokens that earlier attempts have produced."""
    tokens: int
    """Tokens to compute before the next output token: prompt and earlier output."""
    order: int
    """Position in the intake stream: who came first."""
    raw: bytes
    delivery: Delivery
    cost: int = 1
    """Tokens that it counts for between tenants."""
    due: float = math.inf
    """Unix seconds: of a tenant's requests the one that is due first goes first."""
    prefixes: tuple[Prefix, ...] = ()
    """Names of the prompt's beginnings, longest first, for a request without a session."""
    paid: bool = False
    """Its tenant's share has been charged; a request that comes back is not charged twice."""
    arrived: float = 0.0
    """Monotonic seconds."""
    decided: float = 0.0
    """Monotonic seconds at which a group was last chosen."""
    trace: RequestTrace = UNTRACED
    reason: str = ""
    """Why the group that it was last sent to."""
    claim: int = 0
    """Of the gateway that handed it in."""
    priority: int = 0
    """Of a tenant's requests the one with the least goes first."""
    asked: str = ""
    """Group that was sent the request and has not answered: it may have it all the same."""

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        *,
        raw: bytes,
        lane: Lane,
        order: int,
        delivery: Delivery,
        arrived: float,
        published: float,
    ) -> "WaitingRequest":
        """`arrived` in monotonic, `published` in unix seconds."""
        tokens = len(request.prompt) + len(request.generated)
        return cls(
            generation_id=request.generation_id,
            request_id=request.request_id,
            model=request.model,
            consumer=request.consumer,
            lane=lane,
            tenant=request.tenant,
            session=request.session,
            deadline=request.deadline,
            attempt=request.attempt,
            position=len(request.generated),
            tokens=tokens,
            order=order,
            raw=raw,
            delivery=delivery,
            cost=cost(tokens, request.max_tokens - len(request.generated)),
            due=request.deadline or published + PATIENCE,
            claim=request.claim,
            priority=request.priority,
            prefixes=() if request.session else prefixes(request.model, request.prompt, request.cache_salt),
            arrived=arrived,
        )
