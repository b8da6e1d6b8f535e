"""A client's generation as one gateway knows it: its id, its record, its choices, and who listens. Pure.

    submitted here ──▶ owned ◀──claimed── followed ◀── found by its id, another gateway's
                         │ └────yielded────▶ │
    nobody listens for `linger`: cancelled   nobody reads it here: forgotten

Its owner decides about it. Times are seconds of a monotonic clock. The id says where its record is:

    chatcmpl-  1f0c9a77  67e1c5b0  9b1d6e0f4c2a8835
    endpoint   writer    slot      random
               of the    second of
               records   its beginning

Writer and slot name the subject of the journal that holds the record: a look-up reads one second of one
gateway's records, whatever else the journal has. The random part cannot be guessed.
"""

import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import msgspec

from services.gateway.lifecycle.generation import Generation
from services.gateway.lifecycle.token_stream import GenerationLimits
from services.gateway.ratelimit.limiter import RequestAdmission
from services.gateway.tracing.generations import AnswerTrace
from shared.errors import FatalRequest
from shared.messages import GenerationRequest
from shared.messages.records import GenerationRecord, Ownership
from shared.nats.journal import log_begin

# Of endpoints whose prefix is not their name.
PREFIXES = {
    "chat.completions": "chatcmpl-",
    "completions": "cmpl-",
    "responses": "resp_",
    "embeddings": "embd-",
    "messages": "msg_",
    "ollama.chat": "ollama-",
    "ollama.generate": "ollama-",
    "pooling": "pool-",
}
_ID = re.compile(r"(?:[a-z][a-z0-9.]*[-_])?([0-9a-f]{8})([0-9a-f]{8})[0-9a-f]{16}")


class RecordPosition(NamedTuple):
    """Where the record of a generation stands in the journal."""

    writer: str
    slot: str


def writer_of(consumer: str) -> str:
    """The short name under which a gateway writes its records. Two gateways may share it: their records
    then lie beside each other, and identities tell them apart."""
    return hashlib.blake2b(consumer.encode(), digest_size=4).hexdigest()


def new_identity(writer: str, now: float) -> str:
    """`now`: unix seconds."""
    return f"{writer}{int(now) & 0xFFFFFFFF:08x}{secrets.token_hex(8)}"


def prefix_of(endpoint: str) -> str:
    """Of its generations' ids, at any gateway: also at one that has no dialect with it."""
    return PREFIXES.get(endpoint) or f"{endpoint}-"


def parse(public_id: str) -> str | None:
    """The identity in an id as clients have it, with or without a prefix; None when it is none."""
    match = _ID.fullmatch(public_id)
    return public_id[-32:] if match else None


def of_choice(generation_id: str) -> str:
    """The identity of the answer that a generation, as the bus names it, is a choice of."""
    return generation_id.rpartition("-")[0]


def place(identity: str) -> RecordPosition:
    return RecordPosition(identity[:8], identity[8:16])


_SEED_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: choices of neighbouring seeds do not coincide


UINT64 = (1 << 64) - 1


def seed_of_choice(seed: int, choice: int) -> int:
    """The seed of choice `choice` of a request with n > 1: choice 0 has the request's own.

    (seed + choice * 0x9E3779B97F4A7C15) mod 2**64, so that a client can reproduce any choice alone.
    """
    return (seed + choice * _SEED_STEP) & UINT64


KEPT = 2.0  # seconds that a generation which nobody reads here stays at hand, when it need not


