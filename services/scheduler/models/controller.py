"""The asyncio shell around the placement of models: follows what is, tells hosts what to do.

    KV registry, hosts, groups ──▶ ClusterView ─┐
    models.waiting, models.demand ▶ DemandTracker ┼─ holder of the lease: decide ──▶ hosts.<instance>.control
                                                  └──────────────────────────────▶ KV placements ──▶ all schedulers

Every scheduler follows all of it, so that whoever takes over the lease knows what there is. While the registry is empty
and there are no jobs for hosts nothing is said and nobody holds the lease.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import msgspec
import structlog
from prometheus_client import CollectorRegistry

from services.scheduler.models.adapter_reads import AdapterReads
from services.scheduler.models.cluster import ClusterView
from services.scheduler.models.demand import DemandTracker
from services.scheduler.models.lease import SchedulerLease
from services.scheduler.models.metrics import ModelLifecycleMetrics
from services.scheduler.models.placement import Command, Decisions, ModelPlacer
from shared.errors import BrokerUnavailable, RyzansteinError
from shared.messages import (
    GroupRecord,
    HostRecord,
    HostReply,
    ModelDemand,
    ModelLease,
    ModelPlacement,
    ModelSpec,
    SchedulerDemand,
    WaitingModel,
)
from shared.messages.registry import MAX_MODELS
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.tasks import TaskSet

TICK = 1.0  # seconds between two decisions, and between two words on demand, when nothing happens
SHORTEST = 0.05  # seconds between two decisions at least, however much happens
# Share of the scheduler's time that decisions may take, as long as there is one each `TICK`: requests go first.
LOOP_SHARE = 0.1
COMMAND_TIMEOUT = 5.0  # seconds that a host has to answer
# Seconds for which a request that was left in the stream counts as waiting: it is delivered again before.
DEFERRED = 8.0
LEAST_CHANGE = 4.0  # seconds by which the expected moment of a load has to change before it is said again

log = structlog.get_logger(__name__)

# Of one's own queue: model, requests, seconds that the first of them has waited.
Waiting = Callable[[], Iterator[tuple[str, int, float]]]


class HostedJobs(Protocol):
    """One kind of jobs that run on hosts, beside models. Only the scheduler that decides calls `step`."""

    is_read: bool  # whether all jobs that there were are known

    @property
    def any(self) -> bool:
        """Whether there are jobs that are not over."""
        ...

    async def start(self, spawn: Callable[..., object]) -> None:
        """Raises `BrokerUnavailable`."""
        ...

    async def stop(self) -> None: ...

    def step(self) -> None:
        """Begins what is due."""
        ...

    def rest(self) -> None:
        """Another scheduler decides, or nothing can be decided now."""
        ...


# Makes one; the last argument is called when there may be something to decide.
HostedJobKind = Callable[[Bus, ClusterView, CollectorRegistry, Callable[[], None]], HostedJobs]


class ModelController:
    """One per scheduler. `on_placement` is called with whatever is decided of a model, here or elsewhere."""

    def __init__(
        self,
        bus: Bus,
        instance: str,
        lease: float,
        waiting: Waiting,
        metrics: ModelLifecycleMetrics,
        on_placement: Callable[[str, ModelPlacement | None], None],
        registry: CollectorRegistry,
        kinds: Sequence[HostedJobKind],
    ) -> None:
        """`lease` in seconds."""
        self._bus = bus
        self._instance = instance
        self._waiting = waiting
        self._metrics = metrics
        self._on_placement = on_placement
        self._specs: dict[str, ModelSpec] = {}
        # Models that were in the registry and are not; `MAX_MODELS` of them at most.
        self._removed: set[str] = set()
        self._cluster = ClusterView()
        self._placer = ModelPlacer(self._cluster)
        self._demand = DemandTracker()
        self._arrived: Counter[str] = Counter()
        # When a request for each model came last, in monotonic seconds.
        self._arrived_at: dict[str, float] = {}
        # When a request for each model was last left in the stream for want of space, in monotonic seconds.
        self._deferred: dict[str, float] = {}
        self._said: dict[str, ModelPlacement] = {}  # what the bucket `placements` has
        self._registry = Bucket(bus, subjects.REGISTRY_BUCKET, ModelSpec)
        self._hosts = Bucket(bus, subjects.HOSTS_BUCKET, HostRecord)
        self._placements = Bucket(bus, subjects.PLACEMENTS_BUCKET, ModelPlacement)
        self._leases = Bucket(bus, subjects.LEASES_BUCKET, ModelLease)
        # What is not known whole yet: nobody decides by a part.
        self._unread: set[object] = {self._registry, self._hosts, self._placements}
        self._lease = SchedulerLease(self._leases, instance, lease)
        self._changed = asyncio.Event()
        self._adapters = AdapterReads(bus, self._cluster, self._changed.set)
        self._jobs = [make(bus, self._cluster, registry, self._heard_of_jobs) for make in kinds]
        self._cold = asyncio.Event()
        # Set once there is something to decide: a model in the registry, or a job.
        self._registered = asyncio.Event()
        self._sending = TaskSet("command_failed")

    # --- life ------------------------------------------------------------------------------------

    async def start(self, spawn: Callable[..., object]) -> None:
        """Returns once the buckets are there; the rest goes on in tasks of `spawn`. Raises `BrokerUnavailable`."""
        for bucket in (self._registry, self._hosts, self._placements, self._leases):
            await bucket.ensure()
        await self._adapters.start(spawn)
        for jobs in self._jobs:
            await jobs.start(spawn)
        await self._bus.subscribe(subjects.SCHEDULER_DEMAND, SchedulerDemand, self._on_scheduler)
        await self._bus.subscribe(subjects.MODEL_DEMAND, ModelDemand, self._on_gateway)
        registry, hosts, placements = self._registry, self._hosts, self._placements
        spawn(registry.follow(self._note_spec, partial(self._has_read, registry)), "registry")
        spawn(hosts.follow(self._note_host, partial(self._has_read, hosts)), "hosts")
        spawn(placements.follow(self._note_placement, partial(self._has_read, placements)), "placements")
        spawn(self._hold_lease(), "lease")
        spawn(self._tell_demand(), "demand")
        spawn(self._decide(), "models")

    async def stop(self) -> None:
        """Another scheduler may decide from now on."""
        await self._sending.cancel()
        await self._adapters.stop()
        for jobs in self._jobs:
            await jobs.stop()
        await self._lease.release()

    # --- from the scheduler ----------------------------------------------------------------------

    def group(self, record: GroupRecord) -> None:
        self._cluster.group(record, time.time())
        self._changed.set()

    def forget_group(self, name: str) -> None:
        self._cluster.forget_group(name)
        self._changed.set()

    def deferred(self, model: str) -> None:
        """A request for a model that nobody serves was left in the stream: others need the space."""
        if model in self._specs:
            self._deferred[model] = asyncio.get_running_loop().time()
            self._cold.set()

    def arrived(self, model: str, *, served: bool) -> None:
        """A request has come; `served`: whether some group serves its model."""
        if model not in self._specs:
            return
        self._metrics.requests.labels("hit" if served else "cold").inc()
        self._arrived[model] += 1
        self._arrived_at[model] = asyncio.get_running_loop().time()
        if not served:
            self._cold.set()

    def placement(self, model: str) -> ModelPlacement | None:
        """What was said of it last; None: it is in no registry, or nobody has decided yet."""
        return self._said.get(model)

    def removed(self, model: str) -> bool:
        """Whether it was taken out of the registry: groups that have it go, and none comes."""
        return model in self._removed

    async def still_removed(self, model: str) -> bool:
        """As `removed`, by the registry itself: what is heard of it may be behind. Raises `BrokerUnavailable`."""
        if await self._registry.get(model) is not None:
            self._removed.discard(model)
        return model in self._removed

    # --- what is followed ------------------------------------------------------------------------

    def _note_spec(self, name: str, spec: ModelSpec | None) -> None:
        if spec is None:
            self._specs.pop(name, None)
            self._arrived.pop(name, None)
            self._arrived_at.pop(name, None)
            if len(self._removed) >= MAX_MODELS:
                self._removed.pop()
            self._removed.add(name)
        elif name in self._specs or len(self._specs) < MAX_MODELS:
            self._specs[name] = spec
            self._removed.discard(name)
        self._cluster.keep({spec.name: spec.source for spec in self._specs.values()})
        self._demand.keep(self._specs, time.time())
        if self._specs:
            self._registered.set()
        self._changed.set()

    def _note_host(self, name: str, record: HostRecord | None) -> None:
        if record is None:
            self._cluster.forget_host(name)
        else:
            self._cluster.host(record)
        self._changed.set()

    def _heard_of_jobs(self) -> None:
        if any(jobs.any for jobs in self._jobs):
            self._registered.set()
        self._changed.set()

    def _has_read(self, bucket: object) -> None:
        self._unread.remove(bucket)
        self._changed.set()

    def _note_placement(self, model: str, said: ModelPlacement | None) -> None:
        if said is None:
            self._said.pop(model, None)
        else:
            self._said[model] = said
            self._placer.observe(said)
        self._on_placement(model, said)

    async def _on_scheduler(self, said: SchedulerDemand) -> None:
        if said.scheduler != self._instance:
            self._heard(said)

    def _heard(self, said: SchedulerDemand) -> None:
        known = [item for item in said.models if item.model in self._specs]
        self._demand.report(SchedulerDemand(said.scheduler, known), time.time())
        if any(item.waiting for item in known):
            self._changed.set()

    async def _on_gateway(self, said: ModelDemand) -> None:
        if said.model in self._specs:
            self._demand.on_held(said, time.time())
            self._changed.set()

    # --- what is said ----------------------------------------------------------------------------

    async def _tell_demand(self) -> None:
        """Every `TICK`, and at once when a request comes for a model that nobody serves."""
        while True:
            await self._registered.wait()
            said = SchedulerDemand(self._instance, self._own_demand())
            self._heard(said)
            try:
                await self._bus.publish(subjects.SCHEDULER_DEMAND, said)
            except RyzansteinError as error:
                log.debug("demand_report_failed", error=str(error))
            await _pause(self._cold, SHORTEST, TICK)

    def _own_demand(self) -> list[WaitingModel]:
        now = asyncio.get_running_loop().time()
        self._deferred = {model: at for model, at in self._deferred.items() if now - at < DEFERRED}
        waiting = {model: (1, now - at) for model, at in self._deferred.items() if model in self._specs}
        waiting.update({model: (count, age) for model, count, age in self._waiting() if model in self._specs})
        return [
            WaitingModel(
                model,
                *waiting.get(model, (0, 0.0)),
                arrived=self._arrived[model],
                idle=max(0.0, now - self._arrived_at.get(model, now)),
            )
            for model in {*waiting, *self._arrived}
        ]

    # --- decisions -------------------------------------------------------------------------------

    async def _hold_lease(self) -> None:
        while True:
            await self._registered.wait()
            held = self._lease.is_held
            await self._lease.look()
            self._metrics.decides.set(self._lease.is_held)
            if self._lease.is_held != held:
                self._changed.set()
            await asyncio.sleep(self._lease.pause)

    async def _decide(self) -> None:
        while True:
            await self._registered.wait()
            took = 0.0
            if self._lease.is_held and not self._unread and all(jobs.is_read for jobs in self._jobs):
                took = await self._once()
            else:
                self._metrics.unplaced.set(0)
                self._metrics.adapters_are(0, 0)
                for jobs in self._jobs:
                    jobs.rest()
            rest = (1 / LOOP_SHARE - 1) * took
            await _pause(self._changed, min(max(SHORTEST, rest), TICK), TICK)

    async def _once(self) -> float:
        """Decides; returns the seconds for which that kept the event loop."""
        now, began = time.time(), time.perf_counter()
        self._demand.keep(self._specs, now)
        try:
            decisions = self._placer.decide(self._specs, self._demand.all(now), now)
        except Exception:  # the models that are loaded serve on
            log.exception("model_placement_failed")
            return TICK
        took = time.perf_counter() - began
        if decisions.more:
            self._changed.set()
        for command in decisions.commands:
            self._sending.spawn(self._send(command), f"{command.host} {command.model}")
        self._metrics.unplaced.set(len(decisions.unplaced))
        self._metrics.adapters_are(*self._adapters.step(self._specs))
        for jobs in self._jobs:
            jobs.step()
        await self._say(decisions)
        return took

    async def _send(self, command: Command) -> None:
        subject = subjects.host_control(command.host)
        told = {"host": command.host, "group": command.command.group, "model": command.model}
        try:
            reply = await self._bus.request(subject, command.command, HostReply, timeout=COMMAND_TIMEOUT)
        except (BrokerUnavailable, msgspec.DecodeError) as error:  # it is sent again
            self._metrics.refused.inc()
            log.warning("host_command_send_failed", **told, error=str(error))
            return
        kind = type(command.command).__name__
        if reply.ok:
            self._metrics.on_command(command)
            log.info("host_command_sent", **told, command=kind, reason=command.reason)
        else:
            self._metrics.refused.inc()
            log.warning("host_refused", **told, command=kind, reason=command.reason, error=reply.error)
            self._placer.refused(command, reply.code, reply.memory, reply.error)
        self._changed.set()

    async def _say(self, decisions: Decisions) -> None:
        """Writes what has changed of the models' placements, and removes those of no model."""
        try:
            for model, placement in decisions.placements.items():
                if _differs(self._said.get(model), placement):
                    await self._placements.put(model, placement)
                    self._note_placement(model, placement)
            for model in [model for model in self._said if model not in self._specs]:
                await self._placements.delete(model)
                self._note_placement(model, None)
        except RyzansteinError as error:
            log.warning("placement_write_failed", error=str(error))


def _differs(said: ModelPlacement | None, new: ModelPlacement) -> bool:
    if said is None or said is new:
        return said is None
    if bool(said.expected_at) != bool(new.expected_at) or abs(said.expected_at - new.expected_at) >= LEAST_CHANGE:
        return True
    return msgspec.structs.replace(said, expected_at=0.0) != msgspec.structs.replace(new, expected_at=0.0)


async def _pause(event: asyncio.Event, least: float, most: float) -> None:
    """Until `event` is set, at most `most` seconds, at least `least`."""
    await asyncio.sleep(least)
    try:
        await asyncio.wait_for(event.wait(), max(0.0, most - least))
    except TimeoutError:
        return
    finally:
        event.clear()
