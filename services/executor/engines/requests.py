"""What a group whose engine schedules for itself has taken on: who is handed to the engine next, and what comes back.

      add ──▶ held ──▶ waiting ──submit──▶ submitted ──▶ ended        urgency: lane (recovery, interactive, prefill
      (grammar, adapter)  ▲                    │                      ahead, batch), then arrival
                          └─────give back──────┘

The engine batches as it likes, but has only as many requests as it computes at a time: what waits, waits here, where a
more urgent one goes first. One of the batch lane gives its place up to one that somebody waits for, and goes on later
from the tokens that it has.

    log      position 0        1        2        3             one entry for each delta, whatever the engine sends:
    engine            [ t0 t1 ]        [ t2 ]  [ t3 t4 ✗ ]     what is behind a stop token or `max_tokens` is cut
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from services.executor.core.engine import EngineSpec
from services.executor.engines.base import EngineDelta, EngineFacts, EngineRequest, EngineStep
from services.executor.ipc.board import BoardKind, RingBoard
from services.executor.scheduler import admission
from services.executor.scheduler.admission import Admission, RecentlyEnded
from services.executor.scheduler.batcher import Entries
from services.executor.scheduler.features.catalog import FEATURES
from services.executor.scheduler.sequence import Urgency, finish_reason, makes_way, urgency_of
from services.executor.structured_output import GrammarState
from shared.engine_features import OF_RINGS, refusal_of
from shared.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidGrammar,
    NoGroupAvailable,
    RyzansteinError,
    error_from_code,
)
from shared.messages import EngineTraits, FinishReason, GenerationRequest, GroupLoad, Refusal, TokenEntry


def spec_of(facts: EngineFacts, block_size: int) -> EngineSpec:
    """What requests are admitted by, of an engine whose KV cache is its own."""
    tokens = max(facts.kv_tokens, facts.context_length)
    return EngineSpec(
        block_size=block_size,
        num_blocks=-(-tokens // block_size),
        context_length=facts.context_length,
        vocab_size=facts.vocab_size,
        numerics=facts.numerics,
        kernels=facts.name,
        exact=facts.exact,
        max_adapters=facts.adapters,
        generates="generate" in facts.tasks,
    )


def traits_of_engine(facts: EngineFacts, kind: str = "") -> EngineTraits:
    """What others are told of the engine. `kind`: `EngineTraits.kind`."""
    return EngineTraits(kind, facts.name, [*OF_RINGS, *facts.unsupported])


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One attempt at one generation."""

    request: GenerationRequest
    arrival: int
    accepted_at: float  # seconds of the clock that comes in
    claim: int
    output: list[int] = field(default_factory=list)  # over all attempts
    submission: str = ""  # its id in the engine; empty: it is not there
    submissions: int = 0
    submitted_at: float = 0.0
    first_token_at: float = 0.0
    announced: bool = False  # whether its consumer was told what was found in the cache
    awaits: set[str] = field(default_factory=set)  # "grammar" while that is compiled, "adapter" while that is fetched
    grammar: GrammarState | None = None  # behind the output

    @property
    def urgency(self) -> Urgency:
        return urgency_of(self.request, self.arrival)

    @property
    def is_batch(self) -> bool:
        return makes_way(self.request)

    @property
    def state(self) -> Literal["held", "waiting", "running"]:
        """What it does here; `running`: the engine has it."""
        return "running" if self.submission else "held" if self.awaits else "waiting"

    @property
    def alone(self) -> bool:
        """Whether it may be what killed an engine: nothing is computed beside it."""
        return bool(self.request.suspected)

    def entry(self, tokens: list[int], finish: FinishReason = "") -> TokenEntry:
        """`tokens`: the newest of its output."""
        request = self.request
        return TokenEntry(request.generation_id, request.attempt, len(self.output) - len(tokens), tokens, finish)

    def error_entry(self, error: RyzansteinError, tokens: list[int] | None = None) -> TokenEntry:
        ended = self.entry(tokens or [], "error")
        return msgspec.structs.replace(ended, error_code=error.code, error=error.message, retryable=error.retryable)


