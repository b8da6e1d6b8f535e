"""The trainer's own parts, without its process: the base as serving keeps it, examples end to end, AdamW in fp32."""

from collections.abc import Sequence
from pathlib import Path

import torch
from services.executor.training.batch import PackedBatch
from services.executor.training.model import load_trainable

from benchmarks.training.examples import Example, packed_micro_batches, trained
from benchmarks.training.task import Task
from services.executor.core.settings import ExecutorSettings
from shared.messages.training import Hyperparameters


class WithRyzanstein:
    """A model under training."""

    def __init__(self, task: Task) -> None:
        self._task = task
        settings = ExecutorSettings.model_validate(
            {
                "model": task.model,
                "dtype": "bf16",
                "weight_dtype": task.weights,
                "weight_cache_directory": task.cache,
                "device": "cpu",
            }
        )
        self._model = load_trainable(
            Path(task.model),
            settings,
            Hyperparameters(rank=task.rank),
            seed=1,
            threads=task.threads,
            device=torch.device("cpu"),
            between_layers=lambda: None,
        )
        factors = [tensor for pair in self._model.factors.values() for tensor in (pair.a, pair.b)]
        self._factors = factors
        self._optimizer = torch.optim.AdamW(factors, lr=task.learning_rate, fused=True)

    def step(self, examples: Sequence[Example]) -> float:
        """One of the optimizer; the loss before it."""
        count, loss = trained(examples), 0.0
        for some in packed_micro_batches(examples):
            batch = packed(some)
            log_probs, _ = self._model.log_probs(batch, adapter=True, dropout=None)
            part = -(log_probs * batch.weight_rows).sum() / count
            part.backward()
            loss += float(part.detach())
        torch.nn.utils.clip_grad_norm_(self._factors, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss


def packed(examples: Sequence[Example]) -> PackedBatch:
    tokens: list[int] = []
    rows: list[int] = []
    for one in examples:
        rows += range(len(tokens) + one.context - 1, len(tokens) + len(one.tokens) - 1)
        tokens += one.tokens
    every = torch.tensor(tokens)
    at = torch.tensor(rows)
    return PackedBatch(every, [len(one.tokens) for one in examples], at, every[at + 1], torch.ones(len(rows)))
