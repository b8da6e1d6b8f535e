"""The table: which groups are open, what they are known to have, and who said so last."""

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.scheduler.groups import FIRST_REFUSAL, HORIZON, IN_HAND, LONGEST_REFUSAL, MIN_BACKLOG, GroupTable
from shared.messages import GroupEvent, GroupLoad, GroupStatus
from tests.unit.scheduler.requests import group
from tests.unit.scheduler.tables import FREE, STATES, known, loads, table_of


def open_names(table: GroupTable) -> list[str]:
    return sorted(each.name for each in table.open("m"))


def test_refusals_in_a_row_close_a_group_for_longer_and_longer() -> None:
    table = table_of(group("g"))
    home = known(table, "g")
    pauses, now = [], 100.0
    for _ in range(12):
        table.refused(home, now)
        assert open_names(table) == []
        pauses.append(home.breaker.open_until - now)
        now = home.breaker.open_until
        assert table.reopen(now)
        assert open_names(table) == ["g"]
        table.reserve(home, 10)
        assert open_names(table) == [], "one probe"
        table.release(home, 10)
    assert pauses == sorted(pauses)
    assert abs(pauses[-1] - LONGEST_REFUSAL) < 1e-9
    table.accepted(home)
    table.refused(home, now)
    assert abs(home.breaker.open_until - now - FIRST_REFUSAL) < 1e-9


def test_a_group_has_room_for_its_places_and_a_backlog() -> None:
    table = table_of(group("g", load=msgspec.structs.replace(FREE, slots=4)))
    home = known(table, "g")
    for _ in range(4 + MIN_BACKLOG):
        assert open_names(table) == ["g"]
        table.reserve(home, 1)
    assert open_names(table) == []
    assert table.stalest("m", "interactive", 5, 1.0) == [home]
    table.report(home, msgspec.structs.replace(home.load, running=4, waiting=MIN_BACKLOG, version=1), 2.0, 0.01)
    for _ in range(4 + MIN_BACKLOG):
        table.release(home, 1)
    assert open_names(table) == []
    assert table.stalest("m", "interactive", 5, 1.0) == [], "it has just said so"
    table.report(home, msgspec.structs.replace(home.load, running=3, version=2), 3.0, 0.01)
    assert open_names(table) == ["g"]
    assert table.stalest("m", "interactive", 5, 9.0) == []
    assert table.stalest("m", "batch", 5, 9.0) == [home]
    home.reported = 8.9
    assert table.stalest("m", "batch", 5, 8.0) == [home], "others' requests are answered all the time"
    home.asked = 8.5
    assert table.stalest("m", "batch", 5, 8.0) == []


def test_no_group_has_more_than_a_bounded_number_in_hand() -> None:
    table = table_of(group("g", load=msgspec.structs.replace(FREE, slots=10_000)))
    for _ in range(IN_HAND):
        assert open_names(table) == ["g"]
        table.reserve(known(table, "g"), 1)
    assert open_names(table) == []


def test_a_group_with_prompts_for_long_gets_no_more_but_an_idle_one_gets_any() -> None:
    load = msgspec.structs.replace(FREE, prompt_tokens_per_second=1000.0)
    table = table_of(group("g", load=load))
    assert open_names(table) == ["g"]
    table.reserve(known(table, "g"), round(1000 * HORIZON))
    assert open_names(table) == []
    running = msgspec.structs.replace(load, running=1, waiting_tokens=5000, version=1)
    table.release(known(table, "g"), round(1000 * HORIZON))
    table.report(known(table, "g"), running, 1.0, 0.01)
    assert open_names(table) == ["g"], "nothing waits behind what runs"


def test_the_newer_report_of_a_load_counts_whichever_way_it_came() -> None:
    table = table_of(group("g"))
    home = known(table, "g")
    table.report(home, GroupLoad(running=5, version=7), 1.0, 0.01)
    table.record(group("g", load=GroupLoad(running=1, version=6)))
    assert home.load.running == 5
    table.record(group("g", load=GroupLoad(running=2, version=8)))
    assert home.load.running == 2
    table.report(home, GroupLoad(running=9, version=7), 2.0, 0.01)
    assert home.load.running == 2


