"""Loads that are decided and groups that are told to go: what will be, beside what is. Pure: times are unix seconds.

A load that is decided is a plan until its group serves; groups that make room for it are its victims until they go.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from services.scheduler.models.cluster import ClusterView, Host, Replica

Reason = Literal["least", "demand", "asked", "replicas", "room", "idle", "unload", "removed"]
REASONS: tuple[Reason, ...] = get_args(Reason)


@dataclass(slots=True, eq=False)
class Plan:
    """A load that is decided."""

    group: str
    model: str
    host: str
    reason: Reason
    since: float
    seconds: float  # that it is expected to take, from being told
    size: int
    there: Host | None = None  # what was known of the host then: one that comes back has forgotten it
    victims: set[str] = field(default_factory=set)  # groups that make room for it
    told_at: float = 0.0  # when the host was told first; 0: not yet
    sent_at: float = 0.0  # when it was told last
    sign_at: float = 0.0  # when it last showed that it works on it


class Plans:
    """All of them. Each question costs the same however many groups a model has."""

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self._plans: dict[str, Plan] = {}
        self._of: dict[str, dict[str, Plan]] = {}  # by model, then by group
        self._victims: dict[str, Plan] = {}  # by group: for whom it makes room
        self._leaving: dict[str, float] = {}  # by group: when it was told to go
        self._going: dict[str, set[str]] = {}  # by model: groups that are told to go, or will be
        # Models of which something has changed here, until somebody has cleared it.
        self.changed: set[str] = set()

    def __contains__(self, group: str) -> bool:
        return group in self._plans

    def all(self) -> list[Plan]:
        return list(self._plans.values())

    def of(self, model: str) -> Collection[Plan]:
        return self._of.get(model, {}).values()

    def add(self, plan: Plan) -> None:
        self._plans[plan.group] = plan
        self._of.setdefault(plan.model, {})[plan.group] = plan
        self.changed.add(plan.model)
        for group in plan.victims:
            self._victims[group] = plan
            self._goes(group)
        self._cluster.hosts[plan.host].promise(plan.group, plan.size)

    def drop(self, group: str) -> None:
        """It is not to be, or it is there."""
        plan = self._plans.pop(group, None)
        if plan is None:
            return
        del self._of[plan.model][group]
        if not self._of[plan.model]:
            del self._of[plan.model]
        self.changed.add(plan.model)
        for victim in plan.victims:
            if self._victims.pop(victim, None) is not None:
                self._stays(victim)
        if (host := self._cluster.hosts.get(plan.host)) is not None:
            host.release(group)

    # --- groups that go --------------------------------------------------------------------------

    def leave(self, group: str, now: float) -> None:
        """It was told to go."""
        self._leaving[group] = now
        self._goes(group)

    def told_to_leave(self, group: str) -> float | None:
        """When it was told to go; None: it was not."""
        return self._leaving.get(group)

    def stay(self, group: str) -> None:
        """It does not go though it was told to."""
        if self._leaving.pop(group, None) is not None:
            self._stays(group)

    def forget_gone(self) -> None:
        """Groups that are there no more do not leave any more."""
        for group in [group for group in self._leaving if self._cluster.get(group) is None]:
            del self._leaving[group]
        for model, groups in list(self._going.items()):
            groups -= {group for group in groups if self._cluster.get(group) is None}
            if not groups:
                del self._going[model]

    def goes(self, replica: Replica) -> bool:
        """Whether it is told to go, or makes room for another."""
        return replica.group in self._leaving or replica.group in self._victims

    def is_victim(self, group: str) -> bool:
        return group in self._victims

    def any_victims(self, model: str) -> bool:
        return any(group in self._victims for group in self._going.get(model, ()))

    def staying(self, model: str) -> int:
        """Groups that serve the model or will, and do not go."""
        return self._cluster.replicas(model).staying - sum(1 for _ in self._losing(model))

    def inside(self, model: str) -> int:
        """Requests that these have."""
        return self._cluster.replicas(model).inside - sum(replica.inside for replica in self._losing(model))

    def coming(self, model: str) -> int:
        """Replicas that are on their way and are no groups yet; those too that another scheduler has ordered."""
        cluster, plans = self._cluster, self.of(model)
        count = sum(cluster.get(plan.group) is None for plan in plans)
        for name in cluster.loading(model):
            known = any(plan.host == name and cluster.get(plan.group) is None for plan in plans)
            count += not (known or self._has(name, model))
        return count

    def _has(self, host: str, model: str) -> bool:
        there = self._cluster.hosts.get(host)
        return there is not None and any(replica.model == model for replica in there.replicas.values())

    def _losing(self, model: str) -> Iterator[Replica]:
        for group in self._going.get(model, ()):
            replica = self._cluster.get(group)
            if replica is not None and not replica.draining:
                yield replica

    def _goes(self, group: str) -> None:
        if (replica := self._cluster.get(group)) is not None:
            self._going.setdefault(replica.model, set()).add(group)
            self.changed.add(replica.model)

    def _stays(self, group: str) -> None:
        replica = self._cluster.get(group)
        if replica is not None and not self.goes(replica):
            self._going.get(replica.model, set()).discard(group)
            self.changed.add(replica.model)
