"""Tells a run: who, when, what. Only what the broken promises are about, and the faults.

12.401233  gateway-1 → broker-1      publish intake.interactive.stub  GenerationRequest gen-1a2b, attempt 0
12.500000  executor-1                fault: is killed (SIGKILL)
"""

from collections.abc import Iterator, Sequence

from tests.simulation.core.trace import Event
from tests.simulation.core.world import World
from tests.simulation.search import wire
from tests.simulation.systems.outcome import Outcome

MOST_LINES = 400
# Kinds of records that every story has, beside the faults' own.
LIFE = frozenset(("fault", "kill", "exit", "pause", "resume", "power", "failure"))


def tell(world: World, outcome: Outcome) -> str:
    subjects = [broken.subject for broken in outcome.broken if broken.subject]
    lines = [line for event in world.trace.events for line in _lines(event, subjects)]
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines = [*lines[:half], f"    ... {len(lines) - MOST_LINES} lines left out ...", *lines[-half:]]
    broken = [f"BROKEN {one.promise}: {one.told}" for one in outcome.broken]
    return "\n".join([*_schedule(outcome), "", *lines, "", *broken, ""])


def _lines(event: Event, subjects: Sequence[str]) -> Iterator[str]:
    if isinstance(event.detail, bytes):
        if subjects and not any(subject.encode() in event.detail for subject in subjects):
            return
        who = f"{event.process} → {event.other}"
        for told in wire.told(event.detail):
            if not subjects or any(subject in told for subject in subjects):
                yield f"{event.at:12.6f}  {who:<32} {told}"
    elif event.kind in LIFE or any(subject in event.detail for subject in subjects):
        yield f"{event.at:12.6f}  {event.process:<32} {event.kind}: {event.detail}"


def _schedule(outcome: Outcome) -> list[str]:
    schedule = outcome.schedule
    bugs = f", with {', '.join(schedule.bugs)}" if schedule.bugs else ""
    head = f"{schedule.scenario}, seed {schedule.seed}{bugs}: {len(schedule.faults)} faults"
    clients = [f"  {plan.at:9.3f} s  {plan.name} begins, {plan.requests} requests" for plan in schedule.clients[:20]]
    return [head, *(f"  {fault}" for fault in schedule.faults), *clients]
