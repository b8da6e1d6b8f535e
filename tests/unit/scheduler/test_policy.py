"""Placement: where the first token is expected soonest, at home within bounds, and never back and forth."""

import hashlib
import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.scheduler.placement import HOLD, SAMPLE, TOLERANCE, Beginnings, Placement, PlacementDecision
from services.scheduler.request import Prefix, prefixes
from shared.messages import GroupLoad, GroupStatus, GroupTraits, SessionPin
from tests.unit.scheduler.requests import group, waiting
from tests.unit.scheduler.tables import FREE, STATES, SUSPECT, known, loads, table_of


def decide(
    table: Any, pin: SessionPin | None = None, sticky: int = 0, now: float = 0.0, **item: Any
) -> PlacementDecision | None:
    return Placement(table, sticky, seed=0).choose(waiting("a", **item), pin, now)


def chosen(table: Any, pin: SessionPin | None = None, **options: Any) -> tuple[str, str]:
    decision = decide(table, pin, **options)
    return (decision.group.name, decision.reason) if decision else ("", "")


@given(st.lists(st.tuples(st.sampled_from(STATES), loads, st.sampled_from(["m", "other"])), max_size=8))
def test_the_choice_is_among_the_soonest_that_are_up_and_have_room(
    groups: list[tuple[GroupStatus, GroupLoad, str]],
) -> None:
    table = table_of(
        *(group(str(n), state=state, load=load, model=model) for n, (state, load, model) in enumerate(groups))
    )
    candidates = [each for each in map(table.get, map(str, range(len(groups)))) if each is not None]
    fit = [each for each in candidates if each.model == "m" and each.up and each.has_room]
    decision = decide(table)
    if not fit:
        assert decision is None
        return
    soonest = min(each.ttft.first_token(10) for each in fit)
    assert decision.group in fit
    assert decision.group.ttft.first_token(10) <= soonest * TOLERANCE


ADAPTERS = [hashlib.sha256(bytes([number])).hexdigest() for number in range(40)]


def holding(name: str, *adapters: str, load: GroupLoad = FREE) -> Any:
    return msgspec.structs.replace(group(name, load=load), adapters=list(adapters))


def test_an_adapter_is_computed_where_it_is_in_memory() -> None:
    records = [holding("a"), holding("b", ADAPTERS[1]), holding("c", ADAPTERS[1], ADAPTERS[2])]
    table = table_of(*records)
    assert chosen(table, adapter=ADAPTERS[2]) == ("c", "adapter")
    assert {chosen(table, adapter=ADAPTERS[1])[0] for _ in range(4)} <= {"b", "c"}
    table.record(holding("c"))
    assert chosen(table, adapter=ADAPTERS[1]) == ("b", "adapter")
    table.forget("b")
    homes = {chosen(table, adapter=ADAPTERS[1]) for _ in range(4)}
    assert len(homes) == 1, "the adapter's home, until somebody has it"
    spread = {chosen(table, adapter=adapter)[0] for adapter in ADAPTERS}
    assert spread == {"a", "c"}, "adapters are spread over the groups"


TRAITS = st.none() | st.builds(GroupTraits, st.sampled_from([[], ["window"], ["pages", "window"]]))


@given(
    st.lists(st.tuples(st.sampled_from(STATES), loads, TRAITS), max_size=8),
    st.sampled_from(["pages", "window"]),
    st.booleans(),
    st.integers(0, 1),
)
def test_sparse_attention_is_placed_with_those_who_compute_it(
    groups: list[tuple[GroupStatus, GroupLoad, GroupTraits | None]], kind: Any, pinned: bool, attempt: int
) -> None:
    """It waits for them while they are full, away, or have not said yet; where none ever will, one refuses it."""
    records = [group(str(n), state=state, load=load, traits=traits) for n, (state, load, traits) in enumerate(groups)]
    table = table_of(*records)
    all_ = [known(table, record.group) for record in records]
    pin = SessionPin("0", 1) if pinned else None
    decision = decide(table, pin, sparse=kind, session="s" if pinned else "", attempt=attempt, adapter="aa")
    able = [one for one in all_ if one.traits is not None and kind in one.traits.sparse]
    silent = [one for one in all_ if one.traits is None and not one.up]
    open_ = [one for one in all_ if one.takes]
    if any(one.takes for one in able):
        assert decision.group in able
    elif able or silent or not open_:
        assert decision is None
    else:
        assert decision.reason == "spilled"


