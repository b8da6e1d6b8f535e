"""Sparse attention as people write it: every way reads the same, and what is wrong is one phrase."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages import SparseAttention
from shared.sparse_attention import (
    MOST_TOKENS,
    SparseTokens,
    WrongChoice,
    check,
    chosen,
    keeps_pages,
    parse,
    read,
    sparse_tokens,
    to_argument,
)

TOKENS = st.integers(0, 1 << 20)
CHOICES = st.builds(
    lambda kind, sinks, recent, more, budget, share, layers: SparseAttention(
        kind, sinks + recent + more, sinks, recent, budget, share, layers
    ),
    st.sampled_from(["pages", "window"]),
    TOKENS,
    TOKENS,
    TOKENS,
    st.integers(1, MOST_TOKENS),
    st.floats(0, 1),
    st.integers(0, 100),
)


@given(CHOICES)
def test_what_is_told_of_a_choice_reads_as_that_choice(choice: SparseAttention) -> None:
    check(choice)
    assert chosen(read(parse(to_argument(choice)))) == choice


def test_short_ways_of_saying_it() -> None:
    assert [read(parse(text)) for text in ("on", "OFF", "", "pages", "window")] == [
        *(True, False, None, True),
        SparseAttention("window"),
    ]
    assert read({"kind": "pages", "budget": 2048}) is True, "as it is by default"
    assert read(parse("window, recent=4096")) == SparseAttention("window", recent=4096)
    assert [to_argument(value) for value in (True, False, None)] == ["on", "off", ""]
    assert to_argument(SparseAttention(recent=512, share=0.5)) == "pages,recent=512,share=0.5"
    assert [chosen(value) for value in (True, False, None)] == [SparseAttention(), None, None]
    assert [keeps_pages(value) for value in (True, False, None)] == [True, False, None]
    assert [keeps_pages(SparseAttention(kind)) for kind in ("pages", "window")] == [True, None]


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ("sometimes", "", "none of on, off, pages, window and FIELD=VALUE"),
        ({"kind": "top"}, "kind", "one of pages, window, not 'top'"),
        ({"bugdet": 1}, "", "no 'bugdet'; there are: kind, threshold"),
        ({"budget": 0}, "budget", "below one token"),
        ({"sinks": -1}, "sinks", "it is -1, and must be 0 to"),
        ({"recent": 1 << 31}, "recent", "must be 0 to 2,147,483,647"),
        ({"recent": True}, "recent", "a whole number, not 'True'"),
        ({"share": 1.5}, "share", "a share of the position, 0 to 1"),
        ({"share": math.nan}, "share", "a share of the position, 0 to 1"),
        ({"share": "half"}, "share", "a number from 0 to 1, not 'half'"),
        ({"threshold": 1000}, "threshold", "below the 1,088 tokens that are always read"),
        ({"dense_layers": 1e3}, "dense_layers", "a whole number"),
        ([1], "", "true, false, or a mapping of kind"),
    ],
)
def test_what_cannot_be_is_said_in_one_phrase(given: object, field: str, words: str) -> None:
    with pytest.raises(WrongChoice) as caught:
        read(parse(given) if isinstance(given, str) else given)
    assert words in str(caught.value)
    assert caught.value.field == field


def test_a_budget_below_the_models_page_is_wrong_for_pages_alone() -> None:
    with pytest.raises(WrongChoice, match="8, below one page of 16 tokens"):
        check(SparseAttention(budget=8), 16)
    check(SparseAttention("window", budget=8), 16)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 400))
def test_sparse_tokens_are_those_at_positions_from_the_threshold_on(prompt: int, output: int, threshold: int) -> None:
    choice = SparseAttention(threshold=threshold)
    positions = range(prompt + output)
    beyond = [position for position in positions if position >= threshold]
    expected = SparseTokens(
        sum(position < prompt for position in beyond), sum(position >= prompt for position in beyond)
    )
    assert sparse_tokens(choice, prompt, output) == expected
    assert sparse_tokens(None, prompt, output) == (0, 0)
