"""What to ask and what must come back, to the last character."""

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from services.executor.worker.stub import stub_token


@dataclass(frozen=True, slots=True)
class Task:
    """A chat request and the only right answer to it."""

    body: dict[str, Any]
    text: str
    tokens: int
    finish: str = "length"
    logprobs: tuple[Any, ...] = ()  # of each token, as the API has them, where they were asked for


def stub_text(seed: int, tokens: int) -> str:
    """The stub engine's answer: a pure function of seed and position."""
    return "".join(chr(stub_token(seed, position)) for position in range(tokens))


def stub_tasks(chance: random.Random, tokens: int, model: str = "stub") -> Iterator[Task]:
    """For ever, of half of `tokens` at least. Each conversation is new: none is pinned to a group."""
    for number in itertools.count():
        seed = chance.getrandbits(62)
        length = chance.randint(max(1, tokens // 2), tokens)
        body = {
            "model": model,
            "messages": [{"role": "user", "content": f"Request {number} of {seed}"}],
            "seed": seed,
            "max_tokens": length,
        }
        yield Task(body, stub_text(seed, length), length)


def repeated(tasks: Sequence[Task]) -> Iterator[Task]:
    """The same tasks again and again: for a real model, whose answers were taken down undisturbed.

    Each time as a session of its own: else all would stay with the ring that had them first.
    """
    for number, task in enumerate(itertools.cycle(tasks)):
        yield dataclasses.replace(task, body={**task.body, "prompt_cache_key": f"session {number}"})
