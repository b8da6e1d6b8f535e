"""Which services are of which release, and how one gets through all mixtures. Pure."""

from collections.abc import Iterator, Sequence
from itertools import chain, combinations

Mixture = frozenset[str]  # the kinds of services that are of the new release; the others are of the previous one


def mixtures(kinds: Sequence[str]) -> list[Mixture]:
    return [frozenset(some) for some in chain.from_iterable(combinations(kinds, n) for n in range(len(kinds) + 1))]


def walk(kinds: Sequence[str]) -> list[str]:
    """The kinds to replace, one after another, so that from each mixture each kind is replaced once, and the end is the
    beginning, where all are of the previous release. So every order of an upgrade is taken step by step, and of every
    way back: a circuit by Euler through the cube that has mixtures as its corners (Hierholzer's algorithm)."""
    left = {mixture: list(kinds) for mixture in mixtures(kinds)}
    path: list[tuple[Mixture, str]] = [(frozenset(), "")]
    circuit: list[str] = []
    while path:
        mixture, taken = path[-1]
        if left[mixture]:
            kind = left[mixture].pop()
            path.append((mixture ^ {kind}, kind))
        else:
            path.pop()
            if taken:
                circuit.append(taken)
    return circuit[::-1]


def visited(steps: Sequence[str]) -> Iterator[tuple[Mixture, str]]:
    """Each step with the mixture that it begins in."""
    mixture: Mixture = frozenset()
    for kind in steps:
        yield mixture, kind
        mixture ^= {kind}
