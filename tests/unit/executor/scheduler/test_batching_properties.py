"""Continuous batching under any order of requests, cancellations, failures, steps and returns.

Steps are planned ahead where they may be, or not, as it happens: the texts must be the same.
The fake rank executes every plan on a model of its memory: whatever moves to a quantized block, to a spill
slot and back, each sequence must read exactly its own tokens.
"""

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec import structs

from services.executor.core.engine import BadLogits, DraftPlan, EngineSpec, RestoreFailed, SampledToken
from services.executor.core.sampling_state import SamplingState
from services.executor.core.step_plan import StepPlan
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Entries, Scheduler
from services.executor.scheduler.sequence import Sequence
from services.executor.scheduler.steps import SampledRow
from services.executor.worker.launches import Launches
from shared.errors import InternalError
from shared.messages import LANES, GenerationRequest, SamplingParams
from tests.unit.executor.scheduler.drafts.fake_draft_model import FakeDraftModel
from tests.unit.executor.scheduler.drafts.fake_drafter import FakeDrafter
from tests.unit.executor.scheduler.fake_engine import VOCAB, FakeEngine, undisturbed

BLOCK = 4

requests = st.builds(
    GenerationRequest,
    generation_id=st.integers(0, 11).map(str),
    request_id=st.just("r"),
    model=st.just("m"),
    consumer=st.sampled_from(["gateway-a", "gateway-b"]),
    # Few beginnings, so that prefixes are shared.
    prompt=st.builds(
        lambda start, n: [(start + i // 3) % VOCAB for i in range(n)], st.integers(0, 2), st.integers(1, 30)
    ),
    max_tokens=st.integers(1, 14),
    sampling=st.builds(SamplingParams, seed=st.integers(0, 5)),
    stop_token_ids=st.sampled_from([[], [3, 7, 11]]),
    session=st.sampled_from(["", "", "x", "y", "z"]),
    lane=st.sampled_from(LANES),
    cache_salt=st.sampled_from(["", "", "s", "t"]),
    attempt=st.integers(0, 2),
    suspected=st.sampled_from(["", "", "", "crashed"]),
)


SEEDED = st.builds(random.Random, st.integers(0, 1000))


def specs(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[EngineSpec]:
    return st.builds(EngineSpec, block_size=st.just(BLOCK), vocab_size=st.just(VOCAB), **fields)


def batches(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[BatchSettings]:
    return st.builds(BatchSettings, max_sequences=st.integers(1, 4), max_waiting=st.just(8), **fields)


class BatcherMachine(RuleBasedStateMachine):
    """A tiny pool of blocks, so that preemption, eviction and spilling are the rule."""

    @initialize(
        spec=specs(
            num_blocks=st.integers(2, 12),
            num_quantized=st.sampled_from([0, 0, 3, 6, 12]),
            num_host=st.sampled_from([0, 3, 12]),
            num_disk=st.sampled_from([0, 4, 20]),
            copies_per_step=st.integers(1, 6),
            context_length=st.integers(16, 60),
        ),
        settings=batches(
            max_batch_tokens=st.integers(4, 20),
            session_ttl=st.sampled_from([0.0, 5.0, 100.0]),
            max_drafts=st.sampled_from([0, 0, 1, 3, 9]),
            prefill_stretch=st.sampled_from([0.0, 1.5]),
        ),
        lookahead=st.booleans(),
        rng=st.randoms(use_true_random=False),
    )
    def build(self, spec: EngineSpec, settings: BatchSettings, lookahead: bool, rng: random.Random) -> None:
        least = 2 if spec.num_quantized else 5
        self.begin(structs.replace(spec, num_blocks=max(spec.num_blocks, least)), settings, lookahead, rng)

    def begin(self, spec: EngineSpec, settings: BatchSettings, lookahead: bool, rng: random.Random) -> None:
        self.spec, self.settings = spec, settings
        # Drafts are right or wrong as it happens: the text must be the same.
        self.drafter = FakeDrafter(self.spec, self.settings, rng) if settings.max_drafts else None
        self.batcher = Scheduler(self.spec, self.settings, "m", self.drafter)
        self.engine = FakeEngine(self.spec)
        self.draft_model = FakeDraftModel(self.engine, rng)
        self.round: tuple[DraftPlan, list[SampledRow]] | None = None  # of the draft model, under way
        self.launches = Launches(self.compute)
        self.lookahead = lookahead
        self.now = 0.0
        self.flying: deque[tuple[StepPlan, list[SampledRow]]] = deque()
        self.open: dict[tuple[str, int], tuple[GenerationRequest, list[int]]] = {}
        self.newest: dict[str, int] = {}
        self.interfered: set[tuple[str, int]] = set()
        self.replaced: set[tuple[str, int]] = set()
        self.turns: list[tuple[str, list[int]]] = []

    @property
    def capacity(self) -> int:
        return self.spec.capacity

    @rule(request=requests, continued=st.integers(0, 3))
    def add(self, request: GenerationRequest, continued: int) -> None:
        if request.attempt:
            generated = undisturbed(request, continued)
            request = structs.replace(request, generated=generated)
        known = self.newest.get(request.generation_id, -1)
        refusal = self.batcher.add(request)
        if request.attempt <= known:
            assert refusal is None
            return
        for key in [key for key in self.open if key[0] == request.generation_id]:
            del self.open[key]
            self.replaced.add(key)
        total = len(request.prompt) + len(request.generated)
        if refusal is None:
            self.newest[request.generation_id] = request.attempt
            self.open[request.generation_id, request.attempt] = (request, list(request.generated))
        else:
            assert refusal.retryable == (refusal.code == "queue_full")
            longest = min(self.spec.context_length - 1, self.capacity)
            assert (refusal.code == "context_length_exceeded") == (total > longest)

    @precondition(lambda self: self.turns)
    @rule(request=requests, data=st.data(), new=st.integers(1, 6))
    def come_back(self, request: GenerationRequest, data: st.DataObject, new: int) -> None:
        """A session's next turn: all that was said, and something new."""
        session, said = data.draw(st.sampled_from(self.turns))
        name = f"turn-{len(self.newest)}"
        prompt = said + [(new + i) % VOCAB for i in range(new)]
        self.add(structs.replace(request, generation_id=name, session=session, prompt=prompt, attempt=0), 0)

    @rule(ids=st.lists(st.integers(0, 11).map(str), min_size=1, max_size=3))
    def cancel(self, ids: list[str]) -> None:
        self.interfered |= {(i, self.newest[i]) for i in ids if i in self.newest}
        self.batcher.cancel(ids)

    @rule(seconds=st.sampled_from([1.0, 4.0, 50.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.engine.spilled)
    @rule(data=st.data())
    def lose_bytes(self, data: st.DataObject) -> None:
        """What a rank has spilled becomes unreadable."""
        self.engine.unreadable |= data.draw(st.sets(st.sampled_from(sorted(self.engine.spilled))))

    @precondition(lambda self: not self.flying and self.round is None and self.spec.drafts)
    @rule()
    def begin_round(self) -> None:
        preemptions = self.batcher.preemptions
        self.round = self.batcher.plan_drafts(self.now)
        assert self.batcher.preemptions == preemptions

    @precondition(lambda self: self.round is not None)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def end_round(self, fails: bool = False) -> None:
        assert self.round is not None
        (plan, rows), self.round = self.round, None
        drafted = self.draft_model.draft(plan, [row.sampling for row in rows])
        if fails:
            self.batcher.drop_drafts()
        else:
            self.batcher.take_drafts(drafted)
        self.receive(self.batcher.take_entries())

    def compute(self, plan: StepPlan, samples: list[SamplingState]) -> list[SampledToken]:
        """A step of the engine, and of the draft model beside it."""
        self.draft_model.copy(plan)
        try:
            return self.engine.execute(plan, samples)
        finally:
            self.draft_model.step(plan)

    @precondition(lambda self: not self.flying and self.round is None)
    @rule()
    def schedule(self) -> None:
        running, placeable = list(self.batcher._planner.running), self.placeable()
        scheduled = self.batcher.schedule(self.now)
        if scheduled is None:
            self.receive(self.batcher.take_entries())
            return
        self.flying.append(scheduled)
        self.check_isolation()
        self.check_lanes(running, placeable)

    @precondition(lambda self: len(self.flying) == 1 and self.lookahead)
    @rule()
    def look_ahead(self) -> None:
        preemptions = self.batcher.preemptions
        scheduled = self.batcher.schedule_ahead(self.now)
        assert self.batcher.preemptions == preemptions
        if scheduled is not None:
            assert scheduled[0].step == self.flying[0][0].step + 1
            self.check_isolation()
            assert scheduled[0].restores + scheduled[0].adoptions + scheduled[0].handover == b""
            self.flying.append(scheduled)

    def check_isolation(self) -> None:
        """A suspect is the only one in its step."""
        computed = [chunk.sequence for chunk in self.batcher.under_way]
        assert len(computed) == 1 or not any(sequence.alone for sequence in computed)

    def placeable(self) -> Sequence | None:
        """The first that waits and is not of the batch lane, where that has what it needs."""
        planner = self.batcher._planner
        lent = [s for s in planner.running if s.is_batch]
        first = next((s for s in planner.waiting if not s.is_batch), None)
        could = first is not None and self.batcher._tables.could_allocate(first, planner.running, lent)
        return first if could else None

    def check_lanes(self, before: list[Sequence], placeable: Sequence | None) -> None:
        """A step has something of the batch lane only where it leaves nobody more urgent without a place or
        a token that the batch lane could have given. `before`: those that ran before it was planned;
        `placeable` then. What gets room only because the step gives some up has it in the next one."""
        planner = self.batcher._planner
        chunks = {chunk.sequence: chunk for chunk in self.batcher.under_way}
        if not any(s.is_batch for s in chunks):
            return
        if any(s.alone for s in (*before, *planner.running, *planner.waiting)):
            return  # steps are taken in turns
        for sequence, chunk in chunks.items():
            short = not sequence.is_batch and not chunk.samples and not (planner.paced and sequence.is_long)
            cut = chunk.end % BLOCK in ((0, BLOCK - 1) if self.spec.num_quantized else (0,))
            assert not short or cut, "a prompt is cut though tokens were left"
        preempted = [s for s in before if not s.is_batch and s not in planner.running]
        if not preempted and placeable is not None:
            assert self.placeable() is not placeable, "batch work is in the way"

    @precondition(lambda self: self.flying)
    @rule()
    def update(self) -> None:
        sampled = self.execute()
        if sampled is not None:
            tokens = sum(chunk.width for chunk in self.batcher.under_way)
            self.receive(self.batcher.update(sampled, 0.01 * (2 + tokens)))

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """The step is computed, and some rows are no numbers."""
        _, sequences = self.flying[0]
        rows = data.draw(st.sets(st.integers(0, len(sequences) - 1))) if sequences else set()
        self.engine.bad_rows = rows
        try:
            if self.execute() is None:
                self.engine.bad_rows = set()
                return
        except BadLogits:
            pass
        self.execute_in_vain()
        self.interfered |= {
            (sequences[row].request.generation_id, sequences[row].request.attempt)
            for row in rows
            if not sequences[row].ahead
        }
        self.receive(self.batcher.fail_step(InternalError("NaN"), rows))

    @rule(count=st.integers(2, 12))
    def steps(self, count: int) -> None:
        """Several steps in a row: without them a schedule seldom comes to memory pressure."""
        for _ in range(count):
            self.draft()
            if not self.flying:
                self.schedule()
            if len(self.flying) == 1 and self.lookahead:
                self.look_ahead()
            self.holds()
            if self.flying:
                self.update()
            self.holds()

    def draft(self) -> None:
        """A whole round, where there may be one."""
        if not self.flying and self.round is None and self.spec.drafts:
            self.begin_round()
        if self.round is not None:
            self.end_round()

    def execute(self) -> list[SampledToken] | None:
        """None when the step was not computed, since a restore failed."""
        plan, sequences = self.flying.popleft()
        try:
            return self.launches.launch(plan, [s.sampling for s in sequences]).result()
        except RestoreFailed as error:
            self.execute_in_vain()
            self.receive(self.batcher.fail_restores(error.slots))
            return None

    def execute_in_vain(self) -> None:
        """The step behind one that has failed."""
        while self.flying:
            plan, sequences = self.flying.popleft()
            self.launches.launch(plan, [s.sampling for s in sequences]).result()

    def receive(self, entries: Entries) -> None:
        for consumer, batch in entries.items():
            for entry in batch:
                key = (entry.generation_id, entry.attempt)
                if key in self.replaced:
                    assert entry.finish, "a replaced attempt goes on"  # it ended before it was replaced
                    continue
                assert key in self.open, "an entry of nobody, or of an ended generation"
                request, output = self.open[key]
                assert request.consumer == consumer
                assert entry.position == len(output), "a gap or a repeat"
                assert entry.cached_tokens <= len(request.prompt)
                output += entry.tokens
                if entry.finish:
                    del self.open[key]
                    self.verify_end(request, output, entry.finish, entry.error_code)

    def verify_end(self, request: GenerationRequest, output: list[int], finish: str, code: str) -> None:
        assert output == undisturbed(request, len(output)), "the text is not the undisturbed run's"
        key = (request.generation_id, request.attempt)
        total = len(request.prompt) + len(output)
        if finish == "stop":
            assert output[-1] in request.stop_token_ids
        elif finish == "length":
            assert len(output) >= request.max_tokens or total >= self.spec.context_length
        elif finish == "cancelled" or code == "internal_error":
            assert key in self.interfered
        else:
            assert code == "context_length_exceeded"
            assert total > self.capacity
        if request.session and len(self.turns) < 8:
            self.turns.append((request.session, request.prompt + output))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "batcher"):
            self.batcher.check()
            assert self.engine.largest <= self.settings.max_batch_tokens

    def teardown(self) -> None:
        if not hasattr(self, "batcher"):
            return
        while self.flying:
            self.update()
        steps = 0
        while self.batcher.has_work or self.flying or self.round is not None:
            self.draft()
            if not self.flying:
                self.schedule()
            assert self.flying or not self.batcher.has_work, "work that is never scheduled"
            if len(self.flying) == 1 and self.lookahead:
                self.look_ahead()
            if self.flying:
                self.update()
            steps += 1
            assert steps < 3000, "livelock"
        assert not self.open, "an accepted generation never ended"
        self.batcher.check()
        load = self.batcher.load()
        assert load.free_blocks == load.total_blocks
        assert self.batcher._tables.states.used == 0
        assert (load.running, load.waiting, load.waiting_tokens) == (0, 0, 0)


class RecurrentBatcherMachine(BatcherMachine):
    """Of a model that keeps recurrent state: few slots, and room for some snapshots."""

    @initialize(
        spec=specs(
            num_states=st.integers(1, 6),
            draft_states=st.sampled_from([0, 1, 4, 20]),
            state_blocks=st.integers(1, 3),
            num_blocks=st.integers(4, 12),
            num_quantized=st.integers(4, 40),
            num_host=st.sampled_from([0, 6, 30]),
            num_disk=st.sampled_from([0, 20]),
            copies_per_step=st.integers(1, 6),
            context_length=st.integers(30, 120),
            drafts=st.booleans(),
        ),
        settings=batches(
            max_batch_tokens=st.integers(4, 40),
            session_ttl=st.sampled_from([0.0, 100.0]),
            max_drafts=st.sampled_from([0, 1, 3, 9]),
        ),
        lookahead=st.booleans(),
        rng=SEEDED,
    )
    def build(self, spec: EngineSpec, settings: BatchSettings, lookahead: bool, rng: random.Random) -> None:
        """There are no slots for states behind drafts without these."""
        drafts = min(settings.max_drafts, spec.draft_states)
        self.begin(spec, structs.replace(settings, max_drafts=drafts), lookahead, rng)

    @rule(request=requests, start=st.integers(0, 2), length=st.integers(17, 60), steps=st.integers(0, 8))
    def ask_alike(self, request: GenerationRequest, start: int, length: int, steps: int) -> None:
        """A long prompt that begins as others do, and another one like it some steps later."""
        prompt = [(start + i // 3) % VOCAB for i in range(length)]
        for turn in range(2):
            name = f"alike-{len(self.newest)}"
            self.add(structs.replace(request, generation_id=name, prompt=[*prompt, turn], attempt=0), 0)
            self.steps(steps)


class DraftingBatcherMachine(BatcherMachine):
    """Of a ring with a draft model, which is used, or not, as it happens."""

    @initialize(
        spec=specs(
            num_blocks=st.integers(5, 20),
            num_quantized=st.sampled_from([0, 0, 6, 12, 20]),
            num_host=st.sampled_from([0, 12]),
            copies_per_step=st.integers(1, 6),
            context_length=st.just(60),
            drafts=st.just(True),
        ),
        settings=batches(
            max_batch_tokens=st.integers(8, 40), session_ttl=st.sampled_from([0.0, 100.0]), max_drafts=st.integers(1, 9)
        ),
        lookahead=st.booleans(),
        rng=SEEDED,
    )
    def build(self, spec: EngineSpec, settings: BatchSettings, lookahead: bool, rng: random.Random) -> None:
        self.begin(spec, settings, lookahead, rng)

    @rule(request=requests, tokens=st.integers(8, 40), steps=st.integers(1, 8))
    def write_long(self, request: GenerationRequest, tokens: int, steps: int) -> None:
        """A text that goes through several blocks."""
        self.add(structs.replace(request, max_tokens=tokens, suspected="", stop_token_ids=[]), 0)
        self.steps(steps)


ADAPTERS = ["aa" * 32, "bb" * 32, "cc" * 32, "dd" * 32]


class AdapterBatcherMachine(BatcherMachine):
    """Fewer slots than adapters, whose files come and go."""

    @initialize(
        spec=specs(
            max_adapters=st.integers(1, 3),
            num_blocks=st.integers(5, 14),
            num_quantized=st.sampled_from([0, 0, 6, 12]),
            num_host=st.sampled_from([0, 6]),
            context_length=st.integers(20, 60),
        ),
        settings=batches(
            max_batch_tokens=st.integers(4, 30), session_ttl=st.just(5.0), max_drafts=st.sampled_from([0, 0, 3])
        ),
        lookahead=st.booleans(),
        rng=st.randoms(use_true_random=False),
    )
    def build(self, spec: EngineSpec, settings: BatchSettings, lookahead: bool, rng: random.Random) -> None:
        self.there: set[str] = set()
        self.begin(spec, settings, lookahead, rng)

    @rule(request=requests, adapter=st.sampled_from(ADAPTERS), continued=st.integers(0, 3))
    def add_with_adapter(self, request: GenerationRequest, adapter: str, continued: int) -> None:
        self.add(structs.replace(request, adapter=adapter), continued)

    @rule(adapter=st.sampled_from(ADAPTERS))
    def fetched(self, adapter: str) -> None:
        self.batcher.adapter_ready(adapter, adapter)
        self.there.add(adapter)

    @rule(adapter=st.sampled_from(ADAPTERS))
    def deleted(self, adapter: str) -> None:
        if adapter not in self.batcher.adapters_in_use:
            self.batcher.adapter_gone(adapter)

    @rule(adapter=st.sampled_from(ADAPTERS))
    def not_to_be_had(self, adapter: str) -> None:
        held = [s.request for s in self.batcher._held.values() if s.request.adapter == adapter]
        self.interfered |= {(one.generation_id, one.attempt) for one in held}
        self.batcher.adapter_failed(adapter, InternalError("gone"))

    def placeable(self) -> Sequence | None:
        return None  # whoever has room may still wait for a slot

    def teardown(self) -> None:
        if hasattr(self, "batcher"):
            for adapter in ADAPTERS:
                self.batcher.adapter_ready(adapter, adapter)
        super().teardown()


# And their steps.
MACHINES = {AdapterBatcherMachine: 50, DraftingBatcherMachine: 50, BatcherMachine: 60, RecurrentBatcherMachine: 40}


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
@pytest.mark.parametrize(
    ("examples", "longer"),
    [pytest.param(25, 0, id="shortly"), pytest.param(300, 60, marks=pytest.mark.nightly, id="for longer")],
)
def test_batcher(machine: type[RuleBasedStateMachine], examples: int, longer: int) -> None:
    steps = longer or MACHINES[machine]
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=steps))
