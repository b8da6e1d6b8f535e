"""What the batches tell Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from shared.service.metrics import begin_at_zero


class BatchMetrics:
    """Registered on the service's own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.running = Gauge("ryzanstein_gateway_batches_running", "Batches run here.", registry=registry)
        self.lines = Counter(
            "ryzanstein_gateway_batch_lines",
            "Lines of batches that have ended.",
            ["result"],
            registry=registry,
        )
        self.retries = Counter(
            "ryzanstein_gateway_batch_line_retries", "Lines of batches tried again.", registry=registry
        )
        self.in_flight = Gauge(
            "ryzanstein_gateway_batch_lines_in_flight", "Lines of batches under way.", registry=registry
        )
        self.taken_over = Counter(
            "ryzanstein_gateway_batches_taken_over",
            "Batches taken over from lost gateways.",
            registry=registry,
        )
        begin_at_zero(self.lines, ("completed", "failed"))
