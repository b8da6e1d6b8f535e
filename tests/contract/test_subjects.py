"""Names in subjects: any name goes in and comes out, and no two names meet."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages import LANES
from shared.nats import subjects

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
SAFE = re.compile(r"[A-Za-z0-9_=-]+")


@given(names)
def test_escape_is_reversible_and_safe(name: str) -> None:
    token = subjects.escape(name)
    assert SAFE.fullmatch(token)
    assert subjects.unescape(token) == name


@given(names, names)
def test_different_names_stay_different(one: str, other: str) -> None:
    assert (subjects.escape(one) == subjects.escape(other)) == (one == other)


def test_golden_names() -> None:
    assert subjects.escape("org/model.v1") == "org=2Fmodel=2Ev1"
    assert subjects.escape("a=b *>") == "a=3Db=20=2A=3E"
    assert subjects.escape("Grün") == "Gr=C3=BCn"


def test_an_empty_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty name"):
        subjects.escape("")


@given(names)
def test_subjects_have_as_many_tokens_as_their_wildcards_expect(name: str) -> None:
    assert subjects.tokens(name).count(".") == subjects.ALL_TOKENS.count(".")
    assert subjects.dispatch(name).startswith("groups.")
    assert subjects.dispatch(name) != subjects.control(name)
    assert subjects.beats("executor", name).startswith(subjects.ALL_BEATS.removesuffix(">"))
    for lane in LANES:
        assert subjects.intake(lane, name).startswith(subjects.intake_lane(lane).removesuffix("*"))
        assert subjects.intake(lane, name).count(".") == subjects.intake_lane(lane).count(".")
