"""The leader's part of diagnostics: keeps its plans, logs slow steps, and tells whoever looks into its ring of queues
and KV blocks, never a prompt or a token.
"""

import asyncio
import concurrent.futures
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from services.executor.core.engine import DraftPlan, EngineSpec
from services.executor.core.settings import SlowSteps
from services.executor.core.step_plan import StepPlan
from services.executor.ipc.flight_recorder import FlightRecorder, StepTimes
from services.executor.ipc.rank_pipe import RankSpec
from services.executor.scheduler.batcher import Scheduler
from services.executor.scheduler.sequence import Sequence
from services.executor.scheduler.steps import SampledRow
from shared.messages.debugging import LeaderDump, QueuedDump

log = structlog.get_logger(__name__)

# Seconds that the event loop has to tell of itself; then another thread reads what it finds.
LOOP_ANSWER = 0.25
# Seconds after the leader's own end of a step by which the other ranks have noted theirs, if they ever do.
RANKS_END = 0.1


class LeaderDebug:
    def __init__(self, spec: RankSpec, batcher: Scheduler, engine: EngineSpec, slow_step: str) -> None:
        """`slow_step`: as in the settings. To be made in the event loop's thread."""
        flight = FlightRecorder.beside(Path(spec.board), spec.world_size)
        self._plans = flight.plans
        self._own = flight.rank(0)
        self._ranks = [flight.read(rank) for rank in range(spec.world_size)]
        self._batcher = batcher
        self._block_size, self._state_blocks = engine.block_size, engine.state_blocks
        self._slow = SlowSteps.of(slow_step)
        self._loop = asyncio.get_running_loop()

    # --- steps -----------------------------------------------------------------------------------

    def planned(self, plan: StepPlan, whose: Iterable[Sequence | SampledRow]) -> None:
        """A step, or a round of the draft model, begins."""
        ids = [one.request.generation_id for one in whose]
        self._plans.add(plan, ids, self._block_size, self._state_blocks)

    def drafted(self, plan: DraftPlan, seconds: float) -> None:
        self._plans.took(plan.plan.step, seconds)

    def took(
        self,
        plan: StepPlan,
        rows: list[SampledRow],
        seconds: float,
        computed: int,
        expected: float,
        masks: float,
        drafting: float = 0.0,
    ) -> None:
        """The step has taken `seconds` where such take `expected` (0: not known). `computed`: prompt tokens; `masks`:
        seconds spent on beginning grammars' masks; `drafting`: of them, those of the draft model's round before."""
        self._plans.took(plan.step, seconds)
        if not self._slow.is_slow(seconds, expected):
            return
        self._own.count_slow_step()
        if self._slow.may_log(time.monotonic()):
            fields = {
                "step": plan.step,
                "ms": _ms(seconds),
                "expected_ms": _ms(expected) if expected else None,
                "masks_ms": _ms(masks),
                "draft_ms": _ms(drafting),
                "not_logged": self._slow.suppressed,
            }
            self._slow.suppressed = 0
            # The other ranks may not have noted their end yet.
            self._loop.call_later(RANKS_END, self._log_slow, plan, rows, computed, fields)

    def _log_slow(self, plan: StepPlan, rows: list[SampledRow], computed: int, fields: dict[str, Any]) -> None:
        times = [rank.step(plan.step) for rank in self._ranks]
        parts = {
            "prefill_tokens": computed,
            "decode_rows": plan.num_decodes,
            "batch": len(plan.query_lens) // 4,
            "sampled": len(plan.sample_rows) // 4,
            "context_tokens": sum(memoryview(plan.context_lens).cast("i")),
            "drafts": sum(1 for row in rows if row.ahead),
            "grammar_rows": sum(1 for row in rows if row.sampling.grammar is not None and not row.ahead),
            "saves": len(plan.saves) // 8,
            "compressions": len(plan.compressions) // 8,
            "restores": len(plan.restores) // 8,
            "snapshots": len(plan.state_snapshots) // 8,
            "embeds": len(plan.pools) // 8,
            **(_stages(times[0]) if times[0] else {}),
            "ranks": [_of_rank(rank, one, times[0]) for rank, one in enumerate(times) if one is not None],
        }
        log.warning("slow_step", **fields, **parts)

    # --- looked into -----------------------------------------------------------------------------

    def tell(self) -> LeaderDump | None:
        """As `ask_loop`."""
        return ask_loop(self._loop, lambda by_loop: describe(self._batcher, time.monotonic(), by_loop))