def test_a_busy_holder_is_passed_by() -> None:
    busy = msgspec.structs.replace(FREE, running=20, waiting=15, waiting_tokens=1_000_000)
    table = table_of(holding("a"), holding("b", ADAPTERS[1], load=busy))
    assert chosen(table, adapter=ADAPTERS[1])[0] == "a"


def test_beginnings_with_different_adapters_have_different_names() -> None:
    prompt = list(range(300))
    names = [prefixes("m", prompt, salt, adapter) for salt in ("", "s") for adapter in ("", *ADAPTERS[:2])]
    assert len({prefix.key for found in names for prefix in found}) == 12
    table = table_of(*map(holding, map(str, range(8))))
    found = chosen(table, adapter=ADAPTERS[3], prefixes=prefixes("m", prompt, adapter=ADAPTERS[3]))
    assert found[1] == "adapter", "the home of the beginning has not the adapter"


@given(st.integers(1, SAMPLE), st.integers(1, 60))
def test_equal_groups_take_turns(groups: int, requests: int) -> None:
    table = table_of(*(group(str(index)) for index in range(groups)))
    counts = dict.fromkeys(map(str, range(groups)), 0)
    for _ in range(requests):
        decision = decide(table)
        table.reserve(decision.group, 10)
        table.release(decision.group, 10)
        counts[decision.group.name] += 1
    assert max(counts.values()) - min(counts.values()) <= 1


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(2, 6))
def test_what_was_sent_counts_before_it_is_reported(tokens: list[int], groups: int) -> None:
    table = table_of(*(group(str(index)) for index in range(groups)))
    for count in tokens:
        decision = decide(table, tokens=count)
        table.reserve(decision.group, count)
    times = [known(table, str(index)).ttft.seconds for index in range(groups)]
    assert max(times) <= min(times) * TOLERANCE + 2 * (64 + 60) / 4000


def test_faster_groups_get_more() -> None:
    fast = msgspec.structs.replace(FREE, slots=64, prompt_tokens_per_second=9000.0, step_seconds=0.01)
    slow = msgspec.structs.replace(fast, prompt_tokens_per_second=3000.0)
    table = table_of(group("fast", load=fast), group("slow", load=slow))
    for _ in range(40):
        decision = decide(table)
        table.reserve(decision.group, 10)
    assert 2.5 <= known(table, "fast").sent_requests / known(table, "slow").sent_requests <= 3.5


def test_a_group_that_answers_late_and_one_that_is_slow_are_avoided() -> None:
    table = table_of(group("near"), group("far"))
    for _ in range(5):
        table.report(known(table, "far"), FREE, 0.0, 0.5)
        table.report(known(table, "near"), FREE, 0.0, 0.001)
    assert chosen(table)[0] == "near"
    table.record(msgspec.structs.replace(group("near"), weight=0.05))
    for _ in range(20):
        table.report(known(table, "near"), FREE, 0.0, 0.1)
    assert chosen(table)[0] == "far"


def test_a_sample_of_many_is_nearly_the_best() -> None:
    table = table_of(*(group(str(n), load=GroupLoad(running=n % 50)) for n in range(500)))
    placement = Placement(table, 0, seed=1)
    found = []
    for _ in range(200):
        decision = placement.choose(waiting("a"), None, 0.0)
        found.append(decision.group.load.running)
    assert sum(found) / len(found) < 5, "of 0 to 49"


# --- sessions ------------------------------------------------------------------------------------


@given(loads, loads, st.integers(0, 8000), st.integers(0, 8000))
def test_a_session_stays_unless_moving_pays(home: GroupLoad, other: GroupLoad, tokens: int, sticky: int) -> None:
    table = table_of(group("home", load=home), group("other", load=other))
    there, here = known(table, "other"), known(table, "home")
    assume(there.has_room)
    decision = decide(table, SessionPin("home", 1), sticky, tokens=tokens, now=1e9)
    assert decision is not None
    limit = min(there.ttft.first_token(tokens), here.ttft.first_token(tokens)) * TOLERANCE
    limit += sticky * here.ttft.seconds_per_token
    at_home = here.ttft.first_token(0)
    if here.has_room and at_home <= limit / TOLERANCE:
        assert (decision.group.name, decision.reason) == ("home", "pinned")
    elif not here.has_room or at_home > limit * TOLERANCE:
        assert (decision.group.name, decision.reason) == ("other", "relieved")


