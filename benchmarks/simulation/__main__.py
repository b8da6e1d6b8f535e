"""Placement at the scale of a large cluster, in virtual time: `python -m benchmarks.simulation --help`.

The scheduler's own classes (table, placement, fair queue, breaker, batcher) place the requests of a million
sessions on a thousand rings that compute, report late and fail.

Imbalance: the coefficient of variation (standard deviation / mean), over all groups, of the mean number of
sequences that a group has within a window of 10 s; the mean over all windows after the start. "At a moment" is
the same of the numbers at the windows' ends. Sticky hits: the share of later turns whose ring knew the session.
Decision: from a request's turn in the queue to its batch, in real time.
"""

import gc
import statistics
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from benchmarks.harness import JsonFile, Report, Seed, Sheet, about, nearest, publish, run
from benchmarks.simulation.virtual_cluster import Cluster, Scale


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds, shares from 0 to 1."""

    requests: int
    load: float
    imbalance: float
    imbalance_at_a_moment: float
    sticky_hits: float
    first_token_p50: float
    first_token_p99: float
    decision_p50: float
    decision_p99: float
    failovers: int


class SimulationReport(Report, frozen=True, kw_only=True):
    seed: int
    scale: Scale
    result: Result


def simulate(scale: Scale, seed: int) -> Result:
    cluster = Cluster(scale, seed)
    gc.disable()  # a million sessions need not be looked through again and again
    try:
        measured = cluster.run()
    finally:
        gc.enable()
    decided = cluster.schedulers.decided
    first_token = measured.first_token
    return Result(
        requests=measured.ended,
        load=_mean(measured.occupied),
        imbalance=_mean(measured.windows),
        imbalance_at_a_moment=_mean(measured.moments),
        sticky_hits=measured.hits / max(1, measured.followed),
        first_token_p50=nearest(first_token, 0.5),
        first_token_p99=nearest(first_token, 0.99),
        decision_p50=nearest(decided, 0.5),
        decision_p99=nearest(decided, 0.99),
        failovers=measured.failovers,
    )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def parts(report: SimulationReport) -> list[Sheet | str]:
    rows = [
        (
            *(f"{one.load:.1%}", f"{one.imbalance:.2%}", f"{one.imbalance_at_a_moment:.1%}"),
            f"{one.sticky_hits:.2%}",
            f"{one.first_token_p50 * 1e3:.0f}/{one.first_token_p99 * 1e3:.0f}",
            f"{one.decision_p50 * 1e6:.0f}/{one.decision_p99 * 1e6:.0f}",
        )
        for one in [report.result]
    ]
    head = (*("load", "imbalance", "at a moment", "sticky hits"), *("first token p50/p99 ms", "decision p50/p99 us"))
    scale = report.scale
    said = (
        f"{scale.groups:,} groups of {scale.slots} places, {scale.sessions:,} sessions of {scale.tenants:,} tenants "
        f"(Zipf, exponent {scale.skew:g}), {report.result.requests:,} requests, {scale.schedulers} schedulers, "
        f"{scale.failures} failures, seed {report.seed}."
    )
    return [Sheet(head, rows), said]


def main(
    groups: Annotated[int, typer.Option(help="Rings.", min=1)] = 1000,
    sessions: Annotated[int, typer.Option(help="Sessions that come up in all.", min=1)] = 1_000_000,
    requests: Annotated[int, typer.Option(help="Requests in all; at least as many as sessions.", min=1)] = 2_000_000,
    slots: Annotated[int, typer.Option(help="Sequences that a ring computes at once.", min=1)] = 32,
    failures: Annotated[int, typer.Option(help="Rings that fail on the way.", min=0)] = 20,
    seed: Seed = 0,
    json: JsonFile = None,
) -> None:
    """Imbalance, sticky hits and decision times of placement."""
    if requests < sessions:
        raise typer.BadParameter(f"{requests} requests are fewer than {sessions} sessions; each needs one at least.")
    scale = Scale(groups=groups, sessions=sessions, requests=requests, slots=slots, failures=failures)
    report = SimulationReport(**about(), seed=seed, scale=scale, result=simulate(scale, seed))
    publish(report, *parts(report), json=json)


if __name__ == "__main__":
    run(main)
