"""Settings of simulated services, and the pace of what ticks in them.

A simulated hour has to cost seconds, and an idle deployment is beats, leases and looks at the clock. They come `SLOWER`
times as rarely here, or as a scenario says, and what waits for them waits as much longer, so that each ratio is
production's (`RATIOS`, held by a test). What a client waits for (dispatch, suspicion) keeps production's seconds.
"""

import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

SLOWER = 5.0  # times as long as in production, unless a scenario says otherwise

COMMON: dict[str, Any] = {
    "host": "127.0.0.1",
    "ops_port": 9000,  # each is on a host of its own
    "metrics_aliases": False,  # nobody scrapes them
    "log_level": "warning",
    "nats_replicas": 0,
}
BY_ROLE: dict[str, dict[str, Any]] = {
    "gateway": {
        "port": 8000,
        "allowed_hosts": "*",  # clients address it by its name in the world
        "grpc_port": None,  # its server is C threads; its session is WebSocket's
        "drain_timeout": 20.0,
        "stall_timeout": 10.0,
    },
    "executor": {
        "engine": "stub",
        "stub_step_ms": 20.0,
        "stub_us_per_token": 50.0,
        "stub_blocks": 4096,
        "drain_grace": 10.0,
        "host_memory": 16 << 30,  # not the machine's own
        "threads": 1,
        "max_adapters": 8,
        "dump_keep": 0,  # nobody reads them
        "trains": 1,
        "training_state_interval": 60.0,
    },
}
# Of an executor whose engine schedules for itself, beside that: the same model, and what such a group does not refuse.
ENGINES: dict[str, Any] = {
    "model": "simulated/stub",
    "served_model_name": "stub",
    "threads": 0,
    "max_adapters": 0,
    "trains": 0,
}

# Production's seconds of what comes as many times as rarely; under no role what all have.
SLOWED: dict[str, dict[str, float]] = {
    "": {"beat_interval": 1.0},
    "scheduler": {"model_lease": 4.0, "ack_wait": 2.0},
    "health-monitor": {"hung_after": 2.5, "gone_after": 4.0, "forget_after": 60.0, "load_interval": 1.0},
    "executor": {"hung_after": 3.0},
}


def of(role: str, slower: float = SLOWER, /, **changes: Any) -> dict[str, Any]:
    """What a simulated service of that kind is given, with `changes`."""
    if role == "broker":
        return changes
    slowed = {name: seconds * slower for name, seconds in (SLOWED[""] | SLOWED.get(role, {})).items()}
    engine = ENGINES if changes.get("engine", "stub") != "stub" else {}
    return COMMON | slowed | BY_ROLE.get(role, {}) | engine | changes


# Role, setting, and the setting of which it stays as many times as in production.
RATIOS = (
    ("health-monitor", "gone_after", "beat_interval"),
    ("health-monitor", "hung_after", "beat_interval"),
    ("health-monitor", "forget_after", "beat_interval"),
    ("health-monitor", "load_interval", "beat_interval"),
    ("scheduler", "model_lease", "beat_interval"),
    ("scheduler", "ack_wait", "beat_interval"),
    ("executor", "hung_after", "beat_interval"),
)


class Pace(NamedTuple):
    """A constant of a module: how often it looks."""

    module: str
    name: str
    share: float  # in simulations: seconds, for each time that they are slower
    why: str


PACES = (
    Pace("shared.nats.streams", "HEARTBEAT", 9.0, "says that a watch's consumer is there"),
    Pace("services.health_monitor.service", "TICK", 0.5, "looks for silence, which takes 4 beats"),
    Pace("services.health_monitor.service", "GATHER", 0.2, "gathers beats"),
    Pace("services.health_monitor.detector", "STALL", 1.0, "a monitor that did not tick blames nobody"),
    Pace("services.health_monitor.registry", "CONFIRM_INTERVAL", 4.0, "confirms what beats confirm"),
    Pace("services.health_monitor.metrics", "INTERVAL", 720.0, "figures of streams that nobody scrapes"),
    Pace("services.gateway.lifecycle.generations", "SWEEP_INTERVAL", 0.4, "looks for time-outs of 10 s or more"),
    Pace("services.gateway.lifecycle.generations", "IDLE_MARGIN", 10.0, "a beat's load may be older"),
    Pace("services.gateway.core.catalog", "STALE", 15.0, "beats that a record has missed"),
    Pace("services.gateway.lifecycle.request_tracker", "SWEEP_INTERVAL", 0.4, "looks for streams left for 5 s"),
    Pace("services.gateway.jobs.runners", "TICK", 1.0, "is woken by new jobs; looks for lost ones"),
    Pace("services.gateway.core.cold_starts", "INTERVAL", 1.0, "is woken by requests; says it again"),
    Pace("services.gateway.ratelimit.limiter", "TELL", 0.2, "says what is in use, where it has changed"),
    Pace("services.gateway.ratelimit.shared_windows", "SWEEP", 0.4, "gives back what is left of a minute"),
    Pace("services.scheduler.intake", "LOOK", 0.2, "touches what it holds, within `ack_wait`"),
    Pace("services.scheduler.models.controller", "TICK", 1.0, "is woken by changes"),
    Pace("services.scheduler.models.demand", "KEPT", 5.0, "what is said at each of these ticks"),
    Pace("services.scheduler.models.placement", "REPEAT", 10.0, "hosts show by their beats what they do"),
    Pace("services.scheduler.training.placement", "SILENT_AFTER", 20.0, "the same of trainings"),
    Pace("tests.simulation.broker.jetstream", "EXPIRY", 1.0, "deletes what has lived for a minute or more"),
)


def constants() -> Iterator[tuple[Pace, Any]]:
    """Each with its module."""
    for pace in PACES:
        yield pace, importlib.import_module(pace.module)


def apply_paces(slower: float) -> None:
    """In a process that does nothing but simulate. Idempotent."""
    for pace, module in constants():
        if not hasattr(module, pace.name):
            raise AttributeError(f"{pace.module} has no {pace.name}: correct `PACES`")
        setattr(module, pace.name, pace.share * slower)
