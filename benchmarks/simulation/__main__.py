"""Placement at the scale of a large cluster, in virtual time: `python -m benchmarks.simulation --help`.

The scheduler's own classes (table, placement, fair queue, breaker, batcher) place the requests of a million
sessions on a thousand rings that compute, report late and fail; other policies get the very same work.

Imbalance: the coefficient of variation (standard deviation / mean), over all groups, of the mean number of
sequences that a group has within a window of 10 s; the mean over all windows after the start. "At a moment" is
the same of the numbers at the windows' ends. Sticky hits: the share of later turns whose ring knew the session.
Decision: from a request's turn in the queue to its batch, in real time.
"""

import gc
import statistics
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from benchmarks.harness import (
    Jobs,
    JsonFile,
    Report,
    Seed,
    Sheet,
    about,
    in_processes,
    nearest,
    one_of,
    publish,
    run,
)
from benchmarks.simulation.virtual_cluster import POLICIES, Cluster, Scale


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's figures. Times in seconds, shares from 0 to 1."""

    policy: str
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
    seconds: float
    """Real time of the run."""


class SimulationReport(Report, frozen=True, kw_only=True):
    seed: int
    scale: Scale
    results: list[Result]


def simulate(policy: str, scale: Scale, seed: int) -> Result:
    """One policy's run."""
    began = time.perf_counter()
    cluster = Cluster(scale, seed, POLICIES[policy])
    gc.disable()  # a million sessions need not be looked through again and again
    try:
        measured = cluster.run()
    finally:
        gc.enable()
    decided = cluster.policy.decided
    first_token = measured.first_token
    return Result(
        policy=policy,
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
        seconds=time.perf_counter() - began,
    )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def parts(report: SimulationReport) -> list[Sheet | str]:
    rows = [
        (
            *(one.policy, f"{one.load:.1%}", f"{one.imbalance:.2%}", f"{one.imbalance_at_a_moment:.1%}"),
            f"{one.sticky_hits:.2%}",
            f"{one.first_token_p50 * 1e3:.0f}/{one.first_token_p99 * 1e3:.0f}",
            f"{one.decision_p50 * 1e6:.0f}/{one.decision_p99 * 1e6:.0f}",
        )
        for one in report.results
    ]
    head = (
        *("policy", "load", "imbalance", "at a moment", "sticky hits"),
        *("first token p50/p99 ms", "decision p50/p99 us"),
    )
    scale = report.scale
    said = (
        f"{scale.groups:,} groups of {scale.slots} places, {scale.sessions:,} sessions of {scale.tenants:,} tenants "
        f"(Zipf, exponent {scale.skew:g}), {report.results[0].requests:,} requests, {scale.schedulers} schedulers, "
        f"{scale.failures} failures, seed {report.seed}."
    )
    return [Sheet(head, rows), said]


def main(
    groups: Annotated[int, typer.Option(help="Rings.", min=1)] = 1000,
    sessions: Annotated[int, typer.Option(help="Sessions that come up in all.", min=1)] = 1_000_000,
    requests: Annotated[
        int, typer.Option(help="Requests in all; at least as many as sessions.", min=1)
    ] = 2_000_000,
    schedulers: Annotated[
        int, typer.Option(help="Schedulers side by side, each with its own view.", min=1)
    ] = 2,
    slots: Annotated[int, typer.Option(help="Sequences that a ring computes at once.", min=1)] = 32,
    load: Annotated[
        float, typer.Option(help="Share of all places that is asked for.", min=0.01, max=2.0)
    ] = 0.7,
    skew: Annotated[
        float, typer.Option(help="Zipf exponent of sessions and tenants; 0: all alike.", min=0.0, max=0.95)
    ] = 0.5,
    failures: Annotated[int, typer.Option(help="Rings that fail on the way.", min=0)] = 20,
    policy: Annotated[
        list[str] | None, typer.Option(help=f"Only this one of: {', '.join(POLICIES)}. May be repeated.")
    ] = None,
    jobs: Jobs = 1,
    seed: Seed = 0,
    json: JsonFile = None,
) -> None:
    """Imbalance, sticky hits and decision times of placement, against other policies."""
    names = one_of("--policy", policy or POLICIES, POLICIES)
    if requests < sessions:
        raise typer.BadParameter(
            f"{requests} requests are fewer than {sessions} sessions; each needs one at least."
        )
    scale = Scale(
        groups=groups,
        sessions=sessions,
        requests=requests,
        schedulers=schedulers,
        slots=slots,
        load=load,
        skew=skew,
        failures=failures,
    )
    results = in_processes(simulate, [(name, scale, seed) for name in names], jobs)
    report = SimulationReport(**about(), seed=seed, scale=scale, results=results)
    publish(report, *parts(report), json=json)


if __name__ == "__main__":
    run(main)
