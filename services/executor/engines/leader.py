"""The leader of a group whose engine schedules for itself.

    dispatch ──▶ requests.add          event loop
                 requests.take_submissions ──▶ engine.submit, engine.abort
    tokens  ◀── requests.update       ◀──────  engine.next         one after the other, as the engine tells

The board counts the engine's steps as those of rank 0, so that a busy engine is told from a hung one as a ring is; the
flight recorder has what the engine computes, so that requests that kill one engine after the other are found.
"""

import asyncio
import contextlib
import time
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import structlog

from services.executor.core.engine import EngineSpec, traits_of
from services.executor.core.settings import ExecutorSettings
from services.executor.core.step_plan import StepPlan
from services.executor.engines.base import EngineFacts, EngineStep, ServingEngine
from services.executor.engines.requests import EngineRequests, TrackedRequest, spec_of, traits_of_engine
from services.executor.ipc.board import RingBoard
from services.executor.ipc.flight_recorder import FlightRecorder
from services.executor.ipc.rank_pipe import RankSpec, Ready, SupervisorPipe
from services.executor.leader.diagnostics import MOST_QUEUED, ask_loop
from services.executor.leader.frames import output_tokens
from services.executor.leader.group_leader import LOAD_INTERVAL, LOOP_BEAT, GroupLeader
from services.executor.leader.step_loop import Throughput
from services.executor.model.card import read_card
from services.executor.model.catalogue import is_encoder
from services.executor.model.pooling import activation_of, labels_of, read_vectors
from services.executor.model.tokenizer_files import read_json
from services.executor.scheduler.batcher import Entries
from services.executor.supervisor.host.adapters import inspect_adapter
from shared.errors import ModelLoadError, NoGroupAvailable
from shared.messages import GenerationRequest, Refusal
from shared.messages.debugging import LeaderDump, QueuedDump

log = structlog.get_logger(__name__)


class EngineLeader(GroupLeader):
    _batcher: EngineRequests

    def __init__(
        self,
        settings: ExecutorSettings,
        spec: RankSpec,
        board: RingBoard,
        supervisor: SupervisorPipe,
        engine: ServingEngine,
        directory: Path,
    ) -> None:
        """`directory`: of the model's files, whose tokenizer the gateways have."""
        super().__init__(settings, spec, board, supervisor)
        self._engine = engine
        self._directory = directory
        self._rank = board.rank(0)
        self._plans = FlightRecorder.beside(Path(spec.board), spec.world_size).plans
        self._plan: set[str] = set()  # generations of the last plan
        self._plan_step = 0
        self._plan_since = 0.0
        self._ended = 0  # the last step that is over, as the board numbers them
        self._still = False  # whether nothing is to be expected of the step under way, as far as can be seen
        self._told_at = 0.0  # when the engine last told, or had nothing to do
        self._throughput = Throughput()

    async def run(self) -> None:
        """Starts the engine, serves until drained. Raises what makes the engine unusable."""
        self._listen()
        try:
            facts = await self._engine.start()
            spec = with_pooling(spec_of(facts, self._settings.block_size), facts, self._directory)
            card, bundle = await asyncio.to_thread(read_card, self._directory, self._model, spec)
            self._batcher = EngineRequests(
                facts, spec, max_waiting=self._settings.max_waiting, end_tokens=card.eos_token_ids, board=self._board
            )
            loop = asyncio.get_running_loop()
            self._supervisor.desk.on_state(lambda: ask_loop(loop, self._describe))
            if facts.adapters:
                self._take_adapters(self._adapter_digest)
            self._report_load()
            await self._connect()
            traits = traits_of(spec, traits_of_engine(facts, self._settings.computes_with))
            await self._register(card, bundle, facts.numerics, traits.engine, exact=facts.exact)
            ready = Ready(self._model, kernels=facts.name, traits=traits)
            await self._is_ready(ready)
            log.info("leader_ready", group=self._spec.group, model=self._model, kernels=facts.name, places=facts.places)
            await self._serve()
        finally:
            await self._close_adapters()
            await self._engine.stop()
            self._grammars.close()

    def _adapter_digest(self, directory: Path) -> str:
        """Checked against the model in a process of its own, as when it was registered: what does not fit may end the
        engine."""
        return inspect_adapter(directory, self._directory, self._settings.max_adapter_rank).digest

    # --- life ------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Until the group is drained. Raises `RingLost` where the engine is gone."""
        beating = asyncio.create_task(self._beat())
        reading = asyncio.create_task(self._read())
        reading.add_done_callback(lambda _: self._wake.set())
        try:
            while not await self._has_ended():
                if reading.done():
                    reading.result()
                self._hand_out()
                self._gathering.add(self._batcher.take_entries())
                await self._tell_when_due()
                self._show_activity()
                self._report_load()
                await self._wake.wait()
                self._wake.clear()
            await self._drained()
        finally:
            for task in (beating, reading):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(beating, reading, return_exceptions=True)
            await self._bus.close()

    def _hand_out(self) -> None:
        """Gives the engine what it has places for."""
        was_busy = self._batcher.busy
        for request in self._batcher.take_submissions(time.monotonic()):
            self._engine.submit(request)
        if aborts := self._batcher.take_aborts():
            self._engine.abort(aborts)
        if not was_busy:
            self._told_at = time.monotonic()
        if not self._still:  # else the step stays open, also where all that it computed were withdrawn because of that
            self._mark()

    async def _read(self) -> None:
        """What the engine tells, as it comes."""
        while True:
            step = await self._engine.next()
            before = self._batcher.step
            entries = self._batcher.update(step, time.monotonic())
            self._note(step, step.steps - before, entries)
            self._gathering.add(entries)
            await self._tell_when_due()
            if time.monotonic() - self._reported_at >= LOAD_INTERVAL:
                self._show_activity()
                self._report_load()
            if any(entry.finish for of_consumer in entries.values() for entry in of_consumer):
                self._wake.set()  # there is a place, and the engine may not know

    def _add(self, request: GenerationRequest) -> Refusal | None:
        if self._still:
            reason = f"The engine of the group {self._spec.group} stands still; another takes the request."
            return Refusal(request.generation_id, NoGroupAvailable.code, reason, retryable=True)
        return super()._add(request)

    def _look(self) -> None:
        if self._draining:  # its time may be over
            self._wake.set()
        quiet, longest = time.monotonic() - self._told_at, self._settings.engine_step_timeout
        self._still = self._board.begun(0) > self._ended and stands_still(quiet, longest, self._engine.is_stopped)
        if self._batcher.busy and not self._still:
            self._rank.progress.tick()  # a step may take longer than a layer of a ring's

    # --- what is noted ---------------------------------------------------------------------------

    def _note(self, step: EngineStep, steps: int, entries: Entries) -> None:
        """The engine has computed `steps` steps since it told last."""
        if steps <= 0:
            return
        now = time.monotonic()
        taken, self._told_at = now - self._told_at, now
        computed = self._batcher.take_prompt_tokens()
        self._throughput.observe(taken / steps, computed)
        self._board.add_step(round(taken * 1e9), computed, output_tokens(entries), step.running)
        self._end_step()
        self._still = False
        self._mark()

    def _end_step(self) -> None:
        self._ended = self._board.begun(0)
        self._rank.end(self._ended)

    def _mark(self) -> None:
        """On the board: whether a step is under way; in the flight recorder: whose."""
        if not self._batcher.busy:
            self._end_step()
            self._throughput.rest()
            self._end_plan()
            self._plan = set()
            return
        if self._board.begun(0) <= self._ended:
            self._rank.begin(self._ended + 1)
        requests = self._batcher.under_way
        ids = {one.generation_id for one in requests}
        if ids != self._plan:
            self._end_plan()
            self._plan, self._plan_step, self._plan_since = ids, self._plan_step + 1, time.monotonic()
            self._plans.add(_plan_of(self._plan_step, len(ids)), sorted(ids), self._settings.block_size)

    def _end_plan(self) -> None:
        if self._plan:
            self._plans.took(self._plan_step, max(1e-9, time.monotonic() - self._plan_since))

    def _describe(self, by_loop: bool) -> LeaderDump:
        return describe_requests(self._batcher.look(), time.monotonic(), by_loop)

    def _count(self) -> None:
        totals = self._board.totals
        totals.cached_tokens, totals.preemptions = self._batcher.cached_tokens, self._batcher.preemptions


