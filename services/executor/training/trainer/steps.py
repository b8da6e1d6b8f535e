"""One optimizer step, and a pass over the examples for validation: what both compute and what they tell.

    units of the step ─▶ micro batches ─▶ forward, loss, backward of each ─▶ sum over replicas ─▶ clip ─▶ AdamW

A step depends on the factors, the optimizer's moments and its own number alone.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from services.executor.training.batch import DropoutKey, PackedBatch
from services.executor.training.trainer import losses
from services.executor.training.trainer.examples import MICRO_BATCH_TOKENS, ExampleSet, epoch_order, micro_batches
from services.executor.training.trainer.losses import Sums
from services.executor.training.trainer.optimizer import FactorOptimizer
from services.executor.training.trainer.schedule import Course, learning_rate
from shared.errors import TrainingDiverged
from shared.messages.training import TrainingJob, TrainingMetrics

_VALIDATED_TOGETHER = 64  # units that are packed into micro batches with each other
_EXAMPLES_TOLD = 8  # in the sentence about a loss that is no number


class TrainableFactors(Protocol):
    """Of one linear: y = W x + scale B (A x)."""

    @property
    def a(self) -> nn.Parameter:
        """float32 [rank, in]"""
        ...

    @property
    def b(self) -> nn.Parameter:
        """float32 [out, rank]"""
        ...


class Trainable(Protocol):
    """What a trainer needs of `training.model.TrainableModel`."""

    @property
    def factors(self) -> Mapping[str, TrainableFactors]: ...

    def log_probs(self, batch: PackedBatch, *, adapter: bool, dropout: DropoutKey | None) -> tuple[Tensor, Tensor]: ...


class TrainerReplicas(Protocol):
    """The processes that compute a job side by side, each a part of every step's micro batches."""

    @property
    def count(self) -> int: ...

    def meet(self, step: int, fingerprint: str) -> None:
        """Waits for all others, which are to go on after the same step of the same job. Raises `RyzansteinError`, and
        what is raised between two layers."""
        ...

    def mine(self, batches: list[list[int]]) -> list[tuple[int, list[int]]]:
        """Those that this process computes, each with its place among all."""
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

    count = 1

    def meet(self, step: int, fingerprint: str) -> None:
        return

    def close(self) -> None:
        return

    def mine(self, batches: list[list[int]]) -> list[tuple[int, list[int]]]:
        return list(enumerate(batches))

    def add(self, tensors: Sequence[Tensor]) -> None:
        return


@dataclass(frozen=True)
class Means:
    """Of a step's examples, or of those for validation."""

    loss: float
    accuracy: float
    margin: float | None  # None where the method has none


def named_factors(model: Trainable) -> dict[str, nn.Parameter]:
    """By `<target>/a` and `<target>/b`."""
    return {
        f"{name}/{letter}": factor
        for name, pair in sorted(model.factors.items())
        for letter, factor in (("a", pair.a), ("b", pair.b))
    }


