"""The leader of a ring: takes requests from NATS, runs step after step, publishes the tokens.

    dispatch ──▶ batcher.add           event loop: answers NATS while a step is computed
                 batcher.schedule ──▶ engine   (its thread; `step_loop.py`)
    tokens  ◀── batcher.update    ◀──┘          published while the next step is computed

All decisions are the batcher's; this shell only moves messages and time.

Before it serves, it says what it computes with (the fingerprint), and checks that the model's name is its own.
"""

import asyncio
import contextlib
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import structlog

from services.executor.core.engine import Engine, EngineSpec, traits_of
from services.executor.core.settings import ExecutorSettings, numeric_settings, served_name
from services.executor.ipc.activity import HostActivity
from services.executor.ipc.board import RingBoard, RingState
from services.executor.ipc.rank_pipe import AdaptersHeld, Drained, RankSpec, Ready, Requested, SupervisorPipe
from services.executor.kv_transfer.service import Handover
from services.executor.leader.adapter_cache import AdapterCache
from services.executor.leader.adapters import Adapters
from services.executor.leader.diagnostics import LeaderDebug
from services.executor.leader.frames import Gathering, RecentFrames, acknowledgements, in_frames
from services.executor.leader.step_loop import EngineLoop, looks_ahead
from services.executor.leader.tracing import Attempts
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from services.executor.scheduler.drafts.drafting import Drafter
from services.executor.scheduler.drafts.proposers.catalog import PROPOSERS
from services.executor.structured_output import GrammarState, GrammarWork
from shared.errors import ConfigurationError, NoGroupAvailable, RyzansteinError
from shared.messages import (
    Cancel,
    Claimed,
    ControlCommand,
    ControlReply,
    DispatchBatch,
    DispatchReply,
    Drain,
    GenerationRequest,
    GroupLoad,
    GroupRecord,
    ModelCard,
    Refusal,
    TokenFrame,
)
from shared.nats import subjects
from shared.nats.bus import Bus, encode
from shared.nats.kv import Bucket
from shared.nats.objects import Objects
from shared.process import freeze_gc_after_startup

log = structlog.get_logger(__name__)


def fingerprint_of(settings: ExecutorSettings, card: ModelCard, numerics: str) -> str:
    """`fp_` and ten hexadecimal digits; the same for rings that draw the same tokens of the same seed, which
    compute with the same `numerics` (`EngineSpec`)."""
    parts = [card.tokenizer, card.fingerprint, str(card.vocab_size), numerics]
    parts += numeric_settings(settings)
    return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:10]}"


def with_parsers(card: ModelCard, settings: ExecutorSettings) -> ModelCard:
    """`card` with the parsers that its operator has chosen."""
    return msgspec.structs.replace(card, tool_parser=settings.tool_parser, reasoning_parser=settings.reasoning_parser)


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


async def check_name(bus: Bus, card: ModelCard, group: str) -> None:
    """Two models under one name would be decoded with one tokenizer: the second is refused. Rings that compute
    one model differently may go on with each other's answers: that is told.

    Raises `ConfigurationError` where another group than `group` serves something else as `card.model`.
    """
    known = await (await Bucket.open(bus, subjects.MODELS_BUCKET, ModelCard)).get(card.model)
    if known is not None and known.value.fingerprint not in ("", card.fingerprint):
        log.warning(
            "fingerprint_changed",
            model=card.model,
            before=known.value.fingerprint,
            now=card.fingerprint,
            reason="an answer that moves between rings of different fingerprints may change its text",
        )
    if known is None or (known.value.tokenizer, known.value.vocab_size) == (card.tokenizer, card.vocab_size):
        return
    records = await (await Bucket.open(bus, subjects.GROUPS_BUCKET, GroupRecord)).items()
    others = [
        record.group
        for record in records.values()
        if record.model == card.model and record.group != group and record.state in ("ready", "busy")
    ]
    if others:
        raise ConfigurationError(
            f"The group {others[0]} serves another model under the name {card.model}; give this one a name "
            "of its own with --served-model-name."
        )


# Seconds between two beats of the event loop, or half the time between two heartbeats where that is longer.
LOOP_BEAT = 0.5
# Seconds between two times that the load is put on the board while steps follow each other: heartbeats and metrics,
# which read it there, come seldom.
LOAD_INTERVAL = 0.05


