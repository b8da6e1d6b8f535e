"""Prefill ahead: a conversation's KV blocks are computed, or brought back, before its next request comes.

    POST /v1/sessions/{id}/prefill     a generation as any other: limited, counted, pinned to the session's group;
                                       behind all other interactive ones, before batches (`GenerationRequest.prefill`)
    prompt                             what every next turn of the user begins with, whatever is said in it
    output                             the one token that a generation has at least, shown to nobody

One is under way for each session at a gateway: the same again joins it, another one takes its place. What a client does
not wait for goes on; what it no longer wants it cancels. A request of the session itself needs nothing of this: it is
more urgent, and shares the blocks that are computed by then.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from services.gateway.core.errors import InvalidParameter
from services.gateway.intake.prompts.chat import rendered
from services.gateway.intake.schemas import ChatCompletionRequest, Message
from services.gateway.streams.stream_reader import StreamReader
from services.gateway.tokenizer.tokenizer import Tokenizer
from shared import limits
from shared.errors import QueueFull, RyzansteinError
from shared.messages import GenerationRequest, ModelCard
from shared.messages.records import GenerationRecord
from shared.tasks import TaskSet

LEAST_URGENT = 2**31 - 1  # `GenerationRequest.priority`: behind all others of its tenant
# Fields of a chat that no prompt depends on, or that ask for another prompt than that of the next turn.
_OF_THE_ANSWER = (
    *("stream", "stream_options", "max_completion_tokens", "min_tokens", "n", "stop", "stop_token_ids"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "logit_bias", "allowed_token_ids", "bad_words", "seed"),
    *("prediction", "response_format", "structured_outputs", "store", "metadata", "return_token_ids"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "return_tokens_as_token_ids"),
    *("continue_final_message", "truncate_prompt_tokens", "truncation_side"),
)
_BEFORE_USER = ("assistant", "system", "developer")  # roles behind whose messages the user speaks
# Two beginnings of what the user may say next: their prompts have in common what all have.
_WORDS = ("a", "1")


class Prefilled(msgspec.Struct, frozen=True, kw_only=True):
    """How far a session's prompt is."""

    # Of the generation that computes it, as of any other: DELETE /v1/generations/{id} ends it at any gateway.
    id: str
    object: Literal["session.prefill"] = "session.prefill"
    session: str
    model: str
    # `cancelled`: another one of the session has taken its place, or it was deleted.
    status: Literal["in_progress", "completed", "cancelled"]
    prompt_tokens: int
    # Of these, tokens whose KV blocks were there, or were brought back; null while it is not completed.
    cached_tokens: int | None = None
    computed_tokens: int | None = None


def without_answer(request: ChatCompletionRequest) -> ChatCompletionRequest:
    """`request` with nothing left that concerns its answer alone."""
    changes: dict[str, None] = dict.fromkeys(_OF_THE_ANSWER)
    for choice in ("tool_choice", "function_call"):
        if getattr(request, choice) != "none":  # which hides the tools from the model
            changes[choice] = None
    return msgspec.structs.replace(request, **changes, max_tokens=1, add_generation_prompt=False)


async def next_prompt(request: ChatCompletionRequest, card: ModelCard, tokenizer: Tokenizer, most: int) -> list[int]:
    """The tokens with which the prompt begins that the conversation will have with the user's next message. `most`: as
    the limit of `rendered`. Raises `InvalidParameter`, `ContextLengthExceeded`, `QueueFull`."""
    planned = await rendered(request, card, tokenizer, most)
    last = request.messages[-1]
    if last.role in _BEFORE_USER and not last.tool_calls and not last.function_call:
        prompts = []
        try:
            for word in _WORDS:
                messages = [*request.messages, Message(role="user", content=word)]
                spoken = msgspec.structs.replace(request, messages=messages)
                prompts.append(await tokenizer.encode_rendered((await rendered(spoken, card, tokenizer)).prompt))
        except InvalidParameter:  # its template takes no such turn
            prompts = []
        if prompts and (same := _common(*prompts)):
            return same
    return await tokenizer.encode_rendered(planned.prompt)


