"""Limits per minute that several gateways keep together: never more than the limit, and nobody starves."""

import itertools
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.core.errors import RateLimited, describe, headers_of, status_of
from services.gateway.ratelimit import limiter, window
from services.gateway.ratelimit.concurrency import REPEAT, SILENT, ConcurrencyCounts
from services.gateway.ratelimit.window import KEPT, LEASE, LimitAccount
from shared.messages.records import InUse, Spent


class House:
    """Gateways that share one window, as the shell lets them: whoever asks sees the newest."""

    def __init__(self, limit: int, gateways: int, skews: Iterable[float] = ()) -> None:
        self.accounts = [LimitAccount(limit) for _ in range(gateways)]
        self.skews = [*skews, *itertools.repeat(0.0, gateways)][:gateways]
        self.window = Spent()
        self.changes = 0
        self.spent: list[list[float]] = []  # [when, amount], as it was settled

    def ask(self, gateway: int, now: float, amount: int = 1) -> int | None:
        """The number of what was spent; None when it was refused."""
        account, clock = self.accounts[gateway], now + self.skews[gateway]
        granted = account.spend(amount, clock)
        if granted is None and not account.shut(amount, clock):
            self.exchange(gateway, clock, amount)
            granted = account.spend(amount, clock)
        if granted is None:
            return None
        self.spent.append([now, amount, granted, gateway])
        return len(self.spent) - 1

    def exchange(self, gateway: int, clock: float, amount: int) -> None:
        taken = self.accounts[gateway].apply(self.window, clock, amount)
        self.window = msgspec.msgpack.decode(msgspec.msgpack.encode(taken.window), type=Spent)
        self.accounts[gateway].applied(taken, clock)
        self.changes += 1

    def settle(self, number: int, spent: int) -> None:
        _, reserved, second, gateway = self.spent[number]
        self.accounts[int(gateway)].settle(int(second), int(reserved), spent)
        self.spent[number][1] = spent

    def sweep(self, now: float) -> None:
        for gateway, account in enumerate(self.accounts):
            if account.owes(now + self.skews[gateway]):
                self.exchange(gateway, now + self.skews[gateway], 0)

    def worst_minute(self) -> float:
        """The most that was spent within any 60 s."""
        totals = (sum(amount for at, amount, *_ in self.spent if begin <= at < begin + 60) for begin, *_ in self.spent)
        return max(totals, default=0)


steps = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from([0.0, 0.001, 0.02, 0.3, 0.9, 1.1, 7.0, 29.5, 58.5, 60.0, 61.9]),
        st.integers(1, 6),
        st.sampled_from(["spend", "spend", "spend", "less", "sweep"]),
    ),
    max_size=120,
)


@given(st.integers(1, 12), steps, st.floats(0, 0.999))
def test_no_minute_has_more_than_the_limit_whoever_asks_when(
    limit: int, script: list[tuple[int, float, int, str]], start: float
) -> None:
    house, now = House(limit, 4), 1_000_000.0 + start
    for gateway, pause, amount, act in script:
        now += pause
        if act == "sweep":
            house.sweep(now)
            continue
        number = house.ask(gateway, now, min(amount, limit))
        if number is not None and act == "less":
            house.settle(number, 0)
        assert house.worst_minute() <= limit


@settings(max_examples=30)
@given(st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=3))
def test_clocks_that_differ_by_a_second_let_a_little_more_through(skews: list[float]) -> None:
    """Of a steady flow at most: what one gateway forgets a second too early."""
    house, now = House(60, 3, skews), 1_000_000.0
    for second in range(200):
        for gateway in range(3):
            house.ask(gateway, now + second)
    assert house.worst_minute() <= 60 + 2 * 3


@settings(max_examples=20)
@given(st.integers(1, 50), st.integers(1, 8))
def test_a_flood_at_all_gateways_gets_nearly_the_whole_limit(per_minute: int, gateways: int) -> None:
    """Whatever shares are out at other gateways: in five minutes at least nine tenths of what was promised."""
    limit, seconds = per_minute * 3, 300
    house, now = House(limit, gateways), 1_000_000.0
    for tick in range(seconds * 4):
        for gateway in range(gateways):
            house.ask(gateway, now + tick / 4)
        if tick % 2:
            house.sweep(now + tick / 4)
    spent = sum(amount for _, amount, *_ in house.spent)
    assert spent >= 0.9 * limit * seconds / 60
    assert house.worst_minute() <= limit


def test_an_idle_gateway_gets_its_first_request_while_another_is_busy() -> None:
    house, now = House(100, 2), 1_000_000.0
    for tick in range(60):
        assert house.ask(0, now + tick / 60) is not None
    assert house.ask(1, now + 1.0) is not None


def test_a_wide_limit_costs_about_one_round_trip_per_second_and_gateway() -> None:
    house, now = House(100_000, 2), 1_000_000.0
    for tick in range(10_000):
        assert house.ask(tick % 2, now + tick / 1000) is not None
    assert house.changes <= 2 * 10 * 3


