"""What the gateway tells Prometheus. All names begin with `ryzanstein_gateway_`."""

import functools
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.messages import RING_CAUSES
from shared.service.endpoints import LATENCY, MODEL, Alias, Aliases, QuickHistograms, begin_at_zero

REASONS = ("stop", "length", "abort", "error")
"""Why a choice ended: its text was at its end, it was as long as it may be, its client went, it failed."""
WAYS = ("id", "idempotency", "websocket", "grpc")
"""How a generation is found that is read once more."""
REFUSALS = {
    "http": ("full", "handshake", "slow", "large", "invalid"),
    "grpc": ("full", "handshake", "unread", "calm", "protocol", "no_key"),
}
"""By port, why a connection is ended: there are too many, its TLS handshake failed, its head is too slow or too large,
or no HTTP; it does not read, asks for too much, breaks HTTP/2, or was never let in."""
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_DELIVERY = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0)


class ModelMetrics:
    """The metrics of one model, their labels resolved once."""

    def __init__(self, metrics: "GatewayMetrics", model: str) -> None:
        self.first_token = metrics.first_token.labels(model)
        self.between_tokens = metrics.between_tokens.labels(model)
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.cached_tokens = metrics.cached_tokens.labels(model)
        self.output_tokens = metrics.output_tokens.labels(model)
        self.delivery = metrics.delivery.labels(model)
        self.generation = metrics.generation.labels(model)
        self._ends = {reason: metrics.ends.labels(model, reason) for reason in REASONS}

    def ended(self, reason: str) -> None:
        """A choice has ended; `reason` is one of `REASONS`."""
        self._ends[reason].inc()


class GatewayMetrics:
    """Registered on the service's own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def name(rest: str) -> str:
            return f"ryzanstein_gateway_{rest}"

        self.requests = Counter(
            name("requests"), "Requests answered.", ["route", "model", "status"], registry=registry
        )
        self.duration = Histogram(
            name("request_seconds"),
            "From the request's head to its last byte.",
            ["route"],
            buckets=LATENCY,
            registry=registry,
        )
        self.first_token = QuickHistograms(
            name("first_token_seconds"),
            "Time to first token, from the request's body on; without batch jobs.",
            ["model"],
            LATENCY,
            registry,
        )
        self.between_tokens = QuickHistograms(
            name("between_tokens_seconds"),
            "Time between two arrivals of tokens of one choice.",
            ["model"],
            _GAP,
            registry,
        )
        self.delivery = QuickHistograms(
            name("delivery_seconds"),
            "Time from the arrival of a stream's tokens to their write to the connection.",
            ["model"],
            _DELIVERY,
            registry,
        )
        self.generation = QuickHistograms(
            name("generation_seconds"),
            "Time from the request's body to the last token of its last choice.",
            ["model"],
            LATENCY,
            registry,
        )
        self.ends = Counter(
            name("generations"),
            "Choices that have ended: stop, length, abort (the client disconnected), error.",
            ["model", "reason"],
            registry=registry,
        )
        self.journal_lag = Gauge(
            name("journal_lag_seconds"),
            "Longest time in the last 10 s that the journal took, or is taking, to store a record.",
            registry=registry,
        )
        self.prompt_tokens = Counter(name("prompt_tokens"), "Prompt tokens.", ["model"], registry=registry)
        self.cached_tokens = Counter(
            name("cached_tokens"), "Prompt tokens found in the KV cache.", ["model"], registry=registry
        )
        self.output_tokens = Counter(name("output_tokens"), "Output tokens.", ["model"], registry=registry)
        self.in_flight = Gauge(name("generations_in_flight"), "Unfinished generations.", registry=registry)
        self.replays = Counter(name("journal_replays"), "Readings of the journal.", registry=registry)
        self.recoveries = Counter(
            name("recoveries"), "Requests resubmitted after their group was lost.", registry=registry
        )
        self.suspected = Counter(
            name("suspected"),
            "Requests resubmitted to be computed in steps of their own, by what may have made them kill a ring.",
            ["cause"],
            registry=registry,
        )
        begin_at_zero(self.suspected, RING_CAUSES[1:])
        self.cancelled = Counter(
            name("cancelled"), "Generations cancelled because no client reads them.", registry=registry
        )
        self.followed = Counter(
            name("generations_followed"), "Generations of other gateways read here.", registry=registry
        )
        self.adopted = Counter(
            name("generations_adopted"), "Generations taken over from lost gateways.", registry=registry
        )
        self.attached = Counter(
            name("attached"),
            "Attachments to a generation by its id or idempotency key.",
            ["how"],
            registry=registry,
        )
        begin_at_zero(self.attached, (*WAYS, *(f"{way}_resumed" for way in WAYS)))
        self.connections = Gauge(
            name("connections"),
            "Open connections by port: http, grpc; handshake: those of both still in their TLS handshake.",
            ["port"],
            registry=registry,
        )
        self.connections_refused = Counter(
            name("connections_refused"),
            "Connections closed and requests refused by limits on connections.",
            ["port", "reason"],
            registry=registry,
        )
        for port, reasons in REFUSALS.items():
            for reason in reasons:
                self.connections_refused.labels(port, reason)
        self._by_model: dict[str, ModelMetrics] = {}

    def connection_refused(self, port: str, reason: str) -> None:
        """`port` and `reason` are of `REFUSALS`."""
        self.connections_refused.labels(port, reason).inc()

    def watch_connections(self, count: Callable[[str], int]) -> None:
        """Shows at each scrape how many there are: `count` of http, of grpc, and of those in a handshake."""
        for kind in ("http", "grpc", "handshake"):
            self.connections.labels(kind).set_function(functools.partial(count, kind))

    def of_model(self, model: str) -> ModelMetrics:
        known = self._by_model.get(model)
        if known is None:
            known = self._by_model[model] = ModelMetrics(self, model)
        return known


def vllm_aliases(metrics: GatewayMetrics) -> Aliases:
    """What autoscalers and dashboards made for vLLM ask a server for, and no engine of ours sees."""
    prefix = "ryzanstein_gateway"
    reasons = {**MODEL, "reason": "finished_reason"}
    return Aliases(
        [
            Alias("vllm:prompt_tokens", metrics.prompt_tokens, f"{prefix}_prompt_tokens", MODEL),
            Alias("vllm:generation_tokens", metrics.output_tokens, f"{prefix}_output_tokens", MODEL),
            Alias(
                "vllm:time_to_first_token_seconds",
                metrics.first_token,
                f"{prefix}_first_token_seconds",
                MODEL,
            ),
            Alias(
                "vllm:inter_token_latency_seconds",
                metrics.between_tokens,
                f"{prefix}_between_tokens_seconds",
                MODEL,
            ),
            # as it was called until vLLM 0.11
            Alias(
                "vllm:time_per_output_token_seconds",
                metrics.between_tokens,
                f"{prefix}_between_tokens_seconds",
                MODEL,
            ),
            Alias(
                "vllm:e2e_request_latency_seconds", metrics.generation, f"{prefix}_generation_seconds", MODEL
            ),
            Alias("vllm:request_success", metrics.ends, f"{prefix}_generations", reasons),
        ]
    )
