"""Prometheus metrics of hand-overs, read from the ring's board when they are scraped."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from services.executor.handover.board import HandoverBoard
from services.executor.metrics import Labels


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