class Leader:
    def __init__(
        self, settings: ExecutorSettings, spec: RankSpec, board: RingBoard, engine: Engine, supervisor: SupervisorPipe
    ) -> None:
        self._settings = settings
        self._spec = spec
        self._board = board
        self._engine = engine
        self._supervisor = supervisor
        self._model = served_name(settings)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._wake = asyncio.Event()
        self._draining = False
        self._leaving = False
        self._replaced = False
        self._handed_back = False
        self._drain_by = 0.0
        self._load_version = 0
        self._reported_at = float("-inf")  # when the load was last put on the board; monotonic seconds
        self._recent = RecentFrames()
        self._gathering = Gathering()
        self._fingerprint = ""
        self._attempts = Attempts(spec.group, spec.epoch, board.times)
        self._grammars = GrammarWork()
        self._timer: asyncio.TimerHandle | None = None
        self._telling: asyncio.Task[None] | None = None
        self._republishing: asyncio.Task[None] | None = None
        self._told_adapters: list[str] = []
        self._activity = HostActivity(Path(spec.activity)) if spec.activity else None
        self._interactive = 0  # what the page of the host's activity says

    async def run(self) -> None:
        """Loads, serves until drained. Raises what makes the ring unusable."""
        loop = asyncio.get_running_loop()
        self._supervisor.listen(lambda grace: loop.call_soon_threadsafe(self._leave, grace))
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
        self._handover = Handover(
            self._settings,
            self._spec,
            engine_spec,
            self._batcher.exchange,
            lambda: self._batcher.receivable,
            self._model,
            self._wake.set,
        )
        self._adapters = self._adapters_of() if engine_spec.max_adapters else None
        self._report_load()
        self._bus = await Bus.connect(self._settings, subjects.leader_connection(self._spec.instance, self._spec.group))
        self._bus.on_reconnect(self._on_reconnect)
        self._bus.on_election(self._on_election)
        beating = asyncio.create_task(self._beat())
        try:
            await self._announce(engine_spec)
            await self._step_loop()
            await self._bus.flush()
            self._supervisor.send(Drained())
        finally:
            beating.cancel()
            if self._adapters is not None:
                await self._adapters.close()
            await self._bus.close()
            self._grammars.close()
            self._engine.close()

    def _adapters_of(self) -> Adapters:
        root = self._settings.model_cache.expanduser() / ".adapters"
        cache = AdapterCache(root, self._settings.adapter_cache_bytes)
        return Adapters(self._model, cache, self._batcher, self._engine.adapter_digest, self._wake.set)

    async def _announce(self, engine_spec: EngineSpec) -> None:
        """Tells the gateways of the model, listens for requests, and says that the group is ready."""
        card, bundle = await asyncio.to_thread(self._engine.card, self._model)
        fingerprint = fingerprint_of(self._settings, card, engine_spec.numerics)
        card = msgspec.structs.replace(card, fingerprint=fingerprint, exact=engine_spec.exact)
        self._fingerprint = fingerprint
        if not card.exact:
            log.info(
                "texts_not_exact",
                reason="sums may be rounded in another order beside other requests, after a prefix hit or a failover",
                numerics=engine_spec.numerics,
            )
        card, group = with_parsers(card, self._settings), self._spec.group
        await check_name(self._bus, card, group)
        if bundle:
            store = Objects(self._bus, subjects.TOKENIZERS_STORE)
            if await store.info(card.tokenizer) is None:
                await store.open()
                await store.put(card.tokenizer, bundle, fresh=True)
        await (await Bucket.open(self._bus, subjects.MODELS_BUCKET, ModelCard)).put(self._model, card)
        # Gateways take the tokenizer in meanwhile.
        await asyncio.to_thread(self._grammars.load, card, bundle)
        await self._bus.subscribe(subjects.dispatch(group), DispatchBatch, self._on_dispatch)
        await self._bus.subscribe(subjects.control(group), ControlCommand, self._on_control)  # type: ignore[arg-type]
        if self._adapters is not None:
            self._adapters.open(self._bus)
        await self._handover.open(self._bus, card.fingerprint)
        await self._bus.flush()
        freeze_gc_after_startup()
        self._board.set_state(RingState.READY)
        told = (engine_spec.kv_bytes, engine_spec.imports, engine_spec.kernels, engine_spec.streamed)
        self._supervisor.send(Ready(self._model, *told, traits_of(engine_spec)))
        log.info(
            "leader_ready",
            group=group,
            model=self._model,
            kernels=engine_spec.kernels,
            blocks=engine_spec.total_blocks,
            lookahead=self._steps.lookahead,
        )

    # --- from NATS -------------------------------------------------------------------------------

    async def _on_dispatch(self, batch: DispatchBatch) -> DispatchReply | None:
        if batch.epoch > self._spec.epoch:
            self._replaced = True
            self._wake.set()
            return None  # the ring that has taken our place answers
        accepted: list[str] = []
        refused: list[Refusal] = []
        for request in batch.requests:
            repeated = self._batcher.knows(request)
            refusal = self._add(request)
            self._attempts.on_accepted(request, refusal, repeated=repeated)
            if refusal is None:
                accepted.append(request.generation_id)
                if request.grammar is not None:
                    self._grammars.compile(request, self._on_compiled)
            else:
                refused.append(refusal)
        self._show_activity()
        self._gathering.add(acknowledgements(batch.requests, set(accepted), self._fingerprint))
        await self._tell()
        self._wake.set()
        return DispatchReply(self._spec.group, self._spec.epoch, accepted, refused, self._load())

    def _on_compiled(self, request: GenerationRequest, grammar: GrammarState | RyzansteinError) -> None:
        self._batcher.release(request, grammar)
        self._wake.set()

    async def _on_control(self, command: ControlCommand) -> ControlReply:
        if isinstance(command, Cancel):
            self._batcher.cancel(command.generation_ids, command.attempt, command.claim)
            self._wake.set()
        elif isinstance(command, Claimed):
            self._batcher.claim(command.generation_ids, command.claim)
        elif isinstance(command, Drain):
            self._drain(command.grace)
        elif not self._undrain():
            group = self._spec.group
            return ControlReply(False, f"The executor of the group {group} is stopping; start it again.")
        return ControlReply(ok=True)

    def _load(self) -> GroupLoad:
        self._load_version += 1
        return msgspec.structs.replace(
            self._batcher.load(),
            version=self._load_version,
            slots=self._batcher.places,
            step_seconds=self._steps.throughput.step_seconds,
            prompt_tokens_per_second=self._steps.throughput.prompt_tokens_per_second,
        )

    def _report_load(self) -> None:
        """Puts the load, and what the ring has done so far, on the board."""
        self._reported_at = time.monotonic()
        self._board.set_load(self._load())
        totals, batcher = self._board.totals, self._batcher
        totals.cached_tokens, totals.preemptions = batcher.cached_tokens, batcher.preemptions
        totals.drafted_tokens, totals.accepted_tokens = batcher.drafter.drafted, batcher.drafter.accepted
        of_engine = batcher.drafter.engine_counts
        totals.draft_model_drafted_tokens = of_engine.drafted
        totals.draft_model_accepted_tokens = of_engine.accepted
        totals.draft_model_passes, totals.draft_model_seconds = of_engine.passes, of_engine.seconds
        totals.adapter_loads, totals.adapter_evictions = batcher.adapter_reads

    def _show_activity(self) -> None:
        """How many requests somebody waits for: trainers on this host are suspended meanwhile."""
        if self._batcher.interactive == self._interactive or self._activity is None:
            return
        self._interactive = self._batcher.interactive
        self._activity.set(self._spec.activity_slot, self._interactive)
        if self._interactive and self._activity.is_armed:
            self._supervisor.send(Requested())
            self._activity.disarm()

    def _add(self, request: GenerationRequest) -> Refusal | None:
        if not self._draining:
            if request.adapter and self._adapters is not None:
                self._adapters.want(request.adapter)
            return self._batcher.add(request, time.monotonic())
        reason = f"The group {self._spec.group} is draining; another takes the request."
        return Refusal(request.generation_id, NoGroupAvailable.code, reason)

    def _leave(self, grace: float = -1.0) -> None:
        """The supervisor ends the ring."""
        self._leaving = True
        self._drain(grace)

    def _drain(self, grace: float = -1.0) -> None:
        """Nothing more is accepted; what runs may finish within `grace` seconds (below 0: as set). Said
        again, the earlier end holds."""
        by = time.monotonic() + (self._settings.drain_grace if grace < 0 else grace)
        self._drain_by = min(by, self._drain_by) if self._draining else by
        self._draining = True
        self._board.set_state(RingState.DRAINING)
        self._handover.begin(lambda: self._handed_back)
        log.info("draining", group=self._spec.group)
        self._wake.set()

    def _undrain(self) -> bool:
        """Takes a drain back that is under way; False when the executor is about to end."""
        if self._leaving:
            return False
        if self._draining:
            self._draining = False
            self._handover.stop()
            self._board.set_state(RingState.READY)
            log.info("drain_cancelled", group=self._spec.group)
        return True

    # --- steps -----------------------------------------------------------------------------------

    async def _step_loop(self) -> None:
        """One step after the other while there is work; returns when the group is drained.

        Raises `ConfigurationError` when a later ring has this group's name.
        """
        while True:
            if self._replaced:
                raise ConfigurationError(
                    f"Another executor now serves the group {self._spec.group}; this one exits. If both are "
                    "to serve, give each a group of its own with --group."
                )
            if self._draining and (not self._batcher.has_work or time.monotonic() >= self._drain_by):
                if not self._handed_back:
                    self._leaving = True
                    await self._hand_back()
                if self._handover.over:
                    return
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
            self._steps.throughput.rest()
        self._show_activity()
        self._report_load()
        if self._batcher.has_work:
            await asyncio.sleep(0.001)  # a hand-over holds the blocks that are waited for
        elif not self._draining or self._handed_back:
            self._wake.clear()
            await self._wake.wait()

    async def _tell_when_due(self) -> None:
        """Publishes what is gathered: at once when the last frame is some time ago, else as soon as it is."""
        loop = asyncio.get_running_loop()
        wait = self._gathering.wait(loop.time())
        if not wait:
            await self._tell()
        elif self._timer is None and self._gathering:
            self._timer = loop.call_later(wait, self._tell_soon)

    def _tell_soon(self) -> None:
        self._timer = None
        self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        """One frame per consumer of what is gathered: live and, by the same publish, into the journal."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._gathering:
            return
        for consumer, of_consumer in self._gathering.take(asyncio.get_running_loop().time()).items():
            for part in in_frames(of_consumer):
                frame = encode(TokenFrame(self._spec.group, self._spec.epoch, self._batcher.step, part))
                self._recent.add(consumer, frame, time.monotonic(), self._bus.connected)
                await self._publish_frame(consumer, frame)
            for entry in [entry for entry in of_consumer if entry.finish]:
                self._attempts.ended(entry)

    async def _publish_frame(self, consumer: str, frame: bytes) -> None:
        try:
            await self._bus.publish_encoded(subjects.tokens(consumer), frame)
        except RyzansteinError as error:  # published again once the connection is back
            log.warning("frame_publish_failed", consumer=consumer, error=str(error))

    def _on_reconnect(self) -> None:
        self._republishing = asyncio.create_task(self._republish())

    def _on_election(self, stream: str) -> None:
        """While the journal had no leader, nobody recorded what was published."""
        if stream == subjects.JOURNAL_STREAM:
            self._on_reconnect()

    async def _republish(self) -> None:
        """Publishes again what may have been lost on its way; readers drop what they know."""
        for consumer, frame in self._recent:
            await self._publish_frame(consumer, frame)

    async def _hand_back(self) -> None:
        """Ends what has not finished with an error that another ring's attempt makes good."""
        error = NoGroupAvailable(f"The group {self._spec.group} has left; another one continues.")
        self._gathering.add(self._batcher.fail_all(error))
        self._handed_back = True
        await self._tell()

    def _tell_adapters(self) -> None:
        """Tells the supervisor which adapters are in memory; lets go of files that nobody needs."""
        if self._adapters is None:
            return
        self._adapters.release_unused()
        if (held := self._batcher.adapters) != self._told_adapters:
            self._told_adapters = held
            self._supervisor.send(AdaptersHeld(held))

    async def _beat(self) -> None:
        """Shows that the event loop turns, which a stopped process cannot; looks at the clock."""
        with contextlib.suppress(asyncio.CancelledError):
            interval = max(LOOP_BEAT, min(self._settings.beat_interval / 2, self._settings.hung_after / 6))
            while True:
                self._board.loop_beat(connected=self._bus.connected)
                self._debug.beat(self._thread)
                if self._batcher.expire(time.time()):
                    self._wake.set()
                self._tell_adapters()
                await asyncio.sleep(interval)