def ask_loop(loop: asyncio.AbstractEventLoop, describe: Callable[[bool], LeaderDump]) -> LeaderDump | None:
    """What `describe` says, asked from another thread: by the loop, or beside one that does not turn (False). None:
    nothing could be read."""

    async def in_loop() -> LeaderDump:
        return describe(True)

    told = asyncio.run_coroutine_threadsafe(in_loop(), loop)
    try:
        return told.result(LOOP_ANSWER)
    except concurrent.futures.TimeoutError:
        told.cancel()
    try:
        return describe(False)
    except RuntimeError:
        return None  # it changed while it was read: the loop turns again


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def _stages(times: StepTimes) -> dict[str, float]:
    """The leader's stages. An engine that knows none has only the whole."""
    if not times.computed:
        return {}
    spent = (_ms(nanoseconds / 1e9) for nanoseconds in times.stages)
    return dict(zip(("send_ms", "compute_ms", "sample_ms"), spent, strict=True))


def _of_rank(rank: int, times: StepTimes, leader: StepTimes | None) -> dict[str, object]:
    """How a rank has spent the step: how late it began, how long it computed and waited for others."""
    began = {"rank": rank, "began_after_ms": _ms((times.began - leader.began) / 1e9) if leader is not None else 0.0}
    if not times.ended:
        return {**began, "not_over_after_ms": _ms((time.monotonic_ns() - times.began) / 1e9)}
    whole = (times.ended - times.began) / 1e9
    return {
        **began,
        "ms": _ms(whole),
        "compute_ms": _ms(max(0.0, whole - times.busy_ns / 1e9)),
        "collectives_ms": _ms(times.busy_ns / 1e9),
        "waited_ms": _ms(times.waited_ns / 1e9),
    }


MOST_QUEUED = 256  # requests that are listed; `counts` has all
MOST_HOLDERS = 10


def describe(batcher: Scheduler, now: float, by_loop: bool) -> LeaderDump:
    """`now`: of the clock by which the batcher takes requests on."""
    sequences, blocks = batcher.look()
    states = [sequence.state.value for sequence in sequences]
    lanes = [f"{sequence.state.value} {sequence.request.lane}" for sequence in sequences]
    counts = dict(Counter(states + lanes))
    listed = [_queued(sequence, now) for sequence in sequences[:MOST_QUEUED]]
    holders, invariants = blocks.holders[:MOST_HOLDERS], _invariants(batcher)
    allocator = msgspec.structs.replace(blocks, holders=holders, invariants=invariants)
    return LeaderDump(listed, counts, allocator, by_loop)


def _queued(sequence: Sequence, now: float) -> QueuedDump:
    request = sequence.request
    return QueuedDump(
        generation_id=request.generation_id,
        request_id=request.request_id,
        state=sequence.state.value,
        lane=request.lane,
        attempt=request.attempt,
        age=round(now - sequence.times.accepted, 3),
        prompt_tokens=sequence.prompt_tokens,
        output_tokens=sequence.output_tokens,
        computed=sequence.num_computed,
        blocks=sequence.blocks,
        session=bool(request.session),
        in_step=sequence.in_flight,
        restoring=len(sequence.restoring),
        slot=sequence.state_slot,
        snapshots=list(sequence.snapshots),
    )


def _invariants(batcher: Scheduler) -> str:
    try:
        batcher.check()
    except AssertionError as broken:
        return f"broken: {broken}"
    return "hold"
