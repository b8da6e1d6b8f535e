"""What is gathered into frames is what was put in: every token once, in order, whatever the cuts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.leader.frames import FRAME_INTERVAL, Gathering, acknowledgements
from shared.messages import GenerationRequest, TokenEntry, TokenLogprobs


def entry(identity: str, position: int, tokens: list[int], **fields: object) -> TokenEntry:
    return TokenEntry(identity, 0, position, tokens, **fields)  # type: ignore[arg-type]


def test_consecutive_entries_become_one() -> None:
    gathering = Gathering()
    gathering.add({"gateway": [entry("a", 0, []), entry("b", 3, [7])]})
    gathering.add({"gateway": [entry("a", 0, [1]), entry("b", 4, [8, 9])], "runner": [entry("c", 0, [5])]})
    gathering.add({"gateway": [entry("a", 1, [2], finish="length")]})
    assert gathering.take(1.0) == {
        "gateway": [entry("a", 0, [1, 2], finish="length"), entry("b", 3, [7, 8, 9])],
        "runner": [entry("c", 0, [5])],
    }
    assert not gathering
    assert gathering.take(2.0) == {}


def test_what_is_told_as_an_attempt_is_taken_on_stays_with_its_first_tokens() -> None:
    gathering = Gathering()
    request = GenerationRequest("a", "r", "m", "gateway", [1], 3, suspected="hung")
    gathering.add(acknowledgements([request], {"a"}, "fp_one"))
    gathering.add({"gateway": [entry("a", 0, [1], finish="stop")]})
    (told,) = gathering.take(1.0)["gateway"]
    assert (told.suspected, told.fingerprint, told.tokens, told.finish) == ("hung", "fp_one", [1], "stop")


def test_what_does_not_go_on_stays_apart() -> None:
    gathering = Gathering()
    scored = entry("a", 0, [1], logprobs=[TokenLogprobs(-0.5)])
    apart = [
        [scored, entry("a", 1, [], finish="length")],
        [entry("a", 0, [1], finish="length"), entry("a", 1, [2])],
        [entry("a", 0, [1]), entry("a", 2, [3])],
        [entry("a", 0, []), entry("a", 0, [1], cached_tokens=16)],
        [entry("a", 0, [1]), TokenEntry("a", 1, 1, [2])],
        [entry("a", 0, [], computed=512), entry("a", 0, [1])],
        [entry("a", 0, []), entry("a", 0, [], computed=512)],
    ]
    for pair in apart:
        for each in pair:
            gathering.add({"gateway": [each]})
        assert gathering.take(0.0) == {"gateway": pair}


def test_who_has_waited_for_a_first_token_is_served_first() -> None:
    gathering = Gathering()
    old, new, end = entry("old", 7, [1]), entry("new", 0, [2]), entry("old", 9, [], finish="cancelled")
    gathering.add({"gateway": [old, new, end]})
    assert gathering.take(0.0) == {"gateway": [new, old, end]}


def test_log_probabilities_and_errors_are_kept() -> None:
    gathering = Gathering()
    one, two = TokenLogprobs(-0.5), TokenLogprobs(-0.25, [(2, -0.25)])
    gathering.add({"g": [entry("a", 0, [1], logprobs=[one], cached_tokens=16)]})
    gathering.add({"g": [entry("a", 1, [2], logprobs=[two], finish="stop")]})
    gathering.add({"g": [entry("b", 0, [1])]})
    gathering.add({"g": [entry("b", 1, [], finish="error", error_code="c", error="e", retryable=True)]})
    assert gathering.take(0.0) == {
        "g": [
            entry("a", 0, [1, 2], logprobs=[one, two], finish="stop", cached_tokens=16),
            entry("b", 0, [1], finish="error", error_code="c", error="e", retryable=True),
        ]
    }


def test_the_first_frame_goes_at_once_and_the_next_after_the_interval() -> None:
    gathering = Gathering()
    assert gathering.wait(5.0) == 0
    gathering.take(5.0)
    assert gathering.wait(5.0) == pytest.approx(FRAME_INTERVAL)
    assert gathering.wait(5.0 + 2 * FRAME_INTERVAL) == 0


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=12), st.sets(st.integers(0, 11)))
def test_every_token_comes_once_and_in_order(steps: list[list[int]], taken_after: set[int]) -> None:
    """`steps`: which generations get a token in each step."""
    gathering = Gathering()
    position = dict.fromkeys(range(4), 0)
    received: dict[str, list[int]] = {str(name): [] for name in range(4)}

    def receive() -> None:
        for each in gathering.take(0.0).get("gateway", []):
            assert each.position == len(received[each.generation_id])
            received[each.generation_id] += each.tokens

    for at, step in enumerate(steps):
        for name in step:
            gathering.add({"gateway": [entry(str(name), position[name], [position[name]])]})
            position[name] += 1
        if at in taken_after:
            receive()
    receive()
    assert received == {str(name): list(range(count)) for name, count in position.items()}
