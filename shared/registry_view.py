"""What is wanted of models and what there is, as gateways and the command line follow it in NATS KV.

    KV registry    what is wanted  ──▶ specs, aliases ─┐
    KV groups      what runs       ──▶ groups          ├──▶ status of each model, whether pins fit
    KV hosts       what hosts have ──▶ hosts          ─┘
    KV placements  what is planned ──▶ placements

Schedulers place models by an index of groups and hosts instead (`services/scheduler/models/cluster.py`).
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from shared.messages import GroupRecord, HostModel, HostRecord, ModelPlacement, ModelSpec
from shared.model_status import ModelStatus, statuses
from shared.pins import Pins, pins_of

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class RegistryView:
    """The records by their keys; `fold` brings one up to date."""

    specs: dict[str, ModelSpec] = field(default_factory=dict)
    groups: dict[str, GroupRecord] = field(default_factory=dict)  # those that are gone among them
    hosts: dict[str, HostRecord] = field(default_factory=dict)
    placements: dict[str, ModelPlacement] = field(default_factory=dict)
    # Groups whose records are of an earlier start: they count for nothing.
    stale: set[str] = field(default_factory=set)

    def live(self) -> list[GroupRecord]:
        """Groups that are known, but for stale ones."""
        return [record for name, record in self.groups.items() if name not in self.stale]

    def groups_of(self, model: str) -> list[GroupRecord]:
        """Those that are not gone."""
        return [record for record in self.live() if record.model == model and record.state != "gone"]

    def hosts_say(self, model: str) -> dict[str, HostModel]:
        """What each host that is there says of a model, by instance."""
        return {
            host.instance: one
            for host in self.hosts.values()
            if host.state != "gone"
            for one in host.host.models
            if one.model == model
        }

    def taking_hosts(self) -> list[str]:
        """Instances that load and unload models when they are told to."""
        return sorted(one.instance for one in self.hosts.values() if one.host.takes_models and one.state != "gone")

    def ready_hosts(self) -> list[str]:
        """Those of them that do so now."""
        return [name for name in self.taking_hosts() if self.hosts[name].state == "ready"]

    def status(self, model: str, now: float | None = None) -> ModelStatus:
        """Of one model by its own name, at `now` (unix seconds; None: at this moment)."""
        return self.statuses([model], now)[model]

    def statuses(self, names: Iterable[str], now: float | None = None) -> dict[str, ModelStatus]:
        """As `status`, of each of `names`, in one pass."""
        models = {name: self.specs.get(name) for name in names}
        return statuses(models, self.live(), self.hosts.values(), time.time() if now is None else now)

    def pins(self, written: Iterable[ModelSpec] = (), removed: Iterable[str] = ()) -> Pins:
        """Whether all pinned models fit, once these entries are written and those removed."""
        gone = set(removed)
        specs = {name: spec for name, spec in self.specs.items() if name not in gone}
        specs |= {spec.name: spec for spec in written}
        return pins_of(specs, self.specs, self.groups.values(), self.hosts.values())


def fold(into: dict[str, T], key: str, value: T | None) -> None:
    """The bucket has this value at `key` now; None: there is none any more."""
    if value is None:
        into.pop(key, None)
    else:
        into[key] = value
