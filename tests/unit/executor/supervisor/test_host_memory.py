"""What fits on a host: promises never exceed its memory, and what sleeps makes way."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.supervisor.host.memory import (
    GIB,
    GPU_OVERHEAD,
    KV_SHARE,
    LEAST_KV,
    RANK_OVERHEAD,
    HostMemory,
    ModelSize,
)
from shared.errors import ModelDoesNotFit

SMALL = ModelSize(GIB, 16 << 20)


def host(size: int = 16 * GIB) -> HostMemory:
    return HostMemory([size], gpus=False)


def test_on_a_cpu_a_cache_takes_its_share_and_no_more_than_its_sequences_need() -> None:
    memory = host()
    [small] = [memory.place("a", SMALL, 2, 0).footprint]
    assert small == (GIB, 64 * SMALL.sequence, 2 * RANK_OVERHEAD)
    assert memory.place("b", ModelSize(GIB, GIB), 1, 0).footprint.kv == int(KV_SHARE * 16 * GIB)
    assert memory.place("c", SMALL, 1, 123).footprint.kv == 123, "what was said"
    assert memory.used == sum((small.total, GIB + 4 * GIB + RANK_OVERHEAD, GIB + 123 + RANK_OVERHEAD))


def test_a_cache_gets_what_is_left_and_at_least_one_sequence() -> None:
    memory = host(4 * GIB)
    memory.hold("own", 2 * GIB)
    placed = memory.place("a", ModelSize(GIB, 512 << 20), 1, 0)
    assert placed.footprint.total == 2 * GIB
    memory.release("a")
    with pytest.raises(ModelDoesNotFit, match="has 2147483648 of 4294967296 left"):
        memory.place("a", ModelSize(GIB, GIB), 1, 0)
    assert memory.least(ModelSize(GIB, 0), 1, 0) == GIB + LEAST_KV + RANK_OVERHEAD


def test_ranks_get_the_gpus_with_the_most_room() -> None:
    memory = HostMemory([80 * GIB, 40 * GIB, 80 * GIB], gpus=True, asleep_limit=GIB)
    first = memory.place("a", ModelSize(20 * GIB, GIB), 2, 10 * GIB)
    assert first.devices == (0, 2)
    assert memory.place("b", ModelSize(20 * GIB, GIB), 1, GIB).devices == (0,)
    assert memory.place("c", SMALL, 1, GIB).devices == (2,)
    assert memory.devices == 3
    with pytest.raises(ModelDoesNotFit, match="4 ranks, and its host has 3 GPUs"):
        memory.place("d", SMALL, 4, 0)
    with pytest.raises(ModelDoesNotFit, match="emptiest of its host's 3 GPUs"):
        memory.place("d", ModelSize(200 * GIB, 0), 3, 0)
    memory.hold("own", 3 * GPU_OVERHEAD, [1])
    memory.release("nobody")


def test_what_has_slept_longest_makes_way_first() -> None:
    memory = host(4 * GIB)
    assert memory.put_to_sleep("a", GIB) == []
    assert memory.put_to_sleep("b", GIB) == []
    assert memory.put_to_sleep("a", GIB) == [], "it sleeps anew"
    assert (memory.asleep, memory.sleepers, memory.used) == (2 * GIB, 2, 0)
    assert memory.place("g", SMALL, 1, GIB).woken == ("b",)
    assert memory.put_to_sleep("c", 4 * GIB) is None
    assert memory.put_to_sleep("d", 3 * GIB // 2) == ["a"]
    memory.wake("d")
    assert memory.asleep == 0


sizes = st.integers(0, 3 * GIB)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("place"), st.integers(0, 5), sizes, sizes, st.integers(1, 4)),
        st.tuples(st.just("release"), st.integers(0, 5)),
        st.tuples(st.just("sleep"), st.integers(0, 5), sizes),
    ),
    max_size=30,
)


@given(st.lists(st.integers(GIB, 9 * GIB), min_size=1, max_size=4), st.booleans(), steps)
def test_promises_never_exceed_any_device(capacities: list[int], gpus: bool, steps: list[tuple]) -> None:  # type: ignore[type-arg]
    if not gpus:
        capacities = capacities[:1]
    memory = HostMemory(capacities, gpus=gpus, asleep_limit=4 * GIB)
    promised: dict[str, int] = {}
    for kind, number, *rest in steps:
        name = str(number)
        if kind == "place" and name not in promised:
            with contextlib.suppress(ModelDoesNotFit):
                placed = memory.place(name, ModelSize(rest[0], rest[1] // 64), rest[2], 0)
                promised[name] = placed.footprint.total
                assert len(placed.devices) == (rest[2] if gpus else 0)
        elif kind == "release":
            memory.release(name)
            promised.pop(name, None)
        elif kind == "sleep":
            memory.put_to_sleep(name, rest[0])
        assert sum(promised.values()) <= memory.used <= memory.total
        assert memory.used - sum(promised.values()) <= 4 * len(promised), "rounded up to whole bytes"
        assert memory.asleep + (0 if gpus else memory.used) <= (4 * GIB if gpus else memory.total)
        for device, capacity in enumerate(capacities):
            assert sum(held[device] for held in memory._held.values()) <= capacity


def test_a_fine_tuning_job_has_what_models_leave_and_makes_way_for_them() -> None:
    memory = host(8 * GIB)
    memory.hold("own", 2 * GIB)
    assert memory.place_job("first", 2 * GIB) == ()
    assert memory.place_job("last", 3 * GIB) == ()
    with pytest.raises(ModelDoesNotFit, match="takes 2147483648 bytes, and its host has 1073741824 of"):
        memory.place_job("more", 2 * GIB)
    assert memory.used == 2 * GIB, "a model may have the rest"
    weights = ModelSize(2 * GIB - RANK_OVERHEAD - 1, 0)
    assert memory.place("a", weights, 1, 1).jobs == ("last",)
    memory.release_job("last")
    assert memory.place("b", weights, 1, 1).jobs == ()
    assert memory.place("c", weights, 1, 1).jobs == ("first",)
    assert memory.job_devices("first") == ()
    assert memory.job_devices("last") is None


def test_a_fine_tuning_job_has_the_emptiest_gpu() -> None:
    memory = HostMemory([80 * GIB, 80 * GIB], gpus=True, asleep_limit=GIB)
    memory.hold("own", 60 * GIB, [0])
    assert memory.place_job("job", 50 * GIB) == (1,)
    assert memory.job_devices("job") == (1,)
    assert memory.place_job("other", 20 * GIB) == (1,)
    placed = memory.place("a", ModelSize(60 * GIB, 0), 1, GIB)
    assert (placed.devices, placed.jobs) == ((1,), ("other", "job"))