class EngineRequests:
    """Decides for one group. No clock, no I/O: time (seconds of any steady clock) comes in."""

    def __init__(
        self,
        facts: EngineFacts,
        spec: EngineSpec,
        *,
        max_waiting: int,
        end_tokens: Iterable[int] = (),
        board: RingBoard | None = None,
    ) -> None:
        """`end_tokens`: of the model; a grammar that is complete ends with one of them. `board`: is told how long the
        stages of requests take."""
        self._facts = facts
        self._traits = traits_of_engine(facts)
        self._spec = spec
        self._max_waiting = max_waiting
        self._end_tokens = list(end_tokens)
        self._board = board
        self._admission = Admission(spec, [feature.checks for feature in FEATURES])
        self._live: dict[str, TrackedRequest] = {}
        self._submitted: dict[str, TrackedRequest] = {}  # by submission
        self._ended = RecentlyEnded()
        self._owed: Entries = {}
        self._aborts: list[str] = []
        self._directories: dict[str, str] = {}  # where the files of adapters are, by digest
        self._adapters: dict[str, None] = {}  # digests of those that requests had last, the newest last
        self._arrivals = 0
        self._kv_used = 0.0
        self._now = 0.0
        self.interactive = 0
        self.step = 0  # the engine's
        self.preemptions = 0
        self.cached_tokens = 0
        self._prompt_tokens = 0  # computed since they were last asked for

    # --- requests --------------------------------------------------------------------------------

    def knows(self, request: GenerationRequest) -> bool:
        """Whether `add` would ignore it: this attempt, or a later one, was taken on before."""
        known = self._live.get(request.generation_id)
        attempt = known.request.attempt if known else self._ended.attempt(request.generation_id)
        return request.attempt <= attempt

    def add(self, request: GenerationRequest, now: float = 0.0) -> Refusal | None:
        """As `Scheduler.add`: a repeat is accepted and ignored, a newer attempt takes the older one's place."""
        if self.knows(request):
            return None
        if (older := self._live.get(request.generation_id)) is not None:
            self._end(older, None)
        error = refusal_of(request, self._traits) or self._admission.malformed(request)
        if error is not None:
            return admission.refusal(request, error)
        if (entry := admission.finished_before(request, self._spec)) is not None:
            self._owe(request.consumer, entry)
            self._ended.add(request)
            return None
        error = admission.too_long(request, self._spec) or self._queue_full(request)
        if error is not None:
            return admission.refusal(request, error)
        self._arrivals += 1
        tracked = TrackedRequest(request, self._arrivals, now, request.claim, list(request.generated))
        if request.grammar is not None:
            tracked.awaits.add("grammar")
        if request.adapter and request.adapter not in self._directories:
            tracked.awaits.add("adapter")
        self._live[request.generation_id] = tracked
        self.interactive += not tracked.is_batch
        return None

    def release(self, request: GenerationRequest, grammar: GrammarState | RyzansteinError) -> None:
        """The grammar of `request`, as it was added, has been compiled, or cannot be."""
        tracked = self._live.get(request.generation_id)
        if tracked is None or tracked.request is not request or "grammar" not in tracked.awaits:
            return
        if isinstance(grammar, RyzansteinError):
            self._end(tracked, tracked.error_entry(grammar))
        elif grammar.complete:  # an earlier attempt was lost before it said so
            self._end(tracked, tracked.entry([], "stop"))
        else:
            tracked.grammar = grammar
            tracked.awaits.discard("grammar")

    def adapter_ready(self, digest: str, directory: str) -> None:
        """As `Scheduler.adapter_ready`."""
        self._directories[digest] = directory
        for tracked in self._awaiting_adapter(digest):
            tracked.awaits.discard("adapter")

    def adapter_failed(self, digest: str, error: RyzansteinError) -> None:
        """As `Scheduler.adapter_failed`."""
        for tracked in self._awaiting_adapter(digest):
            self._end(tracked, tracked.error_entry(error))

    def adapter_gone(self, digest: str) -> None:
        """As `Scheduler.adapter_gone`."""
        self._directories.pop(digest, None)

    @property
    def adapters_in_use(self) -> set[str]:
        """Digests of adapters whose files some request needs."""
        return {one.request.adapter for one in self._live.values()}

    @property
    def adapters(self) -> list[str]:
        """Digests of the adapters that the engine has in memory, as far as requests show it."""
        return list(self._adapters)

    def _awaiting_adapter(self, digest: str) -> list[TrackedRequest]:
        return [one for one in self._live.values() if "adapter" in one.awaits and one.request.adapter == digest]

    def claim(self, generation_ids: Iterable[str], claim: int) -> None:
        """As `Scheduler.claim`."""
        for generation_id in generation_ids:
            if (tracked := self._live.get(generation_id)) is not None:
                tracked.claim = max(tracked.claim, claim)

    def cancel(self, generation_ids: Iterable[str], attempt: int = -1, claim: int = -1) -> None:
        """As `Scheduler.cancel`."""
        for generation_id in generation_ids:
            tracked = self._live.get(generation_id)
            if tracked is None or -1 < attempt < tracked.request.attempt or -1 < claim < tracked.claim:
                continue
            if attempt < 0:
                self._end(tracked, tracked.entry([], "cancelled"))
            else:
                error = NoGroupAvailable("The request was withdrawn from this group; another one takes it.")
                self._end(tracked, tracked.error_entry(error))

    def expire(self, now: float) -> bool:
        """As `Scheduler.expire`; `now` in unix seconds."""
        late = [
            one
            for one in self._live.values()
            if not one.submission and len(one.output) == len(one.request.generated) and 0 < one.request.deadline <= now
        ]
        for tracked in late:
            error = DeadlineExceeded("No room for the request before its deadline; try again later.")
            self._end(tracked, msgspec.structs.replace(tracked.error_entry(error), retryable=False))
        return bool(late)

    def fail_all(self, error: RyzansteinError) -> Entries:
        """Ends everything with `error`: the engine is lost, or the group leaves."""
        for tracked in list(self._live.values()):
            self._end(tracked, tracked.error_entry(error))
        return self.take_entries()

    def look(self) -> list[TrackedRequest]:
        """All that are here, in the order in which they came."""
        return list(self._live.values())

    # --- to the engine ---------------------------------------------------------------------------

    def take_submissions(self, now: float) -> list[EngineRequest]:
        """What the engine is to compute from now on; each is given out once."""
        self._now = now
        room = self._facts.places - len(self._submitted) + sum(one.is_batch for one in self._submitted.values())
        waiting = (one for one in self._live.values() if not one.submission and not one.awaits)
        taken = []
        for tracked in heapq.nsmallest(room, waiting, key=lambda one: one.urgency):
            if not self._makes_room(tracked):
                break
            taken.append(self._submit(tracked))
        return taken

    def take_aborts(self) -> list[str]:
        """Submissions that nobody wants any more; each is given out once."""
        aborts, self._aborts = self._aborts, []
        return aborts

    def _makes_room(self, tracked: TrackedRequest) -> bool:
        """Whether the engine may have it now; one of the batch lane gives up its place for it."""
        running = self._submitted.values()
        if any(one.alone for one in running) or (tracked.alone and running):
            return False
        if len(running) < self._facts.places:
            return True
        if tracked.is_batch:
            return False
        victims = [one for one in running if one.is_batch]
        if not victims:
            return False
        self._withdraw(max(victims, key=lambda one: one.urgency))
        self.preemptions += 1
        return True

    def _submit(self, tracked: TrackedRequest) -> EngineRequest:
        request = tracked.request
        tracked.submissions += 1
        tracked.submission = f"{request.generation_id}/{request.attempt}/{tracked.submissions}"
        self._submitted[tracked.submission] = tracked
        if not tracked.submitted_at:
            tracked.submitted_at = self._now
            self._observe(BoardKind.QUEUE, self._now - tracked.accepted_at)
            if self._board is not None:
                self._board.count_queried(len(request.prompt))
        stops = request.stop_token_ids
        if request.grammar is not None:  # it must be able to end
            stops = sorted({*stops, *self._end_tokens})
        left = min(request.max_tokens, self._spec.context_length - len(request.prompt)) - len(tracked.output)
        return EngineRequest(
            id=tracked.submission,
            tokens=[*request.prompt, *tracked.output],
            prompt_tokens=len(request.prompt),
            max_tokens=max(0, left),
            sampling=request.sampling,
            stop_token_ids=stops,
            runs_on=not set(self._end_tokens) <= set(stops),
            grammar=request.grammar,
            prompt_logprobs=-1 if tracked.output else request.prompt_logprobs,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            adapter_directory=self._directory_of(request.adapter),
            pool="embed" if request.embed else "classify" if request.classify else "",
            normalized=self._spec.normalized,
            second_segment=request.second_segment,
        )

    def _directory_of(self, adapter: str) -> str:
        if not adapter:
            return ""
        self._adapters.pop(adapter, None)
        self._adapters[adapter] = None
        if len(self._adapters) > self._facts.adapters:
            del self._adapters[next(iter(self._adapters))]
        return self._directories[adapter]

    def _withdraw(self, tracked: TrackedRequest) -> None:
        """The engine has it no more."""
        del self._submitted[tracked.submission]
        self._aborts.append(tracked.submission)
        tracked.submission = ""

    # --- from the engine -------------------------------------------------------------------------

    def update(self, step: EngineStep, now: float) -> Entries:
        """Takes what the engine has told. Returns all entries owed."""
        self._now = now
        self.step = max(self.step, step.steps)
        self._kv_used = step.kv_used
        for delta in step.deltas:
            tracked = self._submitted.get(delta.id)
            if tracked is not None:  # else it was aborted meanwhile
                self._take(tracked, delta)
        return self.take_entries()

    def _take(self, tracked: TrackedRequest, delta: EngineDelta) -> None:
        if problem := self._problem_with(tracked, delta):
            self._end(tracked, tracked.error_entry(InternalError(f"{self._facts.name} answered {problem}.")))
            return
        tokens, finish = self._cut(tracked, delta)
        if (tokens or delta.vector) and not tracked.first_token_at:
            tracked.first_token_at = self._now
            self._observe(BoardKind.PREFILL, self._now - tracked.submitted_at)
            self._prompt_tokens += len(tracked.request.prompt) + len(tracked.output) - delta.cached_tokens
        tracked.output += tokens
        error = error_from_code(delta.code or InternalError.code, delta.error) if delta.finish == "error" else None
        if tracked.grammar is not None and self._breaks_off(tracked, tracked.grammar, tokens, finish):
            reason = f"{self._facts.name} ended the answer in the middle of its format; its log may say why."
            error = InvalidGrammar(reason)
        if error is not None:
            self._end(tracked, tracked.error_entry(error, tokens))
            return
        if not (tokens or finish or delta.prompt_scores):
            return
        entry = self._entry(tracked, delta, tokens, finish)
        if finish:
            if tracked.first_token_at:
                self._observe(BoardKind.DECODE, self._now - tracked.first_token_at)
            self._end(tracked, entry, aborts=not delta.finish)
        else:
            self._owe(tracked.request.consumer, entry)

    def _problem_with(self, tracked: TrackedRequest, delta: EngineDelta) -> str:
        """What no answer to the request can have; empty: nothing."""
        vocabulary = self._spec.vocab_size
        for token in delta.tokens:
            if not 0 <= token < vocabulary:
                return f"with the token {token}, which the model of {vocabulary} tokens does not have"
        if tracked.request.sampling.logprobs >= 0 and len(delta.logprobs or ()) != len(delta.tokens):
            return f"with {len(delta.logprobs or ())} log probabilities for {len(delta.tokens)} tokens"
        numbers = self._spec.embedding_size if tracked.request.embed else len(self._spec.labels)
        if tracked.request.pools and delta.finish == "stop" and len(delta.vector) != 4 * numbers:
            return f"with {len(delta.vector) // 4} numbers, where the model gives {numbers}"
        return ""

    def _cut(self, tracked: TrackedRequest, delta: EngineDelta) -> tuple[list[int], FinishReason]:
        """The tokens up to the answer's end, and why it ends; empty while it goes on."""
        request, count = tracked.request, len(tracked.output)
        if request.pools:
            return [], "stop" if delta.finish == "stop" else ""
        if not request.max_tokens:  # only the prompt was asked about
            return [], "length" if delta.finish or delta.prompt_scores else ""
        for at, token in enumerate(delta.tokens, 1):
            finish = finish_reason(request, request.stop_token_ids, count + at, token, self._spec.context_length)
            if finish:
                return delta.tokens[:at], finish
        if delta.finish == "stop" and request.grammar is not None and delta.tokens[-1:]:
            # Ended by a token of the model's that the request does not name: it is not part of the answer.
            return delta.tokens[: -1 if delta.tokens[-1] in self._end_tokens else None], "stop"
        return delta.tokens, "" if delta.finish == "error" else delta.finish

    def _breaks_off(
        self, tracked: TrackedRequest, grammar: GrammarState, tokens: list[int], finish: FinishReason
    ) -> bool:
        """Follows the newest `tokens`: whether the model has ended a text there that does not match. So it ends where
        nothing can follow, at a server that has no other way to tell."""
        last = tokens[-1] if tokens else None
        ended = last in self._end_tokens
        if text := tokens[:-1] if ended else tokens:
            grammar.advance(*text)
        stops = tracked.request.stop_token_ids
        hidden = last not in stops and set(stops) <= set(self._end_tokens)  # the end that servers leave out
        return finish == "stop" and (ended or hidden) and not grammar.may_end()

    def _entry(
        self, tracked: TrackedRequest, delta: EngineDelta, tokens: list[int], finish: FinishReason
    ) -> TokenEntry:
        entry = tracked.entry(tokens, finish)
        cached = 0 if tracked.announced else delta.cached_tokens
        if tokens or finish:
            tracked.announced = True
        self.cached_tokens += cached
        if tracked.request.pools:
            return msgspec.structs.replace(entry, cached_tokens=cached, vector=delta.vector)
        if tracked.request.sampling.logprobs < 0 and not cached and not delta.prompt_scores:
            return entry  # nearly always
        logprobs = delta.logprobs[: len(tokens)] if delta.logprobs and tokens else None
        return msgspec.structs.replace(
            entry, logprobs=logprobs, cached_tokens=cached, prompt_scores=delta.prompt_scores
        )

    def take_prompt_tokens(self) -> int:
        """Tokens of prompts that were computed since this was last called, as far as first tokens show it."""
        computed, self._prompt_tokens = self._prompt_tokens, 0
        return computed

    def take_entries(self) -> Entries:
        """Entries that are owed; each is given out once."""
        entries, self._owed = self._owed, {}
        return entries

    # --- what others see -------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._owed)

    @property
    def busy(self) -> bool:
        """Whether the engine has something to compute."""
        return bool(self._submitted)

    @property
    def places(self) -> int:
        return self._facts.places

    @property
    def under_way(self) -> list[GenerationRequest]:
        """What the engine has."""
        return [one.request for one in self._submitted.values()]

    def load(self) -> GroupLoad:
        waiting = [one for one in self._live.values() if not one.submission]
        fresh = [one for one in self._submitted.values() if not one.first_token_at]
        total = self._spec.full_blocks
        used = self._kv_used if self._submitted else 0.0  # of what was aborted last, no step may tell that it is gone
        return GroupLoad(
            running=len(self._submitted),
            waiting=len(waiting),
            waiting_tokens=sum(len(one.request.prompt) + len(one.output) for one in (*waiting, *fresh)),
            free_blocks=round(total * (1 - min(1.0, max(0.0, used)))),
            total_blocks=total,
        )

    # --- inside ----------------------------------------------------------------------------------

    def _queue_full(self, request: GenerationRequest) -> RyzansteinError | None:
        """As a ring's: preemptible requests never block others."""
        waiting = [one for one in self._live.values() if not one.submission]
        if not makes_way(request):
            waiting = [one for one in waiting if not one.is_batch]
        return admission.queue_full(len(waiting)) if len(waiting) >= self._max_waiting else None

    def _end(self, tracked: TrackedRequest, entry: TokenEntry | None, *, aborts: bool = True) -> None:
        """Takes it out of everything; without `entry` nobody is told. `aborts`: the engine does not know it yet."""
        if tracked.submission:
            self._withdraw(tracked)
            if not aborts:
                self._aborts.pop()
        del self._live[tracked.request.generation_id]
        self.interactive -= not tracked.is_batch
        self._ended.add(tracked.request)
        if entry is not None:
            self._owe(tracked.request.consumer, entry)

    def _owe(self, consumer: str, entry: TokenEntry) -> None:
        self._owed.setdefault(consumer, []).append(entry)

    def _observe(self, kind: BoardKind, seconds: float) -> None:
        if self._board is not None:
            self._board.observe(kind, max(0.0, seconds))
