"""Decides which host loads which model. Pure: records and demand come in, commands for hosts go out.

    registry ──▶ what is wanted ──┐
    demand ────▶ how much ────────┼─▶ decide(now) ─▶ LoadModel, UnloadModel per host; a ModelPlacement per model
    hosts, groups ▶ what is ──────┘

A load that is decided is a plan until its group serves:

    decided ──▶ makes room: victims are unloaded once nothing runs in them ──▶ told ──▶ loading ──▶ ready
                (those that work are cordoned: they get no new requests)        └─ repeated while the host shows nothing

Rules, in this order: `least` replicas; models that requests wait for, the longest first; what somebody has asked to
load; further replicas by queue depth. What is pinned, works, has been loaded lately, or is one of its model's `least`
is never unloaded for others. Asked twice about the same state it says nothing new.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from services.scheduler.models.cluster import ClusterView, Host, Replica
from services.scheduler.models.demand import NO_DEMAND, Demand
from services.scheduler.models.failures import Failures
from services.scheduler.models.refusals import Refused, why_not
from services.scheduler.models.victims import Room, Worth, cheapest
from shared.errors import ModelDoesNotFit
from shared.messages import HostModel, LoadModel, ModelPlacement, ModelSpec, UnloadModel

Reason = Literal["least", "demand", "asked", "replicas", "room", "idle", "unload", "removed"]
REASONS: tuple[Reason, ...] = get_args(Reason)

TARGET_SHARE = 0.75
"""Share of a model's places that may be taken before it gets another replica."""
UNKNOWN_SLOTS = 64
"""Places of a group that has not said how many it has."""
SWITCH_AFTER = 2.0
"""Seconds that a request waits before a group that works is cordoned for its model."""
REPEAT = 10.0
"""Seconds after which a command is sent again of which the host shows nothing."""
REPEATS = 6
"""Times that a load is sent before it counts as failed."""
GIVE_UP = 300.0
"""Seconds that a plan waits for its victims to go."""
ASKED_LATELY = 30.0
"""Seconds for which a request that was refused for want of memory still asks for its model."""
ACTION_KEPT = 900.0
"""Seconds for which somebody's wish to load a model is tried."""
SEARCHES = 16
"""Loads for which one pass looks for a host, at most."""
COMPARED = 32
"""Hosts without room that are compared by what would have to go there; of fewer, all."""
SEARCH_AGAIN = 0.5
"""Seconds before it looks again for one that none can take."""
HOSTS_NAMED = 64
"""Hosts of a model that are written into its placement, at most."""
OVERDUE = 5.0
"""Seconds by which a load that takes longer than expected is put off again and again."""


class Command(NamedTuple):
    """What a host is to be told."""

    host: str
    command: LoadModel | UnloadModel
    model: str
    reason: Reason
    repeated: bool
    """Whether it was sent before."""


@dataclass(slots=True, eq=False)
class Plan:
    """A load that is decided."""

    group: str
    model: str
    host: str
    reason: Reason
    since: float
    seconds: float
    """That it is expected to take, from being told."""
    size: int
    there: Host | None = None
    """What was known of the host then: one that comes back has forgotten it."""
    victims: set[str] = field(default_factory=set)
    """Groups that make room for it."""
    told_at: float = 0.0
    """When the host was told first; 0: not yet."""
    sent_at: float = 0.0
    """When it was told last."""
    sign_at: float = 0.0
    """When it last showed that it works on it."""


@dataclass(slots=True, eq=False)
class Leaving:
    """A group that was told to go."""

    told_at: float


class Want(NamedTuple):
    """A replica that is missing. Sorted by urgency."""

    order: int
    since: float
    model: str
    reason: Reason


class Decisions(NamedTuple):
    commands: list[Command]
    placements: dict[str, ModelPlacement]
    """Of every model in the registry."""
    unplaced: list[str]
    """Models that are wanted and that no host can take now."""


