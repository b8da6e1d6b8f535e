"""Slots and snapshots of recurrent state: what begins where, and what becomes of it."""

import pytest

from services.executor.core.step_plan import StepPlan, as_int32
from tests.unit.executor.scheduler.fake_engine import undisturbed
from tests.unit.executor.scheduler.stepped_ring import BLOCK, Ring, ask, lens

STRIDE = 4  # blocks, for snapshots of so many at most


def ring(blocks: int = 40, states: int = 5, parts: int = 2, quantized: int = 60, **fields: object) -> Ring:
    return Ring(blocks, num_states=states, state_blocks=parts, num_quantized=quantized, **fields)  # type: ignore[arg-type]


def loads(plan: StepPlan) -> int:
    return len(as_int32(plan.state_loads))


def cached(one: Ring, name: str) -> int:
    return max(entry.cached_tokens for entry in one.log if entry.generation_id == name)


def finish(one: Ring, *names: str) -> None:
    """Everything ends, and the texts are those of an undisturbed run."""
    one.run()
    requests = {request.generation_id: request for request in one.asked}  # type: ignore[attr-defined]
    for name in names:
        assert one.tokens(name) == undisturbed(requests[name], requests[name].max_tokens)
    assert one.batcher._tables.states.used == 0


def start(one: Ring, name: str, prompt: list[int], max_tokens: int = 4, **fields: object) -> None:
    request = ask(name, prompt, max_tokens, **fields)
    one.asked = [*getattr(one, "asked", []), request]  # type: ignore[attr-defined]
    one.add(request)


def test_a_prompt_begins_with_the_snapshot_behind_its_last_full_block() -> None:
    one = ring()
    prompt = list(range(22))
    for name in ("first", "second"):
        start(one, name, prompt)
        finish(one, name)
    assert cached(one, "second") == 20
    start(one, "longer", [*prompt, 40, 41, 42, 43])
    finish(one, "longer")
    assert cached(one, "longer") == 20


def test_a_prompt_of_full_blocks_leaves_one_to_be_computed() -> None:
    one = ring()
    for name in ("first", "second"):
        start(one, name, list(range(16)))
        finish(one, name)
    assert cached(one, "second") == 12


def test_beginnings_without_a_snapshot_are_computed_again() -> None:
    one = ring(states=6)
    start(one, "first", list(range(14)))
    finish(one, "first")
    start(one, "other", [*range(11), 40, 41])  # two blocks alike, and a snapshot behind the third one
    finish(one, "other")
    assert cached(one, "other") == 0
    start(one, "third", [*range(8), 45, 46, 47])
    finish(one, "third")
    assert cached(one, "third") == 8, "there is a snapshot by now where the first two part"


def test_long_prompts_leave_snapshots_on_their_way() -> None:
    one = ring(tokens=64, states=9)
    start(one, "first", list(range(45)))
    finish(one, "first")
    start(one, "other", [*range(STRIDE * BLOCK * 2 + 3), 49, 49, 49])
    finish(one, "other")
    assert cached(one, "other") == STRIDE * BLOCK * 2


def test_texts_leave_snapshots_as_they_grow() -> None:
    one = ring(lookahead=True)
    start(one, "first", list(range(5)), 40)
    finish(one, "first")
    assert one.ahead
    said = [*range(5), *one.tokens("first")]
    start(one, "next", said)
    finish(one, "next")
    assert cached(one, "next") == len(said) // (STRIDE * BLOCK) * STRIDE * BLOCK


def test_sequences_wait_while_there_is_no_slot() -> None:
    one = ring(states=3)  # one of them for snapshots
    for first, name in enumerate(("a", "b", "c")):
        start(one, name, list(range(first, 10)), 6)
    step = one.schedule()
    assert len(lens(step[0])) == 2
    assert one.batcher.places == 2
    one.finish(step)
    finish(one, "a", "b", "c")


def test_who_has_the_only_slot_makes_no_snapshots() -> None:
    one = ring(states=1)
    start(one, "a", list(range(20)))
    start(one, "b", list(range(20)))
    finish(one, "a", "b")
    assert cached(one, "b") == 0
    assert one.engine.state_copies == 0


