"""A schedule: all that a run does to a deployment, and all that its clients want of it, as one value.

It is drawn from (scenario, seed) before the run, may be shortened and run again with the same seed, and is kept as a
YAML file that people read.
"""

from pathlib import Path
from typing import Annotated

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Parameter = float | int | str | bool


class Unusable(Exception):
    """A scenario or schedule that cannot be run, and why, in a sentence."""


class Fault(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One thing that goes wrong."""

    fault: str  # its kind (`kinds.py`)
    target: str = ""  # an instance such as `gateway-1`; empty: the deployment
    at: Seconds = 0.0  # virtual seconds after the deployment was ready
    # Callbacks that the target runs after `at` before it happens: so it falls between two awaits.
    steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    lasts: Seconds = 0.0  # virtual seconds until it is undone, of kinds that can be
    parameters: dict[str, Parameter] = {}

    def __str__(self) -> str:
        when = f"{self.at:9.3f} s" + (f" and {self.steps} steps" if self.steps else "")
        how = "".join(f", {name} {value}" for name, value in self.parameters.items())
        return f"{when}  {self.fault} {self.target}" + (f" for {self.lasts:.3f} s" if self.lasts else "") + how


class ClientPlan(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one client wants."""

    client: str  # its kind (`tests/simulation/clients`)
    name: str
    at: Seconds = 0.0  # virtual seconds after the deployment was ready at which it begins
    requests: Annotated[int, msgspec.Meta(ge=1)] = 1
    # Of all else that it draws. Its own, so that it does the same when other clients are taken away.
    seed: int = 0
    parameters: dict[str, tuple[float, float]] = {}  # what is drawn between two numbers (`PLANS`)


class Schedule(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    scenario: str
    seed: int  # of the order of processes, the network and all randomness of the services
    duration: Seconds  # virtual seconds in which faults happen and clients begin; then everything must settle
    faults: list[Fault] = []
    clients: list[ClientPlan] = []
    bugs: list[str] = []  # mended bugs that are put back (`tests/simulation/bugs`)
    breaks: str = ""  # of a schedule that was found: the promise that it broke
    told: str = ""  # and what it was, in a sentence

    def ends(self) -> float:
        """When the last fault is over, in virtual seconds."""
        return max((fault.at + fault.lasts for fault in self.faults), default=0.0)


def load(path: Path) -> Schedule:
    """Raises `Unusable`, which names the file and what is wrong in it."""
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=Schedule)
    except (OSError, msgspec.MsgspecError) as error:
        raise Unusable(f"The schedule {path} cannot be used: {error}.") from error


def save(schedule: Schedule, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.yaml.encode(schedule))