@dataclass(slots=True, eq=False)
class RequestState:
    """What clients know under one id. Readers are counted by those who attach them."""

    record: GenerationRecord
    generations: Sequence[Generation]
    _: KW_ONLY
    owner: str  # the instance that looks after it
    owned: bool
    quiet_since: float  # when the last reader here left
    consumers: list[str]  # instances whose token subjects have parts of its log, in order
    admission: RequestAdmission | None = None  # what it takes of its owner's limits, where it begins here
    may_cost: int = 0  # tokens that it may come to
    readers: int = 0
    # Whether its client closed its last connection here, and was not cut off with a gateway.
    left: bool = False
    listened_until: float = 0.0  # until when another gateway has said that it listens
    silent_asks: int = 0  # how often its owner has not answered in a row
    watched: bool = False  # whether it is read here for its stop strings' sake, by no client

    @property
    def trace(self) -> AnswerTrace | None:
        """What is traced of it; None: nothing."""
        return self.generations[0].trace

    @property
    def identity(self) -> str:
        return self.record.identity

    @property
    def public_id(self) -> str:
        return prefix_of(self.record.endpoint) + self.record.identity

    @property
    def fingerprint(self) -> str:
        """Of the rings that compute the whole: one that differs from the one that was known when the request was taken
        before others; empty: none was ever known."""
        first = self.record.fingerprint
        for item in self.generations:
            if item.fingerprint and item.fingerprint != first:
                return item.fingerprint
        return first

    @property
    def ended(self) -> bool:
        return all(generation.ended for generation in self.generations)

    @property
    def failed(self) -> bool:
        """Whether a choice ended with an error or was cancelled: unless a stop string had ended its text
        before, a repeat of the request is a new one. Not where computing it has ended rings: that would end more."""
        errors = [item.error for item in self.generations if item.error is not None]
        return bool(errors) and not any(isinstance(error, FatalRequest) for error in errors)

    @property
    def resumable(self) -> bool:
        """Whether a client can come back to it: it has seen the id, or has a key that leads there."""
        return self.record.stream or bool(self.record.idempotency) or self.record.background > 0

    @property
    def expects_return(self) -> bool:
        """Whether its client has said that it may come back."""
        return bool(self.record.idempotency) or self.record.background > 0

    def linger(self, grace: float, *, crowded: bool = False) -> float:
        """Seconds that it goes on while nobody listens. `crowded`: others wait for its place in the ring. A client
        that closed its stream without having said that it comes back gives the place to them, and at once where it
        has seen nothing yet: there is no position to come back to."""
        if not self.resumable:
            return 0.0
        if self.left and not self.expects_return and (crowded or not self.begun):
            return 0.0
        return self.record.background or grace

    @property
    def begun(self) -> bool:
        """Whether there is something to read."""
        return any(item.tokens or item.finish for item in self.generations)

    def forsaken(self, now: float, grace: float, *, crowded: bool = False) -> bool:
        """Whether nobody has listened for as long as it may go on so. Only its owner asks."""
        if self.readers or now < self.listened_until:
            return False
        return now - max(self.quiet_since, self.listened_until) >= self.linger(grace, crowded=crowded)

    def forgettable(self, now: float) -> bool:
        """Whether nothing is lost here when it is dropped."""
        if self.readers or now - self.quiet_since < KEPT:
            return False
        return self.ended or not self.owned

    @property
    def prompt_tokens(self) -> tuple[int, int]:
        """Of its prompts, and those of them that were found in the KV cache: each prompt once, however many choices
        share it."""
        lengths: dict[int, int] = {}
        cached: dict[int, int] = {}
        for item in self.generations:
            prompt = item.request.prompt
            lengths[id(prompt)] = len(prompt)
            cached[id(prompt)] = max(cached.get(id(prompt), 0), item.cached_tokens)
        return sum(lengths.values()), sum(cached.values())

    @property
    def cost(self) -> int:
        """Tokens that it has come to."""
        return self.prompt_tokens[0] + sum(len(item.tokens) for item in self.generations)


def requests_of(record: GenerationRecord) -> list[GenerationRequest]:
    """The request of every choice, from a record that is whole."""
    if record.choices == 1:
        return list(record.requests)
    return [
        _request_of_choice(request, record.identity, prompt * record.choices + choice, choice)
        for prompt, request in enumerate(record.requests)
        for choice in range(record.choices)
    ]


def _request_of_choice(request: GenerationRequest, identity: str, index: int, choice: int) -> GenerationRequest:
    params = request.sampling
    if choice:
        params = msgspec.structs.replace(params, seed=seed_of_choice(params.seed, choice))
    return msgspec.structs.replace(request, generation_id=f"{identity}-{index}", sampling=params)


def followed_answer(
    record: GenerationRecord,
    limits: GenerationLimits,
    ownership: Ownership | None = None,
    *,
    now: float,
    now_unix: float,
    keep: float = 0.0,
) -> RequestState:
    """An answer of another gateway, with its generations, from a record that is whole. `ownership`: None where nobody
    has claimed it. It stays at hand for `keep` seconds, though nobody reads it.

    Its attempts count as handed in when the record was made: a loss that was heard of since then is theirs.
    """
    age, begin = max(0.0, now_unix - record.created), log_begin(record)
    generations = [
        Generation(request, index, limits, now=now, age=age, started_at=record.created, followed=True, begin=begin)
        for index, request in enumerate(requests_of(record))
    ]
    first = record.requests[0].consumer
    consumers = list(ownership.consumers) if ownership else [first]
    owner = ownership.owner if ownership else first
    return RequestState(record, generations, owner=owner, owned=False, quiet_since=now + keep, consumers=consumers)


def merged(parts: Sequence[GenerationRecord]) -> GenerationRecord | None:
    """The whole record of its parts, in any order, some of them twice perhaps; None while some are missing."""
    by_prompt = {part.first_prompt + offset: request for part in parts for offset, request in enumerate(part.requests)}
    if not parts or len(by_prompt) < parts[0].prompts:
        return None
    requests = [by_prompt[prompt] for prompt in sorted(by_prompt)]
    by_number = {part.first_prompt + offset: text for part in parts for offset, text in enumerate(part.texts)}
    texts = [by_number[number] for number in sorted(by_number)]
    return msgspec.structs.replace(parts[0], first_prompt=0, requests=requests, texts=texts)
