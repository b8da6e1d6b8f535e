"""From answers to figures. Pure functions.

**Percentiles** are by nearest rank: the smallest sample that at least that share of the samples does not
exceed. They are taken over the requests that succeeded; those that failed are counted.

**First token** is from the start of a request (see `sse.Client.stream`) to the first event with text.

**Gap** is the time per token after the first. A server may put several tokens into an event, and several
events may arrive in one read; an interval between two arrivals is therefore divided by the tokens that the
later arrival brought, and counts as that many gaps. Which event holds how many tokens is not on the wire,
so the tokens of a request (its usage field) are spread evenly over its events: with one token an event, the
ordinary case, gaps are the plain intervals.

**Pause** is the longest undivided interval of a stream: a server that sends tokens in bundles, or lets streams wait
while it computes prompts, has small gaps and a halting stream.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.harness import median
from benchmarks.serve.workloads import Workload

_BUNDLED = 1.1  # tokens per event above which the report says so
_BUSY = 0.7


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as measured. Times in seconds on one monotonic clock."""

    started: float
    finished: float
    turn: int = 0
    error: str | None = None
    arrivals: Sequence[float] = ()
    deltas: Sequence[int] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def first_token(self) -> float:
        return self.arrivals[0] - self.started

    @property
    def duration(self) -> float:
        return self.finished - self.started


class Spread(msgspec.Struct, frozen=True):
    p50: float
    p99: float


class Turn(msgspec.Struct, frozen=True):
    """Medians over the sessions, for one turn of a conversation."""

    first_token_ms: float
    prompt_tokens: float
    cached_tokens: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one workload. None where no request succeeded."""

    workload: str
    requests: int  # requests of one round
    rounds: int
    errors: int  # failed requests of all rounds
    error_messages: dict[str, int]
    seconds: float
    output_tokens: float
    output_tokens_per_second: float
    requests_per_second: float
    first_token_ms: Spread | None
    gap_ms: Spread | None
    pause_ms: Spread | None
    request_ms: Spread | None
    tokens_per_event: float | None
    turns: list[Turn]  # empty for workloads of one turn
    client_cpu: float  # share of one core that the load client used
    warnings: list[str]


def percentile(values: Sequence[float], quantile: float, weights: Sequence[float] | None = None) -> float:
    """Nearest-rank percentile, 0 < `quantile` <= 1, of at least one value; optionally weighted.

    Raises ValueError if there is no value.
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    if weights is None:
        rank = math.ceil(quantile * len(values) - 1e-9)
        return sorted(values)[max(rank, 1) - 1]
    pairs = sorted(zip(values, weights, strict=True))
    threshold = quantile * math.fsum(weights) * (1 - 1e-12)
    cumulated = 0.0
    for value, weight in pairs:
        cumulated += weight
        if cumulated >= threshold:
            return value
    return pairs[-1][0]


def gaps(sample: Sample) -> tuple[list[float], list[float]]:
    """Seconds per token of each interval between arrivals, and the tokens that each stands for."""
    per_event = sample.output_tokens / max(sum(sample.deltas), 1)
    tokens = [count * per_event for count in sample.deltas[1:]]
    intervals = _intervals(sample)
    return [interval / count for interval, count in zip(intervals, tokens, strict=True)], tokens


def _intervals(sample: Sample) -> list[float]:
    return [later - earlier for earlier, later in zip(sample.arrivals, sample.arrivals[1:], strict=False)]


