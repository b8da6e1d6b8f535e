"""Keeps owners and followers of generations in touch, and finds heirs for what a lost gateway owned.

owner answers          told every second what is read here; it decides, and cancels nothing meanwhile
nobody subscribes      it is lost
silence, three times   it counts as lost: should it wake up, the claim tells it that it owns no more
"not mine"             it began anew, or the generation has ended and the journal lagged behind

lost: read the log once more ──▶ ended?  nothing to do
                             └─▶ claim ──▶ won: ours; lost: follow the winner
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

import structlog

from services.gateway.core.metrics import GatewayMetrics
from services.gateway.lifecycle.claims import GenerationClaims
from services.gateway.lifecycle.request_state import RequestState
from shared.errors import BrokerUnavailable, NobodyThere
from shared.messages.records import Listen, Listened, Ownership
from shared.nats import subjects
from shared.nats.bus import Bus

log = structlog.get_logger(__name__)

LISTEN_INTERVAL = 1.0  # seconds between two messages to an owner
LEASE = 3.0  # seconds for which such a message holds
ASK_TIMEOUT = 1.0
SILENT_ASKS = 3  # questions in a row that an owner may leave unanswered before it counts as lost
SETTLE = 0.15  # seconds that the journal gets to record what was published just now
CLAIM_TIME = 15.0  # seconds that a claim takes at most, the broker's time-outs included
CLAIMS_AT_ONCE = 64
ASKED_AT_ONCE = 4096  # identities in one message


class AnswersAtHand(Protocol):
    """The answers of this gateway, of which somebody looks after each."""

    def all(self) -> list[RequestState]: ...

    def get(self, identity: str) -> RequestState | None: ...

    async def read_sources(self, answer: RequestState, consumers: Sequence[str]) -> None:
        """Reads its log on the token subjects of `consumers`. Raises `BrokerUnavailable`."""
        ...

    def on_owned(self, answer: RequestState, claim: int) -> None:
        """This gateway looks after `answer` from now on, under `claim`."""
        ...

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs `work` in the background."""
        ...


