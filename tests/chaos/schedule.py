"""Which faults come when, drawn from a seed. Pure."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.chaos.faults import ALL_MONITORS, NATS, all_faults

LONGEST_PAUSE = 3.0  # seconds between two rounds, at most
LONGEST_OVERLAP = 2.0  # seconds after which a second fault joins the first one, at most
TWO_AT_ONCE = 0.4  # share of the rounds with a second fault before the first is over


@dataclass(frozen=True)
class Strike:
    """One fault of a round, by its name and the number of the instance; `after`: seconds into the round."""

    fault: str
    number: int
    after: float

    def __str__(self) -> str:
        return f"{self.fault}({self.number}) after {self.after:.2f} s"


def rounds(seed: int) -> Iterator[list[Strike]]:
    """For ever, always the same for the same seed."""
    chance = random.Random(seed)
    while True:
        strikes = [_draw(chance, chance.uniform(0, LONGEST_PAUSE))]
        if chance.random() < TWO_AT_ONCE:
            second = _draw(chance, strikes[0].after + chance.uniform(0, LONGEST_OVERLAP))
            if compatible(strikes[0], second):
                strikes.append(second)
        yield strikes


def _draw(chance: random.Random, after: float) -> Strike:
    return Strike(chance.choice(list(all_faults())), chance.randrange(2), after)


def compatible(first: Strike, second: Strike) -> bool:
    """Whether both can be noticed while both last: with both monitors gone nobody says what is down, and
    without NATS nobody hears it. Two executors may go together: then requests wait."""
    targets = {_target(first), _target(second)}
    if targets & {NATS, ALL_MONITORS} or len(targets) == 1:
        return False
    services = {target.rpartition("-")[0] for target in targets}
    return len(services) == 2 or services == {"executor"}


def _target(strike: Strike) -> str:
    return all_faults(strike.number)[strike.fault]().target
