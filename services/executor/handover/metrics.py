"""Prometheus metrics of hand-overs, read from the ring's board when they are scraped."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from services.executor.handover.board import HandoverBoard


class HandoverCollector(Collector):
    """Collects from the board of the ring that is up at the time."""

    def __init__(self, board: Callable[[], HandoverBoard | None]) -> None:
        self._board = board

    def collect(self) -> Iterable[Metric]:
        board = self._board()
        if board is None:
            return
        totals = board.totals
        blocks = CounterMetricFamily(
            "ryzanstein_executor_handover_blocks",
            "KV blocks of sessions sent to another ring, received from one, or failed on their way.",
            labels=["direction"],
        )
        for direction in ("sent", "received", "failed"):
            blocks.add_metric([direction], getattr(totals, direction))
        yield blocks
        yield SummaryMetricFamily(
            "ryzanstein_executor_handover_seconds",
            "Time that hand-overs have taken, given and taken.",
            count_value=totals.count,
            sum_value=totals.seconds,
        )
