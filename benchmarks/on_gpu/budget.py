"""How the time of a run is divided among its sections: pure.

    budget   | section 1 (at most `most`) | section 2 | ... | kept for those that follow: `least` each | end |

A section may take what is left, less what those after it need at least, and never more than its own `most`.
Time that a section leaves goes to those after it. Where not even `least` is left, it is skipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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


def allot(section: Section, later: Sequence[Section], left: float) -> float | None:
    """Seconds for `section` with `left` left of the budget and `later` still to come; None: it does not fit."""
    usable = left - END
    if usable < section.least:
        return None
    kept = sum(other.least for other in later)
    return min(section.most, max(section.least, usable - kept))


def soft_limit(seconds: float) -> float:
    """When a section that is ended after `seconds` stops beginning new cases on its own."""
    return max(seconds - 10.0, 0.8 * seconds)
