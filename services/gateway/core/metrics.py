"""What the gateway tells Prometheus. All names begin with `ryzanstein_gateway_`."""

from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from shared.errors import RyzansteinError
from shared.limits import LIMITS, limit_of
from shared.messages import RING_CAUSES
from shared.service.endpoints import LATENCY, MODEL, Alias, Aliases, QuickHistogram, QuickHistograms, begin_at_zero

PREFIX = "ryzanstein_gateway"
# Why a choice ended: its text was at its end, it was as long as it may be, its client went, it failed.
REASONS = ("stop", "length", "abort", "error")
WAYS = ("id", "idempotency", "websocket", "grpc")  # how a generation is found that is read once more
# By port, why a connection is ended: there are too many, its TLS handshake failed, its head is too slow or too large,
# or no HTTP; it does not read, asks for too much, breaks HTTP/2, or was never let in.
REFUSALS = {
    "http": ("full", "handshake", "slow", "large", "invalid", "unread", "incomplete"),
    "grpc": ("full", "handshake", "unread", "incomplete", "calm", "protocol", "no_key"),
}
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_DELIVERY = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0)


class ModelMetrics:
    """The metrics of one model, their labels resolved once."""

    def __init__(self, metrics: "GatewayMetrics", model: str) -> None:
        self.first_token = metrics.first_token.labels(model)
        self.between_tokens = metrics.between_tokens.labels(model)
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.cached_tokens = metrics.cached_tokens.labels(model)
        self.sparse_tokens = metrics.sparse_tokens.labels(model)
        self.output_tokens = metrics.output_tokens.labels(model)
        self.delivery = metrics.delivery.labels(model)
        self.generation = metrics.generation.labels(model)
        self._ends = {reason: metrics.ends.labels(model, reason) for reason in REASONS}

    def ended(self, finish: str, *, failed: bool) -> None:
        """A choice has ended, with this finish reason or with none. Counted as vLLM does; a call of a tool is an end
        that the model has chosen."""
        if finish:
            self._ends["length" if finish == "length" else "stop"].inc()
        else:
            self._ends["error" if failed else "abort"].inc()


