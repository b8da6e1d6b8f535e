"""What the gateway tells Prometheus. All names begin with `ryzanstein_gateway_`."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class ModelMetrics:
    """The metrics of one model, their labels resolved once."""

    def __init__(self, metrics: "GatewayMetrics", model: str) -> None:
        self.first_token = metrics.first_token.labels(model)
        self.between_tokens = metrics.between_tokens.labels(model)
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.cached_tokens = metrics.cached_tokens.labels(model)
        self.output_tokens = metrics.output_tokens.labels(model)


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
            buckets=_LATENCY,
            registry=registry,
        )
        self.first_token = Histogram(
            name("first_token_seconds"),
            "From the request's body to its first token, batch jobs left out.",
            ["model"],
            buckets=_LATENCY,
            registry=registry,
        )
        self.between_tokens = Histogram(
            name("between_tokens_seconds"),
            "Between two arrivals of tokens of one choice.",
            ["model"],
            buckets=_GAP,
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
            name("recoveries"), "Requests handed in again after a loss.", registry=registry
        )
        self.cancelled = Counter(
            name("cancelled"), "Generations that nobody wanted any more.", registry=registry
        )
        self.followed = Counter(
            name("generations_followed"), "Generations of other gateways read here.", registry=registry
        )
        self.adopted = Counter(
            name("generations_adopted"), "Generations taken over from lost gateways.", registry=registry
        )
        self.attached = Counter(
            name("attached"),
            "Readings of a generation by its id or its idempotency key.",
            ["how"],
            registry=registry,
        )
        self._by_model: dict[str, ModelMetrics] = {}

    def of_model(self, model: str) -> ModelMetrics:
        known = self._by_model.get(model)
        if known is None:
            known = self._by_model[model] = ModelMetrics(self, model)
        return known
