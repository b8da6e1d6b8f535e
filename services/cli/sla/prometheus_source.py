"""A report from Prometheus."""

import math
from datetime import tzinfo

from services.cli.sla.gauges import Counters, Evidence, Gauges, lacks
from services.cli.sla.http import Prometheus
from services.cli.sla.intervals import Interval
from services.cli.sla.journal_source import Findings, NoData
from services.cli.sla.periods import shown

SMALLEST_STEP = 5.0
"""Seconds: the scrape interval that the project's own configuration sets."""
COUNTED, WATCHED = 2_000, 20_000
"""Samples of a series over the whole period: of counters, of which there are many, and of gauges."""

_ROUTES = (
    r"/v1/(chat/completions|completions|responses|embeddings|stream)"
    r"|/ryzanstein\\.v1\\.InferenceService/(Generate|Chat|ChatSession|Embed)"
)
"""Where generations begin: other requests are no part of the service that the report is about."""
_GATEWAY = "ryzanstein_gateway"
PRESENT = f"{_GATEWAY}_generations_in_flight"
_COUNTERS = {
    "requests": f'{_GATEWAY}_requests_total{{route=~"{_ROUTES}"}}',
    "first_token": f"{_GATEWAY}_first_token_seconds_bucket",
    "between_tokens": f"{_GATEWAY}_between_tokens_seconds_bucket",
    "end_to_end": f'{_GATEWAY}_request_seconds_bucket{{route=~"{_ROUTES}"}}',
    "prompt": f"{_GATEWAY}_prompt_tokens_total",
    "cached": f"{_GATEWAY}_cached_tokens_total",
    "output": f"{_GATEWAY}_output_tokens_total",
}


def _gauges(gateway_job: str) -> dict[str, str]:
    return {
        "scraped": "count(up)",
        "gateways": f'sum(up{{job="{gateway_job}"}})',
        # A monitor that knows no group at all has no series of groups; that it writes records shows that it is there.
        "ready": 'sum(max by (state) (ryzanstein_health_groups{state=~"ready|busy"}))'
        " or 0 * max(ryzanstein_health_writes_total)",
        "ready_of": 'sum by (model) (ryzanstein_executor_kv_blocks{model!=""})',
    }


def steps_of(period: Interval, wanted: float) -> tuple[float, float]:
    """Seconds between samples of counters and of gauges; `wanted`: 0 for as fine as the period allows."""
    counted = wanted or max(SMALLEST_STEP, period.seconds / COUNTED)
    watched = wanted or max(SMALLEST_STEP, period.seconds / WATCHED)
    return _part(period, counted), _part(period, watched)


def _part(period: Interval, step: float) -> float:
    """The largest part of the period that is no longer than `step`: begin and end are samples, too."""
    return period.seconds / math.ceil(period.seconds / step)


def queries(prometheus: Prometheus, period: Interval, wanted: float) -> int:
    """How many questions a report asks."""
    counted, watched = steps_of(period, wanted)
    return len(_COUNTERS) * prometheus.queries(period, counted) + (len(_gauges("")) + 1) * prometheus.queries(
        period, watched
    )


def from_prometheus(
    prometheus: Prometheus, period: Interval, *, step: float, gateway_job: str, zone: tzinfo
) -> Findings:
    """Asks for everything that a report needs. Raises `NoData`, and what `Prometheus.series` raises."""
    counted, watched = steps_of(period, step)
    if not prometheus.series(PRESENT, period, watched):
        raise NoData(
            f"Prometheus at {prometheus.where} has nothing of the gateways (metric {PRESENT}) from "
            f"{shown(period.begin, zone)} to {shown(period.end, zone)}; have it scrape their /metrics, or ask for "
            "a period that it has."
        )
    gauges = Gauges(
        **{name: prometheus.series(query, period, watched) for name, query in _gauges(gateway_job).items()},
        step=watched,
    )
    counters = Counters(
        **{name: prometheus.series(query, period, counted) for name, query in _COUNTERS.items()}, step=counted
    )
    evidence = Evidence(counters, gauges, period)
    scopes = evidence.scopes()
    return Findings(f"Prometheus at {prometheus.where}", evidence.covered, scopes, lacks(gauges, scopes))