def _common(one: Sequence[int], other: Sequence[int]) -> list[int]:
    for at, (here, there) in enumerate(zip(one, other, strict=False)):
        if here != there:
            return list(one[:at])
    return list(one if len(one) < len(other) else other)


def ahead(record: GenerationRecord) -> GenerationRecord:
    """`record`, of which the prompt is to be in the cache and nothing is to be said."""
    requests = [msgspec.structs.replace(request, prefill=True, priority=LEAST_URGENT) for request in record.requests]
    return msgspec.structs.replace(record, requests=requests)


class Prefill:
    """One that is under way, or has ended."""

    def __init__(self, run: StreamReader, session: str) -> None:
        self.run = run
        self.session = session
        self.cancelled = False
        self.error: RyzansteinError | None = None
        self.ended = asyncio.Event()
        self._cached: int | None = None

    @property
    def request(self) -> GenerationRequest:
        return self.run.answer.generations[0].request

    def computes(self, other: GenerationRequest) -> bool:
        """Whether what `other` wants in the cache is what this one has computed in the end."""
        fields = ("model", "session", "cache_salt", "sparse", "prompt")
        return all(getattr(self.request, name) == getattr(other, name) for name in fields)

    async def read(self) -> None:
        """To its end."""
        try:
            usage = msgspec.json.decode(await self.run.collect())["usage"]
            self._cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))
        except RyzansteinError as error:
            self.error = error
        finally:
            self.run.close()

    def cancel(self) -> None:
        self.cancelled = True
        self.run.cancel()

    def result(self) -> Prefilled:
        """Raises what has ended it, if that was no cancellation."""
        if self.error is not None and not self.cancelled:
            raise self.error
        tokens, cached = len(self.request.prompt), self._cached
        ended = "cancelled" if self.cancelled else "in_progress"
        return Prefilled(
            id=self.run.answer.public_id,
            session=self.session,
            model=self.run.answer.record.model_shown,
            status="completed" if cached is not None else ended,  # type: ignore[arg-type]
            prompt_tokens=tokens,
            cached_tokens=cached,
            computed_tokens=None if cached is None else tokens - cached,
        )


class Prefills:
    """Those of one gateway, by tenant and session."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, str], Prefill] = {}
        self._of_tenant: Counter[str] = Counter()
        self._tasks = TaskSet("prefill_failed")

    async def begin(self, run: StreamReader, session: str) -> Prefill:
        """Hands in `run`, or leaves it where the session has the same under way. Raises as `StreamReader.begin`, and
        `QueueFull` where the tenant has too many."""
        tenant = run.answer.record.tenant
        asked = Prefill(run, session)
        known = self._under_way.get((tenant, session))
        if known is not None:
            if known.computes(asked.request) and not known.cancelled:
                return known
            self.cancel(tenant, session)
        if self._of_tenant[tenant] >= limits.PREFILLS.value:
            raise QueueFull(
                f"This gateway prepares {limits.PREFILLS.value} sessions of yours already; wait for one of them, or "
                f"DELETE it ({limits.PREFILLS.cited()})."
            )
        self._under_way[tenant, session] = asked
        self._of_tenant[tenant] += 1
        try:
            await run.begin()
        except BaseException as error:
            asked.error = error if isinstance(error, RyzansteinError) else None
            asked.cancelled = asked.error is None
            self._forget(tenant, asked)
            run.close()
            raise
        self._tasks.spawn(self._read(tenant, asked))
        return asked

    async def wait(self, prefill: Prefill, seconds: float) -> Prefilled:
        """How far it is when it has ended, or in `seconds`. Raises what has ended it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(prefill.ended.wait(), seconds)
        return prefill.result()

    def cancel(self, tenant: str, session: str) -> bool:
        """Whether there was one under way."""
        prefill = self._under_way.get((tenant, session))
        if prefill is None or prefill.cancelled:
            return False
        prefill.cancel()
        return True

    async def _read(self, tenant: str, prefill: Prefill) -> None:
        try:
            await prefill.read()
        finally:
            self._forget(tenant, prefill)

    def _forget(self, tenant: str, prefill: Prefill) -> None:
        prefill.ended.set()
        self._of_tenant[tenant] -= 1
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]
        if self._under_way.get((tenant, prefill.session)) is prefill:
            del self._under_way[tenant, prefill.session]
