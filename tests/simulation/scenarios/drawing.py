"""Draws a schedule from (scenario, seed), before the run. Pure.

Faults of each kind come as a Poisson process; each has a generator of its own, so that a kind that is added to a
scenario leaves the others' faults where they were.
"""

import random
from collections.abc import Mapping, Sequence

from tests.simulation.faults.kinds import Kind, kind_of
from tests.simulation.faults.schedule import ClientPlan, Fault, Parameter, Schedule
from tests.simulation.scenarios.scenario import FaultRate, Scenario

MOST_STEPS = 400  # of a target, before a fault that is timed by them: some requests' worth


def draw(scenario: Scenario, seed: int) -> Schedule:
    faults = [
        fault
        for name, rate in sorted(scenario.faults.items())
        for fault in _faults(scenario, kind_of(name), rate, random.Random(f"{seed} {name}"))
    ]
    faults.sort(key=lambda fault: (fault.at, fault.fault, fault.target))
    return Schedule(scenario.name, seed, scenario.duration, faults, _clients(scenario, seed))


def _faults(scenario: Scenario, kind: Kind, rate: FaultRate, chance: random.Random) -> list[Fault]:
    instances = scenario.instances()
    targets = [name for role in rate.roles or kind.roles for name in instances.get(role, ())]
    if not rate.per_hour or (kind.roles and not targets):
        return []
    found, at = [], chance.expovariate(rate.per_hour / 3600)
    while at < scenario.duration:
        found.append(_fault(scenario, kind, rate, at, targets, chance))
        at += chance.expovariate(rate.per_hour / 3600)
    return found


def _fault(
    scenario: Scenario, kind: Kind, rate: FaultRate, at: float, targets: Sequence[str], chance: random.Random
) -> Fault:
    target = chance.choice(targets) if targets else ""
    lasts = chance.uniform(*(rate.lasts or kind.lasts)) if kind.undo else 0.0
    steps = 0
    if kind.between_awaits and chance.random() < scenario.between_awaits:
        steps = chance.randint(1, MOST_STEPS)
    return Fault(
        kind.name, target, round(at, 3), steps, round(lasts, 3), _parameters(scenario, kind, rate, target, chance)
    )


def _parameters(
    scenario: Scenario, kind: Kind, rate: FaultRate, target: str, chance: random.Random
) -> dict[str, Parameter]:
    spans: Mapping[str, tuple[float, float]] = {**kind.parameters, **rate.parameters}
    drawn: dict[str, Parameter] = {name: round(chance.uniform(*span), 3) for name, span in sorted(spans.items())}
    if kind.others:
        instances = scenario.instances()
        others = [name for role in kind.others for name in instances.get(role, ()) if name != target]
        if others:
            drawn["other"] = chance.choice(others)
    return drawn


def _clients(scenario: Scenario, seed: int) -> list[ClientPlan]:
    plans = []
    for kind, rate in sorted(scenario.clients.items()):
        chance = random.Random(f"{seed} {kind} clients")
        for number in range(rate.count):
            at = round(chance.uniform(0, scenario.duration * 0.8), 3)
            plans.append(
                ClientPlan(
                    kind,
                    f"{kind}-{number + 1}",
                    at,
                    chance.randint(*rate.requests),
                    chance.getrandbits(32),
                    dict(rate.parameters),
                )
            )
    return plans
