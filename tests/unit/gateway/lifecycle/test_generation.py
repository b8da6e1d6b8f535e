"""The life of a generation."""

from typing import Any

import pytest

from services.gateway.lifecycle.generation import MAX_GAP_REPLAYS, MOST_HAND_BACKS, Generation
from services.gateway.lifecycle.token_stream import GenerationLimits, StreamDecision
from shared.errors import ContextLengthExceeded, RingLost, Unavailable
from shared.messages import GenerationRequest, TokenEntry

LIMITS = GenerationLimits(max_attempts=2, token_timeout=100.0, stall=10.0)


class Recorded:
    """A generation and what it delivered."""

    def __init__(self) -> None:
        self.news: list[Any] = []
        request = GenerationRequest("g", "r", "m", "gateway", [1, 2, 3], 5, stop_token_ids=[0])
        self.generation = Generation(request, 0, LIMITS, now=0.0, started_at=1000.0)
        self.generation.attach(lambda _, news: self.news.append(news))

    def entry(self, position: int, tokens: list[int], now: float = 1.0, **fields: Any) -> StreamDecision:
        attempt = fields.pop("attempt", self.generation.stream.attempt)
        group, epoch = fields.pop("group", "ring"), fields.pop("epoch", 1)
        entry = TokenEntry("g", attempt, position, tokens, **fields)
        return self.generation.on_entry(group, epoch, entry, now)

    def replayed(self, now: float = 1.0, *, idle: bool = False) -> StreamDecision:
        return self.generation.on_replayed(now, idle=idle)

    def recover(self) -> GenerationRequest | None:
        return self.generation.next_attempt(2.0, 3000.0)


def test_from_received_to_finished() -> None:
    made = Recorded()
    states = [made.generation.state]
    made.generation.queued(7)
    states.append(made.generation.state)
    made.entry(0, [], cached_tokens=9)
    states.append(made.generation.state)
    made.entry(0, [5])
    states.append(made.generation.state)
    assert made.entry(1, [0], finish="stop") is StreamDecision.ENDED
    states.append(made.generation.state)
    assert states == ["received", "queued", "dispatched", "running", "finished"]
    assert made.generation.cached_tokens == 3  # no more than the prompt has
    assert [item.tokens for item in made.news] == [[5], [0]]
    assert made.entry(2, [9]) is StreamDecision.NOTHING
    assert made.generation.on_time(1e9) is StreamDecision.NOTHING


def test_a_lost_group_leads_to_another_attempt_with_the_tokens_so_far() -> None:
    made = Recorded()
    made.entry(0, [5, 6])
    assert made.generation.on_group_lost("other", 9) is StreamDecision.NOTHING
    assert made.generation.on_group_lost("ring", 0) is StreamDecision.NOTHING
    assert made.generation.on_group_lost("ring", 1) is StreamDecision.RECOVER
    request = made.recover()
    assert (request.attempt, request.generated, request.lane, request.deadline) == (1, [5, 6], "recovery", 3000)
    assert made.generation.state == "recovering"
    assert made.generation.on_group_lost("ring", 1) is StreamDecision.NOTHING
    assert made.entry(2, [9], attempt=0) is StreamDecision.REJECT  # it was not lost, and goes on
    assert made.entry(3, [9], attempt=0) is StreamDecision.NOTHING  # it has been told
    assert made.entry(4, [], attempt=0, finish="cancelled") is StreamDecision.NOTHING
    assert made.entry(2, [7, 8, 9], finish="length") is StreamDecision.ENDED
    assert made.generation.tokens == [5, 6, 7, 8, 9]


def test_the_budget_of_attempts() -> None:
    made = Recorded()
    for _ in range(2):
        assert made.entry(0, [], finish="error", error_code="ring_lost", retryable=True) is StreamDecision.RECOVER
        assert made.recover() is not None
    assert made.entry(0, [], finish="error", error_code="ring_lost", retryable=True) is StreamDecision.RECOVER
    assert made.recover() is None
    assert made.generation.state == "failed"
    assert isinstance(made.news[-1], RingLost)


