"""What every leader of a group does, whatever computes: takes requests from NATS, publishes tokens, tells how it is.

    dispatch ──▶ batcher.add                     on the event loop
    control  ──▶ cancel, claim, drain
    tokens   ◀── frames of what the batcher owes

`Leader` has a ring compute the batcher's steps; `engines/leader.py` hands requests to an engine that schedules for
itself. All decisions are the batcher's; this shell only moves messages and time.

Before it serves, it says what it computes with (the fingerprint), and checks that the model's name is its own.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from services.executor.core.settings import ExecutorSettings, numeric_settings, served_name
from services.executor.ipc.activity import HostActivity
from services.executor.ipc.board import RingBoard, RingState
from services.executor.ipc.rank_pipe import AdaptersHeld, Drained, RankSpec, Ready, Requested, SupervisorPipe
from services.executor.leader.adapter_cache import AdapterCache
from services.executor.leader.adapters import AdapterBatcher, Adapters
from services.executor.leader.frames import Gathering, RecentFrames, acknowledgements, in_frames
from services.executor.leader.step_loop import Throughput
from services.executor.leader.tracing import Attempts
from services.executor.scheduler.batcher import Entries
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
    EngineTraits,
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


# Seconds without a heartbeat after which a record is of an earlier start, as for gateways: the health monitor, which
# would say so, may be starting too.
STALE = 15.0


def others_of(records: Iterable[GroupRecord], card: ModelCard, group: str) -> list[GroupRecord]:
    """Other groups than `group` that serve under the card's name."""
    serving = [record for record in records if record.model == card.model and record.state in ("ready", "busy")]
    return [record for record in serving if record.group != group]


def other_kind(others: Iterable[GroupRecord], card: ModelCard, now: float) -> GroupRecord | None:
    """One of `others` with another kind of engine; earlier versions do not tell theirs. `now`: Unix seconds."""
    for record in others:
        told = record.traits is not None and record.traits.engine.kind not in ("", card.engine.kind)
        if told and not 0 < record.heard_at < now - STALE:
            return record
    return None


