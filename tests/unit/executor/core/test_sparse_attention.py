"""Which blocks a token reads: arithmetic over positions, and what of it is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.core.sparse_attention import SparsePattern, problem_with
from shared.messages import SparseAttention

SIZES = st.integers(0, 300)
CHOICES = st.builds(
    SparseAttention,
    kind=st.sampled_from(["pages", "window"]),
    threshold=SIZES,
    sinks=SIZES,
    recent=SIZES,
    budget=SIZES,
    share=st.floats(0, 1),
    dense_layers=st.integers(0, 3),
)


@given(CHOICES, st.integers(0, 4000), st.integers(1, 32))
def test_sinks_recent_tokens_and_the_budget_are_read(wanted: SparseAttention, position: int, size: int) -> None:
    own, reading = position // size, SparsePattern.of(wanted).reading(position, size)
    if reading is None:
        return
    first, recent, top = reading
    assert position >= wanted.threshold
    assert 0 <= first <= recent <= own
    assert 0 <= top < recent - first, "else all is read"
    assert first * size >= min(wanted.sinks, own * size), "a block of which a token counts is read whole"
    assert recent * size <= max(0, position - wanted.recent + 1), "and so are those of recent tokens"
    if wanted.kind == "window":
        assert top == 0
    else:
        assert top * size >= wanted.budget
        assert top * size >= int(wanted.share * position * 0.99999) - 1


@given(CHOICES, st.integers(0, 4000), st.integers(1, 32))
def test_no_more_is_read_than_was_asked_for(wanted: SparseAttention, position: int, size: int) -> None:
    reading = SparsePattern.of(wanted).reading(position, size)
    if reading is None:
        return
    first, recent, top = reading
    assert first * size < wanted.sinks + size
    assert position - recent * size < wanted.recent + size
    assert top * size < max(wanted.budget, wanted.share * position + 1) + size


@given(CHOICES, CHOICES)
def test_choices_that_differ_are_named_differently(one: SparseAttention, other: SparseAttention) -> None:
    assert (SparsePattern.of(one).salt() == SparsePattern.of(other).salt()) == (
        SparsePattern.of(one) == SparsePattern.of(other)
    )


def test_without_a_choice_all_is_read() -> None:
    assert all(SparsePattern.of(None).reading(position, 16) is None for position in range(0, 100_000, 777))


@pytest.mark.parametrize(
    ("wanted", "kinds", "says"),
    [
        (SparseAttention(), [], "no sparse attention"),
        (SparseAttention(), ["window"], "--sparse-attention"),
        (SparseAttention(budget=8), ["pages", "window"], "below one page of 16 tokens"),
        (SparseAttention(sinks=-1), ["pages", "window"], "Invalid sparse_attention.sinks: it is -1"),
        (SparseAttention(threshold=1 << 31), ["pages", "window"], "Invalid sparse_attention.threshold:"),
        (SparseAttention(share=1.5), ["pages", "window"], "Invalid sparse_attention.share: it is 1.5"),
        (SparseAttention(share=float("nan")), ["pages", "window"], "Invalid sparse_attention.share: it is nan"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(wanted: SparseAttention, kinds: list[str], says: str) -> None:
    error = problem_with(wanted, 16, kinds)
    assert says in error.message


def test_what_can_be_computed_is_not_refused() -> None:
    assert problem_with(SparseAttention(), 16, ["pages", "window"]) is None
    assert problem_with(SparseAttention("window", budget=0), 16, ["window"]) is None
