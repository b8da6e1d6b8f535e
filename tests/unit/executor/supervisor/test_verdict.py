"""The sentence names the rank that is behind, not the one that waits for it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.supervisor.diagnostics.verdict import verdict
from shared.messages.debugging import (
    DUMP_VERSION,
    AllocatorDump,
    CollectiveDump,
    Dump,
    LeaderDump,
    PoolDump,
    QueuedDump,
    RankDump,
    StackDump,
)

ENGINE = StackDump("engine_0", ["services/executor/cpu/decoder.py:1 _run", "threading.py:9 run"])
MAIN = StackDump("MainThread", ["services/executor/leader/leader.py:7 _tell"])


def ring(*ranks: RankDump, state: str = "ready", loop: float = 0.1, loaded: float = 1.0) -> Dump:
    base = Dump(DUMP_VERSION, "g", "m", "i", "h", 1, 0.0, 0.0, "", state)
    return msgspec.structs.replace(base, ranks=list(ranks), loop_still_seconds=loop, loaded=loaded)


def rank(number: int, **fields: object) -> RankDump:
    return msgspec.structs.replace(
        RankDump(number, 100 + number, "running"), **{"finished_step": 4, "stacks": [ENGINE, MAIN], **fields}
    )


def at(number: int, seconds: float = 3.0, *, name: str = "all_reduce", in_flight: bool = True) -> CollectiveDump:
    return CollectiveDump(name, number, in_flight, 2048, seconds)


def test_a_ring_that_is_well_is_said_to_be() -> None:
    assert verdict(ring(rank(0), rank(1))) == "The ring is idle; step 4 was its last one."
    busy = ring(rank(0, in_flight=True, collective=at(9, 0.01)), rank(1, in_flight=True, collective=at(8, 0.01)))
    assert verdict(busy) == "The ring is at work in step 5; no rank is behind."
    runs = QueuedDump("a", "r", "running", "interactive", 0, 1.0, 3, 4, 7, 1)
    pool = PoolDump(4, 1, 3, 0, 0)
    blocks = AllocatorDump(16, pool, pool, 1, 0, 0, 0, 0, 0, 0, 0, 0, [], "hold")
    between = msgspec.structs.replace(ring(rank(0), rank(1)), leader=LeaderDump([runs], {}, blocks))
    assert verdict(between) == "The ring is at work in step 5; no rank is behind."


def test_without_a_ring_the_last_word_is_why() -> None:
    lost = msgspec.structs.replace(ring(state="none"), message="rank 1 ended with code 1")
    assert verdict(lost) == "There is no ring: rank 1 ended with code 1."


def test_a_stopped_rank_is_named_with_who_waits_for_it() -> None:
    waits = rank(0, in_flight=True, still_seconds=3.0, collective=at(9))
    stopped = rank(1, process="stopped", in_flight=True, still_seconds=3.0, collective=at(8))
    assert verdict(ring(waits, stopped)) == (
        "Rank 1 (process 101) is stopped by a signal (SIGSTOP): rank 0 (process 100, the leader) waits for it in "
        "all_reduce number 9 (2,048 bytes) for 3.0 s."
    )


def test_a_rank_that_has_not_come_is_named_with_where_it_is() -> None:
    behind = rank(0, in_flight=True, still_seconds=3.0, collective=at(8, in_flight=False))
    others = [rank(number, in_flight=True, still_seconds=3.0, collective=at(9)) for number in (1, 2)]
    assert verdict(ring(behind, *others)) == (
        "Rank 0 (process 100, the leader) is behind: ranks 1 (process 101), 2 (process 102) wait for it in "
        "all_reduce number 9 (2,048 bytes) for 3.0 s; it is running, in services/executor/cpu/decoder.py:1 _run."
    )


def test_all_in_one_collective_is_nobodys_fault_above_it() -> None:
    stuck = verdict(ring(*(rank(number, in_flight=True, collective=at(9)) for number in (0, 1))))
    assert stuck.startswith("All ranks have been in all_reduce number 9 (2,048 bytes) for 3.0 s and none gets out")
    apart = ring(rank(0, collective=at(9)), rank(1, collective=at(9, name="barrier")))
    assert verdict(apart).startswith("The ranks do not do the same: rank 0 in all_reduce number 9")


def test_a_rank_that_stands_still_elsewhere_is_named() -> None:
    still = rank(1, in_flight=True, still_seconds=2.5, collective=at(8, in_flight=False))
    assert verdict(ring(rank(0), still)) == (
        "Rank 1 (process 101) has stood still in step 5 for 2.5 s; it is running, in "
        "services/executor/cpu/decoder.py:1 _run."
    )


def test_a_leader_whose_loop_does_not_turn_is_named() -> None:
    idle = ring(rank(0, process="sleeping"), rank(1), loop=4.0)
    assert verdict(idle) == (
        "Rank 0 (process 100, the leader) has not turned its event loop for 4.0 s; it is sleeping, in "
        "services/executor/leader/leader.py:7 _tell."
    )
    busy = ring(rank(0, in_flight=True, still_seconds=0.1), rank(1), loop=4.0)
    assert "no rank is behind" in verdict(busy), "a loop that gets no turn beside a long step is busy"


def test_a_ring_that_loads_says_how_far_it_is() -> None:
    loading = ring(rank(0), rank(1), state="starting", loop=9.0, loaded=0.5)
    assert verdict(loading).startswith("The ring is loading (50% of the weights read)")
    late = rank(0, collective=at(3, name="barrier"))
    assert verdict(ring(late, rank(1), state="starting")).startswith("Rank 1 (process 101) is behind")


@pytest.mark.parametrize("process", ["ended", "stopped", "stopped by a debugger"])
def test_what_has_happened_to_a_process_comes_before_what_follows_from_it(process: str) -> None:
    found = verdict(ring(rank(0, in_flight=True, still_seconds=9, collective=at(9)), rank(1, process=process)))
    assert found.startswith("Rank 1 (process 101)")


numbers = st.integers(1, 4)
places = st.builds(CollectiveDump, st.just("all_reduce"), numbers, st.booleans(), st.just(8), st.floats(1.5, 9))


@given(st.lists(places, min_size=2, max_size=4))
def test_whoever_is_named_as_behind_is(found: list[CollectiveDump]) -> None:
    ranks = [rank(number, in_flight=True, collective=one) for number, one in enumerate(found)]
    sentence = verdict(ring(*ranks))
    waiting = [one.number for one in found if one.in_flight]
    late = [number for number, one in enumerate(found) if waiting and one.number < max(waiting)]
    assert (" behind" in sentence and "no rank is behind" not in sentence) == bool(late)
    named = sentence.partition(" behind")[0]
    for number in range(len(found)):
        assert (f"(process {100 + number}" in named) == (number in late) or not late


def test_a_rank_without_stacks_is_told_of_with_the_reason() -> None:
    for fields, why in (
        ({"stacks": []}, "there is no stack of it"),
        ({"stacks": [], "stacks_missing": "a stopped process writes no stacks"}, "a stopped process writes"),
    ):
        slow = ring(rank(0, **fields, in_flight=True, still_seconds=9.0), rank(1, in_flight=False))
        assert f"running, and {why}" in verdict(slow)
