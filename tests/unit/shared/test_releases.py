"""Which versions may follow each other on the same streams."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigurationError
from shared.process import VERSION
from shared.releases import READABLE_BY, UPGRADES_FROM, check, downgrade_ends, far_apart, metadata

versions = st.tuples(*[st.integers(0, 30)] * 3).map(lambda numbers: ".".join(map(str, numbers)))


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_this_release_reads_what_it_writes() -> None:
    check(metadata({}), "nats://here")
    assert numbers(READABLE_BY) <= numbers(VERSION)[:2]
    assert numbers(UPGRADES_FROM) <= numbers(VERSION)[:2]


@given(versions, versions)
def test_what_was_used_by_too_old_a_version_is_refused_with_the_one_between(used: str, oldest: str) -> None:
    stored = metadata({}, own=used, readable_by="0.0")
    own = f"{numbers(oldest)[0] + 1}.0.0"
    if numbers(used)[:2] >= numbers(oldest)[:2]:
        check(stored, "nats://here", own, oldest)
        return
    with pytest.raises(ConfigurationError) as raised:
        check(stored, "nats://here", own, oldest)
    assert str(raised.value) == (
        f"The data in NATS at nats://here was last used by Ryzanstein {used}, which {own} cannot upgrade; run "
        f"{oldest} first, then {own}."
    )


@given(versions, versions)
def test_what_a_newer_version_has_written_is_refused_where_it_cannot_be_read(own: str, readable_by: str) -> None:
    stored = metadata({}, own="31.0.0", readable_by=readable_by)
    if numbers(own)[:2] >= numbers(readable_by)[:2]:
        check(stored, "nats://here", own, "0.0")
        return
    with pytest.raises(ConfigurationError) as raised:
        check(stored, "nats://here", own, "0.0")
    assert str(raised.value) == (
        f"The data in NATS at nats://here was written by Ryzanstein 31.0.0, which {own} cannot read; run {readable_by} "
        "or newer."
    )


@given(st.lists(versions, min_size=1))
def test_neither_number_ever_falls(used: list[str]) -> None:
    stored: dict[str, str] = {}
    for version in used:
        stored = metadata(stored, own=version, readable_by=version)
    assert set(stored.values()) == {max(used, key=numbers)}


def test_going_back_ends_with_the_first_release_whose_records_are_newer() -> None:
    stored = metadata({}, own="0.1.3", readable_by="0.1")
    assert downgrade_ends(stored, "0.1") == ""
    assert downgrade_ends(stored, "0.2") == "0.1.3"
    assert downgrade_ends(metadata(stored, own="0.2.0", readable_by="0.2"), "0.2") == ""


def test_what_has_no_number_is_let_through() -> None:
    check({}, "nats://here", "0.1.0")
    check(metadata({}, own="0"), "nats://here", "0.9.0", "0.8")
    check({"_nats.level": "1"}, "nats://here", "0")


@pytest.mark.parametrize(
    ("running", "apart"),
    [
        ([], None),
        (["", "unknown"], None),
        (["0.1.0", "0.1.7", ""], None),
        (["0.2.0", "0.1.9"], None),
        (["0.9.0", "1.0.0"], None),
        (["0.3.0", "0.2.0", "0.1.4"], ("0.1.4", "0.3.0")),
        (["0.9.0", "1.1.0"], ("0.9.0", "1.1.0")),
        (["0.10.0", "0.9.0"], None),
    ],
)
def test_versions_that_run_are_neighbours_or_named(running: list[str], apart: tuple[str, str] | None) -> None:
    assert far_apart(running) == apart
