"""Prometheus metrics of the models that come and go. What the cluster does is told by who holds the lease."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.scheduler.models.placement import Command
from services.scheduler.models.plans import REASONS
from shared.messages import LoadModel
from shared.service.endpoints import begin_at_zero

_PREFIX = "ryzanstein_models"


class ModelLifecycleMetrics:
    """One object per service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, namespace=_PREFIX, registry=registry)
        gauge = partial(Gauge, namespace=_PREFIX, registry=registry)
        self.loads = counter("loads", "Load commands sent to hosts, by reason.", ["reason"])
        self.unloads = counter("unloads", "Unload commands sent to hosts, by reason.", ["reason"])
        self.requests = counter(
            "requests", "Requests for models of the registry: a group served it (hit), or none did (cold).", ["what"]
        )
        self.refused = counter("refused_commands", "Commands that hosts refused or did not answer.")
        self.decides = gauge("deciding", "1 for the scheduler that decides which host loads what.")
        self.unplaced = gauge(
            "unplaced", "Requested models that no host can take; reported by the scheduler that decides."
        )
        self.adapters = gauge("adapters", "LoRA adapters that are registered; reported by the scheduler that decides.")
        self.adapters_wanted = gauge(
            "adapters_wanted",
            "LoRA adapters that are declared and that no host has read yet; reported by the scheduler that decides.",
        )
        begin_at_zero(self.loads, LOADS)
        begin_at_zero(self.unloads, [reason for reason in REASONS if reason not in LOADS])
        begin_at_zero(self.requests, ("hit", "cold"))

    def adapters_are(self, registered: int, wanted: int) -> None:
        self.adapters.set(registered)
        self.adapters_wanted.set(wanted)

    def on_command(self, command: Command) -> None:
        """A host has taken the command."""
        if not command.repeated:
            counter = self.loads if isinstance(command.command, LoadModel) else self.unloads
            counter.labels(command.reason).inc()


LOADS = ("least", "demand", "asked", "replicas")  # reasons of loads; the others are of unloads
