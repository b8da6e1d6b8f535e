"""What is known of hosts and their groups, brought up to date record by record. Pure: times are unix seconds.

memory of a host    |  used, by its own beat, or what its groups take  |  promised to loads it has not shown |  free  |
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from shared.messages import GroupLoad, GroupRecord, GroupStatus, HostModel, HostRecord
from shared.messages.registry import MAX_MODELS

SLEEP_BANDWIDTH = 8e9
DISK_BANDWIDTH = 1.5e9
HUB_BANDWIDTH = 1e8
"""Bytes per second at which weights are reckoned to be read where nothing was measured: from a host's memory to its
GPUs, from its disk, from a model hub."""
LOAD_BASE = 1.0
"""Seconds of a load beside its bytes."""
UNKNOWN_LOAD = 30.0
"""Seconds of a load of which no size is known."""
READY = ("ready", "busy")
GONE = "gone"


@dataclass(slots=True, eq=False)
class Replica:
    """A group that is there."""

    group: str
    model: str
    host: str
    state: GroupStatus
    load: GroupLoad
    memory: int
    loaded: float
    seen_at: float
    """Since when it is known."""
    ready_at: float = 0.0
    """Since when it serves; 0: it does not."""
    busy_at: float = 0.0
    """When something was last seen to run in it; 0: never."""

    @property
    def ready(self) -> bool:
        return self.state in READY

    @property
    def draining(self) -> bool:
        return self.state == "draining"

    @property
    def ours(self) -> bool:
        """Whether it was loaded for the registry: an executor's own group stays when its model leaves that."""
        return f"{self.group}/".startswith(f"{self.host}/{self.model}/")

    @property
    def idle(self) -> bool:
        return self.load.running + self.load.waiting == 0

    @property
    def idle_since(self) -> float:
        return max(self.ready_at, self.busy_at)


@dataclass(slots=True, eq=False)
class Host:
    """A host that has been heard of."""

    name: str
    memory: int = 0
    used_by_beat: int = 0
    devices: int = 0
    takes: bool = False
    """Whether it loads models when it is told to."""
    models: dict[str, HostModel] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)
    promised: dict[str, int] = field(default_factory=dict)
    """Bytes by group, of loads that are decided and that the host does not show yet."""
    free: int = 0
    """Bytes that are neither taken nor promised; below 0 where more is promised than there is."""

    def count(self) -> None:
        """Brings `free` up to date."""
        taken = sum(replica.memory for replica in self.replicas.values())
        self.free = self.memory - max(self.used_by_beat, taken) - sum(self.promised.values())

    def promise(self, group: str, size: int) -> None:
        self.promised[group] = size
        self.count()

    def release(self, group: str) -> None:
        if self.promised.pop(group, None) is not None:
            self.count()

    def shows(self, model: str) -> bool:
        """Whether a load of the model counts in what it says it uses."""
        said = self.models.get(model)
        return said is not None and said.state == "loading"


