"""One optimizer step, and a pass over the examples for validation: what both compute and what they tell.

    units of the step ─▶ micro batches ─▶ forward, loss, backward of each ─▶ sum over replicas ─▶ clip ─▶ AdamW

A step depends on the factors, the optimizer's moments and its own number alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from services.executor.training.batch import DropoutKey
from services.executor.training.trainer import losses
from services.executor.training.trainer.examples import MICRO_BATCH_TOKENS, ExampleSet, epoch_order, micro_batches
from services.executor.training.trainer.losses import Sums, no_sums
from services.executor.training.trainer.optimizer import FactorOptimizer
from services.executor.training.trainer.schedule import Course, learning_rate
from shared.errors import TrainingDiverged
from shared.messages.training import TrainingJob, TrainingMetrics

if TYPE_CHECKING:  # it imports transformers
    from services.executor.training.model import TrainableModel

_VALIDATED_TOGETHER = 64  # units that are packed into micro batches with each other
_EXAMPLES_TOLD = 8  # in the sentence about a loss that is no number


class TrainerReplicas(Protocol):
    """The processes that compute a job side by side, each a part of every step's micro batches."""

    @property
    def count(self) -> int: ...

    @property
    def replica(self) -> int:
        """Which of them this process is, from 0."""
        ...

    def meet(self, step: int, fingerprint: str) -> None:
        """Waits for all others, which are to go on after the same step of the same job. Raises `RyzansteinError`, and
        what is raised between two layers."""
        ...

    def close(self) -> None:
        """The others find that it has ended."""
        ...

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Makes each the sum over all processes, added in the order of the replicas: the same on all of them, bit for
        bit, in every run. Raises as `meet`."""
        ...


class SingleReplica:
    """It has all micro batches to itself."""

    replica, count = 0, 1

    def meet(self, step: int, fingerprint: str) -> None:
        return

    def close(self) -> None:
        return

    def add(self, tensors: Sequence[Tensor]) -> None:
        return


@dataclass(frozen=True)
class Means:
    """Of a step's examples, or of those for validation."""

    loss: float
    accuracy: float
    margin: float | None  # None where the method has none


def named_factors(model: "TrainableModel") -> dict[str, nn.Parameter]:
    """By `<target>/a` and `<target>/b`."""
    return {
        f"{name}/{letter}": factor
        for name, pair in sorted(model.factors.items())
        for letter, factor in (("a", pair.a), ("b", pair.b))
    }


@dataclass
class Steps:
    """Computes the steps of a job."""

    job: TrainingJob
    model: "TrainableModel"
    optimizer: FactorOptimizer
    examples: ExampleSet
    course: Course
    device: torch.device
    replicas: TrainerReplicas
    _order: tuple[int, npt.NDArray[np.int64]] | None = field(default=None, init=False)  # an epoch and its order

    def compute(self, step: int, tokens_before: int) -> TrainingMetrics:
        """Makes step `step`, counted from 1, after `tokens_before` tokens; `seconds` of what it returns is 0. Raises
        `TrainingDiverged`: the factors are then those of before. What is raised between two layers leaves them so
        too."""
        self.optimizer.clear()
        units = self._units_of(step)
        lengths = self.examples.lengths(units)
        sums = no_sums(self.device)
        weight = self._weight(self.examples, units)
        for place, batch in self._mine(self.examples, units):
            key = DropoutKey(self.job.seed, step, place)
            dropout = key if self.job.hyperparameters.dropout > 0 else None
            loss, part = self._loss(self.examples, batch, weight, dropout)
            loss.backward()  # type: ignore[no-untyped-call]
            sums += part
        means = self._means(sums, weight, self.optimizer.gradients())
        norm = float(self.optimizer.clip())
        if not (math.isfinite(means.loss) and math.isfinite(norm)):
            self.optimizer.clear()
            raise self._diverged(step, means.loss, norm, units)
        rate = learning_rate(step, self.course.steps, self.job.hyperparameters, self.job.method)
        self.optimizer.step(rate)
        return TrainingMetrics(
            step,
            train_loss=means.loss,
            train_accuracy=means.accuracy,
            learning_rate=rate,
            grad_norm=norm,
            tokens=tokens_before + sum(lengths),
            margin=means.margin,
        )

    def validate(self, examples: ExampleSet) -> Means:
        """Over all of `examples`, without dropout."""
        weight = self._weight(examples, range(examples.units))
        sums = no_sums(self.device)
        with torch.no_grad():
            for first in range(0, examples.units, _VALIDATED_TOGETHER):
                units = range(first, min(first + _VALIDATED_TOGETHER, examples.units))
                for _, batch in self._mine(examples, units):
                    sums += self._loss(examples, batch, weight, None)[1]
        return self._means(sums, weight, [])

    def _mine(self, examples: ExampleSet, units: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """The micro batches of `units` that this process computes, each with its place; without those that have nothing
        to learn from. Where there are few tokens, each replica still has a part of them."""
        lengths = examples.lengths(units)
        most, count = MICRO_BATCH_TOKENS, self.replicas.count
        if count > 1:
            most = min(most, -(-sum(lengths) // count))
        batches = islice(enumerate(micro_batches(units, lengths, most)), self.replicas.replica, None, count)
        return ((place, batch) for place, batch in batches if examples.trained(batch))

    def _units_of(self, step: int) -> list[int]:
        epoch = self.course.epoch_of(step)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(self.job.seed, epoch, self.examples.units)
        return [int(unit) for unit in self._order[1][self.course.units_of(step)]]

    def _weight(self, examples: ExampleSet, units: Sequence[int]) -> int:
        """What a mean over `units` is divided by: trained tokens, or pairs."""
        return len(units) if self.job.method == "dpo" else max(1, examples.trained(units))

    def _loss(
        self, examples: ExampleSet, units: list[int], weight: int, dropout: DropoutKey | None
    ) -> tuple[Tensor, Sums]:
        batch = examples.packed(units, self.device)
        if self.job.method == "supervised":
            log_probs, likeliest = self.model.log_probs(batch, adapter=True, dropout=dropout)
            return losses.supervised(log_probs, batch.weight_rows, likeliest, weight)
        with torch.no_grad():
            reference, _ = self.model.log_probs(batch, adapter=False, dropout=None)
        log_probs, _ = self.model.log_probs(batch, adapter=True, dropout=dropout)
        beta, rows = self.job.hyperparameters.beta, examples.rows_of_examples(units)
        return losses.preference(log_probs, reference, rows, beta, weight)

    def _means(self, sums: Sums, weight: int, gradients: Sequence[Tensor]) -> Means:
        """`gradients` and `sums` are added up over the replicas on the way."""
        self.replicas.add([*gradients, sums])
        loss, right, margin = sums.tolist()
        return Means(loss, right / weight, margin / weight if self.job.method == "dpo" else None)

    def _diverged(self, step: int, loss: float, norm: float, units: Sequence[int]) -> TrainingDiverged:
        numbers = sorted(unit + 1 for unit in units)
        told = ", ".join(map(str, numbers[:_EXAMPLES_TOLD])) + (", ..." if len(numbers) > _EXAMPLES_TOLD else "")
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradients is {norm}"
        return TrainingDiverged(
            f"Step {step} of {self.course.steps} has diverged ({what}); create a job with a smaller "
            "learning_rate_multiplier or a larger warmup_ratio, and look at the examples of this step in the training "
            f"file, counted from 1: {told}."
        )
