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
from typing import NamedTuple

from services.scheduler.models.cluster import ClusterView, Host, Replica
from services.scheduler.models.demand import NO_DEMAND, ConcurrencyEstimator, Demand
from services.scheduler.models.eviction import Worth
from services.scheduler.models.failures import Failures
from services.scheduler.models.host_selection import RoomSearch
from services.scheduler.models.plans import Plan, Plans, Reason
from services.scheduler.models.refusals import ModelRefusal, why_not
from shared.errors import ModelDoesNotFit
from shared.messages import HostModel, LoadModel, ModelPlacement, ModelSpec, UnloadModel

TARGET_SHARE = 0.75  # share of a model's places that may be taken before it gets another replica
GROWS = 8  # a model gets at most so many times the replicas that it has, in one pass
UNKNOWN_SLOTS = 64  # places of a group that has not said how many it has
SWITCH_AFTER = 2.0  # seconds that a request waits before a group that works is cordoned for its model
REPEAT = 10.0  # seconds after which a command is sent again of which the host shows nothing
REPEATS = 6  # times that a load is sent before it counts as failed
GIVE_UP = 300.0  # seconds that a plan waits for its victims to go
# Seconds for which a request that was refused for want of memory still asks for its model.
ASKED_LATELY = 30.0
ACTION_KEPT = 900.0  # seconds for which somebody's wish to load a model is tried
SEARCHES = 16  # loads for which one pass looks for a host, at most
COMPARISONS = 128  # hosts of which one pass compares the groups, at most: the next goes on
# Seconds before it looks again for one that none can take, where no host has got more memory to give.
SEARCH_AGAIN = 0.5
HOSTS_NAMED = 64  # hosts of a model that are written into its placement, at most
OVERDUE = 5.0  # seconds by which a load that takes longer than expected is put off again and again


class Command(NamedTuple):
    """What a host is to be told."""

    host: str
    command: LoadModel | UnloadModel
    model: str
    reason: Reason
    repeated: bool  # whether it was sent before


class Want(NamedTuple):
    """A replica that is missing. Sorted by urgency."""

    order: int
    since: float
    model: str
    reason: Reason


class Decisions(NamedTuple):
    commands: list[Command]
    placements: dict[str, ModelPlacement]  # of every model in the registry
    unplaced: list[str]  # models that are wanted and that no host can take now
    more: bool  # whether there is more to decide at once: one pass does not do everything


