"""State: what was acknowledged is kept, what was taken is given back, what lives long stays small."""

from collections.abc import Iterator
from typing import ClassVar

from tests.simulation.promises.evidence import Evidence
from tests.simulation.promises.promise import Finding, Promise


class Durable(Promise):
    """What the API has acknowledged is there afterwards, and what it has deleted is not."""

    name: ClassVar[str] = "durable"

    def after(self, evidence: Evidence) -> Iterator[Finding]:
        for known in evidence.history.acknowledged:
            if not known.found:
                continue
            wanted = 200 if known.gone_at < 0 else 404
            if known.found != wanted:
                happened = "acknowledged" if known.gone_at < 0 else "deleted"
                at = known.at if known.gone_at < 0 else known.gone_at
                told = (
                    f"The {known.what} {known.identity} was {happened} by {known.gateway} at {at:.3f} s, and a look at "
                    f"the end was answered with {known.found}."
                )
                yield told, known.identity


class Released(Promise):
    """Places, KV blocks, slots of limits, waiting requests: all free at the end."""

    name: ClassVar[str] = "released"

    def after(self, evidence: Evidence) -> Iterator[Finding]:
        for reading in evidence.readings if evidence.ended else ():
            if not reading.always and reading.count > reading.most:
                told = f"{reading.service} still has {reading.count:g} {reading.what} when nobody asks anything."
                yield told, f"{reading.service} {reading.what}"


class Bounded(Promise):
    """What grows by what others do has a bound."""

    name: ClassVar[str] = "bounded"

    def after(self, evidence: Evidence) -> Iterator[Finding]:
        for reading in evidence.readings:
            if reading.always and reading.count > reading.most:
                told = f"{reading.service} has {reading.count:g} {reading.what}, and may have {reading.most:g}."
                yield told, f"{reading.service} {reading.what}"
