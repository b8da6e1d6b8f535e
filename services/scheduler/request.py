"""The scheduler's own view of a request: what placement needs, the bytes that a ring gets, its spans if it is sampled.

process intake.interactive       from its arrival to a ring's taking it, or its end here
├─ wait                          in the fair queue; again, when it comes back
├─ place                         choosing a group, and agreeing on its session's
└─ dispatch GROUP                until the leader's reply; what it sends carries on in the ring

The beginnings of a prompt have names, so that prompts that begin alike meet the same cache: a chain of hashes, as the
ring's own prefix index has, in which the name of a longer beginning covers the shorter ones.

    64 tokens ──▶ 256 tokens ──▶ 1024 tokens ──▶ 4096 tokens
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from shared import tracing
from shared.messages import GenerationRequest, Lane, SparseAttention, SparseKind
from shared.nats.bus import encode
from shared.sparse_attention import to_argument
from shared.tracing import NONE, Span, Value

# Ends that are none of the request's failures: nobody wants it, or another has it.
NO_FAULT = ("cancelled", "deferred", "settled")

_decoder = msgspec.msgpack.Decoder(GenerationRequest)


class RequestTrace:
    """The spans of one request, or what records nothing for one that is not sampled."""

    __slots__ = ("_done", "_part", "_span")

    def __init__(self, span: Span) -> None:
        self._span = span
        self._done = False
        self._part = tracing.under(span, "wait")  # what is under way: it waits, or is placed, or is sent

    @property
    def ids(self) -> dict[str, str]:
        """For log lines about the request."""
        return tracing.ids_of(self._span)

    def chosen(self) -> None:
        """A group has been chosen: it waits no more."""
        self._next("place")

    def sent(self, raw: bytes, group: str, reason: str, batch: int) -> bytes:
        """It goes to a group's leader, with `batch` requests in all; `raw` as the leader gets it."""
        if self._span is NONE:
            return raw
        self._part.set({"ryzanstein.group": group, "ryzanstein.placement": reason})
        self._part.end()
        attributes: dict[str, Value] = {
            "messaging.system": "nats",
            "messaging.operation.type": "send",
            "messaging.operation.name": "request",
            "messaging.batch.message_count": batch,
            "ryzanstein.group": group,
        }
        self._part = tracing.under(self._span, f"dispatch {group}", kind="client", attributes=attributes)
        request = _decoder.decode(raw)
        return encode(msgspec.structs.replace(request, traceparent=self._part.traceparent))

    def accepted(self, epoch: int) -> None:
        self._part.set({"ryzanstein.epoch": epoch})
        self._finish()

    def refused(self, code: str) -> None:
        """The leader has not taken it, or has not answered."""
        self._part.fail(code)

    def returned(self) -> None:
        """It waits again."""
        self._next("wait")

    def ended(self, code: str) -> None:
        """Nothing comes of it here."""
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


UNTRACED = RequestTrace(NONE)


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
        request.traceparent, request.tracestate, f"process intake.{lane}", kind="consumer", attributes=attributes
    )
    return UNTRACED if span is NONE else RequestTrace(span)


# Tokens. What is shorter than the first is computed sooner than it is looked for.
LENGTHS = (64, 256, 1024, 4096)


class Prefix(NamedTuple):
    """A prompt's beginning."""

    key: int
    tokens: int


def prefixes(
    model: str, prompt: Sequence[int], salt: str = "", adapter: str = "", sparse: SparseAttention | None = None
) -> tuple[Prefix, ...]:
    """The named beginnings of `prompt`, longest first; none for a short one, or one that no model could take.
    Prompts of different `salt` or LoRA `adapter` share no cache, hence no name; nor do those of different `sparse`
    attention, beyond its threshold."""
    found: list[Prefix] = []
    digest, start = ("\0".join([model, salt, adapter] if adapter else [model, salt] if salt else [model]).encode(), 0)
    for length in LENGTHS:
        if len(prompt) < length:
            break
        try:
            tokens = array("i", prompt[start:length]).tobytes()
        except OverflowError:  # the ring will say so
            break
        if sparse is not None and length > sparse.threshold:
            digest += to_argument(sparse).encode()
        digest = blake2b(digest + tokens, digest_size=16).digest()
        found.append(Prefix(int.from_bytes(digest[:8], "little"), length))
        start = length
    return tuple(reversed(found))


# Output tokens that a request is reckoned with at most: limits are often the whole context, answers are not.
EXPECTED_OUTPUT = 256


def cost(tokens: int, output_left: int) -> int:
    """What a request with `tokens` tokens to compute before its next one, and `output_left` to produce at most, counts
    for between tenants, in tokens."""
    return max(1, tokens + max(0, min(output_left, EXPECTED_OUTPUT)))


# Seconds after its publication by which a request without a deadline is due, among its tenant's others.
PATIENCE = 600.0


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
    deadline: float  # Unix seconds; 0: none
    attempt: int
    position: int  # output tokens that earlier attempts have produced
    tokens: int  # tokens to compute before the next output token: prompt and earlier output
    order: int  # position in the intake stream: who came first
    raw: bytes
    delivery: Delivery
    cost: int = 1  # tokens that it counts for between tenants
    due: float = math.inf  # Unix seconds: of a tenant's requests the one that is due first goes first
    prefixes: tuple[Prefix, ...] = ()  # names of the prompt's beginnings, longest first
    paid: bool = False  # its tenant's share has been charged; a request that comes back is not charged twice
    arrived: float = 0.0  # monotonic seconds
    decided: float = 0.0  # monotonic seconds at which a group was last chosen
    trace: RequestTrace = UNTRACED
    reason: str = ""  # why the group that it was last sent to
    claim: int = 0  # of the gateway that handed it in
    priority: int = 0  # of a tenant's requests the one with the least goes first
    adapter: str = ""  # digest of its LoRA adapter
    sparse: SparseKind | Literal[""] = ""  # kind of sparse attention that its group must compute; empty: none
    asked: str = ""  # group that was sent the request and has not answered: it may have it all the same

    @property
    def log_fields(self) -> dict[str, Any]:
        """What every log line about the request carries."""
        ids = {"request_id": self.request_id, "generation_id": self.generation_id, "attempt": self.attempt}
        return ids | self.trace.ids

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
            prefixes=prefixes(request.model, request.prompt, request.cache_salt, request.adapter, request.sparse),
            adapter=request.adapter,
            sparse=request.sparse.kind if request.sparse is not None else "",
            arrived=arrived,
        )
