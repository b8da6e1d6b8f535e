"""Hosts that obey in virtual time: what they are told they do, and their records say so."""

from dataclasses import dataclass, field
from typing import Any

from services.scheduler.models.cluster import ClusterView
from services.scheduler.models.demand import Demand
from services.scheduler.models.placement import Command, Decisions, ModelPlacer
from shared.messages import GroupLoad, GroupRecord, HostBeat, HostModel, HostRecord, LoadModel, ModelSpec, UnloadModel

GB = 1_000_000_000
BEGIN = 1_700_000_000.0


def spec(name: str, **fields: Any) -> ModelSpec:
    return ModelSpec(name, f"org/{name}", **fields)


@dataclass
class FakeGroup:
    name: str
    model: str
    ready_at: float
    running: int = 0
    draining: bool = False


@dataclass
class FakeHost:
    name: str
    memory: int
    devices: int = 0
    groups: dict[str, FakeGroup] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)  # state by model, of those that no group serves


class FakeCluster:
    """Checks every command as it is obeyed: memory, pins, and what runs."""

    def __init__(self, sizes: dict[str, int], *, load: float = 5.0) -> None:
        self.now = BEGIN
        self.sizes = sizes
        self.load = load
        self.hosts: dict[str, FakeHost] = {}
        self.specs: dict[str, ModelSpec] = {}
        self.demand: dict[str, Demand] = {}
        self.view = ClusterView()
        self.placer = ModelPlacer(self.view)
        self.commands: list[Command] = []
        # (model, host) whose loads fail: when the last one did.
        self.failing: dict[tuple[str, str], float] = {}
        # Models of which a host learns the size only once it has fetched the files.
        self.unfetched: set[str] = set()
        # (model, host) for which there was no room then, and when.
        self.lacking: dict[tuple[str, str], float] = {}
        self.known: set[str] = set()  # models whose size some host has told
        self.unknown: set[str] = set()  # models that were placed though no host had told their size
        self.deaf = False

    def add_host(self, name: str, memory: int, devices: int = 0) -> FakeHost:
        self.hosts[name] = FakeHost(name, memory, devices)
        return self.hosts[name]

    def drop_host(self, name: str) -> None:
        for group in self.hosts.pop(name).groups:
            self.view.forget_group(group)
        self.view.forget_host(name)

    def lose_host(self, name: str) -> None:
        """The monitor lists it as gone."""
        lost = self.hosts.pop(name)
        for group in lost.groups:
            self.view.forget_group(group)
        self.view.host(HostRecord(name, HostBeat(lost.memory, 0, lost.devices, takes_models=True), "gone"))

    def register(self, *specs: ModelSpec) -> None:
        self.specs.update({item.name: item for item in specs})

    def ask(self, model: str, waiting: int = 1) -> None:
        self.demand[model] = Demand(waiting, self.now, self.now, waiting / 60, waiting / 3600)

    def groups(self, model: str) -> list[FakeGroup]:
        return [group for host in self.hosts.values() for group in host.groups.values() if group.model == model]

    def serving(self, model: str) -> list[FakeGroup]:
        return [group for group in self.groups(model) if group.ready_at <= self.now and not group.draining]

    def free(self, host: FakeHost) -> int:
        return host.memory - sum(self.sizes.get(group.model, 0) for group in host.groups.values())

    # --- time ------------------------------------------------------------------------------------

    def step(self, seconds: float = 1.0) -> Decisions:
        """Time passes, hosts beat, the placement decides, hosts obey."""
        self.now += seconds
        for host in self.hosts.values():
            for group in [group for group in host.groups.values() if group.draining and not group.running]:
                del host.groups[group.name]
                self.view.forget_group(group.name)
        self.beat()
        for model in self.demand:
            if self.serving(model):
                self.demand[model].waiting = 0
        decisions = self.placer.decide(self.specs, self.demand, self.now)
        self.commands += decisions.commands
        view, hosts = self.view, self.view.hosts
        self.unknown = {c.model for c in decisions.commands if not view.size(c.model, hosts[c.host])}
        for command in decisions.commands:
            if not self.deaf:
                self._obey(command)
        return decisions

    def run(self, seconds: float) -> Decisions:
        end = self.now + seconds
        while True:
            decisions = self.step()
            if self.now >= end:
                return decisions

    def beat(self) -> None:
        for host in self.hosts.values():
            models = [
                HostModel(model, state, memory=self.sizes.get(model, 0), load_seconds=self.load)  # type: ignore[arg-type]
                for model, state in host.stored.items()
            ]
            models += [
                HostModel(model, "failed", error="It is broken.", failed_at=at)
                for (model, name), at in self.failing.items()
                if name == host.name and at
            ]
            models += [
                HostModel(model, "failed", error="There is no room.", memory=self.sizes[model], failed_at=at)
                for (model, name), at in self.lacking.items()
                if name == host.name
            ]
            used = host.memory - self.free(host)
            beat = HostBeat(host.memory, used, host.devices, models, takes_models=True)
            self.view.host(HostRecord(host.name, beat, "ready"))
            for group in host.groups.values():
                self.view.group(self._record(host, group), self.now)

    def _record(self, host: FakeHost, group: FakeGroup) -> GroupRecord:
        state = "draining" if group.draining else "ready" if group.ready_at <= self.now else "starting"
        memory = self.sizes.get(group.model, 0)
        load = GroupLoad(running=group.running, slots=8)
        return GroupRecord(group.name, group.model, state, 1, [], load, host.name, memory=memory)  # type: ignore[arg-type]

    def _obey(self, command: Command) -> None:
        host = self.hosts[command.host]
        if isinstance(command.command, LoadModel):
            self._load(host, command)
        else:
            self._unload(host, command, command.command)

    def _load(self, host: FakeHost, command: Command) -> None:
        if (command.model, host.name) in self.failing:
            self.failing[command.model, host.name] = self.now
            return
        size = self.sizes[command.model]
        if size > self.free(host) and command.model in self.unfetched:
            self.unfetched.discard(command.model)
            self.lacking[command.model, host.name] = self.now
            return
        self.lacking.pop((command.model, host.name), None)
        if size > self.free(host):
            assert command.model in self.unknown, "memory is exceeded"
            self.known.add(command.model)
            self.placer.refused(command, "model_does_not_fit", size, "There is no room.")
            return
        self.known.add(command.model)
        assert command.command.group not in host.groups, "it is there already"
        group = FakeGroup(command.command.group, command.model, self.now + self.load)
        host.groups[group.name] = group
        host.stored[command.model] = "stored"

    def _unload(self, host: FakeHost, command: Command, unload: UnloadModel) -> None:
        group = host.groups[unload.group]
        spec = self.specs.get(group.model)
        assert unload.force or not group.running, "it works"
        if command.reason == "room":
            assert not spec.pinned, "it is pinned"
            assert len([item for item in self.groups(group.model) if not item.draining]) > spec.least
        group.draining = True
        if unload.force:
            group.running = 0
        host.stored[group.model] = "sleeping" if unload.sleep else "stored"
