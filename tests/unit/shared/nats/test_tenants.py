"""What tenants keep: counted entry by entry, and the oldest beyond a quota."""

from hypothesis import given
from hypothesis import strategies as st

from shared.nats.tenants import Held, Holdings, beyond, keys_of, tenant_key

told = st.lists(st.tuples(st.sampled_from("abcdef"), st.none() | st.tuples(st.sampled_from("xyz"), st.integers(0, 9))))


@given(told)
def test_sums_are_those_of_what_is_there(news: list[tuple[str, tuple[str, int] | None]]) -> None:
    holdings, there = Holdings(), dict[str, tuple[str, int]]()
    for key, held in news:
        if held is None:
            holdings.forget(key)
            there.pop(key, None)
        else:
            holdings.note(key, Held(*held, due=held[1]))
            there[key] = held
    for tenant in "xyz":
        sizes = [size for owner, size in there.values() if owner == tenant]
        assert holdings.of(tenant) == (len(sizes), sum(sizes))
    assert holdings.size == sum(size for _, size in there.values())
    assert set(holdings.due(5.0)) == {key for key, (_, size) in there.items() if 0 < size <= 5}


@given(st.lists(st.integers(0, 50)), st.integers(0, 200), st.integers(0, 20))
def test_no_more_goes_than_must(sizes: list[int], most: int, entries: int) -> None:
    held = [(str(place), size) for place, size in enumerate(sizes)]
    gone = list(beyond(held, most, entries))
    assert gone == [key for key, _ in held[: len(gone)]], "the oldest"
    left = sizes[len(gone) :]
    assert sum(left) <= most
    assert len(left) <= entries
    if gone:
        one_more = sizes[len(gone) - 1 :]
        assert sum(one_more) > most or len(one_more) > entries


@given(st.text(min_size=1), st.text(min_size=1), st.text(min_size=1), st.text(min_size=1))
def test_no_name_of_one_tenant_is_one_of_another(tenant: str, name: str, other: str, theirs: str) -> None:
    assert (tenant_key(tenant, name) == tenant_key(other, theirs)) == ((tenant, name) == (other, theirs))
    assert tenant_key(tenant, name).count(".") == 1
    assert tenant_key("", name) != tenant_key(tenant, theirs)
    assert tenant_key(tenant, name).startswith(keys_of(tenant).removesuffix("*"))