async def check_name(bus: Bus, card: ModelCard, group: str, *, mixed: bool = False) -> None:
    """Two models under one name would be decoded with one tokenizer: the second is refused. Two kinds of engine have
    answers of their own, with which the other one would go on: the second is refused, unless `mixed` is allowed. Rings
    that compute one model differently may go on with each other's answers: that is told.

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
    records = await (await Bucket.open(bus, subjects.GROUPS_BUCKET, GroupRecord)).items()
    others = others_of(records.values(), card, group)
    same = known is None or (known.value.tokenizer, known.value.vocab_size) == (card.tokenizer, card.vocab_size)
    if others and not same:
        raise ConfigurationError(
            f"The group {others[0].group} serves another model under the name {card.model}; give this one a name "
            "of its own with --served-model-name."
        )
    if not mixed and (other := other_kind(others, card, time.time())) is not None:
        assert other.traits is not None, "its kind is told"
        raise ConfigurationError(
            f"The group {other.group} computes {card.model} with {other.traits.engine.name or 'a ring'}, and this one "
            f"with {card.engine.name or 'a ring'}: an answer that goes on in the other may change its text; give this "
            "one a name of its own with --served-model-name, or set RYZANSTEIN_ALLOW_APPROXIMATE_CONTINUATION=true."
        )


# Seconds between two beats of the event loop, or half the time between two heartbeats where that is longer.
LOOP_BEAT = 0.5
# Seconds between two times that the load is put on the board while steps follow each other: heartbeats and metrics,
# which read it there, come seldom.
LOAD_INTERVAL = 0.05


class RequestBatcher(AdapterBatcher, Protocol):
    """What a leader asks of whoever decides about its requests. No clock, no I/O."""

    interactive: int  # live requests that somebody waits for
    step: int  # the newest step, which frames name

    def knows(self, request: GenerationRequest) -> bool: ...

    def add(self, request: GenerationRequest, now: float) -> Refusal | None: ...

    def release(self, request: GenerationRequest, grammar: GrammarState | RyzansteinError) -> None: ...

    def cancel(self, generation_ids: list[str], attempt: int, claim: int) -> None: ...

    def claim(self, generation_ids: list[str], claim: int) -> None: ...

    def expire(self, now: float) -> bool: ...

    def fail_all(self, error: RyzansteinError) -> Entries: ...

    def take_entries(self) -> Entries: ...

    def load(self) -> GroupLoad: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def places(self) -> int: ...


class GroupLeader:
    """`_batcher` and `_throughput` are set by the kind of leader before anything else is called; the methods that say
    "of this kind of leader" are its own."""

    _batcher: RequestBatcher
    _throughput: Throughput  # from which schedulers estimate waiting times

    def __init__(
        self, settings: ExecutorSettings, spec: RankSpec, board: RingBoard, supervisor: SupervisorPipe
    ) -> None:
        self._settings = settings
        self._spec = spec
        self._board = board
        self._supervisor = supervisor
        self._model = served_name(settings)
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
        self._adapters: Adapters | None = None
        self._told_adapters: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._telling: asyncio.Task[None] | None = None
        self._republishing: asyncio.Task[None] | None = None
        self._activity = HostActivity(Path(spec.activity)) if spec.activity else None
        self._interactive = 0  # what the page of the host's activity says

    # --- of this kind of leader -------------------------------------------------------------------

    def _count(self) -> None:
        """Puts what it has counted on the board."""

    def _on_drain(self) -> None:
        """Nothing more is accepted."""

    def _on_undrain(self) -> None:
        """It serves on."""

    @property
    def _may_leave(self) -> bool:
        """Whether nothing keeps it, once everything was handed back."""
        return True

    def _look(self) -> None:
        """Once for each beat of the event loop."""

    # --- life ------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """To the supervisor, who may end the ring."""
        loop = asyncio.get_running_loop()
        self._supervisor.listen(lambda grace: loop.call_soon_threadsafe(self._leave, grace))

    async def _connect(self) -> None:
        self._bus = await Bus.connect(self._settings, subjects.leader_connection(self._spec.instance, self._spec.group))
        self._bus.on_reconnect(self._on_reconnect)
        self._bus.on_election(self._on_election)

    def _take_adapters(self, digest_of: Callable[[Path], str]) -> None:
        """Requests may have LoRA adapters. `digest_of`: as `Adapters` has it."""
        root = self._settings.model_cache.expanduser() / ".adapters"
        cache = AdapterCache(root, self._settings.adapter_cache_bytes)
        self._adapters = Adapters(self._model, cache, self._batcher, digest_of, self._wake.set)

    async def _close_adapters(self) -> None:
        if self._adapters is not None:
            await self._adapters.close()

    async def _drained(self) -> None:
        """All that was published is on its way."""
        await self._bus.flush()
        self._supervisor.send(Drained())

    async def _register(
        self, card: ModelCard, bundle: bytes, numerics: str, engine: EngineTraits, *, exact: bool
    ) -> ModelCard:
        """Tells the gateways of the model, and listens for requests. Returns the card as they have it."""
        fingerprint = fingerprint_of(self._settings, card, numerics)
        card = msgspec.structs.replace(card, fingerprint=fingerprint, exact=exact, engine=engine)
        self._fingerprint = fingerprint
        if not card.exact:
            log.info(
                "texts_not_exact",
                reason="sums may be rounded in another order beside other requests, after a prefix hit or a failover",
                numerics=numerics,
            )
        card, group = with_parsers(card, self._settings), self._spec.group
        await check_name(self._bus, card, group, mixed=self._settings.allow_approximate_continuation)
        if bundle:
            store = Objects(self._bus, subjects.TOKENIZERS_STORE)
            if await store.info(card.tokenizer) is None:
                await store.open()
                await store.put(card.tokenizer, bundle, fresh=True)
        await (await Bucket.open(self._bus, subjects.MODELS_BUCKET, ModelCard)).put(self._model, card)
        # Gateways take the tokenizer in meanwhile.
        await asyncio.to_thread(self._grammars.load, card, bundle)
        if self._adapters is not None:
            self._adapters.open(self._bus)
        await self._bus.subscribe(subjects.dispatch(group), DispatchBatch, self._on_dispatch)
        await self._bus.subscribe(subjects.control(group), ControlCommand, self._on_control)  # type: ignore[arg-type]
        return card

    async def _is_ready(self, ready: Ready) -> None:
        """From now on the group is counted on."""
        await self._bus.flush()
        freeze_gc_after_startup()
        self._board.set_state(RingState.READY)
        self._supervisor.send(ready)

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
            step_seconds=self._throughput.step_seconds,
            prompt_tokens_per_second=self._throughput.prompt_tokens_per_second,
        )

    def _report_load(self) -> None:
        """Puts the load, and what the ring has done so far, on the board."""
        self._reported_at = time.monotonic()
        self._board.set_load(self._load())
        self._count()

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
        self._on_drain()
        log.info("draining", group=self._spec.group)
        self._wake.set()

    def _undrain(self) -> bool:
        """Takes a drain back that is under way; False when the executor is about to end."""
        if self._leaving:
            return False
        if self._draining:
            self._draining = False
            self._on_undrain()
            self._board.set_state(RingState.READY)
            log.info("drain_cancelled", group=self._spec.group)
        return True

    async def _has_ended(self) -> bool:
        """Whether the group is drained: what has not finished in time is handed back.

        Raises `ConfigurationError` when a later ring has this group's name.
        """
        if self._replaced:
            raise ConfigurationError(
                f"Another executor now serves the group {self._spec.group}; this one exits. If both are "
                "to serve, give each a group of its own with --group."
            )
        if self._draining and (not self._batcher.has_work or time.monotonic() >= self._drain_by):
            if not self._handed_back:
                self._leaving = True
                await self._hand_back()
            return self._may_leave
        return False

    # --- to NATS ---------------------------------------------------------------------------------

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

    async def _beat(self) -> None:
        """Shows that the event loop turns, which a stopped process cannot; looks at the clock."""
        with contextlib.suppress(asyncio.CancelledError):
            interval = max(LOOP_BEAT, min(self._settings.beat_interval / 2, self._settings.hung_after / 6))
            while True:
                self._board.loop_beat(connected=self._bus.connected)
                if self._batcher.expire(time.time()):
                    self._wake.set()
                self._look()
                self._tell_adapters()
                await asyncio.sleep(interval)

    def _tell_adapters(self) -> None:
        """Tells the supervisor which adapters are in memory; lets go of files that nobody needs."""
        if self._adapters is None:
            return
        self._adapters.release_unused()
        if (held := self._batcher.adapters) != self._told_adapters:
            self._told_adapters = held
            self._supervisor.send(AdaptersHeld(held))
