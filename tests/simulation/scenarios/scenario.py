"""A scenario as its file says it. What is unknown in it is refused in a sentence that names what is known."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from tests.simulation.faults.kinds import Kind, kind_of
from tests.simulation.faults.schedule import Parameter, Schedule, Unusable
from tests.simulation.faults.system import CLIENTS, PLANS, ROLES

HERE = Path(__file__).parent
# What may run, and the kinds of client that it has.
SYSTEMS: dict[str, tuple[str, ...]] = {"deployment": CLIENTS, "counter": ("adder",)}
MOST_INSTANCES = 64
MOST_REQUESTS = 100_000
MOST_SECONDS = 86_400.0

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Span = tuple[Annotated[float, msgspec.Meta(ge=0)], Annotated[float, msgspec.Meta(ge=0)]]


class FaultRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often a kind of fault comes, and to whom."""

    per_hour: Annotated[float, msgspec.Meta(ge=0, le=36_000)]  # on average, on the deployment together
    lasts: Span | None = None  # virtual seconds, from and to; None: as the kind has it
    roles: list[str] = []  # whom it may befall; empty: all that the kind may
    parameters: dict[str, tuple[float, float]] = {}


class ClientRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Clients of one kind."""

    count: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1
    requests: tuple[int, int] = (1, 3)  # of each, from and to
    parameters: dict[str, Span] = {}  # of its plan (`PLANS`)


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    about: str  # what it is for, in a sentence
    # Virtual seconds in which clients begin and faults happen.
    duration: Annotated[float, msgspec.Meta(gt=0, le=MOST_SECONDS)] = 120.0
    # Virtual seconds after the last fault in which everything must have ended.
    settle: Annotated[float, msgspec.Meta(gt=0, le=MOST_SECONDS)] = 120.0
    # What runs: the deployment, or a toy that shows how the search works (`systems/`).
    system: str = "deployment"
    services: dict[str, Annotated[int, msgspec.Meta(ge=0, le=MOST_INSTANCES)]] = {}  # how many of each role
    # By role, or of one instance (`executor-2`): what is not as simulations have it anyway (`deployment/settings.py`).
    settings: dict[str, dict[str, Parameter]] = {}
    # How many times rarer beats, leases and looks at the clock are than in production, and what waits for them longer:
    # a day in which little happens is then soon over.
    slower: Annotated[float, msgspec.Meta(ge=1, le=15)] = 5.0
    # With an API key each, which clients share in turn; 0: nobody needs a key.
    tenants: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
    clients: dict[str, ClientRate] = {}
    faults: dict[str, FaultRate] = {}
    between_awaits: Share = 0.3  # of the faults that can be timed by their target's steps, how many are

    def instances(self) -> dict[str, list[str]]:
        return {role: [f"{role}-{n + 1}" for n in range(count)] for role, count in self.services.items()}


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.yaml"))


def load(name_or_path: str) -> Scenario:
    """By its name among the files beside this one, or by its path. Raises `Unusable`."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = HERE / f"{name_or_path}.yaml"
        if not path.is_file():
            raise Unusable(_unknown("scenario", name_or_path, names()))
    try:
        found = msgspec.yaml.decode(path.read_bytes(), type=Scenario)
    except msgspec.ValidationError as error:
        raise Unusable(f"{path}: {_explained(error)}") from error
    except (OSError, msgspec.MsgspecError) as error:
        raise Unusable(f"The scenario {path} cannot be read: {error}.") from error
    try:
        check(found)
    except Unusable as error:
        raise Unusable(f"{path}: {error}") from error
    return found


def check(scenario: Scenario) -> None:
    """Raises `Unusable` for what the system has not."""
    _known("system", scenario.system, SYSTEMS)
    for role in scenario.services:
        _known("service", role, ROLES)
    instances = [name for names in scenario.instances().values() for name in names]
    for name in scenario.settings:
        _known("service", name, [*ROLES, *instances])
    for client in scenario.clients:
        _known("client", client, SYSTEMS[scenario.system])
        for parameter in scenario.clients[client].parameters:
            _known(f"parameter of the client {client}", parameter, PLANS)
        few, many = scenario.clients[client].requests
        if not 1 <= few <= many <= MOST_REQUESTS:
            raise Unusable(
                f"clients.{client}.requests must be two numbers from 1 to {MOST_REQUESTS}, the smaller one first."
            )
    for name, rate in scenario.faults.items():
        _check_fault(scenario, kind_of(name), rate)


def check_schedule(scenario: Scenario, schedule: Schedule) -> None:
    """Raises `Unusable` for faults and clients that the scenario's system has not."""
    instances = [name for names in scenario.instances().values() for name in names]
    for fault in schedule.faults:
        kind = kind_of(fault.fault)
        if kind.roles:
            _known(f"instance for the fault {kind.name}", fault.target, instances)
    for plan in schedule.clients:
        _known("client", plan.client, SYSTEMS[scenario.system])


def _check_fault(scenario: Scenario, kind: Kind, rate: FaultRate) -> None:
    for role in rate.roles:
        _known(f"role of the fault {kind.name}", role, kind.roles)
    for parameter, span in rate.parameters.items():
        _known(f"parameter of the fault {kind.name}", parameter, kind.parameters)
        if span[0] > span[1]:
            raise Unusable(f"faults.{kind.name}.parameters.{parameter} must have the smaller number first.")
    if rate.lasts is not None and rate.lasts[0] > rate.lasts[1]:
        raise Unusable(f"faults.{kind.name}.lasts must have the smaller number first.")
    if kind.roles and not any(scenario.services.get(role) for role in rate.roles or kind.roles):
        wanted = ", ".join(rate.roles or kind.roles)
        raise Unusable(f"The fault {kind.name} befalls {wanted}, of which the scenario has none.")


def _known(what: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise Unusable(_unknown(what, name, known))


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    return f"There is no {what} {name!r}{meant}; known are {', '.join(known) or 'none'}."


def _explained(error: msgspec.ValidationError) -> str:
    """msgspec's sentence, and for an unknown key those that are known where it stands."""
    text = str(error)
    if "unknown field" not in text:
        return text + "."
    known = _keys(text)
    return f"{text}; known are {', '.join(known)}."


def _keys(text: str) -> list[str]:
    places: Mapping[str, type[msgspec.Struct]] = {"$.faults": FaultRate, "$.clients": ClientRate}
    for place, struct in places.items():
        if f"`{place}" in text:
            return list(struct.__struct_fields__)
    return list(Scenario.__struct_fields__)
