"""Rounds of a draft model: what they ask for, what they pay for, and that nothing else changes."""

import random
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from services.executor.core.draft_passes import DraftPasses
from services.executor.core.engine import DraftToken, EngineSpec
from services.executor.core.step_plan import StepPlan, as_int32
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from services.executor.scheduler.drafts.drafting import Drafter
from services.executor.scheduler.drafts.engine_drafts import SUNK, AcceptanceStats, DraftPolicy, Proposal
from services.executor.scheduler.drafts.proposer import ProposerMaker
from services.executor.scheduler.drafts.proposers.catalog import PROPOSERS
from services.executor.scheduler.drafts.speculation import Offer, Speculation, StepCost
from services.executor.scheduler.sequence import LOST, Sequence
from shared.errors import InternalError
from shared.messages import GenerationRequest, TokenEntry
from tests.unit.executor.scheduler.drafts.fake_draft_model import FakeDraftModel
from tests.unit.executor.scheduler.drafts.fake_drafter import DevotedPolicy, engine_of
from tests.unit.executor.scheduler.fake_engine import VOCAB, FakeEngine, undisturbed
from tests.unit.executor.scheduler.stepped_ring import BLOCK, ask


class Ring:
    """A batcher with a draft model, stepped by hand."""

    def __init__(
        self,
        right: float = 1.0,
        drafts: int = 3,
        devoted: bool = True,
        makers: Iterable[ProposerMaker] = PROPOSERS,
        with_model: bool = True,
        **spec: int,
    ) -> None:
        self.spec = EngineSpec(BLOCK, **{"num_blocks": 64, **spec}, **_SIZES, drafts=with_model)
        settings = BatchSettings(64, 4, max_drafts=drafts)
        drafter = Drafter(self.spec, settings, makers)
        if devoted:
            engine_of(drafter).policy = DevotedPolicy(drafts)
        self.batcher = Scheduler(self.spec, settings, "m", drafter)
        self.engine = FakeEngine(self.spec)
        self.model = FakeDraftModel(self.engine, random.Random(3), right)
        self.plans: list[StepPlan] = []
        self.log: list[TokenEntry] = []

    def add(self, *requests: GenerationRequest) -> None:
        for request in requests:
            assert self.batcher.add(request) is None

    def draft(self) -> bool:
        """A round; whether there was one."""
        planned = self.batcher.plan_drafts()
        if planned is None:
            return False
        plan, rows = planned
        self.batcher.take_drafts(self.model.draft(plan, [row.sampling for row in rows]), 0.0001)
        self.batcher.check()
        return True

    def step(self) -> StepPlan | None:
        scheduled = self.batcher.schedule()
        if scheduled is None:
            return None
        plan, rows = scheduled
        self.plans.append(plan)
        self.model.copy(plan)
        sampled = self.engine.execute(plan, [row.sampling for row in rows])
        self.model.step(plan)
        for batch in self.batcher.update(sampled, 0.001).values():
            self.log += batch
        self.batcher.check()
        return plan

    def run(self) -> None:
        while self.batcher.has_work:
            self.draft()
            assert self.step() is not None

    def text(self, name: str) -> list[int]:
        return [token for entry in self.log if entry.generation_id == name for token in entry.tokens]

    @property
    def sequences(self) -> list[Sequence]:
        return list(self.batcher._planner.running)


_SIZES = {"context_length": 200, "vocab_size": VOCAB}


# --- rounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantized", [0, 64])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_the_text_is_the_same_and_the_draft_model_never_behind(quantized: int, right: float) -> None:
    ring = Ring(right, num_quantized=quantized)
    requests = [ask("a", 5, 40), ask("bb", 9, 37), ask("ccc", 14, 30)]
    ring.add(*requests)
    ring.run()
    for request in requests:
        assert ring.text(request.generation_id) == undisturbed(request, request.max_tokens)
    assert ring.model.rounds > 8
    assert ring.model.gaps == 0, "nothing was left out"
    assert (ring.model.catching_up > 0) == (right > 0)
    assert ring.plans[0].followed
    assert sum(plan.followed for plan in ring.plans[1:]) <= 2, "rounds compute what decodes need"
    counts = ring.batcher.drafter.engine_counts
    assert (counts.accepted == counts.drafted) == (right == 1.0)
    assert counts.passes >= ring.model.rounds
    assert counts.seconds > 0
    assert ring.batcher.load().free_blocks == (quantized or 64)


