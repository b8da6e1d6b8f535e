"""Which transitions of states were seen, how often, under which fault; and which never."""

from collections import Counter
from collections.abc import Iterable, Iterator

from rich.table import Table

from tests.simulation.search.states import MACHINES
from tests.simulation.systems.outcome import Seen


class Coverage:
    """Of any number of runs."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, str, str], Counter[str]] = {}

    def add(self, seen: Iterable[Seen]) -> None:
        for one in seen:
            self._times.setdefault((one.kind, one.before, one.after), Counter())[one.fault] += one.times

    def never(self) -> list[tuple[str, str, str]]:
        """Kind, before, after: of the tables' transitions those that no run has reached."""
        return [key for key in _expected() if key not in self._times]

    def unknown(self) -> list[tuple[str, str, str]]:
        """Those that no table has."""
        return [key for key in sorted(self._times) if key not in set(_expected())]

    def tables(self) -> Iterator[Table]:
        for kind in MACHINES:
            rows = [key for key in _expected() if key[0] == kind]
            rows += [key for key in self.unknown() if key[0] == kind]
            table = Table(kind, "times", "under which fault", title_justify="left")
            for key in rows:
                table.add_row(*self._row(key))
            yield table

    def _row(self, key: tuple[str, str, str]) -> tuple[str, str, str]:
        _, before, after = key
        times = self._times.get(key)
        named = f"{before or 'new'} → {after or 'gone'}"
        if times is None:
            return named, "NEVER", ""
        known = "" if key in set(_expected()) else " (in no table)"
        each = Counter[str]()
        for faults, count in times.items():
            for fault in faults.split("+"):
                each[fault or "none"] += count
        under = ", ".join(f"{fault} {count}" for fault, count in each.most_common())
        return named + known, str(sum(times.values())), under


def _expected() -> list[tuple[str, str, str]]:
    return [
        (kind, before, after)
        for kind, machine in MACHINES.items()
        for before, afters in machine.transitions.items()
        for after in afters
    ]