def test_a_new_epoch_is_another_ring_and_an_old_one_is_not_heard() -> None:
    table = table_of(group("g", epoch=2))
    old = known(table, "g")
    table.reserve(old, 100)
    table.timed_out(old, 1.0)
    table.record(group("g", epoch=1, state="gone"))
    assert known(table, "g") is old
    table.record(group("g", epoch=3))
    new = known(table, "g")
    assert new is not old
    assert new.sent_requests == 0
    assert open_names(table) == ["g"], "its breaker is a new one"
    table.release(new, 100)
    assert (new.sent_requests, new.sent_tokens) == (0, 0), "it was the old ring's"
    table.release(old, 100)
    table.accepted(old)
    assert table.open("m") == [new]


def test_an_event_takes_a_group_out_and_an_older_record_does_not_bring_it_back() -> None:
    table = table_of(group("g", epoch=2, updated_at=10.0))
    table.event(GroupEvent("g", "m", 1, "down", at=11.0))
    assert open_names(table) == ["g"], "the loss of an earlier life is no news"
    table.event(GroupEvent("g", "m", 2, "down", "hung", at=11.0))
    assert open_names(table) == []
    assert dict(table.breakers()) == {"g": "open"}
    table.record(group("g", epoch=2, updated_at=10.9))
    assert open_names(table) == []
    table.record(group("g", epoch=2, updated_at=11.1))
    assert open_names(table) == ["g"]
    assert dict(table.breakers()) == {"g": "half_open"}
    table.event(GroupEvent("g", "m", 2, "draining", at=12.0))
    assert open_names(table) == []
    table.forget("g")
    assert table.get("g") is None
    table.event(GroupEvent("g", "m", 2, "up"))
    assert open_names(table) == []


def test_a_model_that_nobody_serves_costs_no_memory() -> None:
    table = table_of(group("g"))
    for name in ("x", "y"):
        assert (table.open(name), list(table.of(name)), len(table.ranking(name))) == ([], [], 0)
    table.forget("g")
    assert table._models == {}


class TableMachine(RuleBasedStateMachine):
    """The lists that are kept up to date against the conditions they stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.table = GroupTable()
        self.now = 0.0

    names = st.sampled_from("abcd")

    @rule(
        name=names,
        state=st.sampled_from(STATES),
        epoch=st.integers(1, 3),
        load=loads,
        model=st.sampled_from(["m", "n"]),
    )
    def record(self, name: str, state: GroupStatus, epoch: int, load: GroupLoad, model: str) -> None:
        self.table.record(group(name, state=state, epoch=epoch, load=load, model=model))

    @rule(name=names)
    def forget(self, name: str) -> None:
        self.table.forget(name)

    @rule(name=names, kind=st.sampled_from(["up", "down", "draining"]), epoch=st.integers(1, 3))
    def event(self, name: str, kind: str, epoch: int) -> None:
        self.table.event(GroupEvent(name, "m", epoch, kind))  # type: ignore[arg-type]

    @rule(name=names, what=st.sampled_from(["reserve", "release", "accepted", "refused", "timed_out", "report"]))
    def own(self, name: str, what: str) -> None:
        found = self.table.get(name)
        if found is None:
            return
        if what in ("reserve", "release"):
            getattr(self.table, what)(found, 500)
        elif what in ("refused", "timed_out"):
            getattr(self.table, what)(found, self.now)
        elif what == "accepted":
            self.table.accepted(found)
        else:
            self.table.report(found, FREE, self.now, 0.01)

    @rule(seconds=st.floats(0.01, 2.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.table.reopen(self.now)

    @invariant()
    def lists_are_what_they_stand_for(self) -> None:
        for model in "mn":
            groups = list(self.table.of(model))
            assert {each.name for each in groups if each.takes} == {each.name for each in self.table.open(model)}
            assert [each.place for each in self.table.open(model)] == list(range(len(self.table.open(model))))
            assert len(self.table.ranking(model)) == sum(each.up for each in groups)
            for each in groups:
                assert self.table.get(each.name) is each
                if each.breaker.state == "open" and each.breaker.open_until < float("inf"):
                    assert any(entry[2] is each for entry in self.table._closures), "nobody would reopen it"


TestTableMachine = TableMachine.TestCase


def test_a_cordoned_group_gets_nothing_new_until_it_is_uncordoned() -> None:
    table = GroupTable()
    table.cordon("m", ["b"])
    for name in ("a", "b"):
        table.record(group(name))
    assert [item.name for item in table.open("m")] == ["a"]
    table.cordon("m", ["a"])
    assert [item.name for item in table.open("m")] == ["b"]
    table.cordon("m", [])
    assert {item.name for item in table.open("m")} == {"a", "b"}
    table.cordon("m", [])