class ModelPlacer:
    """One scheduler's; all of them keep `cluster` up to date, and the one with the lease asks for decisions."""

    def __init__(self, cluster: ClusterView) -> None:
        self.cluster = cluster
        self.failures = Failures()
        self._plans: dict[str, Plan] = {}
        self._plans_of: dict[str, dict[str, Plan]] = {}
        """By model, then by group."""
        self._victims: dict[str, Plan] = {}
        """By group: for whom it makes room."""
        self._leaving: dict[str, Leaving] = {}
        self._refused: dict[str, Refused] = {}
        """Why models are not placed that are wanted, or were when they were last asked for."""
        self._fulfilled: dict[str, float] = {}
        """By model: the time of the wish to load it that was fulfilled last."""
        self._turn = 0
        self._counts: dict[str, int] = {}
        """Replicas of each model that stay, as far as they were counted in this pass."""
        self._again: dict[str, float] = {}
        """When to look again for a host for models that none could take."""
        self._specs: Mapping[str, ModelSpec] = {}
        self._demand: Mapping[str, Demand] = {}
        self._now = 0.0
        self._worth = Worth(cluster, {}, {}, 0.0)
        self._commands: list[Command] = []

    # --- from outside ----------------------------------------------------------------------------

    def decide(self, specs: Mapping[str, ModelSpec], demand: Mapping[str, Demand], now: float) -> Decisions:
        """What to tell the hosts now. `specs`: the registry; `now` in unix seconds."""
        self._specs, self._demand, self._now = specs, demand, now
        self._worth = Worth(self.cluster, specs, demand, now)
        self._commands = []
        self._counts.clear()
        self._look_at_failures()
        self._look_at_plans()
        self._forget()
        for spec in specs.values():
            self._unload_unwanted(spec)
        self._unload_removed()
        wants = sorted(want for spec in specs.values() for want in self._missing(spec))
        unplaced = self._place_all(wants)
        for plan in list(self._plans.values()):
            self._advance(plan)
        placements = {name: self._placement(spec) for name, spec in specs.items()}
        return Decisions(self._commands, placements, unplaced)

    def refused(self, command: Command, code: str, size: int, error: str) -> None:
        """The host does not do it: `error` says why, `code` is one of `shared.errors`; `size`: bytes that the model
        takes at least, where there is no room for it."""
        group = command.command.group
        if isinstance(command.command, UnloadModel):
            self._leaving.pop(group, None)
            return
        self._drop(group)
        if code != ModelDoesNotFit.code:
            self.failures.failed(command.model, command.host, error, self._now)
        elif not (size and self.cluster.learn(command.model, size)):
            self.failures.no_room(command.model, command.host, error, self._now)

    # --- what has become of plans ----------------------------------------------------------------

    def _look_at_failures(self) -> None:
        while self.cluster.failed:
            (model, host), item = self.cluster.failed.popitem()
            if model in self._specs and self._is_news(model, host, item):
                for plan in list(self._plans_of.get(model, {}).values()):
                    if plan.host == host and plan.told_at:
                        self._drop(plan.group)
        self.failures.keep(self._specs, self.cluster.hosts, self._now)

    def _is_news(self, model: str, host: str, item: HostModel) -> bool:
        """Notes a failure that a host tells of; whether it was not known."""
        there = self.cluster.hosts[host]
        if item.memory <= there.free + sum(there.promised.values()):
            return self.failures.told(model, host, item.failed_at, item.error, self._now)
        news = self.failures.told_no_room(model, host, item.failed_at, item.error, self._now)
        if news:  # it has found out what the model takes once it had its files
            self.cluster.learn(model, item.memory)
        return news

    def _look_at_plans(self) -> None:
        for plan in list(self._plans.values()):
            host, replica = self.cluster.hosts.get(plan.host), self.cluster.get(plan.group)
            if host is None or host is not plan.there or plan.model not in self._specs:
                self._drop(plan.group)
            elif replica is not None and replica.ready:
                self.failures.succeeded(plan.model, plan.host)
                self._drop(plan.group)
            elif plan.told_at:
                self._look_at_load(plan, host, replica)
            elif self._is_vain(plan, host):
                self._drop(plan.group)
        self._leaving = {name: at for name, at in self._leaving.items() if self.cluster.get(name) is not None}

    def _look_at_load(self, plan: Plan, host: Host, replica: Replica | None) -> None:
        said = self.cluster.said(plan.model, host)
        if replica is not None or (said is not None and said.state in ("loading", "downloading")):
            plan.sign_at = self._now
        elif self._now - plan.sign_at > REPEAT * REPEATS:
            self.failures.failed(plan.model, plan.host, "it has shown nothing of the load", self._now)
            self._drop(plan.group)
        if host.shows(plan.model) or (replica is not None and replica.memory):
            host.release(plan.group)

    def _is_vain(self, plan: Plan, host: Host) -> bool:
        """Whether a load of which the host was not told yet is not wanted any more, or will not come to be."""
        demand = self._demand.get(plan.model, NO_DEMAND)
        if self._now - plan.since > GIVE_UP or not host.takes:
            return True
        if plan.reason in ("demand", "replicas") and not demand.waiting:
            return self._now - max(demand.last, plan.since) > ASKED_LATELY
        going = [replica for group in plan.victims if (replica := self.cluster.get(group)) is not None]
        if not going:  # what it says it uses does not shrink
            return self._now - plan.since > REPEAT and not self._has_room(plan, host)
        return any(self._worth.keeps(replica) for replica in going)

    @staticmethod
    def _has_room(plan: Plan, host: Host) -> bool:
        return host.free + host.promised.get(plan.group, 0) >= plan.size

    def _add(self, plan: Plan) -> None:
        self._plans[plan.group] = plan
        self._plans_of.setdefault(plan.model, {})[plan.group] = plan
        self._victims.update(dict.fromkeys(plan.victims, plan))
        self._counts.clear()
        self.cluster.hosts[plan.host].promise(plan.group, plan.size)

    def _drop(self, group: str) -> None:
        plan = self._plans.pop(group, None)
        if plan is None:
            return
        del self._plans_of[plan.model][group]
        for victim in plan.victims:
            self._victims.pop(victim, None)
        self._counts.clear()
        if (host := self.cluster.hosts.get(plan.host)) is not None:
            host.release(group)

    def _forget(self) -> None:
        for known in (self._refused, self._fulfilled, self._plans_of, self._again):
            for name in [name for name in known if name not in self._specs]:
                del known[name]

    # --- what is too much ------------------------------------------------------------------------

    def _unload_unwanted(self, spec: ModelSpec) -> None:
        obeys = self.cluster.obeys
        replicas = [one for one in self.cluster.of(spec.name) if obeys(one) and not one.draining]
        if self._is_unloaded(spec):
            for group in list(self._plans_of.get(spec.name, ())):
                self._drop(group)
            for replica in replicas:
                if spec.force or replica.idle:
                    self._unload(replica, "unload", force=spec.force)
        elif spec.idle > 0:
            self._unload_idle(spec, replicas)

    def _unload_idle(self, spec: ModelSpec, replicas: list[Replica]) -> None:
        demand = self._demand.get(spec.name, NO_DEMAND)
        if demand.waiting:
            return
        live = sum(replica.group not in self._leaving for replica in replicas)
        for replica in sorted(replicas, key=lambda replica: replica.idle_since):
            since = replica.idle_since if live > 1 else max(replica.idle_since, demand.last)
            idle = replica.ready and replica.idle and self._now - since >= spec.idle
            if live > spec.least and idle and replica.group not in self._leaving:
                self._unload(replica, "idle")
                live -= 1

    def _unload_removed(self) -> None:
        """Groups that were loaded for the registry and whose model is in it no more."""
        for model in [model for model in self.cluster.models if model not in self._specs]:
            for replica in list(self.cluster.of(model)):
                if replica.ours and not replica.draining and replica.idle:
                    self._unload(replica, "removed")

    def _unload(self, replica: Replica, reason: Reason, *, force: bool = False) -> None:
        """Tells its host, once in `REPEAT` seconds."""
        host = self.cluster.hosts.get(replica.host)
        told = self._leaving.get(replica.group)
        if host is None or not host.takes or (told is not None and self._now - told.told_at < REPEAT):
            return
        sleeps = reason in ("room", "idle")
        command = UnloadModel(replica.group, force=force, sleep=sleeps)
        self._commands.append(Command(replica.host, command, replica.model, reason, told is not None))
        self._leaving[replica.group] = Leaving(self._now)
        self._counts.pop(replica.model, None)

    # --- what is missing -------------------------------------------------------------------------

    def _is_unloaded(self, spec: ModelSpec) -> bool:
        """Whether somebody has unloaded it, and no request has come since."""
        demand = self._demand.get(spec.name, NO_DEMAND)
        return spec.action == "unload" and demand.last <= spec.action_at

    def _missing(self, spec: ModelSpec) -> Iterator[Want]:
        """The replicas that the model should have and has not, nor gets."""
        if self._is_unloaded(spec):
            return
        demand = self._demand.get(spec.name, NO_DEMAND)
        live = self._staying(spec.name)
        if spec.action == "load" and any(replica.ready for replica in live):
            self._fulfilled[spec.name] = spec.action_at
        have = len(live) + self._coming(spec.name)
        for _ in range(spec.least - have):
            yield Want(0, spec.action_at or spec.created, spec.name, "least")
        if have or spec.least:
            wanted = min(self._needed(demand, live), spec.most, 2 * have)
            for _ in range(wanted - max(have, spec.least)):
                yield Want(3, demand.since, spec.name, "replicas")
        elif demand.waiting:
            yield Want(1, demand.since, spec.name, "demand")
        elif self._asked_for(spec):
            yield Want(2, spec.action_at, spec.name, "asked")
        elif spec.name in self._refused:
            yield Want(4, demand.last, spec.name, "demand")

    def _coming(self, model: str) -> int:
        """Replicas that are on their way and are no groups yet; those too that another scheduler has ordered."""
        plans = [plan for plan in self._plans_of.get(model, {}).values() if not self.cluster.get(plan.group)]
        known = {plan.host for plan in plans} | {replica.host for replica in self.cluster.of(model)}
        return len(plans) + sum(host not in known for host in self.cluster.loading(model))

    def _staying(self, model: str) -> list[Replica]:
        """Groups that serve the model or will, and are not told to go."""
        return [
            replica
            for replica in self.cluster.of(model)
            if not replica.draining
            and replica.group not in self._leaving
            and replica.group not in self._victims
        ]

    def _count(self, model: str) -> int:
        found = self._counts.get(model)
        if found is None:
            found = self._counts[model] = len(self._staying(model))
        return found

    @staticmethod
    def _needed(demand: Demand, live: list[Replica]) -> int:
        """Replicas that would have a quarter of their places free."""
        inside = sum(replica.load.running + replica.load.waiting for replica in live)
        slots = max((replica.load.slots for replica in live), default=0) or UNKNOWN_SLOTS
        return math.ceil((inside + demand.waiting) / (TARGET_SHARE * slots))

    def _asked_for(self, spec: ModelSpec) -> bool:
        """Whether somebody has asked to load it, and it has not been there since."""
        if spec.action != "load" or self._now - spec.action_at > ACTION_KEPT:
            return False
        return self._fulfilled.get(spec.name) != spec.action_at

    # --- where -----------------------------------------------------------------------------------

    def _place_all(self, wants: list[Want]) -> list[str]:
        """Plans loads, the most urgent first; returns the models that no host can take. The next pass goes on where
        there are many."""
        unplaced: dict[str, None] = {}
        searches = 0
        for want in wants:
            if want.model in unplaced:
                continue
            if self._now < self._again.get(want.model, 0.0):
                unplaced[want.model] = None
                continue
            if searches >= SEARCHES:
                break
            searches += 1
            if self._place(want):
                self._again.pop(want.model, None)
            else:
                self._again[want.model] = self._now + SEARCH_AGAIN
                unplaced[want.model] = None
        return list(unplaced)

    def _place(self, want: Want) -> bool:
        """Plans the load; False when no host can take it."""
        demand = self._demand.get(want.model, NO_DEMAND)
        room = self._room(want, busy=False)
        if (
            room is None
            and want.reason == "demand"
            and self._now - demand.since >= SWITCH_AFTER
            and demand.waiting
        ):
            room = self._room(want, busy=True)
        if room is None:
            return self._refuse(want, demand)
        self._refused.pop(want.model, None)
        if want.order == 4 and self._now - demand.last > ASKED_LATELY:
            return True  # there is room again, and nobody asks any more
        if want.order == 3 and room.lost > demand.waiting * SWITCH_AFTER:
            return False
        host, size = room.host, self.cluster.size(want.model, room.host)
        seconds = self.cluster.load_seconds(want.model, host)
        victims = {replica.group for replica in room.victims}
        group = self._name(host, want.model)
        self._add(Plan(group, want.model, host.name, want.reason, self._now, seconds, size, host, victims))
        return True

    def _refuse(self, want: Want, demand: Demand) -> bool:
        if want.order == 3 or (self._coming(want.model) and want.order):
            return False
        self._refused[want.model] = why_not(want.model, self.cluster, self.failures, self._worth, self._now)
        return want.order == 4 and self._now - demand.last > GIVE_UP

    def _name(self, host: Host, model: str) -> str:
        """Of a new group of the model on the host."""
        name, number = f"{host.name}/{model}", 1
        while name in self._plans or self.cluster.get(name) is not None:
            number += 1
            name = f"{host.name}/{model}/{number}"
        return name

    def _room(self, want: Want, *, busy: bool) -> Room | None:
        """The host that loses least; one without a replica of the model, where there is any. `busy`: groups that
        work may have to go."""
        cluster, model = self.cluster, want.model
        weight = max(1, self._demand.get(model, NO_DEMAND).waiting)
        homes = {replica.host for replica in cluster.of(model)}
        homes.update(plan.host for plan in self._plans_of.get(model, {}).values())
        failed = self.failures.any_of(model)
        best: Room | None = None
        best_key = (True, math.inf, 0.0)
        full: list[tuple[bool, float, Host, int]] = []
        for host, size, seconds in cluster.estimates(model):
            if size > host.memory or (failed and self.failures.blocked(model, host.name, self._now)):
                continue
            if host.promised and 0 in host.promised.values():
                continue  # nobody knows yet what is left there
            home, cost = host.name in homes, weight * seconds
            if host.free < size:
                full.append((home, cost, host, size))
                continue
            key = (home, cost, -host.free / max(1, host.memory))
            if best is None or key < best_key:
                best, best_key = Room(host, (), cost), key
        for home, cost, host, size in self._some(full):
            if (home, cost) > best_key[:2]:
                continue
            room = self._with_victims(host, model, size, cost, busy=busy)
            if room is not None:
                key = (home, room.cost, -host.free / max(1, host.memory))
                if best is None or key < best_key:
                    best, best_key = room, key
        return best

    def _some(self, full: list[tuple[bool, float, Host, int]]) -> list[tuple[bool, float, Host, int]]:
        """Of many hosts without room those that would have the model soonest, others in turn."""
        if len(full) <= COMPARED:
            return full
        soonest = heapq.nsmallest(COMPARED // 2, full, key=lambda item: item[:2])
        self._turn = (self._turn + COMPARED // 2) % len(full)
        return soonest + (full + full)[self._turn : self._turn + COMPARED // 2]

    def _with_victims(self, host: Host, model: str, size: int, cost: float, *, busy: bool) -> Room | None:
        candidates = list(self._candidates(host, model, busy=busy))
        if sum(replica.memory for replica in candidates) < size - host.free:
            return None
        spare = {replica.model: self._count(replica.model) > 1 for replica in candidates}
        found = cheapest(
            candidates,
            size - host.free,
            lambda replica: self._worth.of(replica, host, spare=spare[replica.model]),
        )
        return None if found is None else Room(host, found[0], cost + found[1], found[1])

    def _candidates(self, host: Host, model: str, *, busy: bool) -> Iterator[Replica]:
        """Groups on the host that may make room."""
        spare: dict[str, int] = {}
        for replica in sorted(host.replicas.values(), key=lambda replica: replica.idle_since):
            name = replica.model
            if name == model or replica.draining or self._worth.keeps(replica):
                continue
            if replica.group in self._leaving or replica.group in self._victims:
                continue
            if self._worth.stays(replica, host, busy=not replica.idle) or not (replica.idle or busy):
                continue
            staying = self._count(name)
            if staying == 1 and self._worth.waits(name) and not busy:
                continue
            left = spare.setdefault(name, staying - self._worth.least(name))
            if left > 0:
                spare[name] -= 1
                yield replica

    def _advance(self, plan: Plan) -> None:
        """Does what is next for it."""
        host = self.cluster.hosts[plan.host]
        if plan.told_at:
            if self._now - max(plan.sent_at, plan.sign_at) < REPEAT:
                return
            if self._has_room(plan, host):
                self._tell(plan, repeated=True)
            else:  # it is another host by that name, or others were faster
                self._drop(plan.group)
            return
        going = [replica for group in plan.victims if (replica := self.cluster.get(group)) is not None]
        for replica in going:
            if replica.idle and not replica.draining:
                self._unload(replica, "room")
        if not going and self._has_room(plan, host):
            plan.told_at = plan.sign_at = self._now
            self._tell(plan, repeated=False)

    def _tell(self, plan: Plan, *, repeated: bool) -> None:
        plan.sent_at = self._now
        command = LoadModel(plan.group, self._specs[plan.model])
        self._commands.append(Command(plan.host, command, plan.model, plan.reason, repeated))

    # --- what is said of it ----------------------------------------------------------------------

    def _placement(self, spec: ModelSpec) -> ModelPlacement:
        replicas = [replica for replica in self.cluster.of(spec.name) if not replica.draining]
        plans = list(self._plans_of.get(spec.name, {}).values())
        hosts = {replica.host for replica in replicas} | {plan.host for plan in plans}
        hosts.update(self.cluster.loading(spec.name))
        cordoned: list[str] = []
        if self._victims or spec.action == "unload":
            cordoned = [
                replica.group for replica in replicas if not replica.idle and self._goes(spec, replica)
            ]
        expected, refused = 0.0, None
        if not any(replica.ready for replica in replicas):
            expected = self._expected_at(spec.name, replicas, plans)
            refused = self._refused.get(spec.name) if not hosts else None
        code, reason = refused if refused is not None else ("", "")
        return ModelPlacement(
            spec.name, heapq.nsmallest(HOSTS_NAMED, hosts), expected, code, reason, sorted(cordoned)
        )

    def _goes(self, spec: ModelSpec, replica: Replica) -> bool:
        return replica.group in self._victims or self._is_unloaded(spec)

    def _expected_at(self, model: str, replicas: Iterable[Replica], plans: list[Plan]) -> float:
        """When the first replica will be there; a load that takes longer than expected ends in a while."""
        times = [(plan.told_at or plan.since) + plan.seconds for plan in plans]
        planned = {plan.group for plan in plans}
        for replica in replicas:
            host = self.cluster.hosts.get(replica.host)
            if replica.group not in planned and host is not None:
                times.append(replica.seen_at + self.cluster.load_seconds(model, host))
        known = {replica.host for replica in replicas} | {plan.host for plan in plans}
        for name in self.cluster.loading(model):
            if name not in known and (host := self.cluster.hosts.get(name)) is not None:
                times.append(_later(self._now + self.cluster.load_seconds(model, host)))
        return max(_later(self._now), round(min(times))) if times else 0.0


def _later(moment: float) -> float:
    """A moment after it, which stays the same for `OVERDUE` seconds."""
    return OVERDUE * math.ceil((moment + OVERDUE / 2) / OVERDUE)