class ModelPlacer:
    """One scheduler's; all of them keep `cluster` up to date, and the one with the lease asks for decisions."""

    def __init__(self, cluster: ClusterView) -> None:
        self.cluster = cluster
        self.failures = Failures()
        self._plans = Plans(cluster)
        self._concurrency = ConcurrencyEstimator()
        # Why models are not placed that are wanted, or were when they were last asked for.
        self._refused: dict[str, ModelRefusal] = {}
        # By model: the time of the order to load or to unload it that was carried out last.
        self._done: dict[str, float] = {}
        self._turn = 0  # passes so far
        self._again: dict[str, float] = {}  # when to look again for a host for models that none could take
        self._specs: Mapping[str, ModelSpec] = {}
        self._demand: Mapping[str, Demand] = {}
        self._now = 0.0
        self._worth = Worth(cluster, {}, {}, 0.0)
        # Of models of which nothing is under way, until something changes.
        self._settled: dict[str, tuple[ModelSpec, ModelPlacement]] = {}
        # Before then no group of the model has been idle for long enough to go.
        self._idle_from: dict[str, tuple[ModelSpec, float]] = {}
        self._commands: list[Command] = []

    # --- from outside ----------------------------------------------------------------------------

    def decide(self, specs: Mapping[str, ModelSpec], demand: Mapping[str, Demand], now: float) -> Decisions:
        """What to tell the hosts now. `specs`: the registry; `now` in unix seconds."""
        self._specs, self._demand, self._now = specs, demand, now
        self._worth = Worth(self.cluster, specs, demand, now)
        self._commands = []
        self._turn += 1
        if self.cluster.free.grown:
            self.cluster.free.grown = False
            self._again.clear()
        self._look_at_failures()
        self._look_at_plans()
        self._forget()
        for spec in specs.values():
            self._unload_unwanted(spec)
        self._unload_removed()
        wants = sorted(want for spec in specs.values() for want in self._missing(spec))
        unplaced, more = self._place_all(wants)
        for plan in self._plans.all():
            self._advance(plan)
        self._unsettle()
        placements = {name: self._placement(spec) for name, spec in specs.items()}
        return Decisions(self._commands, placements, unplaced, more)

    def _unsettle(self) -> None:
        for changed in (self.cluster.changed, self._plans.changed):
            for model in changed:
                self._settled.pop(model, None)
                self._idle_from.pop(model, None)
            changed.clear()

    def observe(self, said: ModelPlacement) -> None:
        """What was said of a model last, by whoever decided: what was carried out then is not carried out again."""
        if said.done_at:
            self._done[said.model] = said.done_at

    def refused(self, command: Command, code: str, size: int, error: str) -> None:
        """The host does not do it: `error` says why, `code` is one of `shared.errors`; `size`: bytes that the model
        takes at least, where there is no room for it."""
        group = command.command.group
        if isinstance(command.command, UnloadModel):
            self._plans.stay(group)
            return
        self._plans.drop(group)
        if code != ModelDoesNotFit.code:
            self.failures.failed(command.model, command.host, error, self._now)
        elif not (size and self.cluster.learn(command.model, size)):
            self.failures.no_room(command.model, command.host, error, self._now)

    # --- what has become of plans ----------------------------------------------------------------

    def _look_at_failures(self) -> None:
        while self.cluster.failed:
            (model, host), item = self.cluster.failed.popitem()
            if model in self._specs and self._is_news(model, host, item):
                for plan in list(self._plans.of(model)):
                    if plan.host == host and plan.told_at:
                        self._plans.drop(plan.group)
        self.failures.keep(self._specs, self.cluster.hosts, self._now)

    def _is_news(self, model: str, host: str, item: HostModel) -> bool:
        """Notes a failure that a host tells of; whether it was not known."""
        there = self.cluster.hosts[host]
        if item.memory <= there.free + sum(there.promised.values()):
            return self.failures.on_failure(model, host, item.failed_at, item.error, self._now)
        news = self.failures.told_no_room(model, host, item.failed_at, item.error, self._now)
        if news:  # it has found out what the model takes once it had its files
            self.cluster.learn(model, item.memory)
        return news

    def _look_at_plans(self) -> None:
        for plan in self._plans.all():
            host, replica = self.cluster.hosts.get(plan.host), self.cluster.get(plan.group)
            if host is None or host is not plan.there or plan.model not in self._specs:
                self._plans.drop(plan.group)
            elif replica is not None and replica.ready:
                self.failures.succeeded(plan.model, plan.host)
                self._plans.drop(plan.group)
            elif plan.told_at:
                self._look_at_load(plan, host, replica)
            elif self._is_vain(plan, host):
                self._plans.drop(plan.group)
        self._plans.forget_gone()

    def _look_at_load(self, plan: Plan, host: Host, replica: Replica | None) -> None:
        said = self.cluster.reported(plan.model, host)
        if replica is not None or (said is not None and said.state in ("loading", "downloading")):
            plan.sign_at = self._now
        elif self._now - plan.sign_at > REPEAT * REPEATS:
            self.failures.failed(plan.model, plan.host, "it has shown nothing of the load", self._now)
            self._plans.drop(plan.group)
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

    def _forget(self) -> None:
        self._concurrency.keep(self._specs)
        for known in (self._refused, self._done, self._again, self._settled, self._idle_from):
            for name in [name for name in known if name not in self._specs]:
                del known[name]

    # --- what is too much ------------------------------------------------------------------------

    def _unload_unwanted(self, spec: ModelSpec) -> None:
        if self._is_unloaded(spec):
            for plan in list(self._plans.of(spec.name)):
                self._plans.drop(plan.group)
            for replica in self._obeying(spec.name):
                if spec.force or replica.idle:
                    self._unload(replica, "unload", force=spec.force)
        elif spec.idle > 0:
            known, since = self._idle_from.get(spec.name, (None, 0.0))
            if known is not spec or self._now >= since:
                self._unload_idle(spec, self._obeying(spec.name))

    def _obeying(self, model: str) -> list[Replica]:
        """Groups that go when they are told to, and do not go yet."""
        return [one for one in self.cluster.of(model) if self.cluster.obeys(one) and not one.draining]

    def _unload_idle(self, spec: ModelSpec, replicas: list[Replica]) -> None:
        demand = self._demand.get(spec.name, NO_DEMAND)
        if demand.waiting:
            return
        live = [replica for replica in replicas if self._plans.told_to_leave(replica.group) is None]
        left = len(live)
        for replica in sorted(live, key=lambda replica: replica.idle_since):
            since = replica.idle_since if left > 1 else max(replica.idle_since, demand.last)
            idle = replica.ready and replica.idle and self._now - since >= spec.idle
            if left > spec.least and idle:
                self._unload(replica, "idle")
                left -= 1
        if left == len(live):  # what is idle now was not before
            since = min((replica.idle_since for replica in live if replica.ready), default=self._now)
            last = demand.last if left == 1 else 0.0
            self._idle_from[spec.name] = spec, max(since, last) + spec.idle

    def _unload_removed(self) -> None:
        """Groups that were loaded for the registry and whose model is in it no more."""
        for model in [model for model in self.cluster.models if model not in self._specs]:
            for replica in list(self.cluster.of(model)):
                if replica.ours and not replica.draining and replica.idle:
                    self._unload(replica, "removed")

    def _unload(self, replica: Replica, reason: Reason, *, force: bool = False) -> None:
        """Tells its host, once in `REPEAT` seconds."""
        host = self.cluster.hosts.get(replica.host)
        told_at = self._plans.told_to_leave(replica.group)
        if host is None or not host.takes or (told_at is not None and self._now - told_at < REPEAT):
            return
        sleeps = reason in ("room", "idle")
        command = UnloadModel(replica.group, force=force, sleep=sleeps)
        self._commands.append(Command(replica.host, command, replica.model, reason, told_at is not None))
        self._plans.leave(replica.group, self._now)

    # --- what is missing -------------------------------------------------------------------------

    def _is_unloaded(self, spec: ModelSpec) -> bool:
        """Whether somebody has unloaded it, and no request has come since, nor waits from before."""
        if spec.action != "unload" or self._done.get(spec.name) == spec.action_at:
            return False
        demand = self._demand.get(spec.name, NO_DEMAND)
        return demand.last <= spec.action_at and (spec.force or not demand.waiting)

    def _missing(self, spec: ModelSpec) -> Iterator[Want]:
        """The replicas that the model should have and has not, nor gets."""
        if self._is_unloaded(spec):
            return
        demand = self._demand.get(spec.name, NO_DEMAND)
        asked_again = spec.action == "unload" and demand.last > spec.action_at
        if asked_again or (self._wished(spec) and self._any_ready(spec.name)):
            self._done[spec.name] = spec.action_at
        have = self._plans.staying(spec.name) + self._plans.coming(spec.name)
        for _ in range(spec.least - have):
            yield Want(0, spec.action_at or spec.created, spec.name, "least")
        if have or spec.least:
            wanted = min(self._needed(spec.name, demand), spec.most, GROWS * have)
            for _ in range(wanted - max(have, spec.least)):
                yield Want(3, demand.since, spec.name, "replicas")
        elif demand.waiting:
            yield Want(1, demand.since, spec.name, "demand")
        elif self._asked_for(spec):
            yield Want(2, spec.action_at, spec.name, "asked")
        elif spec.name in self._refused:
            yield Want(4, demand.last, spec.name, "demand")

    def _any_ready(self, model: str) -> bool:
        return any(replica.ready and not self._plans.goes(replica) for replica in self.cluster.of(model))

    def _needed(self, model: str, demand: Demand) -> int:
        """Replicas that would have a quarter of their places free once one more is loaded."""
        slots = self.cluster.replicas(model).slots or UNKNOWN_SLOTS
        inside = self._plans.inside(model)
        expected = self._concurrency.estimate(model, inside, demand, self._now)
        return math.ceil((expected if demand.waiting else inside) / (TARGET_SHARE * slots))

    def _wished(self, spec: ModelSpec) -> bool:
        """Whether somebody has asked to load it, and it was not there since."""
        return spec.action == "load" and self._done.get(spec.name) != spec.action_at

    def _asked_for(self, spec: ModelSpec) -> bool:
        return self._wished(spec) and self._now - spec.action_at <= ACTION_KEPT

    # --- where -----------------------------------------------------------------------------------

    def _place_all(self, wants: list[Want]) -> tuple[list[str], bool]:
        """Plans loads, the most urgent first; returns the models that no host can take, and whether the next pass has
        to go on."""
        search = RoomSearch(self.cluster, self._plans, self.failures, self._worth, self._demand, self._turn)
        unplaced: dict[str, None] = {}
        searches = 0
        for want in wants:
            if want.model in unplaced:
                continue
            if self._now < self._again.get(want.model, 0.0):
                unplaced[want.model] = None
                continue
            if searches >= SEARCHES or search.compared >= COMPARISONS:
                return list(unplaced), True
            searches += 1
            if self._place(want, search):
                self._again.pop(want.model, None)
            else:
                self._again[want.model] = self._now + SEARCH_AGAIN
                unplaced[want.model] = None
        return list(unplaced), False

    def _place(self, want: Want, search: RoomSearch) -> bool:
        """Plans the load; False when no host can take it."""
        demand = self._demand.get(want.model, NO_DEMAND)
        late = demand.waiting and self._now - demand.since >= SWITCH_AFTER
        room = search.find(want.model, self._now, "idle") or search.find(want.model, self._now, "spare")
        if room is None and want.reason == "demand" and late:
            room = search.find(want.model, self._now, "any")
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
        self._plans.add(Plan(group, want.model, host.name, want.reason, self._now, seconds, size, host, victims))
        return True

    def _refuse(self, want: Want, demand: Demand) -> bool:
        if want.order == 3 or (self._plans.coming(want.model) and want.order):
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

    def _advance(self, plan: Plan) -> None:
        """Does what is next for it."""
        host = self.cluster.hosts[plan.host]
        if plan.told_at:
            if self._now - max(plan.sent_at, plan.sign_at) < REPEAT:
                return
            if self._has_room(plan, host):
                self._tell(plan, repeated=True)
            else:  # it is another host by that name, or others were faster
                self._plans.drop(plan.group)
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
        settled, placement = self._settled.get(spec.name, (None, None))
        if placement is not None and settled is spec:
            return placement
        replicas = [replica for replica in self.cluster.of(spec.name) if not replica.draining]
        plans = self._plans.of(spec.name)
        hosts = {replica.host for replica in replicas} | {plan.host for plan in plans}
        hosts.update(self.cluster.loading(spec.name))
        moving = self._plans.any_victims(spec.name) or spec.action == "unload"
        cordoned = [one.group for one in replicas if moving and not one.idle and self._goes(spec, one)]
        expected, refused, waiting = 0.0, None, 0
        ready = any(replica.ready for replica in replicas)
        if not ready:
            expected = self._expected_at(spec.name, replicas, plans)
            refused = self._refused.get(spec.name) if not hosts else None
            waiting = rounded(self._demand.get(spec.name, NO_DEMAND).waiting)
        code, reason = refused if refused is not None else ("", "")
        said = ModelPlacement(
            spec.name,
            heapq.nsmallest(HOSTS_NAMED, hosts),
            expected,
            code,
            reason,
            sorted(cordoned),
            waiting,
            self._done.get(spec.name, 0.0),
        )
        if ready and not moving:
            self._settled[spec.name] = spec, said
        return said

    def _goes(self, spec: ModelSpec, replica: Replica) -> bool:
        return self._plans.is_victim(replica.group) or self._is_unloaded(spec)

    def _expected_at(self, model: str, replicas: Iterable[Replica], plans: Iterable[Plan]) -> float:
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


def rounded(count: int) -> int:
    """The next of 0, 1, 2, 3, 4, 6, 8, 12, 16, ...: what grows fast is told seldom."""
    step = 1 << max(0, count.bit_length() - 2) if count & (count - 1) else 1
    return -(-count // step) * step


def _later(moment: float) -> float:
    """A moment after it, which stays the same for `OVERDUE` seconds."""
    return OVERDUE * math.ceil((moment + OVERDUE / 2) / OVERDUE)
