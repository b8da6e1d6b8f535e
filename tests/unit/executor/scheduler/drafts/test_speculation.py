"""How many drafts a step carries: as many as pay."""

import random
from array import array
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.core.engine import EngineSpec
from services.executor.core.sampling_state import GrammarMask, Mask
from services.executor.core.settings import MOST_DRAFTS, MOST_EVER, ExecutorSettings, most_drafts
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.drafts.drafting import Drafter
from services.executor.scheduler.drafts.proposers.ngrams import Estimates, NgramProposer, PromptLookup
from services.executor.scheduler.drafts.speculation import StepCost
from services.executor.scheduler.sequence import Sequence
from shared.config import load_settings
from shared.errors import ConfigurationError
from tests.unit.executor.scheduler.stepped_ring import ask

BASE, PER_TOKEN = 0.0067, 0.0003  # seconds, as measured for SmolLM2-135M on two cores


class Asked:
    """Sequences whose own texts propose, as a ring asks them."""

    def __init__(self, most: int = MOST_DRAFTS) -> None:
        self._proposer = NgramProposer()
        settings = BatchSettings(max_drafts=most)
        self._drafter = Drafter(EngineSpec(16, 1000, 16000, 1 << 17), settings, [lambda _: self._proposer])
        self._most = most
        self.cost = self._drafter._speculation.cost

    def lookup(self, tokens: "array[int]", grammar: GrammarMask | None = None) -> "tuple[Sequence, PromptLookup]":
        sequence = Sequence(ask("a", 1), 1, 16, b"")
        sequence.tokens, sequence.sampling.grammar = tokens, grammar
        return sequence, self._proposer._of(sequence)

    def choose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int) -> list[list[int]]:
        return self._drafter.propose(sequences, [min(limit, self._most) for limit in limits], budget)


def speculation(most: int = MOST_DRAFTS, sequences: int = 1, per_token: float = PER_TOKEN) -> Asked:
    """Those of a ring that has seen steps of so many sequences, with and without drafts."""
    made = Asked(most)
    for drafts in (0, 3, 8, 0) * 10:
        made.cost.observe(sequences + drafts, BASE + per_token * (sequences + drafts))
    return made


def talk(made: Asked, tokens: "array[int]", say: list[int]) -> list[int]:
    """Drafts of each step of a sequence alone that says `say`, whatever is drafted."""
    (sequence, lookup), counts = made.lookup(tokens), []
    while say:
        [drafts] = made.choose([sequence], [len(say)], 100)
        right = next((at for at, draft in enumerate(drafts) if draft != say[at]), len(drafts))
        new, say = say[: right + 1], say[right + 1 :]
        tokens.extend(new)
        lookup.learn(new)
        counts.append(len(drafts))
    return counts


# --- the cost of a step ---------------------------------------------------------------------------


@given(
    st.floats(1e-4, 0.1),
    st.floats(0.01, 1.0),
    st.lists(st.integers(1, 64), min_size=60, max_size=80).filter(lambda sizes: len(set(sizes)) > 5),
)
def test_the_cost_of_a_step_is_fitted(base: float, share: float, sizes: list[int]) -> None:
    cost = StepCost()
    for size in sizes:
        cost.observe(size, base * (1 + share * size))
    assert cost.rise == pytest.approx(base * share, rel=0.3)
    assert cost.of(10) == pytest.approx(base * (1 + share * 10), rel=0.35)


def test_without_a_timed_step_there_are_no_drafts() -> None:
    made = Asked(8)
    guesser, _ = made.lookup(array("i", [1, 2, 3] * 9))
    assert made.choose([guesser], [100], 100) == [[]]
    made.cost.observe(0, 1.0)
    made.cost.observe(1, 0.0)
    assert made.choose([guesser], [100], 100) == [[]]
    made.cost.observe(1, 0.01)
    assert made.choose([guesser], [100], 100) != [[]]


def test_a_hiccup_changes_little() -> None:
    made = speculation()
    before = made.cost.of(9)
    made.cost.observe(1, 5.0)
    assert made.cost.of(9) < 1.5 * before


