"""Spill slots: least recently used goes, locked stays, and none is leaked under any schedule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.kv_cache.block_pool import PinnedBlocks
from services.executor.kv_cache.offload_tiers import SpillTier, SpillTiers
from services.executor.kv_cache.prefix_index import BlockKey


def key(name: int) -> BlockKey:
    return BlockKey(bytes([name]), b"", b"tokens")


def test_the_longest_unused_slot_is_given_away() -> None:
    tier = SpillTier(10, 2)
    assert [tier.put(key(0)), tier.put(key(1))] == [10, 11]
    assert tier.put(key(0)) is None, "it is there"
    assert tier.put(key(2)) == 11
    assert [tier.find(key(n)) for n in range(3)] == [10, None, 11]
    assert tier.find(key(0)._replace(tokens=b"others")) is None
    tier.check()


def test_a_locked_slot_stays_until_its_last_lock_is_gone() -> None:
    tier = SpillTier(0, 1)
    tier.put(key(0))
    tier.lock(0)
    tier.lock(0)
    assert tier.put(key(1)) is None
    tier.unlock(0)
    assert tier.put(key(1)) is None
    tier.unlock(0)
    assert tier.put(key(1)) == 0


def test_a_locked_slot_that_is_forgotten_is_free_when_it_is_unlocked() -> None:
    tier = SpillTier(0, 1)
    tier.put(key(0))
    tier.lock(0)
    tier.forget(0, key(1))
    assert tier.find(key(0)) == 0, "another's bytes were meant"
    tier.forget(0, key(0))
    tier.forget(0)
    assert tier.find(key(0)) is None
    assert tier.put(key(1)) is None
    tier.unlock(0)
    tier.check()
    assert tier.put(key(1)) == 0


def test_what_is_in_both_tiers_comes_from_host_memory() -> None:
    tiers = SpillTiers(1, 2)
    assert tiers.put(key(0)) == [0, 1]
    assert tiers.put(key(1)) == [0, 2]
    assert (tiers.find(key(0)), tiers.find(key(1)), tiers.find(key(2))) == (1, 0, None)
    assert tiers.on_disk(1)
    assert not tiers.on_disk(0)
    tiers.of(1).lock(1)
    tiers.check({1: 1})
    with pytest.raises(AssertionError):
        tiers.check({})
    assert (tiers.count, SpillTiers(0, 0).count) == (2, 0)
    assert SpillTiers(0, 0).find(key(0)) is None


@given(st.lists(st.tuples(st.sampled_from("plluf"), st.integers(0, 5)), max_size=60), st.integers(0, 4))
def test_no_slot_is_leaked(actions: list[tuple[str, int]], size: int) -> None:
    tier = SpillTier(3, size)
    content: dict[int, BlockKey] = {}
    locked: list[tuple[int, BlockKey]] = []
    for action, name in actions:
        if action == "p":
            slot = tier.put(key(name))
            if slot is not None:
                assert slot not in [held for held, _ in locked], "a locked slot is written"
                content[slot] = key(name)
        elif action == "l" and (found := tier.find(key(name))) is not None:
            tier.lock(found)
            locked.append((found, content[found]))
        elif action == "u" and locked:
            slot, held = locked.pop(name % len(locked))
            assert content[slot] == held
            tier.unlock(slot)
        elif action == "f" and (found := tier.find(key(name))) is not None:
            tier.forget(found)
        tier.check()


def test_a_session_that_is_to_be_kept_outlasts_newer_ones() -> None:
    pins = PinnedBlocks(ttl=10)
    pins.add(1, "a", 0.0, keep=30.0)
    pins.add(2, "b", 5.0)
    pins.add(3, "a", 6.0)
    pins.add(4, "c", 7.0, keep=1.0)
    assert pins.expire(16.0) == [2]
    assert pins.expire(29.9) == [4]
    assert pins.expire(30.0) == [1, 3]
    pins.check(set())


def test_a_session_expires_as_a_whole_after_its_last_use() -> None:
    pins = PinnedBlocks(ttl=10)
    pins.add(1, "a", 0.0)
    pins.add(2, "b", 5.0)
    pins.add(3, "a", 7.0)
    assert pins.expire(14.9) == []
    assert pins.expire(15.0) == [2]
    pins.remove(1)
    pins.remove(1)
    assert 1 not in pins
    assert pins.expire(100.0) == [3]
    assert pins.expire(100.0) == []
    pins.check(set())


def test_slots_of_an_earlier_life_are_found_and_given_away_in_the_order_of_writing() -> None:
    tiers = SpillTiers(1, 3)
    assert tiers.recover([(3, key(0)), (1, key(1)), (2, key(1))]) == 2, "the same block is found once"
    assert [tiers.find(key(name)) for name in range(3)] == [3, 1, None]
    tiers.check()
    assert tiers.put(key(2)) == [0, 2], "a free slot first"
    assert tiers.put(key(3)) == [0, 3], "then the longest unused"
    assert [tiers.find(key(name)) for name in range(2)] == [None, 1]
    tiers.check()
