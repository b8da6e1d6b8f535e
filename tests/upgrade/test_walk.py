"""Every step of every order of an upgrade, and of every way back."""

from itertools import permutations

import pytest

from tests.upgrade.mixtures import mixtures, visited, walk


@pytest.mark.parametrize("kinds", ["a", "ab", "abcd"])
def test_each_kind_is_replaced_once_in_each_mixture(kinds: str) -> None:
    steps = list(visited(walk(kinds)))
    assert len(steps) == len(set(steps)) == len(mixtures(kinds)) * len(kinds)
    last, kind = steps[-1]
    assert last ^ {kind} == frozenset()


def test_every_order_is_made_of_its_steps() -> None:
    steps = set(visited(walk("abcd")))
    for order in permutations("abcd"):
        done: frozenset[str] = frozenset()
        for kind in order:
            assert (done, kind) in steps
            done |= {kind}
        for kind in order:
            assert (done, kind) in steps
            done -= {kind}