@pytest.mark.parametrize("quantized", [0, 64])
def test_what_a_head_computed_behind_its_own_proposals_it_computes_again(quantized: int) -> None:
    """As far as blocks are not full; else it goes on behind them."""
    requests = [ask("a", 5, 40), ask("bb", 9, 37)]
    rings = [Ring(1.0, num_quantized=quantized, draft_reads_states=reads) for reads in (False, True)]
    for ring in rings:
        ring.add(*requests)
        ring.run()
        for request in requests:
            assert ring.text(request.generation_id) == undisturbed(request, request.max_tokens)
        assert ring.model.gaps == 0
    plain, reading = (ring.model for ring in rings)
    assert reading.rounds == plain.rounds
    assert reading.catching_up > plain.catching_up


def test_right_proposals_save_steps() -> None:
    found = []
    for right in (0.0, 1.0):
        ring = Ring(right)
        ring.add(ask("a", 5, 40))
        ring.run()
        found.append(len(ring.plans))
    assert found[0] > 36
    assert found[1] < 16


def test_a_round_takes_numbers_of_its_own() -> None:
    ring = Ring()
    ring.add(ask("a", 5, 20))
    assert not ring.draft(), "there is nothing to go on from"
    ring.step()
    planned = ring.batcher.plan_drafts()
    plan, rows = planned
    assert (plan.plan.step, plan.count) == (2, 3)
    passes = DraftPasses(plan, BLOCK)
    made = [passes.plan(number, [7]) for number in range(plan.count)]
    assert [one.step for one in made] == [2, 3, 4]
    assert [as_int32(one.positions).tolist() for one in made] == [[5], [6], [7]]
    assert [as_int32(one.context_lens).tolist() for one in made] == [[6], [7], [8]]
    assert [len(one.block_tables) // 4 for one in made] == [2, 2, 2]
    ring.batcher.take_drafts(ring.model.draft(plan, [row.sampling for row in rows]))
    step = ring.step()
    assert step.step == 5


def test_whoever_could_be_admitted_comes_first() -> None:
    ring = Ring()
    ring.add(ask("a", 5, 20))
    ring.step()
    ring.add(ask("b", 5, 20))
    assert not ring.draft()
    ring.step()
    assert ring.draft()


def test_a_suspect_is_computed_alone_and_without() -> None:
    ring = Ring()
    ring.add(ask("a", 5, 6, suspected="crashed"))
    ring.run()
    assert ring.model.rounds == 0
    assert len(ring.text("a")) == 6


def test_the_last_tokens_of_a_text_and_of_the_context_need_no_room() -> None:
    ring = Ring()
    ring.add(ask("a", 180, 60), ask("b", 5, 3))
    while ring.batcher.has_work:
        ring.draft()
        assert ring.step() is not None
    assert len(ring.text("a")) == 20, "the context ends"
    assert len(ring.text("b")) == 3


# --- what comes between ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("disturb", "ends"),
    [
        (lambda batcher: batcher.cancel(["a"]), "cancelled"),
        (lambda batcher: batcher.cancel(["a"], attempt=0), "error"),
        (lambda batcher: batcher.add(ask("a", 5, 20, attempt=1)), "length"),
    ],
)
def test_who_ends_while_a_round_is_under_way(disturb: Callable[[Scheduler], None], ends: str) -> None:
    ring = Ring()
    ring.add(ask("a", 5, 20), ask("b", 5, 20))
    ring.step()
    planned = ring.batcher.plan_drafts()
    assert planned is not None
    disturb(ring.batcher)
    ring.batcher.check()
    assert ring.batcher.load().free_blocks < 64 - 2, "the ranks write to its blocks"
    with pytest.raises(InternalError, match="under way"):
        ring.batcher.schedule()
    plan, rows = planned
    ring.batcher.take_drafts(ring.model.draft(plan, [row.sampling for row in rows]))
    ring.batcher.check()
    for batch in ring.batcher.take_entries().values():
        ring.log += batch
    ring.run()
    assert [entry.finish for entry in ring.log if entry.generation_id == "a" and entry.finish] == [ends]
    assert ring.text("b") == undisturbed(ask("b", 5, 20), 20)
    assert ring.batcher.load().free_blocks == 64


def test_a_round_that_fails_takes_the_draft_model_from_its_members() -> None:
    ring = Ring()
    ring.add(ask("a", 5, 20))
    ring.step()
    assert ring.batcher.plan_drafts() is not None
    ring.batcher.drop_drafts()
    assert [sequence.followed for sequence in ring.sequences] == [LOST]
    assert not ring.draft()
    ring.run()
    assert ring.text("a") == undisturbed(ask("a", 5, 20), 20)


