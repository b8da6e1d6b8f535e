"""Whether targets are met. Pure."""

from collections.abc import Mapping, Sequence

from services.cli.sla.latencies import Percentiles
from services.cli.sla.report import Indicator, Scope, Verdict


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
