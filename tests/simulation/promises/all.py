"""Every promise, as scenarios hold a run against them."""

from tests.simulation.promises.endings import AllowedRefusals, EveryEnd, NoSurprises
from tests.simulation.promises.jobs import LinesComputedOnce, OneResultPerJob, OneResultPerLine
from tests.simulation.promises.keys import OneAnswerPerKey, RevokedKeys
from tests.simulation.promises.owners import OneLeaseHolder, OneOwner
from tests.simulation.promises.promise import Promise
from tests.simulation.promises.state import Bounded, Durable, Released
from tests.simulation.promises.tenants import FatalLines, OthersServed, QuotasApart
from tests.simulation.promises.tokens import RightFigures, RightTokens

KINDS: tuple[type[Promise], ...] = (
    RightTokens,
    RightFigures,
    EveryEnd,
    AllowedRefusals,
    NoSurprises,
    OneAnswerPerKey,
    RevokedKeys,
    OneResultPerLine,
    LinesComputedOnce,
    OneResultPerJob,
    Durable,
    Released,
    Bounded,
    OneOwner,
    OneLeaseHolder,
    OthersServed,
    FatalLines,
    QuotasApart,
)


def promises() -> list[Promise]:
    """For one run."""
    return [kind() for kind in KINDS]