def describe_requests(requests: list[TrackedRequest], now: float, by_loop: bool) -> LeaderDump:
    """`now`: of the clock by which they were taken on."""
    queues = []
    for one in requests[:MOST_QUEUED]:
        request = one.request
        queues.append(
            QueuedDump(
                generation_id=request.generation_id,
                request_id=request.request_id,
                state=one.state,
                lane=request.lane,
                attempt=request.attempt,
                age=round(now - one.accepted_at, 3),
                prompt_tokens=len(request.prompt),
                output_tokens=len(one.output),
                computed=0,
                blocks=0,
                session=bool(request.session),
            )
        )
    counts = Counter(name for one in requests for name in (one.state, f"{one.state} {one.request.lane}"))
    return LeaderDump(queues, dict(counts), by_loop=by_loop)


def with_pooling(spec: EngineSpec, facts: EngineFacts, directory: Path) -> EngineSpec:
    """`spec` with what the model in `directory` gives beside tokens, or in their place. Raises `ModelLoadError`."""
    if facts.tasks == ("generate",):
        return spec
    config = read_json(directory / "config.json")
    found = msgspec.structs.replace(spec, whole_prompts=is_encoder(config))
    if "embed" in facts.tasks:
        vectors = read_vectors(directory, dense=True)
        found = msgspec.structs.replace(
            found, pooling=vectors.pooling, normalized=vectors.normalized, embedding_size=facts.embedding_size
        )
    if "classify" in facts.tasks:
        named = dict(enumerate(facts.labels)) if any(facts.labels) else _classes_in(config, len(facts.labels))
        described = SimpleNamespace(**(config | {"num_labels": len(facts.labels), "id2label": named}))
        found = msgspec.structs.replace(found, labels=labels_of(described), activation=activation_of(described))
    return found


def _classes_in(config: dict[str, Any], classes: int) -> dict[int, str]:
    """Names in config.json, where it has so many `classes`. Raises `ModelLoadError`."""
    named = {int(at): str(name) for at, name in (config.get("id2label") or {}).items() if at.isdecimal()}
    if (found := len(named) or 2) != classes:  # 2: transformers' default, without names
        raise ModelLoadError(
            f"The engine gives {classes} classes, where the model's config.json has {found}: point the group at the "
            "model that runs there."
        )
    return named


def stands_still(quiet: float, longest: float, is_stopped: Callable[[], bool]) -> bool:
    """Whether nothing is to be expected of an engine that told last `quiet` seconds ago, and may take `longest` for a
    step. To look at all of its processes takes a while, in which no token is told: not while steps follow each other.
    """
    return quiet >= longest or (quiet >= LOOP_BEAT and is_stopped())


def _plan_of(step: int, sequences: int) -> StepPlan:
    """A plan that says how many sequences it has, and nothing else: what they are made of only the engine knows."""
    ones = array("i", [1] * sequences).tobytes()
    return StepPlan(step, sequences, ones, b"", b"", ones, ones, b"", ones)
