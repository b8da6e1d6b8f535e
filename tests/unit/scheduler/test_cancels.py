"""Cancelled generations are remembered for a time and in a number that are bounded."""

from services.scheduler.cancels import REMEMBER, CancelMemory


def test_a_cancelled_generation_is_known_for_a_while() -> None:
    memory = CancelMemory()
    memory.cancel("a", 0.0)
    memory.cancel("b", REMEMBER - 1)
    assert memory.cancelled("a")
    memory.cancel("c", REMEMBER)
    assert not memory.cancelled("a")
    assert memory.cancelled("b")
    assert memory.cancelled("c")


def test_memory_is_bounded() -> None:
    memory = CancelMemory(capacity=3)
    for index in range(5):
        memory.cancel(str(index), 0.0)
        memory.taken(str(index), "g")
    assert [memory.cancelled(str(index)) for index in range(5)] == [False, False, True, True, True]
    assert [memory.group_of(str(index)) for index in range(5)] == [None, None, "g", "g", "g"]


def test_the_last_group_that_took_a_generation_is_known() -> None:
    memory = CancelMemory()
    memory.taken("a", "one")
    memory.taken("a", "two")
    assert memory.group_of("a") == "two"
