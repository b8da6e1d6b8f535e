"""What may be pinned: sums of sizes against sums of memory, and what nobody knows yet."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shared.messages import GroupLoad, GroupRecord, HostBeat, HostModel, HostRecord, ModelSettings, ModelSpec
from shared.pins import pins_of, promises_more

GB = 10**9


def spec(name: str, *, pinned: bool = True, **fields: Any) -> ModelSpec:
    return ModelSpec(name, f"org/{name}", pinned=pinned, **fields)


def host(name: str, memory: int, state: Any = "ready", takes: bool = True, **sizes: int) -> HostRecord:
    told = [HostModel(model, "stored", memory=size * GB) for model, size in sizes.items()]
    return HostRecord(name, HostBeat(memory * GB, models=told, takes_models=takes), state)


def registry(*specs: ModelSpec) -> dict[str, ModelSpec]:
    return {one.name: one for one in specs}


def test_what_is_pinned_has_to_fit_together() -> None:
    hosts = [host("h", 8, a=3, b=4, c=2), host("i", 2), host("gone", 100, "gone"), host("own", 50, takes=False)]
    assert pins_of({}, {}, [], hosts) == ("", "")
    before = registry(spec("a"), spec("b"), spec("c", pinned=False))
    assert pins_of(before, before, [], hosts) == ("", "")
    refused = pins_of(before | registry(spec("c", least=2)), before, [], hosts).refused
    assert refused == (
        "What is pinned takes 11.0 GB (a 3.0 GB, b 4.0 GB, c 4.0 GB), and all hosts have 10.0 GB together: b 4.0 GB "
        "would have to go; unpin it, or add a host."
    )
    large = GroupRecord("g", "a", "ready", 1, [], GroupLoad(), memory=9 * GB)
    assert "takes 9.0 GB, and no host has more than 8.0 GB" in pins_of(before, before, [large], hosts).refused


def test_what_nobody_knows_is_said() -> None:
    before = registry(spec("a"))
    assert "No host loads models now" in pins_of(before, before, [], [host("h", 8, "gone", a=1)]).warning
    hosts = [host("h", 8, a=9)]
    assert "no host has more" in pins_of(before, before, [], hosts).refused
    changed = registry(spec("a", settings=ModelSettings(weight_dtype="int4")))
    found = pins_of(changed, before, [], hosts)
    assert (found.refused, "how much memory a will take" in found.warning) == ("", True)
    many = registry(*(spec(f"m{number}") for number in range(10)))
    assert "m7 and 2 more will take" in pins_of(many, {}, [], hosts).warning


def test_only_a_new_promise_is_looked_at() -> None:
    assert promises_more(spec("a"), None)
    assert promises_more(spec("a"), spec("a", pinned=False))
    assert promises_more(spec("a", least=2), spec("a", least=1))
    assert promises_more(spec("a", revision="v2"), spec("a"))
    assert not promises_more(spec("a", aliases=["b"]), spec("a"))
    assert not promises_more(spec("a", pinned=False), spec("a", pinned=False))


@given(
    st.dictionaries(st.sampled_from("abcdefghij"), st.integers(1, 9), max_size=10),
    st.lists(st.integers(1, 20), min_size=1, max_size=4),
)
def test_what_would_have_to_go_is_enough(sizes: dict[str, int], memory: list[int]) -> None:
    specs = registry(*map(spec, sizes))
    hosts = [host(str(number), size, **(sizes if number == 0 else {})) for number, size in enumerate(memory)]
    refused = pins_of(specs, specs, [], hosts).refused
    fits = sum(sizes.values()) <= sum(memory) and max(sizes.values(), default=0) <= max(memory)
    assert (refused == "") == fits
    if "together: " in refused:
        going = refused.partition("together: ")[2].partition(" would have")[0].split(", ")
        left = sizes.keys() - {one.split()[0] for one in going}
        assert sum(sizes[name] for name in left) <= sum(memory)