def test_a_prompt_waits_for_the_snapshot_that_another_makes() -> None:
    one = ring(tokens=64)
    start(one, "first", list(range(30)))
    start(one, "second", list(range(30)))
    assert lens(one.schedule()[0]) == [30]
    one.finish((one.plans[-1][0], one.batcher._steps.oldest.rows))
    finish(one, "first", "second")
    assert cached(one, "second") == 28
    assert one.engine.state_loads == 1


def test_what_is_saved_when_nobody_is_left_is_found() -> None:
    one = ring()
    start(one, "first", list(range(13)), 1)
    one.step()
    assert one.last("first").finish == "length"
    assert one.batcher.has_work, "its snapshot is still to be saved"
    plan, _ = one.schedule()
    assert plan.state_saves
    assert not plan.token_ids
    one.finish((plan, []))
    start(one, "second", list(range(13)), 1)
    finish(one, "second")
    assert cached(one, "second") == 12


def test_a_preempted_sequence_comes_back_at_its_last_snapshot() -> None:
    one = ring(states=2)
    start(one, "a", list(range(30)), 30, lane="batch")
    for _ in range(12):
        one.step()
    start(one, "b", list(range(10, 40)), 3)
    finish(one, "a", "b")
    assert one.batcher.preemptions == 1
    computed = sum(len(as_int32(plan.token_ids)) for plan, _ in one.plans)
    assert computed == 30 + 29 + 30 + 2 + 8, "of 40 tokens those behind the 32nd are computed again"


def test_a_step_that_fails_costs_its_sequences_their_state() -> None:
    one = ring()
    start(one, "a", list(range(10)), 12)
    start(one, "b", list(range(20, 30)), 12)
    for _ in range(3):
        one.step()
    one.fail(one.schedule(), {0})
    assert one.last("a").error_code == "internal_error"
    plan, _ = one.schedule()
    assert loads(plan), "it goes on from its snapshot"
    one.finish((plan, one.batcher._steps.oldest.rows))
    finish(one, "b")


def test_a_spilled_snapshot_is_restored_before_it_is_loaded() -> None:
    one = ring(blocks=12, quantized=14, num_host=60, ttl=1000.0)
    said = list(range(22))
    start(one, "first", said, session="s")
    finish(one, "first")
    start(one, "large", list(range(49, 0, -1)))
    finish(one, "large")
    assert one.engine.saves
    start(one, "next", [*said, 7, 7, 7], session="s")
    finish(one, "next")
    assert cached(one, "next") == 20
    assert one.engine.restores


def test_of_a_sessions_snapshots_the_last_is_kept_for_it() -> None:
    one = ring(ttl=1000.0)
    said = list(range(10))
    for turn in range(5):
        start(one, f"turn-{turn}", list(said), session="s")
        finish(one, f"turn-{turn}")
        said += [*one.tokens(f"turn-{turn}"), 1, 2, 3, 4]
    blocks = one.batcher._tables.census()
    assert blocks.snapshots >= 5
    computed = len(said) - 5  # the last token that was said, and what nobody has asked yet
    assert blocks.quantized.pinned == computed // BLOCK + 2


def test_a_large_snapshot_is_spilled_whole() -> None:
    """More blocks at once than a step restores or fills."""
    parts, restored, filled = 20, 3, 4
    one = ring(blocks=12, quantized=parts + 14, parts=parts, num_host=80, copies_per_step=restored, ttl=1000.0)
    said = list(range(22))
    start(one, "first", said, session="s")
    finish(one, "first")
    start(one, "other", list(range(30, 49)))
    finish(one, "other")
    start(one, "next", [*said, 7, 7, 7], session="s")
    finish(one, "next")
    assert one.engine.restores > restored + filled
    assert cached(one, "next") == 20


