"""`python -m benchmarks.gateway.metrics_cost`: what the metrics cost where it counts: per token, per step, per scrape.

Nanoseconds of one thread, the best of several rounds; next to each, what prometheus_client's own histogram takes.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from services.executor.ipc.board import RingBoard
from services.executor.supervisor.metrics import Labels, RingCollector, vllm_aliases
from services.gateway.core import metrics as gateway
from shared.messages import GroupLoad
from shared.service.endpoints import LATENCY

ROUNDS = 7


def nanoseconds(work: Callable[[], object], times: int) -> float:
    """Of one call."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        for _ in range(times):
            work()
        best = min(best, (time.perf_counter_ns() - began) / times)
    return best


def per_token(times: int) -> dict[str, float]:
    """What a gateway does for each arrival of a stream's tokens."""
    theirs = Histogram("x_seconds", "x", ["model"], buckets=LATENCY, registry=None).labels("m")
    of_model = gateway.GatewayMetrics(CollectorRegistry()).of_model("m")
    clock = time.perf_counter
    return {
        "prometheus_client's observation": nanoseconds(lambda: theirs.observe(0.02), times),
        "the same with ours": nanoseconds(lambda: of_model.between_tokens.observe(0.02), times),
        "delivery: clock and observation": nanoseconds(
            lambda: of_model.delivery.observe(clock() - 1.0), times
        ),
    }


def per_step(times: int, directory: Path) -> dict[str, float]:
    """What a ring's leader does for each step, beside its other counters."""
    board = RingBoard(directory / "board", 2, create=True)
    return {"step time, batch size, totals": nanoseconds(lambda: board.add_step(8_000_000, 0, 64, 64), times)}


def per_scrape(directory: Path) -> dict[str, float]:
    board = RingBoard(directory / "board", 2, create=True)
    board.set_load(GroupLoad(total_blocks=10))
    ring = CollectorRegistry()
    collector = RingCollector(lambda: board, lambda: Labels("g", "m"))
    ring.register(collector)
    of_gateway = CollectorRegistry()
    metrics = gateway.GatewayMetrics(of_gateway)
    metrics.of_model("m").between_tokens.observe(0.01)
    plain = (
        nanoseconds(lambda: generate_latest(ring), 20),
        nanoseconds(lambda: generate_latest(of_gateway), 20),
    )
    ring.register(vllm_aliases(collector))
    of_gateway.register(gateway.vllm_aliases(metrics))
    return {
        "executor": plain[0],
        "executor, with vLLM's names": nanoseconds(lambda: generate_latest(ring), 20),
        "gateway": plain[1],
        "gateway, with vLLM's names": nanoseconds(lambda: generate_latest(of_gateway), 20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway.metrics_cost", description=__doc__)
    parser.add_argument("--times", type=int, default=100_000, help="calls of a round")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        _show("per arrival of a stream's tokens", per_token(given.times))
        _show("per step", per_step(given.times, Path(directory)))
        _show("per scrape", per_scrape(Path(directory)))


def _show(title: str, figures: dict[str, float]) -> None:
    print(title)
    for name, value in figures.items():
        print(f"  {name:40} {value:12,.0f} ns")


if __name__ == "__main__":
    main()