@pytest.mark.parametrize(("tokens", "reason"), [([5, 0], "stop"), ([1, 2, 3, 4, 5], "length")])
def test_a_generation_that_lacks_only_its_last_word_is_not_handed_in_again(tokens: list[int], reason: str) -> None:
    made = Recorded()
    made.entry(0, tokens)
    assert made.recover() is None
    assert made.generation.state == "finished"
    assert made.news[-1].finish == reason


def hand_back(made: Recorded) -> None:
    """Its group drains: another one continues."""
    handed = made.entry(0, [], finish="error", error_code="no_group_available", retryable=True)
    assert handed is StreamDecision.RECOVER


def test_a_group_that_is_drained_is_not_a_lost_one() -> None:
    """A rolling update may hand a generation from each group to one that is drained next."""
    made = Recorded()
    for _ in range(MOST_HAND_BACKS):
        hand_back(made)
        assert made.recover() is not None
    for _ in range(2):
        made.entry(0, [])
        assert made.generation.on_group_lost("ring", 1) is StreamDecision.RECOVER
        assert made.recover() is not None
    made.entry(0, [])
    assert made.generation.on_group_lost("ring", 1) is StreamDecision.RECOVER
    assert made.recover() is None
    assert str(made.generation.error).startswith("The executor group was lost 3 times while")


def test_groups_that_only_hand_back_come_to_an_end() -> None:
    made = Recorded()
    for _ in range(MOST_HAND_BACKS + 2):
        hand_back(made)
        assert made.recover() is not None
    hand_back(made)
    assert made.recover() is None
    assert isinstance(made.generation.error, RingLost)


def test_errors_that_are_final() -> None:
    made = Recorded()
    decision = made.entry(0, [], finish="error", error_code="context_length_exceeded", error="Too long.")
    assert decision is StreamDecision.ENDED
    assert isinstance(made.news[-1], ContextLengthExceeded)
    made = Recorded()
    made.entry(0, [], finish="error", error_code="queue_full", retryable=True, group="")
    assert made.generation.state == "failed"  # the scheduler has decided
    made = Recorded()
    made.entry(0, [], finish="cancelled")
    assert isinstance(made.news[-1], Unavailable)


def test_a_gap_that_the_journal_does_not_fill_leads_to_another_attempt() -> None:
    made = Recorded()
    assert made.entry(2, [7]) is StreamDecision.REPLAY
    assert made.entry(3, [8]) is StreamDecision.NOTHING  # the replay is on its way
    decisions = [made.replayed() for _ in range(MAX_GAP_REPLAYS + 1)]
    assert decisions == [StreamDecision.REPLAY] * MAX_GAP_REPLAYS + [StreamDecision.RECOVER]
    assert made.entry(0, [5, 6]) is StreamDecision.NOTHING
    assert made.generation.tokens == [5, 6, 7, 8]
    assert made.replayed() is StreamDecision.NOTHING


def test_an_attempt_belongs_to_the_ring_that_speaks_first() -> None:
    made = Recorded()
    assert made.entry(0, [], group="A") is StreamDecision.NOTHING  # the ring has taken the request
    assert made.entry(0, [7, 8], group="B") is StreamDecision.REJECT
    assert made.entry(2, [9], group="B") is StreamDecision.NOTHING  # once is enough
    assert made.entry(0, [], group="", finish="error", error_code="deadline_exceeded") is StreamDecision.NOTHING
    assert made.entry(3, [], group="B", finish="cancelled") is StreamDecision.NOTHING
    assert made.generation.state == "dispatched"
    made.entry(0, [4, 5], group="A")
    assert made.entry(2, [6, 6, 6], group="A", finish="length") is StreamDecision.ENDED
    assert made.generation.tokens == [4, 5, 6, 6, 6]


