"""One process of `benchmarks.training`: does the task on its command line, and says its result in a line of JSON."""

import os
import sys
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
import torch

from benchmarks.training.examples import Example, batches, conversations
from benchmarks.training.task import Result, Task


class Side(Protocol):
    """Who trains."""

    def step(self, examples: Sequence[Example]) -> float:
        """One of the optimizer; the loss before it."""
        ...


def side_of(task: Task) -> Side:
    if task.side == "peft":
        from benchmarks.training.with_peft import WithPeft

        return WithPeft(task)
    from benchmarks.training.with_ryzanstein import WithRyzanstein

    return WithRyzanstein(task)


def measured(side: Side, task: Task, vocabulary: int) -> Result:
    """Each batch once; the first one once more before, untimed."""
    steps = batches(conversations(task.examples, vocabulary), task.batch)
    side.step(steps[0])
    began = time.perf_counter()
    losses = [side.step(step) for step in steps]
    seconds = time.perf_counter() - began
    return Result(sum(len(one.tokens) for step in steps for one in step), seconds, sum(losses) / len(losses))


def vocabulary_of(model: str) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model).vocab_size)


def main() -> None:
    task = msgspec.json.decode(sys.argv[1], type=Task)
    torch.set_num_threads(task.threads)
    result = measured(side_of(task), task, vocabulary_of(task.model))
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    sys.stdout.flush()
    os._exit(0)  # what libraries still hold takes seconds to end


if __name__ == "__main__":
    main()
