"""Prometheus metrics of a host of models."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from services.executor.supervisor.host.memory import HostMemory
from services.executor.supervisor.metrics import metric


class HostMetrics(Collector):
    """Of an executor as a host of models."""

    def __init__(self, memory: HostMemory, groups: Callable[[], int]) -> None:
        self._memory = memory
        self._groups = groups
        self._loads = {"loaded": 0, "failed": 0}
        self._seconds = 0.0

    def loaded(self, seconds: float) -> None:
        """A model has been loaded, in so many seconds."""
        self._loads["loaded"] += 1
        self._seconds += seconds

    def failed(self) -> None:
        """A model could not be loaded, or has ended for good."""
        self._loads["failed"] += 1

    def collect(self) -> Iterable[Metric]:
        text = "Models that were loaded at run time, or could not be."
        loads = [((result,), count) for result, count in self._loads.items()]
        yield metric(CounterMetricFamily, "model_loads", text, ("result",), *loads)
        text = "Time from a model's load command, downloads excluded, to a ready group."
        took = ((), self._loads["loaded"], self._seconds)
        yield metric(SummaryMetricFamily, "model_load_seconds", text, (), took)
        for name, text, value in (
            ("groups", "Groups that the executor has.", self._groups()),
            ("models_sleeping", "Models whose weights are kept in the host's memory.", self._memory.sleepers),
            ("host_sleeping_bytes", "Memory of these weights.", self._memory.asleep),
            ("host_memory_bytes", "Memory limit of all groups together.", self._memory.total),
            (
                "host_memory_promised_bytes",
                "Memory reserved for groups: weights, and the limits of KV caches.",
                self._memory.used,
            ),
        ):
            yield metric(GaugeMetricFamily, name, text, (), ((), value))
