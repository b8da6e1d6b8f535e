"""Placement: the session's group within bounds, else the least loaded, and never one that is not up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.groups import LONGEST_PAUSE, SEQUENCE_TOKENS, GroupTable
from services.scheduler.placement import IN_HAND, Placement
from shared.messages import GroupEvent, GroupLoad, GroupStatus, SessionPin
from tests.unit.scheduler.requests import group

STATES: list[GroupStatus] = ["starting", "ready", "busy", "hung", "draining", "gone"]
loads = st.builds(
    GroupLoad,
    running=st.integers(0, 64),
    waiting=st.integers(0, 64),
    waiting_tokens=st.integers(0, 100_000),
    free_blocks=st.integers(0, 100),
    total_blocks=st.just(100),
)


def table_of(*records: object) -> GroupTable:
    table = GroupTable()
    for record in records:
        table.record(record)  # type: ignore[arg-type]
    return table


def choose(table: GroupTable, pin: SessionPin | None = None, tokens: int = 10, sticky: int = 0) -> str:
    decision = Placement(table, sticky).choose("m", tokens, pin)
    return decision.group.name if decision else ""


@given(st.lists(st.tuples(st.sampled_from(STATES), loads, st.sampled_from(["m", "other"])), max_size=8))
def test_the_choice_is_the_least_loaded_group_that_is_up(
    groups: list[tuple[GroupStatus, GroupLoad, str]],
) -> None:
    records = [
        group(str(index), state=state, load=load, model=model)
        for index, (state, load, model) in enumerate(groups)
    ]
    open_ones = [r for r in records if r.state in ("ready", "busy") and r.model == "m"]
    chosen = choose(table_of(*records))
    if not open_ones:
        assert chosen == ""
        return

    def weight(load: GroupLoad) -> tuple[bool, int]:
        sequences = load.running + load.waiting
        return load.free_blocks * 20 < load.total_blocks, load.waiting_tokens + SEQUENCE_TOKENS * sequences

    assert weight(next(r.load for r in open_ones if r.group == chosen)) == min(
        weight(r.load) for r in open_ones
    )


@given(st.integers(1, 8), st.integers(1, 60))
def test_equal_groups_take_turns(groups: int, requests: int) -> None:
    table = table_of(*(group(str(index)) for index in range(groups)))
    placement = Placement(table, 0)
    counts = dict.fromkeys(map(str, range(groups)), 0)
    for _ in range(requests):
        decision = placement.choose("m", 10, None)
        assert decision is not None
        table.reserve(decision.group, 10)
        table.release(decision.group, 10)
        counts[decision.group.name] += 1
    assert max(counts.values()) - min(counts.values()) <= 1


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=100), st.integers(2, 6))
def test_what_was_sent_counts_before_it_is_reported(tokens: list[int], groups: int) -> None:
    table = table_of(*(group(str(index)) for index in range(groups)))
    placement = Placement(table, 0)
    sent = dict.fromkeys(map(str, range(groups)), 0)
    for count in tokens:
        decision = placement.choose("m", count, None)
        assert decision is not None
        assert sent[decision.group.name] == min(sent.values())
        table.reserve(decision.group, count)
        sent[decision.group.name] += count + SEQUENCE_TOKENS


@given(loads, loads, st.integers(0, 8000), st.integers(0, 8000))
def test_a_session_stays_unless_its_group_is_much_busier(
    home: GroupLoad, other: GroupLoad, tokens: int, sticky: int
) -> None:
    table = table_of(group("home", load=home), group("other", load=other))
    decision = Placement(table, sticky).choose("m", tokens, SessionPin("home", 1))
    assert decision is not None
    work = {name: table.get(name).score[1] for name in ("home", "other")}  # type: ignore[union-attr]
    if work["home"] <= work["other"] + tokens + sticky:
        assert (decision.group.name, decision.reason) == ("home", "pinned")
    elif decision.reason == "spilled":
        assert decision.group.name == "other"


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
    table = table_of(home, group("other", load=GroupLoad()))
    decision = Placement(table, 10_000).choose("m", 10, pin)
    assert decision is not None
    assert decision.reason == "moved"


def test_a_silent_group_is_passed_over_for_a_while_and_keeps_its_pins() -> None:
    table = table_of(group("home"), group("other"))
    home = table.get("home")
    assert home is not None
    table.close(home, 5.0)
    decision = Placement(table, 0).choose("m", 10, SessionPin("home", 1))
    assert decision is not None
    assert (decision.group.name, decision.reason) == ("other", "spilled")
    assert not table.reopen(4.9)
    assert table.reopen(5.0)
    assert choose(table, SessionPin("home", 1)) == "home"


def test_refusals_in_a_row_close_a_group_for_longer_and_longer() -> None:
    table = table_of(group("g"))
    home = table.get("g")
    assert home is not None
    pauses = []
    for _ in range(12):
        table.refused(home, 100.0)
        pauses.append(home.closed_until - 100.0)
        assert choose(table) == ""
        table.reopen(1000.0)
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE
    table.accepted(home)
    table.refused(home, 100.0)
    assert home.closed_until - 100.0 == pauses[0]


def test_no_group_has_more_than_a_bounded_number_in_hand() -> None:
    table = table_of(group("g"))
    home = table.get("g")
    assert home is not None
    for _ in range(IN_HAND):
        assert choose(table) == "g"
        table.reserve(home, 1)
    assert choose(table) == ""
    table.release(home, 1)
    assert choose(table) == "g"


def test_the_newer_report_of_a_load_counts_whichever_way_it_came() -> None:
    table = table_of(group("g"))
    home = table.get("g")
    assert home is not None
    table.report(home, GroupLoad(running=5, version=7))
    table.record(group("g", load=GroupLoad(running=1, version=6)))
    assert home.load.running == 5
    table.record(group("g", load=GroupLoad(running=2, version=8)))
    assert home.load.running == 2
    table.report(home, GroupLoad(running=9, version=7))
    assert home.load.running == 2


def test_a_new_epoch_is_another_ring_and_an_old_one_is_not_heard() -> None:
    table = table_of(group("g", epoch=2))
    old = table.get("g")
    assert old is not None
    table.reserve(old, 100)
    table.record(group("g", epoch=1, state="gone"))
    assert table.get("g") is old
    table.record(group("g", epoch=3))
    new = table.get("g")
    assert new is not None
    assert new is not old
    assert new.sent_requests == 0
    table.release(new, 100)
    assert (new.sent_requests, new.sent_tokens) == (0, 0), "it was the old ring's"


def test_an_event_takes_a_group_out_and_an_older_record_does_not_bring_it_back() -> None:
    table = table_of(group("g", epoch=2, updated_at=10.0))
    table.event(GroupEvent("g", "m", 1, "down", at=11.0))
    assert choose(table) == "g", "the loss of an earlier life is no news"
    table.event(GroupEvent("g", "m", 2, "down", "hung", at=11.0))
    assert choose(table) == ""
    table.record(group("g", epoch=2, updated_at=10.9))
    assert choose(table) == ""
    table.record(group("g", epoch=2, updated_at=11.1))
    assert choose(table) == "g"
    table.event(GroupEvent("g", "m", 2, "draining", at=12.0))
    assert choose(table) == ""
    table.forget("g")
    assert table.get("g") is None
    table.event(GroupEvent("g", "m", 2, "up"))
    assert choose(table) == ""
