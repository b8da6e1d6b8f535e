"""Cancelled and placed generations are remembered for a time and in a number that are bounded."""

from services.scheduler.router import REMEMBER, DispatchHistory, Holder


def test_a_cancelled_generation_is_known_for_a_while() -> None:
    memory = DispatchHistory()
    memory.cancel("a", 0.0)
    memory.cancel("b", REMEMBER - 1)
    assert memory.cancelled("a")
    memory.cancel("c", REMEMBER)
    assert not memory.cancelled("a")
    assert memory.cancelled("b")
    assert memory.cancelled("c")


def test_memory_is_bounded() -> None:
    memory = DispatchHistory(capacity=3)
    for index in range(5):
        memory.cancel(str(index), 0.0)
        memory.on_accepted(str(index), Holder(0, "g", 1))
    assert [memory.cancelled(str(index)) for index in range(5)] == [False, False, True, True, True]
    holders = [memory.holder(str(index)) for index in range(5)]
    assert holders == [None, None] + [Holder(0, "g", 1)] * 3


def test_the_last_ring_that_took_a_generation_is_known() -> None:
    memory = DispatchHistory()
    memory.on_accepted("a", Holder(0, "one", 1))
    memory.on_accepted("a", Holder(1, "two", 7))
    assert memory.holder("a") == Holder(1, "two", 7)


def test_a_cancellation_by_an_owner_ends_nothing_that_was_claimed_since() -> None:
    memory = DispatchHistory()
    memory.cancel("a", 0.0, claim=3)
    assert memory.cancelled("a", 3)
    assert memory.cancelled("a", 0)
    assert not memory.cancelled("a", 4)
    assert memory.claim_of_cancel("a") == 3
    memory.cancel("a", 0.0)  # the client's own wish
    assert memory.cancelled("a", 4)
    assert memory.claim_of_cancel("a") == -1
    memory.cancel("a", 0.0, claim=1)
    assert memory.cancelled("a", 4)
