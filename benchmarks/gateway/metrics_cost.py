"""`python -m benchmarks.gateway.metrics_cost`: what the metrics cost where it counts: per token, per step, per scrape.

Nanoseconds of one thread, the best of several rounds; next to each, what prometheus_client's own histogram takes.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from benchmarks.harness import Sheet, in_turns, run, show, timed
from services.executor.ipc.board import RingBoard
from services.executor.supervisor.metrics import Labels, RingCollector, vllm_aliases
from services.gateway.core import metrics as gateway
from shared.messages import GroupLoad
from shared.service.endpoints import LATENCY

ROUNDS = 7


def nanoseconds(work: Callable[[], object], times: int) -> float:
    """Of one call, the best of some rounds."""
    return min(in_turns({"": timed(work, times)}, ROUNDS)[""]) / times * 1e9


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


def main(times: Annotated[int, typer.Option(help="Calls of a round.", min=1)] = 100_000) -> None:
    """What the metrics cost: per token, per step, per scrape."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        found = {
            "per arrival of a stream's tokens": per_token(times),
            "per step": per_step(times, directory),
            "per scrape": per_scrape(directory),
        }
    show(
        *(
            Sheet((what, "ns"), [(name, f"{ns:,.0f}") for name, ns in each.items()])
            for what, each in found.items()
        )
    )


if __name__ == "__main__":
    run(main)