class ClusterView:
    """All hosts and groups. Each change costs the same however many there are."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self._groups: dict[str, Replica] = {}
        self._by_model: dict[str, dict[str, Replica]] = {}
        self._sizes: dict[str, int] = {}
        """The most that a group of each model is known to take."""
        self._least: dict[str, int] = {}
        """What hosts that had no room have said that it takes at least."""
        self._sources: dict[str, str] = {}
        self._seconds: dict[str, float] = {}
        """What a load of each model has taken last, anywhere."""
        self._loading: dict[str, set[str]] = {}
        """Hosts that say that they load each model."""
        self.failed: dict[tuple[str, str], HostModel] = {}
        """By model and host: what could not be loaded, until somebody has taken it out."""

    # --- what the health monitor writes ----------------------------------------------------------

    def host(self, record: HostRecord) -> None:
        """Takes in what a host is; one that is gone is forgotten."""
        if record.state == GONE:
            self.forget_host(record.instance)
            return
        host = self.hosts.get(record.instance)
        if host is None:
            host = self.hosts[record.instance] = Host(record.instance)
            for replica in self._groups.values():
                if replica.host == host.name:
                    host.replicas[replica.group] = replica
        said = record.host
        host.memory, host.used_by_beat, host.devices = said.memory, said.used, said.devices
        host.takes = said.takes_models and record.state == "ready"
        self._forget_loading(host)
        host.models = {item.model: item for item in said.models[:MAX_MODELS]}
        for item in host.models.values():
            self._learn(item.model, item.memory)
            if item.load_seconds > 0:
                self._seconds[item.model] = item.load_seconds
            if item.state == "loading":
                self._loading.setdefault(item.model, set()).add(host.name)
            if item.state == "failed":
                self.failed[item.model, host.name] = item
        host.count()

    def forget_host(self, name: str) -> None:
        host = self.hosts.pop(name, None)
        if host is not None:
            self._forget_loading(host)
            for item in host.models.values():
                self.failed.pop((item.model, name), None)

    def _forget_loading(self, host: Host) -> None:
        for item in host.models.values():
            if item.state == "loading":
                self._loading[item.model].discard(host.name)
                if not self._loading[item.model]:
                    del self._loading[item.model]

    def group(self, record: GroupRecord, now: float) -> None:
        """Takes in what a group is; one that is gone is forgotten."""
        if record.state == GONE:
            self.forget_group(record.group)
            return
        replica = self._groups.get(record.group)
        if replica is None or (replica.model, replica.host) != (record.model, record.instance):
            self.forget_group(record.group)
            replica = Replica(
                record.group,
                record.model,
                record.instance,
                record.state,
                record.load,
                record.memory,
                0.0,
                now,
            )
            self._groups[record.group] = replica
            self._by_model.setdefault(record.model, {})[record.group] = replica
            if (host := self.hosts.get(record.instance)) is not None:
                host.replicas[record.group] = replica
        if record.state in READY:
            replica.ready_at = replica.ready_at or now
        else:
            replica.ready_at = 0.0
        replica.state, replica.load, replica.loaded = record.state, record.load, record.loaded
        replica.memory = record.memory or replica.memory
        if not replica.idle:
            replica.busy_at = now
        self._learn(record.model, record.memory)
        if (host := self.hosts.get(record.instance)) is not None:
            host.count()

    def forget_group(self, name: str) -> None:
        replica = self._groups.pop(name, None)
        if replica is None:
            return
        del self._by_model[replica.model][name]
        if not self._by_model[replica.model]:
            del self._by_model[replica.model]
        if (host := self.hosts.get(replica.host)) is not None:
            host.replicas.pop(name, None)
            host.count()

    # --- what is asked of it ---------------------------------------------------------------------

    def get(self, group: str) -> Replica | None:
        return self._groups.get(group)

    def obeys(self, replica: Replica) -> bool:
        """Whether its host unloads it when it is told to."""
        host = self.hosts.get(replica.host)
        return host is not None and host.takes

    def of(self, model: str) -> Iterable[Replica]:
        """Every group of a model, whatever its state."""
        return self._by_model.get(model, {}).values()

    def loading(self, model: str) -> Iterable[str]:
        """Hosts that load it."""
        return self._loading.get(model, ())

    @property
    def models(self) -> Iterable[str]:
        """Every model that has a group."""
        return self._by_model

    def learn(self, model: str, size: int) -> bool:
        """A host without room has said what a group of the model takes at least; whether that is news."""
        news = self._least.get(model) != size
        self._least[model] = size
        return news

    def said(self, model: str, host: Host) -> HostModel | None:
        """What the host says of the model: by its name, or by that of its files."""
        return host.models.get(model) or host.models.get(self._sources.get(model, model))

    def size(self, model: str, host: Host) -> int:
        """Bytes that a group of the model takes on the host; 0: nobody knows."""
        if least := self._least.get(model):
            return least
        said = self.said(model, host)
        if said is not None and said.memory:
            return said.memory
        return self._sizes.get(model, 0) or (said.total if said is not None else 0)

    def estimates(self, model: str) -> Iterator[tuple[Host, int, float]]:
        """Each host that loads models, with the size and the seconds of a load of the model there."""
        source = self._sources.get(model, model)
        least, known = self._least.get(model, 0), self._sizes.get(model, 0)
        from_nothing = self._seconds_of(model, None, least or known)
        for host in self.hosts.values():
            if host.takes:
                said = host.models.get(model) or host.models.get(source)
                if said is None:
                    yield host, least or known, from_nothing
                else:
                    size = least or said.memory or known or said.total
                    yield host, size, self._seconds_of(model, said, size)

    def load_seconds(self, model: str, host: Host) -> float:
        """How long a load of the model is expected to take on the host."""
        return self._seconds_of(model, self.said(model, host), self.size(model, host))

    def _seconds_of(self, model: str, said: HostModel | None, size: int) -> float:
        if said is not None and said.state == "sleeping":
            return LOAD_BASE + size / SLEEP_BANDWIDTH
        if said is not None and said.state != "downloading" and said.load_seconds > 0:
            return said.load_seconds
        known = self._seconds.get(model, 0.0)
        from_disk = known or (LOAD_BASE + size / DISK_BANDWIDTH if size else UNKNOWN_LOAD)
        if said is not None and said.state == "stored":
            return from_disk
        if said is not None and said.state == "downloading" and said.total:
            return from_disk + max(0, said.total - said.done) / HUB_BANDWIDTH
        return from_disk + size / HUB_BANDWIDTH

    def _learn(self, model: str, size: int) -> None:
        if size > self._sizes.get(model, 0):
            self._sizes[model] = size

    def keep(self, sources: Mapping[str, str]) -> None:
        """The registry's models, and where their files come from. What was learned of any other is forgotten, but of
        those that have groups."""
        self._sources = dict(sources)
        kept = {*sources, *self._by_model}
        for learned in (self._sizes, self._least, self._seconds):
            for name in [name for name in learned if name not in kept]:
                del learned[name]
