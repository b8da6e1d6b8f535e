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


def _patch(name: str) -> Callable[[], None]:
    def put_back() -> None:
        from tests.simulation.bugs import patches

        getattr(patches, name)()

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
        _patch("split_brain"),
        "partitions",
    ),
    Bug(
        "keys_without_compare_and_set",
        "Two requests under one idempotency key at the same time both generate.",
        _patch("keys_without_compare_and_set"),
        "streams",
    ),
    Bug(
        "lines_without_keys",
        "A batch's line that was under way when its gateway died is computed, and charged, twice.",
        _patch("lines_without_keys"),
        "batches",
    ),
    Bug(
        "flush_ends_claims",
        "A gateway that is cut off while it claims a dead one's generations stops in the middle.",
        _patch("flush_ends_claims"),
        "partitions",
    ),
    Bug(
        "output_without_content",
        "A batch is completed with an output file whose content its first gateway has removed.",
        _patch("output_without_content"),
        "releases",
    ),
    Bug(
        "records_given_up",
        "The record of an answer is given up before a cluster of brokers has a leader, and a repeat is computed again.",
        _patch("records_given_up"),
        "cluster",
    ),
    Bug(
        "models_unknown_elsewhere",
        "A model that one gateway has registered does not exist (404) at another one whose watch is behind.",
        _patch("models_unknown_elsewhere"),
        "models",
    ),
)
BUGS: dict[str, Bug] = {bug.name: bug for bug in _ALL}
