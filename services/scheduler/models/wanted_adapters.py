"""Which LoRA adapters a host is to read next, and which hosts may have the base to check them against. Pure.

    declared ──▶ wanted ──▶ hosts that serve its base, have its files, or might ──read──▶ registered
                   ▲             └── none has the files: one is told to fetch them ──┐
                   └───────── later; after an error later each time ─────────────────┘

Times are unix seconds.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from services.scheduler.models.cluster import ClusterView
from shared.messages import ModelSpec
from shared.messages.registry import AdapterRecord, WantedAdapter
from shared.nats.adapters import same_wanted

AT_ONCE = 4  # adapters that are read at a time
TRIED = 8  # hosts that are asked for one adapter
LATER = 2.0  # seconds until an adapter is looked at again of whose base no host has the files
# Seconds until one is read again that could not be read; twice as long after each further time.
FIRST_PAUSE, LONGEST_PAUSE = 15.0, 600.0


class AdapterRead(NamedTuple):
    """An adapter that is to be read now."""

    name: str
    wanted: WantedAdapter
    base: ModelSpec
    hosts: list[str]  # that are asked, one after the other, until one has the files of the base
    # The host that fetches those where none has them; empty: they are on their way, or nobody could.
    fetch: str


class _Pause(NamedTuple):
    wanted: WantedAdapter
    until: float
    failures: int


class WantedAdapters:
    """What is wanted, what is under way, and what has to wait."""

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        # Those that were tried last stand last: they have no turn before the others had theirs.
        self._wanted: dict[str, WantedAdapter] = {}
        self._under_way: set[str] = set()
        self._pauses: dict[str, _Pause] = {}

    def __len__(self) -> int:
        return len(self._wanted)

    def note(self, name: str, record: AdapterRecord | None) -> None:
        """The registry has this of it; None: nothing any more."""
        wanted = None if record is None else record.wanted
        if wanted is None:
            self._wanted.pop(name, None)
            self._pauses.pop(name, None)
            return
        pause = self._pauses.get(name)
        if pause is not None and not same_wanted(pause.wanted, wanted):  # ordered anew
            del self._pauses[name]
        self._wanted[name] = wanted

    def due(self, specs: Mapping[str, ModelSpec], now: float) -> list[AdapterRead]:
        """What is to be read now; each has to be `ended`."""
        found: list[AdapterRead] = []
        for name, wanted in self._wanted.items():
            if len(self._under_way) >= AT_ONCE:
                break
            pause = self._pauses.get(name)
            if name in self._under_way or (pause is not None and now < pause.until):
                continue
            if hosts := list(dict.fromkeys(self._hosts(wanted.model)))[:TRIED]:
                base = specs.get(wanted.model) or ModelSpec(wanted.model, "")
                found.append(AdapterRead(name, wanted, base, hosts, self._fetcher(base)))
                self._under_way.add(name)
        return found

    def ended(self, reading: AdapterRead, now: float, *, failed: bool) -> None:
        """It was read, or no host has its base yet; `failed`: a host could not read it. What is wanted still is read
        again, later."""
        self._under_way.discard(reading.name)
        if not same_wanted(self._wanted.get(reading.name), reading.wanted):
            return
        self._wanted[reading.name] = self._wanted.pop(reading.name)
        before = self._pauses.get(reading.name)
        failures = (before.failures if before is not None else 0) + failed
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (failures - 1)) if failed else LATER
        self._pauses[reading.name] = _Pause(reading.wanted, now + pause, failures)

    def _hosts(self, model: str) -> Iterator[str]:
        """Those that serve it, those that have its files, and those that might, as a directory of theirs."""
        cluster = self._cluster
        yield from sorted(replica.host for replica in cluster.of(model) if replica.ready and replica.host)
        taking = sorted(host.name for host in cluster.hosts.values() if host.takes)
        yield from (name for name in taking if self._has_files(model, name))
        yield from taking

    def _has_files(self, model: str, host: str) -> bool:
        said = self._cluster.reported(model, self._cluster.hosts[host])
        return said is not None and said.state in ("stored", "sleeping")

    def _fetcher(self, base: ModelSpec) -> str:
        cluster = self._cluster
        coming = base.least or any(True for _ in cluster.of(base.name)) or any(cluster.loading(base.name))
        if coming or not base.source or self._is_fetched(base.name):
            return ""
        able = [host for host in cluster.hosts.values() if host.takes and (base.name, host.name) not in cluster.failed]
        return max(able, key=lambda host: (host.free, host.name)).name if able else ""

    def _is_fetched(self, model: str) -> bool:
        said = (self._cluster.reported(model, host) for host in self._cluster.hosts.values())
        return any(one is not None and one.state == "downloading" for one in said)