class Owners:
    """The only one that changes who owns an answer."""

    def __init__(
        self, bus: Bus, consumer: str, claims: GenerationClaims, metrics: GatewayMetrics, answers: AnswersAtHand
    ) -> None:
        self._bus = bus
        self._consumer = consumer
        self._metrics = metrics
        self._answers = answers
        self._claims = claims
        self._gate = asyncio.Semaphore(CLAIMS_AT_ONCE)
        self._due: dict[str, dict[str, RequestState]] = {}  # answers to ask about at once, by owner
        self._wake = asyncio.Event()

    async def start(self) -> None:
        """From now on other gateways are answered."""
        await self._claims.bucket.ensure()
        await self._bus.subscribe(subjects.gateway(self._consumer), Listen, self._on_listen)

    async def of(self, identity: str) -> Ownership | None:
        """Who has claimed it; None: nobody had to. Raises `BrokerUnavailable`."""
        return await self._claims.get(identity)

    def ask_soon(self, answer: RequestState) -> None:
        """Its owner is told, in the background, that it is read here."""
        self._due.setdefault(answer.owner, {})[answer.identity] = answer
        self._wake.set()

    async def take(self, answers: list[RequestState]) -> None:
        """Takes over those whose owner does not answer: the health monitor has said that it is gone."""
        by_owner: dict[str, list[RequestState]] = {}
        for answer in answers:
            answer.silent_asks = SILENT_ASKS - 1
            by_owner.setdefault(answer.owner, []).append(answer)
        await asyncio.gather(*(self._ask(owner, some) for owner, some in by_owner.items()))

    async def run(self) -> None:
        """Tells owners what is read here. Runs until it is cancelled."""
        following = asyncio.create_task(self._remind())
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                due, self._due = self._due, {}
                for owner, answers in due.items():
                    self._answers.spawn(self._ask(owner, list(answers.values())))
        finally:
            following.cancel()

    async def _remind(self) -> None:
        while True:
            await asyncio.sleep(LISTEN_INTERVAL)
            for answer in self._answers.all():
                if not answer.owned and not answer.ended and answer.readers:
                    self.ask_soon(answer)

    async def watch(self) -> None:
        """Gives up what others have claimed. Runs until it is cancelled."""
        await self._claims.bucket.follow(self._on_claim)

    def _on_claim(self, identity: str, ownership: Ownership | None) -> None:
        answer = self._answers.get(identity)
        if answer is not None and ownership is not None and ownership.owner != self._consumer:
            self._yield(answer, ownership)

    async def still(self, answer: RequestState) -> bool:
        """Whether this gateway owns `answer`, as the broker has it at this moment: it may have been cut off or
        stopped while another one claimed it, which then has it. Raises `BrokerUnavailable`."""
        rival = await self._claims.rival(answer.identity)
        if rival is not None:
            self._yield(answer, rival)
        return rival is None

    def _yield(self, answer: RequestState, ownership: Ownership) -> None:
        if answer.owned:
            log.info("ownership_lost", generation_id=answer.identity, to=ownership.owner)
            self._answers.spawn(self._follow(answer, ownership))

    async def _on_listen(self, message: Listen) -> Listened:
        until = time.monotonic() + LEASE
        held = []
        for identity in message.identities:
            answer = self._answers.get(identity)
            if answer is not None and answer.owned and not answer.ended:
                answer.listened_until = until
                held.append(identity)
        return Listened(held)

    async def _ask(self, owner: str, answers: list[RequestState]) -> None:
        if owner == self._consumer:  # of an earlier life of the same name, or ended and forgotten here
            await self.inherit(answers)
            return
        for begin in range(0, len(answers), ASKED_AT_ONCE):
            await self._ask_some(owner, answers[begin : begin + ASKED_AT_ONCE])

    async def _ask_some(self, owner: str, answers: list[RequestState]) -> None:
        message = Listen(self._consumer, [answer.identity for answer in answers])
        try:
            reply = await self._bus.request(subjects.gateway(owner), message, Listened, timeout=ASK_TIMEOUT)
        except NobodyThere:
            await self.inherit(answers)
            return
        except BrokerUnavailable:
            if self._bus.connected:
                await self._silence(answers)
            return
        held = set(reply.held)
        for answer in answers:
            answer.silent_asks = 0
        await self.inherit([answer for answer in answers if answer.identity not in held])

    async def _silence(self, answers: list[RequestState]) -> None:
        for answer in answers:
            answer.silent_asks += 1
        await self.inherit([answer for answer in answers if answer.silent_asks >= SILENT_ASKS])

    async def inherit(self, answers: list[RequestState]) -> None:
        """The owner of these is lost: they are claimed, unless their log says that they have ended."""
        going = [answer for answer in answers if not answer.ended and not answer.owned]
        if going:
            await asyncio.sleep(SETTLE)
            await asyncio.gather(*(self._read_again(answer) for answer in going))  # one reading for all
            await asyncio.gather(*(self._inherit(answer) for answer in going))

    async def _read_again(self, answer: RequestState) -> None:
        try:
            await self._answers.read_sources(answer, answer.consumers)
        except BrokerUnavailable as error:
            log.info("journal_read_failed", generation_id=answer.identity, error=str(error))

    async def _inherit(self, answer: RequestState) -> None:
        async with self._gate:
            try:
                if not self._lacks_owner(answer):
                    return
                lost = answer.owner
                answer.quiet_since = time.monotonic() + CLAIM_TIME  # not to be dropped meanwhile
                ownership, claim = await self._claims.claim(answer.identity, lost, answer.consumers)
            except BrokerUnavailable as error:  # asked again while it is read
                log.info("ownership_claim_failed", generation_id=answer.identity, error=str(error))
                return
            if ownership.owner != self._consumer:
                await self._follow(answer, ownership)
                return
            if not self._lacks_owner(answer):  # claimed here twice at the same time, or given up meanwhile
                return
            answer.owned, answer.owner, answer.quiet_since = True, self._consumer, time.monotonic()
            answer.consumers = list(ownership.consumers)
            self._metrics.adopted.inc()
            log.info("ownership_claimed", generation_id=answer.identity, of=lost)
            self._answers.on_owned(answer, claim)

    def _lacks_owner(self, answer: RequestState) -> bool:
        at_hand = self._answers.get(answer.identity) is answer
        return at_hand and not answer.ended and not answer.owned

    async def _follow(self, answer: RequestState, ownership: Ownership) -> None:
        """Another gateway looks after it."""
        answer.owned, answer.owner, answer.silent_asks = False, ownership.owner, 0
        answer.consumers = list(ownership.consumers)
        for generation in answer.generations:
            generation.hand_over()
        await self._read_again(answer)
        if answer.readers and not answer.ended:
            self.ask_soon(answer)