def test_a_later_life_of_its_group_says_that_the_ring_is_over() -> None:
    made = Recorded()
    made.entry(0, [4])
    assert made.entry(1, [9], epoch=2) is StreamDecision.RECOVER
    assert made.recover() is not None
    assert made.entry(1, [5], epoch=2) is StreamDecision.NOTHING  # the new attempt may go there
    assert made.generation.tokens == [4, 5]


def test_a_lost_end_leaves_no_gap_and_shows_when_the_ring_has_no_work() -> None:
    made = Recorded()
    assert made.replayed(idle=True) is StreamDecision.NOTHING  # it waits in the queue
    made.entry(0, [5, 6])
    assert made.replayed() is StreamDecision.NOTHING
    assert made.replayed(idle=True) is StreamDecision.RECOVER
    request = made.recover()
    assert request.generated == [5, 6]


def test_what_no_ring_has_spoken_of_is_unheard() -> None:
    made = Recorded()
    assert not made.generation.unheard
    made.generation.queued(7)
    assert made.generation.unheard
    made.entry(0, [])
    assert not made.generation.unheard


def test_time() -> None:
    made = Recorded()
    assert made.generation.on_time(60.0) is StreamDecision.NOTHING  # it may be waiting for its turn
    made.entry(0, [], now=61.0)
    assert made.generation.on_time(70.0) is StreamDecision.NOTHING
    assert made.generation.on_time(71.0) is StreamDecision.REPLAY
    made.entry(0, [5], now=72.0)
    assert made.generation.on_time(81.0) is StreamDecision.NOTHING
    assert made.generation.on_time(82.0) is StreamDecision.REPLAY
    assert made.generation.on_time(83.0) is StreamDecision.REPLAY  # nobody has read the journal yet
    assert made.replayed(now=83.0) is StreamDecision.NOTHING
    assert made.generation.on_time(91.0) is StreamDecision.NOTHING
    assert made.replayed(now=91.0) is StreamDecision.NOTHING  # for another generation: it had not stalled again
    assert made.generation.on_time(92.0) is StreamDecision.REPLAY
    assert made.generation.on_time(172.0) is StreamDecision.EXPIRE


def test_cancel_and_fail_end_it_once() -> None:
    made = Recorded()
    made.generation.cancel()
    made.generation.fail(Unavailable("x"))
    assert made.generation.state == "cancelled"
    assert made.news == []
    made = Recorded()
    made.generation.fail(Unavailable("x"))
    made.generation.cancel()
    assert made.generation.state == "failed"
    assert len(made.news) == 1


def test_a_prompt_that_is_being_computed_is_told_of_and_is_no_silence() -> None:
    made = Recorded()
    generation = made.generation
    for now, computed in ((1.0, 1), (90.0, 2), (150.0, 1), (180.0, 2)):  # it was preempted, and computes it again
        assert made.entry(0, [], now=now, computed=computed) is StreamDecision.NOTHING
    assert [(news.computed, news.tokens) for news in made.news] == [(1, []), (2, [])]
    assert generation.on_time(279.0) is not StreamDecision.EXPIRE
    assert generation.on_time(280.0) is StreamDecision.EXPIRE
    late: list[Any] = []
    generation.attach(lambda _, news: late.append(news))
    assert [news.computed for news in late] == [2]
    made.recover()
    assert not generation.computing, "nobody knows what the next ring has of it"
    made.entry(0, [], computed=1)
    assert late[-1].computed == 1
    made.entry(0, [7])
    made.entry(1, [], computed=3)  # of an answer that goes on nothing is told
    assert late[-1].tokens == [7]
    assert not generation.computing


def test_no_more_of_a_prompt_is_computed_than_it_has() -> None:
    made = Recorded()
    made.entry(0, [], computed=1000)
    assert made.news[-1].computed == 3
