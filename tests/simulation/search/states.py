"""The states of requests, batches, jobs, groups and models, and which follow which: as the services' code and its
diagrams have them. A test holds them against the code's own types, so that a new state is seen here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

NEW = ""


@dataclass(frozen=True)
class Machine:
    states: str  # module and name of the Literal type of its states
    # From each state, those that may follow. What is not kept any more has no state: nothing follows.
    transitions: Mapping[str, tuple[str, ...]]

    def all_states(self) -> set[str]:
        return {state for state in (*self.transitions, *sum(self.transitions.values(), ())) if state}


MACHINES: dict[str, Machine] = {
    # services/gateway/lifecycle/generation.py, of each gateway that reads it
    "request": Machine(
        "services.gateway.lifecycle.generation:State",
        {
            NEW: ("received", "queued"),  # `queued`: it is followed
            "received": ("queued", "dispatched", "running", "finished", "recovering", "failed", "cancelled"),
            "queued": ("dispatched", "running", "finished", "recovering", "failed", "cancelled"),
            "dispatched": ("running", "finished", "recovering", "queued", "failed", "cancelled"),
            "running": ("finished", "recovering", "queued", "failed", "cancelled"),
            "recovering": ("queued", "dispatched", "running", "finished", "failed", "cancelled"),
        },
    ),
    # services/gateway/batches/states.py
    "batch": Machine(
        "shared.messages.batches:BatchStatus",
        {
            NEW: ("validating",),
            "validating": ("in_progress", "failed", "cancelling", "finalizing"),
            "in_progress": ("finalizing", "cancelling"),
            "cancelling": ("cancelled", "failed"),
            "finalizing": ("completed", "expired", "failed"),
        },
    ),
    # services/gateway/training/states.py, services/executor/supervisor/trainings/job_changes.py
    "job": Machine(
        "shared.messages.training:TrainingStatus",
        {
            NEW: ("validating_files",),
            "validating_files": ("queued", "paused", "failed", "cancelled"),
            "queued": ("running", "paused", "failed", "cancelled"),
            "running": ("succeeded", "paused", "failed", "cancelled"),
            "paused": ("queued", "failed", "cancelled"),
        },
    ),
    # services/health_monitor/detector.py
    "group": Machine(
        "shared.messages.cluster:GroupStatus",
        {
            NEW: ("starting", "ready", "busy", "hung", "draining"),
            "starting": ("ready", "busy", "hung", "draining", "gone"),
            "ready": ("busy", "hung", "draining", "gone", "starting"),  # its next ring
            "busy": ("ready", "hung", "draining", "gone", "starting"),
            "hung": ("ready", "busy", "draining", "gone", "starting"),
            "draining": ("gone",),
            "gone": ("starting", "ready", "busy"),  # it comes back under its name
        },
    ),
    # shared/model_status.py, as a host says it of a model that no group of it serves yet or any more
    "model": Machine(
        "shared.messages.registry:HostModelState",
        {
            NEW: ("downloading", "loading", "stored"),
            "downloading": ("loading", "failed", "stored"),
            "loading": ("sleeping", "failed", "stored"),
            "sleeping": ("loading", "stored"),
            "failed": ("loading", "downloading", "stored"),
            "stored": ("loading", "downloading", "sleeping"),
        },
    ),
}