class GatewayMetrics:
    """Registered on the service's own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, namespace=PREFIX, registry=registry)
        gauge = partial(Gauge, namespace=PREFIX, registry=registry)

        def histograms(name: str, about: str, bounds: Sequence[float] = LATENCY) -> QuickHistograms:
            return QuickHistograms(f"{PREFIX}_{name}", about, ["model"], bounds, registry)

        self._requests = counter("requests", "Requests answered.", ["route", "model", "status"])
        self._refusals = counter("limit_refusals", "Requests refused by a limit of docs/security.md.", ["limit"])
        begin_at_zero(self._refusals, [one.name for one in LIMITS if one.holder in ("tenant", "gateway")])
        self._duration = QuickHistograms(
            f"{PREFIX}_request_seconds", "From the request's head to its last byte.", ["route"], LATENCY, registry
        )
        self._answered: dict[tuple[str, str, int], tuple[Counter, QuickHistogram]] = {}
        self.first_token = histograms(
            "first_token_seconds", "Time to first token, from the request's body on; without batch jobs."
        )
        self.between_tokens = histograms(
            "between_tokens_seconds", "Time between two arrivals of tokens of one choice.", _GAP
        )
        self.delivery = histograms(
            "delivery_seconds",
            "Time from the arrival of a stream's tokens to their write to the connection.",
            _DELIVERY,
        )
        self.generation = histograms(
            "generation_seconds", "Time from the request's body to the last token of its last choice."
        )
        self.ends = counter(
            "generations",
            "Choices that have ended: stop, length, abort (the client disconnected), error.",
            ["model", "reason"],
        )
        self.journal_lag = gauge(
            "journal_lag_seconds",
            "Longest time in the last 10 s that the journal took, or is taking, to store a record.",
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens.", ["model"])
        self.cached_tokens = counter("cached_tokens", "Prompt tokens found in the KV cache.", ["model"])
        self.sparse_tokens = counter(
            "sparse_tokens", "Tokens that have not read everything before them (sparse attention).", ["model"]
        )
        self.output_tokens = counter("output_tokens", "Output tokens.", ["model"])
        self.in_flight = gauge("generations_in_flight", "Unfinished generations.")
        self.replays = counter("journal_replays", "Reads of the journal.")
        self.recoveries = counter("recoveries", "Requests resubmitted after their group was lost.")
        self.suspected = counter(
            "suspected", "Requests resubmitted to run in steps of their own, by how their ring was lost.", ["cause"]
        )
        begin_at_zero(self.suspected, RING_CAUSES[1:])
        self.cancelled = counter("cancelled", "Generations cancelled because no client reads them.")
        self.followed = counter("generations_followed", "Generations of other gateways read here.")
        self.adopted = counter("generations_adopted", "Generations taken over from lost gateways.")
        self.attached = counter("attached", "Attachments to a generation by its id or idempotency key.", ["how"])
        begin_at_zero(self.attached, (*WAYS, *(f"{way}_resumed" for way in WAYS)))
        self.connections = gauge(
            "connections",
            "Open connections by port: http, grpc; handshake: those of both still in their TLS handshake.",
            ["port"],
        )
        self.owed_bytes = gauge(
            "owed_bytes",
            "Bytes of answers that clients have not read and the gateway holds, by port: http, grpc.",
            ["port"],
        )
        self.arriving_bytes = gauge("arriving_bytes", "Bytes of incomplete requests, by port: http, grpc.", ["port"])
        self.connections_refused = counter(
            "connections_refused",
            "Connections closed and requests refused by limits on connections.",
            ["port", "reason"],
        )
        for port, reasons in REFUSALS.items():
            for reason in reasons:
                self.connections_refused.labels(port, reason)
        self.held = gauge(
            "held_requests",
            "Requests held in the gateway for a model that was never loaded; not queued yet.",
            ["model"],
        )
        self._by_model: dict[str, ModelMetrics] = {}

    def answered(self, route: str, model: str, status: int, seconds: float, error: BaseException | None = None) -> None:
        """A request is over; `seconds` from its head to the last byte of its answer. `error`: what it has ended with.
        All but those are few."""
        if isinstance(error, RyzansteinError) and (limit := limit_of(error.message)) is not None:
            self._refusals.labels(limit.name).inc()
        known = self._answered.get((route, model, status))
        if known is None:
            requests = self._requests.labels(route, model, status)
            known = self._answered[route, model, status] = requests, self._duration.labels(route)
        requests, duration = known
        requests.inc()
        duration.observe(seconds)

    def connection_refused(self, port: str, reason: str) -> None:
        """`port` and `reason` are of `REFUSALS`."""
        self.connections_refused.labels(port, reason).inc()

    def watch_connections(self, count: Callable[[str], int], held: Callable[[str, str], int]) -> None:
        """Shows at each scrape how many there are: `count` of http, of grpc, and of those in a handshake; and how many
        bytes are `held` for those of http and of grpc, "owed" or "arriving"."""
        for kind in ("http", "grpc", "handshake"):
            self.connections.labels(kind).set_function(partial(count, kind))
        for port in ("http", "grpc"):
            self.owed_bytes.labels(port).set_function(partial(held, port, "owed"))
            self.arriving_bytes.labels(port).set_function(partial(held, port, "arriving"))

    def of_model(self, model: str) -> ModelMetrics:
        known = self._by_model.get(model)
        if known is None:
            known = self._by_model[model] = ModelMetrics(self, model)
        return known


def vllm_aliases(metrics: GatewayMetrics) -> Aliases:
    """What autoscalers and dashboards made for vLLM ask a server for, and no engine of ours sees."""
    reasons = {**MODEL, "reason": "finished_reason"}
    gaps = metrics.between_tokens, f"{PREFIX}_between_tokens_seconds", MODEL
    return Aliases(
        [
            Alias("vllm:prompt_tokens", metrics.prompt_tokens, f"{PREFIX}_prompt_tokens", MODEL),
            Alias("vllm:generation_tokens", metrics.output_tokens, f"{PREFIX}_output_tokens", MODEL),
            Alias("vllm:time_to_first_token_seconds", metrics.first_token, f"{PREFIX}_first_token_seconds", MODEL),
            Alias("vllm:inter_token_latency_seconds", *gaps),
            Alias("vllm:time_per_output_token_seconds", *gaps),  # as it was called until vLLM 0.11
            Alias("vllm:e2e_request_latency_seconds", metrics.generation, f"{PREFIX}_generation_seconds", MODEL),
            Alias("vllm:request_success", metrics.ends, f"{PREFIX}_generations", reasons),
        ]
    )