def test_an_answer_for_other_sequences_is_refused() -> None:
    ring = Ring()
    ring.add(ask("a", 5, 20))
    ring.step()
    assert ring.batcher.plan_drafts() is not None
    with pytest.raises(InternalError, match="answered for 0 of 1"):
        ring.batcher.take_drafts([])


def test_everything_may_end_while_a_round_is_under_way() -> None:
    ring = Ring()
    ring.add(ask("a", 5, 20))
    ring.step()
    assert ring.batcher.plan_drafts() is not None
    entries = ring.batcher.fail_all(InternalError("gone"))
    assert [entry.finish for batch in entries.values() for entry in batch] == ["error"]
    assert ring.batcher.load().free_blocks == 64


def test_a_failed_step_takes_the_proposals_with_it() -> None:
    ring = Ring()
    ring.add(ask("a", 5, 20), ask("b", 5, 20))
    ring.step()
    assert ring.draft()
    scheduled = ring.batcher.schedule()
    assert scheduled[1][0].request.generation_id == "a"
    for batch in ring.batcher.fail_step(InternalError("NaN"), [0]).values():
        ring.log += batch
    ring.batcher.check()
    ring.run()
    assert ring.text("b") == undisturbed(ask("b", 5, 20), 20)


def test_a_text_that_repeats_itself_is_followed_and_not_drafted_for() -> None:
    """Its own n-grams cost nothing; the draft model keeps up for when they end."""

    class Repeating(FakeEngine):
        def sample(self, content, state, adapter=""):  # type: ignore[no-untyped-def]
            return super().sample([content[-1] % 3], state.__class__(state.params, [], []), adapter)

    ring = Ring(right=0.0, drafts=6)
    ring.engine = Repeating(ring.spec)
    ring.model = FakeDraftModel(ring.engine, random.Random(3), 0.0)
    ring.add(ask("a", 5, 120))
    ring.run()
    assert len(ring.plans) < 60
    assert any(plan.followed for plan in ring.plans[5:])
    assert ring.model.rounds < len(ring.plans) / 2
    assert ring.model.gaps == 0


# --- what pays -------------------------------------------------------------------------------------


