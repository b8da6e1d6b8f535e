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


def _of_gateways(name: str) -> Callable[[], None]:
    def put_back() -> None:
        from tests.simulation.bugs import gateway

        getattr(gateway, name)()

    return put_back


_ALL = (
    Bug(
        "counter_forgets_ids",
        "The toy's server carries out a request again whose answer was lost.",
        _toy,
        "counter",
    ),
    Bug(
        "split_brain",
        "A gateway that was cut off from NATS cancels, once it is back, what another one has claimed meanwhile.",
        _of_gateways("split_brain"),
        "partitions",
    ),
    Bug(
        "keys_without_compare_and_set",
        "Two requests under one idempotency key at the same time both generate.",
        _of_gateways("keys_without_compare_and_set"),
        "streams",
    ),
    Bug(
        "lines_without_keys",
        "A batch's line that was under way when its gateway died is computed, and charged, twice.",
        _of_gateways("lines_without_keys"),
        "batches",
    ),
)
BUGS: dict[str, Bug] = {bug.name: bug for bug in _ALL}
