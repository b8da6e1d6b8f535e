"""What services have at this moment, read from their own objects, and from what the broker keeps.

Outside of all processes: nothing is asked, and nothing notices.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shared.messages import GroupRecord
from shared.nats import subjects
from tests.simulation.core.processes import Process
from tests.simulation.deployment.engines import PLACES
from tests.simulation.promises.evidence import Reading, StoreLog

MODELS = "the decisions about models"


def of_gateway(name: str, service: Any) -> Iterator[Reading]:
    """A ready one."""
    work, answers = service.work, service.work.answers.all()
    yield Reading(name, "unended generations of its own", sum(one.owned and not one.ended for one in answers))
    yield Reading(name, "requests in the works", service._backend.active_now)
    yield Reading(name, "open connections", len(service._http.connections))
    yield Reading(name, "readers of generations", sum(bool(one.readers) for one in answers))
    yield Reading(name, "taken slots of limits", sum(work.limiter.counts._here.values()))
    yield Reading(name, "batches that it runs", len(work._jobs[0]._runners._running))
    yield Reading(name, "generations that wait to be handed in", len(work.generations._queued._waiting))
    most = service.settings.max_generations
    yield Reading(name, "generations in flight", len(work.generations._by_id), most, always=True)


def of_scheduler(name: str, service: Any) -> Iterator[Reading]:
    router, intake = service._router, service._intake
    yield Reading(name, "waiting requests", sum(router.waiting.values()))
    yield Reading(name, "unacknowledged requests", len(intake._held))
    yield Reading(name, "requests on their way to rings", len(router._dispatcher._asked))
    pins = router._pins
    yield Reading(name, "pins of sessions", len(pins._cache), pins._capacity, always=True)


def of_groups(store: StoreLog) -> Iterator[Reading]:
    """As the health monitor wrote it last, of groups that are up."""
    last: dict[str, GroupRecord | None] = {}
    for _, key, record in store.entries(subjects.GROUPS_BUCKET, GroupRecord):
        last[key] = record
    for key, record in last.items():
        if record is None or record.state not in ("ready", "busy"):
            continue
        load = record.load
        yield Reading(key, "running sequences", load.running)
        yield Reading(key, "accepted sequences that wait", load.waiting)
        yield Reading(key, "KV blocks that nobody can have", load.total_blocks - load.free_blocks)


def of_engines(processes: Iterable[Process]) -> Iterator[Reading]:
    """Those that schedule for themselves."""
    for process in processes:
        if process.alive and (places := PLACES.get(process)) is not None:
            yield Reading(process.name, "answers that it computes", len(places))


def of_broker(name: str, broker: Any) -> Iterator[Reading]:
    """The model."""
    intake = broker.server.jetstream.streams.get(subjects.INTAKE_STREAM)
    yield Reading(name, "requests in INTAKE", len(intake.messages) if intake is not None else 0)


# From the name and the object of a ready service.
BY_ROLE: dict[str, Callable[[str, Any], Iterator[Reading]]] = {
    "gateway": of_gateway,
    "scheduler": of_scheduler,
    "broker": of_broker,
}


def held(services: Iterable[tuple[str, str, Any]]) -> dict[str, frozenset[str]]:
    """Who has what: generations, and decisions about models. `services`: name, role and object of those that are ready
    and that the others reach."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, role, service in services:
        if role == "gateway":
            for answer in service.work.answers.all():
                if answer.owned and not answer.ended:
                    found[f"generation {answer.identity}"].add(name)
        elif role == "scheduler" and service._models is not None and service._models._lease.held:
            found[MODELS].add(name)
    return {what: frozenset(who) for what, who in found.items()}
