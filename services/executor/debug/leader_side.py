"""The leader's part of the debugging: keeps its plans, tells of its queues, logs slow steps."""

import asyncio
import concurrent.futures
import time
from concurrent.futures import Executor
from pathlib import Path

import structlog

from services.executor.debug import spans
from services.executor.debug.leader_state import describe
from services.executor.debug.recorder import FlightRecorder, StepTimes
from services.executor.debug.slow_steps import SlowSteps
from services.executor.engine.batching import ContinuousBatcher
from services.executor.engine.plan import StepPlan
from services.executor.engine.plan_builder import Row
from services.executor.engine.protocol import EngineSpec
from services.executor.ipc.rank_pipe import RankSpec
from shared.messages.debugging import LeaderDump

log = structlog.get_logger(__name__)

LOOP_ANSWER = 0.25
"""Seconds that the event loop has to tell of itself; then another thread reads what it finds."""
RANKS_END = 0.1
"""Seconds after the leader's own end of a step by which the other ranks have noted theirs, if they ever do."""


class LeaderDebug:
    """Beside a leader's step loop."""

    def __init__(
        self, spec: RankSpec, batcher: ContinuousBatcher, engine: EngineSpec, slow_step: str
    ) -> None:
        """`slow_step`: as in the settings. To be made in the event loop's thread."""
        flight = FlightRecorder.beside(Path(spec.board), spec.world_size)
        self._plans = flight.plans
        self._own = flight.rank(0)
        self._ranks = [flight.read(rank) for rank in range(spec.world_size)]
        self._batcher = batcher
        self._block_size = engine.block_size
        self._slow = SlowSteps.of(slow_step)
        self._loop = asyncio.get_running_loop()

    # --- steps -----------------------------------------------------------------------------------

    def planned(self, plan: StepPlan) -> None:
        """The step is about to be executed."""
        ids = [sequence.request.generation_id for sequence in self._batcher.sequences_under_way()]
        self._plans.add(plan, ids, self._block_size)

    def took(
        self, plan: StepPlan, rows: list[Row], seconds: float, computed: int, expected: float, masks: float
    ) -> None:
        """The step has taken `seconds` where such take `expected` (0: not known). `computed`: prompt tokens;
        `masks`: seconds spent on beginning grammars' masks."""
        self._plans.took(plan.step, seconds)
        if not self._slow.is_slow(seconds, expected):
            return
        self._own.count_slow_step()
        if self._slow.may_log(time.monotonic()):
            usual = _ms(expected) if expected else None
            fields: dict[str, object] = {
                "step": plan.step,
                "ms": _ms(seconds),
                "expected_ms": usual,
                "masks_ms": _ms(masks),
            }
            fields["not_logged"], self._slow.suppressed = self._slow.suppressed, 0
            # The other ranks may not have noted their end yet.
            self._loop.call_later(RANKS_END, self._log_slow, plan, rows, computed, fields)

    def _log_slow(self, plan: StepPlan, rows: list[Row], computed: int, fields: dict[str, object]) -> None:
        log.warning("slow_step", **fields, **self._parts(plan, rows, computed))

    def _parts(self, plan: StepPlan, rows: list[Row], computed: int) -> dict[str, object]:
        """What the step was made of."""
        times = [rank.step(plan.step) for rank in self._ranks]
        return {
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
            "embeds": len(plan.pools) // 8,
            **(_stages(times[0]) if times[0] else {}),
            "ranks": [_of_rank(rank, one, times[0]) for rank, one in enumerate(times) if one is not None],
        }

    # --- looked into -----------------------------------------------------------------------------

    def tell(self) -> LeaderDump | None:
        """Called from another thread. None: nothing could be read."""
        told: concurrent.futures.Future[LeaderDump] = concurrent.futures.Future()

        def in_loop() -> None:
            if told.set_running_or_notify_cancel():
                try:
                    told.set_result(self._describe(by_loop=True))
                except Exception as error:
                    told.set_exception(error)

        self._loop.call_soon_threadsafe(in_loop)
        try:
            return told.result(LOOP_ANSWER)
        except concurrent.futures.TimeoutError:
            if not told.cancel():
                return told.result()
        try:
            return self._describe(by_loop=False)
        except RuntimeError:
            return None  # it changed while it was read: the loop turns again

    def _describe(self, by_loop: bool) -> LeaderDump:
        return describe(self._batcher, time.monotonic(), by_loop)

    def beat(self, engine: Executor) -> None:
        """Tells a profiler that is at work, in the engine's thread, that there is no step when there is none."""
        if spans.watched():
            engine.submit(spans.idle)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def _stages(times: StepTimes) -> dict[str, float]:
    """The leader's stages. An engine that knows none has only the whole."""
    if not times.computed:
        return {}
    sent = times.sent or times.began
    return {
        "send_ms": _ms((sent - times.began) / 1e9),
        "compute_ms": _ms((times.computed - sent) / 1e9),
        "sample_ms": _ms(max(0, times.ended - times.computed) / 1e9),
    }


def _of_rank(rank: int, times: StepTimes, leader: StepTimes | None) -> dict[str, object]:
    """How a rank has spent the step: how late it began, how long it computed and waited for others."""
    late = _ms((times.began - leader.began) / 1e9) if leader is not None else 0.0
    if not times.ended:
        return {
            "rank": rank,
            "began_after_ms": late,
            "not_over_after_ms": _ms((time.monotonic_ns() - times.began) / 1e9),
        }
    whole = (times.ended - times.began) / 1e9
    return {
        "rank": rank,
        "began_after_ms": late,
        "ms": _ms(whole),
        "compute_ms": _ms(max(0.0, whole - times.busy_ns / 1e9)),
        "collectives_ms": _ms(times.busy_ns / 1e9),
        "waited_ms": _ms(times.waited_ns / 1e9),
    }
