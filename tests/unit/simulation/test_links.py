"""Delays and cuts of links between hosts."""

import random

from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.core.links import HERE, LATENCY, LONG, RESEND_AFTER, RESEND_MOST, Link, Links, noticed


def test_most_segments_are_quick_and_few_are_not() -> None:
    draw, link = random.Random(1), Link()
    delays = sorted(link.delay(draw) for _ in range(200_000))
    assert delays[0] >= LATENCY[0]
    assert delays[int(0.99 * len(delays))] <= LATENCY[1]
    assert RESEND_AFTER < delays[-1] <= LATENCY[1] + LONG + RESEND_AFTER


@given(st.integers(0, 1 << 32), st.floats(0, 10), st.floats(0, 1))
def test_faults_make_links_slower_and_losses_end(seed: int, slow: float, loss: float) -> None:
    draw = random.Random(seed)
    delay = Link(slow=slow, loss=loss).delay(draw)
    assert delay >= LATENCY[0] + slow / 2
    assert delay <= 1.5 * slow + 2 * RESEND_MOST + LONG + LATENCY[1]
    assert HERE[0] <= Link(near=True).delay(draw) <= HERE[1]


@given(st.integers(0, 1 << 32), st.floats(0, 10_000))
def test_a_line_that_is_whole_again_is_noticed(seed: int, seconds: float) -> None:
    assert 0 <= noticed(random.Random(seed), seconds) <= RESEND_MOST


def test_cuts_are_by_direction_and_by_host() -> None:
    links = Links()
    links.cut([("a", "b")], True)
    assert [links.passes("a", "b"), links.passes("b", "a"), links.passes("a", "a")] == [False, True, True]
    links.part("b")
    assert [links.passes("b", "a"), links.passes("c", "b"), links.passes("b", "b")] == [False, False, True]
    links.join("b")
    assert [links.passes("a", "b"), links.passes("b", "a")] == [False, True]
    links.cut([("a", "b")], False)
    assert links.passes("a", "b")
    assert links.between("a", "b") is links.between("a", "b")
