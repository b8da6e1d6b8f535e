"""Which steps begin when, and where their tokens come from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.core.engine import BadLogits, Launched, RestoreFailed, SampledToken
from services.executor.core.sampling_state import SamplingState
from services.executor.core.step_plan import StepPlan, as_int32, to_bytes
from services.executor.worker.launches import Launches
from shared.messages import SamplingParams

HOST = SamplingState(SamplingParams(logprobs=1), [], [])
DEVICE = SamplingState(SamplingParams(), [], [])


def plan_of(step: int, token: int) -> StepPlan:
    """Of one sequence."""
    one = to_bytes([0])
    return StepPlan(step, 1, to_bytes([token]), one, one, to_bytes([1]), to_bytes([1]), one, one)


class FakeDevice:
    """Samples, for a step with token t, t + 1; knows the last token that it has sampled itself, and no other."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.failing: Exception | None = None
        self.launches = Launches(self.execute, self.begin)
        self._last = -1000

    def begin(self, plan: StepPlan, states: list[SamplingState]) -> "_Begun | None":
        if states[0] is not DEVICE:
            return None
        self.began.append(plan.step)
        if isinstance(self.failing, RestoreFailed):
            raise self.failing
        token = int(as_int32(plan.token_ids)[0])
        self._last = (self._last if token < 0 else token) + 1
        return _Begun(self._last, self.failing)

    def execute(self, plan: StepPlan, states: object) -> list[SampledToken]:
        self.began.append(plan.step)
        token = int(as_int32(plan.token_ids)[0])
        assert token >= 0, "the host knows no tokens but those in the plan"
        self._last = -1000  # what the device has sampled is of no use any more
        return [SampledToken(token + 1)]


class _Begun:
    def __init__(self, token: int, error: Exception | None) -> None:
        self._token, self._error = token, error

    def __call__(self) -> list[SampledToken]:
        if self._error is not None:
            raise self._error
        return [SampledToken(self._token)]


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_tokens_follow_each_other_whoever_samples_and_however_far_ahead(steps: list[tuple[bool, bool]]) -> None:
    device = FakeDevice()
    under_way: list[Launched] = []
    token = 0  # of the last result
    taken = 0
    for number, (on_device, ahead) in enumerate(steps):
        while under_way and (len(under_way) == 2 or not ahead):
            (sampled,) = under_way.pop(0).result()
            taken += 1
            token = sampled.token
            assert token == taken
        plan = plan_of(number, -1 if under_way else token)
        under_way.append(device.launches.launch(plan, [DEVICE if on_device else HOST]))
    for launched in under_way:
        taken += 1
        assert launched.result() == [SampledToken(taken)]
    assert device.began == list(range(len(steps)))


def test_steps_of_the_device_begin_at_once_and_others_when_they_are_asked_for() -> None:
    device = FakeDevice()
    first = device.launches.launch(plan_of(0, 0), [DEVICE])
    second = device.launches.launch(plan_of(1, -1), [HOST])
    assert device.began == [0]
    first.result()
    third = device.launches.launch(plan_of(2, -1), [DEVICE])
    assert device.began == [0]
    second.result()
    assert device.began == [0, 1, 2]
    assert third.result() == [SampledToken(3)]


@pytest.mark.parametrize("error", [BadLogits([0]), RestoreFailed([1])])
def test_a_step_that_fails_says_so_when_it_is_asked_for_and_the_next_is_computed(error: Exception) -> None:
    device = FakeDevice()
    device.failing = error
    first = device.launches.launch(plan_of(0, 0), [DEVICE])
    device.failing = None
    second = device.launches.launch(plan_of(1, -1), [HOST])
    with pytest.raises(type(error)):
        first.result()
    assert second.result() == [SampledToken(1)]  # of token 0, for nobody
