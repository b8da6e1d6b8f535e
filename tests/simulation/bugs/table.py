"""The bugs that can be put back. Imports no service: the patches do, when they are put in."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    name: str
    about: str
    """What was wrong, in a sentence."""
    put_back: Callable[[], None]
    """In the process of a run, before anything is built."""
    scenario: str
    """Where it is to be found."""


def _toy() -> None:
    """The toy looks at its schedule."""


_ALL = (
    Bug(
        "counter_forgets_ids",
        "The toy's server carries out a request again whose answer was lost.",
        _toy,
        "counter",
    ),
)
BUGS: dict[str, Bug] = {bug.name: bug for bug in _ALL}