@pytest.mark.parametrize("lost", ["of another", "its own"])
def test_a_restore_that_fails_leaves_loads_to_the_next_plan(lost: str) -> None:
    """No rank need have loaded anything in a step that it has not computed."""
    one = ring(blocks=16, quantized=22, num_host=80, ttl=1000.0, tokens=64)
    said = {name: [start_at + i for i in range(18)] for name, start_at in (("s", 0), ("t", 25))}
    start(one, "s1", said["s"], session="s")
    finish(one, "s1")
    start(one, "large", list(range(49, 0, -1)) + [3] * 18)
    finish(one, "large")
    start(one, "t1", said["t"], session="t")
    finish(one, "t1")
    spilled = set(one.engine.spilled)
    assert spilled
    one.engine.unreadable |= spilled
    before = one.engine.state_loads
    names = ("t2", "s2") if lost == "of another" else ("s2",)
    for name in names:
        start(one, name, [*said[name[0]], 5, 5], session=name[0])
    finish(one, *names)
    if lost == "of another":
        assert cached(one, "t2") == 16
        assert one.engine.state_loads > before


def test_who_cancels_leaves_its_snapshot() -> None:
    one = ring()
    start(one, "a", list(range(20)), 30)
    step = one.schedule()
    one.batcher.cancel(["a"])
    one.finish(step)
    one.run()
    start(one, "b", list(range(20)))
    finish(one, "b")
    assert cached(one, "b") == 16


def test_a_rejected_draft_costs_the_state_behind_it_alone() -> None:
    """The fake engine asserts that every row finds the state of the tokens before it."""
    one = ring(drafts=3, right=0.5, states=1, draft_states=3)  # none for snapshots
    start(one, "a", list(range(10)), 40)
    finish(one, "a")
    drafter = one.batcher.drafter
    assert 0 < drafter.accepted < drafter.drafted == one.engine.state_copies
    assert one.batcher.preemptions == 0


def test_rows_without_drafts_ask_for_no_states() -> None:
    one = ring(drafts=3, right=0.5, states=1, draft_states=3)
    for name, tokens in (("a", 1), ("b", 2)):
        start(one, name, list(range(10)), tokens)
        finish(one, name)
    assert one.engine.state_copies == one.batcher.drafter.drafted == 0


def test_a_step_has_as_many_drafts_as_there_are_slots() -> None:
    one = ring(drafts=3, right=1.0, draft_states=4)
    for first, name in enumerate(("a", "b", "c")):
        start(one, name, list(range(first, 10)), 20)
    finish(one, "a", "b", "c")
    drafts = [len(as_int32(plan.sample_rows)) - len(set(rows)) for plan, rows in one.plans]
    assert max(drafts) == 4


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_snapshots_are_taken_in_the_middle_of_drafts_that_are_right(right: float) -> None:
    one = ring(drafts=9, right=right, draft_states=9)
    start(one, "first", list(range(5)), 60)
    finish(one, "first")
    widths = [lens(plan) for plan, _ in one.plans]
    assert any(max(of_plan, default=0) > 2 * BLOCK for of_plan in widths)
    said = [*range(5), *one.tokens("first")]
    start(one, "next", said, 12)
    finish(one, "next")
    assert cached(one, "next") == len(said) // (STRIDE * BLOCK) * STRIDE * BLOCK


def test_a_step_with_drafts_that_fails_gives_their_slots_back() -> None:
    one = ring(drafts=3, right=0.7, draft_states=3)
    start(one, "a", list(range(10)), 20)
    start(one, "b", list(range(20, 30)), 20)
    one.step()
    step = one.schedule()
    while len(step[1]) == len({row.request.generation_id for row in step[1]}):
        one.finish(step)
        step = one.schedule()
    one.fail(step, {0})
    finish(one, "b")
    assert one.batcher.drafter.drafted


def test_who_is_cancelled_while_its_drafts_are_checked_gives_its_slots_back() -> None:
    one = ring(drafts=3, right=1.0, draft_states=3)
    start(one, "a", list(range(20)), 30)
    step = one.schedule()
    while len(step[1]) < 3:
        one.finish(step)
        step = one.schedule()
    one.batcher.cancel(["a"])
    one.finish(step)
    one.run()
    start(one, "b", list(range(20)), 12)
    finish(one, "b")


def test_drafts_are_not_for_models_whose_states_have_no_slots_behind_them() -> None:
    assert ring(drafts=5, draft_states=3).batcher.drafter._settings.max_drafts == 5
    one = ring(drafts=5)
    assert one.batcher.drafter._settings.max_drafts == 0
    start(one, "a", list(range(10)), 12)
    finish(one, "a")
    assert one.batcher.drafter.drafted == 0
