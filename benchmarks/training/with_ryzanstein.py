"""The trainer's own parts: its steps alone, and the process that a job has (`as_a_job`)."""

import contextlib
import os
import statistics
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch

from benchmarks.errors import BenchError
from benchmarks.training.examples import Example
from benchmarks.training.task import SEED, Result, Task
from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.trainer_pipe import (
    EXAMPLES,
    Finished,
    Stepped,
    TrainerEvent,
    TrainerFailed,
    TrainerSpec,
)
from services.executor.training.model import load_trainable
from services.executor.training.trainer.examples import read_examples
from services.executor.training.trainer.optimizer import FactorOptimizer
from services.executor.training.trainer.schedule import course_of
from services.executor.training.trainer.steps import SingleReplica, Steps, named_factors
from shared.messages.training import Examples, Hyperparameters, TrainingData, TrainingJob, TrainingMetrics
from shared.process import die_with_parent


class WithRyzanstein:
    """A model under training, without the process around it."""

    def __init__(self, task: Task, examples: Sequence[Example]) -> None:
        self._job = job_of(task)
        hyperparameters, device = self._job.hyperparameters, torch.device("cpu")
        model = load_trainable(
            Path(task.model),
            executor_settings(task),
            hyperparameters,
            SEED,
            task.threads,
            device,
            between_layers=lambda: None,
        )
        optimizer = FactorOptimizer(named_factors(model), hyperparameters, device)
        known = read_examples(encoded(examples), 1, "training")
        course = course_of(hyperparameters, known.units)
        self._steps = Steps(self._job, model, optimizer, known, course, device, SingleReplica())

    def step(self, step: int) -> float:
        return self._steps.compute(step, 0).train_loss


def executor_settings(task: Task) -> ExecutorSettings:
    return ExecutorSettings.model_validate(raw_settings(task))


def raw_settings(task: Task) -> dict[str, object]:
    return {
        "model": task.model,
        "dtype": "bf16",
        "weight_dtype": task.weights,
        "weight_cache_directory": task.cache,
        "device": "cpu",
        "log_format": "json",
    }


def job_of(task: Task, epochs: int = 1) -> TrainingJob:
    return TrainingJob(
        id="ftjob-benchmark",
        tenant="",
        model="benchmark",
        method="supervised",
        training_file="",
        training_object="",
        created_at=0.0,
        seed=SEED,
        hyperparameters=Hyperparameters(
            epochs=epochs, batch_size=task.batch, learning_rate_multiplier=0.5, rank=task.rank
        ),
        threads=task.threads,
    )


def encoded(examples: Sequence[Example]) -> Examples:
    return Examples(
        array("i", [token for one in examples for token in one.tokens]).tobytes(),
        b"".join(b"\0" * one.context + b"\1" * (len(one.tokens) - one.context) for one in examples),
        array("I", [len(one.tokens) for one in examples]).tobytes(),
    )


@contextlib.contextmanager
def trainer(
    task: Task, examples: Sequence[Example], epochs: int = 1
) -> Iterator[tuple[int, Iterator[TrainerEvent]]]:
    """The process of a job: its id, and what it says. It is ended at the end."""
    with TemporaryDirectory(prefix="ryzanstein-trainer-") as directory:
        data = TrainingData(encoded(examples))
        Path(directory, EXAMPLES).write_bytes(msgspec.msgpack.encode(data))
        spec = TrainerSpec(job_of(task, epochs), directory, task.model, raw_settings(task), task.threads)
        reading, writing = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "services.executor.training", str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": str(task.threads), "HF_HUB_OFFLINE": "1"},
            pass_fds=[writing],
            preexec_fn=die_with_parent(),
        )
        os.close(writing)
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(spec) + b"\n")
            process.stdin.flush()
            with os.fdopen(reading, "rb") as lines:
                yield process.pid, (msgspec.json.decode(line, type=TrainerEvent) for line in lines)
        finally:
            process.kill()
            process.wait()
            with contextlib.suppress(OSError):
                process.stdin.close()


def as_a_job(task: Task, examples: Sequence[Example], looked_at: Callable[[int], None]) -> Result:
    """The examples twice, of which the second time counts. `looked_at` is given the process. Raises `BenchError`."""
    found: list[TrainingMetrics] = []
    with trainer(task, examples, epochs=2) as (pid, events):
        looked_at(pid)
        for event in events:
            if isinstance(event, TrainerFailed):
                raise BenchError(f"{task.way} with {task.weights} failed: {event.message}")
            if isinstance(event, Stepped):
                found.append(event.metrics)
            if isinstance(event, Finished):
                break
        else:
            raise BenchError(f"{task.way} with {task.weights}: the trainer has ended without a word.")
    counted = found[len(found) // 2 :]
    return Result(
        counted[-1].tokens - found[len(found) // 2 - 1].tokens,
        sum(metrics.seconds for metrics in counted),
        statistics.fmean(metrics.train_loss for metrics in counted),
    )
