"""Where a sequence's end has stood before."""

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.scheduler.drafts.proposers.ngrams import LONGEST, MOST_COMPARED, SHORTEST, Match, NgramIndex


def index_of(tokens: list[int]) -> NgramIndex:
    return NgramIndex(array("i", tokens))


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        ([], None),
        ([1], None),
        ([1, 1], None),
        ([1, 1, 1], Match(2, 2)),
        ([1, 2, 3, 4], None),
        ([1, 2, 3, 1, 2], Match(2, 2)),
        ([9, 1, 2, 3, 8, 1, 2, 3], Match(4, 3)),
        ([5, 1, 2, 3, 8, 5, 1, 2, 3], Match(4, 4)),
    ],
)
def test_finds_the_longest(tokens: list[int], match: Match | None) -> None:
    assert index_of(tokens).find() == match


def test_of_equal_lengths_the_newest_is_found() -> None:
    assert index_of([1, 2, 7, 1, 2, 8, 1, 2]).find() == Match(5, 2)


def test_a_longer_ngram_is_preferred_to_a_newer_one() -> None:
    tokens = [4, 1, 2, 3, 7, 7, 9, 2, 3, 6, 6, 4, 1, 2, 3]
    assert index_of(tokens).find() == Match(4, 4)


def test_the_continuation_repeats_what_has_begun_to_repeat() -> None:
    index = index_of([1, 2, 3, 1, 2, 3])
    match = index.find()
    assert match == Match(3, 3)
    assert index.continuation(match.source, 7) == [1, 2, 3, 1, 2, 3, 1]
    assert index.continuation(match.source, 2) == [1, 2]


@given(st.lists(st.integers(0, 4), max_size=300), st.lists(st.integers(1, 90), max_size=8))
def test_a_match_is_what_it_says(tokens: list[int], pieces: list[int]) -> None:
    """However the tokens come: in long pieces, which are indexed by arrays, or one by one."""
    grown = array("i")
    index = NgramIndex(grown)
    for piece in pieces:
        grown.extend(tokens[len(grown) : len(grown) + piece])
        match = index.find()
        if match is None:
            continue
        source, length = match
        assert SHORTEST <= length <= MOST_COMPARED
        assert length <= source < len(grown)
        assert grown[source - length : source] == grown[len(grown) - length :]
        if length < MOST_COMPARED and source > length:
            assert grown[source - length - 1] != grown[len(grown) - length - 1]


@pytest.mark.parametrize("known", [100, 1000, 5000])
def test_a_copy_is_followed_from_its_fourth_token_on(known: int) -> None:
    rng = random.Random(known)
    tokens = array("i", [rng.randrange(50_000) for _ in range(known)])
    index, start, wrong = NgramIndex(tokens), known // 3, 0
    for at in range(60):
        match = index.find()
        if at >= LONGEST:
            wrong += match is None or match.source != start + at
        tokens.append(tokens[start + at])
    # n-grams that meet in a slot of the tables drive each other out.
    assert wrong <= 12


def test_a_long_prompt_and_its_tokens_one_by_one_give_the_same() -> None:
    rng = random.Random(3)
    tokens = [rng.randrange(40) for _ in range(120)]
    whole = array("i", tokens)
    grown = array("i", tokens[:1])
    slowly = NgramIndex(grown)
    for token in tokens[1:]:
        slowly.find()
        grown.append(token)
    # Tables of one size, whichever way they came by it.
    assert slowly.find() == NgramIndex(whole).find()


def test_tables_stop_growing_and_go_on_finding_what_is_near() -> None:
    tokens = array("i", range(1_000_000))
    index = NgramIndex(tokens)
    assert index.find() is None
    tokens.extend(range(999_000, 999_010))
    match = index.find()
    assert tokens[match.source] == 999_010
    assert sum(len(table) * table.itemsize for table in index._tables) <= 3 << 20
