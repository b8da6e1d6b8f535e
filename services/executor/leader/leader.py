"""The leader of a ring: takes requests from NATS, runs step after step, publishes the tokens.

    dispatch ──▶ batcher.add           event loop: answers NATS while a step is computed
                 batcher.schedule ──▶ engine   (its thread; `step_loop.py`)
    tokens  ◀── batcher.update    ◀──┘          published while the next step is computed

What it has in common with leaders of other engines is in `group_leader.py`.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import structlog

from services.executor.core import spans
from services.executor.core.engine import RING, Engine, EngineSpec, traits_of
from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.board import RingBoard
from services.executor.ipc.rank_pipe import RankSpec, Ready, SupervisorPipe
from services.executor.kv_transfer.service import Handover
from services.executor.leader.diagnostics import LeaderDebug
from services.executor.leader.group_leader import LOAD_INTERVAL, GroupLeader
from services.executor.leader.step_loop import EngineLoop, looks_ahead
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from services.executor.scheduler.drafts.drafting import Drafter
from services.executor.scheduler.drafts.proposers.catalog import PROPOSERS
from shared.errors import ConfigurationError

log = structlog.get_logger(__name__)


def max_drafts(settings: ExecutorSettings, spec: EngineSpec) -> int:
    """Drafts of one sequence at most: none where the model keeps recurrent state and memory has no slots for the states
    behind them. Raises `ConfigurationError` where the settings ask for some all the same."""
    if not spec.num_states or not settings.max_drafts:
        return settings.max_drafts
    if spec.draft_states:
        return min(settings.max_drafts, spec.draft_states)
    if settings.speculation != "auto":
        raise ConfigurationError(
            f"--speculation is {settings.speculation}, and the KV cache has no room for the model's recurrent state "
            "behind a draft, without which rejected drafts cannot be taken back; raise RYZANSTEIN_KV_MEMORY "
            "(--kv-memory), lower --max-sequences, or set --speculation to auto or off."
        )
    log.info(
        "speculation_off",
        reason="the KV cache has no room for the model's recurrent state behind a draft; raise --kv-memory",
    )
    return 0


class Leader(GroupLeader):
    _batcher: Scheduler

    def __init__(
        self, settings: ExecutorSettings, spec: RankSpec, board: RingBoard, engine: Engine, supervisor: SupervisorPipe
    ) -> None:
        super().__init__(settings, spec, board, supervisor)
        self._engine = engine
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    async def run(self) -> None:
        """Loads, serves until drained. Raises what makes the ring unusable."""
        self._listen()
        loop = asyncio.get_running_loop()
        engine_spec = await loop.run_in_executor(self._thread, self._engine.load, lambda done, total: None)
        if self._settings.nnodes > 1:  # other hosts have not the files that this one fetches
            engine_spec = msgspec.structs.replace(engine_spec, max_adapters=0)
        limits = BatchSettings(
            max_batch_tokens=self._settings.max_batch_tokens,
            max_sequences=self._settings.max_sequences,
            max_waiting=self._settings.max_waiting,
            session_ttl=self._settings.kv_session_ttl,
            max_drafts=max_drafts(self._settings, engine_spec),
            prefill_stretch=self._settings.longest_stretch,
            prefill_gap=self._settings.prefill_gap,
        )
        drafter = Drafter(engine_spec, limits, PROPOSERS)
        self._batcher = Scheduler(engine_spec, limits, self._model, drafter, self._board)
        self._board.totals.kv_blocks_recovered = self._batcher.recover(self._engine.recovered())
        self._debug = LeaderDebug(self._spec, self._batcher, engine_spec, self._settings.slow_step)
        self._supervisor.desk.on_state(self._debug.tell)
        self._steps = EngineLoop(
            self._engine,
            self._thread,
            self._batcher,
            self._grammars,
            self._attempts,
            self._board,
            self._debug,
            lookahead=looks_ahead(self._settings.lookahead, overlaps=engine_spec.overlaps),
            meanwhile=self._tell_when_due,
        )
        self._throughput = self._steps.throughput
        self._handover = Handover(
            self._settings,
            self._spec,
            engine_spec,
            self._batcher.exchange,
            lambda: self._batcher.receivable,
            self._model,
            self._wake.set,
        )
        if engine_spec.max_adapters:
            self._take_adapters(self._engine.adapter_digest)
        self._report_load()
        await self._connect()
        beating = asyncio.create_task(self._beat())
        try:
            await self._announce(engine_spec)
            await self._step_loop()
            await self._drained()
        finally:
            beating.cancel()
            await self._close_adapters()
            await self._bus.close()
            self._grammars.close()
            self._engine.close()

    async def _announce(self, engine_spec: EngineSpec) -> None:
        """Tells the gateways of the model, listens for requests, and says that the group is ready."""
        card, bundle = await asyncio.to_thread(self._engine.card, self._model)
        card = await self._register(card, bundle, engine_spec.numerics, RING, exact=engine_spec.exact)
        await self._handover.open(self._bus, card.fingerprint)
        told = (engine_spec.kv_bytes, engine_spec.imports, engine_spec.kernels, engine_spec.streamed)
        await self._is_ready(Ready(self._model, *told, traits_of(engine_spec)))
        log.info(
            "leader_ready",
            group=self._spec.group,
            model=self._model,
            kernels=engine_spec.kernels,
            blocks=engine_spec.total_blocks,
            lookahead=self._steps.lookahead,
        )

    # --- what a ring has of its own --------------------------------------------------------------

    def _count(self) -> None:
        totals, batcher = self._board.totals, self._batcher
        totals.cached_tokens, totals.preemptions = batcher.cached_tokens, batcher.preemptions
        totals.drafted_tokens, totals.accepted_tokens = batcher.drafter.drafted, batcher.drafter.accepted
        of_engine = batcher.drafter.engine_counts
        totals.draft_model_drafted_tokens = of_engine.drafted
        totals.draft_model_accepted_tokens = of_engine.accepted
        totals.draft_model_passes, totals.draft_model_seconds = of_engine.passes, of_engine.seconds
        totals.adapter_loads, totals.adapter_evictions = batcher.adapter_reads

    def _on_drain(self) -> None:
        self._handover.begin(lambda: self._handed_back)

    def _on_undrain(self) -> None:
        self._handover.stop()

    @property
    def _may_leave(self) -> bool:
        return self._handover.over

    def _look(self) -> None:
        """Tells a profiler that is at work, in the engine's thread, that there is no step when there is none."""
        if spans.watched():
            self._thread.submit(spans.idle)

    # --- steps -----------------------------------------------------------------------------------

    async def _step_loop(self) -> None:
        """One step after the other while there is work; returns when the group is drained."""
        while not await self._has_ended():
            if self._batcher.drafter.engine is not None:
                await self._steps.draft()
            if not self._steps.plan():
                await self._pause()
            while self._steps.under_way:
                entries = await self._steps.finish(ahead=not (self._draining or self._replaced))
                self._show_activity()
                if time.monotonic() - self._reported_at >= LOAD_INTERVAL:
                    self._report_load()
                self._gathering.add(entries)

    async def _pause(self) -> None:
        """Nothing can be computed: says what is owed, and waits for work where there is none."""
        self._gathering.add(self._batcher.take_entries())
        await self._tell()
        if not self._batcher.has_work:
            self._throughput.rest()
        self._show_activity()
        self._report_load()
        if self._batcher.has_work:
            await asyncio.sleep(0.001)  # a hand-over holds the blocks that are waited for
        elif not self._draining or self._handed_back:
            self._wake.clear()
            await self._wake.wait()
