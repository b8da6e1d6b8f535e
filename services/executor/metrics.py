"""Prometheus metrics of a group, read from the ring's board when they are scraped.

So they cost the ring nothing, and are there when the leader is hung.
"""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.executor.board import RingBoard


class RingCollector(Collector):
    """Collects from the board of the ring that is up at the time; none: only the restarts."""

    def __init__(self, board: Callable[[], RingBoard | None]) -> None:
        self._board = board
        self.restarts = 0

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "ryzanstein_executor_ring_restarts", "Rings that were lost and started again.", self.restarts
        )
        board = self._board()
        if board is None:
            return
        load, totals = board.load, board.totals
        gauges = {
            "running_sequences": ("Sequences in the batch.", load.running),
            "waiting_sequences": ("Accepted sequences that are not in the batch yet.", load.waiting),
            "waiting_tokens": ("Prompt tokens not computed yet.", load.waiting_tokens),
            "kv_blocks_free": ("KV blocks that can be had at once.", load.free_blocks),
            "kv_blocks": ("KV blocks in all.", load.total_blocks),
        }
        for name, (text, gauge) in gauges.items():
            yield GaugeMetricFamily(f"ryzanstein_executor_{name}", text, gauge)
        counters = {
            "steps": ("Steps computed.", totals.steps),
            "step_seconds": ("Time spent computing steps.", totals.step_seconds),
            "prompt_tokens": ("Prompt tokens computed.", totals.prompt_tokens),
            "output_tokens": ("Tokens generated.", totals.output_tokens),
            "cached_tokens": ("Prompt tokens found in the KV cache.", totals.cached_tokens),
            "preemptions": ("Sequences that gave up their blocks for others.", totals.preemptions),
            "drafted_tokens": ("Tokens that were computed ahead as drafts.", totals.drafted_tokens),
            "accepted_tokens": ("Drafts that were what was generated.", totals.accepted_tokens),
        }
        for name, (text, counter) in counters.items():
            yield CounterMetricFamily(f"ryzanstein_executor_{name}", text, counter)
