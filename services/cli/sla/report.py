"""What a report says, and whether its targets are met. The shape of `ryzanstein sla --format json`; scripts rely on it.

Shares are between 0 and 1, times in seconds, moments in unix seconds; null: not known, or there was nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from services.cli.sla.intervals import Interval, merged, repairs, seconds_of
from services.cli.sla.latencies import Percentiles

Reason = Literal["silent", "failing"]
Indicator = Literal[
    "availability", "error_rate", "mttr", "first_token_p95", "between_tokens_p95", "end_to_end_p95"
]


class Requests(msgspec.Struct, frozen=True):
    """How requests ended. `completed` and `failed` are what rates are of."""

    completed: int = 0
    failed: int = 0
    """By a fault of ours: 5xx, an error within a stream, no end at all."""
    refused: int = 0
    """What the client must change, and limits: 4xx. Counted by Prometheus alone."""
    cancelled: int = 0
    """By their clients."""
    batch_lines: int = 0
    """Of batches, whose times and errors are no part of the rest; counted by the journal alone."""

    @property
    def error_rate(self) -> float | None:
        judged = self.completed + self.failed
        return self.failed / judged if judged else None


class Tokens(msgspec.Struct, frozen=True):
    prompt: int = 0
    cached: int = 0
    """Of the prompts' tokens, those found in the KV cache."""
    output: int = 0


class Outage(msgspec.Struct, frozen=True):
    begin: float
    end: float
    reasons: list[Reason]
    ongoing: bool
    """Whether it had not ended when the recording did."""


class Failovers(msgspec.Struct, frozen=True):
    """Generations that went on in another ring, or in a ring's next life; of the journal alone."""

    count: int = 0
    interruption: Percentiles = Percentiles(0)
    """From the last tokens before to the first behind it."""


class Scope(msgspec.Struct, frozen=True):
    """All models, or one of them."""

    model: str
    """Empty: all."""
    requests: Requests
    error_rate: float | None
    availability: float | None
    """Share of the covered time in which there was no outage."""
    downtime: float
    outages: list[Outage]
    """Of the journal alone."""
    repaired: int
    mttr: float | None
    """Mean time to recovery: of the journal over outages whose beginning and end are both covered, of Prometheus the
    downtime for each recovery; null: there was none."""
    first_token: Percentiles
    between_tokens: Percentiles
    end_to_end: Percentiles
    tokens: Tokens
    failovers: Failovers = Failovers()


class Verdict(msgspec.Struct, frozen=True):
    """An indicator against its target, in the worst of the scopes that know it."""

    indicator: Indicator
    target: float
    """At least so much availability; at most so much of the others."""
    actual: float | None
    model: str
    """The worst scope's; empty: all models together."""
    met: bool
    """False too where the source tells nothing of it: what is not shown is not met."""


class Report(msgspec.Struct, frozen=True):
    source: str
    begin: float
    """Of the period that was asked for."""
    end: float
    covered: list[tuple[float, float]]
    """The parts of it that the source knows."""
    scopes: list[Scope]
    """All models together, then each."""
    verdicts: list[Verdict]
    notes: list[str]
    """What a reader must know to judge the figures."""

    @property
    def met(self) -> bool:
        return all(verdict.met for verdict in self.verdicts)


class Downtime(msgspec.Struct, frozen=True):
    """Outages and what follows from them."""

    availability: float | None
    seconds: float
    outages: list[Outage]
    repaired: int
    mttr: float | None


def scope_of(
    model: str,
    requests: Requests,
    causes: Iterable[tuple[Reason, Interval]],
    covered: Sequence[Interval],
    *,
    first_token: Percentiles,
    between_tokens: Percentiles,
    end_to_end: Percentiles,
    tokens: Tokens,
    failovers: Failovers = Failovers(),  # noqa: B008  # frozen
) -> Scope:
    """With what follows from `requests` and from `causes` of downtime."""
    down = downtime_of(causes, covered)
    return Scope(
        model=model,
        requests=requests,
        error_rate=requests.error_rate,
        availability=down.availability,
        downtime=down.seconds,
        outages=down.outages,
        repaired=down.repaired,
        mttr=down.mttr,
        first_token=first_token,
        between_tokens=between_tokens,
        end_to_end=end_to_end,
        tokens=tokens,
        failovers=failovers,
    )


def downtime_of(causes: Iterable[tuple[Reason, Interval]], covered: Sequence[Interval]) -> Downtime:
    """Outages of one scope: causes that overlap are one outage. What is not covered is neither up nor down."""
    causes = [
        (reason, Interval(max(one.begin, edge.begin), min(one.end, edge.end)))
        for reason, one in causes
        for edge in covered
        if one.begin < edge.end and edge.begin < one.end
    ]
    union = merged(interval for _, interval in causes)
    last = max((edge.end for edge in covered), default=0.0)
    outages = [
        Outage(
            whole.begin,
            whole.end,
            sorted({reason for reason, one in causes if one.begin < whole.end and whole.begin < one.end}),
            whole.end >= last,
        )
        for whole in union
    ]
    known, down = seconds_of(covered), seconds_of(union)
    repaired = repairs(union, covered)
    return Downtime(1 - down / known if known else None, down, outages, repaired.number, repaired.mean)


def judge(targets: Mapping[Indicator, float], scopes: Sequence[Scope]) -> list[Verdict]:
    """Each target against the worst scope that knows its indicator: a model that fails must not vanish among
    others that are asked for more often."""
    return [_verdict(indicator, target, scopes) for indicator, target in targets.items()]


def _verdict(indicator: Indicator, target: float, scopes: Sequence[Scope]) -> Verdict:
    if indicator == "mttr":
        # Nothing to repair is repaired at once; an outage that goes on has not been repaired so far.
        known = [(_repair_time(scope), scope.model) for scope in scopes]
        worst, model = max(known, default=(0.0, ""))
        return Verdict(indicator, target, worst, model, worst <= target)
    values = [(value, scope.model) for scope in scopes if (value := _value(indicator, scope)) is not None]
    if not values:
        return Verdict(indicator, target, None, "", False)
    if indicator == "availability":
        least, model = min(values)
        return Verdict(indicator, target, least, model, least >= target)
    most, model = max(values)
    return Verdict(indicator, target, most, model, most <= target)


def _repair_time(scope: Scope) -> float:
    going_on = (outage.end - outage.begin for outage in scope.outages if outage.ongoing)
    return max((scope.mttr or 0.0, *going_on))


def _value(indicator: Indicator, scope: Scope) -> float | None:
    if indicator == "availability":
        return scope.availability
    if indicator == "error_rate":
        return scope.error_rate
    found: Percentiles = getattr(scope, indicator.removesuffix("_p95"))
    return found.p95.value if found.p95 is not None else None
