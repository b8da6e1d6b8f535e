"""Homes follow from names alone, spread evenly, and only those of a group that comes or goes move."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.groups import RANKS, SLOTS, RendezvousHash
from services.scheduler.request import LENGTHS, Prefix, prefixes
from shared.messages import SparseAttention

names = st.sets(st.text(min_size=1), min_size=1, max_size=12)
keys = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20)


@given(names, keys)
def test_order_and_history_do_not_matter(groups: set[str], wanted: list[int]) -> None:
    one, two = RendezvousHash(sorted(groups)), RendezvousHash()
    for name in sorted(groups, reverse=True):
        two.add("passing by" + name)
        two.ranked(wanted[0])
        two.add(name)
    for name in groups:
        two.remove("passing by" + name)
    for key in wanted:
        ranked = one.ranked(key)
        assert ranked == two.ranked(key)
        assert len(set(ranked)) == len(ranked) == min(RANKS, len(groups))


@given(names, keys)
def test_only_the_keys_of_a_group_that_leaves_move(groups: set[str], wanted: list[int]) -> None:
    ranking = RendezvousHash(groups)
    gone = sorted(groups)[0]
    before = {key: ranking.ranked(key) for key in wanted}
    ranking.remove(gone)
    ranking.remove("never there")
    for key, ranked in before.items():
        if gone not in ranked:
            assert ranking.ranked(key) == ranked
        elif len(groups) > 1:
            assert ranking.ranked(key)[0] == next(name for name in ranked if name != gone)


def test_keys_are_spread_evenly() -> None:
    ranking = RendezvousHash(f"group-{n}" for n in range(10))
    counts = Counter(ranking.ranked(slot)[0] for slot in range(SLOTS))
    assert len(counts) == 10
    assert max(counts.values()) < 1.15 * SLOTS / 10
    assert min(counts.values()) > 0.85 * SLOTS / 10


@given(st.lists(st.integers(0, 1000), max_size=1200), st.lists(st.integers(0, 1000), max_size=300))
def test_prompts_that_begin_alike_share_the_names_of_that_beginning(prompt: list[int], more: list[int]) -> None:
    found = prefixes("m", prompt)
    assert [each.tokens for each in found] == [n for n in reversed(LENGTHS) if n <= len(prompt)]
    longer = prefixes("m", prompt + more)
    assert longer[len(longer) - len(found) :] == found
    assert not set(found) & set(prefixes("other", prompt))
    assert not set(found) & set(prefixes("m", prompt, "salt"))
    assert not set(prefixes("m", prompt, "other")) & set(prefixes("m", prompt, "salt"))
    below = [prefix for prefix in found if prefix.tokens <= 256]
    for choice in (SparseAttention(threshold=256), SparseAttention("window", threshold=256)):
        shared = set(found) & set(prefixes("m", prompt, sparse=choice))
        assert shared == set(below), "blocks are shared up to the threshold"
    for length in LENGTHS:
        if len(prompt) >= length:
            changed = [*prompt[: length - 1], prompt[length - 1] + 1, *prompt[length:]]
            shared = {each.tokens for each in set(found) & set(prefixes("m", changed))}
            assert shared == {n for n in LENGTHS if n < length}


def test_a_prompt_that_no_model_could_take_has_no_names() -> None:
    assert prefixes("m", [1 << 40] * 100) == ()
    assert prefixes("m", [1] * 64 + [1 << 40] * 500) == prefixes("m", [1] * 64)
    assert isinstance(prefixes("m", [1] * 64)[0], Prefix)
