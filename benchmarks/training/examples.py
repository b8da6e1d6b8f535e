"""Conversations to train on: generated ones, of lengths as chats have them, the same for whoever trains. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

MEDIAN = 180
"""Tokens of an example, lognormal: the mean is 230, one in a hundred is longer than 900."""
SPREAD = 0.7
SHORTEST, LONGEST = 24, 1024
CONTEXT = (0.2, 0.7)
"""Share of an example that no loss is taken of: the system's and the user's messages."""
FIRST_TOKEN = 5
"""Those before it end texts in most vocabularies."""
BUDGET = 2048
"""Tokens of a micro batch, padding included: what is held at a time is the same for all ways."""


@dataclass(frozen=True)
class Example:
    tokens: list[int]
    context: int
    """The first tokens, at least one, which are not learnt."""


def conversations(count: int, vocabulary: int, seed: int = 1) -> list[Example]:
    draw = random.Random(seed)
    examples = []
    for _ in range(count):
        length = min(LONGEST, max(SHORTEST, round(MEDIAN * draw.lognormvariate(0, SPREAD))))
        tokens = [draw.randrange(FIRST_TOKEN, vocabulary) for _ in range(length)]
        examples.append(Example(tokens, max(1, int(length * draw.uniform(*CONTEXT)))))
    return examples


def trained(examples: Sequence[Example]) -> int:
    """Tokens that a loss is taken of."""
    return sum(len(one.tokens) - one.context for one in examples)


def padded_micro_batches(examples: Sequence[Example]) -> list[list[Example]]:
    """Of a step's examples those of about the same length together, as `group_by_length` has them: hardly anything is
    padding."""
    found: list[list[Example]] = []
    for one in sorted(examples, key=lambda one: -len(one.tokens)):
        if found and len(found[-1][0].tokens) * (len(found[-1]) + 1) <= BUDGET:
            found[-1].append(one)
        else:
            found.append([one])
    return found


def packed_micro_batches(examples: Sequence[Example]) -> list[list[Example]]:
    """The longest first, each into the first one that has room."""
    found: list[list[Example]] = []
    for one in sorted(examples, key=lambda one: -len(one.tokens)):
        rooms = (some for some in found if sum(len(other.tokens) for other in [*some, one]) <= BUDGET)
        if (place := next(rooms, None)) is None:
            found.append([one])
        else:
            place.append(one)
    return found
