"""One process of `benchmarks.training`: does the task on its command line, and says its result in a line of JSON."""

import os
import statistics
import sys
import time
from typing import Protocol

import msgspec
import torch

from benchmarks.training.examples import Example, conversations
from benchmarks.training.task import SEED, Result, Task
from services.executor.training.trainer.examples import epoch_order


class Side(Protocol):
    """Who trains."""

    def step(self, step: int) -> float:
        """One of the optimizer, counted from 1; the loss before it."""
        ...


def side_of(task: Task, examples: list[Example]) -> Side:
    if task.side == "peft":
        from benchmarks.training.with_peft import WithPeft

        order = epoch_order(SEED, 0, len(examples))
        return WithPeft(task, [examples[int(at)] for at in order])
    from benchmarks.training.with_ryzanstein import WithRyzanstein

    return WithRyzanstein(task, examples)


def measured(task: Task) -> Result:
    """Each step of an epoch once; the first one once more before, untimed."""
    examples = conversations(task.examples, vocabulary_of(task.model))
    side = side_of(task, examples)
    side.step(1)
    steps = -(-len(examples) // task.batch)
    began = time.perf_counter()
    losses = [side.step(step) for step in range(1, 1 + steps)]
    seconds = time.perf_counter() - began
    return Result(sum(len(one.tokens) for one in examples), seconds, statistics.fmean(losses))


def vocabulary_of(model: str) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model).vocab_size)


def main() -> None:
    task = msgspec.json.decode(sys.argv[1], type=Task)
    torch.set_num_threads(task.threads)
    result = measured(task)
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    sys.stdout.flush()
    os._exit(0)  # what libraries still hold takes seconds to end


if __name__ == "__main__":
    main()
