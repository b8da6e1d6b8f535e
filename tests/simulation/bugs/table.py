"""The bugs that can be put back. Imports no service: the patches do, when they are put in."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    name: str
    about: str  # what was wrong, in a sentence
    put_back: Callable[[], None]  # in the process of a run, before anything is built
    scenario: str  # where it is to be found
    breaks: str  # the promise that it breaks there
    # Drawn schedules that find it. Several, for the order of messages changes with the services' code.
    seeds: tuple[int, ...]


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
        "exactly_once",
        (6, 8, 9),
    ),
    Bug(
        "split_brain",
        "A gateway that was cut off from NATS cancels, once it is back, what another one has claimed meanwhile.",
        _patch("split_brain"),
        "partitions",
        "allowed_refusals",
        (7, 21, 24),
    ),
    Bug(
        "keys_without_compare_and_set",
        "Two requests under one idempotency key at the same time both generate.",
        _patch("keys_without_compare_and_set"),
        "streams",
        "one_answer_per_key",
        (1, 2, 3),
    ),
    Bug(
        "lines_without_keys",
        "A batch's line that was under way when its gateway died is computed, and charged, twice.",
        _patch("lines_without_keys"),
        "batches",
        "lines_computed_once",
        (3, 7, 8),
    ),
    Bug(
        "flush_ends_claims",
        "A gateway that is cut off while it claims a dead one's generations stops in the middle.",
        _patch("flush_ends_claims"),
        "partitions",
        "no_error",
        (14, 16),
    ),
    Bug(
        "records_given_up",
        "The record of an answer is given up before a cluster of brokers has a leader, and a repeat is computed again.",
        _patch("records_given_up"),
        "cluster",
        "one_answer_per_key",
        (99, 102, 105),
    ),
    Bug(
        "models_unknown_elsewhere",
        "A model that one gateway has registered does not exist (404) at another one whose watch is behind.",
        _patch("models_unknown_elsewhere"),
        "models",
        "allowed_refusals",
        (15, 23),
    ),
    Bug(
        "one_turn_for_all",
        "Requests wait in the order in which they came, whosever they are.",
        _patch("one_turn_for_all"),
        "tenants",
        "others_served",
        (59,),
    ),
    Bug(
        "lines_never_struck",
        "A batch's line that ends the gateway which computes it is computed by the next one, and the next.",
        _patch("lines_never_struck"),
        "tenants",
        "fatal_lines",
        (3, 4),
    ),
    Bug(
        "one_quota_for_all",
        "What all tenants have together is held against the quota of each.",
        _patch("one_quota_for_all"),
        "tenants",
        "quotas_apart",
        (1, 2),
    ),
)
BUGS: dict[str, Bug] = {bug.name: bug for bug in _ALL}
