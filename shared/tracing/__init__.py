"""Traces: what one request spends its time on, from the client's header to the ranks. A thin façade.

    client ─traceparent─▶ gateway ─GenerationRequest.traceparent─▶ scheduler ─▶ leader ─StepPlan.traced─▶ ranks
                             │                                        │           │◀─── times (shared memory)
                             └───────────── spans, OTLP over HTTP ────┴───────────┘

Off unless OpenTelemetry's own variables turn it on (`configure`); then `otlp.py`, the only room that imports
OpenTelemetry, is loaded. Whoever traces asks here alone, and gets `NONE`, which records nothing, where tracing is
off or the request is not sampled: what is not recorded is not passed on either, so nothing below asks again.
"""

from shared.tracing.context import TraceContext, from_headers, parse
from shared.tracing.facade import (
    active,
    begin,
    close,
    configure,
    current,
    edge,
    follow,
    ids_of,
    ns_at,
    on,
    stage,
    statistics,
    under,
)
from shared.tracing.spans import NONE, Attributes, Kind, Recorder, Span, Statistics, Value

__all__ = [
    "NONE",
    "Attributes",
    "Kind",
    "Recorder",
    "Span",
    "Statistics",
    "TraceContext",
    "Value",
    "active",
    "begin",
    "close",
    "configure",
    "current",
    "edge",
    "follow",
    "from_headers",
    "ids_of",
    "ns_at",
    "on",
    "parse",
    "stage",
    "statistics",
    "under",
]
