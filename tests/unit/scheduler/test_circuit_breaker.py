"""The breaker: opens on a failure, for longer each time, lets one probe through, closes on success."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.scheduler.groups import FIRST_REFUSAL, LONGEST_REFUSAL, TIMEOUT_DOUBLINGS, CircuitBreaker, State
from services.scheduler.metrics import GroupCollector


def fail_again(breaker: CircuitBreaker, refusal: bool, times: int) -> list[float]:
    """Open times when each probe fails too."""
    pauses, now = [], 100.0
    for _ in range(times):
        assert breaker.allows
        breaker.sent()
        (breaker.refused if refusal else breaker.timed_out)(now)
        assert not breaker.allows
        pauses.append(breaker.open_until - now)
        assert not breaker.tick(math.nextafter(breaker.open_until, 0))
        now = breaker.open_until
        assert breaker.tick(now)
    return pauses


def test_refusals_in_a_row_open_it_for_twice_as_long_up_to_a_cap() -> None:
    pauses = fail_again(CircuitBreaker(), True, 100)
    assert abs(pauses[0] - FIRST_REFUSAL) < 1e-9
    assert all(abs(later - min(2 * pause, LONGEST_REFUSAL)) < 1e-9 for pause, later in itertools.pairwise(pauses))
    assert max(pauses) <= LONGEST_REFUSAL + 1e-9


def test_a_timeout_opens_it_for_longer() -> None:
    pauses = fail_again(CircuitBreaker(0.5), False, 10)
    assert [round(pause, 6) for pause in pauses[:4]] == [0.5, 1.0, 2.0, 4.0]
    assert max(pauses) <= 0.5 * 2**TIMEOUT_DOUBLINGS + 1e-9


def test_refusals_before_a_timeout_do_not_make_it_longer() -> None:
    breaker = CircuitBreaker(0.5)
    fail_again(breaker, True, 4)
    assert abs(fail_again(breaker, False, 1)[0] - 0.5) < 1e-9
    assert fail_again(breaker, True, 1)[0] <= LONGEST_REFUSAL + 1e-9


def test_half_open_lets_one_request_through_at_a_time() -> None:
    breaker = CircuitBreaker()
    breaker.refused(0.0)
    assert breaker.tick(1.0)
    assert breaker.allows
    breaker.sent()
    assert not breaker.allows
    breaker.cancel_probe()
    assert breaker.allows
    breaker.sent()
    breaker.succeeded()
    assert (breaker.state, breaker.allows) == ("closed", True)
    breaker.sent()
    assert breaker.allows


def test_success_forgets_earlier_failures() -> None:
    breaker = CircuitBreaker()
    for _ in range(5):
        fail_again(breaker, True, 1)
    breaker.succeeded()
    assert abs(fail_again(breaker, True, 1)[0] - FIRST_REFUSAL) < 1e-9


def test_failures_of_what_was_sent_before_are_the_same_failure() -> None:
    breaker = CircuitBreaker()
    breaker.timed_out(10.0)
    until = breaker.open_until
    breaker.timed_out(10.5)
    breaker.refused(10.6)
    assert breaker.open_until == until


def test_only_the_monitor_ends_what_the_monitor_began() -> None:
    breaker = CircuitBreaker()
    breaker.trip()
    assert not breaker.tick(1e9)
    breaker.succeeded()
    assert breaker.state == "open"
    breaker.restore()
    assert (breaker.state, breaker.allows) == ("half_open", True)
    breaker.sent()
    breaker.restore()
    assert not breaker.allows, "still one probe"


class BreakerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.breaker = CircuitBreaker(1.0)
        self.now = 0.0
        self.out = 0
        self.probes = 0

    @rule(seconds=st.floats(0.001, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.breaker.tick(self.now):
            self.probes = 0

    @rule()
    def send(self) -> None:
        if self.breaker.allows:
            half_open = self.breaker.state == "half_open"
            self.breaker.sent()
            self.out += 1
            self.probes += half_open

    @rule(how=st.sampled_from(["succeeded", "refused", "timed_out"]))
    def answer(self, how: str) -> None:
        if self.out:
            self.out -= 1
            if how == "succeeded":
                self.breaker.succeeded()
            else:
                getattr(self.breaker, how)(self.now)
            if not self.out:
                self.breaker.cancel_probe()
            self.probes = 0

    @rule(up=st.booleans())
    def monitor(self, up: bool) -> None:
        if up:
            if self.breaker.open_until == math.inf:
                self.probes = 0
            self.breaker.restore()
        else:
            self.breaker.trip()

    @invariant()
    def one_probe_at_most_and_never_open_for_ever(self) -> None:
        assert self.probes <= 1
        breaker = self.breaker
        assert breaker.allows == (breaker.state == "closed" or (breaker.state == "half_open" and breaker.allows))
        if breaker.state == "open":
            assert not breaker.allows
            assert breaker.open_until == math.inf or breaker.open_until - self.now <= 8.0
        if breaker.state == "half_open" and not self.out:
            assert breaker.allows, "a probe that is not on its way must not keep the group out"


TestBreakerMachine = BreakerMachine.TestCase


@given(st.dictionaries(st.text(min_size=1), st.sampled_from(["closed", "half_open", "open"])))
def test_each_groups_state_is_a_gauge(states: dict[str, State]) -> None:
    family, _ = GroupCollector(states.items).collect()
    values = {"closed": 0, "half_open": 1, "open": 2}
    assert {s.labels["group"]: s.value for s in family.samples} == {
        name: values[state] for name, state in states.items()
    }