# --- experience -----------------------------------------------------------------------------------


def test_a_sequence_begins_with_the_experience_of_its_ring() -> None:
    ring = Estimates()
    first = Estimates(ring)
    for _ in range(100):
        first.add(4, False)
        first.add(8, True)
    second = Estimates(ring)
    assert second.of(4) < 0.05
    assert second.of(8) > 0.9
    assert second.of(30) == second.of(8)
    for _ in range(10):
        second.add(4, True)
    assert second.of(4) > 0.6 > first.of(4)


def test_a_repeated_text_gets_long_drafts() -> None:
    rng = random.Random(1)
    text = [rng.randrange(1000) for _ in range(150)]
    counts = talk(speculation(), array("i", text), list(text))
    assert len(counts) < 40
    assert max(counts) == MOST_DRAFTS


def test_a_text_that_never_goes_on_as_before_gets_no_drafts_any_more() -> None:
    rng = random.Random(2)
    made = speculation()
    # Pairs repeat all the time, and what follows them is always another token.
    say = [token for at in range(300) for token in (7, 8, 100 + at)]
    counts = talk(made, array("i", [1, 2]), say)
    assert sum(counts[400:]) <= 0.35 * len(counts[400:])
    noise = [rng.randrange(12) for _ in range(600)]
    counts = talk(made, array("i", [1, 2]), noise)
    assert sum(counts[300:]) <= len(counts[300:])


def test_a_sequence_without_drafts_is_watched_and_comes_back() -> None:
    made, rng = speculation(), random.Random(3)
    tokens = array("i", [1, 2])
    talk(made, tokens, [token for at in range(200) for token in (7, 8, 100 + at)])
    song = [rng.randrange(2000, 3000) for _ in range(40)]
    counts = talk(made, tokens, song * 5)
    assert max(counts) == MOST_DRAFTS


# --- the choice -----------------------------------------------------------------------------------


def singers(made: Asked, count: int, right: float = 1.0) -> list[tuple[Sequence, PromptLookup]]:
    """Sequences that repeat themselves, each with some experience of being right."""
    rng, found = random.Random(4), []
    for _ in range(count):
        sequence, lookup = made.lookup(array("i", list(range(20)) * 3))
        for _ in range(40):
            lookup.guess(0)
            [token] = lookup.guesses
            lookup.learn([token if rng.random() < right else 99])
        found.append((sequence, lookup))
    return found


def test_the_more_sequences_the_fewer_drafts() -> None:
    totals = []
    for sequences in (1, 4, 16, 64):
        made = speculation(sequences=sequences)
        asked = [sequence for sequence, _ in singers(made, sequences, right=0.6)]
        totals.append(sum(map(len, made.choose(asked, [99] * sequences, 400))) / sequences)
    assert totals == sorted(totals, reverse=True)
    assert totals[0] >= 2
    assert totals[-1] < 0.2


def test_where_tokens_cost_what_steps_cost_there_are_no_drafts() -> None:
    made = Asked(8)
    for size in range(1, 40):
        made.cost.observe(size, 0.001 * size)
    assert made.choose([sequence for sequence, _ in singers(made, 4)], [99] * 4, 400) == [[]] * 4


@given(
    sequences=st.integers(1, 12),
    most=st.integers(1, 15),
    limits=st.lists(st.integers(0, 20), min_size=12, max_size=12),
    budget=st.integers(-1, 40),
    right=st.floats(0, 1),
    per_token=st.floats(1e-5, 5e-3),
)
def test_limits_hold_and_drafts_pay(
    sequences: int, most: int, limits: list[int], budget: int, right: float, per_token: float
) -> None:
    made = speculation(most, sequences, per_token)
    asked = singers(made, sequences, right)
    drafts = made.choose([sequence for sequence, _ in asked], limits[:sequences], budget)
    counts = [len(of_one) for of_one in drafts]
    assert all(count <= min(most, limit) for count, limit in zip(counts, limits, strict=False))
    assert sum(counts) <= max(budget, 0)
    expected = sequences + sum(
        sum(lookup.chances(count, 0.0)) for (_, lookup), count in zip(asked, counts, strict=True)
    )
    with_drafts = expected / made.cost.of(sequences + sum(counts))
    assert with_drafts >= sequences / made.cost.of(sequences) * (1 - 1e-9)


