"""What is known of hosts and their groups, brought up to date record by record. Pure: times are unix seconds.

memory of a host    |  used, by its own beat, or what its groups take  |  promised to loads it has not shown |  free  |
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from shared.messages import GroupLoad, GroupRecord, GroupStatus, HostBeat, HostModel, HostRecord
from shared.messages.registry import MAX_MODELS

SLEEP_BANDWIDTH = 8e9
DISK_BANDWIDTH = 1.5e9
# Bytes per second at which weights are reckoned to be read where nothing was measured: from a host's memory to its
# GPUs, from its disk, from a model hub.
HUB_BANDWIDTH = 1e8
LOAD_BASE = 1.0  # seconds of a load beside its bytes
UNKNOWN_LOAD = 30.0  # seconds of a load of which no size is known
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
    seen_at: float  # since when it is known
    ready_at: float = 0.0  # since when it serves; 0: it does not
    busy_at: float = 0.0  # when something was last seen to run in it; 0: never

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

    @property
    def inside(self) -> int:
        """Requests that it has."""
        return self.load.running + self.load.waiting


@dataclass(slots=True, eq=False)
class ModelReplicas:
    """All groups of one model, and what every pass asks of them."""

    groups: dict[str, Replica] = field(default_factory=dict)
    staying: int = 0  # those that do not drain
    inside: int = 0  # requests that these have
    slots: int = 0  # places of the largest

    def count(self, replica: Replica, sign: int) -> None:
        """Adds it (1), or takes it out as it was when it was added (-1)."""
        if not replica.draining:
            self.staying += sign
            self.inside += sign * replica.inside

    def remove(self, replica: Replica) -> None:
        self.count(replica, -1)
        del self.groups[replica.group]
        self.measure()

    def measure(self) -> None:
        self.slots = max((replica.load.slots for replica in self.groups.values()), default=0)


@dataclass(slots=True, eq=False)
class Host:
    """A host that has been heard of."""

    name: str
    number: int  # in the order in which they were heard of
    index: "FreeMemory"
    memory: int = 0
    used_by_beat: int = 0
    devices: int = 0
    takes: bool = False  # whether it loads models when it is told to
    models: dict[str, HostModel] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)
    # Bytes by group, of loads that are decided and that the host does not show yet.
    promised: dict[str, int] = field(default_factory=dict)
    free: int = 0  # bytes that are neither taken nor promised; below 0 where more is promised than there is
    # Bytes of groups that serve and in which nothing runs: no more than these can be given up at once.
    idle: int = 0
    gone: bool = False
    is_ready: bool = False
    said: HostBeat = field(default_factory=HostBeat)  # in its last heartbeat
    job_memory: int = 0  # bytes of the jobs that it has. Models that are loaded are given their memory

    def count(self) -> None:
        """Brings `free` and `idle` up to date."""
        taken = idle = 0
        for replica in self.replicas.values():
            taken += replica.memory
            if replica.idle and replica.ready:
                idle += replica.memory
        free = self.memory - max(self.used_by_beat, taken) - sum(self.promised.values())
        self.index.grown = self.index.grown or free > self.free or idle > self.idle
        self.idle, self.free = idle, free
        self.index.moved(self)

    @property
    def room_for_jobs(self) -> int:
        """Bytes that neither groups nor jobs have."""
        return self.free - self.job_memory

    @property
    def is_busy(self) -> bool:
        """Whether requests are in one of its groups."""
        return any(not replica.idle for replica in self.replicas.values())

    @property
    def share_free(self) -> float:
        return self.free / max(1, self.memory)

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


NO_REPLICAS = ModelReplicas()


class FreeMemory:
    """Hosts that load models, the one with the largest share of its memory free first; equals as they were heard of."""

    def __init__(self) -> None:
        self._order: list[tuple[float, int, Host]] = []
        self._keys: dict[int, float] = {}
        # Whether some host has more memory to give than it had, until somebody has set it back.
        self.grown = False

    def __iter__(self) -> Iterator[Host]:
        for _, _, host in self._order:
            yield host

    def moved(self, host: Host) -> None:
        """What the host has free is different now, or whether it takes models, or it is gone."""
        known = self._keys.get(host.number)
        key = -host.share_free if host.takes and not host.gone else None
        if known == key:
            return
        if known is not None:
            del self._order[bisect_left(self._order, (known, host.number))]
            del self._keys[host.number]
        if key is not None:
            insort(self._order, (key, host.number, host))
            self._keys[host.number] = key


class ClusterView:
    """All hosts and groups. What a change costs grows with the groups of one host at most."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        # Bytes for models, by host, of those that took models and are gone; until their records are.
        self.lost: dict[str, int] = {}
        self.free = FreeMemory()
        # Models whose groups have come, gone or changed their state, or that hosts load now or no more, until somebody
        # has cleared it.
        self.changed: set[str] = set()
        self._numbers = 0
        self._groups: dict[str, Replica] = {}
        self._by_model: dict[str, ModelReplicas] = {}
        # Hosts that say something of each model, by their numbers.
        self._told_by: dict[str, dict[int, Host]] = {}
        self._sizes: dict[str, int] = {}  # the most that a group of each model is known to take
        self._least: dict[str, int] = {}  # what hosts that had no room have said that it takes at least
        self._sources: dict[str, str] = {}
        self._seconds: dict[str, float] = {}  # what a load of each model has taken last, anywhere
        self._loading: dict[str, set[str]] = {}  # hosts that say that they load each model
        # By model and host: what could not be loaded, until somebody has taken it out.
        self.failed: dict[tuple[str, str], HostModel] = {}

    # --- what the health monitor writes ----------------------------------------------------------

    def host(self, record: HostRecord) -> None:
        """Takes in what a host is; one that is gone is forgotten."""
        if record.state == GONE:
            self.forget_host(record.instance)
            if record.host.takes_models:
                self.lost[record.instance] = record.host.memory
            return
        self.lost.pop(record.instance, None)
        host = self.hosts.get(record.instance)
        if host is None:
            self._numbers += 1
            host = self.hosts[record.instance] = Host(record.instance, self._numbers, self.free)
            for replica in self._groups.values():
                if replica.host == host.name:
                    host.replicas[replica.group] = replica
        said = host.said = record.host
        host.is_ready = record.state == "ready"
        host.memory, host.used_by_beat, host.devices = said.memory, said.used, said.devices
        host.takes = said.takes_models and host.is_ready
        host.job_memory = sum(one.memory for told in said.jobs.values() for one in told.jobs)
        self._forget_loading(host)
        self._hear(host, {item.model: item for item in said.models[:MAX_MODELS]})
        for item in host.models.values():
            self._learn(item.model, item.memory)
            if item.load_seconds > 0:
                self._seconds[item.model] = item.load_seconds
            if item.state == "loading":
                self._loading.setdefault(item.model, set()).add(host.name)
                self.changed.add(item.model)
            if item.state == "failed":
                self.failed[item.model, host.name] = item
        host.count()

    def forget_host(self, name: str) -> None:
        """Its record is gone."""
        self.lost.pop(name, None)
        host = self.hosts.pop(name, None)
        if host is not None:
            self._forget_loading(host)
            for item in host.models.values():
                self.failed.pop((item.model, name), None)
            self._hear(host, {})
            host.gone = True
            self.free.moved(host)

    def _hear(self, host: Host, models: dict[str, HostModel]) -> None:
        """It speaks of these models now, and of no others."""
        for model in host.models.keys() - models.keys():
            told_by = self._told_by[model]
            del told_by[host.number]
            if not told_by:
                del self._told_by[model]
        for model in models.keys() - host.models.keys():
            self._told_by.setdefault(model, {})[host.number] = host
        host.models = models

    def _forget_loading(self, host: Host) -> None:
        for item in host.models.values():
            if item.state == "loading":
                self.changed.add(item.model)
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
            replica = self._new(record, now)
            before = None
        else:
            before = replica.state, replica.memory, replica.idle
        replicas, slots = self._by_model[record.model], replica.load.slots
        replicas.count(replica, -1)
        self._update(replica, record, now)
        replicas.count(replica, 1)
        if before is None or slots != record.load.slots:
            replicas.measure()
        self._learn(record.model, record.memory)
        if before == (replica.state, replica.memory, replica.idle):
            return
        if before is None or before[0] != replica.state:
            self.changed.add(record.model)
        if (host := self.hosts.get(record.instance)) is not None:
            host.count()

    def _new(self, record: GroupRecord, now: float) -> Replica:
        name, model, host = record.group, record.model, record.instance
        replica = Replica(name, model, host, record.state, record.load, record.memory, 0.0, now)
        self._groups[name] = replica
        replicas = self._by_model.setdefault(model, ModelReplicas())
        replicas.groups[name] = replica
        replicas.count(replica, 1)
        if (there := self.hosts.get(host)) is not None:
            there.replicas[name] = replica
        return replica

    @staticmethod
    def _update(replica: Replica, record: GroupRecord, now: float) -> None:
        if record.state in READY:
            replica.ready_at = replica.ready_at or now
        else:
            replica.ready_at = 0.0
        replica.state, replica.load, replica.loaded = record.state, record.load, record.loaded
        replica.memory = record.memory or replica.memory
        if not replica.idle:
            replica.busy_at = now

    def forget_group(self, name: str) -> None:
        replica = self._groups.pop(name, None)
        if replica is None:
            return
        replicas = self._by_model[replica.model]
        replicas.remove(replica)
        if not replicas.groups:
            del self._by_model[replica.model]
        self.changed.add(replica.model)
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
        return self.replicas(model).groups.values()

    def replicas(self, model: str) -> ModelReplicas:
        return self._by_model.get(model, NO_REPLICAS)

    def loading(self, model: str) -> Collection[str]:
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

    def reported(self, model: str, host: Host) -> HostModel | None:
        """What the host says of the model: by its name, or by that of its files."""
        return host.models.get(model) or host.models.get(self._sources.get(model, model))

    def size(self, model: str, host: Host) -> int:
        """Bytes that a group of the model takes on the host; 0: nobody knows."""
        if least := self._least.get(model):
            return least
        said = self.reported(model, host)
        if said is not None and said.memory:
            return said.memory
        return self._sizes.get(model, 0) or (said.total if said is not None else 0)

    def fits_lost(self, model: str) -> str:
        """A host that is gone, and has memory for a group of the model; empty: none."""
        size = self._least.get(model) or self._sizes.get(model, 0)
        return next((name for name, memory in self.lost.items() if memory >= size), "")

    def knowing(self, model: str) -> dict[int, Host]:
        """Hosts that say something of the model, by its name or by that of its files, by their numbers."""
        named = self._told_by.get(model, {})
        source = self._sources.get(model, model)
        return named if source == model else {**named, **self._told_by.get(source, {})}

    def elsewhere(self, model: str) -> tuple[int, float]:
        """Bytes that a group of the model takes, and seconds of its load, on a host that says nothing of it."""
        size = self._least.get(model) or self._sizes.get(model, 0)
        return size, self._seconds_of(model, None, size)

    def load_seconds(self, model: str, host: Host) -> float:
        """How long a load of the model is expected to take on the host."""
        return self._seconds_of(model, self.reported(model, host), self.size(model, host))

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
