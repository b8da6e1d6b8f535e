"""The leader's steps, one after the other and one ahead, with an engine that checks its memory."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.executor.core.engine import BadLogits, DraftPlan, DraftToken, EngineSpec, Launched, SampledToken
from services.executor.core.sampling_state import SamplingState
from services.executor.core.step_plan import StepPlan
from services.executor.ipc.board import RingBoard
from services.executor.ipc.flight_recorder import FlightRecorder
from services.executor.ipc.rank_pipe import RankSpec
from services.executor.leader.diagnostics import LeaderDebug
from services.executor.leader.step_loop import EngineLoop, looks_ahead
from services.executor.leader.tracing import Attempts
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Entries, Scheduler
from services.executor.scheduler.drafts.drafting import Drafter
from services.executor.scheduler.drafts.proposers.catalog import PROPOSERS
from services.executor.scheduler.drafts.speculation import StepCost
from services.executor.structured_output import GrammarWork
from services.executor.worker.launches import Launches
from shared.errors import RingLost
from tests.unit.executor.scheduler.drafts.fake_draft_model import FakeDraftModel
from tests.unit.executor.scheduler.drafts.fake_drafter import DevotedPolicy, engine_of
from tests.unit.executor.scheduler.fake_engine import VOCAB, FakeEngine, undisturbed
from tests.unit.executor.scheduler.stepped_ring import BLOCK, ask


class NotedEngine:
    """`Engine`, as far as steps go: what it was asked for, in order."""

    def __init__(self, spec: EngineSpec) -> None:
        self.fake = FakeEngine(spec)
        self._launches = Launches(self._execute)
        self.noted: list[tuple[str, int]] = []
        self.bad: dict[int, set[int]] = {}  # rows that are no numbers, by step
        self.lost_at = 0
        self.model = FakeDraftModel(self.fake, random.Random(5), right=1.0)
        self.bad_round = 0  # the step whose round is no numbers

    def draft(self, plan: DraftPlan, samples: Sequence[SamplingState]) -> list[list[DraftToken]]:
        self.noted.append(("draft", plan.plan.step))
        if plan.plan.step == self.bad_round:
            raise BadLogits([0])
        return self.model.draft(plan, list(samples))

    def execute(self, plan: StepPlan, samples: Sequence[SamplingState]) -> list[SampledToken]:
        self.noted.append(("execute", plan.step))
        return self._execute(plan, samples)

    def launch(self, plan: StepPlan, samples: Sequence[SamplingState]) -> Launched:
        self.noted.append(("launch", plan.step))
        return self._launches.launch(plan, samples)

    def _execute(self, plan: StepPlan, samples: Sequence[SamplingState]) -> list[SampledToken]:
        if ("launch", plan.step) in self.noted:
            self.noted.append(("result", plan.step))
        if plan.step == self.lost_at:
            raise RingLost("A rank is gone.")
        self.fake.bad_rows = self.bad.get(plan.step, set())
        self.model.copy(plan)
        try:
            return self.fake.execute(plan, list(samples))
        finally:
            self.model.step(plan)


class EvenCost(StepCost):
    """Every step takes as long, whatever else runs on this machine: drafts always pay."""

    def observe(self, tokens: int, seconds: float) -> None:
        super().observe(tokens, 1.0)


class Ring:
    """A batcher, its steps and what they have given."""

    def __init__(self, directory: Path, *, lookahead: bool, drafts: int = 0) -> None:
        self.spec = EngineSpec(BLOCK, 64, 200, VOCAB, drafts=drafts > 0)
        board = RingBoard(directory / "board", 1, create=True)
        self.flight = FlightRecorder.beside(directory / "board", 1, create=True)
        settings = BatchSettings(16, 4, max_drafts=drafts)
        drafter = Drafter(self.spec, settings, PROPOSERS)
        if drafts:
            engine_of(drafter).policy = DevotedPolicy(drafts)
        drafter._speculation.cost = EvenCost()
        self.batcher = Scheduler(self.spec, settings, drafter=drafter)
        self.engine = NotedEngine(self.spec)
        self.grammars = GrammarWork()
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.told = 0
        self.text: dict[str, list[int]] = {}
        self.board = board
        self.steps = EngineLoop(
            self.engine,  # type: ignore[arg-type]
            self.thread,
            self.batcher,
            self.grammars,
            Attempts("g", 1, board.times),
            board,
            LeaderDebug(RankSpec(0, 1, "g", "i", 1, str(directory / "board"), {}), self.batcher, self.spec, "off"),
            lookahead=lookahead,
            meanwhile=self._tell,
        )

    async def _tell(self) -> None:
        self.told += 1
        await asyncio.sleep(0)

    async def run(self, *, ahead: bool = True) -> None:
        while self.batcher.has_work:
            await self.steps.draft()
            assert self.steps.plan()
            while self.steps.under_way:
                self.take(await self.steps.finish(ahead=ahead))
        self.batcher.check()

    def take(self, entries: Entries) -> None:
        for batch in entries.values():
            for entry in batch:
                self.text.setdefault(entry.generation_id, []).extend(entry.tokens)

    def close(self) -> None:
        self.thread.shutdown()
        self.grammars.close()


@pytest.fixture(params=[False, True], ids=["one after the other", "ahead"])
async def ring(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ring]:
    made = Ring(tmp_path, lookahead=request.param)
    yield made
    made.close()


def add(ring: Ring) -> list[tuple[str, list[int]]]:
    """Requests, and what they are to give."""
    requests = [ask("a", 5, 9), ask("bb", 7, 12), ask("ccc", 3, 5)]
    stop = undisturbed(requests[1], 6)[-1]
    requests[1] = ask("bb", 7, 12, stop_token_ids=[stop])
    for one in requests:
        assert ring.batcher.add(one) is None
    return [(one.generation_id, undisturbed(one, one.max_tokens)) for one in requests]


async def test_every_step_is_computed_once_and_noted(ring: Ring) -> None:
    expected = add(ring)
    await ring.run()
    assert ring.text == dict(expected)
    kinds = {kind for kind, _ in ring.engine.noted}
    assert kinds == ({"launch", "result"} if ring.steps.lookahead else {"execute"})
    plans = ring.flight.plans.read()
    assert [plan.step for plan in plans] == list(range(1, ring.batcher.step + 1))
    assert all(plan.ms > 0 for plan in plans)
    totals = ring.board.totals
    assert totals.steps == ring.told == ring.batcher.step
    assert totals.output_tokens == sum(len(text) for _, text in expected)


async def test_the_next_step_is_launched_before_the_one_under_way_is_over(tmp_path: Path) -> None:
    ring = Ring(tmp_path, lookahead=True)
    assert ring.batcher.add(ask("a", 5, 4)) is None
    await ring.run()
    # The fourth token is the last one, which nothing comes behind.
    assert ring.engine.noted == [
        ("launch", 1),
        ("launch", 2),
        ("result", 1),
        ("launch", 3),
        ("result", 2),
        ("launch", 4),
        ("result", 3),
        ("result", 4),
    ]
    ring.close()


async def test_a_ring_that_leaves_launches_nothing_ahead(tmp_path: Path) -> None:
    ring = Ring(tmp_path, lookahead=True)
    expected = add(ring)
    assert ring.steps.plan()
    ring.take(await ring.steps.finish(ahead=True))
    assert ring.steps.under_way
    ring.take(await ring.steps.finish(ahead=False))
    assert not ring.steps.under_way
    await ring.run(ahead=False)
    assert ring.text == dict(expected)
    ring.close()


@pytest.mark.parametrize("step", range(1, 8))
async def test_rows_that_are_no_numbers_end_their_own_sequences_only(ring: Ring, step: int) -> None:
    expected = dict(add(ring))
    ring.engine.bad[step] = {0}
    await ring.run()
    broken = [name for name, text in expected.items() if ring.text.get(name, []) != text]
    assert len(broken) == 1
    [name] = broken
    assert ring.text.get(name, []) == expected[name][: len(ring.text.get(name, []))]
    assert ring.batcher.load().free_blocks == 64


async def test_a_lost_rank_ends_the_ring(ring: Ring) -> None:
    add(ring)
    ring.engine.lost_at = 3
    with pytest.raises(RingLost):
        await ring.run()


@pytest.mark.parametrize("lookahead", [False, True])
async def test_rounds_of_the_draft_model_come_between_steps(tmp_path: Path, lookahead: bool) -> None:
    ring = Ring(tmp_path, lookahead=lookahead, drafts=3)
    expected = dict(add(ring))
    await ring.run()
    assert ring.text == expected
    counts, totals = ring.batcher.drafter.engine_counts, ring.board.totals
    assert 3 < counts.accepted <= counts.drafted, "a stop token cuts what is right"
    assert counts.seconds > 0
    rounds = [step for kind, step in ring.engine.noted if kind == "draft"]
    assert counts.passes == ring.batcher.step - totals.steps
    assert ring.told == totals.steps + len(rounds), "tokens go out meanwhile"
    plans = {plan.step: plan for plan in ring.flight.plans.read()}
    assert set(rounds) <= set(plans)
    assert all(plan.ms > 0 for plan in plans.values())
    ring.close()


async def test_a_round_that_is_no_numbers_is_done_without(tmp_path: Path) -> None:
    ring = Ring(tmp_path, lookahead=False, drafts=3)
    expected = dict(add(ring))
    ring.engine.bad_round = 2
    await ring.run()
    assert ring.text == expected
    assert [step for kind, step in ring.engine.noted if kind == "draft"] == [2]
    assert ring.batcher.load().free_blocks == 64
    ring.close()


@pytest.mark.parametrize(
    ("setting", "overlaps", "expected"),
    [("auto", True, True), ("auto", False, False), ("on", False, True), ("off", True, False)],
)
def test_the_setting(setting: str, overlaps: bool, expected: bool) -> None:
    assert looks_ahead(setting, overlaps=overlaps) == expected
