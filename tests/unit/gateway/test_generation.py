"""The life of a generation."""

from typing import Any

import pytest

from services.gateway.generation import MAX_GAP_REPLAYS, QUEUE_PATIENCE, Decision, Generation, Limits
from shared.errors import ContextLengthExceeded, RingLost, Unavailable
from shared.messages import GenerationRequest, TokenEntry

LIMITS = Limits(max_attempts=2, token_timeout=100.0, stall=10.0)


class Recorded:
    """A generation and what it delivered."""

    def __init__(self) -> None:
        self.news: list[Any] = []
        request = GenerationRequest("g", "r", "m", "gateway", [1, 2, 3], 5, stop_token_ids=[0])
        self.generation = Generation(
            request, 0, LIMITS, lambda _, news: self.news.append(news), now=0.0, started_at=1000.0
        )

    def entry(self, position: int, tokens: list[int], now: float = 1.0, **fields: Any) -> Decision:
        attempt = fields.pop("attempt", self.generation.stream.attempt)
        group = fields.pop("group", "ring")
        return self.generation.on_entry(group, 1, TokenEntry("g", attempt, position, tokens, **fields), now)

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
    assert made.entry(1, [0], finish="stop") is Decision.ENDED
    states.append(made.generation.state)
    assert states == ["received", "queued", "dispatched", "running", "finished"]
    assert made.generation.cached_tokens == 3  # no more than the prompt has
    assert [item.tokens for item in made.news] == [[5], [0]]
    assert made.entry(2, [9]) is Decision.NOTHING
    assert made.generation.on_time(1e9) is Decision.NOTHING


def test_a_lost_group_leads_to_another_attempt_with_the_tokens_so_far() -> None:
    made = Recorded()
    made.entry(0, [5, 6])
    assert made.generation.on_group_lost("other", 9) is Decision.NOTHING
    assert made.generation.on_group_lost("ring", 0) is Decision.NOTHING
    assert made.generation.on_group_lost("ring", 1) is Decision.RECOVER
    request = made.recover()
    assert request is not None
    assert (request.attempt, request.generated, request.lane, request.deadline) == (
        1,
        [5, 6],
        "recovery",
        3000,
    )
    assert made.generation.state == "recovering"
    assert made.generation.on_group_lost("ring", 1) is Decision.NOTHING
    assert made.entry(2, [9], attempt=0) is Decision.NOTHING
    assert made.entry(2, [7, 8, 9], finish="length") is Decision.ENDED
    assert made.generation.tokens == [5, 6, 7, 8, 9]


def test_the_budget_of_attempts() -> None:
    made = Recorded()
    for _ in range(2):
        assert made.entry(0, [], finish="error", error_code="ring_lost", retryable=True) is Decision.RECOVER
        assert made.recover() is not None
    assert made.entry(0, [], finish="error", error_code="ring_lost", retryable=True) is Decision.RECOVER
    assert made.recover() is None
    assert made.generation.state == "failed"
    assert isinstance(made.news[-1], RingLost)


@pytest.mark.parametrize(("tokens", "reason"), [([5, 0], "stop"), ([1, 2, 3, 4, 5], "length")])
def test_a_generation_that_lacks_only_its_last_word_is_not_handed_in_again(
    tokens: list[int], reason: str
) -> None:
    made = Recorded()
    made.entry(0, tokens)
    assert made.recover() is None
    assert made.generation.state == "finished"
    assert made.news[-1].finish == reason


def test_errors_that_are_final() -> None:
    made = Recorded()
    decision = made.entry(0, [], finish="error", error_code="context_length_exceeded", error="Too long.")
    assert decision is Decision.ENDED
    assert isinstance(made.news[-1], ContextLengthExceeded)
    made = Recorded()
    made.entry(0, [], finish="error", error_code="queue_full", retryable=True, group="")
    assert made.generation.state == "failed"  # the scheduler has decided
    made = Recorded()
    made.entry(0, [], finish="cancelled")
    assert isinstance(made.news[-1], Unavailable)


def test_a_gap_that_the_journal_does_not_fill_leads_to_another_attempt() -> None:
    made = Recorded()
    assert made.entry(2, [7]) is Decision.REPLAY
    assert made.entry(3, [8]) is Decision.NOTHING  # the replay is on its way
    decisions = [made.generation.on_replayed() for _ in range(MAX_GAP_REPLAYS + 1)]
    assert decisions == [Decision.REPLAY] * MAX_GAP_REPLAYS + [Decision.RECOVER]
    assert made.entry(0, [5, 6]) is Decision.NOTHING
    assert made.generation.tokens == [5, 6, 7, 8]
    assert made.generation.on_replayed() is Decision.NOTHING


def test_time() -> None:
    made = Recorded()
    assert made.generation.on_time(10.0) is Decision.NOTHING  # it may be waiting for its turn
    assert made.generation.on_time(10.0 * QUEUE_PATIENCE) is Decision.REPLAY
    made.entry(0, [5], now=70.0)
    assert made.generation.on_time(79.0) is Decision.NOTHING
    assert made.generation.on_time(80.0) is Decision.REPLAY
    assert made.generation.on_time(89.0) is Decision.NOTHING
    assert made.generation.on_time(90.0) is Decision.REPLAY
    assert made.generation.on_time(170.0) is Decision.EXPIRE


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