@pytest.mark.slow
@settings(max_examples=500)
@given(
    st.lists(loads, min_size=2, max_size=6),
    st.lists(st.tuples(st.integers(1, 4000), st.floats(0, 100)), min_size=1, max_size=30),
    st.integers(0, 8000),
)
def test_under_a_constant_load_a_session_moves_at_most_once(
    group_loads: list[GroupLoad], turns: list[tuple[int, float]], sticky: int
) -> None:
    """Its prompt grows from turn to turn, and whatever time passes between them."""
    table = table_of(*(group(str(n), load=load) for n, load in enumerate(group_loads)))
    placement = Placement(table, sticky, seed=0)
    pin, moves, tokens, now = SessionPin("0", 1), 0, 0, 1e9
    for more, seconds in turns:
        tokens, now = tokens + more, now + seconds
        decision = placement.choose(waiting("a", tokens=tokens), pin, now)
        if decision is not None and decision.reason == "relieved":
            pin, moves = SessionPin(decision.group.name, 1, now), moves + 1
    assert moves <= 1


@given(st.lists(st.lists(loads, min_size=2, max_size=2), max_size=30), st.floats(0.1, 10))
def test_whatever_the_load_a_session_stays_for_a_while_where_it_has_moved_to(
    history: list[list[GroupLoad]], pause: float
) -> None:
    pin, now, moved = SessionPin("0", 1), 1e9, []
    for pair in history:
        now += pause
        table = table_of(*(group(str(n), load=load) for n, load in enumerate(pair)))
        decision = decide(table, pin, now=now)
        if decision is not None and decision.reason == "relieved":
            pin = SessionPin(decision.group.name, 1, now)
            moved.append(now)
    assert all(later - earlier >= HOLD for earlier, later in itertools.pairwise(moved))


@pytest.mark.parametrize(
    ("pin", "home"),
    [
        (SessionPin("home", 1), group("home", state="gone")),
        (SessionPin("home", 1), group("home", state="hung")),
        (SessionPin("home", 1), group("home", state="draining")),
        (SessionPin("home", 1), group("home", epoch=2)),
        (SessionPin("home", 1), group("home", model="another")),
        (SessionPin("never seen", 1), group("home", state="starting")),
    ],
)
def test_a_pin_to_a_ring_that_is_no_more_moves(pin: SessionPin, home: object) -> None:
    table = table_of(home, group("other"))
    assert chosen(table, pin, sticky=10_000)[1] == "moved"


def test_a_silent_group_is_passed_over_for_a_while_and_keeps_its_pins() -> None:
    table = table_of(group("home"), group("other"))
    table.timed_out(known(table, "home"), 4.0)
    assert chosen(table, SessionPin("home", 1), now=1e9) == ("other", "spilled")
    assert not table.reopen(4.0 + SUSPECT - 0.1)
    assert table.reopen(4.0 + SUSPECT)
    assert chosen(table, SessionPin("home", 1)) == ("home", "pinned")


# --- beginnings of prompts -----------------------------------------------------------------------

PROMPT = [7] * 300


def test_prompts_that_begin_alike_go_to_one_group_in_every_scheduler() -> None:
    records = [group(f"g{n}") for n in range(40)]
    placements = [Placement(table_of(*order), 0) for order in (records, records[::-1], records[5:] + records[:5])]
    for beginning in range(20):
        homes = set()
        for placement in placements:
            for rest in range(3):
                prompt = [beginning] * 280 + [rest] * 9
                item = waiting("a", tokens=len(prompt), prefixes=prefixes("m", prompt))
                decision = placement.choose(item, None, 0.0)
                assert decision.reason == "prefix"
                homes.add(decision.group.name)
        assert len(homes) == 1


def test_a_busy_home_is_left_when_its_cache_is_not_worth_the_wait() -> None:
    names = prefixes("m", PROMPT)
    table = table_of(*(group(f"g{n}") for n in range(4)))
    first, second = table.ranking("m").ranked(names[0].key)
    assert chosen(table, prefixes=names, tokens=300) == (first, "prefix")
    table.reserve(known(table, first), 250)
    assert chosen(table, prefixes=names, tokens=300) == (second, "prefix"), "256 tokens are worth less"
    table.reserve(known(table, second), 250)
    shorter = [name for name in table.ranking("m").ranked(names[1].key) if name not in (first, second)]
    expected = (shorter[0], "prefix") if shorter else None
    found = chosen(table, prefixes=names, tokens=300)
    assert found == expected or (found[1] == "least_loaded" and found[0] not in (first, second))


