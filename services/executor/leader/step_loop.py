"""Has the engine compute the batcher's steps, one after the other or one ahead, and takes note of what they took.

                     without lookahead                     with lookahead
event loop      plan n ──▶ ········ ──▶ take n, plan n+1   plan n+1 ──▶ take n, plan n+2 ──▶ take n+1 ...
engine thread         execute n                            [ n ][ n+1 ][ n+2 ]    no time between them

A round of the draft model, where there is one, comes before a step is planned, and its time is part of the step's.

`Throughput` measures how fast the ring computes, from which schedulers estimate waiting times. One step in which the
whole process was held up says nothing of the next: a step counts for `OUTLIER` times the average at most, so that a
ring that is slower for good is known after some steps and not after one.

A step takes about

    step_seconds + prompt tokens / prompt_tokens_per_second

Both are averages that forget: a step weighs half as much when `HALF_LIFE` later ones of its kind have been seen.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from services.executor.core.engine import BadLogits, Engine, GrammarFailed, Launched, RestoreFailed, SampledToken
from services.executor.core.step_plan import StepPlan
from services.executor.ipc.board import RingBoard
from services.executor.leader.diagnostics import LeaderDebug
from services.executor.leader.frames import output_tokens
from services.executor.leader.tracing import Attempts, ids_of
from services.executor.scheduler.batcher import Entries, Scheduler
from services.executor.scheduler.steps import SampledRow, prompt_tokens
from services.executor.structured_output import GrammarWork

log = structlog.get_logger(__name__)

HALF_LIFE = 32  # steps
_KEEP = 0.5 ** (1 / HALF_LIFE)
OUTLIER = 4.0
# Steps of a kind, since the ring last rested, before its speed is told: what one of them says may be chance, and
# a ring that chance has made look slow would not be given the work that shows it.
ENOUGH = 8
FASTEST = 1e9  # prompt tokens per second that are told at most: an engine that computes nothing has no speed


class Throughput:
    """Two running averages. No clock: the time of each step comes in."""

    def __init__(self) -> None:
        self._steps = self._seconds = 0.0
        self._prompt_tokens = self._prompt_seconds = 0.0
        self._seen = self._prompts_seen = 0

    def rest(self) -> None:
        """The ring has no work: what was measured does not say how it will be then."""
        self._seen = self._prompts_seen = 0

    def observe(self, seconds: float, prompt_tokens: int) -> None:
        """A step has taken `seconds` and computed so many tokens of prompts."""
        if prompt_tokens > 0:
            beyond = max(0.0, seconds - self._step)
            if self._prompt_tokens:
                usual = prompt_tokens * self._prompt_seconds / self._prompt_tokens
                beyond = min(beyond, OUTLIER * (usual + self._step))
            self._prompts_seen += 1
            self._prompt_tokens = self._prompt_tokens * _KEEP + prompt_tokens
            self._prompt_seconds = self._prompt_seconds * _KEEP + beyond
        else:
            self._seen += 1
            usual = self._step or seconds
            self._steps = self._steps * _KEEP + 1
            self._seconds = self._seconds * _KEEP + min(seconds, OUTLIER * usual)

    def expected(self, prompt_tokens: int) -> float:
        """Seconds that a step with so many prompt tokens usually takes; 0 while too little was seen."""
        if not self._step or self._seen < ENOUGH:
            return 0.0
        if not prompt_tokens:
            return self._step
        if self._prompts_seen < ENOUGH or not self._prompt_tokens:
            return 0.0
        return self._step + prompt_tokens * self._prompt_seconds / self._prompt_tokens

    @property
    def step_seconds(self) -> float:
        """What a step without prompt tokens takes; 0 while too little was seen."""
        return self._step if self._seen >= ENOUGH else 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        """How fast prompts are computed beyond that; 0 while too little was seen."""
        if self._prompts_seen < ENOUGH or not self._prompt_tokens:
            return 0.0
        return min(FASTEST, self._prompt_tokens / max(self._prompt_seconds, 1e-12))

    @property
    def _step(self) -> float:
        return self._seconds / self._steps if self._steps else 0.0


# Errors that some sequences end with, or are computed again after; others end the ring.
OF_ROWS = (BadLogits, GrammarFailed, RestoreFailed)


class _InFlightStep:
    def __init__(self, plan: StepPlan, rows: list[SampledRow], traced: bool) -> None:
        self.plan, self.rows, self.traced = plan, rows, traced
        self.measured = True  # whether its time says how fast the ring is
        self.began = time.perf_counter_ns()
        self.masks = 0.0  # seconds spent on beginning masks
        self.drafting = 0  # nanoseconds that the round before it has taken
        # None: nothing has been launched, it is to be executed as one.
        self.launched: Future[Launched] | None = None


class EngineLoop:
    """The steps of one ring. Called from the leader's event loop."""

    def __init__(
        self,
        engine: Engine,
        thread: ThreadPoolExecutor,
        batcher: Scheduler,
        grammars: GrammarWork,
        attempts: Attempts,
        board: RingBoard,
        debug: LeaderDebug,
        *,
        lookahead: bool,
        meanwhile: Callable[[], Awaitable[None]],
    ) -> None:
        """`thread`: the engine's. `meanwhile`: what the event loop does while a step is computed."""
        self._engine = engine
        self._thread = thread
        self._batcher = batcher
        self._grammars = grammars
        self._attempts = attempts
        self._board = board
        self._debug = debug
        self.lookahead = lookahead  # whether steps may be launched ahead
        self._meanwhile = meanwhile
        self._flights: deque[_InFlightStep] = deque()
        self._over = 0  # when the last step was over; nanoseconds
        self._drafting = 0  # what the round before the next step has taken; nanoseconds
        self.throughput = Throughput()

    @property
    def under_way(self) -> bool:
        """Whether a step has been planned and its result was not taken."""
        return bool(self._flights)

    async def draft(self) -> None:
        """Has the draft model propose for the next step, with none under way, where that is likely to pay; the tokens
        of the last step go out meanwhile."""
        began = time.perf_counter_ns()
        planned = self._batcher.plan_drafts(time.monotonic())
        if planned is None:
            return
        plan, rows = planned
        self._debug.planned(plan.plan, rows)
        samples = [row.sampling for row in rows]
        drafting = asyncio.get_running_loop().run_in_executor(self._thread, self._engine.draft, plan, samples)
        await self._meanwhile()
        try:
            drafted = await drafting
        except OF_ROWS as error:  # the model that is served decides alone
            log.warning("drafting_failed", error=str(error), generations=ids_of(rows))
            self._batcher.drop_drafts()
            return
        self._drafting = time.perf_counter_ns() - began
        self._debug.drafted(plan, self._drafting / 1e9)
        self._batcher.take_drafts(drafted, self._drafting / 1e9)

    def plan(self) -> bool:
        """Plans the next step, with none under way; False when there is nothing to compute."""
        scheduled = self._batcher.schedule(time.monotonic())
        if scheduled is None:
            return False
        flight = self._begin(*scheduled)
        if self.lookahead:
            self._launch(flight)
        return True

    async def finish(self, *, ahead: bool) -> Entries:
        """Has the oldest step under way computed to its end, with the next one launched behind it where there is
        one that may be and `ahead` allows it. Returns what is owed then."""
        flight = self._flights[0]
        if self.lookahead and ahead and (scheduled := self._batcher.schedule_ahead(time.monotonic())):
            self._launch(self._begin(*scheduled))
        entries = await self._compute(flight)
        now = time.perf_counter_ns()
        taken, self._over = now - max(flight.began, self._over) + flight.drafting, now
        self._note(flight, taken, entries)
        return entries

    # --- inside ----------------------------------------------------------------------------------

    def _begin(self, plan: StepPlan, rows: list[SampledRow]) -> _InFlightStep:
        self._debug.planned(plan, self._batcher.sequences_under_way())
        traced = self._attempts.traced
        if traced:
            plan = self._attempts.begin_step(plan, self._batcher.under_way)
        flight = _InFlightStep(plan, rows, traced)
        flight.measured = not self._batcher.shares_time
        flight.drafting, self._drafting = self._drafting, 0
        self._grammars.begin_masks([row.sampling for row in rows])
        flight.masks = (time.perf_counter_ns() - flight.began) / 1e9
        self._flights.append(flight)
        return flight

    def _launch(self, flight: _InFlightStep) -> None:
        samples = [row.sampling for row in flight.rows]
        flight.launched = self._thread.submit(self._engine.launch, flight.plan, samples)

    async def _compute(self, flight: _InFlightStep) -> Entries:
        """One step in the engine's thread, while the tokens of the last one go out. Rows that are no numbers end
        their own sequences only; what cannot be restored is computed again."""
        computing = self._run(flight)
        await self._meanwhile()
        try:
            sampled = await computing
        except (BadLogits, GrammarFailed) as error:
            generations = ids_of(flight.rows, error.rows)
            if isinstance(error, BadLogits):
                log.error("bad_logits", error=str(error), generations=generations)
            else:
                log.warning("grammar_failed", code=error.code, generations=generations)
            await self._forget_flights()
            return self._batcher.fail_step(error, error.rows)
        except RestoreFailed as error:
            log.warning("restore_failed", error=str(error), generations=ids_of(flight.rows))
            await self._forget_flights()
            return self._batcher.fail_restores(error.slots)
        self._flights.popleft()
        pooled = self._engine.pooled() if flight.plan.pools else None
        seconds = (time.perf_counter_ns() - max(flight.began, self._over)) / 1e9
        scores = self._engine.scored() if flight.plan.score_rows else None
        return self._batcher.update(sampled, seconds, pooled, scores)

    def _run(self, flight: _InFlightStep) -> "asyncio.Future[list[SampledToken]]":
        loop = asyncio.get_running_loop()
        if flight.launched is None:
            samples = [row.sampling for row in flight.rows]
            return loop.run_in_executor(self._thread, self._engine.execute, flight.plan, samples)
        return loop.run_in_executor(self._thread, _result, flight.launched)

    async def _forget_flights(self) -> None:
        """The oldest step has failed: the one behind it is executed, and nobody wants to know what it gives."""
        self._flights.popleft()
        while self._flights:
            later = self._flights.popleft()
            with contextlib.suppress(*OF_ROWS):
                await self._run(later)
            if later.traced:
                self._attempts.end_step(0.0)

    def _note(self, flight: _InFlightStep, taken: int, entries: Entries) -> None:
        """`taken` in nanoseconds."""
        plan, rows = flight.plan, flight.rows
        if flight.traced:
            self._attempts.end_step(taken / 1e9)
        if plan.token_ids:  # else it has only copied blocks: no measure of anything
            computed = prompt_tokens(plan, rows)
            expected = self.throughput.expected(computed) if flight.measured else 0.0
            self._debug.took(plan, rows, taken / 1e9, computed, expected, flight.masks, flight.drafting / 1e9)
            if flight.measured:
                self.throughput.observe(taken / 1e9, computed)
            self._board.add_step(taken, computed, output_tokens(entries), len(plan.query_lens) // 4)


def _result(launched: "Future[Launched]") -> list[SampledToken]:
    """In the engine's thread, which has launched it before."""
    return launched.result().result()


def looks_ahead(setting: str, *, overlaps: bool) -> bool:
    """The setting `lookahead` for an engine that `overlaps` its steps with planning, or does not."""
    return setting == "on" or (setting == "auto" and overlaps)
