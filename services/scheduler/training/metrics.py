"""Prometheus metrics of fine-tuning jobs, as the scheduler that decides knows them."""

from prometheus_client import CollectorRegistry, Gauge


class TrainingMetrics:
    """One object per service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._jobs = Gauge(
            "ryzanstein_training_jobs",
            "Fine-tuning jobs whose files are checked and that are not over, by whether a host has them; reported by "
            "the scheduler that decides.",
            ["state"],
            registry=registry,
        )

    def jobs_are(self, waiting: int, running: int) -> None:
        self._jobs.labels("waiting").set(waiting)
        self._jobs.labels("running").set(running)
