"""Small fine-tuning jobs, and a model that stands in for a transformer: trained in milliseconds."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from services.executor.ipc.trainer_pipe import EXAMPLES, TrainerSpec
from services.executor.training.batch import DropoutKey, PackedBatch
from shared.messages.training import Examples, Hyperparameters, TrainingData, TrainingJob

VOCABULARY = 64
WIDTH = 24


def examples_of(texts: Sequence[Sequence[int]], context: int = 2) -> Examples:
    """Each a list of tokens, of which those after the first `context` are trained on."""
    weights = [bytes([0] * min(context, len(text)) + [1] * max(0, len(text) - context)) for text in texts]
    return Examples(
        tokens=np.array([token for text in texts for token in text], dtype="<i4").tobytes(),
        weights=b"".join(weights),
        lengths=np.array([len(text) for text in texts], dtype="<u4").tobytes(),
    )


def random_texts(count: int, seed: int = 0, vocabulary: int = VOCABULARY, longest: int = 24) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(3, vocabulary, int(length)).tolist() for length in draw.integers(4, longest + 1, count)]


def hyperparameters(**changes: Any) -> Hyperparameters:
    settled: dict[str, Any] = {
        "epochs": 2,
        "batch_size": 4,
        "learning_rate_multiplier": 20.0,
        "beta": 0.1,
        "rank": 4,
        "max_tokens": 128,
    }
    return Hyperparameters(**{**settled, **changes})


def job_of(method: str = "supervised", seed: int = 7, model: str = "tiny", **changes: Any) -> TrainingJob:
    return TrainingJob(
        id="ftjob-test",
        tenant="",
        model=model,
        method=method,  # type: ignore[arg-type]
        training_file="file-1",
        training_object="1",
        created_at=1.0,
        seed=seed,
        hyperparameters=hyperparameters(**changes),
    )


def make_spec(
    directory: Path,
    job: TrainingJob,
    training: Examples,
    validation: Examples | None = None,
    model_directory: str = "",
    **changes: Any,
) -> TrainerSpec:
    """With the examples written into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / EXAMPLES).write_bytes(msgspec.msgpack.encode(TrainingData(training, validation or Examples())))
    settings: dict[str, Any] = {"device": "cpu"}
    given: dict[str, Any] = {"settings": settings, "threads": 1, "state_interval": 0.0, **changes}
    return TrainerSpec(job, str(directory), model_directory, **given)


class StandIn:
    """Predicts a token from the one before it: log softmax of (W + scale B A) embedding. Of A1's contract it keeps
    what a trainer uses."""

    def __init__(self, rank: int = 4, scale: float = 2.0, dropout: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self._embedding = torch.randn(VOCABULARY, WIDTH, generator=generator)
        self._weight = torch.randn(VOCABULARY, WIDTH, generator=generator) * 0.3
        a = nn.Parameter(torch.randn(rank, WIDTH, generator=generator) * 0.3)
        self.factors = {"model.layers.0.q_proj": SimpleNamespace(a=a, b=nn.Parameter(torch.zeros(VOCABULARY, rank)))}
        self._scale, self._dropout = scale, dropout
        self.between_layers: Callable[[], None] = lambda: None
        self.poisoned = -1  # a token that makes the loss NaN
        self.batches: list[PackedBatch] = []

    def log_probs(self, batch: PackedBatch, *, adapter: bool, dropout: DropoutKey | None) -> tuple[Tensor, Tensor]:
        self.between_layers()
        self.batches.append(batch)
        (pair,) = self.factors.values()
        x = self._embedding[batch.tokens[batch.rows]]
        logits = x @ self._weight.T
        if adapter:
            if dropout is not None:
                generator = torch.Generator().manual_seed(hash((dropout.seed, dropout.step, dropout.micro_step)))
                x = x * (torch.rand(x.shape, generator=generator) > self._dropout) / (1 - self._dropout)
            logits = logits + self._scale * (x @ pair.a.T @ pair.b.T)
        if (batch.tokens == self.poisoned).any():
            logits = logits * float("nan")
        found = torch.log_softmax(logits, -1)
        return found.gather(1, batch.targets[:, None])[:, 0], logits.argmax(-1) == batch.targets