class Steps:
    """Computes the steps of a job."""

    def __init__(
        self,
        job: TrainingJob,
        model: Trainable,
        optimizer: FactorOptimizer,
        examples: ExampleSet,
        course: Course,
        device: torch.device,
        replicas: TrainerReplicas,
    ) -> None:
        self._job = job
        self._model = model
        self._optimizer = optimizer
        self._examples = examples
        self._course = course
        self._device = device
        self._replicas = replicas
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None  # an epoch and its order

    def compute(self, step: int, tokens_before: int) -> TrainingMetrics:
        """Makes step `step`, counted from 1, after `tokens_before` tokens; `seconds` of what it returns is 0. Raises
        `TrainingDiverged`: the factors are then those of before. What is raised between two layers leaves them so
        too."""
        self._optimizer.clear()
        units = self._units_of(step)
        lengths = self._examples.lengths(units)
        sums = Sums.zero(self._device)
        weight = self._weight(self._examples, units)
        for place, batch in self._mine(self._examples, units):
            key = DropoutKey(self._job.seed, step, place)
            dropout = key if self._job.hyperparameters.dropout > 0 else None
            loss, part = self._loss(self._examples, batch, weight, dropout)
            loss.backward()  # type: ignore[no-untyped-call]
            sums.add(part)
        means = self._means(sums, weight, self._optimizer.gradients())
        norm = float(self._optimizer.clip())
        if not (math.isfinite(means.loss) and math.isfinite(norm)):
            self._optimizer.clear()
            raise self._diverged(step, means.loss, norm, units)
        rate = learning_rate(step, self._course.steps, self._job.hyperparameters, self._job.method)
        self._optimizer.step(rate)
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
        sums = Sums.zero(self._device)
        with torch.no_grad():
            for first in range(0, examples.units, _VALIDATED_TOGETHER):
                units = range(first, min(first + _VALIDATED_TOGETHER, examples.units))
                for _, batch in self._mine(examples, units):
                    sums.add(self._loss(examples, batch, weight, None)[1])
        return self._means(sums, weight, [])

    def _mine(self, examples: ExampleSet, units: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """The micro batches of `units` that this process computes, each with its place; without those that have nothing
        to learn from. Where there are few tokens, each replica still has a part of them."""
        lengths = examples.lengths(units)
        most = MICRO_BATCH_TOKENS
        if self._replicas.count > 1:
            most = min(most, -(-sum(lengths) // self._replicas.count))
        batches = micro_batches(units, lengths, most)
        return ((place, batch) for place, batch in self._replicas.mine(batches) if examples.trained(batch))

    def _units_of(self, step: int) -> list[int]:
        epoch = self._course.epoch_of(step)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(self._job.seed, epoch, self._examples.units)
        return [int(unit) for unit in self._order[1][self._course.units_of(step)]]

    def _weight(self, examples: ExampleSet, units: Sequence[int]) -> int:
        """What a mean over `units` is divided by: trained tokens, or pairs."""
        return len(units) if self._job.method == "dpo" else max(1, examples.trained(units))

    def _loss(
        self, examples: ExampleSet, units: list[int], weight: int, dropout: DropoutKey | None
    ) -> tuple[Tensor, Sums]:
        batch = examples.packed(units, self._device)
        if self._job.method == "supervised":
            log_probs, likeliest = self._model.log_probs(batch, adapter=True, dropout=dropout)
            return losses.supervised(log_probs, batch.weight_rows, likeliest, weight)
        with torch.no_grad():
            reference, _ = self._model.log_probs(batch, adapter=False, dropout=None)
        log_probs, _ = self._model.log_probs(batch, adapter=True, dropout=dropout)
        beta, rows = self._job.hyperparameters.beta, examples.rows_of_examples(units)
        return losses.preference(log_probs, reference, rows, beta, weight)

    def _means(self, sums: Sums, weight: int, gradients: Sequence[Tensor]) -> Means:
        """`gradients` are added up over the replicas on the way."""
        figures = sums.as_tensor()
        self._replicas.add([*gradients, figures])
        loss, right, margin = figures.tolist()
        return Means(loss, right / weight, margin / weight if self._job.method == "dpo" else None)

    def _diverged(self, step: int, loss: float, norm: float, units: Sequence[int]) -> TrainingDiverged:
        numbers = sorted(unit + 1 for unit in units)
        told = ", ".join(map(str, numbers[:_EXAMPLES_TOLD])) + (", ..." if len(numbers) > _EXAMPLES_TOLD else "")
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradients is {norm}"
        return TrainingDiverged(
            f"Step {step} of {self._course.steps} has diverged ({what}); create a job with a smaller "
            "learning_rate_multiplier or a larger warmup_ratio, and look at the examples of this step in the training "
            f"file, counted from 1: {told}."
        )
