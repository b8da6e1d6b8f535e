"""Prometheus metrics of a group, read from the ring's board when they are scraped; how busy its GPUs are, their driver
says. So they cost the ring nothing, and are there when the leader is hung.
"""

import uuid as uuids
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from services.executor.ipc.board import HISTOGRAMS, TOTALS, RingBoard
from services.executor.kv_transfer.board import HandoverBoard
from shared.messages import RING_CAUSES
from shared.service.endpoints import MODEL, Alias, Aliases


class GpuUse(NamedTuple):
    """None: the driver does not say (parts of a partitioned GPU have no utilization of their own)."""

    utilization: float | None  # share of the last moment in which something was computed, 0 to 1
    memory_used: int | None  # bytes, other processes' included
    memory_total: int | None


_UNKNOWN = GpuUse(None, None, None)


class GpuReader:
    """Asks NVIDIA's driver. Without the driver, or without nvidia-ml-py, nothing is known of any GPU."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._tried = False

    def read(self, uuid: bytes) -> GpuUse:
        """`uuid`: the 16 bytes that CUDA tells of a device."""
        nvml = self._library()
        if nvml is None:
            return _UNKNOWN

        def query(what: str, of: Any) -> Any:
            try:
                return getattr(nvml, f"nvmlDeviceGet{what}")(of)
            except nvml.NVMLError:
                return None

        names = (f"{kind}-{uuids.UUID(bytes=uuid)}" for kind in ("GPU", "MIG"))
        handles = (query("HandleByUUID", name) for name in names)
        if (handle := next((one for one in handles if one is not None), None)) is None:
            return _UNKNOWN
        memory, rates = query("MemoryInfo", handle), query("UtilizationRates", handle)
        return GpuUse(
            None if rates is None else rates.gpu / 100,
            None if memory is None else int(memory.used),
            None if memory is None else int(memory.total),
        )

    def visible(self, names: str | None) -> list[tuple[str, int]]:
        """(name, bytes of memory) of the GPUs that CUDA shows where CUDA_VISIBLE_DEVICES is `names`."""
        nvml = self._library()
        if nvml is None:
            return []
        found = []
        try:
            wanted = map(str, range(nvml.nvmlDeviceGetCount())) if names is None else names.split(",")
            for name in map(str.strip, wanted):
                by_index = name.isascii() and name.isdecimal()
                of = int(name) if by_index else name
                get = nvml.nvmlDeviceGetHandleByIndex if by_index else nvml.nvmlDeviceGetHandleByUUID
                found.append((name, int(nvml.nvmlDeviceGetMemoryInfo(get(of)).total)))
        except nvml.NVMLError:  # CUDA, too, shows those before the first that is not there
            pass
        return found

    def _library(self) -> Any:
        if not self._tried:
            self._tried = True
            try:
                import pynvml

                pynvml.nvmlInit()
            except Exception:  # no package, no driver, one that does not answer: there is nothing to show
                return None
            self._nvml = pynvml
        return self._nvml


_LABELS = ("group", "model")
_PREFIX = "ryzanstein_executor"


class Labels(NamedTuple):
    group: str
    model: str


class RingCollector(Collector):
    """Collects from the board of the ring that is up at the time; none: only the restarts."""

    def __init__(
        self,
        board: Callable[[], RingBoard | None],
        labels: Callable[[], Labels],
        gpus: GpuReader | None = None,
        kernels: Callable[[], str] = str,
    ) -> None:
        """`kernels`: what the ring computes with; empty: not known yet."""
        self._board = board
        self._kernels = kernels
        self._labels = labels
        self._gpus = gpus or GpuReader()
        self._deaths = dict.fromkeys(RING_CAUSES, 0)

    def count_death(self, cause: str) -> None:
        """A ring was lost by `cause`."""
        self._deaths[cause] += 1

    def collect(self) -> Iterable[Metric]:
        labels, board = self._labels(), self._board()
        restarts = (labels, sum(self._deaths.values()))
        yield metric(CounterMetricFamily, "ring_restarts", "Rings that were lost and started again.", _LABELS, restarts)
        deaths = [((*labels, cause), count) for cause, count in self._deaths.items()]
        names = (*_LABELS, "cause")
        yield metric(CounterMetricFamily, "ring_deaths", "Rings that were lost, by cause.", names, *deaths)
        if board is None:
            return
        if kernels := self._kernels():
            info, names = ((*labels, kernels), 1), (*_LABELS, "kernels")
            yield metric(GaugeMetricFamily, "kernels_info", "1, labelled with the compute backend.", names, info)
        for name, (text, value) in _gauges(board).items():
            yield metric(GaugeMetricFamily, name, text, _LABELS, (labels, value))
        for name, text in TOTALS.items():
            value = getattr(board.totals, name)
            yield metric(CounterMetricFamily, name, text, _LABELS, (labels, value))
        for kind, (name, text) in HISTOGRAMS.items():
            yield metric(HistogramMetricFamily, name, text, _LABELS, (labels, *board.histogram(kind)))
        yield from self._gpu_use(board, labels)

    def _gpu_use(self, board: RingBoard, labels: Labels) -> Iterable[Metric]:
        """A sample per rank with a GPU of which the driver knows the figure."""
        uses = [((*labels, str(rank)), self._gpus.read(uuid)) for rank, uuid in board.gpus.items()]
        for name, field, text in (
            ("utilization_ratio", "utilization", "Share of time in which the rank's GPU was busy, 0 to 1."),
            ("memory_used_bytes", "memory_used", "Memory in use on the rank's GPU, other processes' included."),
            ("memory_bytes", "memory_total", "Memory of the rank's GPU."),
        ):
            known = [(of, value) for of, use in uses if (value := getattr(use, field)) is not None]
            yield metric(GaugeMetricFamily, f"gpu_{name}", text, (*_LABELS, "rank"), *known)


class MergedCollector(Collector):
    """Several groups' metrics as one: a family of which each has samples is exposed once."""

    def __init__(self, collectors: Callable[[], Iterable[Collector]]) -> None:
        self._collectors = collectors

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for collector in self._collectors():
            for family in collector.collect():
                if (first := families.setdefault(family.name, family)) is not family:
                    first.samples.extend(family.samples)
        return families.values()