class Machine:
    """Costs of a ring and its draft model, and how often that is right: simulated time."""

    def __init__(self, step: float, row: float, draft_step: float, draft_row: float, right: float) -> None:
        self.step, self.row = step, row
        self.draft_step, self.draft_row = draft_step, draft_row
        self.right = right
        self.rng = random.Random(5)

    def best(self, sequences: int, most: int) -> float:
        """Tokens per second with the best number of proposals, always the same."""
        return max(self.rate(sequences, count) for count in range(most + 1))

    def rate(self, sequences: int, count: int) -> float:
        tokens = sequences * sum(self.right**j for j in range(count + 1))
        seconds = self.step + self.row * sequences * (1 + count)
        return tokens / (seconds + count * (self.draft_step + self.draft_row * sequences))

    def run(self, sequences: int, steps: int, most: int) -> tuple[float, float]:
        """(tokens per second, of the second half too), as the ring decides."""
        speculation = Speculation()
        policy = DraftPolicy(most, speculation.cost)
        experience = [policy.acceptance() for _ in range(sequences)]
        rates, tokens, seconds = [], 0, 0.0
        for number in range(steps):
            drafted: list[Proposal | None] = [None] * sequences
            rows, spent = sequences, 0.0
            taking = [policy.takes_on(one, sequences) for one in experience]
            ready, members = ([one for one, takes in zip(experience, taking, strict=True) if takes], sum(taking))
            count = policy.count(sequences, ready, most) if policy.used and members else 0
            if count:
                spent = count * (self.draft_step + self.draft_row * members)
                policy.proposed(count, members, spent)
                for at in range(sequences):
                    if taking[at]:
                        told = [DraftToken(1, self.right)] * count
                        drafted[at] = Proposal(experience[at], told, True)
            least = speculation.least_chance(sequences) / SUNK
            offers = [
                None if one is None else Offer(one.tokens(count), policy.chances(one, least)[:most], SUNK)
                for one in drafted
            ]
            chosen = speculation.choose(offers, 400)
            for offer, drafts in zip(drafted, chosen, strict=True):
                rows += len(drafts)
                drawn = [1]
                while len(drawn) <= len(drafts) and self.rng.random() < self.right:
                    drawn.append(1)
                if len(drawn) <= len(drafts) or not drafts:
                    drawn[-1] = 1 if not drafts and self.rng.random() < self.right else 2
                tokens += len(drawn)
                if offer is not None:
                    policy.learn(offer, drawn)
            took = self.step + self.row * rows
            speculation.cost.observe(rows, took * self.rng.uniform(0.9, 1.1))
            policy.step_over(sequences)
            seconds += took + spent
            if number in (steps // 2, steps - 1):
                rates.append((tokens, seconds))
        (half, then), (whole, now) = rates
        return whole / now, (whole - half) / (now - then)


@hypothesis_settings(max_examples=25, derandomize=True)
@given(
    sequences=st.sampled_from([1, 2, 4, 8, 16, 64]),
    row=st.floats(0.002, 0.3),
    draft=st.floats(0.02, 0.6),
    right=st.floats(0.0, 0.98),
)
def test_never_worse_than_without_and_nearly_as_good_as_the_best(
    sequences: int, row: float, draft: float, right: float
) -> None:
    machine = Machine(0.01, 0.01 * row, 0.01 * draft, 0.01 * row * draft, right)
    rate, later = machine.run(sequences, 400, 8)
    without = machine.rate(sequences, 0)
    assert rate > 0.87 * without
    assert later > 0.9 * without
    assert later > 0.6 * machine.best(sequences, 8)


def test_a_draft_of_a_tenth_that_is_right_in_70_percent_gains_and_costs_nothing_in_large_batches() -> None:
    alone = Machine(0.05, 0.0015, 0.005, 0.0001, 0.7)
    _, later = alone.run(1, 400, 15)
    assert later > 1.7 * alone.rate(1, 0)
    crowd = Machine(0.05, 0.004, 0.005, 0.0004, 0.7)
    _, later = crowd.run(64, 150, 15)
    assert later > 0.99 * crowd.rate(64, 0)


def timed(most: int = 8) -> DraftPolicy:
    cost = StepCost()
    policy = DraftPolicy(most, cost)
    for rows in (1, 2, 4, 1) * 5:
        cost.observe(rows, 0.01 + 0.0005 * rows)
        policy.proposed(1, 1, 0.001)
    policy.step_over(1)
    assert not policy.trial, "it pays, so far"
    return policy


def test_a_draft_model_that_is_never_right_rests_and_is_tried_again_ever_less_often() -> None:
    policy = timed()
    stats = policy.acceptance()
    used = []
    for _ in range(5000):
        if policy.used:
            policy.learn(Proposal(stats, [DraftToken(1, 0.5)], False), [2])
        policy.step_over(1)
        used.append(policy.used)
    assert used[:3] == [True] * 3
    starts = [at for at in range(1, len(used)) if used[at] and not used[at - 1]]
    rests = [later - before for before, later in pairwise(starts)]
    assert len(starts) >= 3
    assert rests == sorted(rests)
    assert sum(used) < 0.05 * len(used)


def test_a_trial_that_succeeds_brings_the_draft_model_back() -> None:
    policy = timed()
    stats = policy.acceptance()
    for _ in range(200):
        policy.learn(Proposal(stats, [DraftToken(1, 0.5)], False), [2])
        policy.step_over(1)
    assert not policy.used
    steps = 0
    while not policy.used or policy.trial:
        steps += 1
        assert steps < 2000
        if policy.used:
            assert policy.takes_on(stats, 1), "a trial asks whether it would pay"
            assert policy.count(1, [stats], 8) >= 1
            for _ in range(100):
                policy.learn(Proposal(stats, [DraftToken(1, 0.5)], False), [1])
        policy.step_over(1)
    assert policy.count(1, [stats], 8) > 2


def test_what_its_own_probability_means_is_learnt() -> None:
    policy = timed()
    stats = policy.acceptance()
    sure, unsure = [DraftToken(1, 0.95)], [DraftToken(1, 0.05)]
    for _ in range(100):
        policy.learn(Proposal(stats, sure, False), [1])
        policy.learn(Proposal(stats, unsure, False), [2])
    [high] = policy.chances(Proposal(stats, sure, False), 0.0)
    [low] = policy.chances(Proposal(stats, unsure, False), 0.0)
    assert high > 0.9
    assert low < 0.1
    assert policy.chances(Proposal(stats, unsure, False), 0.5) == []
    assert 0.0 <= policy.without_following(0.02, 4) <= 0.02


def test_a_sequence_that_it_is_wrong_in_is_left_out() -> None:
    policy = timed()
    for _ in range(50):
        policy.proposed(1, 1, 0.003)
    good, bad = policy.acceptance(), policy.acceptance()
    for _ in range(100):
        policy.learn(Proposal(good, [DraftToken(1, 0.5)], False), [1])
        policy.learn(Proposal(bad, [DraftToken(1, 0.5)], False), [2])
    assert policy.takes_on(good, 1)
    assert not policy.takes_on(bad, 1)
    assert isinstance(good, AcceptanceStats)
