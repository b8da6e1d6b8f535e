"""The simulated engine: it does to its leader what engines do, and its text is right all the same."""

import random
from collections.abc import Iterable

import pytest

from services.executor.engines.base import EngineAbort, EngineRequest, EngineStep
from services.executor.worker.stub import stub_token
from shared.messages import SamplingParams
from tests.simulation.deployment.engines import BEYOND, Places

MOST = 40  # tokens of each answer


def ask(seed: int, output: Iterable[int] = (), prompt: int = 10) -> EngineRequest:
    tokens = [*[1] * prompt, *output]
    return EngineRequest(f"{seed}/{len(tokens)}", tokens, prompt, MOST, SamplingParams(seed=seed))


def text(seed: int, tokens: int) -> list[int]:
    return [stub_token(seed, position) for position in range(tokens)]


def steps(places: Places) -> list[EngineStep]:
    """Until it has nothing; what is whole is aborted."""
    found: list[EngineStep] = []
    while places.busy and places.begin():
        found.append(places.end())
        for delta in found[-1].deltas:
            if len(told(found, delta.id)) >= MOST and not delta.finish:
                places.take(EngineAbort([delta.id]))
    return found


def told(found: list[EngineStep], name: str) -> list[int]:
    return [token for step in found for delta in step.deltas if delta.id == name for token in delta.tokens]


def test_it_preempts_without_a_word_and_tells_some_tokens_at_once() -> None:
    places, asked = Places(3, 60, random.Random(1)), [ask(seed) for seed in range(5)]
    for one in asked:
        places.take(one)
    found = steps(places)
    assert places.preemptions
    assert max(step.running for step in found) == 3
    assert {1, 2, 4} <= {len(delta.tokens) for step in found for delta in step.deltas}
    for one in asked:
        tokens = told(found, one.id)
        assert tokens == text(one.sampling.seed, len(tokens))
        assert len(tokens) >= MOST
    ended = {delta.id for step in found for delta in step.deltas if delta.finish}
    assert 0 < len(ended) < 5, "the others were aborted"
    assert max(len(told(found, name)) for name in ended) in range(MOST + 1, MOST + 1 + BEYOND)


def test_an_abort_may_come_too_late_and_is_heard_at_last() -> None:
    after = []
    for seed in range(20):
        places, one = Places(2, 1000, random.Random(seed)), ask(seed)
        places.take(one)
        places.begin()
        places.take(EngineAbort([one.id, "unknown"]))
        assert told([places.end()], one.id)
        after.append(told(steps(places), one.id))
        assert not places.busy
    assert any(after)
    assert not all(after)


@pytest.mark.parametrize("output", [text(1, 4), []])
def test_a_continuation_goes_on_behind_what_there_is(output: list[int]) -> None:
    places, one = Places(2, 1000, random.Random(1)), ask(1, output)
    places.take(one)
    whole = [*output, *told(steps(places), one.id)]
    assert whole == text(1, len(whole))
    places.take(one)
    with pytest.raises(ValueError, match="came before"):
        places.begin()


def test_it_goes_on_from_no_other_text() -> None:
    places = Places(2, 1000, random.Random(1))
    places.take(ask(1, text(2, 4)))
    with pytest.raises(ValueError, match="not its text"):
        places.begin()