# --- batch work ----------------------------------------------------------------------------------


@given(loads)
def test_batch_work_fills_idle_capacity_only(load: GroupLoad) -> None:
    table = table_of(group("g", load=load))
    idle = load.waiting == 0 and load.running < 0.75 * (load.slots or 64) and load.free_blocks >= 5
    if decide(table, lane="batch") is not None:
        assert idle
    elif idle:
        assert not known(table, "g").has_room
    assert (decide(table) is not None) == known(table, "g").has_room


def test_batch_work_stops_short_of_a_full_group_and_interactive_work_goes_on() -> None:
    table = table_of(group("g", load=msgspec.structs.replace(FREE, slots=8)))
    sent = 0
    while decide(table, lane="batch") is not None:
        table.reserve(known(table, "g"), 10)
        sent += 1
    assert sent == 6
    assert chosen(table) == ("g", "least_loaded")


def test_a_batch_request_does_not_move_its_sessions_pin() -> None:
    table = table_of(group("home", load=GroupLoad(waiting=3, slots=8)), group("other"))
    assert chosen(table, SessionPin("home", 1), lane="batch", now=1e9) == ("other", "spilled")


PREFIXES = (Prefix(22, 4096), Prefix(11, 1024))
LONG = {"tokens": 6000, "prefixes": PREFIXES}


def sent(placement: Placement, name: str, epoch: int = 1, prefixes: tuple[Prefix, ...] = PREFIXES) -> None:
    placement.accepted(waiting(f"to {name}", prefixes=prefixes), name, epoch)


@pytest.mark.parametrize("session", ["", "s"])
def test_a_recovered_prompt_goes_where_its_longest_beginning_is(session: str) -> None:
    """Not to the ring that has come up in the lost one's place, whatever its name stands for."""
    placement = Placement(table_of(group("a", epoch=2), group("b"), group("c"), group("d")), 0, seed=0)
    sent(placement, "b", prefixes=PREFIXES[1:])
    sent(placement, "c")
    sent(placement, "a")
    pin = SessionPin("a", 1) if session else None
    for _ in range(8):
        decision = placement.choose(waiting("x", attempt=1, session=session, **LONG), pin, 0.0)  # type: ignore[arg-type]
        assert decision.group.name == "c"
        assert decision.reason == ("moved" if session else "prefix")


def test_nobody_is_asked_for_a_beginning_who_is_gone_or_has_begun_anew_or_is_too_busy() -> None:
    busy = GroupLoad(running=60, waiting=50, waiting_tokens=60_000, free_blocks=100, total_blocks=100)
    records = [group("a", epoch=2), group("b", state="gone"), group("c", load=busy), group("d"), group("e")]
    placement = Placement(table_of(*records), 0, seed=0)
    for name in ("a", "b", "c"):
        sent(placement, name)
    chosen_names = set()
    for _ in range(8):
        decision = placement.choose(waiting("x", attempt=1, session="s", **LONG), None, 0.0)  # type: ignore[arg-type]
        decision.group.chosen += 1
        chosen_names.add(decision.group.name)
        assert decision.reason == "least_loaded"  # so that the session gets its pin
    assert "c" not in chosen_names
    sent(placement, "d", prefixes=PREFIXES[1:])
    decision = placement.choose(waiting("x", attempt=1, **LONG), None, 0.0)  # type: ignore[arg-type]
    assert (decision.group.name, decision.reason) == ("d", "prefix")


def test_beginnings_are_remembered_of_the_latest_prompts_and_rings() -> None:
    known = Beginnings(most=3)
    for number in range(6):
        known.sent([Prefix(number, 64)], "a", 1)
    assert len(known) == 3
    assert known.rings(Prefix(0, 64)) == []
    for name in ("b", "c", "d", "e", "a"):
        known.sent([Prefix(5, 64)], name, 2)
    assert known.rings(Prefix(5, 64)) == [("a", 2), ("e", 2), ("d", 2), ("c", 2)]
