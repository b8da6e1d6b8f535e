"""A promise, and the watch that holds all of them against what is seen.

History ──each request, as its client sees more of it──▶ Watch.saw ──▶ Promise.saw ─┐
Evidence ──once, at the end─────────────────────────────▶ Watch.after ─▶ .after ────┴─▶ Broken
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from tests.simulation.clients.history import History, Request
from tests.simulation.promises.evidence import Evidence
from tests.simulation.systems.outcome import Broken

Finding = tuple[str, str]  # the sentence, and its subject


class Promise:
    """A subclass has a name, and one of the two methods at least."""

    name: ClassVar[str]

    def saw(self, request: Request) -> Iterator[Finding]:
        """What is broken of `request` now; it is called again and again."""
        yield from ()

    def after(self, evidence: Evidence) -> Iterator[Finding]:
        """What is broken at the end."""
        yield from ()


class Watch:
    """Keeps the first thing that is broken of each promise and subject."""

    def __init__(self, history: History, promises: Sequence[Promise]) -> None:
        self.promises = promises
        self._found: dict[tuple[str, str], Broken] = {}
        self._watching = [one for one in promises if type(one).saw is not Promise.saw]
        history.observers.append(self.saw)

    @property
    def broken(self) -> list[Broken]:
        return list(self._found.values())

    def saw(self, request: Request) -> None:
        for promise in self._watching:
            for told, subject in promise.saw(request):
                self._add(promise, told, subject)

    def after(self, evidence: Evidence) -> list[Broken]:
        """All that is broken, what was seen during the run first."""
        for promise in self.promises:
            for told, subject in promise.after(evidence):
                self._add(promise, told, subject)
        return self.broken

    def _add(self, promise: Promise, told: str, subject: str) -> None:
        self._found.setdefault((promise.name, subject), Broken(promise.name, told, subject))
