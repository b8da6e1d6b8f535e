"""Every metric of every service: read from the services' own registries, which need no broker for it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import trustme
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.board import RingBoard
from services.executor.ipc.flight_recorder import FlightRecorder
from services.executor.kv_transfer.board import HandoverBoard
from services.executor.supervisor.service import ExecutorService
from services.gateway.batches.dependencies import BatchMetrics
from services.gateway.core.settings import GatewaySettings
from services.gateway.server.certificates import CertificateExpiry
from services.gateway.service import GatewayService
from services.gateway.training.runner import FineTuningMetrics
from services.health_monitor.service import HealthMonitorService, HealthMonitorSettings
from services.scheduler.service import SchedulerService
from services.scheduler.settings import SchedulerSettings
from services.scheduler.training.jobs import job_count
from shared.service.endpoints import Aliases, SpanCollector
from shared.service.lifecycle import Service

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}


class Entry(NamedTuple):
    """A metric as Prometheus shows it."""

    name: str  # of a counter with `_total`
    type: str
    labels: tuple[str, ...]
    meaning: str
    alias_of: str = ""

    @property
    def series(self) -> tuple[str, ...]:
        """Names of its series."""
        if self.type == "counter":
            return (self.name,)
        return tuple(self.name + suffix for suffix in SUFFIXES.get(self.type, ("",)))


def catalogue() -> dict[str, list[Entry]]:
    """Entries by service, in order of their names; those of all services under ""."""
    with tempfile.TemporaryDirectory() as directory:
        found = {service.name: list(_entries(service)) for service in _services(Path(directory))}
    everywhere = {entry.name for entry in set.intersection(*(set(entries) for entries in found.values()))}
    common = [entry for entry in next(iter(found.values())) if entry.name in everywhere]
    return {
        "": _sorted(common),
        **{
            name: _sorted([entry for entry in entries if entry.name not in everywhere])
            for name, entries in found.items()
        },
    }


def series() -> set[str]:
    """Names of all series that there can be."""
    return {name for entries in catalogue().values() for entry in entries for name in entry.series}


def _sorted(entries: list[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (entry.name.startswith("vllm:"), entry.name))


def _services(directory: Path) -> Iterator[Service]:
    """The four, as they are once they have begun."""
    gateway = GatewayService(GatewaySettings(instance="x"))
    BatchMetrics(gateway.registry)
    FineTuningMetrics(gateway.registry)
    trustme.CA().cert_pem.write_to_path(directory / "certificate")
    CertificateExpiry(gateway.registry, str(directory / "certificate"))
    executor = ExecutorService(ExecutorSettings(instance="x", engine="stub"))
    board = RingBoard(directory / "board", 1, create=True)
    [group] = executor._host.groups.values()
    group._ring = SimpleNamespace(  # type: ignore[assignment]
        board=board,
        flight=FlightRecorder.beside(directory / "board", 1, create=True),
        handover=HandoverBoard(HandoverBoard.path(directory / "board"), 1, create=True),
        ready=SimpleNamespace(is_set=lambda: True),
        kernels="native avx2",
    )
    scheduler = SchedulerService(SchedulerSettings(instance="x"))
    job_count(scheduler.registry)
    for service in (gateway, scheduler, HealthMonitorService(HealthMonitorSettings(instance="x")), executor):
        service.registry.register(SpanCollector())
        yield service


def _entries(service: Service) -> Iterator[Entry]:
    for collector in list(service.registry._collector_to_names):
        for metric in _described(collector):
            name = metric.name + ("_total" if metric.type == "counter" else "")
            labels = _labels(collector, metric)
            yield Entry(name, metric.type, labels, metric.documentation, _source(collector, metric))


def _source(collector: Collector, metric: Metric) -> str:
    """Which metric an alias is another name of."""
    if not isinstance(collector, Aliases):
        return ""
    (family,) = [alias.family for alias in collector.aliases if alias.name == metric.name]
    return family + ("_total" if metric.type == "counter" else "")


def _described(collector: Collector) -> list[Metric]:
    return list(collector.collect())


def _labels(collector: Any, metric: Metric) -> tuple[str, ...]:
    if isinstance(collector, Aliases):
        (alias,) = [alias for alias in collector.aliases if alias.name == metric.name]
        (source,) = [one for one in alias.source.collect() if one.name == alias.family]
        return tuple(alias.labels.get(label, label) for label in _labels(alias.source, source))
    return tuple(getattr(metric, "_labelnames", None) or getattr(collector, "_labelnames", ()))
