"""Slow groups: against their own past, against their peers, at like sizes of steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.health_monitor.speed import LOWEST, REST, Speeds
from shared.messages import GroupWork


class Fleet:
    """Groups of one model that make steps of a set time, and tell of it each second."""

    def __init__(self, *names: str) -> None:
        self.speeds = Speeds()
        self.now = 0.0
        self.work = dict.fromkeys(names, GroupWork())
        self.epochs = dict.fromkeys(names, 1)
        self.weights = dict.fromkeys(names, 1.0)

    def run(self, seconds: int, step: dict[str, float], tokens: int = 8) -> dict[str, float]:
        for _ in range(seconds):
            self.now += 1.0
            for name, length in step.items():
                work, count = self.work[name], round(1.0 / length)
                self.work[name] = GroupWork(work.steps + count, work.seconds + 1.0, work.tokens + count * tokens)
            self.tell()
        return dict(self.weights)

    def rest(self, seconds: int) -> dict[str, float]:
        for _ in range(seconds):
            self.now += 1.0
            self.tell()
        return dict(self.weights)

    def tell(self) -> None:
        for name, work in self.work.items():
            self.weights[name] = self.speeds.observe(name, "m", self.epochs[name], work, self.now)


def test_a_group_that_becomes_slow_is_known_by_its_own_past() -> None:
    fleet = Fleet("a")
    assert fleet.run(30, {"a": 0.01}) == {"a": 1.0}
    assert fleet.run(15, {"a": 0.04})["a"] == pytest.approx(0.25, abs=0.1)
    assert fleet.run(15, {"a": 0.01}) == {"a": 1.0}


def test_a_group_that_is_slower_than_its_peers_is_known_from_the_start() -> None:
    fleet = Fleet("a", "b", "c")
    steps = {"a": 0.01, "b": 0.011, "c": 0.05}
    assert fleet.run(30, steps)["c"] == pytest.approx(0.2, abs=0.05)
    fleet.epochs["c"] = 2
    fleet.tell()
    assert fleet.weights["c"] == 1.0, "a new ring is given the chance"
    assert fleet.run(5, steps)["c"] < 0.5


def test_a_machine_with_groups_that_are_all_busy_has_no_slow_one() -> None:
    fleet = Fleet("a", "b")
    assert fleet.run(30, {"a": 0.02, "b": 0.03}) == {"a": 1.0, "b": 1.0}


def test_larger_steps_may_take_longer() -> None:
    fleet = Fleet("a", "b")
    fleet.run(30, {"a": 0.01, "b": 0.01})
    assert fleet.run(30, {"a": 0.2}, tokens=512) == {"a": 1.0, "b": 1.0}


def test_what_stays_slow_becomes_usual_where_there_are_no_peers() -> None:
    fleet = Fleet("a")
    fleet.run(30, {"a": 0.01})
    assert fleet.run(20, {"a": 0.03})["a"] < 0.6
    assert fleet.run(900, {"a": 0.03}) == {"a": 1.0}


def test_a_slow_group_that_has_rested_is_tried_again() -> None:
    fleet = Fleet("a")
    fleet.run(30, {"a": 0.01})
    assert fleet.run(20, {"a": 0.1})["a"] < 0.3
    assert fleet.rest(int(REST) - 1)["a"] < 0.3
    assert fleet.rest(1) == {"a": 1.0}


def test_steps_of_no_length_are_noise() -> None:
    fleet = Fleet("a")
    fleet.run(30, {"a": 0.0001})
    assert fleet.run(30, {"a": 0.001}) == {"a": 1.0}


def test_groups_that_are_gone_are_forgotten() -> None:
    fleet = Fleet("a", "b")
    fleet.run(30, {"a": 0.05, "b": 0.01})
    fleet.speeds.keep(["a"])
    assert fleet.speeds.observe("b", "m", 1, GroupWork(), 100.0) == 1.0


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.floats(0.1, 5.0), st.integers(0, 500), st.floats(0, 5.0)), max_size=80
    )
)
def test_weights_are_shares_whatever_comes(beats: list[tuple[str, float, int, float]]) -> None:
    speeds, now, work = Speeds(), 0.0, dict.fromkeys("abc", GroupWork())
    for name, gap, steps, seconds in beats:
        now += gap
        before = work[name]
        work[name] = GroupWork(before.steps + steps, before.seconds + seconds, before.tokens + steps * 3)
        assert LOWEST <= speeds.observe(name, "m", 1, work[name], now) <= 1.0
