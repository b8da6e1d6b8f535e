"""Prometheus metrics of the fine-tuning jobs that a host trains."""

from collections.abc import Callable, Iterable
from typing import Literal, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.executor.supervisor.metrics import metric

Result = Literal["finished", "paused", "cancelled", "failed", "crashed", "given_back", "left", "not_mine"]


class TrainingCounts(Collector):
    def __init__(
        self,
        running: Callable[[], int],
        suspended: Callable[[], float] = lambda: 0.0,
        stalled: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`suspended`: seconds for which those that are suspended have been, together; `stalled`: for which the one
        has made no step that has made none for longest."""
        self._running = running
        self._suspended = suspended
        self._stalled = stalled
        self._ends = dict.fromkeys(get_args(Result), 0)
        self._steps = self._tokens = 0
        self._yields = 0.0

    def stepped(self, tokens: int) -> None:
        """An optimizer step is done, after so many tokens."""
        self._steps += 1
        self._tokens += tokens

    def yielded(self, seconds: float) -> None:
        """A trainer was suspended for so long."""
        self._yields += seconds

    def ended(self, result: str) -> None:
        self._ends[result] += 1

    def collect(self) -> Iterable[Metric]:
        text = "Fine-tuning jobs that the executor has."
        yield metric(GaugeMetricFamily, "trainings", text, (), ((), self._running()))
        text = "Longest time that a running fine-tuning job has made no step, suspended time excluded."
        yield metric(GaugeMetricFamily, "training_stalled_seconds", text, (), ((), self._stalled()))
        text = "Fine-tuning jobs that have left the executor, by outcome."
        ends = [((result,), count) for result, count in self._ends.items()]
        yield metric(CounterMetricFamily, "training_ends", text, ("result",), *ends)
        for name, text, value in (
            ("training_steps", "Optimizer steps of fine-tuning jobs.", self._steps),
            ("training_tokens", "Tokens that these were computed from.", self._tokens),
            (
                "training_yield_seconds",
                "Time that trainers were suspended for interactive requests.",
                self._yields + self._suspended(),
            ),
        ):
            yield metric(CounterMetricFamily, name, text, (), ((), value))
