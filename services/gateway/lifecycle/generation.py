"""The life of one generation, decided without I/O: entries, losses and time in, decisions out.

received ──▶ queued ──▶ dispatched ──▶ running ──▶ finished | failed | cancelled
               ▲            │             │
               └── recovering ◀───────────┘         attempt + 1, prompt plus the tokens so far

A generation that another gateway looks after is *followed*: its log is read here all the same, newer
attempts are taken as they come, and nothing is decided about it until it is taken over.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Literal

import msgspec

from services.gateway.lifecycle.token_stream import GenerationLimits, StreamDecision, TokenStream
from services.gateway.tracing.generations import AnswerTrace
from shared.errors import FatalRequest, NoGroupAvailable, RingLost, RyzansteinError, Unavailable, error_from_code
from shared.messages import FinishReason, GenerationRequest, RingDeath, TokenEntry, TokenLogprobs
from shared.nats.journal import CLOCK_MARGIN, StartPosition

State = Literal["received", "queued", "dispatched", "running", "recovering", "finished", "failed", "cancelled"]
ENDED = frozenset[State](("finished", "failed", "cancelled"))
Deliver = Callable[[int, TokenEntry | RyzansteinError], None]

SLICE = 256  # tokens of one entry when a reader is given what there is already
# Replays that may leave a gap open: the journal is written a moment after the live message.
MAX_GAP_REPLAYS = 5
# Drained groups that cost a generation no attempt: a rolling update may drain each group that it comes to, one by one.
# More are counted as losses, so that groups which only hand back come to an end.
MOST_HAND_BACKS = 100


@dataclass(slots=True, eq=False)
class Generation:
    """One choice of a client's request. Times are seconds of a monotonic clock, `started_at` is unix time."""

    request: GenerationRequest
    index: int
    limits: GenerationLimits
    _: KW_ONLY
    now: InitVar[float]
    age: InitVar[float] = 0.0  # seconds since its attempt was handed in
    started_at: float
    followed: bool = False
    trace: AnswerTrace | None = None  # what is traced of it; None: nothing. Decides nothing
    begin: StartPosition = field(default_factory=StartPosition)  # where its log begins in the journal
    # Where the log begins on this gateway's token subject; None: none of it is there.
    own_begin: StartPosition | None = None
    claim: int = 0  # under which this gateway owns it; 0: it began here
    state: State = "received"
    stream: TokenStream = field(default_factory=TokenStream)
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenLogprobs] | None = None  # log probabilities of `tokens`, where they were asked for
    finish: FinishReason = ""
    vector: bytes = b""  # of a request to embed
    prompt_scores: bytes = b""  # log probabilities of the prompt's tokens, where they were asked for
    error: RyzansteinError | None = None
    sources: tuple[str, ...] = ()  # other gateways whose token subjects have a part of the log
    cached_tokens: int = 0
    # Tokens of its prompt that its ring has computed, as was told last; 0: nothing was told.
    computed: int = 0
    group: str = ""  # the ring whose entry of the current attempt came first; empty while none has come
    epoch: int = 0
    fingerprint: str = ""  # of the ring that has the newest attempt of which it is known; empty: of none
    heard_at: float = 0.0  # when that ring last sent something new
    intake_sequence: int = 0  # where the request stands in the intake stream
    attempt_at: float = 0.0  # when the current attempt was handed in
    last_progress: float = 0.0
    ends_at: float = float("inf")  # by when it has to be over
    # The cause of a ring's death that this may have made; it is computed alone from then on. Empty: of none.
    suspected: str = ""
    guilty: str = ""  # the cause of the death of a ring that computed nothing else
    handed_back: int = 0  # attempts that their group gave back, as it was drained: nothing was lost with them
    _told: tuple[str, int] = ("", 0)  # the ring that was told of the claim
    _readers: list[Deliver] = field(default_factory=list)
    # Whether `finish` came behind the last tokens: with them it says more of the last one.
    _end_came_alone: bool = False
    _stall: float = 0.0
    _gap_replays: int = 0
    _behind: bool = False  # whether a newer attempt speaks already, and tokens of the older one are missing
    _rejected: frozenset[tuple[str, int, int]] = frozenset()

    def __post_init__(self, now: float, age: float) -> None:
        self.claim, self.suspected = self.request.claim, self.request.suspected
        self.heard_at, self.last_progress, self.attempt_at = now, now, now - age
        self._stall = self.limits.stall
        if self.limits.whole and self.request.lane != "batch":
            self.ends_at = now - age + self.limits.whole
        if self.request.sampling.logprobs >= 0:
            self.scores = []
        if self.followed:
            self.state = "queued"
        else:
            self.begin = self.own_begin = StartPosition(since=self.started_at - CLOCK_MARGIN)

    @property
    def id(self) -> str:
        return self.request.generation_id

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def unheard(self) -> bool:
        """Whether it has been handed in and no ring has said that it has it."""
        return self.state == "queued" and not self.group and not self.followed

    @property
    def may_be_queued(self) -> bool:
        """Whether it is batch work whose first attempt no ring has spoken of: that may wait for long."""
        first = self.request.lane == "batch" and not self.stream.attempt
        return first and self.unheard and not self.stream.ended and not self._behind

    def end_trace(self) -> None:
        """It is over, or another gateway's. A stop string ends the text, and then the generation is told that nobody
        wants more of it."""
        if self.trace is None:
            return
        cancelled, error = self.state == "cancelled", self.error
        reason = "stop" if cancelled and error is None and self.tokens else self.finish or self.state
        failed = "" if error is None or cancelled else error.code
        self.trace.ended(self.request.prompt, len(self.tokens), self.cached_tokens, reason, failed)

    # --- readers ---------------------------------------------------------------------------------

    def attach(self, deliver: Deliver) -> None:
        """`deliver` gets the whole log: what there is at once, and the rest as it comes."""
        tokens, finish = self.tokens, "" if self._end_came_alone else self.finish
        for begin in range(0, len(tokens), SLICE):
            end = begin + SLICE
            last = finish if end >= len(tokens) else ""
            scores = None if self.scores is None else self.scores[begin:end]
            told = b"" if begin else self.prompt_scores
            part = TokenEntry(self.id, self.stream.attempt, begin, tokens[begin:end], last, scores, prompt_scores=told)
            deliver(self.index, part)
        if self._end_came_alone:
            last_word = TokenEntry(
                self.id,
                self.stream.attempt,
                len(tokens),
                [],
                self.finish,
                vector=self.vector,
                prompt_scores=b"" if tokens else self.prompt_scores,
            )
            deliver(self.index, last_word)
        if self.error is not None:
            deliver(self.index, self.error)
        if not self.ended:
            self._readers.append(deliver)
            if self.computing:
                deliver(self.index, self._progress())

    def detach(self, deliver: Deliver) -> None:
        """Undoes `attach`."""
        if deliver in self._readers:
            self._readers.remove(deliver)

    @property
    def computing(self) -> bool:
        """Whether its prompt is being computed, for so long that it was told how far that is."""
        return self.computed > 0 and not self.tokens and not self.ended

    def _progress(self) -> TokenEntry:
        """What readers are given of it: an entry without tokens."""
        return TokenEntry(self.id, self.stream.attempt, 0, [], computed=self.computed)

    def _deliver(self, news: TokenEntry | RyzansteinError) -> None:
        for deliver in self._readers:
            deliver(self.index, news)

    # --- what happens to it ----------------------------------------------------------------------

    def begins_behind(self, number: int) -> None:
        """Its log stands behind `number` of the journal: it is about to be handed in, or the journal's last messages
        are lost and others take their numbers."""
        if self.begin.behind < 0 or number < self.begin.behind:
            self.begin = self.begin._replace(behind=number)
        if self.own_begin is not None and (self.own_begin.behind < 0 or number < self.own_begin.behind):
            self.own_begin = self.own_begin._replace(behind=number)

    def queued(self, sequence: int) -> None:
        """The intake stream has stored the current attempt's request as number `sequence`."""
        self.intake_sequence = sequence
        if self.state in ("received", "recovering"):
            self.state = "queued"

    def on_entry(self, group: str, epoch: int, entry: TokenEntry, now: float) -> StreamDecision:
        """An entry of this generation has come, live or from the journal.

        An attempt can reach two rings (a reply or an acknowledgement that was lost). Their tokens need not
        be the same, so the ring whose entry comes first has the attempt, and the other's change nothing: the owner
        tells it to end. Entries may come to a follower in another order, which then hears that end from the ring
        that it listens to, and goes over to the other one.
        """
        if self.state in ENDED or (self.followed and (group, epoch, entry.attempt) in self._rejected):
            return StreamDecision.NOTHING
        if self.followed and entry.attempt > self.stream.attempt and not self._follow_attempt(entry):
            return StreamDecision.REPLAY
        stream = self.stream
        if entry.attempt != stream.attempt or (self.group and (epoch != self.epoch or group != self.group)):
            return self._on_foreign(group, epoch, entry)
        if not self.group or entry.fingerprint or entry.cached_tokens or entry.computed:
            self._seen_in(group, epoch, entry, now)
        had_gap = bool(stream.ahead)
        for fresh in stream.accept(entry):
            self.last_progress, self.heard_at, self._stall = now, now, self.limits.stall
            if fresh.tokens or fresh.finish in ("stop", "length"):
                self.state = "running"
                self.tokens += fresh.tokens
                self.prompt_scores = fresh.prompt_scores or self.prompt_scores
                if self.scores is not None:
                    self.scores += fresh.logprobs or ()
                self._deliver(fresh)
            if fresh.finish:
                return self._on_finish(group, fresh)
        if stream.ahead:
            return StreamDecision.NOTHING if had_gap else StreamDecision.REPLAY
        self._gap_replays = 0
        return StreamDecision.NOTHING

    def _on_progress(self, entry: TokenEntry, now: float) -> None:
        """Its ring computes its prompt: it is at work, though there is no token. What it computes again, having given
        up its blocks, is not told again."""
        self.last_progress = self.heard_at = now
        if entry.computed <= self.computed:
            return
        self.computed = min(entry.computed, len(self.request.prompt))
        if self.computing:
            self._deliver(self._progress())

    def on_group_lost(self, group: str, epoch: int, death: RingDeath | None = None) -> StreamDecision:
        """The ring's life `epoch` of `group`, and all before it, are over. `death`: what `epoch` has died of; None: it
        was only seen that it is gone.

        Whoever was being computed when a ring died of its work is suspected, and computed alone from then on. So
        nobody meets with such a death in company twice, and alone it can only be of its own making.
        """
        if self.ended or self.group != group or self.epoch > epoch:
            return StreamDecision.NOTHING
        if death is not None and self.epoch == death.epoch and death.may_be_of(self.id):
            if not self.suspected:
                self.suspected = death.cause
            elif death.suspects_only(self.id):
                self.guilty = death.cause
        return StreamDecision.RECOVER

    def on_replayed(self, now: float, *, idle: bool) -> StreamDecision:
        """The journal has been read to its newest frame.

        `idle`: the ring has had no work at all since it was last heard here. Then an end was lost on the way
        into the journal, which leaves no gap to see.
        """
        if self.ended:
            return StreamDecision.NOTHING
        if self.followed and self._complete():
            return StreamDecision.ENDED
        if self.stream.ahead or self._behind:
            self._gap_replays += 1
            return StreamDecision.RECOVER if self._gap_replays > MAX_GAP_REPLAYS else StreamDecision.REPLAY
        if idle and self.group:
            return StreamDecision.RECOVER
        if self._stalled(now):
            self._stall *= 2
        return StreamDecision.NOTHING

    def on_time(self, now: float) -> StreamDecision:
        """To be asked now and then. A request that waits in the queue has nothing in the journal."""
        if self.ended:
            return StreamDecision.NOTHING
        if now - self.last_progress >= self.limits.token_timeout or self.overdue(now):
            return StreamDecision.EXPIRE
        return StreamDecision.REPLAY if self._stalled(now) else StreamDecision.NOTHING

    def overdue(self, now: float) -> bool:
        """Whether it has taken longer than it may; its owner decides."""
        return now >= self.ends_at and not self.followed

    # --- what is done to it ----------------------------------------------------------------------

    def next_attempt(self, now: float, deadline: float) -> GenerationRequest | None:
        """The request to hand in again, or None when it has ended instead. `deadline` is unix time."""
        if self._complete():
            return None
        attempt = self.stream.attempt + 1
        losses = attempt - self.handed_back
        if self.guilty:
            self.fail(_guilty_of(self.suspected, self.guilty))
            return None
        if losses > self.limits.max_attempts:
            self.fail(
                RingLost(
                    f"The executor group was lost {losses} times while it worked on this request; try again later.",
                    retry_after=5,
                )
            )
            return None
        self.stream.restart(attempt)
        self.state = "recovering"
        self.group, self.epoch, self.computed = "", 0, 0
        self.last_progress = self.heard_at = self.attempt_at = now
        self._stall, self._gap_replays = self.limits.stall, 0
        self.request = msgspec.structs.replace(
            self.request,
            generated=list(self.tokens),
            attempt=attempt,
            lane="recovery",
            deadline=deadline,
            claim=self.claim,
            suspected=self.suspected,
        )
        return self.request

    def fail(self, error: RyzansteinError) -> None:
        if not self.ended:
            self.state, self.error = "failed", error
            self._deliver(error)

    def cancel(self, error: RyzansteinError | None = None) -> None:
        """Ends it because nobody wants more of it; readers that there are all the same get `error`."""
        if not self.ended:
            self.state, self.error = "cancelled", error
            if error is not None:
                self._deliver(error)

    def dismiss(self, error: RyzansteinError) -> None:
        """Its readers get `error`; the generation goes on."""
        self._deliver(error)

    def ring_learns_claim(self) -> bool:
        """Whether its ring has the attempt from an earlier owner and has to hear of this one; once for each ring."""
        ring = self.group, self.epoch
        if self.followed or not self.group or self.claim <= self.request.claim or self._told == ring:
            return False
        self._told = ring
        return True

    def take_over(self, consumer: str, claim: int, now: float, begin: StartPosition) -> StreamDecision:
        """From now on this gateway, which reads as `consumer`, looks after it under `claim`: what was left undone
        is decided. Whatever comes to its own subject stands in the journal from `begin` on.

        A request of which no ring has spoken may never have reached the queue; handed in once more it is
        another attempt, and the older one is rejected where it does appear.
        """
        if not self.followed:
            return StreamDecision.NOTHING
        self.followed, self.claim = False, claim
        self.own_begin = self.own_begin or begin
        self.request = msgspec.structs.replace(self.request, consumer=consumer)
        self.last_progress = self.heard_at = now
        if self.ended:
            return StreamDecision.NOTHING
        return StreamDecision.RECOVER if self.stream.ended or self._behind or self.unheard else StreamDecision.NOTHING

    def hand_over(self) -> None:
        """Another gateway looks after it now."""
        self.followed = True

    # --- inside ----------------------------------------------------------------------------------

    def _on_foreign(self, group: str, epoch: int, entry: TokenEntry) -> StreamDecision:
        """An entry of another attempt, or of another ring than the one that has the attempt.

        Each such ring is rejected once. A later life of the same group says that ours is over.
        """
        if not group or self.followed or entry.attempt > self.stream.attempt:
            return StreamDecision.NOTHING
        if entry.attempt == self.stream.attempt and group == self.group and epoch > self.epoch:
            return StreamDecision.RECOVER
        ring = (group, epoch, entry.attempt)
        if entry.finish or ring in self._rejected:
            return StreamDecision.NOTHING
        self._rejected |= {ring}
        return StreamDecision.REJECT

    def _follow_attempt(self, entry: TokenEntry) -> bool:
        """A newer attempt than the one that was read speaks. False while tokens before it are missing.

        Where it begins, the older one ends: what that has said behind there was read by nobody who counts,
        unless a reader here has been given it.
        """
        position = entry.position
        if position > self.stream.position:
            self._behind = True
            return False
        if position < self.stream.position and not self._readers:
            del self.tokens[position:]
            if self.scores is not None:
                del self.scores[position:]
            self.stream.position = position
        self._behind, self._gap_replays = False, 0
        self.stream.restart(entry.attempt)
        self.state, self.group, self.epoch, self.computed = "queued", "", 0, 0
        return True

    def _seen_in(self, group: str, epoch: int, entry: TokenEntry, now: float) -> None:
        if group and not self.group:
            self.group, self.epoch = group, epoch
            self.heard_at, self._stall = now, self.limits.stall
            self.suspected = self.suspected or entry.suspected
            if self.state in ("queued", "recovering", "received"):
                self.state = "dispatched"
        if entry.fingerprint:
            self.fingerprint = entry.fingerprint
        if entry.cached_tokens and not self.cached_tokens:
            self.cached_tokens = min(entry.cached_tokens, len(self.request.prompt))
        if entry.computed:
            self._on_progress(entry, now)

    def _stalled(self, now: float) -> bool:
        return bool(self.group) and now - self.heard_at >= self._stall

    def _on_finish(self, group: str, entry: TokenEntry) -> StreamDecision:
        if entry.finish == "error" and entry.retryable and group:
            if entry.error_code == NoGroupAvailable.code and self.handed_back < MOST_HAND_BACKS:
                self.handed_back += 1
            return self._let_go() if self.followed else StreamDecision.RECOVER
        if entry.finish == "error":
            self.fail(error_from_code(entry.error_code, entry.error or "The generation failed."))
        elif entry.finish == "cancelled":
            self.fail(Unavailable("The generation was cancelled; send the request again.", retry_after=1))
            self.state = "cancelled"
        else:
            self.state, self.finish, self._end_came_alone = "finished", entry.finish, not entry.tokens
            self.vector = entry.vector
        return StreamDecision.ENDED

    def _let_go(self) -> StreamDecision:
        """The ring that is listened to was told to end its attempt, or has lost it. What follows is another ring's:
        its owner's next attempt, or this one, of which other entries have been left out here."""
        self._rejected |= {(self.group, self.epoch, self.stream.attempt)}
        self.stream.ended = False
        self.state, self.group, self.epoch, self.computed = "queued", "", 0, 0
        return StreamDecision.REREAD

    def _complete(self) -> bool:
        """Ends a generation of which only the last word is missing."""
        reason: Literal["stop", "length", ""] = ""
        if self.tokens and self.tokens[-1] in self.request.stop_token_ids:
            reason = "stop"
        elif self.tokens and len(self.tokens) >= self.request.max_tokens:
            reason = "length"
        if reason:
            self.state, self.finish, self._end_came_alone = "finished", reason, True
            end = TokenEntry(self.id, self.stream.attempt, len(self.tokens), [], finish=reason)
            self._deliver(end)
        return bool(reason)


_WORDS = {"out_of_memory": "ran out of memory", "crashed": "crashed", "hung": "hung"}


def _guilty_of(first: str, second: str) -> FatalRequest:
    """What is told of a request that was computed when two rings died, the second time alone."""
    return FatalRequest(
        f"This request crashed two executor groups (the first {_WORDS.get(first, first)}, the second "
        f"{_WORDS.get(second, second)} while computing nothing else), so it will not be retried; change or shorten "
        "it, or send its id to the operator."
    )
