"""Which states things went through, counted under the faults that lasted then."""

from collections import Counter
from collections.abc import Callable, Iterable

from tests.simulation.systems.outcome import Seen

NONE = ""  # before the first state; and no fault


class Transitions:
    """Fed by what services write. `faults` names the kinds that last now."""

    def __init__(self, faults: Callable[[], Iterable[str]] = tuple) -> None:
        self.faults = faults
        self._states: dict[tuple[str, str], str] = {}
        self._seen: Counter[tuple[str, str, str, str]] = Counter()

    def moved(self, kind: str, subject: str, state: str) -> None:
        """`subject` is in `state` now. What it was already in is no transition."""
        before = self._states.get((kind, subject), NONE)
        if before == state:
            return
        self._states[kind, subject] = state
        self._seen[kind, before, state, "+".join(sorted(self.faults()))] += 1

    def gone(self, kind: str, subject: str) -> None:
        """Nobody keeps it any more."""
        self._states.pop((kind, subject), None)

    def seen(self) -> list[Seen]:
        return [Seen(*key, times) for key, times in sorted(self._seen.items())]
