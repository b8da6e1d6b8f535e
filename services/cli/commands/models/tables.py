"""Models of a running stack, as `ryzanstein models` shows them: to people, and to programs (`--json`)."""

import asyncio
from typing import Any

import msgspec

from services.cli.cluster_models import ClusterModels, ModelsSnapshot, with_models
from services.cli.declarations import declared_adapters
from services.cli.ui import console, megabytes, print_columns, print_json, say
from shared import sparse_attention
from shared.config import CommonSettings
from shared.messages.registry import ModelSpec
from shared.model_status import ModelStatus
from shared.registry import DECLARED


def list_running(settings: CommonSettings, *, as_json: bool, as_yaml: bool = False) -> None:
    """Every model of a running stack; `as_yaml`: the registry alone, as a models file that declares it."""
    found = asyncio.run(with_models(settings, ClusterModels.read))
    if as_yaml:
        from shared.models_file import to_yaml

        print(to_yaml(found.specs.values(), declared_adapters(found)), end="")  # noqa: T201
        return
    print_models(found, as_json=as_json)


def print_models(found: ModelsSnapshot, *, as_json: bool) -> None:
    """Every model of a running stack."""
    every = found.statuses(found.names())
    if as_json:
        print_json({"models": [model_json(found, name, status) for name, status in every.items()]})
        return
    adapters = found.adapter_counts()
    rows = [("model", "status", "replicas", "memory", "adapters", "source")]
    for name, status in every.items():
        spec = found.specs.get(name)
        pin = ", pinned" if spec and spec.pinned else ""
        source = spec.source if spec else "an executor's own"
        aliases = f" (also {', '.join(spec.aliases)})" if spec and spec.aliases else ""
        state = words(msgspec.structs.replace(status, reason=""))
        if (placement := found.placements.get(name)) and placement.waiting and not status.ready:
            state += f", {placement.waiting} waiting"
        rows.append(
            (name + aliases, state + pin, replicas_of(spec, status), memory_of(status), str(adapters[name]), source)
        )
    print_columns(console(), rows, right=(3, 4))
    for name, status in every.items():
        placement = found.placements.get(name)
        reason = status.reason if status.state == "failed" else placement.reason if placement else ""
        if reason:
            say(console(), f"{name}: {reason}", "yellow")


def show_end(found: ModelsSnapshot, model: str, *, as_json: bool) -> None:
    if as_json:
        print_json(told_of(found, model))
        return
    say_status(found, model)
    spec = found.specs.get(model)
    if spec is not None and spec.pinned and (warning := found.pins().warning):
        say(console(), warning, "yellow")


def say_status(found: ModelsSnapshot, model: str) -> None:
    status = found.status(model)
    where = f" on {', '.join(status.hosts)}" if status.ready else ""
    say(console(), f"{model} is {words(status)}{where}.")


def words(status: ModelStatus) -> str:
    """A status for people: `loading 40%, 12 s left`."""
    text: str = status.state
    if status.state in ("loading", "downloading") and status.progress:
        text += f" {status.progress:.0%}"
    if status.state in ("loading", "downloading") and status.expected_seconds:
        text += f", {status.expected_seconds:.0f} s left"
    return f"{text} ({status.reason.rstrip('.')})" if status.reason else text


def memory_of(status: ModelStatus) -> str:
    """Of one replica: weights, and what its KV caches may grow to."""
    if not status.memory:
        return "-"
    if not 0 < status.kv_bytes < status.memory:
        return megabytes(status.memory)
    return f"{megabytes(status.memory - status.kv_bytes)}, KV up to {megabytes(status.kv_bytes)}"


def replicas_of(spec: ModelSpec | None, status: ModelStatus) -> str:
    if spec is None:
        return str(status.replicas)
    wanted = str(spec.most) if spec.least == spec.most else f"{spec.least} to {spec.most}"
    return f"{status.replicas} (of {wanted})"


def declared_fields(spec: ModelSpec) -> dict[str, Any]:
    """What its entry says, without what is as it is by default."""
    usual = ModelSpec("", "")
    fields = {name: getattr(spec, name) for name in DECLARED if getattr(spec, name) != getattr(usual, name)}
    settings = msgspec.structs.asdict(fields.pop("settings", usual.settings))
    if "sparse_attention" in fields:
        fields["sparse_attention"] = sparse_attention.to_argument(spec.sparse_attention)
    return fields | {f"settings.{name}": value for name, value in settings.items() if value is not None}


def model_json(found: ModelsSnapshot, model: str, status: ModelStatus) -> dict[str, Any]:
    """A model as `--json` shows it; scripts rely on it."""
    spec = found.specs.get(model)
    fields: dict[str, Any] = {"name": model, "status": msgspec.to_builtins(status)}
    fields["registry"] = msgspec.to_builtins(spec) if spec else None
    fields["adapters"] = found.adapter_counts()[model]
    placement = found.placements.get(model)
    fields["placement"] = msgspec.to_builtins(placement) if placement else None
    return fields


def told_of(found: ModelsSnapshot, model: str) -> dict[str, Any]:
    return model_json(found, model, found.status(model))
