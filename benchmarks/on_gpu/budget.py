"""How the time of a run is divided among its sections: pure.

    budget   | section 1 (at most `most`) | section 2 | ... | kept for those that follow: `least` each | end |

A section may take what is left, less what those after it need at least, and never more than its own `most`.
Time that a section leaves goes to those after it. Where not even `least` is left, it is skipped. Neighbours that
measure no time run beside each other, and need as much as the longest of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

END = 6.0
"""Seconds kept for ending processes, and for the table."""


@dataclass(frozen=True)
class Section:
    """One process: what it measures, and how long it may take."""

    name: str
    title: str
    most: float
    """Seconds after which it is ended."""
    least: float
    """Seconds without which it is not worth starting: imports, compilation and a first figure."""
    code: str = ""
    """`module:function`, given a `Bench`."""
    beside: bool = False
    """It measures no time: it may run while its neighbours do that measure none either."""


def together(sections: Iterable[Section]) -> list[list[Section]]:
    """The sections in their order, those that run beside each other in one list."""
    found: list[list[Section]] = []
    for beside, group in groupby(sections, lambda section: section.beside):
        members = list(group)
        found += [members] if beside else [[section] for section in members]
    return found


def allot(section: Section, later: Sequence[Section], left: float) -> float | None:
    """Seconds for `section` with `left` left of the budget and `later` still to come, none of which runs beside it;
    None: it does not fit."""
    usable = left - END
    if usable < section.least:
        return None
    kept = sum(max(other.least for other in group) for group in together(later))
    return min(section.most, max(section.least, usable - kept))


def soft_limit(seconds: float) -> float:
    """When a section that is ended after `seconds` stops beginning new cases on its own."""
    return max(seconds - 10.0, 0.8 * seconds)