def metric(kind: Any, name: str, text: str, labels: Sequence[str], *samples: tuple[Any, ...]) -> Metric:
    """An executor's family of this `kind`; `samples`: the labels' values, and what the family takes beside them."""
    family: Metric = kind(f"{_PREFIX}_{name}", text, labels=labels)
    for values in samples:
        family.add_metric(*values)  # type: ignore[attr-defined]
    return family


def vllm_aliases(collector: Collector) -> Aliases:
    """What autoscalers and dashboards made for vLLM ask an engine for."""
    ours = {
        "num_requests_running": "running_sequences",
        "num_requests_waiting": "waiting_sequences",
        "kv_cache_usage_perc": "kv_used_ratio",
        "gpu_cache_usage_perc": "kv_used_ratio",  # until vLLM 0.10
        "num_preemptions": "preemptions",
        "prefix_cache_queries": "prefix_queried_tokens",
        "prefix_cache_hits": "cached_tokens",
        "request_queue_time_seconds": "queue_seconds",
        "request_prefill_time_seconds": "prefill_seconds",
        "request_decode_time_seconds": "decode_seconds",
    }
    return Aliases(Alias(f"vllm:{name}", collector, f"{_PREFIX}_{of}", MODEL) for name, of in ours.items())


def _gauges(board: RingBoard) -> dict[str, tuple[str, float]]:
    """(help, value) by name."""
    load = board.load
    used = 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
    return {
        "running_sequences": ("Sequences in the batch.", load.running),
        "waiting_sequences": ("Accepted sequences that are not in the batch yet.", load.waiting),
        "waiting_tokens": ("Prompt tokens not computed yet.", load.waiting_tokens),
        "kv_blocks_free": ("KV blocks that are free or can be evicted.", load.free_blocks),
        "kv_blocks": ("KV blocks in all.", load.total_blocks),
        "kv_used_ratio": ("Share of the KV blocks that are in use, 0 to 1.", used),
        "slots": ("Largest number of sequences in the batch.", load.slots),
        "adapters_in_memory": (
            "LoRA adapters in the memory of the ranks.",
            board.totals.adapter_loads - board.totals.adapter_evictions,
        ),
    }


class HandoverCollector(Collector):
    def __init__(self, board: Callable[[], HandoverBoard | None], labels: Callable[[], Labels]) -> None:
        self._board = board
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        board = self._board()
        if board is None:
            return
        totals, labels = board.totals, self._labels()
        sent = [((way, *labels), getattr(totals, way)) for way in ("sent", "received", "failed")]
        text = "KV blocks of sessions sent to another ring, received from one, or failed on their way."
        yield metric(CounterMetricFamily, "handover_blocks", text, ("direction", *_LABELS), *sent)
        text, took = "Time of KV hand-overs, sent and received.", (labels, totals.count, totals.seconds)
        yield metric(SummaryMetricFamily, "handover_seconds", text, _LABELS, took)