@pytest.mark.parametrize(("setting", "most"), [("auto", MOST_DRAFTS), ("off", 0), ("0", 0), ("4", 4)])
def test_the_setting(setting: str, most: int) -> None:
    assert most_drafts(setting) == most


def test_executors_take_the_setting() -> None:
    assert load_settings(ExecutorSettings).max_drafts == MOST_DRAFTS
    assert load_settings(ExecutorSettings, speculation="off").max_drafts == 0
    with pytest.raises(ConfigurationError, match=r"RYZANSTEIN_SPECULATION.*'always' is not auto, off or a number"):
        load_settings(ExecutorSettings, speculation="always")


@pytest.mark.parametrize("setting", ["", "on", "-1", "1.5", str(MOST_EVER + 1), "٣"])
def test_the_setting_says_what_it_takes(setting: str) -> None:
    with pytest.raises(ValueError, match=f"auto, off or a number from 0 to {MOST_EVER}"):
        most_drafts(setting)


# --- grammars -------------------------------------------------------------------------------------


class Forcing:
    """A grammar that forces the next tokens of a text, and forbids some."""

    complete = False

    def __init__(self, forced: list[int], forbidden: int = -1) -> None:
        self.next, self._forbidden = forced, forbidden

    def advance(self, *tokens: int) -> None:
        self.next = self.next[len(tokens) :]

    def allowed(self) -> Mask:
        raise NotImplementedError

    def forced(self) -> list[int]:
        return self.next

    def fitting(self, drafts: Seq[int]) -> int:
        return next((at for at, draft in enumerate(drafts) if draft == self._forbidden), len(drafts))

    def after_each(self, drafts: Seq[int]) -> Seq[GrammarMask]:
        raise NotImplementedError


def test_what_a_grammar_forces_is_drafted_and_what_it_forbids_is_not() -> None:
    made, said = speculation(), [1, 2, 3, 4, 5, 6] * 6
    forced, _ = made.lookup(array("i", [9]), Forcing([7, 8, 9]))
    goes_on, _ = made.lookup(array("i", said), Forcing([1, 2]))
    elsewhere, _ = made.lookup(array("i", said), Forcing([1, 7]))
    cut, _ = made.lookup(array("i", said), Forcing([], forbidden=3))
    drafts = made.choose([forced, goes_on, elsewhere, cut], [6] * 4, 100)
    assert drafts[0] == [7, 8, 9]
    assert drafts[1][:3] == [1, 2, 3], "what the text says behind what is forced is drafted too"
    assert drafts[2] == [1, 7]
    assert drafts[3] == [1, 2]


def test_what_is_forced_is_drafted_by_who_has_looked_in_vain_too() -> None:
    made, grammar = speculation(), Forcing([])
    tokens = array("i", range(200))
    sequence, lookup = made.lookup(tokens, grammar)
    for token in range(200, 230):
        assert made.choose([sequence], [6], 100) == [[]]
        tokens.append(token)
        lookup.learn([token])
    for token in range(300, 310):
        grammar.next = [token]
        assert made.choose([sequence], [6], 100) == [[token]]
        assert lookup.copies
        tokens.append(token)
        lookup.learn([token])
        assert not lookup.copies, "what comes behind it is another question"


def test_a_sequence_that_draws_other_tokens_than_those_forced_is_left_alone() -> None:
    """Its text is forced, and not how it is divided into tokens."""
    made, grammar = speculation(), Forcing([5, 6])
    tokens = array("i", [0])
    (sequence, lookup), counts = made.lookup(tokens, grammar), []
    for _ in range(60):
        [drafts] = made.choose([sequence], [6], 100)
        counts.append(len(drafts))
        tokens.append(9)
        lookup.learn([9])
        grammar.next = [5, 6]
    assert counts[0] == 2
    assert 5 not in tokens
    assert made.lookup(array("i", [0]), grammar)[1].look(2, 0.0)[0] < 0.5
