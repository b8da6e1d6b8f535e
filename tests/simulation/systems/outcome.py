"""What a run has shown."""

import msgspec

from tests.simulation.faults.schedule import Schedule


class Broken(msgspec.Struct, frozen=True, omit_defaults=True):
    """A promise that was broken."""

    promise: str
    told: str  # who, what, where: one sentence
    subject: str = ""  # the id of the request, batch, job or group that it is about: what a story follows


class Seen(msgspec.Struct, frozen=True):
    """A transition, how often, and while which fault lasted (or had just been)."""

    kind: str  # of what: request, batch, job, group, model
    before: str
    after: str
    fault: str  # several are joined by `+`; empty: none
    times: int


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    schedule: Schedule
    digest: str  # of all that has happened, in its order: the same for the same run
    simulated: float  # virtual seconds
    seconds: float  # of one core that it took
    broken: list[Broken] = []
    seen: list[Seen] = []
    faults: dict[str, int] = {}  # those that happened, by kind
    requests: int = 0  # that clients made

    @property
    def fails(self) -> bool:
        return bool(self.broken)
