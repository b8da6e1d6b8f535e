"""The scheduler's own view of a request: what placement needs, and the bytes that a ring gets."""

from dataclasses import dataclass
from typing import Protocol

from shared.messages import GenerationRequest, Lane


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
    arrived: float = 0.0
    """Monotonic seconds."""
    decided: float = 0.0
    """Monotonic seconds at which a group was last chosen."""
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
    ) -> "WaitingRequest":
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
            tokens=len(request.prompt) + len(request.generated),
            order=order,
            raw=raw,
            delivery=delivery,
            arrived=arrived,
        )