def test_what_was_reserved_and_not_used_is_there_for_others_at_once() -> None:
    house, now = House(100, 2), 1_000_000.0
    first = house.ask(0, now, 100)
    assert first is not None
    assert house.ask(1, now + 0.1, 50) is None
    house.settle(first, 20)
    house.sweep(now + 0.5)
    assert house.ask(1, now + 0.6, 80) is not None
    assert house.ask(0, now + 0.7, 1) is None


def test_what_was_used_beyond_its_reservation_counts() -> None:
    house, now = House(100, 1), 1_000_000.0
    first = house.ask(0, now, 10)
    assert first is not None
    house.settle(first, 130)
    house.sweep(now + 0.5)
    assert house.ask(0, now + 1.0, 1) is None
    assert house.ask(0, now + 1.0 + KEPT, 100) is not None


def test_the_wait_that_is_told_is_enough_and_no_second_too_long() -> None:
    house, now = House(10, 1), 1_000_000.25
    house.ask(0, now, 4)
    house.ask(0, now + 10, 6)
    for amount, granted_at in ((4, now), (5, now + 10), (10, now + 10)):
        wait = window.take(house.window, now + 20, needed=amount, wanted=0, limit=10).wait
        assert granted_at + 60 <= now + 20 + wait <= granted_at + KEPT
        assert window.take(house.window, now + 20 + wait, needed=amount, wanted=0, limit=10).granted


def test_the_mark_of_a_clock_that_was_wrong_by_an_hour_is_gone_within_a_minute() -> None:
    taken = window.take(Spent(), 1_003_600.0, needed=10, wanted=10, limit=10).window
    taken = window.take(taken, 1_000_000.0, needed=1, wanted=1, limit=10).window
    assert window.take(taken, 1_000_000.0 + 2 * KEPT, needed=10, wanted=10, limit=10).granted == 10


@given(st.lists(st.integers(0, 5), max_size=KEPT), st.integers(0, 90), st.integers(0, 9))
def test_windows_stay_small(slots: list[int], back: int, amount: int) -> None:
    given_back = window.give_back(Spent(1_000_000, slots), 1_000_000 - back, amount)
    assert 0 <= sum(slots) - sum(given_back.slots) <= amount
    later = window.advanced(given_back, 1_000_000.0 + back)
    assert len(later.slots) <= KEPT
    assert window.clear_in(later, 1_000_000.0 + back) <= KEPT
    assert LEASE < KEPT


# --- generations at the same time ----------------------------------------------------------------


def test_places_are_exact_here_and_heard_of_elsewhere() -> None:
    here, there = ConcurrencyCounts("a"), ConcurrencyCounts("b")
    assert here.begin({"key": 2}, 0.0) is None
    assert here.begin({"key": 2, "tenant": 9}, 0.0) is None
    assert here.begin({"key": 2}, 0.0) == ("key", 2)
    news = here.news(0.0)
    assert news == InUse("a", {"key": 2, "tenant": 1})
    assert here.news(0.5) is None
    assert here.news(REPEAT) == news
    there.hear(news, 0.0)
    here.hear(news, 0.0)
    assert here.count("key", 0.0) == 2
    assert there.begin({"tenant": 1}, 0.1) == ("tenant", 1)
    assert there.begin({"key": 3}, 0.1) is None
    assert there.begin({"key": 3}, 0.1) == ("key", 3)
    assert there.begin({"key": 3}, SILENT + 0.1) is None
    here.end({"key": 2})
    here.end({"key": 2, "tenant": 9})
    there.hear(here.news(2.0) or news, 2.0)
    assert there.count("tenant", 2.0) == 0
    assert there.news(9.0) == InUse("b", {"key": 2})


def test_nothing_is_to_be_told_once_the_last_end_was() -> None:
    here = ConcurrencyCounts("here")
    assert here.quiet
    assert here.begin({"key": 1}, 0.0) is None
    assert not here.quiet
    assert here.news(0.0) == InUse("here", {"key": 1})
    assert not here.quiet  # it is repeated
    here.end({"key": 1})
    assert not here.quiet
    assert here.news(0.1) == InUse("here", {})
    assert here.quiet


def test_gateways_that_vanished_are_forgotten() -> None:
    here = ConcurrencyCounts("here")
    for number in range(100):
        here.hear(InUse(f"gateway-{number}", {"key": 1}), number * SILENT)
    assert len(here._elsewhere) == 1
    assert here.count("key", 99 * SILENT) == 1


# --- as clients see it ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.1201, "121ms"), (1.0, "1s"), (20.04, "20.1s"), (60, "1m0s"), (61.5, "1m2s"), (3723, "1h2m3s")],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert limiter.duration(seconds) == text


def test_a_refusal_is_openais() -> None:
    error = limiter.reached("requests", "API key rz-x", limit=3, used=3, requested=1, wait=1.2)
    body = describe(error, "r").error
    assert (status_of(error), body.code, body.type) == (429, "rate_limit_exceeded", "requests")
    assert "(RPM): Limit 3, Used 3, Requested 1. Please try again in 1.2s." in body.message
    assert headers_of(error) == {"retry-after": "2", "retry-after-ms": "1200"}
    large = limiter.too_large("API key rz-x", limit=3, requested=9)
    assert isinstance(large, RateLimited)
    assert headers_of(large) == {}
