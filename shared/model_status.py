"""What becomes of a model, out of what the registry wants and what groups and hosts say. Pure.

    unloaded ──asked for──▶ downloading ──▶ loading ──▶ loaded ──memory is needed──▶ sleeping ──▶ unloaded
                                 └─────────────┴──▶ failed, with the reason

The same for the gateways' answers and the command line.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from shared.messages import GroupRecord, HostModel, HostRecord, ModelSpec

ModelState = Literal["unloaded", "downloading", "loading", "loaded", "sleeping", "failed"]

# Seconds after an order to load in which it counts as loading, though no host has said so yet.
JUST_ASKED = 15.0


class ModelStatus(msgspec.Struct, frozen=True):
    """Of one model, on all hosts."""

    state: ModelState = "unloaded"
    # Share of the download or of the load that is done, 0 to 1; of the replica that is furthest.
    progress: float = 0.0
    done: int = 0  # bytes of that; 0: not known
    total: int = 0
    replicas: int = 0  # groups that take requests
    # Instances of the executors that serve it, or on their way to; of a failed one, those where it has failed.
    hosts: list[str] = []
    memory: int = 0  # bytes that one replica takes; 0: not known
    reason: str = ""  # why it has failed, or is not loaded, in a sentence
    expected_seconds: float = 0.0  # seconds until the first request could be taken; 0: at once, or not known
    failed_at: float = 0.0  # Unix seconds of the failure; 0: it has not failed
    waiting: int = 0  # requests that wait until it is loaded, in all queues; about, where they are many
    kv_bytes: int = 0  # of `memory`, what its KV caches take once they have been filled; 0: not known

    @property
    def ready(self) -> bool:
        return self.replicas > 0


def statuses(
    models: Mapping[str, ModelSpec | None], groups: Iterable[GroupRecord], hosts: Iterable[HostRecord], now: float
) -> dict[str, ModelStatus]:
    """Of each of `models`, with its entry in the registry if it has one; `now`: unix seconds."""
    by_model: defaultdict[str, list[GroupRecord]] = defaultdict(list)
    for record in groups:
        if record.model in models:
            by_model[record.model].append(record)
    said: defaultdict[str, list[tuple[str, HostModel]]] = defaultdict(list)
    for host in hosts:
        if host.state != "gone":
            for item in host.host.models:
                if item.model in models:
                    said[item.model].append((host.instance, item))
    return {name: _status(spec, by_model[name], said[name], now) for name, spec in models.items()}


def _status(
    spec: ModelSpec | None, groups: list[GroupRecord], said: list[tuple[str, HostModel]], now: float
) -> ModelStatus:
    memory = max((item.memory for _, item in said), default=0)
    memory = max((record.memory for record in groups), default=0) or memory
    serving = [record for record in groups if record.state in ("ready", "busy")]
    if serving:
        hosts = _instances(serving)
        kv_bytes = max((record.kv_bytes for record in groups if record.memory == memory), default=0)
        return ModelStatus("loaded", 1.0, replicas=len(serving), hosts=hosts, memory=memory, kv_bytes=kv_bytes)
    states: defaultdict[str, list[tuple[str, HostModel]]] = defaultdict(list)
    for instance, item in said:
        states[item.state].append((instance, item))
    starting = [record for record in groups if record.state in ("starting", "hung")]
    seconds = min((item.load_seconds for _, item in said if item.load_seconds), default=0.0)
    if starting or states["loading"]:
        return _loading(starting, states["loading"], memory, seconds)
    if states["downloading"]:
        return _on_its_way("downloading", states["downloading"], memory, 0.0)
    asked = spec.action_at if spec is not None and spec.action == "load" else 0.0
    failed = [(instance, item) for instance, item in states["failed"] if item.failed_at >= asked]
    if asked and not failed and now - asked < JUST_ASKED:
        return ModelStatus("loading", memory=memory, expected_seconds=seconds)
    if states["sleeping"]:
        hosts = sorted(instance for instance, _ in states["sleeping"])
        return ModelStatus("sleeping", hosts=hosts, memory=memory, expected_seconds=seconds)
    if failed:
        last = max(failed, key=lambda one: one[1].failed_at)[1]
        hosts = sorted(instance for instance, _ in failed)
        reason = last.error or "It could not be loaded."
        return ModelStatus("failed", hosts=hosts, memory=memory, reason=reason, failed_at=last.failed_at)
    return ModelStatus(memory=memory, reason=_why_unloaded(spec, groups), expected_seconds=seconds)


def _loading(
    starting: list[GroupRecord], said: list[tuple[str, HostModel]], memory: int, seconds: float
) -> ModelStatus:
    """A group tells the share of its weights, its host the bytes: whichever is further."""
    status = _on_its_way("loading", said, memory, seconds)
    progress = max(status.progress, *(record.loaded for record in starting), 0.0)
    hosts = sorted({*status.hosts, *_instances(starting)})
    reason = next((record.message for record in starting if record.message), "")
    return msgspec.structs.replace(
        status, progress=progress, hosts=hosts, reason=reason, expected_seconds=seconds * (1 - progress)
    )


def _on_its_way(
    state: Literal["downloading", "loading"], said: list[tuple[str, HostModel]], memory: int, seconds: float
) -> ModelStatus:
    furthest = max((item for _, item in said), key=_share, default=HostModel("", state))
    progress = _share(furthest)
    return ModelStatus(
        state,
        progress,
        done=furthest.done,
        total=furthest.total,
        hosts=sorted(instance for instance, _ in said),
        memory=memory,
        expected_seconds=seconds * (1 - progress),
    )


def _share(item: HostModel) -> float:
    return min(1.0, item.done / item.total) if item.total else 0.0


def _instances(groups: Iterable[GroupRecord]) -> list[str]:
    return sorted({record.instance or record.group for record in groups})


def _why_unloaded(spec: ModelSpec | None, groups: list[GroupRecord]) -> str:
    if any(record.state == "draining" for record in groups):
        return "Its last group is finishing its requests."
    if spec is not None and spec.action == "unload":
        return "It was unloaded on demand; a request loads it again."
    return ""
