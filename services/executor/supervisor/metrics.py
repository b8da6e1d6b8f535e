"""Prometheus metrics of a group, read from the ring's board when they are scraped; how busy its GPUs are, their driver
says. So they cost the ring nothing, and are there when the leader is hung.
"""

import uuid as uuids
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from services.executor.ipc.board import Kind, RingBoard
from services.executor.kv_transfer.board import HandoverBoard
from shared.messages import RING_CAUSES
from shared.service.endpoints import MODEL, Alias, Aliases


class GpuUse(NamedTuple):
    """None: the driver does not say (parts of a partitioned GPU have no utilization of their own)."""

    utilization: float | None
    """Share of the last moment in which something was computed, 0 to 1."""
    memory_used: int | None
    """Bytes, other processes' included."""
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
        handle = self._handle(nvml, str(uuids.UUID(bytes=uuid)))
        if handle is None:
            return _UNKNOWN
        memory = _asked(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        rates = _asked(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        return GpuUse(
            None if rates is None else rates.gpu / 100,
            None if memory is None else int(memory.used),
            None if memory is None else int(memory.total),
        )

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

    @staticmethod
    def _handle(nvml: Any, uuid: str) -> Any:
        for name in (f"GPU-{uuid}", f"MIG-{uuid}"):
            handle = _asked(nvml, lambda name=name: nvml.nvmlDeviceGetHandleByUUID(name))
            if handle is not None:
                return handle
        return None


def _asked(nvml: Any, ask: Any) -> Any:
    try:
        return ask()
    except nvml.NVMLError:
        return None


_LABELS = ("group", "model")
_PREFIX = "ryzanstein_executor"

_HISTOGRAMS = {
    Kind.QUEUE: ("queue_seconds", "Time from acceptance by the group to admission to the batch."),
    Kind.PREFILL: ("prefill_seconds", "Time from admission to the batch to the first token."),
    Kind.DECODE: ("decode_seconds", "Time from the first token to the last, where there are several."),
    Kind.STEP: ("step_duration_seconds", "Time that a step takes."),
    Kind.BATCH: ("batch_size", "Sequences of a step."),
}


class Labels(NamedTuple):
    """On every metric of a group."""

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
        yield _counter(
            "ring_restarts", "Rings that were lost and started again.", labels, sum(self._deaths.values())
        )
        names = (*_LABELS, "cause")
        deaths = CounterMetricFamily(
            f"{_PREFIX}_ring_deaths", "Rings that were lost, by cause.", labels=names
        )
        for cause, count in self._deaths.items():
            deaths.add_metric((*labels, cause), count)
        yield deaths
        if board is None:
            return
        if kernels := self._kernels():
            info = GaugeMetricFamily(
                f"{_PREFIX}_kernels_info", "1, labelled with what computes.", labels=(*_LABELS, "kernels")
            )
            info.add_metric((*labels, kernels), 1)
            yield info
        yield from _gauges(board, labels)
        yield from _counters(board, labels)
        for kind, (name, text) in _HISTOGRAMS.items():
            buckets, total = board.histogram(kind)
            histogram = HistogramMetricFamily(f"{_PREFIX}_{name}", text, labels=_LABELS)
            histogram.add_metric(labels, buckets, total)
            yield histogram
        yield from self._gpu_use(board, labels)

    def _gpu_use(self, board: RingBoard, labels: Labels) -> Iterable[Metric]:
        """A sample per rank with a GPU of which the driver knows the figure."""
        names = (*_LABELS, "rank")
        utilization, used, total = (
            GaugeMetricFamily(f"{_PREFIX}_gpu_{name}", text, labels=names)
            for name, text in (
                ("utilization_ratio", "Share of time in which the rank's GPU was busy, 0 to 1."),
                ("memory_used_bytes", "Memory in use on the rank's GPU, other processes' included."),
                ("memory_bytes", "Memory of the rank's GPU."),
            )
        )
        for rank, uuid in board.gpus.items():
            use = self._gpus.read(uuid)
            for family, value in (
                (utilization, use.utilization),
                (used, use.memory_used),
                (total, use.memory_total),
            ):
                if value is not None:
                    family.add_metric((*labels, str(rank)), value)
        yield from (utilization, used, total)


def vllm_aliases(collector: RingCollector) -> Aliases:
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


def _gauges(board: RingBoard, labels: Labels) -> Iterable[Metric]:
    load = board.load
    used = 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
    gauges = {
        "running_sequences": ("Sequences in the batch.", load.running),
        "waiting_sequences": ("Accepted sequences that are not in the batch yet.", load.waiting),
        "waiting_tokens": ("Prompt tokens not computed yet.", load.waiting_tokens),
        "kv_blocks_free": ("KV blocks that are free or can be evicted.", load.free_blocks),
        "kv_blocks": ("KV blocks in all.", load.total_blocks),
        "kv_used_ratio": ("Share of the KV blocks that are in use, 0 to 1.", used),
        "slots": ("Largest number of sequences in the batch.", load.slots),
    }
    for name, (text, value) in gauges.items():
        gauge = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=_LABELS)
        gauge.add_metric(labels, value)
        yield gauge


def _counters(board: RingBoard, labels: Labels) -> Iterable[Metric]:
    totals = board.totals
    counters = {
        "steps": ("Steps computed.", totals.steps),
        "step_seconds": ("Time spent computing steps.", totals.step_seconds),
        "communication_seconds": (
            "Part of step_seconds that the leader spent in collectives, waiting for other ranks included.",
            totals.communication_seconds,
        ),
        "prompt_tokens": ("Prompt tokens computed.", totals.prompt_tokens),
        "output_tokens": ("Tokens generated.", totals.output_tokens),
        "prefix_queried_tokens": (
            "Prompt tokens looked up in the KV cache.",
            totals.queried_tokens,
        ),
        "cached_tokens": ("Prompt tokens found in the KV cache.", totals.cached_tokens),
        "preemptions": ("Preemptions: sequences that lost their KV blocks to others.", totals.preemptions),
        "drafted_tokens": ("Draft tokens that were verified.", totals.drafted_tokens),
        "accepted_tokens": ("Draft tokens that were accepted.", totals.accepted_tokens),
    }
    for name, (text, value) in counters.items():
        yield _counter(name, text, labels, value)


def _counter(name: str, text: str, labels: Labels, value: float) -> Metric:
    counter = CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=_LABELS)
    counter.add_metric(labels, value)
    return counter


class HandoverCollector(Collector):
    """Collects from the board of the ring that is up at the time."""

    def __init__(self, board: Callable[[], HandoverBoard | None], labels: Callable[[], Labels]) -> None:
        self._board = board
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        board = self._board()
        if board is None:
            return
        totals, labels = board.totals, self._labels()
        blocks = CounterMetricFamily(
            "ryzanstein_executor_handover_blocks",
            "KV blocks of sessions sent to another ring, received from one, or failed on their way.",
            labels=["direction", *Labels._fields],
        )
        for direction in ("sent", "received", "failed"):
            blocks.add_metric([direction, *labels], getattr(totals, direction))
        yield blocks
        seconds = SummaryMetricFamily(
            "ryzanstein_executor_handover_seconds",
            "Time of KV hand-overs, sent and received.",
            labels=Labels._fields,
        )
        seconds.add_metric(labels, totals.count, totals.seconds)
        yield seconds
