"""What a trainer does next, and how fast it learns."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.training.trainer.loop import Loop
from services.executor.training.trainer.schedule import Course, course_of, learning_rate, warmup_steps
from tests.unit.executor.training.trainer.jobs import hyperparameters


@given(st.integers(1, 300), st.floats(0, 1), st.sampled_from(["cosine", "linear", "constant"]), st.floats(0.1, 10))
def test_the_learning_rate_rises_to_its_peak_and_falls(
    steps: int, ratio: float, schedule: str, multiplier: float
) -> None:
    settled = hyperparameters(warmup_ratio=ratio, schedule=schedule, learning_rate_multiplier=multiplier)
    rates = [learning_rate(step, steps, settled, "supervised") for step in range(1, steps + 1)]
    warmup = warmup_steps(settled, steps)
    peak = 2e-4 * multiplier
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in rates)
    assert math.isclose(rates[warmup], peak)
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert warmup == max(0, min(math.ceil(ratio * steps), steps - 1))


def test_known_rates() -> None:
    cosine = hyperparameters(learning_rate_multiplier=1.0, warmup_ratio=0.0)
    assert learning_rate(1, 4, cosine, "dpo") == 5e-6
    assert math.isclose(learning_rate(3, 4, cosine, "supervised"), 1e-4)
    linear = hyperparameters(learning_rate_multiplier=1.0, warmup_ratio=0.5, schedule="linear")
    assert [learning_rate(t, 4, linear, "supervised") for t in (1, 2, 3, 4)] == pytest.approx(
        [2e-4 / 3, 4e-4 / 3, 2e-4, 1e-4]
    )


def actions(loop: Loop, pauses: set[int] = frozenset(), cost: float = 0.0) -> list[str]:  # type: ignore[assignment]
    """What a trainer does until it ends, with a second for each step; `pauses`: wanted after so many steps."""
    done, now = [], loop.saved_at
    while True:
        action = loop.next(now, pause=loop.done in pauses)
        done.append(f"{action} {loop.done}")
        match action:
            case "compute":
                now += 1
                loop.computed()
            case "save":
                now += cost
                loop.saved(now, cost, 1000)
            case "close_epoch":
                loop.closed()
            case _:
                return done


def test_a_state_comes_before_what_an_epoch_ends_with() -> None:
    assert actions(Loop(Course(3, 2, 2), 0, 0.0)) == [
        "compute 0",
        "compute 1",
        "save 2",
        "close_epoch 2",
        "compute 2",
        "compute 3",
        "save 4",
        "close_epoch 4",
        "finish 4",
    ]


def test_who_goes_on_from_the_end_of_an_epoch_does_again_what_it_ends_with() -> None:
    assert actions(Loop(Course(3, 2, 2), 4, 0.0)) == ["close_epoch 4", "finish 4"]
    assert actions(Loop(Course(3, 2, 2), 2, 0.0))[0] == "close_epoch 2"


def test_a_pause_writes_a_state_where_there_is_something_new() -> None:
    assert actions(Loop(Course(9, 1, 1), 0, 0.0), {2})[-2:] == ["save 2", "rest 2"]
    assert actions(Loop(Course(9, 1, 1), 2, 0.0), {2}) == ["rest 2"]
    assert actions(Loop(Course(9, 1, 1), 0, 0.0), {0}) == ["rest 0"]
    # At the end of an epoch: what it ends with is left to the one who goes on.
    assert actions(Loop(Course(2, 1, 1), 0, 0.0), {2})[-2:] == ["save 2", "rest 2"]


@given(st.floats(0.001, 5), st.floats(0.001, 100), st.integers(50, 400))
def test_writing_states_costs_little_and_little_is_lost(cost: float, least: float, steps: int) -> None:
    done = actions(Loop(Course(steps, 1, 1), 0, 0.0, least), cost=cost)
    saved = [int(action.split()[1]) for action in done if action.startswith("save")]
    between = max(1.0, least, 100 * cost)
    gaps = [after - before for before, after in itertools.pairwise(saved)]
    assert all(gap >= min(between, steps) - 1e-6 for gap in gaps[:-1])
    assert all(gap <= math.ceil(between) + 1 for gap in gaps)


def test_large_states_are_written_less_often() -> None:
    loop = Loop(Course(10_000, 1, 1), 0, 0.0, 60.0)
    for _ in range(60):
        loop.computed()
    assert loop.next(60.0, pause=False) == "save"
    loop.saved(60.0, 0.1, 800_000_000)
    loop.computed()
    assert loop.next(259.0, pause=False) == "compute"
    assert loop.next(260.0, pause=False) == "save"


def test_a_course_has_the_steps_of_the_record() -> None:
    course = course_of(hyperparameters(epochs=3, batch_size=4), 9)
    assert (course.steps, course.steps_per_epoch) == (9, 3)