def summarise(workload: Workload, samples: Sequence[Sample], cpu_seconds: float) -> Summary:
    """The figures of one round. `samples` holds every request, failed ones too; at least one."""
    good = [sample for sample in samples if sample.error is None]
    seconds = max(s.finished for s in samples) - min(s.started for s in samples)
    per_second = 1 / seconds if seconds > 0 else 0.0
    output_tokens = sum(sample.output_tokens for sample in good)
    client_cpu = cpu_seconds * per_second
    messages = Counter(sample.error for sample in samples if sample.error is not None)
    return Summary(
        workload=workload.name,
        requests=len(samples),
        rounds=1,
        errors=len(samples) - len(good),
        error_messages=dict(messages.most_common()),
        seconds=seconds,
        output_tokens=output_tokens,
        output_tokens_per_second=output_tokens * per_second,
        requests_per_second=len(good) * per_second,
        first_token_ms=_spread([sample.first_token for sample in good]),
        gap_ms=_gap_spread(good),
        pause_ms=_spread([max(between) for sample in good if (between := _intervals(sample))]),
        request_ms=_spread([sample.duration for sample in good]),
        tokens_per_event=_tokens_per_event(good),
        turns=_turns(good, workload.turns),
        client_cpu=client_cpu,
        warnings=_warnings(workload, good, client_cpu),
    )


def _spread(seconds: Sequence[float], weights: Sequence[float] | None = None) -> Spread | None:
    if not seconds:
        return None
    return Spread(percentile(seconds, 0.5, weights) * 1e3, percentile(seconds, 0.99, weights) * 1e3)


def _gap_spread(good: Iterable[Sample]) -> Spread | None:
    values: list[float] = []
    weights: list[float] = []
    for sample in good:
        sample_values, sample_weights = gaps(sample)
        values += sample_values
        weights += sample_weights
    return _spread(values, weights)


def _tokens_per_event(good: Sequence[Sample]) -> float | None:
    events = sum(sum(sample.deltas) for sample in good)
    return sum(sample.output_tokens for sample in good) / events if events else None


def _turns(good: Sequence[Sample], turns: int) -> list[Turn]:
    if turns == 1:
        return []
    found = []
    for turn in range(turns):
        at_turn = [sample for sample in good if sample.turn == turn]
        if not at_turn:
            break
        found.append(
            Turn(
                first_token_ms=percentile([s.first_token for s in at_turn], 0.5) * 1e3,
                prompt_tokens=percentile([s.prompt_tokens for s in at_turn], 0.5),
                cached_tokens=percentile([s.cached_tokens for s in at_turn], 0.5),
            )
        )
    return found


def _warnings(workload: Workload, good: Sequence[Sample], client_cpu: float) -> list[str]:
    """What makes the figures less comparable than they look."""
    found = []
    outputs = [s.output_tokens for s in good]
    if wrong := [count for count in outputs if count != workload.output_tokens]:
        found.append(
            f"{len(wrong)} of {len(good)} answers had {_range(wrong)} output tokens instead of"
            f" {workload.output_tokens}: the server does not honour ignore_eos and min_tokens"
        )
    prompts = [s.prompt_tokens for s in good if s.turn == 0]
    if wrong := [count for count in prompts if count != workload.prompt_tokens]:
        found.append(
            f"{len(wrong)} of {len(prompts)} first prompts had {_range(wrong)} tokens instead of"
            f" {workload.prompt_tokens}"
        )
    per_event = _tokens_per_event(good)
    if per_event is not None and per_event > _BUNDLED:
        found.append(
            f"events held {per_event:.1f} tokens on average: gaps are per token, the stream itself paused longer"
        )
    if client_cpu > _BUSY:
        found.append(f"the load client used {client_cpu:.0%} of a core: it may be the bottleneck, use a native one")
    return found


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def median_round(rounds: Sequence[Summary]) -> Summary:
    """One summary of several rounds of the same workload: the median of every figure, each taken by
    itself; errors are summed, warnings are kept once."""
    if len(rounds) == 1:
        return rounds[0]
    messages: Counter[str] = Counter()
    for each in rounds:
        messages.update(each.error_messages)
    middle: Summary = median(rounds)
    return msgspec.structs.replace(
        middle,
        requests=rounds[0].requests,
        rounds=len(rounds),
        errors=sum(each.errors for each in rounds),
        error_messages=dict(messages.most_common()),
        warnings=list(dict.fromkeys(warning for each in rounds for warning in each.warnings)),
    )
