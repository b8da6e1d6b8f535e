"""How far a job is, and how fast it learns: pure functions of its hyperparameters and of a step's number.

Steps are counted from 1. The learning rate rises over the warm-up's steps, reaches its peak at the step after them, and
falls towards 0, which it never reaches: no step is computed in vain.

    warm-up   t / (w + 1)                          steps 1 to w
    cosine    (1 + cos(pi p)) / 2                  p = (t - 1 - w) / (steps - w)
    linear    1 - p
    constant  1

Source: Loshchilov & Hutter, "SGDR", https://arxiv.org/abs/1608.03983.
"""

import math
from dataclasses import dataclass

from shared.errors import InvalidRequest
from shared.messages.training import Hyperparameters, TrainingMethod, steps_of

# Of LoRA, before the job's multiplier.
PEAK_LEARNING_RATE: dict[TrainingMethod, float] = {"supervised": 2e-4, "dpo": 5e-6}


@dataclass(frozen=True)
class Course:
    """A job's steps: which examples each one learns from, and where epochs end."""

    units: int  # examples, of DPO pairs
    batch_size: int
    epochs: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.units // self.batch_size)

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        """Counted from 0."""
        return (step - 1) // self.steps_per_epoch

    def units_of(self, step: int) -> slice:
        """Of the order of the step's epoch."""
        first = (step - 1) % self.steps_per_epoch * self.batch_size
        return slice(first, min(first + self.batch_size, self.units))

    def ends_epoch(self, step: int) -> bool:
        return step > 0 and step % self.steps_per_epoch == 0


def course_of(hyperparameters: Hyperparameters, units: int) -> Course:
    """Raises `InvalidRequest` where there is nothing to do."""
    if min(units, hyperparameters.batch_size, hyperparameters.epochs) < 1:
        raise InvalidRequest(
            f"The job has {units} examples, a batch_size of {hyperparameters.batch_size} and {hyperparameters.epochs} "
            "epochs; create it with at least one of each."
        )
    course = Course(units, hyperparameters.batch_size, hyperparameters.epochs)
    assert course.steps == steps_of(hyperparameters, units), "the record counts as the trainer does"
    return course


def warmup_steps(hyperparameters: Hyperparameters, steps: int) -> int:
    """At least one step has the peak's learning rate."""
    return max(0, min(math.ceil(hyperparameters.warmup_ratio * steps), steps - 1))


def learning_rate(step: int, steps: int, hyperparameters: Hyperparameters, method: TrainingMethod) -> float:
    """Of `step`, counted from 1."""
    peak = PEAK_LEARNING_RATE[method] * hyperparameters.learning_rate_multiplier
    warmup = warmup_steps(hyperparameters, steps)
    if step <= warmup:
        return peak * step / (warmup + 1)
    done = (step - 1 - warmup) / (steps - warmup)
    match hyperparameters.schedule:
        case "cosine":
            return peak * 0.5 * (1.0 + math.cos(math.pi * done))
        case "linear":
            return peak * (1.0 - done)
        case "constant":
            return peak
